// Package spine decides where the dense weights are while the model runs: which of them
// stay in memory, and when the others are read.
//
// A pass needs the weights in a fixed order: of each layer the attention, then the
// feed-forward part, and at the end lm_head in slices. These are the pieces. As many of the
// first ones as [Options.Resident] has room for are read once and stay. The others stream
// through a ring of [Options.Ring] bytes, one read a piece as a rule, ahead of the pass and
// around its end into the beginning of the next. Norms, convolutions and the like, less than a
// thousandth of all, are always in memory; rows of the embedding table are read when they
// are asked for.
//
//	pl, _, err := spine.Fit(ck, spine.Options{Pack: "spine.bin"}, 12e9)
//	s, err := spine.Open(ctx, ck, drives, pl)
//
// The bytes come from the checkpoint's shards, or from a packed file that [Pack] wrote: as
// they are, or narrowed to eight bits, which is another model (see [Spine.Exact]).
package spine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/engine/opt"
)

var ahead = opt.New("spine-ahead", "read dense weights before the pass asks for them", nil)

// ErrMemory is wrapped by the errors of Open and Fit when the budget is too small;
// their text says how much is needed.
var ErrMemory = errors.New("not enough memory")

// Options say how much memory the spine may take and where it is read. They never
// change a result, but for a Pack in eight bits. [Fit] sets the sizes from a budget.
type Options struct {
	Resident    int64  // bytes for the first pieces of a pass, which stay in memory
	Ring        int64  // bytes for the pieces that stream; not needed when all are resident
	Pack        string // packed file; "" reads the checkpoint's shards
	KeepRouters bool   // keep the routers of all layers in memory, beside the above

	gap    int64 // for tests: as readGap
	poison bool  // for tests: spoil memory that is given up
}

// Spine is the dense weights of a checkpoint. It implements [k3.Spine] for one pass
// at a time; its other methods may be called at any time.
type Spine struct {
	plan   *plan
	drives *drive.Set
	files  map[int]*drive.File
	attn   []*k3.Attention
	ffn    []*k3.FeedForward
	out    *k3.Output
	rows   *rows
	ring   int64 // bytes that buffers of streamed pieces may take
	poison bool

	ctx     context.Context // of the reads; ends with Close
	cancel  context.CancelFunc
	reading sync.WaitGroup // fills that are not settled

	mu     sync.Mutex
	cond   sync.Cond
	closed bool
	next   int             // position in plan.pieces of the next piece to read
	want   *piece          // what the pass waits for
	queue  []*fill         // of streamed pieces, in the order of the pass
	free   []*drive.Buffer // of the ring
	held   int64           // bytes of the ring's buffers, free ones included
	idle   int64           // of them free
	busy   int             // fills on their way
	fixed  Memory
	total  Stats
}

// Open prepares to run with the spine of ck read through drives. It reads the small vectors
// and begins to read ahead; the pieces themselves are waited for when a pass needs them.
// The checkpoint and the drives must stay open until Close.
func Open(ctx context.Context, ck *checkpoint.Checkpoint, drives *drive.Set, o Options) (*Spine, error) {
	p, err := newPlan(ck, o)
	if err != nil {
		return nil, err
	}
	p.reside(o.Resident)
	if need := p.ringFloor(); o.Ring < need {
		return nil, fmt.Errorf("%s: %w: the ring of the dense weights needs %s, and has %s: raise the memory budget, or pack the weights in eight bits",
			ck.Dir(), ErrMemory, gigabytes(need), gigabytes(o.Ring))
	}
	s := &Spine{plan: p, drives: drives, files: map[int]*drive.File{}, ring: o.Ring, poison: o.poison, fixed: p.memory(o.Ring)}
	s.cond.L = &s.mu
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if err := s.prepare(ctx); err != nil {
		s.Close()
		return nil, fmt.Errorf("reading the dense weights: %w", err)
	}
	s.mu.Lock()
	s.pump()
	s.mu.Unlock()
	return s, nil
}

