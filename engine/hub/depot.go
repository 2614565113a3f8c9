package hub

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/disk"
)

// DepotOptions of a store that fills on demand.
type DepotOptions struct {
	// Options say where from and where to; Spread is not supported. No Sources means
	// those that the store remembers.
	Options

	// Keep bounds the bytes that reads on demand leave in the store: beyond it, those
	// that were not used for the longest time are dropped. 0 means what the store
	// remembers, at first no bound; negative means none. Where files cannot have holes
	// punched, what is beyond the bound is fetched each time and not kept.
	Keep int64

	// Digest knows the SHA-256 of some ranges, such as those of experts. What differs
	// is refused, and fetched from another source.
	Digest func(name string, off, n int64) (sum [sha256.Size]byte, ok bool)

	// TrustHTTP allows ranges without a digest to come over plain HTTP, where nothing
	// protects them on the way. Over https they are as good as the hub is. The store
	// remembers it.
	TrustHTTP bool
}

// Depot is a store whose shards fill while they are used. A shard has its name and
// its size from the beginning; NAME.ranges beside it says which bytes are there. A
// range is entered there after it was checked, written and flushed to the drive, so
// it is there whole or not at all, and is never fetched twice while it is kept. Once
// all of a shard is there its digest is compared, and from then on it is a file like any
// other. Its methods may be called from several goroutines. It implements
// checkpoint.Filler.
//
// Fetch on the same directory makes a full store of it and fetches only the rest.
type Depot struct {
	o      DepotOptions
	c      *client
	s      *store
	rate   bucket
	unlock func()
	files  map[string]*depotFile

	ctx     context.Context // ends with Close, for what goes on behind the caller
	cancel  context.CancelFunc
	proofs  sync.WaitGroup
	saving  sync.Mutex // of the store's record
	entries sync.Mutex // of every ranges file; taken before mu

	mu      sync.Mutex
	cond    *sync.Cond
	check   func(name string, off int64, b []byte) error
	kept    int64 // bytes that came on demand and are here
	clock   int64 // counts uses
	fixed   error // why nothing can be dropped
	noRoom  bool  // the drive was full
	stats   DepotStats
	busy    int
	since   time.Time
	arrived atomic.Int64 // of install, for its progress
}

type depotFile struct {
	f       *storeFile
	whole   bool
	have    spans
	flying  spans    // on its way in or out
	base    []record // of what is never dropped
	units   []*unit  // of what came on demand, by offset
	log     int      // records in the ranges file
	proving bool
}

// DepotStats is the account of a depot since it was opened.
type DepotStats struct {
	Requests int64         `json:"requests"` // for ranges of shards, that brought what they were to
	Bytes    int64         `json:"bytes"`    // that came over the network
	Busy     time.Duration `json:"busy"`     // at least one request in flight
	Kept     int64         `json:"kept"`     // bytes added to the store
	Dropped  int64         `json:"dropped"`  // bytes dropped to keep within the bound
	Rate     float64       `json:"rate"`     // bytes per second while busy
}

// ErrKeep says that the depot may not keep any more.
var ErrKeep = errors.New("the room for experts is used up, and none of it can be freed")

// OpenDepot opens or makes a depot: it fetches all files but the shards, and of the
// shards the headers and the dense weights. What is there already is not fetched. The
// options are remembered for [OpenStream]. Confirm is asked once the headers are here.
func OpenDepot(ctx context.Context, o DepotOptions) (*Depot, error) {
	d, err := openDepot(ctx, o, true)
	return d, inDir(o.Dir, err)
}

// OpenStream opens a depot that [OpenDepot] has installed completely, with the sources,
// the bound and the trust that it remembers. It asks no source anything.
func OpenStream(ctx context.Context, o DepotOptions) (*Depot, error) {
	d, err := openDepot(ctx, o, false)
	return d, inDir(o.Dir, err)
}

// IsStream tells whether dir is a store that fills on demand and is not complete.
func IsStream(dir string) bool { return exists(filepath.Join(dir, streamName)) }

// streamRecord is what a store that fills on demand remembers.
type streamRecord struct {
	Format    int      `json:"format"`
	Sources   []string `json:"sources"`
	Keep      int64    `json:"keep,omitempty"` // bytes; 0 is no bound
	TrustHTTP bool     `json:"trust_http,omitempty"`
	Installed bool     `json:"installed"` // all that is dense is here

	// Where each shard that fills has what is dense: [first, behind the last] bytes.
	Dense map[string][][2]int64 `json:"dense,omitempty"`
}

