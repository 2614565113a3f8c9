package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"deltafin/engine/draft"
	"deltafin/engine/kernel"
	"deltafin/golden"
)

// liar proposes what it was made to.
type liar struct {
	name    string
	memory  int64
	propose func(tokens []int, k int) ([]draft.Guess, error)
}

func (l liar) Name() string             { return l.name }
func (l liar) Bytes(int) (int64, int64) { return l.memory, 0 }
func (l liar) Start() draft.Sequence    { return lie{l} }
func (l liar) Close() error             { return nil }

type lie struct{ liar }

func (l lie) Bytes() int64         { return 0 }
func (l lie) Fork() draft.Sequence { return l }

func (l lie) Propose(_ context.Context, tokens []int, k int) ([]draft.Guess, error) {
	return l.propose(tokens, k)
}

func sure(ids ...int) (g []draft.Guess) {
	for _, id := range ids {
		g = append(g, draft.Guess{ID: id, P: 0.9})
	}
	return g
}

// stateHash is over everything that a session goes on from.
func stateHash(t *testing.T, s *Session) string {
	t.Helper()
	var b bytes.Buffer
	if err := s.Fork().Save(&b, [32]byte{}, s.tokens, nil); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%d %x", s.Position(), sha256.Sum256(b.Bytes()))
}

// TestGuessesChangeNothing is the whole promise of speculative decoding, kept against
// proposers of every kind of malice: ids, logits and the state afterwards are those of plain
// decoding.
func TestGuessesChangeNothing(t *testing.T) {
	const vocab = 256
	texts, length, ks := 2, 60, []int{0, 2, 8}
	if *full {
		texts, length, ks = 4, 120, []int{0, 1, 2, 3, 5, 8}
	}
	ctx := context.Background()
	plain := openSet(t, "tiny-a", Options{})
	if plain.Config().Vocab < vocab {
		t.Fatal("the miniature's vocabulary shrank")
	}
	var truth []int // what plain decoding gave, for proposers that know
	rng := rand.New(rand.NewPCG(5, 6))
	random := func(_ []int, k int) ([]draft.Guess, error) {
		g := make([]draft.Guess, rng.IntN(k+1))
		for i := range g {
			g[i] = draft.Guess{ID: rng.IntN(vocab), P: rng.Float32()}
		}
		return g, nil
	}
	right := func(tokens []int, k int) []int {
		if len(tokens) >= len(truth) {
			return nil
		}
		return slices.Clone(truth[len(tokens):min(len(tokens)+k, len(truth))])
	}
	proposers := []liar{
		{name: "random", propose: random},
		{name: "always wrong", propose: func(tokens []int, k int) ([]draft.Guess, error) {
			ids := right(tokens, k)
			for i := range ids {
				ids[i] = (ids[i] + 1) % vocab
			}
			return sure(ids...), nil
		}},
		{name: "right", propose: func(tokens []int, k int) ([]draft.Guess, error) { return sure(right(tokens, k)...), nil }},
		{name: "right, then wrong", propose: func(tokens []int, k int) ([]draft.Guess, error) {
			ids := right(tokens, k)
			for i := range ids {
				if i > len(tokens)%5 {
					ids[i] = (ids[i] + 1) % vocab
				}
			}
			return sure(ids...), nil
		}},
		{name: "longer than the context", propose: func(_ []int, k int) ([]draft.Guess, error) {
			return sure(make([]int, 5000)...), nil
		}},
		{name: "empty", propose: func([]int, int) ([]draft.Guess, error) { return nil, nil }},
		{name: "lookup", propose: nil},
	}
	steps := 0
	for _, p := range proposers {
		for _, k := range ks {
			o := Options{Guesses: k, Proposers: []draft.Proposer{p}, Context: 200}
			if p.propose == nil {
				o.Proposers, o.Draft = nil, []string{"ngram"}
			}
			e := openSet(t, "tiny-a", o)
			for text := range texts {
				seed := rand.New(rand.NewPCG(uint64(text), 1))
				prompt := []int{seed.IntN(vocab), seed.IntN(vocab), seed.IntN(vocab)}
				r := Request{Prompt: prompt, MaxNew: length, Stop: []int{seed.IntN(vocab)}}
				if text%3 == 0 {
					r.MaxNew = 1000 // the context ends it
				}
				if text%4 == 1 { // as sampling does
					r.Choose = func(row []float32, position int) int {
						best := kernel.ArgMax(row)
						if position%3 == 0 {
							best = (best + position) % vocab
						}
						return best
					}
				}
				want := plain.NewSession()
				plain.ledger.Context = e.ledger.Context
				a, err := want.Generate(ctx, r)
				if err != nil {
					t.Fatal(err)
				}
				truth = append(slices.Clone(prompt), a.IDs...)
				got := e.NewSession()
				var fork *Session // of a moment in the middle
				at := seed.IntN(len(a.IDs)/2 + 1)
				n := 0
				r.Token = func(id int) error {
					if got.Position() != len(prompt)+n || id != a.IDs[n] {
						t.Fatalf("token %d is %d at position %d", n, id, got.Position())
					}
					if n++; n == at {
						fork = got.Fork()
					}
					return nil
				}
				b, err := got.Generate(ctx, r)
				if err != nil {
					t.Fatal(err)
				}
				what := fmt.Sprintf("%s, %d guesses, text %d", p.name, k, text)
				if !slices.Equal(a.IDs, b.IDs) || a.LogitsSHA256 != b.LogitsSHA256 || a.Finish != b.Finish {
					t.Fatalf("%s: %d tokens %s %s, plain %d %s %s", what, len(b.IDs), b.LogitsSHA256, b.Finish, len(a.IDs), a.LogitsSHA256, a.Finish)
				}
				if g, w := stateHash(t, got), stateHash(t, want); g != w {
					t.Fatalf("%s: state %s, plain %s", what, g, w)
				}
				if fork != nil { // it goes on to the same end
					rest := truth[fork.Position():got.Position()]
					if len(rest) > 0 {
						if _, err := fork.Feed(ctx, rest, nil); err != nil {
							t.Fatal(err)
						}
					}
					if g, w := stateHash(t, fork), stateHash(t, want); g != w {
						t.Fatalf("%s: a fork of the middle comes to state %s, plain %s", what, g, w)
					}
				}
				steps += b.Stats.Draft.Passes
			}
		}
	}
	if *full && steps < 10000 {
		t.Errorf("only %d passes were tried", steps)
	}
	t.Logf("%d passes", steps)
}

