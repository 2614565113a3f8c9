package spine

import (
	"fmt"
	"slices"
	"strings"

	"deltafin/engine/checkpoint"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
)

const (
	embedName  = "model.embed_tokens.weight"
	routerName = ".block_sparse_moe.gate.weight"

	// readGap is how many bytes between two tensors are read along rather than left
	// out: what a drive delivers in about the time of another read.
	readGap = 1 << 20
)

// headSlice bounds a slice of lm_head; a variable, so that tests can cut small heads.
var headSlice = int64(256e6)

// extent is a run of bytes of one of the files that the weights are read from.
type extent struct {
	file   int // in plan.files
	off, n int64
}

func (x extent) end() int64 { return x.off + x.n }

// tensor is a matrix of a piece, or some rows of one.
type tensor struct {
	name   string
	lo     int // its first row in the whole matrix
	format kernel.Format
	padded bool          // stored with rows of whole vectors
	data   extent        // [rows][cols], or [rows][stride] if padded
	scale  extent        // Int8: [rows] float32
	m      kernel.Matrix // what the model sees; without data while the piece is not held
}

// slack is the memory that the tensor takes beyond its stored bytes.
func (t *tensor) slack() int64 {
	n := t.scale.n
	if !t.padded && t.m.Cols != t.m.Stride {
		n += t.data.n / int64(t.m.Cols) * int64(t.m.Stride)
	}
	return n
}

// vector is a small tensor.
type vector struct {
	at    extent
	dtype checkpoint.DType
}

// piece is what is read and given up as one.
type piece struct {
	name     string
	index    int // in plan.pieces, or -1
	tensors  []*tensor
	vecs     map[string]vector // only of plan.vectors
	units    []*unit           // of a packed file, to be checked when first read
	runs     []extent          // the reads
	bytes    int64             // of the runs
	need     int64             // memory: buffers and padded copies
	resident bool

	fill  *fill // in memory or on its way; guarded by Spine.mu
	stats PieceStats
}

// plan is what there is to read, where it lies and what stays in memory.
type plan struct {
	config  *checkpoint.Config
	files   map[int]string // paths; shards under their number
	pieces  []*piece       // in the order of a pass: two per layer, then the head's slices
	vectors *piece
	routers []*piece // those kept beside the pieces
	embed   extent   // the whole table
	narrow  bool     // matrices are Int8
	floats  int64    // bytes of the vectors as the model holds them
}

func (p *plan) attention(l int) *piece   { return p.pieces[2*l] }
func (p *plan) feedForward(l int) *piece { return p.pieces[2*l+1] }
func (p *plan) head() []*piece           { return p.pieces[2*p.config.Layers:] }

func (p *plan) all() []*piece {
	return slices.Concat(p.pieces, p.routers, []*piece{p.vectors})
}

// section is what the model asks for when it binds one part of itself.
type section struct {
	name string
	mats []matrix
	vecs []named
}

type matrix struct {
	name       string
	lo         int // first row
	rows, cols int
}

type named struct {
	name string
	n    int
}

// recorder notes what the model asks for. It implements [k3.Tensors].
type recorder struct {
	s     *section
	zeros []float32
}

func (r *recorder) Matrix(name string, rows, cols int) (*kernel.Matrix, error) {
	r.s.mats = append(r.s.mats, matrix{name: name, rows: rows, cols: cols})
	return &kernel.Matrix{Rows: rows, Cols: cols}, nil
}

func (r *recorder) Vector(name string, n int) ([]float32, error) {
	r.s.vecs = append(r.s.vecs, named{name, n})
	if n > len(r.zeros) {
		r.zeros = make([]float32, n)
	}
	return r.zeros[:n], nil
}

// outline lists the sections in the order of a pass: attention and feed-forward of each layer,
// what follows the last layer, and the slices of the head.
func outline(c *checkpoint.Config) ([]*section, error) {
	var all []*section
	r := &recorder{}
	section := func(name string) *section {
		s := &section{name: name}
		r.s = s
		all = append(all, s)
		return s
	}
	for l := range c.Layers {
		section(fmt.Sprintf("layer %d attention", l))
		if _, err := k3.BindAttention(c, l, r); err != nil {
			return nil, err
		}
		section(fmt.Sprintf("layer %d feed-forward", l))
		if _, err := k3.BindFeedForward(c, l, r); err != nil {
			return nil, err
		}
	}
	section("output")
	if _, err := k3.BindOutput(c, r); err != nil {
		return nil, err
	}
	step := int(max(headSlice/(2*int64(c.Hidden)), 1))
	for lo := 0; lo < c.Vocab; lo += step {
		hi := min(lo+step, c.Vocab)
		s := section(fmt.Sprintf("head rows %d-%d", lo, hi-1))
		s.mats = append(s.mats, matrix{name: k3.HeadName, lo: lo, rows: hi - lo, cols: c.Hidden})
	}
	return all, nil
}

