package checkpoint

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"deltafin/engine/checkpoint/checkpointtest"
)

const (
	tinyA = "../../golden/tiny-a/model"
	tinyB = "../../golden/tiny-b/model"
	nano  = "../../golden/nano/model"
)

func TestEveryByteOfTheGoldenCheckpointsIsWhereTheReaderSays(t *testing.T) {
	for _, dir := range []string{tinyA, tinyB, nano} {
		c, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		if c.Dir() != dir {
			t.Errorf("Dir is %s, want %s", c.Dir(), dir)
		}
		layout := c.ExpertLayout()
		d := checkpointtest.Copy(t, dir)
		seen := 0
		for i := range c.Files() {
			for _, x := range d.Tensors(filepath.Base(c.Path(i))) {
				seen++
				if name := strings.TrimPrefix(x.Name, Prefix); !strings.Contains(name, ".experts.") {
					got, err := c.Tensor(name)
					if err != nil {
						t.Fatal(err)
					}
					b := make([]byte, got.Bytes)
					if err := c.Read(got, b); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(b, x.Data) || got.DType.String() != x.DType {
						t.Errorf("%s: %s has other bytes or another type", dir, name)
					}
					continue
				}
				p, ok := c.r.find(x.Name)
				if !ok {
					t.Fatalf("%s is not found", x.Name)
				}
				cfg := c.Config()
				e := c.Expert(cfg.FirstDense+p.expert/cfg.Experts, p.expert%cfg.Experts)
				if e.Bytes != layout.ExpertBytes || e.File != i {
					t.Fatalf("%s: extent %+v", x.Name, e)
				}
				run := make([]byte, e.Bytes)
				if err := c.ReadExtent(e, run); err != nil {
					t.Fatal(err)
				}
				part := layout.Parts[p.part]
				if b := run[part.Offset : part.Offset+part.Bytes]; !bytes.Equal(b, x.Data) {
					t.Errorf("%s: %s has other bytes", dir, x.Name)
				} else if p.part%2 == W1Scale && CheckScales(b) != -1 {
					t.Errorf("%s: %s is refused", dir, x.Name)
				}
			}
		}
		if want := c.r.tensors(); seen != want || len(c.Tensors()) != len(c.r.dense) {
			t.Errorf("%s: the files hold %d tensors, the roster %d", dir, seen, want)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestReadsNameWhatTheyWanted(t *testing.T) {
	d := checkpointtest.Copy(t, tinyA)
	c, err := Open(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	head, _ := c.Tensor("model.output_attn_res_proj.weight")
	wantError(t, c.Read(head, make([]byte, 3)), "language_model.model.output_attn_res_proj.weight", "buffer has 3 bytes, expected 256")
	e := c.Expert(12, 9)
	wantError(t, c.ReadExtent(e, nil), "layer 12 expert 9: buffer has 0 bytes")
	wantError(t, c.ReadExtent(Extent{File: 99, Bytes: 1}, make([]byte, 1)), "shard 99 is not open")
	if _, err := c.Tensor(Prefix + "lm_head.weight"); err == nil {
		t.Error("a name with the prefix was found; there must be one spelling")
	}

	d.Truncate(filepath.Base(c.Path(head.File)), 10)
	wantError(t, c.Read(head, make([]byte, head.Bytes)), "model-00014-of-000014.safetensors", "output_attn_res_proj", "10 bytes short")

	wantError(t, c.ScaleError(3, 7, W2Scale, 5), "model-00004-of-000014.safetensors",
		"language_model.model.layers.3.block_sparse_moe.experts.7.w2.weight_scale: block [2, 32:64]", "corrupt")
	for _, f := range []func(){func() { c.Expert(0, 0) }, func() { c.Expert(1, 16) }, func() { c.Expert(13, 0) }, func() { c.Expert(1, -1) }} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("an expert that does not exist was found")
				}
			}()
			f()
		}()
	}
	c.Close()
	wantError(t, c.Read(head, make([]byte, head.Bytes)), "is not open")
}

