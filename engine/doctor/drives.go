package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"deltafin/engine/disk"
	"deltafin/engine/drive"
	"deltafin/engine/hub"
	"deltafin/engine/machine"
	"deltafin/engine/plan"
)

const (
	measureFor = 1500 * time.Millisecond // each drive
	latencies  = 15                      // reads that are timed alone
	latentRead = 4096                    // bytes of each
	// A drive that is this slow is not worth the wait: what it gave until then counts.
	measureMost = 10 * time.Second
)

// place is a drive that a run would read from, and what was found out about it.
type place struct {
	dirs []string // on this drive; the first is measured
	free int64    // bytes; negative if not known
	need int64    // bytes that are still to come to it

	fs    machine.FileSystem
	fsErr error

	mode    string // how the engine reads, in words
	direct  bool
	quick   bool // not measured on purpose
	rate    float64
	size    int64 // bytes of each read that was measured
	latency time.Duration
	err     error // why it could not be measured
	failed  bool  // because reads failed
}

// drives finds the drives behind the model's files and the copies, and measures each.
func (e *examination) drives(ctx context.Context) {
	dirs := e.dirs
	for _, d := range e.o.Experts {
		if !hub.IsSite(d) {
			dirs = append(dirs, d)
		}
	}
	if e.o.Spine != "" {
		dirs = append(dirs, filepath.Dir(e.o.Spine))
	}
	set := drive.NewSet(drive.Options{Warn: func(string) {}})
	defer set.Close()
	var devices []*drive.Device
	for _, dir := range dirs {
		f, err := sample(set, dir)
		if err == nil {
			if i := slices.Index(devices, f.Device()); i >= 0 {
				if !slices.Contains(e.places[i].dirs, dir) {
					e.places[i].dirs = append(e.places[i].dirs, dir)
				}
				continue
			}
			devices = append(devices, f.Device())
		} else {
			devices = append(devices, nil)
		}
		p := &place{dirs: []string{dir}, quick: e.o.Quick, size: e.expertBytes(), free: -1}
		if free, err := disk.Free(dir); err == nil {
			p.free = free
		}
		if len(e.places) == 0 {
			p.need = e.missing
		}
		p.fs, p.fsErr = machine.ReadFileSystem(dir)
		if e.filling && slices.Contains(e.dirs, dir) {
			err = errFilling
		}
		p.measure(ctx, set, f, err)
		e.places = append(e.places, p)
		if ctx.Err() != nil {
			return
		}
		if p.fsErr == nil {
			e.tell(p.fileSystem())
		}
		e.tell(p.reads())
		if p.free >= 0 {
			e.tell(p.space())
		}
	}
}

// sample opens the largest file of a directory.
func sample(set *drive.Set, dir string) (*drive.File, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, cause(err)
	}
	largest, size := "", int64(0)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Size() > size {
			largest, size = path, info.Size()
		}
	}
	if largest == "" {
		return nil, errNothing
	}
	return set.Open(largest)
}

var (
	errNothing = errors.New("holds no file to read")
	errFilling = errors.New("the model fills on demand, and what is not there reads faster than any drive")
)

// measure reads as the engine does.
func (p *place) measure(ctx context.Context, set *drive.Set, f *drive.File, err error) {
	if err != nil {
		p.err = err
		p.failed = !errors.Is(err, errNothing) && !errors.Is(err, errFilling) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission)
		return
	}
	st := f.Device().Stats()
	p.mode, p.direct = st.Mode, st.Direct
	if p.quick {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, measureMost)
	defer cancel()
	if p.latency, p.err = latency(ctx, set, f); p.err != nil {
		p.failed = true
		return
	}
	size := min(p.size, f.Size()/8)
	if size <= 0 {
		p.err = errNothing
		return
	}
	p.size = size
	p.rate, p.err = plan.MeasureDrive(ctx, set, p.dirs[0], size, measureFor)
	p.failed = p.err != nil
}

// latency is the median time of a small read that is alone, at random places.
func latency(ctx context.Context, set *drive.Set, f *drive.File) (time.Duration, error) {
	buf, err := drive.NewBuffer(latentRead)
	if err != nil {
		return 0, err
	}
	defer buf.Free()
	var took []time.Duration
	for range latencies {
		n := min(latentRead, f.Size())
		off := rand.Int64N(f.Size() - n + 1)
		began := time.Now()
		if err := set.Read(ctx, drive.Read{File: f, Offset: off, Bytes: n, Into: buf}); err != nil {
			return 0, err
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

func (p *place) fileSystem() Finding {
	f := Finding{ID: "drive.filesystem", Level: OK, What: p.what(), Value: p.fs.Name}
	if p.fs.ReadOnly {
		f.Value += ", mounted read-only"
	}
	switch p.fs.Kind {
	case machine.Network:
		f.Level, f.Value, f.Do = Warning, f.Value+", a network file system", "put the files on a drive of this machine: each token reads gigabytes of them"
	case machine.Overlay:
		f.Level, f.Value, f.Do = Warning, f.Value+", the layers of a container's image", "mount a directory of the host into the container for the model, and leave it out of the image"
	case machine.InRAM:
		f.Level, f.Value, f.Do = Note, f.Value+", files in memory", "mind that they take the memory that a run could use: a drive is the better place for all but small models"
	}
	return f
}

func (p *place) reads() Finding {
	f := Finding{ID: "drive.reads", Level: OK, What: p.what(), Value: p.mode}
	if p.err != nil {
		f.Value = fmt.Sprintf("not measured: %v", p.err)
		f.Level, f.Do = Note, "look at it again with a directory that holds a whole model"
		if p.failed {
			f.Level, f.Fault, f.Value, f.Do = Error, Machine, fmt.Sprintf("reads fail: %v", p.err), "look at the system's log and at the drive's health (smartctl -a), and copy what can still be read"
		}
		return f
	}
	if !p.quick {
		f.Value = fmt.Sprintf("%.2f GB/s in reads of %s as a run makes them, %.2f ms for a read of 4 KiB; %s", p.rate/1e9, gb(p.size), 1e3*p.latency.Seconds(), p.mode)
		f.Numbers = map[string]float64{"bytes_per_second": p.rate, "latency_seconds": p.latency.Seconds(), "read_bytes": float64(p.size)}
	}
	if !p.direct && p.fs.Kind != machine.InRAM {
		f.Level, f.Do = Warning, "move the files to a local file system such as ext4, XFS, APFS or NTFS: reads go through the page cache, slower and at the cost of memory, and what was measured may be the cache"
	}
	return f
}

func (p *place) space() Finding {
	f := Finding{ID: "drive.space", Level: OK, What: p.what(), Value: gb(p.free) + " free", Numbers: map[string]float64{"free_bytes": float64(p.free)}}
	if p.need > 0 {
		f.Value += fmt.Sprintf(", %s of the model are still to come", gb(p.need))
		f.Numbers["needed_bytes"] = float64(p.need)
	}
	if p.need > p.free {
		f.Level, f.Fault, f.Do = Error, Resources, "make room, or fetch to several drives with --spread"
	}
	return f
}

func (p *place) what() string { return strings.Join(p.dirs, ", ") }

// cause drops the path from an error of a finding that names it already.
func cause(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// reason keeps only the name of a file whose directory a finding names already.
func reason(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return fmt.Errorf("%s: %w", filepath.Base(pe.Path), pe.Err)
	}
	return err
}
