package hub

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/checkpoint"
)

// VerifyOptions say how deep a verification looks. The zero value looks at names,
// sizes and the structure of the checkpoint, which takes seconds.
type VerifyOptions struct {
	Deep   bool // read every byte; goes on where an interrupted one stopped
	Sample int  // read one chunk of 16 MiB in so many, chosen at random; 0 means none

	// Repair fetches what is bad or missing, with these options; their Dir is ignored.
	Repair *Options

	Workers  int // files or chunks read at once; 0 means 4, or fewer processors
	Progress func(Progress)
	Log      func(line string)

	hooks *hooks
}

// Damage is a run of bytes of a file that is not what it should be.
type Damage struct {
	File string `json:"file"` // "" if it is not one file's fault
	Off  int64  `json:"off"`
	End  int64  `json:"end"` // 0 if the whole file, or its absence, is meant
	Why  string `json:"why"` // with the remedy, if it is another than to repair
}

// String is one line.
func (d Damage) String() string {
	switch {
	case d.File == "":
		return d.Why
	case d.End == 0:
		return d.File + ": " + d.Why
	}
	return fmt.Sprintf("%s: bytes %d to %d: %s", d.File, d.Off, d.End, d.Why)
}

// Report is what a verification found.
type Report struct {
	Repo     string   `json:"repo"`
	Revision string   `json:"revision"`
	Files    int      `json:"files"`
	Bytes    int64    `json:"bytes"`   // of all files
	Read     int64    `json:"read"`    // bytes that were read and compared, this time
	Resumed  int64    `json:"resumed"` // bytes that an interrupted verification had found good
	Bad      []Damage `json:"bad,omitempty"`
	Touched  []string `json:"touched,omitempty"` // changed since they were proved right, and not read this time
	Extra    []string `json:"extra,omitempty"`   // files that are not the model's
	Repaired []Damage `json:"repaired,omitempty"`

	// Of a store that fills on demand: bytes of its shards that are not here.
	Away int64 `json:"away,omitempty"`
}

// OK tells whether nothing bad is left.
func (r *Report) OK() bool { return len(r.Bad) == 0 }

// Verify looks at the store in dir. Damage is in the report; the error says why
// there is none, or why a repair failed, and begins with dir.
func Verify(ctx context.Context, dir string, o VerifyOptions) (*Report, error) {
	r, err := verify(ctx, dir, &o)
	return r, inDir(dir, err)
}

func verify(ctx context.Context, dir string, o *VerifyOptions) (*Report, error) {
	if o.Log == nil {
		o.Log = func(string) {}
	}
	if o.Workers <= 0 {
		o.Workers = min(4, runtime.GOMAXPROCS(0))
	}
	s, err := openStore(dir, o.hooks)
	if err != nil {
		return nil, err
	}
	if s.rec == nil {
		if _, err := os.Stat(dir); err != nil {
			return nil, plain(err)
		}
		return nil, fmt.Errorf("has no %s, so nobody knows what should be here: run 'deltafin fetch --full' on it, which reads what is here and fetches only what is missing or wrong", recordName)
	}
	v := &verifier{o: o, s: s, filling: IsStream(s.dir), report: &Report{Repo: s.rec.Repo, Revision: s.rec.Revision, Files: len(s.rec.Files)}}
	// Without the lock, or without the right to write, the store is only looked at.
	if lock, err := lockDir(s.dir); err == nil {
		defer lock.release()
		v.mayWrite = true
		if err := v.run(ctx); err != nil {
			return nil, err
		}
		lock.release()
	} else if o.Repair != nil {
		return nil, err
	} else if err := v.run(ctx); err != nil {
		return nil, err
	}
	if o.Repair == nil && v.filling && v.report.OK() {
		if r, err := s.stream(); err != nil || !r.Installed {
			v.damage(Damage{File: streamName, Why: "says that the store " + errUninstalled.Error()})
		}
	}
	if o.Repair == nil || v.report.OK() {
		return v.report, nil
	}
	return v.repair(ctx)
}

