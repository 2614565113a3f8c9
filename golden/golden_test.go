package golden

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"deltafin/golden/nano"
)

func TestEveryCaseIsWholeAndAgreesWithItself(t *testing.T) {
	want := map[string]struct{ cases, layers, vocab int }{
		"tiny-a": {5, 13, 512}, "tiny-b": {5, 11, 515}, "nano": {15, 9, 3072},
	}
	for _, set := range Sets {
		cases, err := Cases(set)
		if err != nil {
			t.Fatal(err)
		}
		w := want[set]
		if len(cases) != w.cases {
			t.Errorf("%s: %d cases, want %d", set, len(cases), w.cases)
		}
		for _, c := range cases {
			t.Run(c.Key(), func(t *testing.T) {
				if len(c.PromptIDs) == 0 || len(c.Greedy) == 0 || len(c.Rows64) != len(c.Greedy) ||
					len(c.Margin) != len(c.Greedy) || len(c.Err32) != len(c.Greedy) {
					t.Fatalf("lengths disagree: prompt %d, greedy %d, rows %d, margins %d, errors %d",
						len(c.PromptIDs), len(c.Greedy), len(c.Rows64), len(c.Margin), len(c.Err32))
				}
				for j, row := range c.Rows64 {
					best, second := topTwo(row)
					if len(row) != w.vocab || best != c.Greedy[j] {
						t.Fatalf("row %d of %d logits chooses %d, greedy says %d", j, len(row), best, c.Greedy[j])
					}
					if m := row[best] - row[second]; math.Abs(m-c.Margin[j]) > 1e-7 {
						t.Errorf("row %d: margin %g in the logits, %g frozen", j, m, c.Margin[j])
					}
				}
				if e := maxAbs(c.Logits32, c.Logits64); math.Abs(e-c.Err32[0]) > 1e-9 {
					t.Errorf("float32 row is off by %g, frozen error %g", e, c.Err32[0])
				}
				if len(c.StreamL2) != w.layers || len(c.Routes) != w.layers-1 {
					t.Errorf("%d stream norms, %d routed layers, want %d and %d", len(c.StreamL2), len(c.Routes), w.layers, w.layers-1)
				}
				fed := len(c.PromptIDs) + len(c.Greedy) - 1
				for _, r := range c.Routes {
					if len(r.IDs) != fed || len(r.IDs32) != fed || len(r.Margin) != fed || len(r.Margin32) != fed {
						t.Fatalf("layer %d: routes of %d positions, fed %d", r.Layer, len(r.IDs), fed)
					}
					for p := range r.IDs {
						if r.Margin[p] > 1e-5 && !sameSet(r.IDs[p], r.IDs32[p]) {
							t.Errorf("layer %d position %d: float32 chose %v, float64 %v with margin %g", r.Layer, p, r.IDs32[p], r.IDs[p], r.Margin[p])
						}
					}
				}
			})
		}
	}
}

// The table in README.md. An engine's error is printed beside these, so they must not
// drift unseen.
func TestFloat32OracleErrorsAreThoseInTheREADME(t *testing.T) {
	for _, w := range []struct {
		set                   string
		prompt, every, margin string
	}{
		{"tiny-a", "1.1e-04", "6.4e-04", "0.0188"},
		{"tiny-b", "7.1e-05", "3.0e-04", "0.0229"},
		{"nano", "1.7e-05", "2.0e-05", "0.0013"},
	} {
		cases, err := Cases(w.set)
		if err != nil {
			t.Fatal(err)
		}
		var prompt, every float64
		margin := math.Inf(1)
		for _, c := range cases {
			prompt, every = max(prompt, c.Err32[0]), max(every, slices.Max(c.Err32))
			margin = min(margin, slices.Min(c.Margin))
		}
		got := fmt.Sprintf("prompt's last row %.1e, all rows %.1e, margin %.4f", prompt, every, margin)
		if want := fmt.Sprintf("prompt's last row %s, all rows %s, margin %s", w.prompt, w.every, w.margin); got != want {
			t.Errorf("%s: %s; README.md says %s", w.set, got, want)
		}
		t.Logf("%s: %s", w.set, got)
	}
}