// TestADraftedTextEndsAnywhere lets the caller, the context and the number of tokens end a
// text in the middle of what was guessed right.
func TestADraftedTextEndsAnywhere(t *testing.T) {
	ctx := context.Background()
	c, err := golden.Find("nano", "france")
	if err != nil {
		t.Fatal(err)
	}
	plain := openSet(t, "nano", Options{})
	truth := append(slices.Clone(c.PromptIDs), c.Greedy...)
	e := openSet(t, "nano", Options{Guesses: 8, Proposers: []draft.Proposer{liar{name: "right", propose: func(tokens []int, k int) ([]draft.Guess, error) {
		return sure(truth[len(tokens):min(len(tokens)+k, len(truth))]...), nil
	}}}})
	enough := errors.New("enough")
	for n := 1; n < len(c.Greedy); n++ {
		want := plain.NewSession()
		if _, err := want.Feed(ctx, truth[:len(c.PromptIDs)+n-1], nil); err != nil {
			t.Fatal(err)
		}
		hash := stateHash(t, want)
		for name, r := range map[string]Request{
			"caller":           {MaxNew: 1000, Token: func(id int) error { return enough }},
			"number of tokens": {MaxNew: n},
			"stop token":       {MaxNew: 1000, Stop: []int{-1}},
		} {
			i := 0
			r.Prompt = c.PromptIDs
			switch {
			case r.Token != nil:
				r.Token = func(int) error {
					if i++; i == n {
						return enough
					}
					return nil
				}
			case r.Stop != nil:
				if slices.Contains(c.Greedy[:n-1], c.Greedy[n-1]) {
					continue // it would end before
				}
				r.Stop = []int{c.Greedy[n-1]}
			}
			s := e.NewSession()
			res, err := s.Generate(ctx, r)
			if (name == "caller") != errors.Is(err, enough) {
				t.Fatalf("%s after %d tokens: %v", name, n, err)
			}
			if len(res.IDs) > n || len(res.IDs) < n-1 {
				t.Errorf("%s after %d tokens: there are %d", name, n, len(res.IDs))
			}
			if d := res.Stats.Draft; d.Tokens != n-1 {
				t.Errorf("%s after %d tokens: %d behind the prompt's are accounted for", name, n, d.Tokens)
			}
			if got := stateHash(t, s); got != hash {
				t.Errorf("%s after %d tokens: state %s, want %s", name, n, got, hash)
			}
			// And it goes on from there.
			if _, err := s.Feed(ctx, truth[s.Position():], nil); err != nil {
				t.Errorf("%s after %d tokens: %v", name, n, err)
			}
		}
	}
}

