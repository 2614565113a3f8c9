package expert

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"deltafin/engine/checkpoint"
	"deltafin/engine/disk"
	"deltafin/engine/drive"
	"deltafin/engine/hub"
)

// PlaceTarget is a directory that may take copies.
type PlaceTarget struct {
	Dir   string
	Bytes int64   // most bytes of files
	Rate  float64 // of its drive, in bytes per second
}

// Placement says which experts are to be copied where.
type Placement struct {
	Dirs []PlacedDir `json:"dirs"`
}

// PlacedDir is the plan of one directory.
type PlacedDir struct {
	Dir     string    `json:"dir"`
	Experts [][]int32 `json:"experts"` // per MoE layer, from the first: ids, ascending
	Count   int       `json:"count"`
	Bytes   int64     `json:"bytes"` // of all its files
	Heat    float64   `json:"heat"`  // share of all routes that go to these experts
}

// PlacePlan ranks the experts of ck by heat and fills each directory's bytes.
// First every expert gets one copy, hottest first, such that the drives' shares of
// heat are as their rates, primary (bytes per second) being the checkpoint's own
// drive. The room that is left holds further copies of the hottest, which is what lets
// the balancer even out the experts of a single layer. Without heat (nil) all
// experts count alike.
func PlacePlan(ck *checkpoint.Checkpoint, heat *Heat, primary float64, targets []PlaceTarget) (*Placement, error) {
	cat := newCatalogue(ck)
	if heat == nil {
		heat = NewHeat(ck.Config(), [sha256.Size]byte{})
	}
	rates := primary
	for _, t := range targets {
		if t.Rate <= 0 || t.Bytes < 0 {
			return nil, fmt.Errorf("%s: a rate of %g bytes/s and room for %d bytes: measure the drive, and give it some room", t.Dir, t.Rate, t.Bytes)
		}
		rates += t.Rate
	}
	if primary <= 0 {
		return nil, fmt.Errorf("%s: a rate of %g bytes/s: measure the drive", ck.Dir(), primary)
	}
	order := heat.rank()
	// An expert that was never seen is not impossible: it weighs half a route.
	weight := func(x int32) float64 { return float64(heat.count[x]) + 0.5 }
	mass := 0.0
	for _, x := range order {
		mass += weight(x)
	}
	type state struct {
		has   []bool
		count []int // per layer
		bytes int64
		mass  float64
	}
	each := roundUp(cat.layout.ExpertBytes)
	states := make([]state, len(targets))
	for i := range states {
		states[i] = state{has: make([]bool, len(order)), count: make([]int, cat.layers())}
	}
	take := func(i int, x int32) bool {
		s, l := &states[i], int(x)/cat.per
		n := each + headerBytes(s.count[l]+1)
		if s.count[l] > 0 {
			n -= headerBytes(s.count[l])
		}
		if s.has[x] || s.bytes+n > targets[i].Bytes {
			return false
		}
		s.has[x] = true
		s.count[l]++
		s.bytes += n
		s.mass += weight(x)
		return true
	}
	for _, x := range order {
		// The drive that is furthest behind its share goes first.
		byNeed := make([]int, len(targets))
		for i := range byNeed {
			byNeed[i] = i
		}
		slices.SortStableFunc(byNeed, func(a, b int) int {
			return cmp.Compare(states[a].mass/targets[a].Rate, states[b].mass/targets[b].Rate)
		})
		for _, i := range byNeed {
			if states[i].mass < mass*targets[i].Rate/rates && take(i, x) {
				break
			}
		}
	}
	p := &Placement{}
	for i, t := range targets {
		for _, x := range order {
			if states[i].bytes+each > t.Bytes {
				break
			}
			take(i, x)
		}
		d := PlacedDir{Dir: t.Dir, Experts: make([][]int32, cat.layers()), Bytes: states[i].bytes, Heat: states[i].mass / mass}
		for x, has := range states[i].has {
			if has {
				l := x / cat.per
				d.Experts[l] = append(d.Experts[l], int32(x%cat.per))
				d.Count++
			}
		}
		p.Dirs = append(p.Dirs, d)
	}
	return p, nil
}