// The first golden run was held against the official model code; the extended one must
// be the same run.
func TestExtendedRunEqualsFirstGoldenRunOfTinySets(t *testing.T) {
	for _, set := range []string{"tiny-a", "tiny-b"} {
		var first struct {
			Prompts []struct {
				Len    int
				IDs    []int `json:"ids"`
				Greedy []int
				Layers []struct {
					Layer  int
					Stream struct{ L2 float64 }
					IDs    [][]int `json:"router_ids_all_positions"`
				}
			}
		}
		b, err := ReadFile(set, "golden_f64.json")
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, &first); err != nil {
			t.Fatal(err)
		}
		for _, p := range first.Prompts {
			c, err := Find(set, fmt.Sprintf("len%d", p.Len))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(c.PromptIDs, p.IDs) || !slices.Equal(c.Greedy, p.Greedy) {
				t.Errorf("%s: ids or greedy tokens differ", c.Key())
			}
			b, err := ReadFile(set, fmt.Sprintf("logits_f64_len%d.bin", p.Len))
			if err != nil {
				t.Fatal(err)
			}
			row := make([]float64, len(b)/8)
			if err := binary.Read(bytes.NewReader(b), binary.LittleEndian, row); err != nil {
				t.Fatal(err)
			}
			if e := maxAbs(row, c.Logits64); e > 1e-10 {
				t.Errorf("%s: logits differ by %g", c.Key(), e)
			}
			for i, l := range p.Layers {
				if e := math.Abs(l.Stream.L2 - c.StreamL2[i]); e > 1e-9 {
					t.Errorf("%s layer %d: stream norms differ by %g", c.Key(), i, e)
				}
			}
			for _, r := range c.Routes {
				for pos, ids := range p.Layers[r.Layer].IDs {
					if !slices.Equal(ids, r.IDs[pos]) {
						t.Errorf("%s layer %d position %d: routes %v and %v", c.Key(), r.Layer, pos, ids, r.IDs[pos])
					}
				}
			}
		}
	}
}

func TestExtendedRunEqualsFirstGoldenRunOfNano(t *testing.T) {
	cases, err := Cases("nano")
	if err != nil {
		t.Fatal(err)
	}
	chats := 0
	for _, c := range cases {
		var first struct {
			PromptIDs []int  `json:"prompt_ids"`
			Greedy    []int  `json:"greedy"`
			Text      string `json:"text"`
			Stopped   bool   `json:"stopped"`
			Logits    string `json:"logits_file"`
		}
		b, err := ReadFile("nano", "golden/"+c.Name+".json")
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, &first); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(c.PromptIDs, first.PromptIDs) || !slices.Equal(c.Greedy, first.Greedy) || c.Text != first.Text || c.Stop != first.Stopped {
			t.Errorf("%s: ids, text or stop differ", c.Key())
		}
		if (c.Chat == nil) == (c.Prompt == "") {
			t.Errorf("%s: must be a raw prompt or a chat", c.Key())
		}
		if c.Chat != nil {
			chats++
		}
		if first.Logits != "" {
			b, err := ReadFile("nano", "golden/"+first.Logits)
			if err != nil {
				t.Fatal(err)
			}
			row := make([]float32, len(b)/4)
			if err := binary.Read(bytes.NewReader(b), binary.LittleEndian, row); err != nil {
				t.Fatal(err)
			}
			for i, v := range row {
				if e := math.Abs(float64(v) - c.Logits32[i]); e > 2e-5 {
					t.Fatalf("%s: float32 logit %d differs by %g", c.Key(), i, e)
				}
			}
		}
	}
	if chats != 6 {
		t.Errorf("%d chats among the nano cases, want 6", chats)
	}
}

func TestStreamsHoldEveryTensorOfEveryLayer(t *testing.T) {
	for _, k := range []struct{ set, name string }{{"tiny-a", "len17"}, {"tiny-b", "len17"}, {"nano", "france"}} {
		c, err := Find(k.set, k.name)
		if err != nil {
			t.Fatal(err)
		}
		if c.Streams == nil {
			t.Fatalf("%s: no streams", c.Key())
		}
		n := len(c.PromptIDs)
		for i, l := range c.Streams.Layers {
			for name, x := range map[string][][]float64{"AttnIn": l.AttnIn, "AttnOut": l.AttnOut, "MLPIn": l.MLPIn, "MLPOut": l.MLPOut, "Stream": l.Stream, "MLPResProbs": l.MLPResProbs} {
				if len(x) != n {
					t.Errorf("%s layer %d: %s has %d positions, want %d", c.Key(), i, name, len(x), n)
				}
			}
			if (i == 0) != (l.AttnResProbs == nil) || (i == 0) != (l.RouterIDs == nil) || len(l.RouterWeights) != len(l.RouterIDs) {
				t.Errorf("%s layer %d: mix or router missing", c.Key(), i)
			}
			var ss float64
			for _, v := range l.Stream[n-1] {
				ss += v * v
			}
			if e := math.Abs(math.Sqrt(ss) - c.StreamL2[i]); e > 1e-9 {
				t.Errorf("%s layer %d: norm of the stream is off by %g", c.Key(), i, e)
			}
		}
	}
}

func TestUnknownSetIsAnErrorThatNamesTheSets(t *testing.T) {
	_, err := Cases("tiny-z")
	if err == nil || !strings.Contains(err.Error(), "tiny-a") {
		t.Errorf("got %v", err)
	}
}

