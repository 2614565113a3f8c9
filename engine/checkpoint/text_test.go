package checkpoint

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"deltafin/engine/checkpoint/checkpointtest"
	"deltafin/golden"

	"github.com/google/go-cmp/cmp"
)

var nanoText = filepath.Join(golden.Dir(), "nano", "model-text")

func textConfig(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(nanoText, configName))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestATextModelsConfigIsReadInFull(t *testing.T) {
	want := &TextConfig{
		Hidden: 128, Layers: 3, Heads: 4, KVHeads: 2, HeadDim: 64, Intermediate: 384, Vocab: 2080, Positions: 4096,
		Eps: 1e-6, Theta: 1e6, Tied: true,
	}
	older := textConfig(t)
	newer := strings.Replace(string(older), `"rope_theta": 1000000`, `"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}`, 1)
	newer = strings.Replace(newer, "torch_dtype", "dtype", 1)
	for _, b := range []string{string(older), newer} {
		got, err := ParseTextConfig([]byte(b))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("config differs (-want +got):\n%s", d)
		}
	}
}

// TestQwen3HasThePublishedParameters holds the roster against the sizes in the Qwen3 technical report (arXiv:2505.09388) and
// the releases: 0.6 and 1.7 billion parameters, of which 0.44 and 1.4 are not embedding.
func TestQwen3HasThePublishedParameters(t *testing.T) {
	for _, c := range []struct {
		hidden, inter int
		all, inner    int64
	}{{1024, 3072, 596_049_920, 440_467_456}, {2048, 6144, 1_720_574_976, 1_409_410_048}} {
		m := &TextConfig{Hidden: c.hidden, Layers: 28, Heads: 16, KVHeads: 8, HeadDim: 128, Intermediate: c.inter, Vocab: 151936, Tied: true}
		var all int64
		for _, x := range m.Tensors() {
			all += x.Bytes / 2
		}
		if inner := all - int64(m.Vocab*m.Hidden); all != c.all || inner != c.inner {
			t.Errorf("hidden %d: %d parameters, %d without the embedding, expected %d and %d", c.hidden, all, inner, c.all, c.inner)
		}
	}
}

func TestTextModelsThatTheEngineCannotRunAreRefused(t *testing.T) {
	set := func(v any) func(map[string]any, string) { return func(m map[string]any, k string) { m[k] = v } }
	remove := func(m map[string]any, k string) { delete(m, k) }
	for _, c := range []struct {
		field  string
		change func(map[string]any, string)
		want   string
	}{
		{"model_type", set("qwen2"), `model_type is "qwen2", expected "qwen3"`},
		{"architectures", set([]any{"Qwen3MoeForCausalLM"}), "architectures is"},
		{"hidden_act", set("gelu"), "hidden_act is"},
		{"torch_dtype", set("float16"), "torch_dtype is"},
		{"attention_bias", set(true), "attention_bias is true"},
		{"use_sliding_window", set(true), "use_sliding_window is true"},
		{"rope_scaling", set(map[string]any{"rope_type": "yarn"}), "rope_scaling is"},
		{"hidden_size", set(100), "hidden_size is 100, expected a multiple of 32"},
		{"head_dim", set(80), "head_dim is 80, expected a multiple of 32"},
		{"intermediate_size", remove, "intermediate_size is missing"},
		{"num_key_value_heads", set(3), "num_key_value_heads is 3, expected a divisor of the 4 heads"},
		{"num_hidden_layers", set(1 << 20), "num_hidden_layers is 1048576"},
		{"vocab_size", set(0), "vocab_size is 0"},
		{"rope_theta", remove, "rope_theta is missing"},
		{"rms_norm_eps", set("small"), "rms_norm_eps is"},
		{"tie_word_embeddings", set(nil), "tie_word_embeddings is"},
	} {
		b, ok := checkpointtest.EditJSON(textConfig(t), c.field, c.change)
		if !ok {
			t.Fatalf("the config has no place for %s", c.field)
		}
		_, err := ParseTextConfig(b)
		wantError(t, err, c.want, "config.json: ")
	}
}

