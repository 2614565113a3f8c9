package synth

import (
	"cmp"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/checkpoint/checkpointtest"
)

func TestShardsOfTrueDimensionsHaveTheReleasedSizes(t *testing.T) {
	p := k3
	p.Vocab = 163840
	p, err := p.resolve()
	must(t, err)
	const dense, kda, kdaLong, mla, mlaLong, rest = 2341216112, 16990911504, 16990916912, 16567501776, 16567507176, 4697664072
	for _, c := range []struct {
		shard int
		name  string
		want  int64
	}{
		{0, "model-00001-of-000094.safetensors", dense},
		{1, "model-00002-of-000094.safetensors", kda},
		{3, "model-00004-of-000094.safetensors", mla},
		{9, "model-00010-of-000094.safetensors", kda},
		{10, "model-00011-of-000094.safetensors", kdaLong}, // one more digit in each name
		{11, "model-00012-of-000094.safetensors", mlaLong},
		{90, "model-00091-of-000094.safetensors", kdaLong},
		{91, "model-00092-of-000094.safetensors", mlaLong},
		{92, "model-00093-of-000094.safetensors", mlaLong},
		{93, "model-00094-of-000094.safetensors", rest},
	} {
		if f, _ := p.shardFile(c.shard); f.bytes != c.want || f.name != c.name {
			t.Errorf("shard %d: %s has %d bytes, released %s with %d", c.shard, f.name, f.bytes, c.name, c.want)
		}
	}

	slice, err := Preset("k3-slice")
	must(t, err)
	slice, err = slice.resolve()
	must(t, err)
	for i, want := range []int64{dense, kda, mla} {
		if f, _ := slice.shardFile(i); f.bytes != want {
			t.Errorf("k3-slice: %s has %d bytes, released %d", f.name, f.bytes, want)
		}
	}
	for name, want := range map[string]float64{"k3-slice": 36.02, "k3-slice-1": 19.03} {
		p, err := Preset(name)
		must(t, err)
		n, err := Size(p)
		if err != nil || math.Abs(float64(n)/1e9-want) > 0.01 {
			t.Errorf("%s: %d bytes, %v; want %.2f GB", name, n, err, want)
		}
	}
}

func TestLayersOfTrueDimensionsHaveTheReleasedTensors(t *testing.T) {
	p, err := k3.resolve()
	must(t, err)
	for l, want := range map[int]int{0: 23, 1: 28 + 5376, 3: 22 + 5376, 92: 22 + 5376} {
		if got := len(p.shard(l)); got != want {
			t.Errorf("layer %d has %d tensors, released %d", l, got, want)
		}
	}
	for _, x := range p.shard(1) {
		if strings.HasSuffix(x.name, ".A_log") && x.shape[0] != 128 {
			t.Errorf("%s has shape %v, released [128]", x.name, x.shape)
		}
	}
}

// An independent writer made the golden checkpoint of the same dimensions.
func TestTinyHasTheTensorsOfTheGoldenCheckpoint(t *testing.T) {
	p, err := Preset("tiny")
	must(t, err)
	ours, golden := roster(t, written(t, p), p), roster(t, "../../golden/tiny-a/model", p)
	if !slices.Equal(ours, golden) {
		t.Errorf("%d tensors, golden %d", len(ours), len(golden))
		for i := range min(len(ours), len(golden)) {
			if ours[i] != golden[i] {
				t.Fatalf("first difference: %s, golden %s", ours[i], golden[i])
			}
		}
	}
}

// roster lists shard, name, type and shape of all tensors in file order.
func roster(t *testing.T, dir string, p Params) []string {
	t.Helper()
	d := checkpointtest.Copy(t, dir)
	var list []string
	for i := range p.shards() {
		for _, x := range d.Tensors(p.shardName(i)) {
			list = append(list, fmt.Sprintf("%d %s %s %v", i, x.Name, x.DType, x.Shape))
		}
	}
	return list
}

