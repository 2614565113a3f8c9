package engine

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/draft"
	"deltafin/engine/draft/dspark"
	"deltafin/engine/draft/text"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/engine/tokenizer"
)

// openProposers opens what o names, as far as it can be opened: guessing never keeps a
// run from working that works without.
func (e *Engine) openProposers(o Options) {
	if e.warn = o.Warn; e.warn == nil {
		e.warn = func(line string) { slog.Warn(line) }
	}
	for _, name := range o.Draft {
		p, err := e.openProposer(name)
		if err != nil {
			e.warn(fmt.Sprintf("nothing is guessed with a draft: %v", err))
			continue
		}
		e.proposers = append(e.proposers, p)
	}
	e.proposers = append(e.proposers, o.Proposers...)
}

func (e *Engine) openProposer(name string) (draft.Proposer, error) {
	if name == "ngram" {
		return draft.NGram{}, nil
	}
	switch kind, err := checkpoint.ModelType(name); {
	case err != nil:
		return nil, err
	case kind == "k3_dspark":
		return dspark.Open(name, e.target(), dspark.Options{})
	case kind == "qwen3":
		tok, err := tokenizer.Open(e.ck.Dir())
		if err != nil {
			return nil, fmt.Errorf("%s: another vocabulary needs the model's own tokenizer: %w", name, err)
		}
		return text.Open(name, e.target(), tok, text.Options{})
	default:
		return nil, fmt.Errorf("%s: its model_type is %q: draft models are k3_dspark and qwen3", name, kind)
	}
}

// target is what proposers may use. The spine is opened after them.
func (e *Engine) target() draft.Target {
	c := e.Config()
	return draft.Target{
		Hidden: c.Hidden, Vocab: c.Vocab, Layers: c.Layers, Pool: e.model.Pool,
		Embed: func(ctx context.Context, dst kernel.Mat, ids []int) error { return e.spine.Embed(ctx, dst, ids) },
		Head: func(ctx context.Context, use func(lo int, w *kernel.Matrix) error) error {
			return e.spine.Head(ctx, use)
		},
	}
}

// proposerBytes is the memory of the proposers that fit in most, with that of the passes
// that check their guesses. Those that do not fit are closed.
func (e *Engine) proposerBytes(positions int, most int64) int64 {
	held := k3.HeldBytes(e.Config(), draft.MaxGuesses+1)
	sum, all := held, e.proposers
	e.proposers = nil
	for _, p := range all {
		loaded, sequence := p.Bytes(positions)
		if need := loaded + sequence; sum+need <= most {
			sum += need
			e.proposers = append(e.proposers, p)
			continue
		}
		if loaded > 0 {
			e.warn(fmt.Sprintf("%s: nothing is guessed with it: it needs %.2f GB, and %.2f are left: raise --memory", p.Name(), float64(sum+loaded+sequence)/1e9, float64(most)/1e9))
		}
		if err := p.Close(); err != nil {
			e.warn(fmt.Sprintf("%s: %v", p.Name(), err))
		}
	}
	if len(e.proposers) == 0 {
		return 0
	}
	return sum
}

// startChoosing begins to learn which guesses pay. What it learns serves all sessions.
func (e *Engine) startChoosing(o Options) {
	var names []string
	for _, p := range e.proposers {
		names = append(names, p.Name())
	}
	e.chooser = draft.NewChooser(names, o.Guesses)
}

// guess asks the proposers for tokens that may follow newest, at most limit.
func (s *Session) guess(ctx context.Context, newest, limit int) []draft.Guess {
	e := s.engine
	tokens := append(s.tokens, newest)
	guesses, err := e.chooser.Next(min(limit, e.ledger.PassRows-1), func(i, k int) ([]draft.Guess, error) {
		g, err := s.drafts[i].Propose(ctx, tokens, k)
		if ctx.Err() != nil {
			return nil, nil // no fault of the proposer; the pass will tell
		}
		for j := range g {
			if g[j].ID < 0 || g[j].ID >= e.Config().Vocab {
				return nil, fmt.Errorf("it proposes token %d, which the model does not have", g[j].ID)
			}
		}
		return g, err
	})
	if err != nil {
		e.warn(fmt.Sprintf("nothing is guessed with a proposer that failed from now on: %v", err))
	}
	return guesses
}

// block is a pass and the guesses that it checks: rows[0] is of the token before them.
type block struct {
	rows          [][]float32
	guesses       []draft.Guess
	chosen, right int // tokens chosen from rows, and those of them that were guessed
	took          time.Duration
	open          bool // not finished
}

// compare takes note of id, chosen from row right, and says whether it was guessed.
func (b *block) compare(id int) bool {
	b.chosen++
	if b.right == len(b.guesses) || b.guesses[b.right].ID != id {
		return false
	}
	b.right++
	return true
}

// next runs the pass after the chosen token newest, with guesses of at most limit
// tokens behind it.
func (s *Session) next(ctx context.Context, newest, limit int) (b block, err error) {
	b.guesses = s.guess(ctx, newest, min(limit, s.engine.ledger.Context-s.Position()-1))
	began := time.Now()
	if len(b.guesses) == 0 {
		row, err := s.Feed(ctx, []int{newest}, nil)
		b.rows = [][]float32{row}
		b.took, b.open = time.Since(began), err == nil
		return b, err
	}
	ids := []int{newest}
	for _, g := range b.guesses {
		ids = append(ids, g.ID)
	}
	if b.rows, err = s.Try(ctx, ids); err != nil {
		return b, err
	}
	s.accept(1)
	b.took, b.open = time.Since(began), true
	return b, nil
}

// finish commits what was accepted and lets the chooser learn from it.
func (s *Session) finish(b *block) error {
	if !b.open {
		return nil
	}
	b.open = false
	began := time.Now()
	if len(b.guesses) > 0 {
		if err := s.Keep(s.accepted); err != nil {
			return err
		}
	}
	s.engine.chooser.Passed(b.chosen, b.right, b.took+time.Since(began))
	return nil
}
