package synth

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// groupSize is how many weights share a scale byte (spec B.3).
const groupSize = 32

type dtype int

// The types in the order in which the released shards have them (spec B.1).
const (
	f32 dtype = iota
	bf16
	u8
)

func (d dtype) String() string { return [...]string{"F32", "BF16", "U8"}[d] }
func (d dtype) bytes() int64   { return [...]int64{4, 2, 1}[d] }

// tensor is one tensor of a shard. begin and bytes are set by header.
type tensor struct {
	name         string
	dtype        dtype
	shape        []int
	values       values
	begin, bytes int64 // in the data section of the shard
}

func (t *tensor) end() int64 { return t.begin + t.bytes }

// shards returns the number of shards: one per layer and one for the rest.
func (p Params) shards() int { return p.Layers + 1 }

func (p Params) shardName(i int) string {
	return fmt.Sprintf("model-%05d-of-%06d.safetensors", i+1, p.shards())
}

// shard lists the tensors of a shard (spec B.2) in no particular order.
func (p Params) shard(i int) []tensor {
	if i < p.Layers {
		return p.layer(i)
	}
	var s shard
	s.prefix = "language_model.model."
	s.linear("embed_tokens", p.Vocab, p.Hidden, embedStd*math.Sqrt(float64(p.Hidden)))
	s.norm("norm", p.Hidden)
	s.norm("output_attn_res_norm", p.Hidden)
	s.linear("output_attn_res_proj", 1, p.Hidden, resGain)
	s.prefix = "language_model."
	s.linear("lm_head", p.Vocab, p.Hidden, headGain)
	return s.tensors
}

// The gains of the projections. A projection of n inputs has weights of standard
// deviation gain/sqrt(n), so it turns inputs of mean square 1 into outputs of
// gain squared. Every block of K3 begins with a norm, so each adds about as
// much to the stream as the others at any depth, provided that what it ends with
// has about the same size; the gains see to that. They also drive the sigmoids and
// tanhs out of their linear parts, so that a wrong one shows. TestNothingVanishes...
// holds them to it.
const (
	embedStd = 0.7
	headGain = 3   // logits far enough apart that the greedy choice is clear
	resGain  = 1.5 // the mix over depth prefers some sources, and drops none
	normStd  = 0.1

	kdaInGain   = 1.4
	kdaOutGain  = 1.5
	kdaGateGain = 1.5 // of the output gate, the decay and beta alike
	convStd     = 0.6

	mlaQueryGain = 1.6
	mlaValueGain = 1.3
	mlaGateGain  = 1.5
	mlaOutGain   = 2.5 // attention averages values; this makes up for it

	denseGateGain  = 3
	denseUpGain    = 8
	denseDownGain  = 0.2
	sharedDownGain = 0.1

	expertGateGain = 2
	expertUpGain   = 6
	expertDownGain = 0.4

	// How far the routes lean towards some experts is decided by these two. The
	// scores of the chosen few are close to 1, where the sigmoid is flat, so a bias
	// that looks small decides much: see TestRoutesLeanButDoNotCollapse.
	routerGain = 1.5
	routerBias = 0.05
)

// The slowest channels of KDA must remember across a prompt, the fastest forget at
// once: sigmoid(exp(A)*(dt-5)) is next to nothing.
var (
	dtBias = values{kind: uniform, mean: -2, spread: 3}
	aLog   = values{kind: uniform, mean: 0.25, spread: 0.75}
)

// shard collects tensors whose names begin alike.
type shard struct {
	prefix  string
	tensors []tensor
}

func (s *shard) add(d dtype, name string, v values, shape ...int) {
	s.tensors = append(s.tensors, tensor{name: s.prefix + name, dtype: d, shape: shape, values: v})
}

// linear adds the weights [out][in] of a projection.
func (s *shard) linear(name string, out, in int, gain float64) {
	s.add(bf16, name+".weight", values{kind: normal, spread: std(gain, in)}, out, in)
}

func (s *shard) norm(name string, n int) {
	s.add(bf16, name+".weight", values{kind: normal, mean: 1, spread: normStd}, n)
}

func std(gain float64, in int) float64 { return gain / math.Sqrt(float64(in)) }