// newPlan finds out where everything lies. Nothing is resident yet.
func newPlan(ck *checkpoint.Checkpoint, o Options) (*plan, error) {
	c := ck.Config()
	sections, err := outline(c)
	if err != nil {
		return nil, err
	}
	p := &plan{config: c, files: map[int]string{}, vectors: &piece{name: "vectors", index: -1, resident: true, vecs: map[string]vector{}}}
	if o.gap == 0 {
		o.gap = readGap
	}
	for _, s := range sections {
		for _, v := range s.vecs {
			p.floats += 4 * int64(v.n)
		}
	}
	if o.Pack == "" {
		err = p.fromShards(ck, sections)
	} else {
		err = p.fromPack(ck, sections, o.Pack)
	}
	if err != nil {
		return nil, err
	}
	t, err := ck.Tensor(embedName)
	if err != nil {
		return nil, err
	}
	p.embed = extent{t.File, t.Offset, t.Bytes}
	p.files[t.File] = ck.Path(t.File)
	if o.KeepRouters {
		p.keepRouters()
	}
	for _, x := range p.all() {
		x.schedule(o.gap)
	}
	return p, nil
}

// fromShards places everything where the checkpoint has it.
func (p *plan) fromShards(ck *checkpoint.Checkpoint, sections []*section) error {
	find := func(name string) (checkpoint.Tensor, error) {
		t, err := ck.Tensor(name)
		if err == nil {
			p.files[t.File] = ck.Path(t.File)
		}
		return t, err
	}
	for _, s := range sections {
		for _, v := range s.vecs {
			t, err := find(v.name)
			if err != nil {
				return err
			}
			if have := t.Bytes / t.DType.Size(); have < int64(v.n) {
				return fmt.Errorf("tensor %s has %d elements, needs %d", v.name, have, v.n)
			}
			p.vectors.vecs[v.name] = vector{extent{t.File, t.Offset, int64(v.n) * t.DType.Size()}, t.DType}
		}
		if len(s.mats) == 0 {
			continue
		}
		x := p.add(s.name)
		for _, m := range s.mats {
			t, err := find(m.name)
			if err != nil {
				return err
			}
			format, size := kernel.BF16, t.DType.Size()
			if t.DType == checkpoint.F32 {
				format = kernel.F32
			}
			row := int64(m.cols) * size
			if t.Bytes < int64(m.lo+m.rows)*row {
				return fmt.Errorf("tensor %s has %d bytes, needs %d", m.name, t.Bytes, int64(m.lo+m.rows)*row)
			}
			x.tensors = append(x.tensors, newTensor(m, format, extent{t.File, t.Offset + int64(m.lo)*row, int64(m.rows) * row}))
		}
	}
	return nil
}

func newTensor(m matrix, f kernel.Format, data extent) *tensor {
	return &tensor{
		name: m.name, lo: m.lo, format: f, data: data,
		m: kernel.Matrix{Format: f, Rows: m.rows, Cols: m.cols, Stride: kernel.Pad(m.cols)},
	}
}

func (p *plan) add(name string) *piece {
	x := &piece{name: name, index: len(p.pieces)}
	p.pieces = append(p.pieces, x)
	return x
}

// keepRouters makes each router a piece of its own.
func (p *plan) keepRouters() {
	for l := range p.config.Layers {
		x := p.feedForward(l)
		i := slices.IndexFunc(x.tensors, func(t *tensor) bool { return strings.HasSuffix(t.name, routerName) })
		if i < 0 {
			continue
		}
		r := &piece{name: fmt.Sprintf("layer %d router", l), index: -1, resident: true, tensors: []*tensor{x.tensors[i]}}
		x.tensors = slices.Delete(x.tensors, i, i+1)
		x.units = slices.DeleteFunc(x.units, func(u *unit) bool {
			mine := u.at.off <= r.tensors[0].data.off && r.tensors[0].data.off < u.at.end()
			if mine {
				r.units = append(r.units, u)
			}
			return mine
		})
		p.routers = append(p.routers, r)
	}
}

