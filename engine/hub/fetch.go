package hub

import (
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/disk"
)

const (
	// journalEvery is how much a killed process loses per connection at most.
	journalEvery = 8 << 20
	bufferBytes  = 1 << 20
)

// fetcher runs one fetch. Connections take parts of files in order; for each file
// that is being worked on, a prover follows behind and hashes what has arrived.
type fetcher struct {
	o    *Options
	c    *client
	s    *store
	rate bucket

	arrived atomic.Int64 // bytes that are here, of all files
	checked atomic.Int64 // likewise, of files that were here and are only read
	moved   atomic.Int64 // bytes that came over the network, counted however often
	total   int64

	mu       sync.Mutex // of what follows, and of every job
	cond     *sync.Cond
	jobs     []*job
	open     int
	finished int
	whole    int // files that were here from the beginning
	err      error
	cancel   context.CancelCauseFunc
	provers  *errgroup.Group
	saving   sync.Mutex
}

type job struct {
	f       *storeFile
	state   jobState
	part    *os.File
	journal *journal
	pending []span // to be fetched, not handed out
	handed  []span // being fetched
	stream  bool   // one answer brings the whole file, the server knows no ranges
	proved  int64
	dead    map[*source]error // of no use for this file
	round   int               // how often the digest was wrong though every CRC was right
	chained bool              // the chain of an earlier copy was tried
	before  map[span]uint32   // CRCs of the round before
	differs int               // ranges that came differently in this round
}

type jobState uint8

const (
	jobWaiting jobState = iota
	jobChecking
	jobFetching
	jobDone
)

// newFetcher makes a fetch of those files of the store's record that are wanted.
func newFetcher(o *Options, c *client, s *store, want func(*storeFile) bool) *fetcher {
	f := &fetcher{o: o, c: c, s: s, rate: bucket{rate: o.BytesPerSecond}}
	f.cond = sync.NewCond(&f.mu)
	for i := range s.rec.Files {
		sf := &s.rec.Files[i]
		if !want(sf) {
			continue
		}
		f.total += sf.Size
		if s.whole(sf) {
			f.whole++
			s.sweep(sf)
			f.arrived.Add(sf.Size)
			continue
		}
		f.jobs = append(f.jobs, &job{f: sf, dead: map[*source]error{}})
	}
	return f
}

func (f *fetcher) run(ctx context.Context) error {
	ctx, f.cancel = context.WithCancelCause(ctx)
	defer f.cancel(nil)
	stop := context.AfterFunc(ctx, func() { f.fail(context.Cause(ctx)) })
	defer stop()
	if f.o.Progress != nil {
		defer report(f.progress())()
	}
	f.provers, _ = errgroup.WithContext(ctx)
	var connections errgroup.Group
	for range f.o.Connections {
		connections.Go(func() error {
			buf := make([]byte, bufferBytes)
			for {
				j, x := f.next(ctx)
				if j == nil {
					return nil
				}
				f.part(ctx, j, x, buf)
			}
		})
	}
	connections.Wait()
	f.provers.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, j := range f.jobs {
		j.close()
	}
	return f.err
}

// fail ends the fetch. The first cause counts.
func (f *fetcher) fail(err error) {
	f.mu.Lock()
	if f.err == nil {
		f.err = err
	}
	f.mu.Unlock()
	f.cond.Broadcast()
	f.cancel(err)
}

func (j *job) close() {
	if j.part != nil {
		j.part.Close()
		j.part = nil
	}
	if j.journal != nil {
		j.journal.close()
		j.journal = nil
	}
}

// next waits for a part to fetch. It returns nil when there is nothing left to do.
func (f *fetcher) next(ctx context.Context) (*job, span) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.err == nil && f.finished < len(f.jobs) {
		for _, j := range f.jobs {
			if j.state == jobWaiting {
				if f.open >= f.o.Connections {
					break
				}
				f.open++
				j.state = jobChecking
				f.provers.Go(func() error {
					if err := f.prove(ctx, j); err != nil {
						f.fail(err)
					}
					return nil
				})
			}
			if j.state == jobFetching && !j.stream && len(j.pending) > 0 {
				x := j.pending[0]
				if x.bytes() > f.o.PartBytes {
					j.pending[0].off += f.o.PartBytes
					x.end = x.off + f.o.PartBytes
				} else {
					j.pending = j.pending[1:]
				}
				j.handed = append(j.handed, x)
				return j, x
			}
		}
		f.cond.Wait()
	}
	return nil, span{}
}

