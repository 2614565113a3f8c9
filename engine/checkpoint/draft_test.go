package checkpoint

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"deltafin/golden"

	"github.com/google/go-cmp/cmp"
)

var nanoDraft = filepath.Join(filepath.Dir(golden.ModelDir("nano")), "model-dspark")

func file(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestTheReleasedDraftIsReadInFull holds the released configuration against the file's published size:
// 7124633450 bytes, of which the header has 7528, and 3562312961 parameters (spec E).
func TestTheReleasedDraftIsReadInFull(t *testing.T) {
	got, err := ParseDraftConfig(file(t, "testdata/dspark-config.json"))
	if err != nil {
		t.Fatal(err)
	}
	want := &DraftConfig{
		Hidden: 7168, Layers: 5, Heads: 64, Intermediate: 14336, QLora: 1536, KVLora: 512, Nope: 128, Rope: 64, VDim: 128,
		Vocab: 163840, Eps: 1e-5, TargetDepth: 93, TargetLayers: []int{2, 23, 47, 71, 89}, Mask: 163837, Markov: 256,
		Theta: 50000, Factor: 32, BetaFast: 32, BetaSlow: 1, Original: 32768,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("config differs (-want +got):\n%s", d)
	}
	list, sum := got.Tensors(), int64(7528)
	for _, x := range list {
		sum += x.Bytes
	}
	if len(list) != 68 || sum != 7124633450 || (sum-7528)/2 != 3562312961 {
		t.Errorf("%d tensors, %d bytes", len(list), sum)
	}
}

func TestADraftsTensorsAreFound(t *testing.T) {
	d, err := OpenDraft(nanoDraft)
	if err != nil {
		t.Fatal(err)
	}
	b := file(t, d.Path)
	for name, x := range d.Tensor {
		// The header, read by somebody else.
		var header map[string]struct{ Data_offsets [2]int64 }
		n := int64(b[0]) | int64(b[1])<<8
		if err := json.Unmarshal(b[8:8+n], &header); err != nil {
			t.Fatal(err)
		}
		if at := header[name].Data_offsets; at[0]+8+n != x.Offset || at[1]-at[0] != x.Bytes {
			t.Errorf("%s: at %d with %d bytes, the header says %v", name, x.Offset, x.Bytes, at)
		}
	}
}

func TestEveryFieldOfADraftConfigCounts(t *testing.T) {
	good := string(file(t, filepath.Join(nanoDraft, "config.json")))
	for _, c := range []struct{ old, new, want string }{
		{`"k3_dspark"`, `"kimi_k3"`, `model_type is "kimi_k3", expected "k3_dspark"`},
		{`"K3DSparkModel"`, `"Qwen3DSparkModel"`, `architectures is ["Qwen3DSparkModel"]`},
		{`"hidden_size": 192,`, ``, `hidden_size is missing`},
		{`"hidden_size": 192,`, `"hidden_size": 192.0,`, `hidden_size is 192.0`},
		{`"hidden_size": 192,`, `"hidden_size": 1e9,`, `hidden_size is`},
		{`"num_hidden_layers": 2`, `"num_hidden_layers": 0`, `num_hidden_layers is 0`},
		{`"num_key_value_heads": 3`, `"num_key_value_heads": 1`, `num_key_value_heads is 1, expected 3`},
		{`"qk_rope_head_dim": 32`, `"qk_rope_head_dim": 31`, `qk_rope_head_dim is 31, expected an even number`},
		{`"mla_use_nope": false`, `"mla_use_nope": true`, `mla_use_nope is true`},
		{`"mla_use_output_gate": false`, `"mla_use_output_gate": true`, `mla_use_output_gate is true`},
		{`"target_hidden_size": 192`, `"target_hidden_size": 193`, `target_hidden_size is 193, expected 192`},
		{`"draft_vocab_size": 3072`, `"draft_vocab_size": 3071`, `draft_vocab_size is 3071, expected 3072`},
		{`"mask_token_id": 3069`, `"mask_token_id": 3072`, `mask_token_id is 3072, expected an integer from 0 to 3071`},
		{`"markov_head_type": "vanilla"`, `"markov_head_type": "gated"`, `markov_head_type is "gated"`},
		{`"enable_confidence_head": true`, `"enable_confidence_head": false`, `enable_confidence_head is false`},
		{`"confidence_head_with_markov": true`, `"confidence_head_with_markov": false`, `confidence_head_with_markov is false`},
		{`"tie_word_embeddings": false`, `"tie_word_embeddings": true`, `tie_word_embeddings is true`},
		{`"torch_dtype": "bfloat16"`, `"torch_dtype": "float16"`, `torch_dtype is "float16"`},
		{`"num_target_layers": 5`, `"num_target_layers": 4`, `num_target_layers is 4, expected 5`},
		{"    7,\n    8\n", "    8,\n    7\n", `target_layer_ids is a list with the entry 7, expected ascending`},
		{"    7,\n    8\n", "    7,\n    9\n", `target_layer_ids is a list with the entry 9, expected ascending layer numbers below 9`},
		{"    7,\n    8\n", "    7,\n    7\n", `entry 7`},
		{"    7,\n    8\n", "    7,\n    8.0\n", `entry 8.0`},
		{`"rope_type": "yarn"`, `"rope_type": "linear"`, `rope_parameters.rope_type is "linear"`},
		{`"mscale": 1.0`, `"mscale": 0.7`, `rope_parameters.mscale is 0.7, expected 1`},
		{`"mscale_all_dim": 1.0`, `"mscale_all_dim": 0.7`, `rope_parameters.mscale_all_dim is 0.7, expected 1`},
		{`"factor": 32.0`, `"factor": 0`, `rope_parameters.factor is 0`},
		{`"beta_slow": 1`, `"beta_slow": 32`, `rope_parameters.beta_fast is 32, expected a number above 32`},
		{`"original_max_position_embeddings": 32768`, `"original_max_position_embeddings": 0`, `original_max_position_embeddings is 0`},
		{`"hidden_size": 192,`, `"hidden_size": 192, "hidden_act": "gelu",`, `hidden_act is "gelu", expected "silu"`},
		{`"hidden_size": 192,`, `"hidden_size": 192, "block_size": 5,`, `block_size is 5, expected 7`},
		{`"hidden_size": 192,`, `"hidden_size": 192, "attention_bias": true,`, `attention_bias is true`},
		{`"hidden_size": 192,`, `"hidden_size": 192, "hidden_size": 192,`, `hidden_size is given twice`},
		{good, `[]`, `expected an object`},
		{good, strings.Repeat(" ", configLimit+1), `more than the`},
	} {
		bad := strings.Replace(good, c.old, c.new, 1)
		if bad == good {
			t.Errorf("%q is not in the config", c.old)
			continue
		}
		_, err := ParseDraftConfig([]byte(bad))
		wantError(t, err, "config.json: ", c.want)
	}
}

func TestDamagedDraftsAreRefused(t *testing.T) {
	const weights = "model.safetensors"
	replace := func(name, old, new string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			b := file(t, filepath.Join(dir, name))
			if !bytes.Contains(b, []byte(old)) {
				t.Fatalf("%s does not hold %q", name, old)
			}
			if err := os.WriteFile(filepath.Join(dir, name), bytes.Replace(b, []byte(old), []byte(new), 1), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	cut := func(size int64) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, weights), size); err != nil {
				t.Fatal(err)
			}
		}
	}
	remove := func(name string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		name   string
		damage func(*testing.T, string)
		want   string
	}{
		{"no config", remove("config.json"), "config.json: is not there: give a directory that holds a DSpark draft"},
		{"no weights", remove(weights), weights + ": is not there"},
		{"empty", cut(0), weights + ": is 0 bytes long"},
		{"header cut", cut(3000), weights + ": claims a header"},
		{"last byte missing", cut(3336641), "1 short of the 3336642 its header describes: the file is truncated"},
		{"another name", replace(weights, `final_norm.weight"`, `finer_norm.weight"`), `holds tensor finer_norm.weight, which a DSpark draft does not have`},
		{"another type", replace(weights, `BF16`, `F16 `), "dtype F16  is not known"},
		{"another shape", replace(weights, `"shape":[1,224]`, `"shape":[224,1]`), `confidence_head.proj.weight is BF16 [224 1], expected BF16 [1 224]`},
		{"more layers", replace("config.json", `"num_hidden_layers": 2`, `"num_hidden_layers": 3`), "does not hold tensor layers.2.input_layernorm.weight (12 tensors are missing like this)"},
		{"fewer layers", replace("config.json", `"num_hidden_layers": 2`, `"num_hidden_layers": 1`), "holds tensor layers.1."},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(nanoDraft)); err != nil {
				t.Fatal(err)
			}
			c.damage(t, dir)
			_, err := OpenDraft(dir)
			wantError(t, err, dir+": ", c.want)
		})
	}
}