// StageOptions of [PlaceStage].
type StageOptions struct {
	Reserve  int64                   // bytes to leave free on the target's file system; 0 means 4 GB, negative none
	Progress func(done, total int64) // bytes; called from one goroutine; nil is fine
}

// failpoint is called at each step that changes a directory. Tests end the process
// there, or fail the step.
var failpoint = func(step string) error { return nil }

const stageSuffix = ".partial"

// PlaceStage copies experts of ck as p says, one file per layer, and removes packed
// files of other layers, which an earlier plan left. A file gets its name when all of
// it has been written to the drive, read back and compared, so that at any moment the
// directory is a sound home. A file that already holds exactly what is planned is
// kept: an interrupted stage goes on with its layer.
func PlaceStage(ctx context.Context, ck *checkpoint.Checkpoint, drives *drive.Set, p PlacedDir, o StageOptions) error {
	if o.Reserve == 0 {
		o.Reserve = 4e9
	}
	if o.Progress == nil {
		o.Progress = func(int64, int64) {}
	}
	st := stage{ck: ck, cat: newCatalogue(ck), drives: drives, dir: p.Dir, o: o}
	if err := st.run(ctx, p); err != nil {
		return fmt.Errorf("%s: %w", p.Dir, err)
	}
	return nil
}

type stage struct {
	ck          *checkpoint.Checkpoint
	cat         *catalogue
	drives      *drive.Set
	sources     map[int]*drive.File
	dir         string
	o           StageOptions
	print       [sha256.Size]byte
	buf         *drive.Buffer
	plain       []byte // of a checkpoint that fills on demand
	done, total int64
}

func (st *stage) run(ctx context.Context, p PlacedDir) (err error) {
	if len(p.Experts) != st.cat.layers() {
		return fmt.Errorf("the plan has %d layers, the model %d: plan again", len(p.Experts), st.cat.layers())
	}
	if st.print, err = Fingerprint(st.ck); err != nil {
		return err
	}
	if err := os.MkdirAll(st.dir, 0o755); err != nil {
		return reason(err)
	}
	if sameDir(st.dir, st.ck.Dir()) {
		return errors.New("is the checkpoint itself: name a directory on another drive")
	}
	lock, err := disk.LockDir(st.dir)
	if err != nil {
		return reason(err)
	}
	defer lock.Close()
	if st.buf, err = drive.NewBuffer(st.cat.layout.ExpertBytes); err != nil {
		return err
	}
	defer st.buf.Free()
	st.sources = map[int]*drive.File{}
	if err := st.clean(p); err != nil {
		return err
	}
	var todo []int // layers
	var need int64
	for l, ids := range p.Experts {
		if len(ids) == 0 {
			continue
		}
		n := packedBytes(len(ids), st.cat.layout.ExpertBytes)
		st.total += n
		if st.holds(st.cat.first+l, ids) {
			st.done += n
			continue
		}
		todo = append(todo, l)
		need += n
	}
	free, err := disk.Free(st.dir)
	if err != nil {
		return fmt.Errorf("asking for free space: %w", reason(err))
	}
	if left := free - max(st.o.Reserve, 0) - need; left < 0 {
		return fmt.Errorf("%w: needs %.1f GB more, of which %.1f GB are to stay free: plan with fewer bytes, or make room", disk.ErrFull, float64(-left)/1e9, float64(max(st.o.Reserve, 0))/1e9)
	}
	st.o.Progress(st.done, st.total)
	for _, l := range todo {
		layer := st.cat.first + l
		if err := st.layer(ctx, layer, p.Experts[l]); err != nil {
			return fmt.Errorf("%s: %w", packedName(layer), st.explain(err))
		}
	}
	return nil
}

func (st *stage) explain(err error) error {
	if disk.Full(err) {
		return fmt.Errorf("%w: make room, or plan with fewer bytes, and stage again: finished files are kept", err)
	}
	return err
}