func TestHashRowsIsSHA256OfLittleEndianBits(t *testing.T) {
	got := HashRows([][]float32{{1, -2}, {0.5}})
	sum := sha256.Sum256([]byte{0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0, 0, 0, 0, 0x3f})
	if want := hex.EncodeToString(sum[:]); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestHashesCheckSaysWhatToDo(t *testing.T) {
	h := Hashes{"nano/france": "aa"}
	for _, c := range []struct{ key, got, want string }{
		{"nano/france", "aa", ""},
		{"nano/france", "bb", "have changed"},
		{"nano/story", "aa", "-update"},
	} {
		err := h.Check(c.key, c.got)
		if (err == nil) != (c.want == "") || (err != nil && !strings.Contains(err.Error(), c.want)) {
			t.Errorf("Check(%s, %s) = %v, want %q", c.key, c.got, err, c.want)
		}
	}
}

func TestHashesNameOnlyKnownCases(t *testing.T) {
	h, err := LoadHashes()
	if err != nil {
		t.Fatal(err)
	}
	for key := range h {
		set, name, _ := strings.Cut(key, "/")
		if _, err := os.Stat(filepath.Join(Dir(), set, "frozen", name+".fix.zst")); err != nil {
			t.Errorf("hashes.json names %s: %v", key, err)
		}
	}
}

func TestNanoFSIsTheNanoDirectory(t *testing.T) {
	n := 0
	err := fs.WalkDir(nano.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		n++
		a, err := fs.ReadFile(nano.FS(), path)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(filepath.Join(ModelDir("nano"), filepath.FromSlash(path)))
		if err == nil && !bytes.Equal(a, b) {
			err = fmt.Errorf("%s differs", path)
		}
		return err
	})
	if err != nil || n != 15 {
		t.Errorf("%d files, want 15; %v", n, err)
	}
}

func TestFactsOfTheReleasedCheckpointAreWhole(t *testing.T) {
	f, err := RealFacts()
	if err != nil {
		t.Fatal(err)
	}
	b, err := RealConfig()
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != f.ConfigSHA256 {
		t.Errorf("real/config.json is not the released one")
	}
	if len(f.Prompts) != 2 || len(f.Prompts[0].TopIDs) != 10 || f.Prompts[0].TopIDs[0] != f.Prompts[0].Greedy[0] || len(f.MaxAbsStream) != 28 {
		t.Errorf("facts.json lost something: %+v", f)
	}
	if len(f.RouterIDs) != 92 {
		t.Fatalf("routes of %d layers, want 92", len(f.RouterIDs))
	}
	for l, rows := range f.RouterIDs {
		if len(rows) != len(f.RouterPositions) {
			t.Fatalf("layer %d: %d positions, want %d", l, len(rows), len(f.RouterPositions))
		}
		for _, ids := range rows {
			s := slices.Sorted(slices.Values(ids))
			if len(slices.Compact(s)) != 16 || s[0] < 0 || s[15] >= 896 {
				t.Fatalf("layer %d: not 16 distinct experts below 896: %v", l, ids)
			}
		}
	}
}

func TestRealCheckpointIsTheReleasedOne(t *testing.T) {
	dir := os.Getenv("DELTAFIN_K3_DIR")
	if dir == "" {
		t.Skip("NOT RUN: DELTAFIN_K3_DIR is not set (directory of the released Kimi K3 checkpoint)")
	}
	f, err := RealFacts()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != f.ConfigSHA256 {
		t.Errorf("%s/config.json is not the released one", dir)
	}
	file, err := os.Open(filepath.Join(dir, "model.safetensors.index.json"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var index struct {
		Metadata struct {
			TotalSize int64 `json:"total_size"`
		} `json:"metadata"`
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.NewDecoder(bufio.NewReader(file)).Decode(&index); err != nil {
		t.Fatal(err)
	}
	if index.Metadata.TotalSize != f.IndexTotalSize || len(index.WeightMap) != f.IndexTensors {
		t.Errorf("index: %d tensors, %d bytes; the released one has %d and %d", len(index.WeightMap), index.Metadata.TotalSize, f.IndexTensors, f.IndexTotalSize)
	}
}

func TestUnpackReadsWhatPlanesSay(t *testing.T) {
	// 1.5 * 2^36 zigzag = 3 * 2^36; -2^-36 zigzag = 1.
	b := make([]byte, 16)
	b[1], b[4*2] = 1, 0x30
	got, rest, err := unpack(append(b, 9), 1, 2)
	if err != nil || len(rest) != 1 || got[0][0] != 1.5 || got[0][1] != -math.Ldexp(1, -36) {
		t.Errorf("got %v, rest %v, %v", got, rest, err)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add(make([]byte, 16), 1, 2)
	f.Add([]byte{1, 2, 3}, 1<<40, 1<<40)
	f.Add([]byte{}, -1, 0)
	f.Add([]byte{}, 1<<62, 0)
	f.Add(make([]byte, 8), 1<<61, 8)
	f.Fuzz(func(t *testing.T, b []byte, rows, cols int) {
		x, rest, err := unpack(b, rows, cols)
		if err == nil && (len(x) != rows || len(b)-len(rest) != 8*rows*cols) {
			t.Errorf("%d rows, %d bytes taken for %d x %d", len(x), len(b)-len(rest), rows, cols)
		}
	})
}

func topTwo(row []float64) (best, second int) {
	second = -1
	for i, v := range row {
		switch {
		case v > row[best]:
			best, second = i, best
		case i != best && (second < 0 || v > row[second]):
			second = i
		}
	}
	return best, second
}

func maxAbs(a, b []float64) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	var m float64
	for i := range a {
		m = max(m, math.Abs(a[i]-b[i]))
	}
	return m
}

func sameSet(a, b []int) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}