func FuzzDraft(f *testing.F) {
	config := file(f, filepath.Join(nanoDraft, "config.json"))
	weights := file(f, filepath.Join(nanoDraft, "model.safetensors"))
	f.Add(config, weights[:3200], int64(len(weights)))
	f.Add(config, weights[:100], int64(len(weights)))
	f.Add(file(f, "testdata/dspark-config.json"), []byte{}, int64(7124633450))
	f.Fuzz(func(t *testing.T, config, header []byte, size int64) {
		c, err := ParseDraftConfig(config)
		if err != nil {
			return
		}
		last := -1
		for _, l := range c.TargetLayers {
			if l <= last || l >= c.TargetDepth {
				t.Errorf("target layers %v of %d", c.TargetLayers, c.TargetDepth)
			}
			last = l
		}
		for _, x := range c.Tensors() {
			if x.Bytes <= 0 {
				t.Errorf("tensor %s has %d bytes", x.Name, x.Bytes)
			}
		}
		d := &Draft{Config: c}
		if d.find(bytes.NewReader(header), size) != nil {
			return
		}
		for _, x := range d.Tensor {
			if x.Offset < headerPrefix || x.Offset > size-x.Bytes {
				t.Errorf("tensor %s at %d with %d bytes is not in the file of %d", x.Name, x.Offset, x.Bytes, size)
			}
		}
	})
}