// prove works on one file until it is in place.
func (f *fetcher) prove(ctx context.Context, j *job) error {
	name := j.f.Name
	if err := f.begin(ctx, j); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if j.state == jobDone { // only the prover writes it
		return nil
	}
	for {
		d, err := f.digest(ctx, j)
		if err == nil {
			err = f.settle(j)
		}
		if err != nil {
			return err
		}
		if d.proves(&j.f.File) {
			if err := f.publish(j, d); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		}
		if err := f.locate(ctx, j, d); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
}

// settle waits until no connection has to do with a file. All of it has arrived by
// now, but one may still be waiting for an answer that it will not need.
func (f *fetcher) settle(j *job) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.err == nil && len(j.handed) > 0 {
		f.cond.Wait()
	}
	return f.err
}

// begin looks at what is here of a file, and lets connections fetch the rest.
func (f *fetcher) begin(ctx context.Context, j *job) error {
	path := f.s.path(j.f)
	if f.s.adoptable(j.f) {
		d, good, err := f.read(ctx, j, path)
		if err != nil {
			return err
		}
		if d != nil {
			if err := f.finish(j, d); err != nil {
				return err
			}
			f.s.sweep(j.f)
			return nil
		}
		f.checked.Add(-j.f.Size)
		if len(good) == 0 {
			f.o.Log(fmt.Sprintf("%s: is here but its digest is wrong: fetched again", j.f.Name))
		} else {
			for _, bad := range good.missing(span{0, j.f.Size}) {
				f.o.Log(fmt.Sprintf("%s: bytes %d to %d are wrong: fetched again", j.f.Name, bad.off, bad.end))
			}
			if err := f.s.demote(j.f, good); err != nil {
				return plain(err)
			}
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return plain(err)
	}
	if err := f.s.reclaim(j.f); err != nil {
		return plain(err)
	}
	f.s.hooks.stepped("begin " + j.f.Name)
	part, err := os.OpenFile(path+partSuffix, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return plain(err)
	}
	info, err := part.Stat()
	if err == nil && info.Size() > j.f.Size {
		err = part.Truncate(j.f.Size)
	}
	var log *journal
	if err == nil {
		f.s.hooks.stepped("open journal of " + j.f.Name)
		log, err = openJournal(path+journalSuffix, &j.f.File, info.Size())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	j.part, j.journal = part, log // closed at the end
	if err != nil {
		return plain(err)
	}
	f.arrived.Add(log.have.bytes())
	j.pending = log.have.missing(span{0, j.f.Size})
	j.state = jobFetching
	f.cond.Broadcast()
	return nil
}

// reclaim turns a file that was filling on demand back into an unfinished one.
func (s *store) reclaim(f *storeFile) error {
	path := s.path(f)
	if !exists(path + rangesSuffix) {
		return nil
	}
	if exists(path) {
		s.hooks.stepped("reclaim " + f.Name)
		if err := os.Rename(path, path+partSuffix); err != nil {
			return err
		}
	}
	s.hooks.stepped("reclaim ranges of " + f.Name)
	return os.Rename(path+rangesSuffix, path+journalSuffix)
}

// demote turns a file with wrong bytes into an unfinished one that has the good ones.
func (s *store) demote(f *storeFile, good spans) error {
	path := s.path(f)
	s.hooks.stepped("demote " + f.Name)
	os.Remove(path + journalSuffix)
	j, err := openJournal(path+journalSuffix, &f.File, f.Size)
	if err != nil {
		return err
	}
	err = j.rewrite(&f.File, good.records())
	if cerr := j.close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	s.hooks.stepped("demote, rename " + f.Name)
	return os.Rename(path, path+partSuffix)
}

// part fetches a run of bytes, from whichever source can give it.
func (f *fetcher) part(ctx context.Context, j *job, x span, buf []byte) {
	err := f.insist(ctx, j, x, buf)
	if err != nil {
		f.fail(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	j.handed = slices.DeleteFunc(j.handed, func(o span) bool { return o == x })
	if f.err == nil {
		j.pending = append(j.pending, j.journal.have.missing(x)...)
	}
	f.cond.Broadcast()
}

// insist asks for a run of bytes until it has arrived, or until it is plain that it
// will not, or that it comes otherwise.
func (f *fetcher) insist(ctx context.Context, j *job, x span, buf []byte) error {
	for tries := 0; ; {
		f.mu.Lock()
		gaps, dead, round := j.journal.have.missing(x), maps.Clone(j.dead), j.round
		f.mu.Unlock()
		if len(gaps) == 0 {
			return nil
		}
		s, err := f.c.pick(ctx, dead, round)
		if err != nil {
			return fmt.Errorf("%s: %w", j.f.Name, err)
		}
		got, err := f.transfer(ctx, j, s, gaps[0], buf)
		if got > 0 {
			s.worked()
			tries = 0
		}
		r, refused := errors.AsType[*refusal](err)
		switch {
		case err == nil:
		case errors.Is(err, errStreaming):
			return nil
		case !refused:
			return err
		case r.final:
			f.mu.Lock()
			known := j.dead[s] != nil
			j.dead[s] = r
			f.mu.Unlock()
			if !known && len(f.c.sources) > 1 {
				f.o.Log(fmt.Sprintf("%s: %v", j.f.Name, r))
			}
		case got > 0:
			f.o.Log(fmt.Sprintf("%s: %v: gone on from there", j.f.Name, r))
		default:
			if tries++; tries > f.o.Retries {
				return fmt.Errorf("%s: %w: given up after %d attempts without a byte; run the same command again when the network is better, it goes on from here", j.f.Name, r, tries)
			}
			wait := s.failed(r.wait, f.c.now(), f.o.Backoff)
			f.o.Log(fmt.Sprintf("%s: %v: %s", j.f.Name, r, again(tries, f.o.Retries, wait)))
		}
	}
}

// errStreaming says that another answer brings the whole file, this part included.
var errStreaming = errors.New("the file comes in one answer")

// transfer makes one request for x and returns how many new bytes it brought. An
// error that is no refusal ends the fetch.
func (f *fetcher) transfer(ctx context.Context, j *job, s *source, x span, buf []byte) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a, err := f.c.open(ctx, s, &j.f.File, x)
	if err != nil {
		return 0, err
	}
	defer a.Close()
	t := &transfer{f: f, j: j, s: s, ctx: ctx, at: a.off, begun: a.off, buf: buf}
	t.body = &watched{body: a, cancel: cancel, limit: f.c.stall}
	if a.off == x.off && a.end <= x.end {
		err = t.run(a.end)
	} else {
		err = t.stream()
	}
	if ferr := t.flush(); err == nil {
		err = ferr
	}
	return t.got, err
}

// transfer is an answer that is being read.
type transfer struct {
	f    *fetcher
	j    *job
	s    *source
	ctx  context.Context
	body io.Reader
	buf  []byte

	at    int64  // the next byte
	begun int64  // bytes from here to at are written and not entered
	crc   uint32 // of these
	got   int64  // bytes entered
}

// run reads the body up to end.
func (t *transfer) run(end int64) error {
	for t.at < end {
		n, rerr := t.body.Read(t.buf[:min(int64(len(t.buf)), end-t.at, t.begun+journalEvery-t.at)])
		if err := t.put(t.buf[:n]); err != nil {
			return err
		}
		if rerr != nil && t.at < end {
			return t.cut(rerr)
		}
	}
	return nil
}

// stream reads a body that is the whole file and takes from it what is missing.
func (t *transfer) stream() error {
	f, j := t.f, t.j
	f.mu.Lock()
	busy := j.stream
	j.stream = true
	f.mu.Unlock()
	if busy {
		return errStreaming
	}
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		j.stream = false
		var others spans
		for _, h := range j.handed {
			others = others.add(h)
		}
		j.pending = nil
		for _, gap := range j.journal.have.missing(span{0, j.f.Size}) {
			j.pending = append(j.pending, others.missing(gap)...)
		}
		f.cond.Broadcast()
	}()
	for {
		f.mu.Lock()
		gaps := j.journal.have.missing(span{t.at, j.f.Size})
		f.mu.Unlock()
		if len(gaps) == 0 {
			return nil
		}
		if gaps[0].off == t.at {
			if err := t.run(min(gaps[0].end, t.at+journalEvery)); err != nil {
				return err
			}
			if err := t.flush(); err != nil {
				return err
			}
			continue
		}
		n, rerr := t.body.Read(t.buf[:min(int64(len(t.buf)), gaps[0].off-t.at)])
		t.at += int64(n)
		t.begun = t.at
		if err := f.rate.take(t.ctx, n); err != nil {
			return err
		}
		if rerr != nil {
			return t.cut(rerr)
		}
	}
}

// put writes what has arrived to the file.
func (t *transfer) put(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	f, path := t.f, t.f.s.path(t.j.f)+partSuffix
	if err := f.rate.take(t.ctx, len(b)); err != nil {
		return err
	}
	err := f.s.hooks.writing(path, t.at, len(b))
	if err == nil {
		_, err = t.j.part.WriteAt(b, t.at)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", t.j.f.Name, plain(err))
	}
	t.crc = crc32.Update(t.crc, castagnoli, b)
	t.at += int64(len(b))
	f.moved.Add(int64(len(b)))
	if t.at-t.begun >= journalEvery {
		return t.flush()
	}
	return nil
}

// flush enters what was written into the journal.
func (t *transfer) flush() error {
	if t.begun == t.at {
		return nil
	}
	f, j, r := t.f, t.j, record{span: span{t.begun, t.at}, crc: t.crc, sum: true}
	t.begun, t.crc = t.at, 0
	f.s.hooks.stepped("enter " + j.f.Name)
	f.mu.Lock()
	defer f.mu.Unlock()
	was := j.journal.have.bytes()
	if err := j.journal.add(r); err != nil {
		return fmt.Errorf("%s%s: %w", j.f.Name, journalSuffix, err)
	}
	n := j.journal.have.bytes() - was
	t.got += n
	f.arrived.Add(n)
	if crc, ok := j.before[r.span]; !ok || crc != r.crc {
		j.differs++
		if ok {
			f.o.Log(fmt.Sprintf("%s: bytes %d to %d come differently this time", j.f.Name, r.off, r.end))
		}
	}
	f.cond.Broadcast()
	return nil
}

func (t *transfer) cut(err error) error { return t.f.c.broke(t.ctx, t.s, t.at, err) }

// digests are what was found of a whole file.
type digests struct {
	sha256, git string
	chain       chain
}

func (d *digests) proves(f *File) bool {
	return (f.SHA256 == "" || f.SHA256 == d.sha256) && (f.Git == "" || f.Git == d.git) && (f.SHA256 != "" || f.Git != "")
}

// hasher digests a file in order.
type hasher struct {
	sha   hash.Hash
	git   hash.Hash // nil if nobody wants to know
	chain chain
	n     int64
	size  int64
}

func newHasher(f *File) *hasher {
	h := &hasher{sha: sha256.New(), size: f.Size}
	if f.Git != "" {
		h.git = sha1.New()
		fmt.Fprintf(h.git, "blob %d\x00", f.Size)
	}
	return h
}

// room is how many bytes may be given at once.
func (h *hasher) room() int64 { return min(h.size-h.n, chunkBytes-h.n%chunkBytes) }

func (h *hasher) write(b []byte) {
	h.sha.Write(b)
	if h.git != nil {
		h.git.Write(b)
	}
	if h.n += int64(len(b)); h.n%chunkBytes == 0 && h.n < h.size {
		h.chain = append(h.chain, hashState(h.sha)...)
	}
}

func (h *hasher) sum() *digests {
	d := &digests{sha256: hex.EncodeToString(h.sha.Sum(nil)), chain: h.chain}
	if h.git != nil {
		d.git = hex.EncodeToString(h.git.Sum(nil))
	}
	return d
}

// digest follows the connections and hashes what they have written, as the file
// gives it back.
func (f *fetcher) digest(ctx context.Context, j *job) (*digests, error) {
	h := newHasher(&j.f.File)
	buf := make([]byte, bufferBytes)
	for h.n < h.size {
		f.mu.Lock()
		for f.err == nil && j.journal.have.prefix() <= h.n {
			f.cond.Wait()
		}
		err, end := f.err, j.journal.have.prefix()
		j.proved = h.n
		f.mu.Unlock()
		if err != nil {
			return nil, err
		}
		for h.n < end && ctx.Err() == nil {
			b := buf[:min(int64(len(buf)), end-h.n, h.room())]
			if _, err := j.part.ReadAt(b, h.n); err != nil {
				if !errors.Is(err, io.EOF) {
					return nil, fmt.Errorf("%s: cannot be read back at byte %d: %w", j.f.Name, h.n, plain(err))
				}
				// Entered but never written: power failed. The digest will be wrong, the
				// CRCs will say where.
				clear(b)
			}
			h.write(b)
		}
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
	}
	return h.sum(), nil
}

// read checks a file that is here under its name. It returns the digests that prove
// it right; or else nil and, if the file's chain is known, the chunks that are right.
func (f *fetcher) read(ctx context.Context, j *job, path string) (*digests, spans, error) {
	in, err := os.Open(path)
	if err != nil {
		return nil, nil, plain(err)
	}
	defer in.Close()
	saw := func(n int) {
		f.checked.Add(int64(n))
		f.mu.Lock()
		j.proved += int64(n)
		f.mu.Unlock()
	}
	if j.f.proven() {
		good, err := checkChunks(ctx, in, j.f, saw)
		if err != nil {
			return nil, nil, err
		}
		if good.bytes() == j.f.Size {
			return &digests{sha256: j.f.SHA256, chain: j.f.Chain}, nil, nil
		}
		return nil, good, nil
	}
	h := newHasher(&j.f.File)
	buf := make([]byte, bufferBytes)
	for h.n < h.size {
		if err := context.Cause(ctx); err != nil {
			return nil, nil, err
		}
		n, err := io.ReadFull(in, buf[:min(int64(len(buf)), h.room())])
		if err != nil {
			return nil, nil, fmt.Errorf("cannot be read at byte %d: %w", h.n, plain(err))
		}
		h.write(buf[:n])
		saw(n)
	}
	if d := h.sum(); d.proves(&j.f.File) {
		return d, nil, nil
	}
	return nil, nil, nil
}

// proven tells whether a copy of the file was proved right before, so that each
// chunk of it can be checked alone.
func (f *storeFile) proven() bool {
	return f.Chunk == chunkBytes && f.Chain.fits(f.Size) && f.SHA256 != "" && f.Size > 0
}

// checkChunks returns the chunks of a file that are right.
func checkChunks(ctx context.Context, in io.ReaderAt, f *storeFile, saw func(n int)) (spans, error) {
	var good spans
	buf := make([]byte, bufferBytes)
	for i := range chunks(f.Size) {
		ok, err := checkChunk(ctx, in, f, i, buf, saw)
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		if ok && err == nil { // what cannot be read is fetched again
			good = good.add(chunkSpan(f.Size, i))
		}
	}
	return good, nil
}

func checkChunk(ctx context.Context, in io.ReaderAt, f *storeFile, i int, buf []byte, saw func(n int)) (bool, error) {
	h := f.Chain.begin(i)
	for x := chunkSpan(f.Size, i); x.off < x.end; {
		if err := context.Cause(ctx); err != nil {
			return false, err
		}
		b := buf[:min(int64(len(buf)), x.bytes())]
		if n, err := in.ReadAt(b, x.off); n < len(b) {
			return false, err
		}
		h.Write(b)
		x.off += int64(len(b))
		saw(len(b))
	}
	return f.Chain.holds(i, h, f.SHA256), nil
}

// locate finds out which bytes of a file with a wrong digest are to blame, and has
// them fetched again.
func (f *fetcher) locate(ctx context.Context, j *job, d *digests) error {
	if !j.chained && j.f.proven() {
		j.chained = true
		good, err := checkChunks(ctx, j.part, j.f, func(int) {})
		if err != nil {
			return err
		}
		if gaps := good.missing(span{0, j.f.Size}); len(gaps) > 0 && len(good) > 0 {
			return f.again(j, gaps, good.records())
		}
	}
	var bad spans
	var good []record
	buf := make([]byte, bufferBytes)
	for _, r := range j.journal.records { // nobody else is at work on the file
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if crc, err := crcOf(j.part, r.span, buf); r.sum && (err != nil || crc != r.crc) {
			bad = bad.add(r.span)
		} else {
			good = append(good, r)
		}
	}
	if len(bad) > 0 {
		return f.again(j, bad, good)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.cond.Broadcast()

	// What is on the disk is what was sent, so what was sent is wrong. It may have been
	// a fault on the way or of one of several servers: ask again, another one first.
	j.round++
	if n := len(f.c.sources); j.round > n && j.differs == 0 || j.round > n+3 {
		j.close()
		path := f.s.path(j.f)
		os.Remove(path + partSuffix)
		os.Remove(path + journalSuffix)
		want, have := j.f.SHA256, d.sha256
		if want == "" {
			want, have = j.f.Git, d.git
		}
		return fmt.Errorf("every source sends bytes with a wrong digest (%s; pinned is %s) and again the same ones: use another source", have, want)
	}
	f.o.Log(fmt.Sprintf("%s: its digest is wrong: all of it is fetched again and compared", j.f.Name))
	j.before, j.differs = map[span]uint32{}, 0
	for _, r := range good {
		j.before[r.span] = r.crc
		j.pending = append(j.pending, r.span)
	}
	f.arrived.Add(-j.f.Size)
	return j.journal.rewrite(&j.f.File, nil)
}

// again has connections fetch what is bad of a file.
func (f *fetcher) again(j *job, bad spans, good []record) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.cond.Broadcast()
	for _, x := range bad {
		f.o.Log(fmt.Sprintf("%s: bytes %d to %d are not on the disk as they came: fetched again", j.f.Name, x.off, x.end))
	}
	f.arrived.Add(-bad.bytes())
	j.pending = append(j.pending, bad...)
	return j.journal.rewrite(&j.f.File, good)
}

// records enters runs whose CRC nobody knows.
func (s spans) records() []record {
	var r []record
	for _, x := range s {
		r = append(r, record{span: x})
	}
	return r
}

func crcOf(r io.ReaderAt, x span, buf []byte) (uint32, error) {
	crc := uint32(0)
	for x.off < x.end {
		b := buf[:min(int64(len(buf)), x.bytes())]
		if _, err := r.ReadAt(b, x.off); err != nil {
			return 0, err
		}
		crc = crc32.Update(crc, castagnoli, b)
		x.off += int64(len(b))
	}
	return crc, nil
}

// publish gives a file that was proved right its name, in the order that a crash at
// any point leaves it whole or unfinished.
func (f *fetcher) publish(j *job, d *digests) error {
	path := f.s.path(j.f)
	f.s.hooks.stepped("sync " + j.f.Name)
	if err := j.part.Sync(); err != nil {
		return plain(err)
	}
	f.mu.Lock()
	j.close()
	f.mu.Unlock()
	f.s.hooks.stepped("rename " + j.f.Name)
	if err := os.Rename(path+partSuffix, path); err != nil {
		return plain(err)
	}
	f.s.hooks.stepped("sync directory of " + j.f.Name)
	if err := disk.SyncDir(filepath.Dir(path)); err != nil {
		return plain(err)
	}
	if err := f.finish(j, d); err != nil {
		return err
	}
	f.s.hooks.stepped("remove journal of " + j.f.Name)
	if err := os.Remove(path + journalSuffix); err != nil {
		return plain(err)
	}
	return nil
}

// finish enters a file that is in place into the store's record.
func (f *fetcher) finish(j *job, d *digests) error {
	if err := f.s.join(j.f); err != nil {
		return plain(err)
	}
	info, err := os.Stat(f.s.link(j.f))
	if err != nil {
		return plain(err)
	}
	f.saving.Lock()
	j.f.SHA256, j.f.Chain, j.f.Chunk = d.sha256, d.chain, chunkBytes
	j.f.Verified = info.ModTime().UnixNano()
	err = f.s.save()
	f.saving.Unlock()
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	j.state = jobDone
	f.open--
	f.finished++
	f.cond.Broadcast()
	return nil
}

// sweep removes what a crash at the very end may have left beside a whole file.
func (s *store) sweep(f *storeFile) {
	path := s.path(f)
	os.Remove(path + partSuffix)
	os.Remove(path + journalSuffix)
}

// join links a file on another drive into the store's directory.
func (s *store) join(f *storeFile) error {
	link := s.link(f)
	if f.Dir == "" || s.path(f) == link {
		return nil
	}
	if at, err := os.Readlink(link); err == nil && at == s.path(f) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		return err
	}
	os.Remove(link + tempSuffix)
	s.hooks.stepped("link " + f.Name)
	if err := os.Symlink(s.path(f), link+tempSuffix); err != nil {
		return err
	}
	s.hooks.stepped("rename link of " + f.Name)
	if err := os.Rename(link+tempSuffix, link); err != nil {
		return err
	}
	return disk.SyncDir(filepath.Dir(link))
}

// progress makes the function that tells the caller where things are.
func (f *fetcher) progress() func() {
	var m meter
	return func() {
		p := Progress{Done: f.arrived.Load() + f.checked.Load(), Total: f.total}
		p.Rate = m.update(f.moved.Load()+f.checked.Load(), time.Now())
		p.ETA = eta(p.Total-p.Done, p.Rate)
		f.mu.Lock()
		p.FilesDone, p.FilesTotal = f.whole+f.finished, f.whole+len(f.jobs)
		for _, j := range f.jobs {
			if j.state == jobChecking || j.state == jobFetching {
				fp := FileProgress{Name: j.f.Name, Verified: j.proved, Done: j.proved, Total: j.f.Size}
				if j.journal != nil {
					fp.Done = j.journal.have.bytes()
				}
				p.Files = append(p.Files, fp)
			}
		}
		f.mu.Unlock()
		f.o.Progress(p)
	}
}