// TestAProposerCannotMakeARunFail gives an engine proposers that break.
func TestAProposerCannotMakeARunFail(t *testing.T) {
	c, err := golden.Find("nano", "france")
	if err != nil {
		t.Fatal(err)
	}
	nanoVocab := openSet(t, "nano", Options{}).Config().Vocab
	broken := func([]int, int) ([]draft.Guess, error) { return nil, errors.New("the weights are torn") }
	nothing := func([]int, int) ([]draft.Guess, error) { return nil, nil }
	for _, tt := range []struct {
		name    string
		options Options
		remark  string
	}{
		{"an error", Options{Proposers: []draft.Proposer{liar{name: "x", propose: broken}}}, "the weights are torn"},
		{"an error of a forced one", Options{Guesses: 4, Proposers: []draft.Proposer{liar{name: "x", propose: broken}}}, "the weights are torn"},
		{"tokens that do not exist", Options{Proposers: []draft.Proposer{liar{name: "x", propose: func(_ []int, k int) ([]draft.Guess, error) {
			return sure(nanoVocab), nil
		}}}}, fmt.Sprintf("token %d", nanoVocab)},
		{"negative tokens", Options{Guesses: 1, Proposers: []draft.Proposer{liar{name: "x", propose: func(_ []int, k int) ([]draft.Guess, error) {
			return sure(-1), nil
		}}}}, "token -1"},
		{"no room", Options{Memory: 300 << 20, Proposers: []draft.Proposer{liar{name: "big", memory: 1 << 40}}}, "it needs 1099"},
		{"room for one", Options{Memory: 300 << 20, Proposers: []draft.Proposer{
			liar{name: "first", memory: 90e6, propose: nothing}, liar{name: "second", memory: 90e6, propose: nothing},
		}}, "second: nothing is guessed with it"},
		{"no such thing", Options{Draft: []string{"/nowhere"}}, "/nowhere: config.json"},
		{"another model", Options{Draft: []string{golden.ModelDir("nano")}}, "draft models are k3_dspark and qwen3"},
		{"a draft of another model", Options{Draft: []string{"testdata/none"}}, "nothing is guessed"},
	} {
		var remarks []string
		tt.options.Warn = func(line string) { remarks = append(remarks, line) }
		e := openSet(t, "nano", tt.options)
		res, err := e.NewSession().Generate(context.Background(), Request{Prompt: c.PromptIDs, MaxNew: len(c.Greedy)})
		if err != nil || res.LogitsSHA256 != c.LogitsSHA256 {
			t.Errorf("%s: hash %s, error %v", tt.name, res.LogitsSHA256, err)
		}
		if len(remarks) != 1 || !strings.Contains(remarks[0], tt.remark) {
			t.Errorf("%s: remarks %q", tt.name, remarks)
		}
	}
}

// TestNoMoreIsGuessedThanHasRoom holds each limit of a block where it is the one that counts.
func TestNoMoreIsGuessedThanHasRoom(t *testing.T) {
	for _, c := range []struct {
		name                  string
		rows, context, maxNew int
	}{
		{"rows", 3, 200, 40},
		{"one row", 1, 200, 10},
		{"context", 64, 20, 1000},
		{"number of tokens", 64, 200, 6},
	} {
		var e *Engine
		const prompt = 3
		most := 0
		e = openSet(t, "tiny-a", Options{Guesses: draft.MaxGuesses, PassRows: c.rows, Context: c.context, Proposers: []draft.Proposer{liar{
			name: "x", propose: func(tokens []int, k int) ([]draft.Guess, error) {
				room := min(c.rows-1, c.context-len(tokens), prompt+c.maxNew-len(tokens)-1, draft.MaxGuesses)
				if k != room {
					t.Errorf("%s: %d guesses are asked for behind %d tokens, %d have room", c.name, k, len(tokens), room)
				}
				most = max(most, k)
				return sure(make([]int, k)...), nil
			},
		}}})
		for range 2 {
			res, err := e.NewSession().Generate(context.Background(), Request{Prompt: []int{1, 2, 3}, MaxNew: c.maxNew})
			if err != nil {
				t.Fatal(err)
			}
			if d := res.Stats.Draft; d.Tokens != len(res.IDs)-1 {
				t.Errorf("%s: %d tokens are accounted for, %d came behind the first", c.name, d.Tokens, len(res.IDs)-1)
			}
		}
		if want := min(c.rows-1, draft.MaxGuesses); c.rows < 64 && most != want {
			t.Errorf("%s: at most %d guesses were asked for", c.name, most)
		}
	}
}

