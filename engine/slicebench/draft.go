package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"deltafin/engine"
	"deltafin/engine/draft"
	"deltafin/engine/drive"
)

// oracle proposes the text that plain decoding gave, each token wrong at a set rate.
type oracle struct {
	text  []int
	right float64
	vocab int
	rng   *rand.Rand
}

func (o *oracle) Name() string             { return "oracle" }
func (o *oracle) Bytes(int) (int64, int64) { return 0, 0 }
func (o *oracle) Start() draft.Sequence    { return told{o} }
func (o *oracle) Close() error             { return nil }

type told struct{ *oracle }

func (t told) Bytes() int64         { return 0 }
func (t told) Fork() draft.Sequence { return t }

func (t told) Propose(_ context.Context, tokens []int, k int) (g []draft.Guess, _ error) {
	for _, id := range t.text[min(len(tokens), len(t.text)):min(len(tokens)+k, len(t.text))] {
		if t.rng.Float64() >= t.right {
			id = (id + 1) % t.vocab
		}
		g = append(g, draft.Guess{ID: id, P: 0.8})
	}
	return g, nil
}

// draftRecord is one measurement.
type draftRecord struct {
	Memory     float64 `json:"memory_gb"`
	Right      float64 `json:"right_guesses"` // set rate
	Guesses    int     `json:"guesses"`       // 0: as many as pay
	Seconds    float64 `json:"seconds_per_token"`
	Gain       float64 `json:"gain"`
	PerPass    float64 `json:"tokens_per_pass"`
	PassBytes  float64 `json:"bytes_per_pass"` // experts and dense weights
	TokenBytes float64 `json:"bytes_per_token"`
	Allowed    float64 `json:"gain_allowed"` // by tokens per pass and bytes per pass
}

// draft measures what guessing is worth, by known odds on a paced drive, against what the
// rate of right guesses and the bytes of the passes allow.
func (b *bench) draft(ctx context.Context) (any, error) {
	if *tokens < 2 {
		return nil, fmt.Errorf("-tokens: a text of one token has nothing to guess")
	}
	var rows []draftRecord
	fmt.Printf("a drive paced to %.2f GB/s; experts not kept; gain against plain decoding of the same text, allowed: by tokens and bytes of a pass\n", *pace)
	fmt.Printf("%9s %6s %8s %8s %7s %12s %9s %9s %8s\n", "memory GB", "right", "guesses", "s/token", "gain", "tokens/pass", "GB/pass", "GB/token", "allowed")
	for m := range strings.SplitSeq(*limits, ",") {
		memory, err := strconv.ParseFloat(m, 64)
		if err != nil {
			return nil, fmt.Errorf("-limits %q: give numbers separated by commas", *limits)
		}
		var text []int
		var plain draftRecord
		for _, c := range []struct {
			right float64
			k     int
		}{{0, -1}, {0.9, 0}, {0.9, 1}, {0.9, 3}, {0.9, 7}, {0.1, 0}} {
			r, ids, err := b.draftOnce(ctx, memory, text, c.right, c.k)
			if err != nil {
				return nil, err
			}
			if c.k < 0 {
				text, plain = ids, r
			} else if !slices.Equal(ids, text) {
				return nil, fmt.Errorf("with guesses the text is another")
			}
			r.Gain = plain.Seconds / r.Seconds
			r.Allowed = r.PerPass * plain.PassBytes / r.PassBytes
			name := fmt.Sprint(c.k)
			switch c.k {
			case -1:
				name = "none"
			case 0:
				name = "as pays"
			}
			fmt.Printf("%9.2f %5.0f%% %8s %8.3f %7.2f %12.2f %9.3f %9.3f %8.2f\n", r.Memory, 100*r.Right, name, r.Seconds, r.Gain, r.PerPass, r.PassBytes/1e9, r.TokenBytes/1e9, r.Allowed)
			rows = append(rows, r)
		}
	}
	return rows, nil
}

// draftOnce decodes a text with k guesses a pass that are right at the given rate; none if
// k is negative. text is what comes out, with the prompt.
func (b *bench) draftOnce(ctx context.Context, memory float64, text []int, right float64, k int) (draftRecord, []int, error) {
	row := draftRecord{Memory: memory, Right: right, Guesses: max(k, 0)}
	root, err := filepath.Abs(b.dir)
	if err != nil {
		return row, nil, err
	}
	o := engine.Options{
		Memory: int64(memory * 1e9), Context: 1024, ExpertMemory: -1, Guesses: max(k, 0),
		Drive: drive.Options{Pace: map[string]drive.Pace{root: {BytesPerSecond: *pace * 1e9, Latency: 100 * time.Microsecond}}},
	}
	guesser := &oracle{text: text, right: right, rng: rand.New(rand.NewPCG(1, 2))}
	if k >= 0 {
		o.Proposers = []draft.Proposer{guesser}
	}
	e, err := engine.Open(ctx, root, o)
	if err != nil {
		return row, nil, err
	}
	defer e.Close()
	guesser.vocab = e.Config().Vocab
	prompt := b.prompt(17, 1)
	s := e.NewSession()
	if _, err := s.Feed(ctx, prompt[:16], nil); err != nil {
		return row, nil, err
	}
	bytes := func() float64 {
		st := e.Storage()
		n := st.Spine.Demand + st.Spine.Ahead
		for _, d := range st.Experts.Devices {
			n += d.DemandBytes + d.AheadBytes + d.WastedBytes
		}
		return float64(n)
	}
	// What comes before the second token is not decoding with warm buffers.
	var before float64
	var began time.Time
	n := 0
	r, err := s.Generate(ctx, engine.Request{Prompt: prompt[16:], MaxNew: *tokens, Token: func(int) error {
		if n++; n == 1 {
			before, began = bytes(), time.Now()
		}
		return nil
	}})
	if err != nil {
		return row, nil, err
	}
	took, passes := time.Since(began).Seconds(), *tokens-1
	if d := r.Stats.Draft; d != nil {
		passes = d.Passes
	}
	row.Seconds = took / float64(*tokens-1)
	row.PerPass = float64(*tokens-1) / float64(passes)
	row.PassBytes = (bytes() - before) / float64(passes)
	row.TokenBytes = row.PassBytes / row.PerPass
	return row, append(prompt, r.IDs...), nil
}