// lacking is what is dense of a shard and not there, though it once was: a file was cut, or
// what says what is in it was lost. Without it a run would compute with zeros.
func (r *streamRecord) lacking(name string, have spans) spans {
	dense, ok := r.Dense[name]
	if !ok {
		return spans{{0, headerPrefix}} // it was whole
	}
	var out spans
	for _, x := range dense {
		out = append(out, have.missing(span{x[0], x[1]})...)
	}
	return out
}

var errUninstalled = errors.New("is not completely installed: run 'deltafin fetch --stream' on it, it goes on from here")

const streamLimit = 1 << 20 // bytes

func (s *store) stream() (*streamRecord, error) {
	b, err := readBounded(filepath.Join(s.dir, streamName), streamLimit)
	if errors.Is(err, fs.ErrNotExist) {
		return &streamRecord{Format: inventoryFormat}, nil
	}
	if err != nil {
		return nil, plain(err)
	}
	var r streamRecord
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("%s: %w: remove it, and run 'deltafin fetch --stream' again", streamName, err)
	}
	if r.Format != inventoryFormat {
		return nil, fmt.Errorf("%s: has format %d, this program reads %d: use the version that wrote it, or fetch into a new directory", streamName, r.Format, inventoryFormat)
	}
	if r.Keep < 0 {
		return nil, fmt.Errorf("%s: keeps %d bytes: remove it, and run 'deltafin fetch --stream' again", streamName, r.Keep)
	}
	return &r, nil
}

func (s *store) saveStream(r *streamRecord) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return s.replace(streamName, append(b, '\n'))
}

// uninstall says of a store that fills on demand that its dense weights are to be
// looked at again before it is used.
func (s *store) uninstall() error {
	r, err := s.stream()
	if err != nil {
		return err
	}
	r.Installed = false
	return s.saveStream(r)
}

func isShard(f *storeFile) bool { return strings.HasSuffix(f.Name, ".safetensors") }

func openDepot(ctx context.Context, o DepotOptions, install bool) (_ *Depot, err error) {
	if len(o.Spread) > 0 {
		return nil, errors.New("a store that fills on demand cannot be spread over drives: give one directory")
	}
	s, err := openStore(o.Dir, o.hooks)
	if err != nil {
		return nil, err
	}
	was, err := s.stream()
	if err != nil {
		return nil, err
	}
	if !install && !was.Installed {
		return nil, errUninstalled
	}
	if len(o.Sources) == 0 {
		o.Sources = was.Sources
	}
	if o.Keep == 0 {
		o.Keep = was.Keep
	}
	o.Keep = max(o.Keep, 0)
	o.TrustHTTP = o.TrustHTTP || was.TrustHTTP
	if o.Repo == "" && s.rec != nil {
		o.Repo = s.rec.Repo
	}
	if err := o.defaults(); err != nil {
		return nil, err
	}
	d := &Depot{o: o, s: s, rate: bucket{rate: o.BytesPerSecond}, files: map[string]*depotFile{}, unlock: func() {}}
	d.cond = sync.NewCond(&d.mu)
	d.ctx, d.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if d.c, err = newClient(&d.o.Options); err != nil {
		return nil, err
	}
	if o.Digest == nil && !o.TrustHTTP {
		for _, s := range d.c.sources {
			if !s.safe() {
				return nil, s.unsafe()
			}
		}
	}
	if d.unlock, err = lockAll(&d.o.Options); err != nil {
		d.unlock = func() {}
		return nil, err
	}
	if d.s, err = openStore(o.Dir, o.hooks); err != nil { // as it is under the lock
		return nil, err
	}
	p, err := prepare(ctx, &d.o.Options, d.c, d.s)
	if err != nil {
		return nil, err
	}
	now := &streamRecord{Format: inventoryFormat, Sources: o.Sources, Keep: o.Keep, TrustHTTP: o.TrustHTTP, Installed: was.Installed && !install}
	if install {
		if err := errors.Join(d.s.save(), d.s.saveStream(now)); err != nil {
			return nil, err
		}
	}
	if err := newFetcher(d.quiet(), d.c, d.s, func(f *storeFile) bool { return !isShard(f) }).run(ctx); err != nil {
		return nil, err
	}
	for i := range d.s.rec.Files {
		f := &d.s.rec.Files[i]
		if !isShard(f) {
			continue
		}
		if install {
			err = d.examine(ctx, f)
		}
		if err == nil {
			d.files[f.Name], err = d.begin(f)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, plain(err))
		}
		if df := d.files[f.Name]; !install && !df.whole && len(was.lacking(f.Name, df.have)) > 0 {
			return nil, fmt.Errorf("%s: dense weights are missing: the model %w", f.Name, errUninstalled)
		}
	}
	if d.o.Keep > 0 {
		if err := d.s.hooks.punch(d.s.dir); err != nil {
			d.fixed = err
			d.o.Log(fmt.Sprintf("%s: nothing can be dropped here to keep within %s (%v): what is beyond is fetched each time", d.s.dir, gb(d.o.Keep), plain(err)))
		}
	}
	if install {
		if now.Dense, err = d.install(ctx, p); err != nil {
			return nil, err
		}
		now.Installed = true
		if err := d.s.saveStream(now); err != nil {
			return nil, err
		}
	}
	for _, df := range d.files {
		d.settle(df)
	}
	d.saving.Lock()
	defer d.saving.Unlock()
	d.whole()
	return d, nil
}

