package checkpoint

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Prefix stands in front of every tensor name of the text model inside the files.
// The names of this package's API do not carry it.
const Prefix = "language_model."

// Tensor is one dense tensor (the "spine"): everything but the routed experts.
type Tensor struct {
	Name   string // without Prefix, such as "model.layers.0.self_attn.A_log"
	DType  DType
	Shape  []int // as stored, [out, in] for a projection; not to be changed
	File   int   // index for File and Path
	Offset int64 // bytes from the start of the file
	Bytes  int64
}

// Extent is one contiguous run of bytes of a shard.
type Extent struct {
	File          int
	Offset, Bytes int64
}

// The six parts of a routed expert in file order (spec B.1): w1 is the gate, w2
// the down projection, w3 the up projection.
const (
	W1Packed = iota
	W1Scale
	W2Packed
	W2Scale
	W3Packed
	W3Scale
	ExpertParts // how many there are
)

var partNames = [ExpertParts]string{
	"w1.weight_packed", "w1.weight_scale",
	"w2.weight_packed", "w2.weight_scale",
	"w3.weight_packed", "w3.weight_scale",
}

// Part is one U8 tensor [Rows][Cols] inside the run of an expert. A packed part has
// two weights in a byte, low nibble first; a scale part one byte for 32 (spec B.3).
type Part struct {
	Offset, Bytes int64 // Offset counts from the start of the run
	Rows, Cols    int
}

// ExpertLayout says where the parts lie inside the run of an expert, the same for
// all experts of a checkpoint.
type ExpertLayout struct {
	Parts       [ExpertParts]Part // indexed by W1Packed...W3Scale
	ExpertBytes int64             // bytes of the whole run; 17547264 in K3
}

func expertLayout(c *Config) ExpertLayout {
	var l ExpertLayout
	for w, dim := range [3]struct{ out, in int }{
		{c.MoEInter, c.Latent}, {c.Latent, c.MoEInter}, {c.MoEInter, c.Latent},
	} {
		for p, cols := range [2]int{dim.in / 2, dim.in / groupSize} {
			bytes := int64(dim.out) * int64(cols)
			l.Parts[2*w+p] = Part{Offset: l.ExpertBytes, Bytes: bytes, Rows: dim.out, Cols: cols}
			l.ExpertBytes += bytes
		}
	}
	return l
}

// roster is what the config says must exist (spec B.2), filled in with where the
// index and the shard headers say it is. It keeps no string per expert tensor: K3
// has 494592 of them.
type roster struct {
	cfg     *Config
	layout  ExpertLayout
	dense   []Tensor
	byName  map[string]int // position in dense; keys without Prefix
	experts []expert       // (layer-FirstDense)*Experts + id
	files   []string       // base names, sorted; indexed by Tensor.File

	ignoredMu sync.Mutex
	ignored   map[string]int // tensors of the vision part: shard, or ^shard once found in it
}

type expert struct {
	offset int64 // of the run, from the start of the file
	file   int16
	listed uint8 // bit p: part p is in the index
	found  uint8 // bit p: part p is in the shard
}

const (
	allParts     = 1<<ExpertParts - 1
	ignoredLimit = 1 << 16
	fileLimit    = 1 << 12 // below 2^15, so that a file fits expert.file
	aLogLimit    = 1 << 16 // entries of A_log, which may be padded beyond KDAHeads
	unset        = -1
)

