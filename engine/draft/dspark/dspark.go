// Package dspark hides how a DSpark draft guesses: a small network of its own that reads
// the model's streams of a few layers and proposes the next seven tokens at once.
//
// A draft is a directory with config.json and model.safetensors (docs/K3.md, section E).
// It has no embedding and no output matrix in memory: those are the model's, lent
// by [draft.Target].
//
//	context.go   what is kept of the model's streams: per layer a latent and a rotated key
//	propose.go   seven rows through the layers, and the Markov head that makes tokens of them
//	rope.go      rotary positions
//	weights.go   the file, and what of it is in memory
//
// The same calls give the same guesses, on any number of threads. They are no part of the
// arithmetic contract: another window, or a sequence watched from its middle, may guess otherwise.
package dspark

import (
	"context"
	"fmt"

	"deltafin/engine/checkpoint"
	"deltafin/engine/draft"
	"deltafin/engine/draft/weights"
	"deltafin/engine/drive"
)

// Rows is how many tokens a proposal has at most. All rows are always computed, since each sees
// the others and the network was trained so.
const Rows = 7

// DefaultWindow is the Window of zero Options.
const DefaultWindow = 4096

// Options of a draft.
type Options struct {
	// Window is how many positions of a sequence the draft attends to, the most recent that
	// were watched; 0 means DefaultWindow. What it keeps of a sequence grows up to that.
	Window int
	Drives *drive.Set // reads the weights; nil makes a set of its own
}

// proposer is an open draft. It implements [draft.Proposer].
type proposer struct {
	draft  *checkpoint.Draft
	c      *checkpoint.DraftConfig
	target draft.Target
	window int
	drives *drive.Set
	own    bool // drives are the proposer's
	freq   []float64
	scale  float32

	w    *network // nil until the first Propose
	work work
}

// Open reads the config.json and the header of the draft in dir, and checks that it
// guesses for target. An error is one line that begins with dir.
func Open(dir string, target draft.Target, o Options) (draft.Proposer, error) {
	d, err := checkpoint.OpenDraft(dir)
	if err != nil {
		return nil, err
	}
	c := d.Config
	for _, f := range []struct {
		name         string
		draft, model int
	}{
		{"hidden_size", c.Hidden, target.Hidden},
		{"vocab_size", c.Vocab, target.Vocab},
		{"target_num_hidden_layers", c.TargetDepth, target.Layers},
	} {
		if f.draft != f.model {
			return nil, fmt.Errorf("%s: config.json: %s is %d, but the model has %d: use a draft that was trained for this model", dir, f.name, f.draft, f.model)
		}
	}
	p := &proposer{draft: d, c: c, target: target, window: o.Window, drives: o.Drives, freq: frequencies(c), scale: scale(c)}
	if p.window <= 0 {
		p.window = DefaultWindow
	}
	if p.drives == nil {
		// Once read, it does not matter how.
		p.drives, p.own = drive.NewSet(drive.Options{Warn: func(string) {}}), true
	}
	return p, nil
}

// Name is "dspark".
func (p *proposer) Name() string { return "dspark" }

// Bytes is an upper bound. That of a sequence is reached between a prompt of at least
// Window tokens and the first proposal after it, and is for the most part the prompt's streams; later it
// is a fifth of that or less.
func (p *proposer) Bytes(context int) (loaded, sequence int64) {
	for _, t := range p.owned() {
		loaded += weights.Bytes(t)
	}
	var buffers work
	buffers.allocate(p.c, func(rows, stride int) []float32 {
		loaded += 4 * int64(rows) * int64(stride)
		return nil
	})
	n := max(min(context, p.window), 0)
	return loaded, p.cacheBytes(p.cacheRoom(n)) + p.pendingBytes(n+trial)
}

// Start begins an empty sequence.
func (p *proposer) Start() draft.Sequence { return &sequence{p: p, caches: make([]cache, p.c.Layers)} }

// Close frees the weights.
func (p *proposer) Close() error {
	if p.w != nil {
		p.w.set.Free()
		p.w = nil
	}
	if p.own {
		p.drives.Close()
	}
	return nil
}

// load reads the weights unless they are in memory.
func (p *proposer) load(ctx context.Context) error {
	if p.w != nil {
		return nil
	}
	w, err := p.read(ctx)
	if err != nil {
		return fmt.Errorf("dspark: reading the draft: %w", err)
	}
	p.work.allocate(p.c, floats)
	if err := p.target.Embed(ctx, p.work.mask, []int{p.c.Mask}); err != nil {
		w.set.Free()
		return fmt.Errorf("dspark: the embedding of the mask token: %w", err)
	}
	p.w = w
	return nil
}
