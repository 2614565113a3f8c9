package hub

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// DepotOptions of a store that fills on demand.
type DepotOptions struct {
	Options // where from and where to; Spread is not supported

	// Budget bounds the bytes that reads on demand may add to the store; 0 means
	// no bound. Beyond it what is read is fetched each time and not kept.
	Budget int64

	// Digest knows the SHA-256 of some ranges, such as those of experts. What differs
	// is refused, and fetched from another source.
	Digest func(name string, off, n int64) (sum [sha256.Size]byte, ok bool)

	// Check looks at each range that has arrived, whatever is in it. An error refuses
	// the range, as Digest does.
	Check func(name string, off int64, b []byte) error

	// TrustHTTP allows ranges without a digest to come over plain HTTP, where nothing
	// protects them on the way. Over https they are as good as the hub is.
	TrustHTTP bool
}

// Depot is a store whose shards fill while they are used. A shard has its name and
// its size from the beginning; NAME.ranges beside it says which bytes are there. A
// range is entered there after it was checked, written and flushed to the drive, so
// it is there whole or not at all, and is never fetched twice. Its methods may be
// called from several goroutines.
//
// Fetch on the same directory makes a full store of it and fetches only the rest.
type Depot struct {
	o      DepotOptions
	c      *client
	s      *store
	rate   bucket
	unlock func()

	mu    sync.Mutex
	cond  *sync.Cond
	files map[string]*depotFile
	kept  int64 // bytes added on demand
	stats DepotStats
	busy  int
	since time.Time
}

type depotFile struct {
	f      *storeFile
	whole  bool
	have   spans
	flying spans
}

// DepotStats is the account of a depot since it was opened.
type DepotStats struct {
	Requests int64         `json:"requests"`
	Bytes    int64         `json:"bytes"` // that came over the network
	Busy     time.Duration `json:"busy"`  // at least one request in flight
	Kept     int64         `json:"kept"`  // bytes added to the store
	Rate     float64       `json:"rate"`  // bytes per second while busy
}

// ErrBudget says that the depot may not keep any more.
var ErrBudget = errors.New("the depot's budget of disk space is used up")

// OpenDepot opens or makes a depot: it fetches all files but the shards, and of the
// shards the headers and the dense weights. What is there already is not fetched.
func OpenDepot(ctx context.Context, o DepotOptions) (*Depot, error) {
	d, err := openDepot(ctx, o)
	return d, inDir(o.Dir, err)
}

func openDepot(ctx context.Context, o DepotOptions) (_ *Depot, err error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	if len(o.Spread) > 0 {
		return nil, errors.New("a store that fills on demand cannot be spread over drives: give one directory")
	}
	d := &Depot{o: o, rate: bucket{rate: o.BytesPerSecond}, files: map[string]*depotFile{}}
	d.cond = sync.NewCond(&d.mu)
	if d.c, err = newClient(&d.o.Options); err != nil {
		return nil, err
	}
	if d.unlock, err = lockAll(&d.o.Options); err != nil {
		d.c.close()
		return nil, err
	}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if d.s, err = openStore(o.Dir, o.hooks); err != nil {
		return nil, err
	}
	p, err := prepare(ctx, &d.o.Options, d.c, d.s)
	if err != nil {
		return nil, err
	}
	if d.o.Confirm != nil {
		if err := d.o.Confirm(p); err != nil {
			return nil, err
		}
	}
	if err := d.s.save(); err != nil {
		return nil, err
	}
	shard := func(f *storeFile) bool { return strings.HasSuffix(f.Name, ".safetensors") }
	if err := newFetcher(&d.o.Options, d.c, d.s, func(f *storeFile) bool { return !shard(f) }).run(ctx); err != nil {
		return nil, err
	}
	for i := range d.s.rec.Files {
		f := &d.s.rec.Files[i]
		if !shard(f) {
			continue
		}
		if d.files[f.Name], err = d.begin(f); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, plain(err))
		}
	}
	return d, d.install(ctx)
}