func TestShardsLieAsReleased(t *testing.T) {
	p := small()
	p.Experts = 12
	dir := written(t, p)
	d := checkpointtest.Copy(t, dir)
	rank := map[string]int{"F32": 0, "BF16": 1, "U8": 2}
	for i := range p.shards() {
		ts := d.Tensors(p.shardName(i))
		if !slices.IsSortedFunc(ts, func(a, b checkpointtest.Tensor) int {
			return cmp.Or(rank[a.DType]-rank[b.DType], cmp.Compare(a.Name, b.Name))
		}) {
			t.Errorf("%s is not sorted by type and name", p.shardName(i))
		}
	}

	c, err := checkpoint.Open(dir)
	must(t, err)
	defer c.Close()
	var order []string
	for id := range p.Experts {
		order = append(order, fmt.Sprint(id))
	}
	slices.Sort(order) // 0, 1, 10, 11, 2, ...
	at := c.Expert(1, 0).Offset
	for _, s := range order {
		var id int
		fmt.Sscan(s, &id)
		x := c.Expert(1, id)
		if x.Offset != at || filepath.Base(c.Path(x.File)) != p.shardName(1) {
			t.Fatalf("expert %d lies at %d of shard %d, want %d", id, x.Offset, x.File, at)
		}
		at += x.Bytes
	}
}

func TestPresetsAreValidAndNamed(t *testing.T) {
	for _, name := range Presets() {
		p, err := Preset(name)
		must(t, err)
		if _, err := p.resolve(); err != nil || Summary(name) == "" {
			t.Errorf("%s: %v, summary %q", name, err, Summary(name))
		}
	}
	_, err := Preset("huge")
	wantError(t, err, `preset "huge" does not exist: there are tiny, nano-shape, k3-slice-1, k3-slice`)
}

func TestAttentionIsAsReleasedUnlessGiven(t *testing.T) {
	for _, c := range []struct {
		layers int
		given  string
		want   string
	}{
		{1, "", "M"},
		{2, "", "KM"},
		{3, "", "KKM"},
		{9, "", "KKKMKKKMM"},
		{2, "KK", "KK"},
	} {
		p := small()
		p.Layers, p.Attention = c.layers, c.given
		p, err := p.resolve()
		if err != nil || p.Attention != c.want {
			t.Errorf("%d layers, %q: %q, %v; want %q", c.layers, c.given, p.Attention, err, c.want)
		}
	}
}

func TestImpossibleParametersAreRefusedByName(t *testing.T) {
	for _, c := range []struct {
		change func(p *Params)
		want   string
	}{
		{func(p *Params) { *p = Params{} }, "Hidden is 0: it must be at least 1"},
		{func(p *Params) { p.Rope = -1 }, "Rope is -1"},
		{func(p *Params) { p.Layers = 1 << 30 }, "Layers is 1073741824: at most 512"},
		{func(p *Params) { p.Layers, p.Experts = 512, 896 }, "Layers and Experts make 457856 experts: at most 262144"},
		{func(p *Params) { p.Vocab = 255 }, "Vocab is 255"},
		{func(p *Params) { p.TopK = 5 }, "TopK is 5 of 4 Experts"},
		{func(p *Params) { p.MoEInter = 33 }, "MoEInter is 33"},
		{func(p *Params) { p.Latent = 16 }, "Latent is 16"},
		{func(p *Params) { p.FirstDense = 4 }, "FirstDense is 4 of 3 Layers"},
		{func(p *Params) { p.FirstDense = -1 }, "FirstDense is -1"},
		{func(p *Params) { p.Attention = "KM" }, `Attention is "KM"`},
		{func(p *Params) { p.Attention = "KMX" }, `Attention is "KMX"`},
		{func(p *Params) { p.Hidden = 1 << 30 }, "hidden_size"},
		{func(p *Params) { p.Experts = 1 << 20 }, "num_experts"},
	} {
		p := small()
		c.change(&p)
		_, err := Size(p)
		wantError(t, err, c.want)
	}
}