// clean removes what an earlier plan or an interrupted stage left.
func (st *stage) clean(p PlacedDir) error {
	entries, err := os.ReadDir(st.dir)
	if err != nil {
		return reason(err)
	}
	removed := false
	for _, e := range entries {
		name, partial := e.Name(), false
		if filepath.Ext(name) == stageSuffix {
			name, partial = name[:len(name)-len(stageSuffix)], true
		}
		layer, ok := packedLayer(name)
		planned := ok && st.ck.Config().IsMoE(layer) && len(p.Experts[layer-st.cat.first]) > 0
		if !ok || planned && !partial {
			continue
		}
		if err := errors.Join(failpoint("remove"), os.Remove(filepath.Join(st.dir, e.Name()))); err != nil {
			return err
		}
		removed = true
	}
	if removed {
		return disk.SyncDir(st.dir)
	}
	return nil
}

// holds reports whether the file of a layer is there and holds exactly ids.
func (st *stage) holds(layer int, ids []int32) bool {
	p, err := openPacked(filepath.Join(st.dir, packedName(layer)), st.cat, st.print)
	return err == nil && p.layer == layer && slices.Equal(p.ids, ids)
}

func (st *stage) layer(ctx context.Context, layer int, ids []int32) (err error) {
	path := filepath.Join(st.dir, packedName(layer))
	temp := path + stageSuffix
	if err := failpoint("create"); err != nil {
		return err
	}
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return reason(err)
	}
	defer func() {
		if err != nil {
			f.Close()
			if rerr := os.Remove(temp); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
				err = errors.Join(err, rerr)
			}
		}
	}()
	p := &packed{layer: layer, ids: ids, expertBytes: st.cat.layout.ExpertBytes, fingerprint: st.print}
	each, at := roundUp(p.expertBytes), headerBytes(len(ids))
	for _, id := range ids {
		if err := ctx.Err(); err != nil {
			return err
		}
		b, err := st.read(ctx, layer, int(id))
		if err != nil {
			return err
		}
		p.digests = append(p.digests, sha256.Sum256(b))
		if err := failpoint("write"); err != nil {
			return err
		}
		if _, err := f.WriteAt(b, at); err != nil {
			return reason(err)
		}
		at += each
		st.done += each
		st.o.Progress(st.done, st.total)
	}
	if err := f.Truncate(at); err != nil {
		return reason(err)
	}
	if err := failpoint("header"); err != nil {
		return err
	}
	if _, err := f.WriteAt(p.encode(), 0); err != nil {
		return reason(err)
	}
	if err := failpoint("sync"); err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return reason(err)
	}
	if bad, err := st.verify(ctx, temp); err != nil {
		return err
	} else if len(bad) > 0 {
		return fmt.Errorf("expert %d reads back differently from what was written: the drive or its cable is faulty", bad[0])
	}
	if err := failpoint("rename"); err != nil {
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		return reason(err)
	}
	st.done += headerBytes(len(ids))
	st.o.Progress(st.done, st.total)
	if err := failpoint("syncdir"); err != nil {
		return nil // the file is sound already; what is not sure is that its name lasts
	}
	return disk.SyncDir(st.dir)
}

// read reads an expert from the checkpoint, and refuses one with impossible scales.
func (st *stage) read(ctx context.Context, layer, id int) ([]byte, error) {
	b, err := st.fetch(ctx, st.ck.Expert(layer, id))
	if err != nil {
		return nil, err
	}
	for _, part := range []int{checkpoint.W1Scale, checkpoint.W2Scale, checkpoint.W3Scale} {
		q := st.cat.layout.Parts[part]
		if bad := checkpoint.CheckScales(b[q.Offset:][:q.Bytes]); bad >= 0 {
			return nil, st.ck.ScaleError(layer, id, part, bad)
		}
	}
	return b, nil
}