func newRoster(c *Config) *roster {
	r := &roster{cfg: c, layout: expertLayout(c), byName: map[string]int{}, ignored: map[string]int{}}
	add := func(name string, d DType, shape ...int) {
		bytes, _ := byteLen(d, shape) // ParseConfig bounds it
		r.byName[name] = len(r.dense)
		r.dense = append(r.dense, Tensor{Name: name, DType: d, Shape: shape, File: unset, Offset: unset, Bytes: bytes})
	}
	add("model.embed_tokens.weight", BF16, c.Vocab, c.Hidden)
	add("lm_head.weight", BF16, c.Vocab, c.Hidden)
	add("model.norm.weight", BF16, c.Hidden)
	add("model.output_attn_res_norm.weight", BF16, c.Hidden)
	add("model.output_attn_res_proj.weight", BF16, 1, c.Hidden)
	for l := range c.Layers {
		layer := "model.layers." + strconv.Itoa(l) + "."
		for _, name := range []string{"input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"} {
			add(layer+name+".weight", BF16, c.Hidden)
		}
		add(layer+"self_attention_res_proj.weight", BF16, 1, c.Hidden)
		add(layer+"mlp_res_proj.weight", BF16, 1, c.Hidden)

		attn := layer + "self_attn."
		if c.MLA[l] {
			inner := c.Heads * c.VDim
			add(attn+"q_a_proj.weight", BF16, c.QLora, c.Hidden)
			add(attn+"q_a_layernorm.weight", BF16, c.QLora)
			add(attn+"q_b_proj.weight", BF16, c.Heads*(c.Nope+c.Rope), c.QLora)
			add(attn+"kv_a_proj_with_mqa.weight", BF16, c.KVLora+c.Rope, c.Hidden)
			add(attn+"kv_a_layernorm.weight", BF16, c.KVLora)
			add(attn+"kv_b_proj.weight", BF16, c.Heads*(c.Nope+c.VDim), c.KVLora)
			add(attn+"g_proj.weight", BF16, inner, c.Hidden)
			add(attn+"o_proj.weight", BF16, c.Hidden, inner)
		} else {
			inner := c.KDAHeads * c.KDADim
			for _, p := range []string{"q", "k", "v"} {
				add(attn+p+"_proj.weight", BF16, inner, c.Hidden)
				add(attn+p+"_conv1d.weight", F32, inner, 1, c.ConvKernel)
			}
			add(attn+"g_proj.weight", BF16, inner, c.Hidden)
			add(attn+"f_a_proj.weight", BF16, c.KDADim, c.Hidden)
			add(attn+"f_b_proj.weight", BF16, inner, c.KDADim)
			add(attn+"b_proj.weight", BF16, c.KDAHeads, c.Hidden)
			add(attn+"A_log", F32, c.KDAHeads)
			add(attn+"dt_bias", F32, inner)
			add(attn+"o_norm.weight", F32, c.KDADim)
			add(attn+"o_proj.weight", BF16, c.Hidden, inner)
		}

		if !c.IsMoE(l) {
			add(layer+"mlp.gate_proj.weight", BF16, c.Intermediate, c.Hidden)
			add(layer+"mlp.up_proj.weight", BF16, c.Intermediate, c.Hidden)
			add(layer+"mlp.down_proj.weight", BF16, c.Hidden, c.Intermediate)
			continue
		}
		moe := layer + "block_sparse_moe."
		shared := c.SharedExperts * c.MoEInter
		add(moe+"gate.weight", BF16, c.Experts, c.Hidden)
		add(moe+"gate.e_score_correction_bias", F32, c.Experts)
		add(moe+"routed_expert_down_proj.weight", BF16, c.Latent, c.Hidden)
		if c.LatentNorm {
			add(moe+"routed_expert_norm.weight", BF16, c.Latent)
		}
		add(moe+"routed_expert_up_proj.weight", BF16, c.Hidden, c.Latent)
		add(moe+"shared_experts.gate_proj.weight", BF16, shared, c.Hidden)
		add(moe+"shared_experts.up_proj.weight", BF16, shared, c.Hidden)
		add(moe+"shared_experts.down_proj.weight", BF16, c.Hidden, shared)
	}
	r.experts = make([]expert, (c.Layers-c.FirstDense)*c.Experts)
	for i := range r.experts {
		r.experts[i] = expert{offset: unset, file: unset}
	}
	return r
}

// place names a slot of the roster: a dense tensor, or one part of an expert.
type place struct {
	dense  int // position in dense, or unset
	expert int
	part   int
}

// find looks up a name of the files, prefix included.
func (r *roster) find(name string) (place, bool) {
	short, ok := strings.CutPrefix(name, Prefix)
	if !ok {
		return place{}, false
	}
	if i, ok := r.byName[short]; ok {
		return place{dense: i}, true
	}
	rest, ok := strings.CutPrefix(short, "model.layers.")
	if !ok {
		return place{}, false
	}
	layer, rest, ok := cutNumber(rest, ".block_sparse_moe.experts.")
	if !ok || layer >= r.cfg.Layers || !r.cfg.IsMoE(layer) {
		return place{}, false
	}
	id, rest, ok := cutNumber(rest, ".")
	if !ok || id >= r.cfg.Experts {
		return place{}, false
	}
	part := slices.Index(partNames[:], rest)
	if part < 0 {
		return place{}, false
	}
	return place{dense: unset, expert: r.expertAt(layer, id), part: part}, true
}

// cutNumber splits "12.suffix..." into 12 and what follows the suffix. The number
// must be written the one usual way, so that no two names mean one tensor.
func cutNumber(s, suffix string) (n int, rest string, ok bool) {
	digits, rest, ok := strings.Cut(s, ".")
	if !ok {
		return 0, "", false
	}
	n, err := strconv.Atoi(digits)
	if err != nil || n < 0 || strconv.Itoa(n) != digits {
		return 0, "", false
	}
	rest, ok = strings.CutPrefix("."+rest, suffix)
	return n, rest, ok
}

func (r *roster) expertAt(layer, id int) int {
	return (layer-r.cfg.FirstDense)*r.cfg.Experts + id
}

// expertName is the full name of one part, as the files have it.
func (r *roster) expertName(i, part int) string {
	return fmt.Sprintf("%smodel.layers.%d.block_sparse_moe.experts.%d.%s",
		Prefix, r.cfg.FirstDense+i/r.cfg.Experts, i%r.cfg.Experts, partNames[part])
}

// tensors counts the roster: 497052 in K3.
func (r *roster) tensors() int { return len(r.dense) + ExpertParts*len(r.experts) }

// unknown is the error for a prefixed name that the config does not imply.
func (r *roster) unknown(name string) error {
	return fmt.Errorf("tensor %s is not part of the model that config.json describes (%d layers, %d experts): use the config.json that belongs to the weights",
		quoted(name), r.cfg.Layers, r.cfg.Experts)
}

// used reports which shards hold at least one tensor of the text model.
func (r *roster) used() []bool {
	used := make([]bool, len(r.files))
	for i := range r.dense {
		used[r.dense[i].File] = true
	}
	for i := range r.experts {
		used[r.experts[i].file] = true
	}
	return used
}