type verifier struct {
	o        *VerifyOptions
	s        *store
	report   *Report
	mayWrite bool
	filling  bool // the store fills on demand

	read  atomic.Int64
	total int64

	mu   sync.Mutex // of what follows, of the report and of the record
	seen verifyState
}

// verifyState is how far an interrupted verification came.
type verifyState struct {
	Format   int                   `json:"format"`
	Revision string                `json:"revision"`
	Files    map[string]*fileState `json:"files"`
}

type fileState struct {
	Modified int64  `json:"modified"` // ns since 1970; another time makes the rest void
	Good     []byte `json:"good"`     // a bit for each chunk
}

func (f *fileState) has(i int) bool { return i/8 < len(f.Good) && f.Good[i/8]>>(i%8)&1 == 1 }

func (f *fileState) set(i int) {
	for i/8 >= len(f.Good) {
		f.Good = append(f.Good, 0)
	}
	f.Good[i/8] |= 1 << (i % 8)
}

func (v *verifier) damage(d Damage) {
	v.mu.Lock()
	v.report.Bad = append(v.report.Bad, d)
	v.mu.Unlock()
	v.o.Log(d.String())
}

func (v *verifier) run(ctx context.Context) error {
	var here []*storeFile
	for i := range v.s.rec.Files {
		f := &v.s.rec.Files[i]
		v.report.Bytes += f.Size
		if v.present(f) {
			here = append(here, f)
		}
	}
	v.extra()
	if v.report.OK() {
		v.structure()
	}
	if !v.o.Deep && v.o.Sample <= 0 {
		for _, f := range here {
			if !v.s.whole(f) && !v.fills(f) {
				v.report.Touched = append(v.report.Touched, f.Name)
			}
		}
		return nil
	}
	return v.content(ctx, here)
}

// present looks whether a file is there with its size.
func (v *verifier) present(f *storeFile) bool {
	path := v.s.path(f)
	info, err := os.Stat(v.s.link(f))
	_, dangling := os.Readlink(v.s.link(f))
	why := ""
	switch {
	case errors.Is(err, fs.ErrNotExist) && dangling == nil:
		why = fmt.Sprintf("is a link to %s, which is not there: connect that drive, or repair", path)
	case errors.Is(err, fs.ErrNotExist) && v.s.arrived(f) > 0:
		why = fmt.Sprintf("is unfinished, %s of %s have arrived: run 'deltafin fetch', it goes on from there", gb(v.s.arrived(f)), gb(f.Size))
	case errors.Is(err, fs.ErrNotExist):
		why = "is missing"
	case err != nil:
		why = plain(err).Error()
	case !info.Mode().IsRegular():
		why = "is not a regular file: remove it"
	case exists(path+rangesSuffix) && v.filling && info.Size() == f.Size && v.lacks(f):
		why = "lacks dense weights that were here: run 'deltafin fetch --stream'"
	case exists(path+rangesSuffix) && v.filling && info.Size() == f.Size:
		v.report.Away += f.Size - v.s.arrived(f)
	case exists(path + rangesSuffix):
		why = fmt.Sprintf("fills on demand, %s of %s are here: run 'deltafin fetch --full' for the rest", gb(v.s.arrived(f)), gb(f.Size))
	case info.Size() != f.Size:
		why = fmt.Sprintf("is %d bytes long, expected %d", info.Size(), f.Size)
	}
	if why != "" {
		v.damage(Damage{File: f.Name, Why: why})
	}
	return why == ""
}

// lacks tells whether dense weights that were here of a file that fills on demand are
// not here any more.
func (v *verifier) lacks(f *storeFile) bool {
	r, err := v.s.stream()
	if err != nil || !r.Installed {
		return false
	}
	b, err := readBounded(v.s.path(f)+rangesSuffix, journalLimit)
	if err != nil {
		return false // said by who reads them
	}
	_, have, _, _ := parseJournal(b, f.Size, f.identity())
	return len(r.lacking(f.Name, have)) > 0
}