func TestDamageIsFoundWhenACheckpointIsOpened(t *testing.T) {
	const (
		layer  = "language_model.model.layers.1."
		expert = layer + "block_sparse_moe.experts.5."
		gate   = layer + "block_sparse_moe.gate.weight"
		shard2 = "model-00002-of-000014.safetensors"
		shard3 = "model-00003-of-000014.safetensors"
	)
	f32 := func(v float64) []byte {
		return binary.LittleEndian.AppendUint32(nil, math.Float32bits(float32(v)))
	}
	for _, c := range []struct {
		fault string
		do    func(*checkpointtest.Dir)
		want  []string
	}{
		{"no config", func(d *checkpointtest.Dir) { d.Remove("config.json") }, []string{"config.json: is not there"}},
		{"no index", func(d *checkpointtest.Dir) { d.Remove(indexName) }, []string{indexName + ": is not there"}},
		{"config too long", func(d *checkpointtest.Dir) {
			d.Edit("config.json", func(b []byte) []byte { return append(b, bytes.Repeat([]byte(" "), configLimit)...) })
		}, []string{"config.json: is 10", "more than"}},
		{"field missing", func(d *checkpointtest.Dir) { d.DropConfig("text_config.v_head_dim") }, []string{"config.json: text_config.v_head_dim is missing"}},
		{"config of another model", func(d *checkpointtest.Dir) { d.SetConfig("text_config.hidden_size", 160) }, []string{"model-00001-of-000014.safetensors: tensor language_model.model.layers.0.", "is BF16 [128], expected BF16 [160]"}},
		{"more experts in the config", func(d *checkpointtest.Dir) { d.SetConfig("text_config.num_experts", 17) }, []string{"experts.16.w1.weight_packed is missing (72 of "}},
		{"fewer experts in the config", func(d *checkpointtest.Dir) { d.SetConfig("text_config.num_experts", 15) }, []string{"experts.15.", "not part of the model"}},
		{"no latent norm in the config", func(d *checkpointtest.Dir) { d.SetConfig("text_config.latent_moe_use_norm", false) }, []string{"routed_expert_norm.weight is not part"}},
		{"one shard absent", func(d *checkpointtest.Dir) { d.Remove(shard2) }, []string{shard2 + ": is not there (1 of 14 shards are absent)"}},
		{"two shards absent", func(d *checkpointtest.Dir) { d.Remove(shard3); d.Remove(shard2) }, []string{shard2 + ": is not there (2 of 14"}},
		{"shard truncated", func(d *checkpointtest.Dir) { d.Truncate(shard2, 1000) }, []string{shard2 + ": is ", "1000 short", "truncated"}},
		{"shard cut inside its header", func(d *checkpointtest.Dir) { d.Truncate(shard2, 446184-100) }, []string{shard2 + ": claims a header", "truncated"}},
		{"shard empty", func(d *checkpointtest.Dir) { d.Truncate(shard2, 446184) }, []string{shard2 + ": is 0 bytes long"}},
		{"shard too long", func(d *checkpointtest.Dir) { d.Edit(shard2, func(b []byte) []byte { return append(b, 0) }) }, []string{shard2, "1 more"}},
		{"shard is a directory", func(d *checkpointtest.Dir) {
			d.Remove(shard2)
			if err := os.Mkdir(filepath.Join(d.Path, shard2), 0o755); err != nil {
				t.Fatal(err)
			}
		}, []string{shard2 + ": is not a regular file"}},
		{"dense tensor dropped", func(d *checkpointtest.Dir) { d.Drop(gate) }, []string{"weight_map: tensor " + gate + " is missing (1 of 1492"}},
		{"expert part dropped", func(d *checkpointtest.Dir) { d.Drop(expert + "w2.weight_scale") }, []string{expert + "w2.weight_scale is missing (1 of"}},
		{"not in the index", func(d *checkpointtest.Dir) { d.DropFromIndex("vision.x") }, []string{"holds tensor vision.x, which is not in the index"}},
		{"in the index only", func(d *checkpointtest.Dir) { d.DropFromShard(gate) }, []string{shard2 + ": does not hold tensor " + gate, "(1 tensors"}},
		{"expert part in the index only", func(d *checkpointtest.Dir) { d.DropFromShard(expert + "w3.weight_scale") }, []string{shard2 + ": does not hold tensor " + expert + "w3.weight_scale"}},
		{"vision tensor in the index only", func(d *checkpointtest.Dir) { d.DropFromShard("vision.x") }, []string{shard2 + ": does not hold tensor vision.x"}},
		{"dense tensor in the wrong shard", func(d *checkpointtest.Dir) { d.SetIndex(gate, shard3) }, []string{shard2 + ": holds tensor " + gate + ", which the index puts into " + shard3}},
		{"vision tensor in the wrong shard", func(d *checkpointtest.Dir) { d.SetIndex("vision.x", shard3) }, []string{shard2 + ": holds tensor vision.x, which the index puts into " + shard3}},
		{"whole expert in the wrong shard", func(d *checkpointtest.Dir) {
			for _, part := range partNames {
				d.SetIndex(expert+part, shard3)
			}
		}, []string{shard2 + ": holds tensor " + expert + "w1.weight_packed, which the index puts into " + shard3}},
		{"unknown tensor in a shard only", func(d *checkpointtest.Dir) {
			d.Add(shard2, layer+"mlp.bias", "F32", 1)
			d.DropFromIndex(layer + "mlp.bias")
		}, []string{shard2 + ": tensor " + layer + "mlp.bias is not part"}},
		{"unknown tensor", func(d *checkpointtest.Dir) { d.Add(shard2, layer+"mlp.bias", "F32", 1) }, []string{layer + "mlp.bias is not part"}},
		{"shape", func(d *checkpointtest.Dir) { d.SetShape(gate, 128, 16) }, []string{gate + " is BF16 [128 16], expected BF16 [16 128]"}},
		{"rank", func(d *checkpointtest.Dir) { d.SetShape(layer+"mlp_res_proj.weight", 128) }, []string{"mlp_res_proj.weight is BF16 [128], expected BF16 [1 128]"}},
		{"type", func(d *checkpointtest.Dir) { d.SetDType(layer+"self_attn.q_conv1d.weight", "BF16") }, []string{"q_conv1d.weight is BF16 [128 1 4], expected F32 [128 1 4]"}},
		{"expert shape", func(d *checkpointtest.Dir) { d.SetShape(expert+"w1.weight_scale", 32, 4) }, []string{"w1.weight_scale is U8 [32 4], expected U8 [64 2]"}},
		{"expert type", func(d *checkpointtest.Dir) { d.SetDType(expert+"w1.weight_packed", "BF16") }, []string{"w1.weight_packed is BF16 [64 32], expected U8"}},
		{"experts interleaved", func(d *checkpointtest.Dir) {
			d.Swap(expert+"w1.weight_packed", layer+"block_sparse_moe.experts.6.w1.weight_packed")
		}, []string{"experts.5.", "must follow one another"}},
		{"parts in another order", func(d *checkpointtest.Dir) { d.Swap(expert+"w1.weight_packed", expert+"w3.weight_packed") }, []string{"experts.5.", "must follow one another"}},
		{"total size", func(d *checkpointtest.Dir) {
			d.Edit(indexName, func(b []byte) []byte { return bytes.Replace(b, []byte(`"total_size": `), []byte(`"total_size": 9`), 1) })
		}, []string{indexName + ": metadata.total_size is 9", "but the shards hold"}},
		{"A_log shorter than the heads", func(d *checkpointtest.Dir) { d.SetShape(layer+"self_attn.A_log", 3) }, []string{"A_log is F32 [3], expected F32 [n] with n from 4"}},
		{"A_log used beyond the heads", func(d *checkpointtest.Dir) {
			d.SetShape(layer+"self_attn.A_log", 32)
			d.Put(layer+"self_attn.A_log", 4*31, f32(1e-30))
		}, []string{shard2 + ": tensor " + layer + "self_attn.A_log: entry 31 is 1e-30, expected 0"}},
		{"A_log padded with NaN", func(d *checkpointtest.Dir) {
			d.SetShape(layer+"self_attn.A_log", 5)
			d.Put(layer+"self_attn.A_log", 4*4, f32(math.NaN()))
		}, []string{"entry 4 is NaN, expected 0"}},
		{"A_log infinite", func(d *checkpointtest.Dir) { d.Put(layer+"self_attn.A_log", 0, f32(math.Inf(1))) }, []string{"entry 0 is +Inf, expected a finite number"}},
	} {
		t.Run(c.fault, func(t *testing.T) {
			d := checkpointtest.Copy(t, tinyA)
			if strings.Contains(strings.Join(c.want, " "), "vision.x") {
				d.Add(shard2, "vision.x", "F16", 3)
				mustOpen(t, d)
			}
			c.do(d)
			got, err := Open(d.Path)
			if err == nil {
				got.Close()
			}
			wantError(t, err, append(c.want, d.Path+": ")...)
		})
	}
}