// CheckPack demands that the packed file at path was packed from ck and is whole as far as
// its table tells. The weights are not read: their digests are compared when a run first reads
// them. exact tells whether they are the checkpoint's, and not narrowed.
func CheckPack(ck *checkpoint.Checkpoint, path string) (exact bool, err error) {
	p, err := newPlan(ck, Options{Pack: path})
	if err != nil {
		return false, err
	}
	return !p.narrow, nil
}

// prepare opens the files, reads what is always in memory and binds it to the model.
func (s *Spine) prepare(ctx context.Context) error {
	p := s.plan
	for i, path := range p.files {
		f, err := s.drives.Open(path)
		if err != nil {
			return err
		}
		s.files[i] = f
	}
	s.rows = newRows(s.drives, s.files[p.embed.file], p.embed, p.config)
	always := append([]*piece{p.vectors}, p.routers...)
	s.mu.Lock()
	for _, a := range always {
		s.start(a, drive.Demand)
	}
	s.mu.Unlock()
	for _, a := range always {
		if err := s.acquire(ctx, a); err != nil {
			return err
		}
	}
	if err := s.bind(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(p.vectors.fill)
	return nil
}

// bind makes the model's structures. Their vectors are final; their matrices are
// given data whenever their piece is in memory.
func (s *Spine) bind() error {
	c := s.plan.config
	for l := range c.Layers {
		a, err := k3.BindAttention(c, l, bound{s.plan, s.plan.attention(l)})
		if err != nil {
			return err
		}
		f, err := k3.BindFeedForward(c, l, bound{s.plan, s.plan.feedForward(l)})
		if err != nil {
			return err
		}
		s.attn, s.ffn = append(s.attn, a), append(s.ffn, f)
	}
	var err error
	s.out, err = k3.BindOutput(c, bound{s.plan, nil})
	return err
}

// bound gives the model the matrices of a piece and copies of the vectors, while
// these are in memory. It implements [k3.Tensors].
type bound struct {
	plan  *plan
	piece *piece
}

func (b bound) Matrix(name string, _, _ int) (*kernel.Matrix, error) {
	for _, p := range append([]*piece{b.piece}, b.plan.routers...) {
		for _, t := range p.tensors {
			if t.name == name {
				return &t.m, nil
			}
		}
	}
	return nil, fmt.Errorf("tensor %s has no place in the plan of the dense weights", name)
}

func (b bound) Vector(name string, n int) ([]float32, error) {
	p := b.plan.vectors
	v, ok := p.vecs[name]
	if !ok {
		return nil, fmt.Errorf("tensor %s has no place in the plan of the dense weights", name)
	}
	dst := kernel.Floats(n)
	widen(dst, p.fill.bytes(v.at), v.dtype)
	return dst, nil
}

// widen converts stored values to float32, exactly.
func widen(dst []float32, src []byte, t checkpoint.DType) {
	for i := range dst {
		if t == checkpoint.F32 {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		} else {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
		}
	}
}

// Close ends all reads, waits for those in flight and frees the memory. No pass may be
// running.
func (s *Spine) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.reading.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.plan.all() {
		if p.fill != nil {
			s.drop(p.fill)
		}
	}
	for len(s.free) > 0 {
		s.shrink()
	}
	if s.rows != nil {
		s.rows.close()
	}
	s.cond.Broadcast()
}

// Attention returns the first half of layer l.
func (s *Spine) Attention(ctx context.Context, l int) (*k3.Attention, func(), error) {
	p := s.plan.attention(l)
	if err := s.acquire(ctx, p); err != nil {
		return nil, nil, err
	}
	return s.attn[l], func() { s.release(p) }, nil
}

// FeedForward returns the second half of layer l.
func (s *Spine) FeedForward(ctx context.Context, l int) (*k3.FeedForward, func(), error) {
	p := s.plan.feedForward(l)
	if err := s.acquire(ctx, p); err != nil {
		return nil, nil, err
	}
	return s.ffn[l], func() { s.release(p) }, nil
}