// fetch reads an expert from its drive, or from wherever a checkpoint fills from.
func (st *stage) fetch(ctx context.Context, x checkpoint.Extent) ([]byte, error) {
	if st.ck.Filling() {
		if st.plain == nil {
			st.plain = make([]byte, x.Bytes)
		}
		return st.plain, st.ck.ReadExtent(x, st.plain)
	}
	f := st.sources[x.File]
	if f == nil {
		var err error
		if f, err = st.drives.Open(st.ck.Path(x.File)); err != nil {
			return nil, err
		}
		st.sources[x.File] = f
	}
	if err := st.drives.Read(ctx, drive.Read{File: f, Offset: x.Offset, Bytes: x.Bytes, Into: st.buf}); err != nil {
		return nil, err
	}
	return st.buf.Bytes(), nil
}

// verify reads a packed file from its drive, not from the page cache where that can
// be avoided, and returns the ids whose bytes are not those of the header.
func (st *stage) verify(ctx context.Context, path string) (bad []int32, err error) {
	p, err := openPacked(path, st.cat, st.print)
	if err != nil {
		return nil, err
	}
	// A set of its own: its descriptor is closed before the file is renamed.
	drives := drive.NewSet(drive.Options{Warn: func(string) {}})
	defer drives.Close()
	f, err := drives.Open(path)
	if err != nil {
		return nil, err
	}
	for i, id := range p.ids {
		if err := drives.Read(ctx, drive.Read{File: f, Offset: p.base + int64(i)*p.stride, Bytes: p.expertBytes, Into: st.buf}); err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			bad = append(bad, id)
			continue
		}
		if sha256.Sum256(st.buf.Bytes()) != p.digests[i] {
			bad = append(bad, id)
		}
	}
	return bad, nil
}

// PlaceFault is a file that does not hold what it should.
type PlaceFault struct {
	File string
	IDs  []int32 // experts whose bytes are wrong or cannot be read; nil: Err
	Err  error
}

func (f PlaceFault) String() string {
	if f.Err != nil {
		return fmt.Sprintf("%s: %v", f.File, f.Err)
	}
	return fmt.Sprintf("%s: %d experts are damaged, the first is %d: remove the file and stage again", f.File, len(f.IDs), f.IDs[0])
}

// PlaceVerify re-reads all packed files of dir, which may be the address of a web server,
// and compares them with their digests.
// It returns how many experts are sound, and what is not. progress, if not nil, gets
// the files that are done of all.
func PlaceVerify(ctx context.Context, ck *checkpoint.Checkpoint, dir string, progress func(done, total int)) (sound int, faults []PlaceFault, err error) {
	if hub.IsSite(dir) {
		return verifySite(ctx, ck, dir, progress)
	}
	st := stage{ck: ck, cat: newCatalogue(ck), dir: dir}
	if st.print, err = Fingerprint(ck); err != nil {
		return 0, nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w: give a directory that was staged", dir, reason(err))
	}
	var names []string
	for _, e := range entries {
		if _, ok := packedLayer(e.Name()); ok {
			names = append(names, e.Name())
		}
	}
	if len(names) == 0 {
		return 0, nil, fmt.Errorf("%s: holds no packed experts: give a directory that was staged", dir)
	}
	if st.buf, err = drive.NewBuffer(st.cat.layout.ExpertBytes); err != nil {
		return 0, nil, err
	}
	defer st.buf.Free()
	for i, name := range names {
		path := filepath.Join(dir, name)
		bad, err := st.verify(ctx, path)
		if ctx.Err() != nil {
			return sound, faults, ctx.Err()
		}
		if err != nil {
			faults = append(faults, PlaceFault{File: path, Err: err})
		} else {
			p, err := openPacked(path, st.cat, st.print)
			if err == nil {
				sound += len(p.ids) - len(bad)
			}
			if len(bad) > 0 {
				faults = append(faults, PlaceFault{File: path, IDs: bad})
			}
		}
		if progress != nil {
			progress(i+1, len(names))
		}
	}
	return sound, faults, nil
}