// TestACancelledProposerIsAskedAgain ends the context while a proposer thinks.
func TestACancelledProposerIsAskedAgain(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	asked := 0
	e := openSet(t, "tiny-a", Options{Guesses: 2, Warn: func(line string) { t.Error(line) }, Proposers: []draft.Proposer{liar{
		name: "x", propose: func([]int, int) ([]draft.Guess, error) {
			asked++
			cancel()
			return nil, ctx.Err()
		},
	}}})
	s := e.NewSession()
	if res, err := s.Generate(ctx, Request{Prompt: []int{1, 2, 3}, MaxNew: 9}); err != nil || res.Finish != FinishCancelled {
		t.Fatalf("%s, error %v", res.Finish, err)
	}
	ctx = context.Background()
	if _, err := e.NewSession().Generate(ctx, Request{Prompt: []int{1, 2, 3}, MaxNew: 9}); err != nil {
		t.Fatal(err)
	}
	if asked < 3 {
		t.Errorf("asked %d times", asked)
	}
}

// TestADraftedTextIsCancelled cancels passes that check guesses, in every layer. The session
// then stands where it stood before, and goes on.
func TestADraftedTextIsCancelled(t *testing.T) {
	c, err := golden.Find("nano", "story")
	if err != nil {
		t.Fatal(err)
	}
	ids := append(slices.Clone(c.PromptIDs), c.Greedy...)
	e := openSet(t, "nano", Options{Guesses: 4, Proposers: []draft.Proposer{liar{name: "x", propose: func(tokens []int, k int) ([]draft.Guess, error) {
		return sure(ids[len(tokens)], 0, 0, 0), nil
	}}}})
	want := openSet(t, "nano", Options{}).NewSession()
	if _, err := want.Feed(context.Background(), ids, nil); err != nil {
		t.Fatal(err)
	}
	hash := stateHash(t, want)
	for layer := range e.Config().Layers {
		ctx, cancel := context.WithCancel(context.Background())
		passes := 0
		e.model.Observe = func(l int, name string, v kernel.Mat) {
			if name == "attn_in" && l == layer && v.Rows == 5 {
				if passes++; passes == 3 {
					cancel()
				}
			}
		}
		s := e.NewSession()
		res, err := s.Generate(ctx, Request{Prompt: c.PromptIDs, MaxNew: len(c.Greedy)})
		cancel()
		e.model.Observe = nil
		if err != nil || res.Finish != FinishCancelled || len(res.IDs) < 3 || !slices.Equal(res.IDs, c.Greedy[:len(res.IDs)]) {
			t.Fatalf("layer %d: %v %s, error %v", layer, res.IDs, res.Finish, err)
		}
		if _, err := s.Feed(context.Background(), ids[s.Position():], nil); err != nil {
			t.Fatalf("layer %d: %v", layer, err)
		}
		if got := stateHash(t, s); got != hash {
			t.Errorf("layer %d: state %s, want %s", layer, got, hash)
		}
	}
}

// TestDraftModelsGuessForTheMiniature runs K3-nano with its own draft models, opened by their
// directories.
func TestDraftModelsGuessForTheMiniature(t *testing.T) {
	for _, kind := range []string{"dspark", "text"} {
		var remarks []string
		dir := filepath.Join(golden.Dir(), "nano", "model-"+kind)
		e := openSet(t, "nano", Options{Draft: []string{dir}, Guesses: 4, Warn: func(line string) { remarks = append(remarks, line) }})
		for _, name := range []string{"chat-think", "zh-capital"} {
			c, err := golden.Find("nano", name)
			if err != nil {
				t.Fatal(err)
			}
			res, err := e.NewSession().Generate(context.Background(), Request{Prompt: c.PromptIDs, MaxNew: len(c.Greedy)})
			if err != nil || res.LogitsSHA256 != c.LogitsSHA256 {
				t.Errorf("%s, %s: hash %s, error %v", kind, name, res.LogitsSHA256, err)
			}
			p := res.Stats.Draft.Proposers[0]
			if share := float64(p.Accepted) / float64(max(p.Checked, 1)); p.Name != kind || share < 0.5 {
				t.Errorf("%s, %s: %d of %d guesses of %q were right", kind, name, p.Accepted, p.Checked, p.Name)
			}
		}
		if len(remarks) > 0 {
			t.Errorf("%s: remarks %q", kind, remarks)
		}
	}
}