// Output returns what follows the last layer.
func (s *Spine) Output(context.Context) (*k3.Output, func(), error) {
	return s.out, func() {}, nil
}

// Head hands out lm_head in slices of at most 256 MB.
func (s *Spine) Head(ctx context.Context, use func(lo int, w *kernel.Matrix) error) error {
	for _, p := range s.plan.head() {
		if err := s.acquire(ctx, p); err != nil {
			return err
		}
		err := use(p.tensors[0].lo, &p.tensors[0].m)
		s.release(p)
		if err != nil {
			return err
		}
	}
	return nil
}

// Embed writes the embedding row of each id to dst [len(ids)][hidden].
func (s *Spine) Embed(ctx context.Context, dst kernel.Mat, ids []int) error {
	n, err := s.rows.fetch(ctx, dst, ids)
	s.mu.Lock()
	s.total.Embedding += n
	s.mu.Unlock()
	return err
}

// Routing returns what chooses the experts of layer l if its router stays in memory and is
// there: with [Options.KeepRouters], or when its piece is resident and was read; else nil.
// It may be used until Close. It implements [k3.RoutingSpine].
func (s *Spine) Routing(l int) *k3.Routing {
	w := s.ffn[l]
	if w.MoE == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.plan.routers) == 0 {
		if p := s.plan.feedForward(l); !p.resident || p.fill == nil || !p.fill.bound {
			return nil
		}
	}
	return &k3.Routing{Res: w.Res, Norm: w.Norm, Router: w.MoE.Router, Bias: w.MoE.Bias}
}

// Exact reports whether the weights are those of the checkpoint to the bit.
func (s *Spine) Exact() bool { return !s.plan.narrow }

// Label says in a few words what the weights are.
func (s *Spine) Label() string {
	if s.plan.narrow {
		return "dense weights in eight bits: not weight-exact"
	}
	return "dense weights as released"
}

// Memory is the memory that a spine may take, in bytes.
type Memory struct {
	Vectors  int64 `json:"vectors"`  // norms, convolutions and the like
	Routers  int64 `json:"routers"`  // with KeepRouters
	Resident int64 `json:"resident"` // pieces that stay
	Ring     int64 `json:"ring"`     // of the others
	Embed    int64 `json:"embed"`    // rows of the embedding table
}

// Total is the sum.
func (m Memory) Total() int64 { return m.Vectors + m.Routers + m.Resident + m.Ring + m.Embed }

// Memory returns what the spine may take; it takes less before the first pass.
func (s *Spine) Memory() Memory { return s.fixed }

// Stats is the account of a spine since it was opened. Bytes are those of pieces
// that were read to their end.
type Stats struct {
	Demand    int64         `json:"demand_bytes"`    // the pass had asked for the piece when its reading began
	Ahead     int64         `json:"ahead_bytes"`     // it had not yet
	Wasted    int64         `json:"wasted_bytes"`    // of Ahead: given up unused
	Embedding int64         `json:"embedding_bytes"` // rows
	Waits     int64         `json:"waits"`           // times that a pass waited for a piece
	Wait      time.Duration `json:"wait_ns"`
	Pieces    []PieceStats  `json:"pieces"` // in the order of a pass
}

// PieceStats is the account of one piece.
type PieceStats struct {
	Name     string        `json:"name"`
	Bytes    int64         `json:"bytes"` // of one reading
	Resident bool          `json:"resident"`
	Reads    int64         `json:"reads"` // completed readings
	Waits    int64         `json:"waits"`
	Wait     time.Duration `json:"wait_ns"`
}

// Stats returns the account so far.
func (s *Spine) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.total
	for _, p := range s.plan.pieces {
		ps := p.stats
		ps.Name, ps.Bytes, ps.Resident = p.name, p.bytes, p.resident
		st.Pieces = append(st.Pieces, ps)
	}
	return st
}

func gigabytes(n int64) string {
	if n < 1e7 {
		return fmt.Sprintf("%.3f MB", float64(n)/1e6)
	}
	return fmt.Sprintf("%.2f GB", float64(n)/1e9)
}
