package text_test

import (
	"context"
	"path/filepath"
	"slices"
	"testing"

	"deltafin/engine"
	"deltafin/engine/draft"
	"deltafin/engine/draft/text"
	"deltafin/engine/kernel"
	"deltafin/engine/tokenizer"
	"deltafin/golden"
)

// BenchmarkPropose is one question for 4 tokens, wherever a pass that checks 4 guesses ends if all are right.
func BenchmarkPropose(b *testing.B) {
	tok, err := tokenizer.Open(golden.ModelDir("nano"))
	if err != nil {
		b.Fatal(err)
	}
	pool := kernel.NewPool(2)
	defer pool.Close()
	p, err := text.Open(filepath.Join(golden.Dir(), "nano", "model-text"), draft.Target{Pool: pool}, tok, text.Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	c := chat(b)
	all, s := slices.Concat(c.PromptIDs, c.Greedy), p.Start()
	n := len(c.PromptIDs) + 1
	for b.Loop() {
		if _, err := s.Propose(context.Background(), all[:n], 4); err != nil {
			b.Fatal(err)
		}
		if n += 5; n >= len(all) {
			n = len(c.PromptIDs) + 1
		}
	}
}

// BenchmarkDecode is one token of K3-nano, for comparison.
func BenchmarkDecode(b *testing.B) {
	e, err := engine.Open(context.Background(), golden.ModelDir("nano"), engine.Options{Threads: 2})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	c := chat(b)
	s := e.NewSession()
	if _, err := s.Feed(context.Background(), c.PromptIDs, nil); err != nil {
		b.Fatal(err)
	}
	for i, t := 0, s.Fork(); b.Loop(); i++ {
		if i == len(c.Greedy) {
			i, t = 0, s.Fork()
		}
		if _, err := t.Feed(context.Background(), c.Greedy[i:i+1], nil); err != nil {
			b.Fatal(err)
		}
	}
}

func chat(b *testing.B) *golden.Case {
	b.Helper()
	c, err := golden.Find("nano", "chat-plain")
	if err != nil {
		b.Fatal(err)
	}
	return c
}
