package synth

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/disk"
)

// jobBytes is the most that is generated and written at once.
const jobBytes = 8 << 20

type writer struct {
	dir      string
	workers  int
	progress func(done, total int64)
	free     func(dir string) (int64, error) // in place of disk.Free, in tests
	step     func()                          // called between any two changes of the directory, in tests

	painters map[look]*painter

	mu          sync.Mutex // of what follows, and of calls of progress
	done, total int64
}

// look is what tensors that can share a painter have in common.
type look struct {
	dtype  dtype
	values values
}

func (t *tensor) look() look { return look{t.dtype, t.values} }

func (w *writer) write(ctx context.Context, p Params) error {
	files, err := plan(p)
	if err != nil {
		return err
	}
	p, err = p.resolve()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(w.dir, 0o755); err != nil {
		return plain(err)
	}
	lock, err := disk.LockDir(w.dir)
	if err != nil {
		return plain(err)
	}
	defer lock.Close()
	if err := w.claim(p); err != nil {
		return err
	}
	missing, err := w.missing(files)
	if err != nil {
		return err
	}
	if len(missing) == 0 {
		w.advance(0)
		return nil
	}
	if err := w.room(total(missing)); err != nil {
		return err
	}
	w.advance(0)
	for _, f := range missing {
		if err := w.publish(ctx, p.Seed, f); err != nil {
			return err
		}
	}
	return nil
}

// claim sees that the directory is this checkpoint's or nobody's.
func (w *writer) claim(p Params) error {
	rec, err := readRecord(w.dir)
	if errors.Is(err, fs.ErrNotExist) {
		entries, err := os.ReadDir(w.dir)
		if err != nil {
			return plain(err)
		}
		for _, e := range entries {
			// Where the first file of all was interrupted, its part is all there is.
			if e.Name() != recordName+tempSuffix {
				return fmt.Errorf("is not empty (it holds %s) and has no %s: give a new directory", e.Name(), recordName)
			}
		}
		return nil
	}
	if err != nil {
		return err
	}
	switch {
	case rec.Generator != generator:
		return fmt.Errorf("holds a checkpoint of generator %d, and this is generator %d: remove it, or give another directory", rec.Generator, generator)
	case rec.Params != p:
		return fmt.Errorf("holds a synthetic checkpoint with another %s: remove it, or give another directory", rec.Params.differs(p))
	}
	return nil
}

// differs names the first field in which two Params differ.
func (p Params) differs(q Params) string {
	a, b := strings.Fields(fmt.Sprintf("%+v", p)), strings.Fields(fmt.Sprintf("%+v", q))
	for i := range a {
		if a[i] != b[i] {
			name, value, _ := strings.Cut(strings.Trim(a[i], "{}"), ":")
			return name + " (" + value + ")"
		}
	}
	return "seed or dimension"
}

// missing returns the files that are not there in full, and counts the others as
// done. What an interrupted Write left unfinished is removed.
func (w *writer) missing(files []file) ([]file, error) {
	var missing []file
	w.total = total(files)
	for _, f := range files {
		path := filepath.Join(w.dir, f.name)
		if err := os.Remove(path + tempSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, plain(err)
		}
		// A file gets its name when it is complete, so its size is proof enough.
		info, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			missing = append(missing, f)
		case err != nil:
			return nil, plain(err)
		case !info.Mode().IsRegular():
			return nil, fmt.Errorf("%s is not a regular file: remove it", f.name)
		case info.Size() != f.bytes:
			missing = append(missing, f)
		default:
			w.done += f.bytes
		}
	}
	return missing, nil
}

// room sees that need bytes can be written. A hundredth more is asked for, since
// the file system keeps books of its own.
func (w *writer) room(need int64) error {
	free := w.free
	if free == nil {
		free = disk.Free
	}
	have, err := free(w.dir)
	if err != nil {
		return fmt.Errorf("its free space is unknown: %w", err)
	}
	if need += need / 100; have < need {
		return fmt.Errorf("%w: %.2f GB are needed and the file system has %.2f GB free: make room, give a directory elsewhere, or ask for fewer layers", disk.ErrFull, float64(need)/1e9, float64(have)/1e9)
	}
	return nil
}

