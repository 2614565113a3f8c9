// Package checkpoint hides where and how the bytes of a Kimi K3 model lie on disk.
//
// It reads the released layout where it is (spec A and B): config.json,
// model.safetensors.index.json and the safetensors shards. [Open] reads headers
// only, and checks all of them against the tensors, shapes and types that the
// config implies. Nothing is guessed: a field or tensor that is missing, unknown
// or different from what the engine implements is an error that names it, says
// what was found and expected, and what to do. The vision part is ignored.
//
// Dense tensors (the spine) are found by name with [Checkpoint.Tensor]; a routed
// expert is one run of bytes, [Checkpoint.Expert], whose inner order is
// [Checkpoint.ExpertLayout]. All files are taken as hostile: sizes are bounded by
// the file and the config before memory is spent on them.
package checkpoint

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Checkpoint is an open checkpoint directory. All methods but Close may be used
// from several goroutines at once.
type Checkpoint struct {
	dir   string
	r     *roster
	files []*os.File // as roster.files; nil for a shard without text tensors

	filling bool // experts need not be there
	filler  Filler
}

const (
	configName = "config.json"
	headerBuf  = 64 << 10

	// Unwritten bytes beyond either bound mean an incomplete download. Below them a
	// hole may be a run of zero weights in a file that was copied sparsely.
	holeShare = 16 // one part in so many of the file
	holeLimit = 32 << 20
	holeSteps = 4096 // holes looked at
)

// Open opens a checkpoint directory, reads its config, its index and the header of
// every shard that holds text tensors, and checks the whole roster. It keeps those
// shards open. Every error begins with dir.
func Open(dir string) (*Checkpoint, error) {
	c, err := open(dir, false, nil)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return c, nil
}

func open(dir string, filling bool, f Filler) (_ *Checkpoint, err error) {
	cfg, err := readK3Config(dir)
	if err != nil {
		return nil, err
	}
	c := &Checkpoint{dir: dir, r: newRoster(cfg), filling: filling, filler: f}
	total, err := c.openIndex()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", indexName, err)
	}
	used := c.r.used()
	sizes, err := c.shardSizes(used)
	if err != nil {
		return nil, err
	}

	c.files = make([]*os.File, len(used))
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	data, err := c.r.readShards(used, func(i int) (io.Reader, int64, error) { return c.openShard(i, sizes[i]) })
	if err != nil {
		return nil, err
	}
	if err := checkTotal(total, data, !slices.Contains(used, false)); err != nil {
		return nil, err
	}
	return c, c.checkALog()
}

func readK3Config(dir string) (*Config, error) {
	b, err := readConfig(dir, "a Kimi K3 checkpoint")
	if err != nil {
		return nil, err
	}
	return ParseConfig(b)
}