// schedule merges what the piece consists of into reads and sums its memory up.
func (x *piece) schedule(gap int64) {
	var parts []extent
	for _, t := range x.tensors {
		parts = append(parts, t.data)
		x.need += t.slack()
	}
	for _, u := range x.units {
		parts = append(parts, u.at)
	}
	for _, v := range x.vecs {
		parts = append(parts, v.at)
	}
	x.runs = merge(parts, gap)
	for _, r := range x.runs {
		x.bytes += r.n
		x.need += footprint(r.n)
	}
}

// merge covers all parts with as few runs as possible, none of which has a hole of
// more than gap bytes.
func merge(parts []extent, gap int64) []extent {
	slices.SortFunc(parts, func(a, b extent) int {
		if a.file != b.file {
			return a.file - b.file
		}
		return int(min(max(a.off-b.off, -1), 1))
	})
	var runs []extent
	for _, p := range parts {
		if i := len(runs) - 1; i >= 0 && runs[i].file == p.file && p.off-runs[i].end() <= gap {
			runs[i].n = max(runs[i].n, p.end()-runs[i].off)
			continue
		}
		runs = append(runs, p)
	}
	return runs
}

// footprint is the memory that a buffer for n bytes takes at most.
func footprint(n int64) int64 { return n + 2*4096 }

// reside makes as many of the first pieces resident as n bytes have room for.
func (p *plan) reside(n int64) {
	for _, x := range p.pieces {
		if n -= x.need; n < 0 {
			return
		}
		x.resident = true
	}
}

// ringFloor is the least memory of the ring: the largest two streamed pieces that
// follow one another, as the pass uses one while the next is read.
func (p *plan) ringFloor() (n int64) {
	var streamed []int64
	for _, x := range p.pieces {
		if !x.resident {
			streamed = append(streamed, x.need)
		}
	}
	if len(streamed) == 1 {
		return streamed[0]
	}
	for i, need := range streamed {
		n = max(n, need+streamed[(i+1)%len(streamed)])
	}
	return n
}

// memory is what the plan takes with a ring of the given size.
func (p *plan) memory(ring int64) Memory {
	m := Memory{Vectors: p.floats, Embed: embedMemory(p.config)}
	for _, r := range p.routers {
		m.Routers += r.need
	}
	for _, x := range p.pieces {
		if x.resident {
			m.Resident += x.need
		} else {
			m.Ring = ring
		}
	}
	return m
}

// Fit shares a budget of bytes out: it returns o with Resident as large as possible, and
// the rest in Ring, and how many bytes every pass will then read. The budget is for all
// memory of the spine, see [Memory].
func Fit(ck *checkpoint.Checkpoint, o Options, budget int64) (_ Options, streamed int64, err error) {
	p, err := newPlan(ck, o)
	if err != nil {
		return o, 0, err
	}
	left := budget - p.memory(0).Total()
	floor := p.ringFloor()
	if left < floor {
		return o, 0, fmt.Errorf("%s: %w: the dense weights need %s at least, and may take %s: raise the memory budget, or pack the weights in eight bits",
			ck.Dir(), ErrMemory, gigabytes(budget-left+floor), gigabytes(budget))
	}
	o.Resident, o.Ring = 0, left
	resident, after := int64(0), int64(0)
	for _, x := range p.pieces {
		after += x.bytes
	}
	streamed = after
	for _, x := range p.pieces {
		resident += x.need
		after -= x.bytes
		x.resident = true
		if resident+p.ringFloor() <= left {
			o.Resident, o.Ring, streamed = resident, left-resident, after
		}
	}
	return o, streamed, nil
}

// Floor is the least memory, in bytes, with which the spine of ck runs, read from
// the packed file at pack or, if that is "", from the shards.
func Floor(ck *checkpoint.Checkpoint, pack string) (int64, error) {
	p, err := newPlan(ck, Options{Pack: pack})
	if err != nil {
		return 0, err
	}
	return p.memory(0).Total() + p.ringFloor(), nil
}

// Full is the memory, in bytes, with which the whole spine of ck stays in memory.
func Full(ck *checkpoint.Checkpoint, o Options) (int64, error) {
	p, err := newPlan(ck, o)
	if err != nil {
		return 0, err
	}
	for _, x := range p.pieces {
		x.resident = true
	}
	return p.memory(0).Total(), nil
}
