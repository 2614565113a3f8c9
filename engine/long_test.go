package engine

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"deltafin/engine/synth"
)

// TestALongPromptFitsASmallMemory feeds 6k tokens (32k with -full) under a ceiling that
// holds a part of them per pass; the ledger's rows bound the passes, and the counters say that
// every layer ran once per pass. The log shows that the time per token grows by the attention
// over positions alone.
func TestALongPromptFitsASmallMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("NOT RUN: -short")
	}
	n := 6000
	if *full {
		n = 32768
	}
	p, err := synth.Preset("tiny")
	if err != nil {
		t.Fatal(err)
	}
	p.MaxPositions, p.Layers = 1<<16, 4
	dir := t.TempDir()
	if err := synth.Write(context.Background(), dir, p, nil); err != nil {
		t.Fatal(err)
	}
	e, err := Open(context.Background(), dir, Options{Memory: runtimeBytes + 48<<20, Context: 33000})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	ids := make([]int, n)
	for i := range ids {
		ids[i] = rng.IntN(e.Config().Vocab)
	}
	s := e.NewSession()
	rows, passes := e.Ledger().PassRows, 0
	for lo := 0; lo < len(ids); lo += rows {
		n := min(rows, len(ids)-lo)
		began, before := time.Now(), e.Model().Times()
		if _, err := s.Feed(context.Background(), ids[lo:lo+n], nil); err != nil {
			t.Fatal(err)
		}
		passes++
		spent := e.Model().Times().Sub(before)
		t.Logf("tokens %d to %d: %.1f µs each, %.1f of them in attention over positions", lo, lo+n,
			time.Since(began).Seconds()*1e6/float64(n), spent.MLA.Seconds()*1e6/float64(n))
	}
	if got := e.Model().Counters().LayerPasses; got != int64(passes*e.Config().Layers) {
		t.Errorf("%d layer passes in %d passes of %d layers", got, passes, e.Config().Layers)
	}
	if passes < 2 {
		t.Errorf("all of it went into one pass of %d rows: the ceiling is too high to test anything", rows)
	}
	if held := s.Bytes(); held > 2*e.Ledger().State {
		t.Errorf("the state takes %d bytes, the ledger was told %d", held, e.Ledger().State)
	}
}