// quiet are the options without the progress, which is that of the shards.
func (d *Depot) quiet() *Options {
	o := d.o.Options
	o.Progress = nil
	return &o
}

// examine compares a shard that is here under its name, and not known to be right, with
// its digest. If that is wrong nothing of it counts.
func (d *Depot) examine(ctx context.Context, f *storeFile) error {
	if d.s.whole(f) || !d.s.adoptable(f) {
		return nil
	}
	dig, modified, err := digest(ctx, &f.File, d.s.path(f))
	if err != nil {
		return err
	}
	if f.Verified = 0; dig.proves(&f.File) {
		f.SHA256, f.Chain, f.Chunk, f.Verified = dig.sha256, dig.chain, chunkBytes, modified
	} else {
		f.Chain = nil
		d.o.Log(fmt.Sprintf("%s: is here but its digest is wrong: fetched again", f.Name))
	}
	return d.s.save()
}

// begin makes a shard of the right size that has nothing in it yet, or takes up what
// is there of it.
func (d *Depot) begin(f *storeFile) (*depotFile, error) {
	if d.s.whole(f) || f.proven() && d.s.adoptable(f) {
		return &depotFile{f: f, whole: true}, nil
	}
	if f.Dir != "" {
		return nil, fmt.Errorf("is on another drive, %s, and a store that fills on demand is in one directory: run 'deltafin fetch --full', or stream into another directory", f.Dir)
	}
	path := d.s.path(f)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	if !exists(path+rangesSuffix) && exists(path+partSuffix) && exists(path+journalSuffix) {
		if err := d.take(f, path); err != nil {
			return nil, err
		}
	}
	var written int64
	for _, at := range []string{path, path + partSuffix} {
		if info, err := os.Stat(at); err == nil && exists(path+rangesSuffix) {
			written = min(info.Size(), f.Size)
			break
		}
	}
	d.s.hooks.stepped("open ranges of " + f.Name)
	j, err := openJournal(path+rangesSuffix, &f.File, written)
	if err != nil {
		return nil, err
	}
	df := &depotFile{f: f, have: j.have, log: len(j.records) + len(j.dropped)}
	for _, r := range j.records {
		if r.demand {
			df.units = append(df.units, &unit{record: r, df: df})
			d.kept += r.bytes()
		} else {
			df.base = append(df.base, r)
		}
	}
	slices.SortFunc(df.units, func(a, b *unit) int { return cmp.Compare(a.off, b.off) })
	if err := j.close(); err != nil {
		return nil, err
	}
	if !exists(path) && exists(path+partSuffix) {
		d.s.hooks.stepped("take " + f.Name)
		if err := os.Rename(path+partSuffix, path); err != nil {
			return nil, err
		}
	}
	d.s.hooks.stepped("size " + f.Name)
	out, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if info, serr := out.Stat(); serr != nil || info.Size() != f.Size {
		err = out.Truncate(f.Size)
	}
	for _, x := range j.dropped { // a crash may have come between the record and the hole
		if err == nil {
			_ = punchHole(out, x)
		}
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	return df, err
}

// take makes ranges of an interrupted fetch's journal. What that says was neither
// flushed nor proved, and no digest of the whole file will come; so the CRCs have to
// do.
func (d *Depot) take(f *storeFile, path string) error {
	part, err := os.OpenFile(path+partSuffix, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer part.Close()
	info, err := part.Stat()
	if err != nil {
		return err
	}
	j, err := openJournal(path+journalSuffix, &f.File, info.Size())
	if err != nil {
		return err
	}
	var good []record
	buf := make([]byte, bufferBytes)
	for _, r := range j.records {
		if crc, err := crcOf(part, r.span, buf); err == nil && r.sum && crc == r.crc {
			good = append(good, r)
		}
	}
	err = j.rewrite(&f.File, good)
	if cerr := j.close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = part.Sync()
	}
	if err != nil {
		return err
	}
	d.s.hooks.stepped("take journal of " + f.Name)
	return os.Rename(path+journalSuffix, path+rangesSuffix)
}

// install brings the headers, and then the dense weights. It returns where these are.
func (d *Depot) install(ctx context.Context, p *Plan) (map[string][][2]int64, error) {
	names := slices.Sorted(maps.Keys(d.files))
	dense := make([]spans, len(names))
	heads, hctx := errgroup.WithContext(ctx)
	heads.SetLimit(d.o.Connections)
	for i, name := range names {
		if df := d.files[name]; !df.whole {
			heads.Go(func() (err error) {
				dense[i], err = d.dense(hctx, df)
				return err
			})
		}
	}
	if err := heads.Wait(); err != nil {
		return nil, err
	}
	where := map[string][][2]int64{}
	var total, need int64
	for i, name := range names {
		for _, x := range dense[i] {
			where[name] = append(where[name], [2]int64{x.off, x.end})
			total += x.bytes()
			for _, gap := range d.files[name].have.missing(x) {
				need += gap.bytes()
			}
		}
	}
	if err := d.fits(p, total, need); err != nil {
		return nil, err
	}
	if d.o.Progress != nil {
		var m meter
		d.arrived.Store(total - need)
		defer report(func() {
			at := Progress{Done: d.arrived.Load(), Total: total}
			at.Rate = m.update(at.Done, time.Now())
			at.ETA = eta(total-at.Done, at.Rate)
			d.o.Progress(at)
		})()
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(d.o.Connections)
	for i, name := range names {
		for _, x := range dense[i] {
			for x.off < x.end && gctx.Err() == nil {
				n := min(d.o.PartBytes, installBytes, x.bytes())
				part := span{x.off, x.off + n}
				g.Go(func() error {
					_, err := d.obtain(gctx, d.files[name], part, nil, false)
					return err
				})
				x.off += n
			}
		}
	}
	return where, g.Wait()
}

// installBytes of a part lie in memory, for each connection.
const installBytes = 16 << 20

// fits looks for the room that the dense weights need, and what may be kept besides,
// and has the plan confirmed.
func (d *Depot) fits(p *Plan, total, need int64) error {
	at := DrivePlan{Dir: d.s.dir, Files: len(d.files), Need: need + max(0, d.o.Keep-d.kept), Keep: d.o.KeepFree, Free: -1}
	if at.Keep == 0 {
		at.Keep = at.Need / 100
	}
	if free, err := d.s.hooks.freeSpace(d.s.dir); err == nil {
		at.Free = free
	}
	p.Have, p.Check, p.Arrived, p.Need, p.Drives = total-need, 0, d.kept, need, []DrivePlan{at}
	if err := p.fits(); err != nil {
		return err
	}
	if d.o.Confirm != nil {
		return d.o.Confirm(p)
	}
	return nil
}

const (
	headerPrefix = 8
	headerLimit  = 100_000_000 // bytes, the limit of the format's own library
	expertInfix  = ".block_sparse_moe.experts."
)

// dense reads a shard's header, fetching it first, and returns where everything is
// that does not belong to a routed expert.
func (d *Depot) dense(ctx context.Context, df *depotFile) (spans, error) {
	f := df.f
	if f.Size < headerPrefix {
		return nil, fmt.Errorf("%s: is %d bytes long, too short for a safetensors file: use another source", f.Name, f.Size)
	}
	if _, err := d.obtain(ctx, df, span{0, headerPrefix}, nil, false); err != nil {
		return nil, err
	}
	in, err := os.Open(d.s.path(f))
	if err != nil {
		return nil, plain(err)
	}
	defer in.Close()
	var prefix [headerPrefix]byte
	if _, err := in.ReadAt(prefix[:], 0); err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name, plain(err))
	}
	n := binary.LittleEndian.Uint64(prefix[:])
	if n > headerLimit || int64(n) > f.Size-headerPrefix {
		return nil, fmt.Errorf("%s: claims a header of %d bytes: not a safetensors file, use another source", f.Name, n)
	}
	data := headerPrefix + int64(n)
	if _, err := d.obtain(ctx, df, span{0, data}, nil, false); err != nil {
		return nil, err
	}
	head := make([]byte, n)
	if _, err := in.ReadAt(head, headerPrefix); err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name, plain(err))
	}
	s, err := denseSpans(head, data, f.Size)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name, err)
	}
	return s, nil
}