// readConfig reads the config.json of a directory that should hold what.
func readConfig(dir, what string) ([]byte, error) {
	f, size, err := openRegular(filepath.Join(dir, configName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: is not there: give a directory that holds %s", configName, what)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	defer f.Close()
	if size > configLimit {
		return nil, fmt.Errorf("%s: is %d bytes long, more than the %d allowed", configName, size, configLimit)
	}
	b, err := io.ReadAll(io.LimitReader(f, configLimit+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	return b, nil
}

// ModelType is the model_type that the config.json in dir names, which tells draft models
// apart.
func ModelType(dir string) (string, error) {
	b, err := readConfig(dir, "a model")
	if err != nil {
		return "", fmt.Errorf("%s: %w", dir, err)
	}
	tree, err := configTree(b)
	if err != nil {
		return "", fmt.Errorf("%s: %w", dir, err)
	}
	t, ok := tree["model_type"].(string)
	if !ok {
		return "", fmt.Errorf("%s: %s: names no model_type", dir, configName)
	}
	return t, nil
}

func (c *Checkpoint) openIndex() (total int64, err error) {
	f, size, err := openRegular(filepath.Join(c.dir, indexName))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, errors.New("is not there: fetch it, the shards cannot be used without it")
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if size > indexLimit {
		return 0, fmt.Errorf("is %d bytes long, more than the %d allowed", size, indexLimit)
	}
	return c.r.readIndex(bufio.NewReaderSize(f, headerBuf))
}

// shardSizes finds out at once which shards are absent, so that one run tells the
// whole extent of an incomplete download.
func (c *Checkpoint) shardSizes(used []bool) ([]int64, error) {
	sizes := make([]int64, len(used))
	absent, first, wanted := 0, "", 0
	for i, use := range used {
		if !use {
			continue
		}
		wanted++
		info, err := os.Stat(c.Path(i))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if absent++; absent == 1 {
				first = c.r.files[i]
			}
		case err != nil:
			return nil, fmt.Errorf("%s: %w", c.r.files[i], reason(err))
		default:
			sizes[i] = info.Size()
		}
	}
	if absent > 0 {
		return nil, fmt.Errorf("%s: is not there (%d of %d shards are absent): fetch the absent shards", first, absent, wanted)
	}
	return sizes, nil
}

// openShard opens a shard, sees that it was written to its end, and returns a reader
// of its header.
func (c *Checkpoint) openShard(i int, size int64) (io.Reader, int64, error) {
	f, now, err := openRegular(c.Path(i))
	if err != nil {
		return nil, 0, err
	}
	c.files[i] = f
	if now != size {
		return nil, 0, fmt.Errorf("changed its size from %d to %d bytes while it was opened: wait until the download has ended", size, now)
	}
	if err := c.unfilled(i); err != nil || c.filling {
		return bufio.NewReaderSize(io.NewSectionReader(f, 0, size), headerBuf), size, err
	}
	r, err := headerReader(f, size)
	return r, size, err
}

// headerReader returns a reader of a safetensors file that was written to its end.
func headerReader(f *os.File, size int64) (io.Reader, error) {
	// Holes first: where the header was never written it would only look malformed.
	missing, err := missingBytes(f, size)
	if err != nil {
		return nil, fmt.Errorf("cannot be searched for unwritten parts: %w", err)
	}
	if missing >= holeLimit || missing > 0 && missing >= size/holeShare {
		return nil, fmt.Errorf("has %d of its %d bytes never written: the download is incomplete, fetch the file again", missing, size)
	}
	return bufio.NewReaderSize(io.NewSectionReader(f, 0, size), headerBuf), nil
}

// openRegular opens a file for reading and returns its size. It refuses anything
// else, such as a pipe on which the open would wait for ever.
func openRegular(path string) (*os.File, int64, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, 0, reason(err)
	}
	if !info.Mode().IsRegular() {
		return nil, 0, errors.New("is not a regular file")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, reason(err)
	}
	if info, err = f.Stat(); err != nil {
		f.Close()
		return nil, 0, reason(err)
	}
	return f, info.Size(), nil
}

// reason drops the path from an error whose text will name the file anyway.
func reason(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// checkALog demands that the entries behind the heads are padding. A reader that
// took them for per-channel decays would otherwise never be found out (spec F.1).
func (c *Checkpoint) checkALog() error {
	for _, t := range c.r.dense {
		if !strings.HasSuffix(t.Name, ".A_log") {
			continue
		}
		b := make([]byte, t.Bytes)
		if err := c.Read(t, b); err != nil {
			return err
		}
		for i := range t.Shape[0] {
			v := math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
			switch {
			case i >= c.r.cfg.KDAHeads && v != 0:
				return fmt.Errorf("%s: tensor %s: entry %d is %g, expected 0: only the first %d, one for each head, may be set; fetch the file again", c.r.files[t.File], Prefix+t.Name, i, v, c.r.cfg.KDAHeads)
			case math.IsNaN(float64(v)) || math.IsInf(float64(v), 0):
				return fmt.Errorf("%s: tensor %s: entry %d is %g, expected a finite number: fetch the file again", c.r.files[t.File], Prefix+t.Name, i, v)
			}
		}
	}
	return nil
}

// Config returns the text model's configuration; it is not to be changed.
func (c *Checkpoint) Config() *Config { return c.r.cfg }

// Dir returns the directory that Open was given.
func (c *Checkpoint) Dir() string { return c.dir }

// Files returns how many shards the index names; File and Path take 0..Files()-1.
func (c *Checkpoint) Files() int { return len(c.r.files) }

// Path returns the path of a shard; shards are numbered in the order of their names.
func (c *Checkpoint) Path(file int) string { return filepath.Join(c.dir, c.r.files[file]) }

// File returns a shard's handle for positioned reads, or nil if the shard holds no
// text tensors. The checkpoint keeps it and closes it.
func (c *Checkpoint) File(i int) *os.File { return c.files[i] }

// Tensor finds a dense tensor by its name without Prefix, such as "lm_head.weight".
func (c *Checkpoint) Tensor(name string) (Tensor, error) {
	i, ok := c.r.byName[name]
	if !ok {
		return Tensor{}, fmt.Errorf("%s: the model has no dense tensor %s", c.dir, quoted(name))
	}
	return c.r.dense[i], nil
}

// Tensors returns all dense tensors: the global ones, then layer by layer.
func (c *Checkpoint) Tensors() []Tensor { return append([]Tensor(nil), c.r.dense...) }

// Expert returns the run of bytes of routed expert id (0..Experts-1) of a 0-based
// MoE layer. It panics if there is no such expert.
func (c *Checkpoint) Expert(layer, id int) Extent {
	if id < 0 || id >= c.r.cfg.Experts || !c.r.cfg.IsMoE(layer) {
		panic(fmt.Sprintf("checkpoint: no expert %d in layer %d", id, layer))
	}
	x := c.r.experts[c.r.expertAt(layer, id)]
	return Extent{File: int(x.file), Offset: x.offset, Bytes: c.r.layout.ExpertBytes}
}

// ExpertLayout returns what lies where in the run of an expert.
func (c *Checkpoint) ExpertLayout() ExpertLayout { return c.r.layout }

// Close closes the shards. No read may be in progress.
func (c *Checkpoint) Close() error {
	var errs []error
	for i, f := range c.files {
		if f != nil {
			errs = append(errs, f.Close())
			c.files[i] = nil
		}
	}
	return errors.Join(errs...)
}