func (p Params) layer(l int) []tensor {
	var s shard
	layer := "language_model.model.layers." + strconv.Itoa(l) + "."
	s.prefix = layer
	for _, name := range []string{"input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"} {
		s.norm(name, p.Hidden)
	}
	s.linear("self_attention_res_proj", 1, p.Hidden, resGain)
	s.linear("mlp_res_proj", 1, p.Hidden, resGain)

	s.prefix = layer + "self_attn."
	if p.isMLA(l) {
		inner := p.Heads * p.VDim
		s.linear("q_a_proj", p.QLora, p.Hidden, 1)
		s.norm("q_a_layernorm", p.QLora)
		s.linear("q_b_proj", p.Heads*(p.Nope+p.Rope), p.QLora, mlaQueryGain)
		s.linear("kv_a_proj_with_mqa", p.KVLora+p.Rope, p.Hidden, 1)
		s.norm("kv_a_layernorm", p.KVLora)
		s.linear("kv_b_proj", p.Heads*(p.Nope+p.VDim), p.KVLora, mlaValueGain)
		s.linear("g_proj", inner, p.Hidden, mlaGateGain)
		s.linear("o_proj", p.Hidden, inner, mlaOutGain)
	} else {
		inner := p.KDAHeads * p.KDADim
		for _, q := range []string{"q", "k", "v"} {
			s.linear(q+"_proj", inner, p.Hidden, kdaInGain)
			s.add(f32, q+"_conv1d.weight", values{kind: normal, spread: convStd}, inner, 1, p.ConvKernel)
		}
		s.linear("g_proj", inner, p.Hidden, kdaGateGain)
		s.linear("f_a_proj", p.KDADim, p.Hidden, 1)
		s.linear("f_b_proj", inner, p.KDADim, kdaGateGain)
		s.linear("b_proj", p.KDAHeads, p.Hidden, kdaGateGain)
		a := aLog
		a.count = p.KDAHeads
		s.add(f32, "A_log", a, p.aLog())
		s.add(f32, "dt_bias", dtBias, inner)
		s.add(f32, "o_norm.weight", values{kind: normal, mean: 1, spread: normStd}, p.KDADim)
		s.linear("o_proj", p.Hidden, inner, kdaOutGain)
	}

	if l < p.FirstDense {
		s.prefix = layer + "mlp."
		s.linear("gate_proj", p.Intermediate, p.Hidden, denseGateGain)
		s.linear("up_proj", p.Intermediate, p.Hidden, denseUpGain)
		s.linear("down_proj", p.Hidden, p.Intermediate, denseDownGain)
		return s.tensors
	}
	s.prefix = layer + "block_sparse_moe."
	s.linear("gate", p.Experts, p.Hidden, routerGain)
	s.add(f32, "gate.e_score_correction_bias", values{kind: uniform, spread: routerBias}, p.Experts)
	s.linear("routed_expert_down_proj", p.Latent, p.Hidden, 1.5)
	s.norm("routed_expert_norm", p.Latent)
	s.linear("routed_expert_up_proj", p.Hidden, p.Latent, 1)
	shared := p.SharedExperts * p.MoEInter
	s.linear("shared_experts.gate_proj", shared, p.Hidden, denseGateGain)
	s.linear("shared_experts.up_proj", shared, p.Hidden, denseUpGain)
	s.linear("shared_experts.down_proj", p.Hidden, shared, sharedDownGain)
	for e := range p.Experts {
		for _, w := range []struct {
			name    string
			out, in int
			gain    float64
		}{
			{"w1", p.MoEInter, p.Latent, expertGateGain},
			{"w2", p.Latent, p.MoEInter, expertDownGain},
			{"w3", p.MoEInter, p.Latent, expertUpGain},
		} {
			name := "experts." + strconv.Itoa(e) + "." + w.name
			s.add(u8, name+".weight_packed", values{kind: nibbles}, w.out, w.in/2)
			s.add(u8, name+".weight_scale", values{kind: scales, spread: std(w.gain, w.in)}, w.out, w.in/groupSize)
		}
	}
	return s.tensors
}

// header sorts the tensors of a shard as the released ones are, by type and then by
// name, sets their places, and returns the bytes in front of the data section: the
// length and the JSON, padded to a multiple of 8. There is no __metadata__.
func header(ts []tensor) []byte {
	slices.SortFunc(ts, func(a, b tensor) int {
		return cmp.Or(cmp.Compare(a.dtype, b.dtype), cmp.Compare(a.name, b.name))
	})
	b := make([]byte, 8, 8+128*len(ts))
	var at int64
	for i := range ts {
		t := &ts[i]
		t.begin, t.bytes = at, t.dtype.bytes()
		b = append(b, ",\""...)
		b = append(b, t.name...)
		b = fmt.Appendf(b, "\":{\"dtype\":%q,\"shape\":[", t.dtype)
		for j, n := range t.shape {
			if j > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(n), 10)
			t.bytes *= int64(n)
		}
		at += t.bytes
		b = fmt.Appendf(b, "],\"data_offsets\":[%d,%d]}", t.begin, at)
	}
	b[8] = '{' // in place of the first comma
	b = append(b, '}')
	for len(b)%8 != 0 {
		b = append(b, ' ')
	}
	binary.LittleEndian.PutUint64(b, uint64(len(b)-8))
	return b
}

// index collects model.safetensors.index.json.
type index struct {
	bytes int64
	lines []string
}

func (x *index) add(file string, ts []tensor) {
	for i := range ts {
		x.bytes += ts[i].bytes
		x.lines = append(x.lines, fmt.Sprintf("    %q: %q", ts[i].name, file))
	}
}

func (x *index) render() []byte {
	slices.Sort(x.lines)
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\n  \"metadata\": {\n    \"total_size\": %d\n  },\n  \"weight_map\": {\n", x.bytes)
	for i, line := range x.lines {
		if i > 0 {
			b.WriteString(",\n")
		}
		b.WriteString(line)
	}
	b.WriteString("\n  }\n}\n")
	return b.Bytes()
}
