// Package text decides how a small language model of its own vocabulary guesses for K3: a
// released dense checkpoint of the Qwen3 architecture, unchanged, that reads the same
// dialogue and goes on with it greedily.
//
// The two models share nothing but text. K3's tokens become the draft model's (dialogue.go,
// vocab.go), its continuation becomes K3's again (propose.go), and the arithmetic in between is
// model.go. A proposer has one cache of keys and values for whatever it is asked about: what a
// question has in common with the one before is not computed again, so sequences and their forks cost nothing.
//
// The same calls give the same guesses, and so does a fresh proposer; they do not depend on what
// was asked before. They are no part of the arithmetic contract.
package text

import (
	"context"
	"fmt"
	"path/filepath"

	"deltafin/engine/checkpoint"
	"deltafin/engine/draft"
	"deltafin/engine/drive"
)

// DefaultWindow is the Window of zero Options.
const DefaultWindow = 4096

// leastWindow leaves room for a question and its answer.
const leastWindow = 64

// Tokens is what the package uses of K3's tokenizer, which
// [deltafin/engine/tokenizer.Tokenizer] implements.
type Tokens interface {
	Encode(text string) []int // as ordinary text
	Token(id int) (bytes string, ok bool)
	Special(name string) (id int, ok bool)
	IsSpecial(id int) bool
}

// Options of a text model.
type Options struct {
	// Window is how many of its own tokens the model remembers at most, 0 means DefaultWindow.
	// Whenever a text has filled it, the model goes on with the last half.
	Window int
	Drives *drive.Set // reads the weights; nil makes a set of its own
}

// proposer implements [draft.Proposer].
type proposer struct {
	text    *checkpoint.Text
	target  draft.Target
	window  int
	drives  *drive.Set
	own     bool // drives are the proposer's
	formats *formats
	model   *model // nil until the first Propose

	// What was read last, so that the next question need not be read from the beginning.
	tokens   []int
	dialogue dialogue
}

// Open reads the config.json, the headers of the weights and the tokenizer.json in dir, all
// bounded, and no weight. An error is one line that begins with dir.
func Open(dir string, target draft.Target, tokens Tokens, o Options) (draft.Proposer, error) {
	t, err := checkpoint.OpenText(dir)
	if err != nil {
		return nil, err
	}
	v, err := readVocab(filepath.Join(dir, "tokenizer.json"), t.Config.Vocab)
	if err != nil {
		return nil, err
	}
	p := &proposer{text: t, target: target, drives: o.Drives, window: o.Window}
	if p.formats, err = newFormats(tokens, v); err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	p.dialogue = dialogue{f: p.formats, closedAt: -1}
	if p.window <= 0 {
		p.window = DefaultWindow
	}
	p.window = min(max(p.window, leastWindow), t.Config.Positions-answerLimit)
	if p.window < leastWindow {
		return nil, fmt.Errorf("%s: config.json: max_position_embeddings is %d, expected at least %d", dir, t.Config.Positions, leastWindow+answerLimit)
	}
	if p.drives == nil {
		p.drives, p.own = drive.NewSet(drive.Options{}), true
	}
	return p, nil
}

// Name is "text".
func (p *proposer) Name() string { return "text" }

// Bytes is the weights, the cache of a full window, scratch, and the text that was read last. A
// sequence takes nothing.
func (p *proposer) Bytes(context int) (loaded, sequence int64) {
	const read = 8 + 4*4 // a token of K3 and the tokens of its text
	return modelBytes(p.text, p.room()) + read*int64(max(context, 0)), 0
}

// room is the positions of the cache.
func (p *proposer) room() int { return p.window + answerLimit }

// Start begins an empty sequence.
func (p *proposer) Start() draft.Sequence { return sequence{p} }

// Close frees the weights.
func (p *proposer) Close() error {
	if p.model != nil {
		p.model.weights.Free()
		p.model = nil
	}
	if p.own {
		p.drives.Close()
	}
	return nil
}

func (p *proposer) load(ctx context.Context) (err error) {
	if p.model == nil {
		p.model, err = load(ctx, p.text, p.drives, p.target.Pool, p.room())
	}
	return err
}

// sequence keeps nothing: the tokens say all.
type sequence struct{ p *proposer }

func (s sequence) Fork() draft.Sequence { return s }

func (s sequence) Bytes() int64 { return 0 }

// Propose goes on with the text of tokens as the draft model would, see [draft.Sequence].
func (s sequence) Propose(ctx context.Context, tokens []int, k int) ([]draft.Guess, error) {
	g, err := s.p.propose(ctx, tokens, k)
	if err != nil {
		return nil, fmt.Errorf("text model: %w", err)
	}
	return g, nil
}