// begin makes a shard of the right size that has nothing in it yet, or takes up what
// is there of it.
func (d *Depot) begin(f *storeFile) (*depotFile, error) {
	if d.s.whole(f) || d.s.adoptable(f) {
		return &depotFile{f: f, whole: true}, nil
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
	have := j.have
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
	err = out.Truncate(f.Size)
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	return &depotFile{f: f, have: have}, err
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

// install brings the headers and the dense weights.
func (d *Depot) install(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(d.o.Connections)
	for _, name := range slices.Sorted(maps.Keys(d.files)) {
		df := d.files[name]
		if df.whole {
			continue
		}
		dense, err := d.dense(ctx, df)
		if err != nil {
			g.Wait()
			return err
		}
		for _, x := range dense {
			for x.off < x.end {
				n := min(d.o.PartBytes, x.bytes())
				off := x.off
				g.Go(func() error { return d.ensure(ctx, df, span{off, off + n}, false) })
				x.off += n
			}
		}
	}
	return g.Wait()
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
	if err := d.ensure(ctx, df, span{0, headerPrefix}, false); err != nil {
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
	if err := d.ensure(ctx, df, span{0, data}, false); err != nil {
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

// Ensure brings a range into the store, unless it is there. Several calls for the
// same bytes fetch them once. It returns [ErrBudget] if they may not be kept.
func (d *Depot) Ensure(ctx context.Context, name string, off, n int64) error {
	df, err := d.file(name, off, n)
	if err == nil {
		err = inDir(d.o.Dir, d.ensure(ctx, df, span{off, off + n}, true))
	}
	return err
}

// Read fills dst with the bytes of a range. What is not in the store is fetched, and
// kept if the budget has room.
func (d *Depot) Read(ctx context.Context, name string, off int64, dst []byte) error {
	x := span{off, off + int64(len(dst))}
	df, err := d.file(name, off, int64(len(dst)))
	if err != nil {
		return err
	}
	err = d.ensure(ctx, df, x, true)
	if errors.Is(err, ErrBudget) {
		return inDir(d.o.Dir, d.fetch(ctx, df.f, x, dst))
	}
	if err != nil {
		return inDir(d.o.Dir, err)
	}
	in, err := os.Open(d.s.path(df.f))
	if err != nil {
		return fmt.Errorf("%s: %s: %w", d.o.Dir, name, plain(err))
	}
	defer in.Close()
	if n, err := in.ReadAt(dst, off); n < len(dst) {
		return fmt.Errorf("%s: %s: cannot be read at byte %d: %w", d.o.Dir, name, off+int64(n), plain(err))
	}
	return nil
}

// ensure fetches what is missing of x. A part that somebody else is fetching is
// waited for; if that fails, it is tried here.
func (d *Depot) ensure(ctx context.Context, df *depotFile, x span, demand bool) error {
	stop := context.AfterFunc(ctx, d.cond.Broadcast)
	defer stop()
	for {
		d.mu.Lock()
		var gaps spans
		for {
			if err := context.Cause(ctx); err != nil {
				d.mu.Unlock()
				return err
			}
			gaps = nil
			if !df.whole {
				gaps = df.have.missing(x)
			}
			if len(gaps) == 0 {
				d.mu.Unlock()
				return nil
			}
			if free := df.flying.missing(gaps[0]); len(free) > 0 {
				gaps = free[:1]
				break
			}
			d.cond.Wait()
		}
		gap := gaps[0]
		gap.end = min(gap.end, gap.off+max(d.o.PartBytes, 1<<20))
		if demand {
			if d.o.Budget > 0 && d.kept+gap.bytes() > d.o.Budget {
				d.mu.Unlock()
				return ErrBudget
			}
			d.kept += gap.bytes()
		}
		df.flying = df.flying.add(gap)
		d.mu.Unlock()

		err := d.bring(ctx, df, gap)

		d.mu.Lock()
		df.flying = df.flying.without(gap)
		if err == nil {
			df.have = df.have.add(gap)
			d.stats.Kept += gap.bytes()
		} else if demand {
			d.kept -= gap.bytes()
		}
		d.cond.Broadcast()
		d.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// bring fetches a gap, writes it and enters it, in this order.
func (d *Depot) bring(ctx context.Context, df *depotFile, x span) error {
	b := make([]byte, x.bytes())
	if err := d.fetch(ctx, df.f, x, b); err != nil {
		return err
	}
	err := d.deposit(df.f, x, b)
	if err != nil {
		err = fmt.Errorf("%s: %w", df.f.Name, plain(err))
	}
	return err
}

func (d *Depot) deposit(f *storeFile, x span, b []byte) error {
	path := d.s.path(f)
	if err := d.s.hooks.writing(path, x.off, len(b)); err != nil {
		return err
	}
	out, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	d.s.hooks.stepped("write into " + f.Name)
	if _, err = out.WriteAt(b, x.off); err == nil {
		d.s.hooks.stepped("sync " + f.Name)
		err = out.Sync()
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	d.mu.Lock() // one record at a time
	defer d.mu.Unlock()
	d.s.hooks.stepped("enter " + f.Name)
	log, err := os.OpenFile(path+rangesSuffix, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = log.Write(record{x, crc32.Checksum(b, castagnoli), true}.encode())
	if cerr := log.Close(); err == nil {
		err = cerr
	}
	return err
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
		n, err := d.once(ctx, s, f, span{x.off + got, x.end}, dst[got:])
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
				return fmt.Errorf("%s: %w: given up after %d attempts without a byte", f.Name, r, tries)
			}
			s.failed(r.wait, d.c.now(), d.o.Backoff)
		}
	}
}

// once makes one request and returns how many bytes came.
func (d *Depot) once(ctx context.Context, s *source, f *storeFile, x span, dst []byte) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a, err := d.c.open(ctx, s, &f.File, x)
	if err != nil {
		return 0, err
	}
	defer a.Close()
	if a.off != x.off || a.end > x.end {
		return 0, &refusal{source: s.String(), what: "knows no ranges, so that experts cannot be had from it one by one: use another source, or fetch the whole model", final: true}
	}
	body := &watched{body: a, cancel: cancel, limit: d.c.stall}
	got, want := int64(0), a.end-x.off
	for got < want {
		n, rerr := body.Read(dst[got:min(got+bufferBytes, want)])
		got += int64(n)
		if err := d.rate.take(ctx, n); err != nil {
			return got, err
		}
		if rerr != nil && got < want {
			return got, d.c.broke(ctx, s, x.off+got, rerr)
		}
	}
	return got, nil
}

// accept checks what arrived.
func (d *Depot) accept(s *source, f *storeFile, x span, b []byte) error {
	d.mu.Lock()
	d.stats.Requests++
	d.stats.Bytes += int64(len(b))
	d.mu.Unlock()
	known := false
	if d.o.Digest != nil {
		var sum [sha256.Size]byte
		if sum, known = d.o.Digest(f.Name, x.off, x.bytes()); known && sum != sha256.Sum256(b) {
			return &refusal{source: s.String(), what: fmt.Sprintf("sends bytes %d to %d with a wrong digest: use another source", x.off, x.end), final: true}
		}
	}
	if !known && !d.o.TrustHTTP && !strings.HasPrefix(s.origin, "https://") {
		return &refusal{source: s.String(), what: "is not https, and nobody knows the digest of a part of a file: use an https source, or say that this network is trusted", final: true}
	}
	if d.o.Check != nil {
		if err := d.o.Check(f.Name, x.off, b); err != nil {
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

// Close gives the directory free for others. No call may be in progress.
func (d *Depot) Close() error {
	d.c.close()
	d.unlock()
	return nil
}