// denseSpans finds, in the header of a safetensors file whose data begin at data,
// the bytes of everything but routed experts.
func denseSpans(head []byte, data, size int64) (spans, error) {
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(head, &entries); err != nil {
		return nil, fmt.Errorf("its header cannot be read: %w: use another source", err)
	}
	dense := spans{{0, data}}
	for name, raw := range entries {
		if name == "__metadata__" || strings.Contains(name, expertInfix) {
			continue
		}
		var e struct {
			Offsets []int64 `json:"data_offsets"`
		}
		if err := json.Unmarshal(raw, &e); err != nil || len(e.Offsets) != 2 || e.Offsets[0] < 0 || e.Offsets[1] < e.Offsets[0] || e.Offsets[1] > size-data {
			return nil, fmt.Errorf("its header puts tensor %.80q nowhere in the file: use another source", name)
		}
		dense = dense.add(span{data + e.Offsets[0], data + e.Offsets[1]})
	}
	return dense, nil
}

// Has tells whether all of a range is in the store. Name is that of a shard.
func (d *Depot) Has(name string, off, n int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	df := d.files[name]
	return df != nil && off >= 0 && n >= 0 && off <= df.f.Size-n && (df.whole || df.have.has(span{off, off + n}))
}

func (d *Depot) file(name string, off, n int64) (*depotFile, error) {
	df := d.files[name]
	if df == nil {
		return nil, fmt.Errorf("%s: %s: is no shard of the model", d.o.Dir, name)
	}
	if off < 0 || n < 0 || off > df.f.Size-n {
		return nil, fmt.Errorf("%s: %s: has no bytes %d to %d, it is %d bytes long", d.o.Dir, name, off, off+n, df.f.Size)
	}
	return df, nil
}

