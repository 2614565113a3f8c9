// Package synth hides how a checkpoint of arbitrary size is made out of nothing.
//
// Storage, schedules and kernels have to be measured at K3's true dimensions by
// people who do not have its 1.56 TB. [Write] writes a directory that is laid out
// as the released checkpoint (spec A and B) and opens with checkpoint.Open: real
// config, index and shards, random weights. The text that such a model produces
// means nothing; its tokens still depend on every weight that a token touches.
//
// The bytes are a function of the [Params] alone: not of the machine, the number
// of workers, or how often the writing was interrupted. A tensor's bytes depend on
// the seed, its name, its type and its shape, so two checkpoints that share a
// layer's dimensions share its weights.
//
// No tokenizer files are written: prompts are given as token ids.
package synth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"deltafin/engine/disk"
)

const (
	configName = "config.json"
	indexName  = "model.safetensors.index.json"
	recordName = "synth.json"
	tempSuffix = ".partial"

	recordLimit = 64 << 10 // bytes of a synth.json that are read

	// generator changes whenever the same Params give other bytes, so that a
	// directory of an older version is not taken for one of this.
	generator = 1
)

// record is synth.json: what a directory holds, or will hold when it is complete.
type record struct {
	Generator int    `json:"generator"`
	Params    Params `json:"params"`
}

// Size returns the exact bytes of all files that Write would write.
func Size(p Params) (int64, error) {
	files, err := plan(p)
	if err != nil {
		return 0, err
	}
	return total(files), nil
}

func total(files []file) int64 {
	var n int64
	for _, f := range files {
		n += f.bytes
	}
	return n
}

// file is one file of a checkpoint directory. Exactly one of content and tensors
// is set.
type file struct {
	name    string
	bytes   int64
	content []byte
	tensors func() ([]byte, []tensor) // header and tensors of a shard
}

// plan lists the files of a checkpoint in the order in which they are published:
// first the record of what is being made, then the shards, then the index, and
// last the config, without which nothing opens the directory.
func plan(p Params) ([]file, error) {
	p, err := p.resolve()
	if err != nil {
		return nil, err
	}
	rec, err := json.MarshalIndent(record{generator, p}, "", "  ")
	if err != nil {
		return nil, err
	}
	text := func(name string, b []byte) file { return file{name: name, bytes: int64(len(b)), content: b} }
	files := []file{text(recordName, append(rec, '\n'))}
	var x index
	for i := range p.shards() {
		f, ts := p.shardFile(i)
		x.add(f.name, ts)
		files = append(files, f)
	}
	return append(files, text(indexName, x.render()), text(configName, p.config())), nil
}

// shardFile describes a shard and lists its tensors. The tensors are not kept: K3 has
// half a million.
func (p Params) shardFile(i int) (file, []tensor) {
	build := func() ([]byte, []tensor) {
		ts := p.shard(i)
		return header(ts), ts
	}
	head, ts := build()
	return file{name: p.shardName(i), bytes: int64(len(head)) + ts[len(ts)-1].end(), tensors: build}, ts
}

// Write writes the checkpoint that p describes into dir, which is made if need be.
//
// Every file appears under its name only when it is complete and on the drive, and
// config.json last: an interrupted directory does not open, and a second Write goes
// on where the first stopped. A directory that is already complete is left as it
// is. A directory with other content is refused, and so is a file system without
// room for what is missing. When ctx is cancelled, unfinished files are removed.
//
// progress, if not nil, is called now and then, by one goroutine at a time, with
// the bytes that are done of all; what an earlier Write left counts as done.
func Write(ctx context.Context, dir string, p Params, progress func(done, total int64)) error {
	w := writer{dir: dir, workers: runtime.GOMAXPROCS(0), progress: progress}
	if err := w.write(ctx, p); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

// Remove removes what Write wrote into dir, complete or not, and dir itself if
// nothing else is in it. It refuses a directory without a synth.json of Write's.
func Remove(dir string) error {
	if err := remove(dir); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

func remove(dir string) error {
	lock, err := disk.LockDir(dir)
	if err != nil {
		return plain(err)
	}
	defer lock.Close()
	rec, err := readRecord(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("has no %s, so it is not known to be a synthetic checkpoint: remove it by hand", recordName)
	}
	if err != nil {
		return err
	}
	p, err := rec.Params.resolve()
	if err != nil {
		return fmt.Errorf("%s: %w: remove the directory by hand", recordName, err)
	}
	names := []string{configName, indexName}
	for i := range p.shards() {
		names = append(names, p.shardName(i))
	}
	names = append(names, recordName) // last: as long as it is there, Remove can be repeated
	for _, name := range names {
		for _, n := range []string{name + tempSuffix, name} {
			if err := os.Remove(filepath.Join(dir, n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	rest, err := os.ReadDir(dir)
	if err != nil || len(rest) > 0 {
		return err
	}
	return os.Remove(dir)
}

// readRecord reads dir's synth.json. The error is fs.ErrNotExist if it has none.
func readRecord(dir string) (record, error) {
	f, err := os.Open(filepath.Join(dir, recordName))
	if err != nil {
		return record{}, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, recordLimit+1))
	if err != nil {
		return record{}, err
	}
	rec, err := parseRecord(b)
	if err != nil {
		return record{}, fmt.Errorf("%s: %w: remove the directory, or give another one", recordName, err)
	}
	return rec, nil
}

func parseRecord(b []byte) (record, error) {
	if len(b) > recordLimit {
		return record{}, fmt.Errorf("is longer than the %d bytes allowed", recordLimit)
	}
	var rec record
	if err := json.Unmarshal(b, &rec); err != nil {
		return record{}, fmt.Errorf("is not a record of a synthetic checkpoint: %w", err)
	}
	if rec.Generator < 1 {
		return record{}, errors.New("is not a record of a synthetic checkpoint: generator is missing")
	}
	return rec, nil
}
