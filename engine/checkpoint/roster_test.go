package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// stored is a tensor as the released files have it, written down here a second
// time from spec B.2 so that the roster is checked against something else.
type stored struct {
	name  string
	dtype string
	shape []int
}

func (s stored) bytes() int64 {
	n := int64(map[string]int{"F32": 4, "BF16": 2, "U8": 1}[s.dtype])
	for _, d := range s.shape {
		n *= int64(d)
	}
	return n
}

// k3Shard lists the tensors of shard 0 to 93 (0..92 are the layers), in file order:
// wide types first, then by name.
func k3Shard(i int) []stored {
	const h = 7168
	var list []stored
	layer := fmt.Sprintf("language_model.model.layers.%d.", i)
	bf := func(name string, shape ...int) { list = append(list, stored{layer + name, "BF16", shape}) }
	f32 := func(name string, shape ...int) { list = append(list, stored{layer + name, "F32", shape}) }
	switch {
	case i == 93:
		layer = "language_model."
		bf("model.embed_tokens.weight", 163840, h)
		bf("lm_head.weight", 163840, h)
		bf("model.norm.weight", h)
		bf("model.output_attn_res_norm.weight", h)
		bf("model.output_attn_res_proj.weight", 1, h)
	default:
		for _, n := range []string{"input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"} {
			bf(n+".weight", h)
		}
		bf("self_attention_res_proj.weight", 1, h)
		bf("mlp_res_proj.weight", 1, h)
		if i%4 == 3 || i == 92 {
			bf("self_attn.q_a_proj.weight", 1536, h)
			bf("self_attn.q_a_layernorm.weight", 1536)
			bf("self_attn.q_b_proj.weight", 18432, 1536)
			bf("self_attn.kv_a_proj_with_mqa.weight", 576, h)
			bf("self_attn.kv_a_layernorm.weight", 512)
			bf("self_attn.kv_b_proj.weight", 24576, 512)
		} else {
			for _, n := range []string{"q", "k", "v"} {
				bf("self_attn."+n+"_proj.weight", 12288, h)
				f32("self_attn."+n+"_conv1d.weight", 12288, 1, 4)
			}
			bf("self_attn.f_a_proj.weight", 128, h)
			bf("self_attn.f_b_proj.weight", 12288, 128)
			bf("self_attn.b_proj.weight", 96, h)
			f32("self_attn.A_log", 128)
			f32("self_attn.dt_bias", 12288)
			f32("self_attn.o_norm.weight", 128)
		}
		bf("self_attn.g_proj.weight", 12288, h)
		bf("self_attn.o_proj.weight", h, 12288)
		if i == 0 {
			bf("mlp.gate_proj.weight", 33792, h)
			bf("mlp.up_proj.weight", 33792, h)
			bf("mlp.down_proj.weight", h, 33792)
			break
		}
		const m = "block_sparse_moe."
		bf(m+"gate.weight", 896, h)
		f32(m+"gate.e_score_correction_bias", 896)
		bf(m+"routed_expert_down_proj.weight", 3584, h)
		bf(m+"routed_expert_norm.weight", 3584)
		bf(m+"routed_expert_up_proj.weight", h, 3584)
		bf(m+"shared_experts.gate_proj.weight", 6144, h)
		bf(m+"shared_experts.up_proj.weight", 6144, h)
		bf(m+"shared_experts.down_proj.weight", h, 6144)
		for e := range 896 {
			for _, w := range []struct {
				name    string
				out, in int
			}{{"w1", 3072, 3584}, {"w2", 3584, 3072}, {"w3", 3072, 3584}} {
				name := layer + m + "experts." + strconv.Itoa(e) + "." + w.name
				list = append(list,
					stored{name + ".weight_packed", "U8", []int{w.out, w.in / 2}},
					stored{name + ".weight_scale", "U8", []int{w.out, w.in / 32}})
			}
		}
	}
	rank := map[string]int{"F32": 0, "BF16": 1, "U8": 2}
	slices.SortFunc(list, func(a, b stored) int {
		if d := rank[a.dtype] - rank[b.dtype]; d != 0 {
			return d
		}
		return strings.Compare(a.name, b.name)
	})
	return list
}