// Check makes check look at each range that arrives from now on, whatever is in it.
// Its error refuses the range, as a wrong digest does.
func (d *Depot) Check(check func(name string, off int64, b []byte) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.check = check
}

// Ensure brings a range into the store, unless it is there. Several calls for the
// same bytes fetch them once. It returns [ErrKeep] if they may not be kept.
func (d *Depot) Ensure(ctx context.Context, name string, off, n int64) error {
	df, err := d.file(name, off, n)
	if err == nil {
		_, err = d.obtain(ctx, df, span{off, off + n}, nil, true)
		err = inDir(d.o.Dir, err)
	}
	return err
}

// Read fills dst with the bytes of a range. What is not in the store is fetched, and
// kept if there is room.
func (d *Depot) Read(ctx context.Context, name string, off int64, dst []byte) error {
	n := int64(len(dst))
	df, err := d.file(name, off, n)
	if err != nil {
		return err
	}
	for {
		if release, ok := d.Hold(name, off, n); ok {
			err := d.readBack(df, off, dst)
			release()
			return err
		}
		if there, err := d.obtain(ctx, df, span{off, off + n}, dst, true); there || err != nil {
			return inDir(d.o.Dir, err)
		}
	}
}

func (d *Depot) readBack(df *depotFile, off int64, dst []byte) error {
	in, err := os.Open(d.s.path(df.f))
	if err != nil {
		return fmt.Errorf("%s: %s: %w", d.o.Dir, df.f.Name, plain(err))
	}
	defer in.Close()
	if n, err := in.ReadAt(dst, off); n < len(dst) {
		return fmt.Errorf("%s: %s: cannot be read at byte %d: %w", d.o.Dir, df.f.Name, off+int64(n), plain(err))
	}
	return nil
}

