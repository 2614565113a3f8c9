package reference

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
)

// tensorFile is one safetensors file.
type tensorFile struct {
	file    *os.File
	data    int64 // offset of the data part
	tensors map[string]tensorInfo
}

// tensorInfo is one header entry.
type tensorInfo struct {
	DType   string   `json:"dtype"`
	Shape   []int64  `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

var dtypeBytes = map[string]int64{"F32": 4, "BF16": 2, "U8": 1}

// parseHeader reads a safetensors header; dataSize is the number of bytes after it.
func parseHeader(b []byte, dataSize int64) (map[string]tensorInfo, error) {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	tensors := map[string]tensorInfo{}
	for name, r := range raw {
		if name == "__metadata__" {
			continue
		}
		var t tensorInfo
		if err := json.Unmarshal(r, &t); err != nil {
			return nil, fmt.Errorf("tensor %s: %w", name, err)
		}
		size, ok := dtypeBytes[t.DType]
		if !ok {
			return nil, fmt.Errorf("tensor %s: dtype %q, need F32, BF16 or U8", name, t.DType)
		}
		for _, d := range t.Shape {
			if d < 0 || (d > 0 && size > math.MaxInt64/d) {
				return nil, fmt.Errorf("tensor %s: shape %v is impossible", name, t.Shape)
			}
			size *= d
		}
		if t.Offsets[0] < 0 || t.Offsets[1] > dataSize || t.Offsets[1]-t.Offsets[0] != size {
			return nil, fmt.Errorf("tensor %s: data_offsets %v do not hold %d bytes inside %d bytes of data", name, t.Offsets, size, dataSize)
		}
		tensors[name] = t
	}
	return tensors, nil
}

func openTensorFile(path string) (*tensorFile, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	t, err := readTensorFile(f)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

func readTensorFile(f *os.File) (*tensorFile, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var head [8]byte
	if _, err := io.ReadFull(f, head[:]); err != nil {
		return nil, fmt.Errorf("shorter than a safetensors header")
	}
	n := binary.LittleEndian.Uint64(head[:])
	if info.Size() < 8 || n > uint64(info.Size()-8) {
		return nil, fmt.Errorf("header of %d bytes in a file of %d: the file is cut short", n, info.Size())
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(f, b); err != nil {
		return nil, err
	}
	t, err := parseHeader(b, info.Size()-8-int64(n))
	return &tensorFile{f, 8 + int64(n), t}, err
}

// checkpoint is a directory of safetensors files, addressed by tensor name.
type checkpoint struct {
	files  []*tensorFile
	tensor map[string]*tensorFile
	err    error // the first failure; later reads return zeros
}

func openCheckpoint(dir string) (*checkpoint, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("%s: no *.safetensors files", dir)
	}
	c := &checkpoint{tensor: map[string]*tensorFile{}}
	for _, p := range paths {
		f, err := openTensorFile(p)
		if err != nil {
			c.close()
			return nil, err
		}
		c.files = append(c.files, f)
		for name := range f.tensors {
			if c.tensor[name] != nil {
				c.close()
				return nil, fmt.Errorf("%s: tensor %s is in another file too", p, name)
			}
			c.tensor[name] = f
		}
	}
	return c, nil
}

func (c *checkpoint) close() {
	for _, f := range c.files {
		f.file.Close()
	}
}

// raw returns a tensor's bytes after checking dtype and shape; nil after an error.
func (c *checkpoint) raw(name, dtype string, shape ...int) []byte {
	if c.err != nil {
		return nil
	}
	f := c.tensor[name]
	if f == nil {
		c.err = fmt.Errorf("tensor %s is missing", name)
		return nil
	}
	t := f.tensors[name]
	want := make([]int64, len(shape))
	for i, d := range shape {
		want[i] = int64(d)
	}
	if t.DType != dtype || !slices.Equal(t.Shape, want) {
		c.err = fmt.Errorf("tensor %s is %s %v, need %s %v", name, t.DType, t.Shape, dtype, want)
		return nil
	}
	b := make([]byte, t.Offsets[1]-t.Offsets[0])
	if _, err := f.file.ReadAt(b, f.data+t.Offsets[0]); err != nil {
		c.err = fmt.Errorf("tensor %s: %w", name, err)
		return nil
	}
	return b
}

// vector reads a BF16 or F32 tensor of any shape as a flat vector, widened to F.
func vector[F Float](c *checkpoint, name, dtype string, shape ...int) []F {
	b := c.raw(name, dtype, shape...)
	if dtype == "F32" {
		x := make([]F, len(b)/4)
		for i := range x {
			x[i] = F(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
		}
		return x
	}
	x := make([]F, len(b)/2)
	for i := range x {
		x[i] = F(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16))
	}
	return x
}

// matrix reads a BF16 matrix.
func matrix[F Float](c *checkpoint, name string, rows, cols int) Matrix[F] {
	return Matrix[F]{rows, cols, vector[F](c, name, "BF16", rows, cols)}
}

// mxfp4 reads name_packed and name_scale.
func mxfp4[F Float](c *checkpoint, name string, rows, cols int) Matrix[F] {
	packed := c.raw(name+"_packed", "U8", rows, cols/2)
	scale := c.raw(name+"_scale", "U8", rows, cols/32)
	if c.err != nil {
		return Matrix[F]{}
	}
	m, err := MXFP4Decode[F](packed, scale, rows, cols)
	if err != nil {
		c.err = fmt.Errorf("tensor %s: %w", name, err)
	}
	return m
}

// Load reads a checkpoint directory in the released layout: config.json and
// *.safetensors, tensor names with the prefix language_model. (spec B.2). Error: a
// missing or contradictory field, tensor, shape or dtype, by name. All of it is held in
// memory as F, so this is for small checkpoints.
func Load[F Float](dir string) (*Model[F], error) {
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return nil, err
	}
	cfg, err := parseConfig(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	ck, err := openCheckpoint(dir)
	if err != nil {
		return nil, err
	}
	defer ck.close()
	m := bind[F](ck, cfg)
	if ck.err != nil {
		return nil, fmt.Errorf("%s: %w", dir, ck.err)
	}
	return m, nil
}

// bind gives every tensor its place (spec B.2). Failures are in ck.err.
func bind[F Float](ck *checkpoint, c Config) *Model[F] {
	const top = "language_model.model."
	h := c.HiddenSize
	res := func(prefix string) ResWeights[F] {
		return ResWeights[F]{
			Norm: vector[F](ck, prefix+"_norm.weight", "BF16", h),
			Proj: vector[F](ck, prefix+"_proj.weight", "BF16", 1, h),
		}
	}
	m := &Model[F]{
		Config:  c,
		Embed:   matrix[F](ck, top+"embed_tokens.weight", c.VocabSize, h),
		OutRes:  res(top + "output_attn_res"),
		OutNorm: vector[F](ck, top+"norm.weight", "BF16", h),
		Head:    matrix[F](ck, "language_model.lm_head.weight", c.VocabSize, h),
	}
	for i := 0; i < c.NumLayers && ck.err == nil; i++ {
		p := fmt.Sprintf("%slayers.%d.", top, i)
		l := Layer[F]{
			AttnRes:  res(p + "self_attention_res"),
			AttnNorm: vector[F](ck, p+"input_layernorm.weight", "BF16", h),
			MLPRes:   res(p + "mlp_res"),
			MLPNorm:  vector[F](ck, p+"post_attention_layernorm.weight", "BF16", h),
		}
		if c.IsKDA(i) {
			l.KDA = bindKDA[F](ck, c, p+"self_attn.")
		} else {
			l.MLA = bindMLA[F](ck, c, p+"self_attn.")
		}
		if i < c.FirstKDense {
			g := bindGLU[F](ck, p+"mlp.", h, c.IntermediateSize)
			l.Dense = &g
		} else {
			l.MoE = bindMoE[F](ck, c, p+"block_sparse_moe.")
		}
		m.Layers = append(m.Layers, l)
	}
	return m
}

func bindKDA[F Float](ck *checkpoint, c Config, p string) *KDAWeights[F] {
	h, d, n, taps := c.HiddenSize, c.Linear.HeadDim, c.Linear.NumHeads, c.Linear.ShortConvKernelSize
	conv := func(name string) Matrix[F] {
		return Matrix[F]{n * d, taps, vector[F](ck, p+name+"_conv1d.weight", "F32", n*d, 1, taps)}
	}
	proj := func(name string, rows, cols int) Matrix[F] { return matrix[F](ck, p+name+"_proj.weight", rows, cols) }
	w := &KDAWeights[F]{
		Q: proj("q", n*d, h), K: proj("k", n*d, h), V: proj("v", n*d, h), Gate: proj("g", n*d, h),
		QConv: conv("q"), KConv: conv("k"), VConv: conv("v"),
		FA: proj("f_a", d, h), FB: proj("f_b", n*d, d), Beta: proj("b", n, h), Out: proj("o", h, n*d),
		DtBias: vector[F](ck, p+"dt_bias", "F32", n*d),
		ONorm:  vector[F](ck, p+"o_norm.weight", "F32", d),
	}
	// A_log may be stored wider than the head count, padded with zeros (spec F.10).
	if f := ck.tensor[p+"A_log"]; f != nil && ck.err == nil {
		shape := f.tensors[p+"A_log"].Shape
		if len(shape) != 1 || shape[0] < int64(n) {
			ck.err = fmt.Errorf("tensor %sA_log has shape %v, need at least %d entries", p, shape, n)
			return w
		}
		all := vector[F](ck, p+"A_log", "F32", int(shape[0]))
		if ck.err != nil {
			return w
		}
		for i, v := range all[n:] {
			if v != 0 {
				ck.err = fmt.Errorf("tensor %sA_log: entry %d beyond the %d heads is %v, must be 0", p, n+i, n, v)
			}
		}
		w.ALog = all[:n]
		return w
	}
	w.ALog = vector[F](ck, p+"A_log", "F32", n)
	return w
}

func bindMLA[F Float](ck *checkpoint, c Config, p string) *MLAWeights[F] {
	h, n := c.HiddenSize, c.NumAttentionHeads
	return &MLAWeights[F]{
		QA:     matrix[F](ck, p+"q_a_proj.weight", c.QLoraRank, h),
		QANorm: vector[F](ck, p+"q_a_layernorm.weight", "BF16", c.QLoraRank),
		QB:     matrix[F](ck, p+"q_b_proj.weight", n*(c.QKNopeHeadDim+c.QKRopeHeadDim), c.QLoraRank),
		KVA:    matrix[F](ck, p+"kv_a_proj_with_mqa.weight", c.KVLoraRank+c.QKRopeHeadDim, h),
		KVNorm: vector[F](ck, p+"kv_a_layernorm.weight", "BF16", c.KVLoraRank),
		KVB:    matrix[F](ck, p+"kv_b_proj.weight", n*(c.QKNopeHeadDim+c.VHeadDim), c.KVLoraRank),
		Gate:   matrix[F](ck, p+"g_proj.weight", n*c.VHeadDim, h),
		Out:    matrix[F](ck, p+"o_proj.weight", h, n*c.VHeadDim),
	}
}

func bindGLU[F Float](ck *checkpoint, p string, hidden, inner int) GLUWeights[F] {
	return GLUWeights[F]{
		Gate: matrix[F](ck, p+"gate_proj.weight", inner, hidden),
		Up:   matrix[F](ck, p+"up_proj.weight", inner, hidden),
		Down: matrix[F](ck, p+"down_proj.weight", hidden, inner),
	}
}

func bindMoE[F Float](ck *checkpoint, c Config, p string) *MoEWeights[F] {
	h, z := c.HiddenSize, c.LatentSize
	w := &MoEWeights[F]{
		Router:     matrix[F](ck, p+"gate.weight", c.NumExperts, h),
		RouterBias: vector[F](ck, p+"gate.e_score_correction_bias", "F32", c.NumExperts),
		Down:       matrix[F](ck, p+"routed_expert_down_proj.weight", z, h),
		Norm:       vector[F](ck, p+"routed_expert_norm.weight", "BF16", z),
		Up:         matrix[F](ck, p+"routed_expert_up_proj.weight", h, z),
		Shared:     bindGLU[F](ck, p+"shared_experts.", h, c.NumSharedExperts*c.MoEIntermediate),
	}
	for e := 0; e < c.NumExperts && ck.err == nil; e++ {
		x := fmt.Sprintf("%sexperts.%d.", p, e)
		w.Experts = append(w.Experts, GLUWeights[F]{
			Gate: mxfp4[F](ck, x+"w1.weight", c.MoEIntermediate, z),
			Up:   mxfp4[F](ck, x+"w3.weight", c.MoEIntermediate, z),
			Down: mxfp4[F](ck, x+"w2.weight", z, c.MoEIntermediate),
		})
	}
	return w
}