// encodeHeader writes the header as the format's library does.
func encodeHeader(list []stored) (header []byte, size int64) {
	b := make([]byte, 8, 1<<20)
	b = append(b, '{')
	at := int64(0)
	for i, s := range list {
		if i > 0 {
			b = append(b, ',')
		}
		shape, _ := json.Marshal(s.shape)
		b = fmt.Appendf(b, `"%s":{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}`, s.name, s.dtype, shape, at, at+s.bytes())
		at += s.bytes()
	}
	b = append(b, '}')
	for len(b)%8 != 0 {
		b = append(b, ' ')
	}
	binary.LittleEndian.PutUint64(b, uint64(len(b)-8))
	return b, int64(len(b)) + at
}

// TestTheRealRosterAddsUpToTheReleasedFiles feeds the reader the headers of all
// 497052 text tensors of K3 and demands the sizes that the release has (spec B.1,
// B.4): of the data of each shard, and of each file with its header.
func TestTheRealRosterAddsUpToTheReleasedFiles(t *testing.T) {
	const shards = 94
	cfg, err := ParseConfig(released(t))
	if err != nil {
		t.Fatal(err)
	}
	before := heap()
	r := newRoster(cfg)
	if r.tensors() != 497052 {
		t.Errorf("the roster has %d tensors, want 497052", r.tensors())
	}
	if r.layout.ExpertBytes != 17547264 {
		t.Errorf("an expert has %d bytes, want 17547264", r.layout.ExpertBytes)
	}

	shardName := func(i int) string { return fmt.Sprintf("model-%05d-of-000096.safetensors", i+1) }
	pr, pw := io.Pipe()
	go func() {
		var b bytes.Buffer
		b.WriteString(`{"metadata": {"total_size": 1560860324864}, "weight_map": {"vision_tower.a": "` + shardName(95) + `"`)
		for i := range shards {
			file := shardName(i)
			for _, s := range k3Shard(i) {
				b.WriteString(`, "` + s.name + `": "` + file + `"`)
			}
			pw.Write(b.Bytes()) // fails when the reader has given up; the test says so
			b.Reset()
		}
		pw.Write([]byte("}}\n"))
		pw.Close()
	}()
	total, err := r.readIndex(pr)
	pr.Close()
	if err != nil {
		t.Fatal(err)
	}
	if used := r.used(); len(used) != 95 || used[94] || !used[93] {
		t.Errorf("of %d shards the last, which is the vision part's, is wanted: %v", len(used), used[len(used)-1])
	}

	sum, err := r.readShards(r.used(), func(i int) (io.Reader, int64, error) {
		list := k3Shard(i)
		header, size := encodeHeader(list)
		var data int64
		for _, s := range list {
			data += s.bytes()
		}
		mla := i%4 == 3 || i == 92
		wantData, wantSize := int64(1267744256+15722348544), int64(16990911504)
		switch {
		case i == 0:
			wantData, wantSize = 2341213184, 2341216112
		case i == 93:
			wantData, wantSize = 4697620480+3*7168*2, 4697664072
		case mla:
			wantData, wantSize = 844335616+15722348544, 16567501776
		}
		if i >= 10 && i < 93 { // one more digit in every name
			wantSize += 5408
			if mla {
				wantSize -= 8
			}
		}
		if data != wantData || size != wantSize {
			t.Errorf("shard %d has %d bytes of data in %d, want %d in %d", i, data, size, wantData, wantSize)
		}
		return bytes.NewReader(header), size, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	// Layers, embedding and head as B.4 sums them, and the norms of the last shard.
	if want := int64(1446456066048 + 108811877376 + 4697620480 + 3*7168*2); sum != want {
		t.Errorf("the text model has %d bytes, want %d", sum, want)
	}
	if err := checkTotal(total, sum, false); err != nil {
		t.Error(err)
	}

	c := &Checkpoint{r: r}
	log, err := c.Tensor("model.layers.0.self_attn.A_log")
	if err != nil || log.Bytes != 512 || !slices.Equal(log.Shape, []int{128}) {
		t.Errorf("A_log is %+v, %v; want the 128 stored entries", log, err)
	}
	// By name, expert 10 comes after 1 and before 2.
	a, b, x := c.Expert(1, 1), c.Expert(1, 10), c.Expert(1, 2)
	if b.Offset != a.Offset+a.Bytes || x.Offset <= b.Offset {
		t.Errorf("experts 1, 10, 2 of layer 1 are at %d, %d, %d", a.Offset, b.Offset, x.Offset)
	}
	held := heap() - before
	t.Logf("the open roster holds %d bytes", held)
	if held > 64_000_000 {
		t.Errorf("the open roster holds %d bytes, want less than 64 MB", held)
	}
	runtime.KeepAlive(c)
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestNamesThatAreAlmostRightAreUnknown(t *testing.T) {
	r := newRoster(tinyConfig())
	const good = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"
	if p, ok := r.find(good); !ok || r.expertName(p.expert, p.part) != good {
		t.Fatalf("%s is not found", good)
	}
	if _, ok := r.find("language_model.model.layers.0.self_attn.A_log"); !ok {
		t.Error("A_log is not found")
	}
	for _, name := range []string{
		"model.layers.1.block_sparse_moe.experts.3.w2.weight_scale",
		"language_model.layers.1.block_sparse_moe.experts.3.w2.weight_scale",
		"language_model.model.layers.1.block_sparse_moe.experts.03.w2.weight_scale",
		"language_model.model.layers.01.block_sparse_moe.experts.3.w2.weight_scale",
		"language_model.model.layers.+1.block_sparse_moe.experts.3.w2.weight_scale",
		"language_model.model.layers.-1.block_sparse_moe.experts.3.w2.weight_scale",
		"language_model.model.layers.1.block_sparse_moe.experts.4.w2.weight_scale",
		"language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight_scale",
		"language_model.model.layers.0.block_sparse_moe.experts.3.w2.weight_scale",
		"language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight",
		"language_model.model.layers.1.block_sparse_moe.experts.3.w4.weight_scale",
		"language_model.model.layers.1.block_sparse_moe.experts.99999999999999999999.w2.weight_scale",
		"language_model.model.layers.1.block_sparse_moe.experts.3",
		"language_model.model.layers.1.self_attn.A_log",
		"language_model.",
		"",
	} {
		if p, ok := r.find(name); ok {
			t.Errorf("%q is taken for %+v", name, p)
		}
	}
}

// tinyConfig is a model of two layers, KDA with a dense MLP and MLA with experts.
func tinyConfig() *Config {
	return &Config{
		Hidden: 4, Layers: 2, Vocab: 8, Intermediate: 4, ResBlock: 1, KDAHeads: 1, KDADim: 2, ConvKernel: 2,
		Heads: 1, QLora: 2, KVLora: 2, Nope: 2, Rope: 2, VDim: 2,
		Experts: 4, TopK: 2, SharedExperts: 1, MoEInter: 32, Latent: 32, FirstDense: 1, LatentNorm: true,
		MLA: []bool{false, true},
	}
}

// tinyIndex is a sound index for tinyConfig.
func tinyIndex() string {
	r := newRoster(tinyConfig())
	var parts []string
	for _, d := range r.dense {
		parts = append(parts, fmt.Sprintf("%q: %q", Prefix+d.Name, "b.safetensors"))
	}
	for i := range r.experts {
		for p := range ExpertParts {
			parts = append(parts, fmt.Sprintf("%q: %q", r.expertName(i, p), "a.safetensors"))
		}
	}
	parts = append(parts, `"vision_tower.x": "v.safetensors"`)
	return `{"metadata": {"total_size": 12, "note": {"any": [1]}}, "weight_map": {` + strings.Join(parts, ", ") + `}}`
}

func TestIndexNumbersShardsByName(t *testing.T) {
	r := newRoster(tinyConfig())
	total, err := r.readIndex(strings.NewReader(tinyIndex()))
	if err != nil || total != 12 {
		t.Fatalf("total %d, %v", total, err)
	}
	if got := strings.Join(r.files, " "); got != "a.safetensors b.safetensors v.safetensors" {
		t.Errorf("shards %s", got)
	}
	if r.dense[0].File != 1 || r.experts[0].file != 0 || r.ignored["vision_tower.x"] != 2 {
		t.Errorf("tensors are in shards %d, %d, %d", r.dense[0].File, r.experts[0].file, r.ignored["vision_tower.x"])
	}
	if got := r.used(); !slices.Equal(got, []bool{true, true, false}) {
		t.Errorf("used shards are %v", got)
	}
}

func TestMalformedIndexesAreRefused(t *testing.T) {
	good := tinyIndex()
	const expert = "language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight_packed"
	replace := func(old, new string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("the index has no %s", old)
		}
		return strings.Replace(good, old, new, 1)
	}
	for _, c := range []struct{ text, want string }{
		{"", "ends early"},
		{good[:len(good)-2], "ends early"},
		{good + "x", "after the JSON document"},
		{good + "{}", "after the end"},
		{"[]", "expected '{'"},
		{`{"metadata": {"total_size": 12}}`, "weight_map is missing"},
		{replace(`"metadata": {"total_size": 12, "note": {"any": [1]}}, `, ""), "metadata is missing"},
		{replace(`"total_size": 12, `, ""), "total_size is missing"},
		{replace(`"total_size": 12`, `"total_size": 12.0`), "found 12.0, expected an integer"},
		{replace(`"total_size": 12`, `"total_size": 12, "total_size": 12`), "total_size is given twice"},
		{replace(`"metadata"`, `"metadata": {"total_size": 1}, "metadata"`), "metadata is given twice"},
		{replace(`"metadata"`, `"weight_map": {}, "metadata"`), "weight_map is given twice"},
		{replace(`"metadata"`, `"more": 1, "metadata"`), "unknown field more"},
		{replace(`"weight_map": {`, `"weight_map": {"vision_tower.x": "v.safetensors", `), "vision_tower.x is given twice"},
		{replace(`"weight_map": {`, `"weight_map": {"language_model.lm_head.weight": "b.safetensors", `), "lm_head.weight is given twice"},
		{replace(`"weight_map": {`, `"weight_map": {"`+expert+`": "a.safetensors", `), expert + " is given twice"},
		{replace(`"weight_map": {`, `"weight_map": {"language_model.model.layers.9.x": "b.safetensors", `), "layers.9.x is not part of the model"},
		{replace(`"weight_map": {`, `"weight_map": {"language_model.a": 7, `), "found 7, expected a string"},
		{replace(`"`+expert+`": "a.safetensors", `, ""), expert + " is missing (1 of "},
		{replace(`"`+Prefix+`lm_head.weight": "b.safetensors", `, ""), "lm_head.weight is missing (1 of "},
		{strings.ReplaceAll(good, Prefix, ""), "language_model.model.embed_tokens.weight is missing"},
		{replace(`"`+expert+`": "a.safetensors"`, `"`+expert+`": "b.safetensors"`), expert + " is in another shard"},
	} {
		_, err := newRoster(tinyConfig()).readIndex(strings.NewReader(c.text))
		wantError(t, err, c.want)
	}
}

func TestShardNamesCannotLeaveTheDirectory(t *testing.T) {
	for _, name := range []string{
		"", ".safetensors", "../a.safetensors", "/a.safetensors", "x/a.safetensors", `x\a.safetensors`, `C:a.safetensors`,
		"..safetensors", "a.safetensors/..", "a.bin", "a.safetensors\x00", "a\n.safetensors", "é.safetensors",
		strings.Repeat("a", 250) + ".safetensors",
	} {
		quotedName, _ := json.Marshal(name)
		index := strings.Replace(tinyIndex(), `"v.safetensors"`, string(quotedName), 1)
		_, err := newRoster(tinyConfig()).readIndex(strings.NewReader(index))
		wantError(t, err, "tensor vision_tower.x: shard name ", "expected a plain file name")
	}
}

func FuzzIndex(f *testing.F) {
	f.Add([]byte(tinyIndex()))
	f.Add([]byte(`{"metadata": {"total_size": 1}, "weight_map": {"language_model.lm_head.weight": "../a.safetensors"}}`))
	f.Add([]byte(`{"weight_map": {"a": "a.safetensors", "a": "a.safetensors"}, "metadata": [[[[[[]]]]]]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newRoster(tinyConfig())
		total, err := r.readIndex(bytes.NewReader(b))
		if err != nil {
			return
		}
		if total < 0 || len(r.files) == 0 || !slices.IsSorted(r.files) {
			t.Errorf("total %d, shards %q", total, r.files)
		}
		for _, name := range r.files {
			if strings.ContainsAny(name, `/\:`) || !strings.HasSuffix(name, ".safetensors") {
				t.Errorf("shard %q was let through", name)
			}
		}
		for i := range r.dense {
			if f := r.dense[i].File; f < 0 || f >= len(r.files) {
				t.Errorf("tensor %s is in shard %d", r.dense[i].Name, f)
			}
		}
	})
}
