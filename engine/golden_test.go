package engine

import (
	"context"
	"flag"
	"math"
	"testing"

	"deltafin/engine/kernel"
	"deltafin/golden"
)

var update = flag.Bool("update", false, "write golden/hashes.json from this run")

// bound is the largest error of a logit against the float64 oracle.
var bound = map[string]float64{"tiny-a": 5e-4, "tiny-b": 5e-4, "nano": 1.5e-4}

// greedy returns the logits rows that chose each token of the oracle's greedy
// sequence, feeding the oracle's tokens.
func greedy(t *testing.T, e *Engine, c *golden.Case) [][]float32 {
	t.Helper()
	s := e.NewSession()
	var rows [][]float32
	feed := c.PromptIDs
	for range c.Greedy {
		logits, err := s.Feed(context.Background(), feed, nil)
		if err != nil {
			t.Fatal(err)
		}
		rows = append(rows, append([]float32(nil), logits...))
		feed = c.Greedy[len(rows)-1:][:1]
	}
	return rows
}

func openSet(t *testing.T, set string, o Options) *Engine {
	t.Helper()
	e, err := Open(context.Background(), golden.ModelDir(set), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

func TestGreedyTokensAndLogitsAreTheOracles(t *testing.T) {
	hashes, err := golden.LoadHashes()
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range golden.Sets {
		e := openSet(t, set, Options{})
		cases, err := golden.Cases(set)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cases {
			t.Run(c.Key(), func(t *testing.T) {
				rows := greedy(t, e, &c)
				worst, oracle := 0.0, 0.0
				for i, row := range rows {
					if got := kernel.ArgMax(row); got != c.Greedy[i] {
						t.Fatalf("token %d is %d, the oracle's is %d (margin %g)", i, got, c.Greedy[i], c.Margin[i])
					}
					for j, v := range row {
						worst = math.Max(worst, math.Abs(float64(v)-c.Rows64[i][j]))
					}
					oracle = math.Max(oracle, c.Err32[i])
				}
				t.Logf("%-24s max |logit - float64 oracle| %.2e, of the float32 oracle %.2e", c.Key(), worst, oracle)
				if worst > bound[set] {
					t.Errorf("logits are off by %g, more than %g", worst, bound[set])
				}
				got := golden.HashRows(rows)
				if *update {
					hashes[c.Key()] = got
				} else if err := hashes.Check(c.Key(), got); err != nil {
					t.Error(err)
				}
			})
		}
	}
	if *update {
		if err := hashes.Save(); err != nil {
			t.Fatal(err)
		}
	}
}