// obtain fetches what is missing of x. A part that somebody else is fetching is
// waited for; if that fails, it is tried here. With dst, which is as long as x, it
// reports whether the bytes are in dst; they need not be in the store then.
func (d *Depot) obtain(ctx context.Context, df *depotFile, x span, dst []byte, demand bool) (there bool, err error) {
	stop := context.AfterFunc(ctx, func() {
		d.mu.Lock() // so that nobody is between looking and waiting
		defer d.mu.Unlock()
		d.cond.Broadcast()
	})
	defer stop()
	for {
		c, err := d.claim(ctx, df, x, dst != nil, demand)
		if err != nil {
			return false, err
		}
		if len(c.gaps) == 0 {
			return false, nil
		}
		if !c.keep {
			return true, d.fetch(ctx, df.f, x, dst)
		}
		b := dst
		if c.run != x || dst == nil {
			b = make([]byte, c.run.bytes())
		}
		fetched := d.fetch(ctx, df.f, c.run, b)
		err = fetched
		if err == nil {
			if err = d.deposit(df, c, b, demand); err != nil {
				err = fmt.Errorf("%s: %w", df.f.Name, plain(err))
			}
		}
		d.mu.Lock()
		df.flying = df.flying.without(c.run)
		if err != nil && demand {
			d.kept -= c.gaps.bytes()
		}
		full := fetched == nil && disk.Full(err)
		news := full && !d.noRoom
		d.noRoom = d.noRoom || full
		d.cond.Broadcast()
		d.mu.Unlock()
		switch {
		case err == nil:
			d.arrived.Add(c.gaps.bytes())
			d.settle(df)
		case full && dst != nil && c.run == x:
			if news {
				d.o.Log(fmt.Sprintf("%s: %v; until there is room, experts are used and not kept", d.o.Dir, err))
			}
			err = nil
		default:
			return false, err
		}
		if dst != nil && c.run == x {
			return true, nil
		}
	}
}

// claim is what one request is to bring.
type claim struct {
	run  span
	gaps spans // what of the run is missing
	keep bool
}

// claim waits until something of x is missing that nobody else fetches. It is empty
// if nothing is missing.
func (d *Depot) claim(ctx context.Context, df *depotFile, x span, once, demand bool) (claim, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		if err := context.Cause(ctx); err != nil {
			return claim{}, err
		}
		if df.whole {
			return claim{}, nil
		}
		gaps := df.have.missing(x)
		if len(gaps) == 0 {
			return claim{}, nil
		}
		// Small islands are fetched again rather than asking twice.
		run := span{gaps[0].off, gaps[len(gaps)-1].end}
		if run.bytes()-gaps.bytes() > run.bytes()/8 || df.flying.overlaps(run) {
			run = span{}
			for _, gap := range gaps {
				if free := df.flying.missing(gap); len(free) > 0 {
					run = free[0]
					break
				}
			}
			if run.bytes() == 0 {
				d.cond.Wait()
				continue
			}
		}
		if !once || run != x {
			run.end = min(run.end, run.off+max(d.o.PartBytes, 1<<20))
		}
		c := claim{run: run, gaps: df.have.missing(run), keep: true}
		if demand {
			switch moved, ok := d.makeRoom(c.gaps.bytes()); {
			case moved:
				continue // the lock was free for a while
			case !ok && !once:
				return claim{}, ErrKeep
			case !ok:
				c.keep = false
				return c, nil
			}
			d.kept += c.gaps.bytes()
		}
		df.flying = df.flying.add(run)
		return c, nil
	}
}