func mustOpen(t *testing.T, d *checkpointtest.Dir) *Checkpoint {
	t.Helper()
	c, err := Open(d.Path)
	if err != nil {
		t.Fatalf("a sound checkpoint is refused: %v", err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestHarmlessDifferencesAreAccepted(t *testing.T) {
	const vision = "vision_tower.safetensors"
	d := checkpointtest.Copy(t, tinyA)
	log := "language_model.model.layers.1.self_attn.A_log"
	d.SetShape(log, 128)
	d.Add("model-00002-of-000014.safetensors", "mm_projector.pre_norm.bias", "F16", 5)
	d.Add(vision, "vision_tower.patch_embed.weight", "F64", 3, 2)
	c := mustOpen(t, d)
	if x, err := c.Tensor(strings.TrimPrefix(log, Prefix)); err != nil || x.Bytes != 512 {
		t.Errorf("padded A_log is %+v, %v; want all 128 stored entries", x, err)
	}
	for i := range c.Files() {
		if open, isVision := c.File(i) != nil, filepath.Base(c.Path(i)) == vision; open == isVision {
			t.Errorf("shard %s: open is %v", c.Path(i), open)
		}
	}
	// The text model runs without the vision shard.
	d.Remove(vision)
	mustOpen(t, d)
}

func TestAHollowShardIsAnIncompleteDownload(t *testing.T) {
	if runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		t.Skip("NOT RUN: holes are found on Linux and macOS only")
	}
	const shard = "model-00002-of-000014.safetensors"
	for _, keep := range []int64{0, 200_000, 400_000} {
		d := checkpointtest.Copy(t, tinyA)
		d.Hollow(shard, keep)
		if info, err := os.Stat(filepath.Join(d.Path, shard)); err != nil || info.Size() != 446184 {
			t.Fatalf("the hollow shard has not its full size: %v", err)
		}
		_, err := Open(d.Path)
		wantError(t, err, shard+": has ", "of its 446184 bytes never written", "incomplete")
	}
}

func TestADirectoryThatIsNoCheckpointIsSaidToBeNone(t *testing.T) {
	_, err := Open(t.TempDir())
	wantError(t, err, "config.json: is not there: give a directory that holds a Kimi K3 checkpoint")
	_, err = Open(filepath.Join(t.TempDir(), "absent"))
	wantError(t, err, "config.json: is not there")
}
