package reference

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"deltafin/golden"
)

// TestDSparkEqualsTheOracle runs every golden block. Streams are rounded to bf16, so one that lies near
// the middle between two of them may fall to either side: the numpy definition itself, run again
// on another machine, moves by 2.0e-4 in the rows and 2.4e-5 in the confidences of the first blocks.
func TestDSparkEqualsTheOracle(t *testing.T) {
	nano := filepath.Dir(golden.ModelDir("nano"))
	d, err := LoadDSpark[float64](filepath.Join(nano, "model-dspark"))
	if err != nil {
		t.Fatal(err)
	}
	m := model64(t, "nano")
	for r := range d.Embed.Rows {
		if !slices.Equal(d.Embed.Row(r), m.Embed.Row(r)) {
			t.Fatalf("the embedding of token %d is not the target's", r)
		}
	}
	files, err := filepath.Glob(filepath.Join(nano, "golden", "dspark", "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden blocks: %v", err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		var run struct {
			Prompt []int `json:"prompt_ids"`
			Tokens []int
			Blocks []struct {
				Newest     int
				Proposal   []int
				Confidence []float64
				Accepted   int
			}
			First struct{ Hidden [][]float64 } `json:"first_block"`
		}
		if err := json.Unmarshal(b, &run); err != nil {
			t.Fatal(err)
		}
		t.Run(filepath.Base(f), func(t *testing.T) {
			_, trace, err := m.Forward(append(run.Prompt, run.Tokens...), m.NewState())
			if err != nil {
				t.Fatal(err)
			}
			d.Forget()
			at, end := 0, len(run.Prompt)
			for i, want := range run.Blocks {
				for ; at < end; at++ {
					var streams [][]float64
					for _, l := range d.Config.TargetLayers {
						streams = append(streams, trace.Layers[l].Stream[at])
					}
					d.Append(at, streams)
				}
				got := d.Propose(want.Newest, at, m.Head)
				if !slices.Equal(got.Tokens, want.Proposal) {
					t.Errorf("block %d: %v, golden %v", i, got.Tokens, want.Proposal)
				}
				if e := maxAbs(got.Confidence, want.Confidence); e > 1e-3 {
					t.Errorf("block %d: confidences are off by %.1e", i, e)
				}
				if i == 0 {
					e := maxAbsRows(got.Hidden, run.First.Hidden)
					if e > 3e-4 {
						t.Errorf("the rows are off by %.1e", e)
					}
					t.Logf("rows within %.1e, confidences within %.1e", e, maxAbs(got.Confidence, want.Confidence))
				}
				end += want.Accepted + 1
			}
		})
	}
}
