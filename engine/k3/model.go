// Package k3 decides how Kimi K3 computes: one forward pass over any number of
// rows, written so that each file can be held beside its section of the model's
// specification (docs/K3.md).
//
//	forward.go   C.2, C.5, C.6  the stream through the layers
//	attnres.go   C.3            attention over depth
//	kda.go       C.7            Kimi Delta Attention
//	mla.go       C.8            gated multi-head latent attention
//	mlp.go       C.9, C.10      SiTU-GLU feed-forward
//	moe.go       C.11           router and latent mixture of experts
//	state.go     C.12           what a session keeps between passes
//	cut.go                      a pass that was cancelled, and goes on
//
// All arithmetic is engine/kernel's. Where the bytes come from is behind two
// small interfaces, [Spine] for the dense weights and [Experts] for the routed ones.
package k3

import (
	"context"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/kernel"
	"deltafin/prefill"
)

// Constants of the arithmetic that config.json does not carry (spec A.3, F.3, F.4).
const (
	latentEps = 1e-6 // MLA's q_a_layernorm and kv_a_layernorm
	l2Eps     = 1e-6 // added to the sum of squares of KDA's q and k
)

// Spine gives the dense weights in pieces, in the order in which a pass needs them:
// for each layer its attention, then its feed-forward part, and at the end the output.
// A piece stays valid until its release function is called; a pass holds one at a time.
type Spine interface {
	Attention(ctx context.Context, l int) (*Attention, func(), error)
	FeedForward(ctx context.Context, l int) (*FeedForward, func(), error)
	Output(ctx context.Context) (*Output, func(), error)
	// Head calls use for consecutive slices of lm_head [vocab][hidden], whose first row
	// is token lo. A slice is valid during the call.
	Head(ctx context.Context, use func(lo int, w *kernel.Matrix) error) error
	// Embed writes the embedding row of each id to dst [len(ids)][hidden].
	Embed(ctx context.Context, dst kernel.Mat, ids []int) error
}

// Experts gives the routed experts of a layer.
type Experts interface {
	// Stream calls use once for each of ids, i being its place in ids, one call at a
	// time and in whatever order the weights arrive. They are valid during the call. An error
	// of use ends the stream and is returned. While reads are on their way and there is nothing to
	// use, idle is called to do a piece of other work; it reports whether it did any. Sources
	// that never wait need not call it.
	Stream(ctx context.Context, layer int, ids []int32, use func(i int, e *Expert) error, idle func() bool) error
	// Counters accounts for all streams so far; LayerPasses is not the source's to
	// count.
	Counters() prefill.Counters
}

// Routing is what chooses the experts of a layer: the mix, norm, router and bias of its
// [FeedForward].
type Routing struct {
	Res, Norm []float32
	Router    *kernel.Matrix
	Bias      []float32
}

// A spine that has the routers of coming layers in memory, and experts that can be
// read ahead, may say so by these methods. The model then guesses the next layer's
// experts while this layer's are read. A guess can only change when bytes are read.
type (
	// RoutingSpine returns the routing of layer l, or nil if it is not in memory.
	RoutingSpine interface{ Routing(l int) *Routing }
	// Hinter is told which experts of a coming layer are likely, best first.
	Hinter interface{ Hint(layer int, ids []int32) }
)

// Attention is a layer's first half (spec B.2, C.5 steps 1-4). Exactly one of KDA and
// MLA is set.
type Attention struct {
	Res  []float32 // self_attention_res_norm * self_attention_res_proj [hidden]
	Norm []float32 // input_layernorm [hidden]
	KDA  *KDA
	MLA  *MLA
}

// FeedForward is a layer's second half (spec B.2, C.5 steps 5-7). Exactly one of Dense
// and MoE is set.
type FeedForward struct {
	Res   []float32 // mlp_res_norm * mlp_res_proj [hidden]
	Norm  []float32 // post_attention_layernorm [hidden]
	Dense *MLP
	MoE   *MoE
}

// Output is the mix and norm after the last layer (spec C.6).
type Output struct {
	Res  []float32 // output_attn_res_norm * output_attn_res_proj [hidden]
	Norm []float32 // model.norm [hidden]
}

// Expert is one routed expert: gate and up [inter][latent], down [latent][inter].
type Expert struct {
	Gate, Up, Down kernel.Matrix
}

// Model runs forward passes. It keeps no state between them but buffers, and
// serves one caller at a time.
type Model struct {
	Config  *checkpoint.Config
	Spine   Spine
	Experts Experts
	Pool    *kernel.Pool

	// TileRows is how many rows the dense parts of a layer take at a time; 0 means
	// DefaultTileRows.
	TileRows int

	// Observe, if set, is shown intermediate values during a pass: the value called
	// name of layer l, one row per position. The view is valid during the call. Names are
	// those of the frozen reference data: stream, attn_in, attn_out, mlp_in, mlp_out, and
	// logits with l = layers.
	Observe func(l int, name string, v kernel.Mat)
	// ObserveRoutes, if set, is shown the routes of an MoE layer, topK per row in
	// ascending id, with their weights.
	ObserveRoutes func(l int, ids []int32, weights []float32)

	layerPasses int64
	arena       arena
	cut         *cut       // the suspended pass that the arena still holds, if any
	shown       int        // the layer of the pass under way whose routes were observed last
	spare       []*heldKDA // room for held passes
	times       Times
}

// Times is the wall-clock time of the parts of all passes so far.
type Times struct {
	Embed, Mix, KDA, MLA, Dense, Router, Experts, Shared, Head time.Duration
}

// Sub returns the time spent since earlier.
func (t Times) Sub(e Times) Times {
	return Times{
		t.Embed - e.Embed, t.Mix - e.Mix, t.KDA - e.KDA, t.MLA - e.MLA, t.Dense - e.Dense,
		t.Router - e.Router, t.Experts - e.Experts, t.Shared - e.Shared, t.Head - e.Head,
	}
}

// Times returns the time spent so far.
func (m *Model) Times() Times { return m.times }

// Counters accounts for all passes so far.
func (m *Model) Counters() prefill.Counters {
	c := m.Experts.Counters()
	c.LayerPasses = m.layerPasses
	return c
}

// clock adds the time since *last to *part and restarts it.
func clock(part *time.Duration, last *time.Time) {
	now := time.Now()
	*part += now.Sub(*last)
	*last = now
}

// arena is the memory of one pass's intermediate values, reused by the next.
type arena struct {
	buf  []float32
	used int
	need int
}

// reset frees everything and makes room for n floats. What a pass takes beyond them is
// allocated apart, and forgotten.
func (a *arena) reset(n int) {
	if n > len(a.buf) {
		a.buf = nil // before the new one is there
		a.buf = kernel.Floats(n)
	}
	a.used, a.need = 0, 0
}

// mark and release free what was taken in between.
func (a *arena) mark() [2]int      { return [2]int{a.used, a.need} }
func (a *arena) release(at [2]int) { a.used = at[0] }
func (a *arena) floats(n int) []float32 {
	n = kernel.Pad(n)
	a.need = max(a.need, a.used+n)
	if a.used+n > len(a.buf) {
		a.used += n
		return kernel.Floats(n)
	}
	a.used += n
	return a.buf[a.used-n : a.used : a.used]
}

// mat returns a [rows][cols] Mat of unspecified content with zero padding.
func (a *arena) mat(rows, cols int) kernel.Mat {
	m := kernel.Mat{Rows: rows, Cols: cols, Stride: kernel.Pad(cols)}
	m.Data = a.floats(rows * m.Stride)
	if cols != m.Stride {
		clear(m.Data)
	}
	return m
}