func (w *writer) stepped() {
	if w.step != nil {
		w.step()
	}
}

func (w *writer) advance(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done += n
	if w.progress != nil {
		w.progress(w.done, w.total)
	}
}

// publish writes one file under a temporary name, waits until it is on the drive,
// and gives it its name.
func (w *writer) publish(ctx context.Context, seed uint64, f file) (err error) {
	path := filepath.Join(w.dir, f.name)
	temp := path + tempSuffix
	w.stepped()
	out, err := os.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return plain(err)
	}
	defer func() {
		if err != nil {
			out.Close()
			os.Remove(temp)
		}
	}()
	w.stepped()
	if f.content != nil {
		if _, err = out.Write(f.content); err == nil {
			w.advance(f.bytes)
		}
	} else {
		err = w.shard(ctx, out, seed, f)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = out.Sync()
	}
	if err == nil {
		forget(out)
		err = out.Close()
	}
	if err == nil {
		w.stepped()
		err = disk.Rename(temp, path) // which lasts: no file appears without those before it
	}
	if err == nil {
		w.stepped()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.name, plain(err))
	}
	return nil
}

// piece is a run of bytes of a tensor.
type piece struct {
	t      *tensor
	off, n int64
}

// cut hands out the data section of a shard in runs of at most jobBytes. A tensor is
// cut at multiples of 8 bytes only, which is where random numbers begin.
type cut struct {
	tensors []tensor
	off     int64 // in the first of them
}

// next returns where the next run begins in the data section and what it consists of.
func (c *cut) next() (begin int64, run []piece) {
	room := int64(jobBytes)
	for len(c.tensors) > 0 {
		t := &c.tensors[0]
		n := t.bytes - c.off
		if n > room {
			n = room &^ 7
		}
		if n == 0 {
			break
		}
		if run == nil {
			begin = t.begin + c.off
		}
		run = append(run, piece{t, c.off, n})
		room -= n
		if c.off += n; c.off == t.bytes {
			c.tensors, c.off = c.tensors[1:], 0
		}
	}
	return begin, run
}

// shard writes a shard, several workers at once.
func (w *writer) shard(ctx context.Context, out *os.File, seed uint64, f file) error {
	head, tensors := f.tensors()
	if _, err := out.WriteAt(head, 0); err != nil {
		return err
	}
	w.advance(int64(len(head)))

	if w.painters == nil {
		w.painters = map[look]*painter{}
	}
	for i := range tensors {
		if l := tensors[i].look(); w.painters[l] == nil {
			w.painters[l] = newPainter(l.dtype, l.values)
		}
	}

	var mu sync.Mutex
	rest := cut{tensors: tensors}
	g, ctx := errgroup.WithContext(ctx)
	for range max(w.workers, 1) {
		g.Go(func() error {
			buf := make([]byte, jobBytes)
			behind := writeBehind{file: out}
			for ctx.Err() == nil {
				mu.Lock()
				begin, run := rest.next()
				mu.Unlock()
				if run == nil {
					return nil
				}
				n := int64(0)
				for _, p := range run {
					w.painters[p.t.look()].paint(buf[n:n+p.n], key(seed, p.t.name), p.off)
					n += p.n
				}
				at := int64(len(head)) + begin
				if _, err := out.WriteAt(buf[:n], at); err != nil {
					return err
				}
				behind.wrote(at, n)
				w.advance(n)
			}
			return ctx.Err()
		})
	}
	return g.Wait()
}

// plain drops the path from an error whose text will name the file anyway.
func plain(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	var link *os.LinkError
	if errors.As(err, &link) {
		return link.Err
	}
	return err
}