func FuzzParseTextConfig(f *testing.F) {
	f.Add(textConfig(f))
	f.Add([]byte(`{"model_type":"qwen3","rope_parameters":{"rope_type":"default"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseTextConfig(b)
		if err != nil {
			return
		}
		for _, x := range c.Tensors() {
			if x.Bytes <= 0 {
				t.Errorf("tensor %s has %d bytes", x.Name, x.Bytes)
			}
		}
	})
}

func FuzzReadTextIndex(f *testing.F) {
	f.Add(`{"metadata":{"total_size":1},"weight_map":{"a":"x.safetensors","b":"y.safetensors"}}`)
	f.Add(`{"weight_map":{"a":1}}`)
	f.Fuzz(func(t *testing.T, s string) {
		index, files, err := readTextIndex(strings.NewReader(s), int64(len(s)), 4)
		if err == nil && (len(files) > len(index) || len(files) > fileLimit) {
			t.Errorf("%d files for %d tensors", len(files), len(index))
		}
	})
}

// shardText writes the model to dir as shards of the tensors that part names, and an index, which
// change may edit.
func shardText(t *testing.T, part func(tensor string) string, change func(index map[string]any)) string {
	t.Helper()
	dir := t.TempDir()
	m, err := OpenText(nanoText)
	if err != nil {
		t.Fatal(err)
	}
	all, err := os.ReadFile(m.Paths[0])
	if err != nil {
		t.Fatal(err)
	}
	data, at, where := map[string][]byte{}, map[string]map[string]any{}, map[string]any{}
	for _, x := range m.Config.Tensors() {
		name := part(x.Name)
		x = m.Tensor[x.Name]
		if at[name] == nil {
			at[name] = map[string]any{}
		}
		from := len(data[name])
		data[name] = append(data[name], all[x.Offset:][:x.Bytes]...)
		at[name][x.Name] = map[string]any{"dtype": "BF16", "shape": x.Shape, "data_offsets": []int{from, len(data[name])}}
		where[x.Name] = name
	}
	write := func(name string, v any, more []byte) {
		b, err := json.Marshal(v)
		if strings.HasSuffix(name, ".safetensors") {
			b = append([]byte{byte(len(b)), byte(len(b) >> 8), 0, 0, 0, 0, 0, 0}, b...)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), append(b, more...), 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for name := range at {
		write(name, at[name], data[name])
	}
	index := map[string]any{"metadata": map[string]any{"total_size": 1}, "weight_map": where}
	change(index)
	write(indexName, index, nil)
	if err := os.WriteFile(filepath.Join(dir, configName), textConfig(t), 0o666); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestAShardedTextModelIsFoundThroughItsIndex(t *testing.T) {
	const one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
	part := func(tensor string) string {
		if strings.Contains(tensor, "layers.2") {
			return two
		}
		return one
	}
	keep := func(map[string]any) {}
	dir := shardText(t, part, keep)
	m, err := OpenText(dir)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := OpenText(nanoText)
	if err != nil {
		t.Fatal(err)
	}
	read := func(m *Text, name string) string {
		x := m.Tensor[name]
		b, err := os.ReadFile(m.Paths[x.File])
		if err != nil {
			t.Fatal(err)
		}
		return string(b[x.Offset:][:x.Bytes])
	}
	for name := range whole.Tensor {
		if read(m, name) != read(whole, name) {
			t.Errorf("tensor %s is another", name)
		}
	}
	weights := func(index map[string]any) map[string]any { return index["weight_map"].(map[string]any) }
	for want, change := range map[string]func(index map[string]any){
		"weight_map is missing":    func(index map[string]any) { delete(index, "weight_map") },
		"not allowed":              func(index map[string]any) { weights(index)["model.norm.weight"] = "../x.safetensors" },
		"shard name  is not":       func(index map[string]any) { weights(index)["model.norm.weight"] = 7 },
		"is not there":             func(index map[string]any) { weights(index)["x"] = "x.safetensors" },
		"from different downloads": func(index map[string]any) { weights(index)["model.norm.weight"] = two },
		"index does not put there": func(index map[string]any) { delete(weights(index), "model.norm.weight") },
		"more than the":            func(index map[string]any) { index["metadata"] = strings.Repeat("x", 1<<18) },
	} {
		_, err := OpenText(shardText(t, part, change))
		wantError(t, err, want)
	}
	if err := os.Remove(filepath.Join(dir, two)); err != nil {
		t.Fatal(err)
	}
	_, err = OpenText(dir)
	wantError(t, err, dir, two, "is not there: fetch it")
}

func TestATensorTooManyOrTooFewIsRefused(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{`"model.norm.weight"`, `"model.nora.weight"`, "model.nora.weight, which a model of this config does not have"},
		{`"model.layers.0.mlp.up_proj.weight":{"dtype":"BF16","shape":[384,128]`, `"model.layers.0.mlp.up_proj.weight":{"dtype":"BF16","shape":[128,384]`, "expected BF16 [384 128]"},
		{`"model.norm.weight"`, `"lm_head.weight"   `, "no file holds tensor model.norm.weight (1 tensors"}, // a tied model's own head is let be
	} {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(nanoText)); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "model.safetensors")
		b, err := os.ReadFile(path)
		if err == nil && !strings.Contains(string(b), c.old) {
			t.Fatalf("the header has no %s", c.old)
		}
		if err == nil {
			err = os.WriteFile(path, []byte(strings.Replace(string(b), c.old, c.new, 1)), 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, err = OpenText(dir)
		wantError(t, err, c.want)
	}
}

func TestTheKindOfADraftModelIsInItsConfig(t *testing.T) {
	for dir, want := range map[string]string{nanoText: "qwen3", nanoDraft: "k3_dspark", golden.ModelDir("nano"): "kimi_k3"} {
		if kind, err := ModelType(dir); kind != want || err != nil {
			t.Errorf("%s is %q, %v", dir, kind, err)
		}
	}
	_, err := ModelType(t.TempDir())
	wantError(t, err, "config.json: is not there")
}