// deposit writes what came for a claim, flushes it and enters it, in this order.
func (d *Depot) deposit(df *depotFile, c claim, b []byte, demand bool) error {
	path := d.s.path(df.f)
	if err := d.s.hooks.writing(path, c.run.off, len(b)); err != nil {
		return err
	}
	out, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	d.s.hooks.stepped("write into " + df.f.Name)
	if _, err = out.WriteAt(b, c.run.off); err == nil {
		d.s.hooks.stepped("sync " + df.f.Name)
		err = out.Sync()
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	records := make([]record, len(c.gaps))
	for i, x := range c.gaps {
		records[i] = record{span: x, crc: crc32.Checksum(b[x.off-c.run.off:x.end-c.run.off], castagnoli), sum: true, demand: demand, hour: hourOf(time.Now())}
	}
	d.entries.Lock()
	defer d.entries.Unlock()
	d.s.hooks.stepped("enter " + df.f.Name)
	if err := d.enter(df, records, false); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range records {
		df.have = df.have.add(r.span)
		d.stats.Kept += r.bytes()
		if demand {
			d.clock++
			df.insert(&unit{record: r, df: df, used: d.clock})
		} else {
			df.base = append(df.base, r)
		}
	}
	return nil
}

// fetch fills dst from the sources and checks it.
func (d *Depot) fetch(ctx context.Context, f *storeFile, x span, dst []byte) error {
	d.began()
	defer d.ended()
	dead := map[*source]error{}
	refused, tries, got := map[*source]int{}, 0, int64(0)
	for {
		s, err := d.c.pick(ctx, dead, 0)
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
		n, err := d.c.read(ctx, s, &f.File, "", span{x.off + got, x.end}, dst[got:], &d.rate)
		if got += n; n > 0 {
			s.worked()
			tries = 0
		}
		if err == nil && got < x.bytes() {
			continue // the server gave less than it was asked for
		}
		if err == nil {
			if err = d.accept(s, f, x, dst); err == nil {
				return nil
			}
			// Wrong bytes may be a fault of the way: once more, then never again from there.
			got = 0
			if refused[s]++; refused[s] > 1 {
				dead[s] = err
			}
			d.o.Log(fmt.Sprintf("%s: %v", f.Name, err))
			continue
		}
		r, ok := errors.AsType[*refusal](err)
		switch {
		case !ok:
			return err
		case r.final:
			dead[s] = r
		case n == 0:
			if tries++; tries > d.o.Retries {
				return fmt.Errorf("%s: bytes %d to %d: %w: given up after %d attempts without a byte", f.Name, x.off, x.end, r, tries)
			}
			wait := s.failed(r.wait, d.c.now(), d.o.Backoff)
			d.o.Log(fmt.Sprintf("%s: %v: %s", f.Name, r, again(tries, d.o.Retries, wait)))
		}
	}
}

func (s *source) safe() bool { return strings.HasPrefix(s.origin, "https://") }

func (s *source) unsafe() error {
	return &refusal{source: s.String(), what: "is not https, and nobody knows the digest of a part of a file: use an https source, or say with --trust-http that this network is trusted", final: true}
}

// accept checks what arrived.
func (d *Depot) accept(s *source, f *storeFile, x span, b []byte) error {
	d.mu.Lock()
	d.stats.Requests++
	d.stats.Bytes += int64(len(b))
	check := d.check
	d.mu.Unlock()
	known := false
	if d.o.Digest != nil {
		var sum [sha256.Size]byte
		if sum, known = d.o.Digest(f.Name, x.off, x.bytes()); known && sum != sha256.Sum256(b) {
			return &refusal{source: s.String(), what: fmt.Sprintf("sends bytes %d to %d with a wrong digest: use another source", x.off, x.end), final: true}
		}
	}
	if !known && !d.o.TrustHTTP && !s.safe() {
		return s.unsafe()
	}
	if check != nil {
		if err := check(f.Name, x.off, b); err != nil {
			return &refusal{source: s.String(), what: fmt.Sprintf("sends bytes %d to %d that cannot be right", x.off, x.end), final: true, err: err}
		}
	}
	return nil
}

func (d *Depot) began() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.busy++; d.busy == 1 {
		d.since = time.Now()
	}
}

func (d *Depot) ended() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.busy--; d.busy == 0 {
		d.stats.Busy += time.Since(d.since)
	}
}

// Stats returns the account so far.
func (d *Depot) Stats() DepotStats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.stats
	if d.busy > 0 {
		s.Busy += time.Since(d.since)
	}
	if s.Busy > 0 {
		s.Rate = float64(s.Bytes) / s.Busy.Seconds()
	}
	return s
}