// extra lists files that the model does not consist of.
func (v *verifier) extra() {
	known := map[string]bool{recordName: true, verifyName: true, streamName: true, lockName: true}
	for i := range v.s.rec.Files {
		known[v.s.rec.Files[i].Name] = true
	}
	filepath.WalkDir(v.s.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || len(v.report.Extra) >= 100 {
			return nil
		}
		rel, err := filepath.Rel(v.s.dir, path)
		if err != nil {
			return nil
		}
		name := filepath.ToSlash(rel)
		base := name
		for _, suffix := range []string{partSuffix, journalSuffix, rangesSuffix, tempSuffix} {
			base = strings.TrimSuffix(base, suffix)
		}
		if !known[base] {
			v.report.Extra = append(v.report.Extra, name)
		}
		return nil
	})
}

// structure opens the checkpoint as the engine does, if it is one.
func (v *verifier) structure() {
	if !exists(filepath.Join(v.s.dir, "model.safetensors.index.json")) {
		return
	}
	open := checkpoint.Open
	if v.filling {
		open = func(dir string) (*checkpoint.Checkpoint, error) { return checkpoint.OpenFilling(dir, nil) }
	}
	ck, err := open(v.s.dir)
	if err != nil {
		v.damage(Damage{Why: strings.TrimPrefix(err.Error(), v.s.dir+": ")})
		return
	}
	ck.Close()
}

// task is a chunk of a file whose chain is known, or what one record says of a file
// that fills on demand, or else a whole file.
type task struct {
	f     *storeFile
	chunk int // -1 is the whole
	run   *record
}

// fills tells whether a file is there in parts only.
func (v *verifier) fills(f *storeFile) bool {
	return v.filling && exists(v.s.path(f)+rangesSuffix)
}

// ranges are the records of a file that fills on demand.
func (v *verifier) ranges(f *storeFile) []record {
	b, err := readBounded(v.s.path(f)+rangesSuffix, journalLimit)
	if err != nil {
		v.damage(Damage{File: f.Name, Why: "what of it is here is unknown: " + plain(err).Error()})
		return nil
	}
	records, _, _, _ := parseJournal(b, f.Size, f.identity())
	return records
}

func (v *verifier) content(ctx context.Context, here []*storeFile) error {
	v.resume()
	var tasks []task
	for _, f := range here {
		if v.fills(f) {
			for _, r := range v.ranges(f) {
				if r.sum && (v.o.Deep || rand.IntN(v.o.Sample) == 0) {
					tasks = append(tasks, task{f, -1, &r})
					v.total += r.bytes()
				}
			}
			continue
		}
		if !f.proven() {
			tasks = append(tasks, task{f, -1, nil})
			v.total += f.Size
			continue
		}
		n := chunks(f.Size)
		for i := range n {
			x := chunkSpan(f.Size, i)
			switch {
			case !v.o.Deep && n > 1 && rand.IntN(v.o.Sample) != 0:
			case v.o.Deep && v.state(f).has(i):
				v.report.Resumed += x.bytes()
			default:
				tasks = append(tasks, task{f, i, nil})
				v.total += x.bytes()
			}
		}
	}
	if v.o.Progress != nil {
		var m meter
		defer report(func() {
			p := Progress{Done: v.read.Load(), Total: v.total, FilesTotal: len(here)}
			p.Rate = m.update(p.Done, time.Now())
			p.ETA = eta(p.Total-p.Done, p.Rate)
			v.o.Progress(p)
		})()
	}
	saved := time.Now()
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(v.o.Workers)
	for _, t := range tasks {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error { return v.check(gctx, t) })
		if time.Since(saved) > 5*time.Second {
			v.save()
			saved = time.Now()
		}
	}
	err := g.Wait()
	if err == nil {
		err = context.Cause(ctx)
	}
	v.report.Read = v.read.Load()
	slices.SortFunc(v.report.Bad, func(a, b Damage) int { return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.Off, b.Off)) })
	if err != nil {
		v.save()
		return err
	}
	if v.mayWrite {
		os.Remove(filepath.Join(v.s.dir, verifyName))
	}
	return nil
}

