package dspark

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
)

// weights are a draft's, as stored; vectors are widened (spec E).
type weights struct {
	contextProj            *kernel.Matrix // [hidden][layers watched * hidden]
	contextNorm, finalNorm []float32      // [hidden]
	markov1, markov2       *kernel.Matrix // [vocab][markov]
	confidence, bias       []float32      // [hidden+markov], [1]
	layers                 []layer

	buffers []*drive.Buffer // that the matrices lie in
}

type layer struct {
	inputNorm, postNorm []float32      // [hidden]
	qa, qb              *kernel.Matrix // [q_lora][hidden], [heads*(nope+rope)][q_lora]
	qaNorm              []float32      // [q_lora]
	kva, kvb            *kernel.Matrix // [kv_lora+rope][hidden], [heads*(nope+v)][kv_lora]
	kvNorm              []float32      // [kv_lora]
	o                   *kernel.Matrix // [hidden][heads*v]
	gate, up, down      *kernel.Matrix // [intermediate][hidden], [hidden][intermediate]
}

// embedding is the one tensor that is not read: the target has the same rows.
const embedding = "embed_tokens.weight"

// vector says of a tensor that it is widened, not kept as it is stored.
func vector(t checkpoint.Tensor) bool { return len(t.Shape) == 1 || t.Shape[0] == 1 }

// residentBytes is the memory that a tensor takes once it is loaded.
func residentBytes(t checkpoint.Tensor) int64 {
	const page = 4096
	switch cols := t.Shape[len(t.Shape)-1]; {
	case t.Name == embedding:
		return 0
	case vector(t):
		return 2 * t.Bytes
	case cols%kernel.Lane32 != 0: // copied into padded rows
		return t.Bytes / int64(cols) * int64(kernel.Pad(cols))
	default: // in place; what a buffer has at most beyond its bytes
		return t.Bytes + 2*page
	}
}

// readers is how many tensors are read at a time.
const readers = 4

// read reads all weights and puts them in their places.
func (p *proposer) read(ctx context.Context) (_ *weights, err error) {
	var (
		mu sync.Mutex
		w  weights
		m  = map[string]*kernel.Matrix{}
		v  = map[string][]float32{}
	)
	defer func() {
		if err != nil {
			w.free()
		}
	}()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(readers)
	for _, t := range p.draft.Tensor {
		if t.Name == embedding {
			continue
		}
		g.Go(func() error {
			b, err := p.readTensor(ctx, t)
			if err != nil {
				return fmt.Errorf("tensor %s: %w", t.Name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if vector(t) {
				v[t.Name] = widened(b.Bytes())
				b.Free()
				return nil
			}
			x, err := kernel.NewMatrix(kernel.BF16, t.Shape[0], t.Shape[1], b.Bytes(), nil)
			if err != nil || x.Stride != x.Cols { // padded rows are a copy
				b.Free()
			} else {
				w.buffers = append(w.buffers, b)
			}
			m[t.Name] = x
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	w.contextProj, w.contextNorm, w.finalNorm = m["context_proj.weight"], v["context_norm.weight"], v["final_norm.weight"]
	w.markov1, w.markov2 = m["markov_head.markov_w1.weight"], m["markov_head.markov_w2.weight"]
	w.confidence, w.bias = v["confidence_head.proj.weight"], v["confidence_head.proj.bias"]
	for i := range p.c.Layers {
		at := fmt.Sprintf("layers.%d.", i)
		attn, mlp := at+"self_attn.", at+"mlp."
		w.layers = append(w.layers, layer{
			inputNorm: v[at+"input_layernorm.weight"], postNorm: v[at+"post_attention_layernorm.weight"],
			qa: m[attn+"q_a_proj.weight"], qaNorm: v[attn+"q_a_layernorm.weight"], qb: m[attn+"q_b_proj.weight"],
			kva: m[attn+"kv_a_proj_with_mqa.weight"], kvNorm: v[attn+"kv_a_layernorm.weight"], kvb: m[attn+"kv_b_proj.weight"],
			o: m[attn+"o_proj.weight"], gate: m[mlp+"gate_proj.weight"], up: m[mlp+"up_proj.weight"], down: m[mlp+"down_proj.weight"],
		})
	}
	return &w, nil
}

// readTensor reads a tensor and sees that it is made of numbers.
func (p *proposer) readTensor(ctx context.Context, t checkpoint.Tensor) (*drive.Buffer, error) {
	b, err := drive.NewBuffer(t.Bytes)
	if err != nil {
		return nil, err
	}
	if err := p.drives.Read(ctx, drive.Read{File: p.file, Offset: t.Offset, Bytes: t.Bytes, Into: b}); err != nil {
		b.Free()
		return nil, err
	}
	if i := notFinite(b.Bytes()); i >= 0 {
		b.Free()
		return nil, fmt.Errorf("%s: weight %d is not a finite number: the file is damaged, fetch it again", p.draft.Path, i)
	}
	return b, nil
}

// notFinite is the index of the first bf16 value whose exponent is all ones, or -1.
func notFinite(b []byte) int {
	const exponents, ones, tops = 0x7f80_7f80_7f80_7f80, 0x0001_0001_0001_0001, 0x8000_8000_8000_8000
	i := 0
	for ; i+8 <= len(b); i += 8 {
		// A lane of x is 0 where an exponent is all ones; subtracting 1 then borrows into its top bit.
		x := ^binary.LittleEndian.Uint64(b[i:]) & exponents
		if (x-ones)&^x&tops != 0 {
			break
		}
	}
	for ; i+2 <= len(b); i += 2 {
		if binary.LittleEndian.Uint16(b[i:])&0x7f80 == 0x7f80 {
			return i / 2
		}
	}
	return -1
}

// widened is bf16 values as float32.
func widened(b []byte) []float32 {
	f := floats(1, len(b)/2)
	for i := range f {
		f[i] = widen(binary.LittleEndian.Uint16(b[2*i:]))
	}
	return f
}

func widen(bf16 uint16) float32 { return math.Float32frombits(uint32(bf16) << 16) }

func (w *weights) free() {
	for _, b := range w.buffers {
		b.Free()
	}
}
