package reference

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"deltafin/golden"
)

// broken copies tiny-b and lets edit damage the copy.
func broken(t *testing.T, edit func(dir string) error) error {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(golden.ModelDir("tiny-b"))); err != nil {
		t.Fatal(err)
	}
	if err := edit(dir); err != nil {
		t.Fatal(err)
	}
	_, err := Load[float32](dir)
	return err
}

// rewrite replaces old by text of the same length in a file, so that offsets stay true.
func rewrite(file, old, text string) func(dir string) error {
	return func(dir string) error {
		path := filepath.Join(dir, file)
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !bytes.Contains(b, []byte(old)) {
			return os.ErrNotExist
		}
		return os.WriteFile(path, bytes.ReplaceAll(b, []byte(old), []byte(text)), 0o644)
	}
}

func TestLoadNamesWhatIsWrong(t *testing.T) {
	const shard1, last = "model-00001-of-000012.safetensors", "model-00012-of-000012.safetensors"
	for _, c := range []struct {
		name string
		edit func(dir string) error
		want string
	}{
		{"no config", func(d string) error { return os.Remove(filepath.Join(d, "config.json")) }, "config.json"},
		{"field missing", rewrite("config.json", `"rms_norm_eps"`, `"rms_norm_epz"`), "text_config has no rms_norm_eps"},
		{"nested field missing", rewrite("config.json", `"gate_lower_bound"`, `"gate_lower_bounb"`), "linear_attn_config has no gate_lower_bound"},
		{"another activation", rewrite("config.json", `"situ"`, `"silu"`), "situ"},
		{"layer lists overlap", rewrite("config.json", `"num_hidden_layers": 11`, `"num_hidden_layers": 12`), "num_hidden_layers is 12"},
		{"shard missing", func(d string) error { return os.Remove(filepath.Join(d, shard1)) }, "layers.0."},
		{"shard cut short", func(d string) error { return os.Truncate(filepath.Join(d, last), 9000) }, last},
		{"header cut short", func(d string) error { return os.Truncate(filepath.Join(d, last), 100) }, "cut short"},
		{"empty file", func(d string) error { return os.Truncate(filepath.Join(d, last), 0) }, "shorter"},
		{"tensor renamed", rewrite(last, "lm_head.weight", "lm_heat.weight"), "language_model.lm_head.weight is missing"},
		{"wrong dtype", rewrite(last, `"BF16"`, `"BF32"`), "BF32"},
		{"wrong shape", rewrite("config.json", `"vocab_size": 515`, `"vocab_size": 516`), "embed_tokens.weight is BF16 [515 100], need BF16 [516 100]"},
		{"A_log too short", rewrite("config.json", `"num_heads": 3`, `"num_heads": 4`), "layers.0."},
		{"tensor twice", func(d string) error {
			b, err := os.ReadFile(filepath.Join(d, last))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(d, "again.safetensors"), b, 0o644)
		}, "in another file too"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := broken(t, c.edit)
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v, want one line with %q", err, c.want)
			}
		})
	}
}

func TestALogBeyondTheHeadsMustBeZero(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(golden.ModelDir("tiny-a"))); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "model-00001-of-000014.safetensors")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n := binary.LittleEndian.Uint64(b)
	header, err := parseHeader(b[8:8+n], int64(len(b))-8-int64(n))
	if err != nil {
		t.Fatal(err)
	}
	b[8+int64(n)+header["language_model.model.layers.0.self_attn.A_log"].Offsets[1]-1] = 0x3f
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Load[float64](dir); err == nil || !strings.Contains(err.Error(), "A_log: entry 31") {
		t.Errorf("error %v", err)
	}
}

func TestReleasedConfigurationParses(t *testing.T) {
	b, err := golden.RealConfig()
	if err != nil {
		t.Fatal(err)
	}
	c, err := parseConfig(b)
	if err != nil {
		t.Fatal(err)
	}
	mla := 0
	for i := range c.NumLayers {
		if !c.IsKDA(i) {
			mla++
			if i%4 != 3 && i != 92 {
				t.Errorf("layer %d is MLA", i)
			}
		}
	}
	if c.NumLayers != 93 || mla != 24 || c.HiddenSize != 7168 || c.NumExperts != 896 {
		t.Errorf("got %d layers, %d MLA: %+v", c.NumLayers, mla, c)
	}
}

func FuzzParseHeader(f *testing.F) {
	f.Add([]byte(`{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}`), int64(24))
	f.Add([]byte(`{"__metadata__":{"x":"y"},"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}`), int64(2))
	f.Add([]byte(`{"a":{"dtype":"U8","shape":[9223372036854775807,9223372036854775807],"data_offsets":[0,1]}}`), int64(1))
	f.Add([]byte(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[-9223372036854775808,1]}}`), int64(1))
	f.Add([]byte(`{"a":null}`), int64(0))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		tensors, err := parseHeader(b, size)
		if err != nil {
			return
		}
		for name, x := range tensors {
			n := dtypeBytes[x.DType]
			for _, d := range x.Shape {
				n *= d
			}
			if x.Offsets[0] < 0 || x.Offsets[1] < x.Offsets[0] || x.Offsets[1] > size || x.Offsets[1]-x.Offsets[0] != n {
				t.Fatalf("%s: %+v accepted in %d bytes", name, x, size)
			}
		}
	})
}

func FuzzParseConfig(f *testing.F) {
	b, err := os.ReadFile(filepath.Join(golden.ModelDir("tiny-b"), "config.json"))
	if err != nil {
		f.Fatal(err)
	}
	c, err := parseConfig(b)
	if err != nil {
		f.Fatal(err)
	}
	// Only the fields that are read: the fuzzer spends its time on them.
	if b, err = json.Marshal(map[string]Config{"text_config": c}); err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(bytes.Replace(b, []byte(`"num_hidden_layers":11`), []byte(`"num_hidden_layers":1e9`), 1))
	f.Add([]byte(`{"text_config":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := parseConfig(b)
		if err == nil && (c.HiddenSize < 1 || len(c.Linear.KDALayers)+len(c.Linear.FullAttnLayers) != c.NumLayers) {
			out, _ := json.Marshal(c)
			t.Errorf("accepted %s", out)
		}
	})
}