func (v *verifier) check(ctx context.Context, t task) error {
	in, err := os.Open(v.s.link(t.f))
	if err != nil {
		v.damage(Damage{File: t.f.Name, Why: "cannot be opened: " + plain(err).Error()})
		return nil
	}
	defer in.Close()
	buf := make([]byte, bufferBytes)
	saw := func(n int) { v.read.Add(int64(n)) }
	if r := t.run; r != nil {
		dropCache(in, r.span)
		crc, err := crcOf(in, r.span, buf)
		saw(int(r.bytes()))
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			v.damage(Damage{t.f.Name, r.off, r.end, "cannot be read: " + plain(err).Error() + ": the drive may be failing"})
		case crc != r.crc:
			v.damage(Damage{t.f.Name, r.off, r.end, "is not what arrived"})
		}
		return nil
	}
	if t.chunk >= 0 {
		x := chunkSpan(t.f.Size, t.chunk)
		dropCache(in, x)
		ok, err := checkChunk(ctx, in, t.f, t.chunk, buf, saw)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			v.damage(Damage{t.f.Name, x.off, x.end, "cannot be read: " + plain(err).Error() + ": the drive may be failing"})
		case !ok:
			v.damage(Damage{t.f.Name, x.off, x.end, "its digest is wrong"})
		default:
			v.mu.Lock()
			v.state(t.f).set(t.chunk)
			v.mu.Unlock()
		}
		return nil
	}
	dropCache(in, span{0, t.f.Size})
	h := newHasher(&t.f.File)
	for h.n < h.size {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		n, err := in.ReadAt(buf[:min(int64(len(buf)), h.room())], h.n)
		if n == 0 && err != nil {
			v.damage(Damage{t.f.Name, h.n, t.f.Size, "cannot be read: " + plain(err).Error() + ": the drive may be failing"})
			return nil
		}
		h.write(buf[:n])
		saw(n)
	}
	d := h.sum()
	if !d.proves(&t.f.File) {
		v.damage(Damage{File: t.f.Name, Why: "its digest is wrong"})
		return nil
	}
	return v.prove(t.f, d)
}

// prove enters what was learnt about a file that nobody had proved here before.
func (v *verifier) prove(f *storeFile, d *digests) error {
	info, err := os.Stat(v.s.link(f))
	if err != nil || !v.mayWrite {
		return nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	f.SHA256, f.Chain, f.Chunk, f.Verified = d.sha256, d.chain, chunkBytes, info.ModTime().UnixNano()
	return v.s.save()
}

// state is what is known of a file from an interrupted verification.
func (v *verifier) state(f *storeFile) *fileState {
	var now int64
	if info, err := os.Stat(v.s.link(f)); err == nil {
		now = info.ModTime().UnixNano()
	}
	st := v.seen.Files[f.Name]
	if st == nil || st.Modified != now {
		st = &fileState{Modified: now}
		v.seen.Files[f.Name] = st
	}
	return st
}

func (v *verifier) resume() {
	v.seen = verifyState{Format: inventoryFormat, Revision: v.s.rec.Revision, Files: map[string]*fileState{}}
	if !v.o.Deep {
		return
	}
	b, err := readBounded(filepath.Join(v.s.dir, verifyName), inventoryLimit)
	if err != nil {
		return
	}
	var st verifyState
	if json.Unmarshal(b, &st) == nil && st.Format == inventoryFormat && st.Revision == v.s.rec.Revision && st.Files != nil {
		v.seen.Files = st.Files
	}
}

// save writes down how far a deep verification has come. That it cannot is no
// reason to stop.
func (v *verifier) save() {
	if !v.o.Deep || !v.mayWrite {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if b, err := json.Marshal(&v.seen); err == nil {
		v.s.replace(verifyName, b)
	}
}

// repair has everything that is bad fetched again, and looks once more.
func (v *verifier) repair(ctx context.Context) (*Report, error) {
	if v.filling {
		return v.refill(ctx)
	}
	bad := map[string]bool{}
	for _, d := range v.report.Bad {
		bad[d.File] = true
	}
	if bad[""] {
		// The files disagree with each other, and none is known to be the culprit.
		for i := range v.s.rec.Files {
			bad[v.s.rec.Files[i].Name] = true
		}
	}
	for i := range v.s.rec.Files {
		if f := &v.s.rec.Files[i]; bad[f.Name] {
			f.Verified = 0
		}
	}
	if err := v.s.save(); err != nil {
		return nil, err
	}
	o := *v.o.Repair
	o.Dir, o.Repo, o.Revision = v.s.dir, v.s.rec.Repo, v.s.rec.Revision
	if err := fetch(ctx, &o); err != nil {
		return nil, err
	}
	return v.again(ctx)
}

// refill takes what is bad out of a store that fills on demand. What is dense of it is
// fetched now, and experts when they are next asked for.
func (v *verifier) refill(ctx context.Context) (*Report, error) {
	lock, err := lockDir(v.s.dir)
	if err != nil {
		return nil, err
	}
	defer lock.release()
	bad := map[string]spans{}
	for _, d := range v.report.Bad {
		if d.File == "" {
			continue // whoever is named may be why
		}
		if d.End == 0 {
			d.End = math.MaxInt64
		}
		bad[d.File] = bad[d.File].add(span{d.Off, d.End})
	}
	if len(bad) == 0 {
		return nil, errors.New("the files disagree with each other, and none is known to be the culprit: run 'deltafin fetch --full'")
	}
	for i := range v.s.rec.Files {
		f := &v.s.rec.Files[i]
		if bad[f.Name] == nil {
			continue
		}
		f.Verified = 0
		if !isShard(f) {
			continue
		}
		var written int64
		if info, err := os.Stat(v.s.path(f)); err == nil {
			written = info.Size()
		}
		if v.fills(f) && written != f.Size {
			continue // opening the depot puts that right
		}
		j, err := openJournal(v.s.path(f)+rangesSuffix, &f.File, written)
		if err != nil {
			return nil, err
		}
		var good []record
		if len(j.records) > 0 {
			for _, r := range j.records {
				if !bad[f.Name].overlaps(r.span) {
					good = append(good, r)
				}
			}
		} else { // it was whole
			good = bad[f.Name].missing(span{0, f.Size}).records()
		}
		err = j.rewrite(&f.File, good)
		if cerr := j.close(); err == nil {
			err = cerr
		}
		if err != nil {
			return nil, plain(err)
		}
	}
	if err := errors.Join(v.s.save(), v.s.uninstall()); err != nil {
		return nil, err
	}
	lock.release()
	o := DepotOptions{Options: *v.o.Repair}
	o.Dir, o.Repo, o.Revision = v.s.dir, v.s.rec.Repo, v.s.rec.Revision
	d, err := openDepot(ctx, o, true)
	if err != nil {
		return nil, err
	}
	if err := d.Close(); err != nil {
		return nil, err
	}
	return v.again(ctx)
}

func (v *verifier) again(ctx context.Context) (*Report, error) {
	again := VerifyOptions{Workers: v.o.Workers, Log: v.o.Log, hooks: v.o.hooks}
	r, err := verify(ctx, v.s.dir, &again)
	if err != nil {
		return nil, err
	}
	r.Read, r.Resumed, r.Repaired = v.report.Read, v.report.Resumed, v.report.Bad
	return r, nil
}
