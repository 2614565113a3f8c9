package dspark_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"deltafin/engine"
	"deltafin/engine/draft"
	"deltafin/engine/draft/dspark"
	"deltafin/engine/kernel"
	"deltafin/golden"
)

var draftDir = filepath.Join(filepath.Dir(golden.ModelDir("nano")), "model-dspark")

type block struct {
	Newest     int
	Proposal   []int
	Confidence []float64 // before the sigmoid
	Accepted   int
}

// goldenRun is what the numpy definition did with one prompt.
type goldenRun struct {
	Name   string
	Prompt []int `json:"prompt_ids"`
	Tokens []int
	Blocks []block
	First  struct {
		block
		Context int
		Hidden  [][]float64
	} `json:"first_block"`
}

func goldenRuns(t testing.TB) (runs []goldenRun) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(filepath.Dir(draftDir), "golden", "dspark", "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden blocks: %v", err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		var r goldenRun
		if err := json.Unmarshal(b, &r); err != nil {
			t.Fatal(err)
		}
		runs = append(runs, r)
	}
	return runs
}

// text is a session of the nano model with a sequence of the draft that watches it.
type text struct {
	t       testing.TB
	engine  *engine.Engine
	session *engine.Session
	seq     draft.Watcher
	tokens  []int         // all decided, the newest not yet seen by the model
	streams [][][]float64 // [positions][watched layers][hidden], what the model showed last
}

func openEngine(t testing.TB) *engine.Engine {
	t.Helper()
	e, err := engine.Open(context.Background(), golden.ModelDir("nano"), engine.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

func target(e *engine.Engine) draft.Target {
	c, m := e.Config(), e.Model()
	return draft.Target{Hidden: c.Hidden, Vocab: c.Vocab, Layers: c.Layers, Pool: m.Pool, Embed: m.Spine.Embed, Head: m.Spine.Head}
}

func openDraft(t testing.TB, e *engine.Engine, o dspark.Options) draft.Proposer {
	t.Helper()
	p, err := dspark.Open(draftDir, target(e), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// begin feeds prompt in passes of at most so many rows, the first of its tokens unseen by the draft.
func begin(t testing.TB, e *engine.Engine, p draft.Proposer, prompt []int, rows, unseen int) *text {
	t.Helper()
	x := &text{t: t, engine: e, session: e.NewSession(), seq: p.Start().(draft.Watcher), tokens: slices.Clone(prompt)}
	if unseen > 0 {
		if _, err := x.session.Feed(context.Background(), prompt[:unseen], nil); err != nil {
			t.Fatal(err)
		}
		x.streams = make([][][]float64, unseen)
	}
	for part := range slices.Chunk(prompt[unseen:], rows) {
		logits := x.watched(func() ([][]float32, error) {
			l, err := x.session.Feed(context.Background(), part, nil)
			return [][]float32{l}, err
		})
		x.seq.Kept(x.session.Position())
		if x.session.Position() == len(prompt) {
			x.tokens = append(x.tokens, kernel.ArgMax(logits[0]))
		}
	}
	return x
}

// watched runs a pass that the sequence watches.
func (x *text) watched(pass func() ([][]float32, error)) [][]float32 {
	x.t.Helper()
	first, m := x.session.Position(), x.engine.Model()
	m.Observe = func(l int, name string, v kernel.Mat) {
		i := slices.Index(x.seq.Layers(), l)
		if name != "stream" || i < 0 {
			return
		}
		x.seq.Watch(l, first, v)
		if i == 0 {
			x.streams = append(x.streams[:first:first], make([][][]float64, v.Rows)...)
		}
		for r := range v.Rows {
			x.streams[first+r] = append(x.streams[first+r], wide(v.Row(r)))
		}
	}
	defer func() { m.Observe = nil }()
	logits, err := pass()
	if err != nil {
		x.t.Fatal(err)
	}
	return logits
}

func wide(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

func (x *text) propose(k int) []draft.Guess {
	x.t.Helper()
	g, err := x.seq.Propose(context.Background(), x.tokens, k)
	if err != nil {
		x.t.Fatal(err)
	}
	return g
}

func ids(g []draft.Guess) (list []int) {
	for _, x := range g {
		list = append(list, x.ID)
	}
	return list
}

// verify runs the proposed tokens through the model and keeps those that it chooses too.
func (x *text) verify(proposal []int) (accepted int) {
	x.t.Helper()
	logits := x.watched(func() ([][]float32, error) {
		return x.session.Try(context.Background(), append(x.tokens[len(x.tokens)-1:len(x.tokens):len(x.tokens)], proposal...))
	})
	for accepted < len(proposal) && kernel.ArgMax(logits[accepted]) == proposal[accepted] {
		accepted++
	}
	x.tokens = append(append(x.tokens, proposal[:accepted]...), kernel.ArgMax(logits[accepted]))
	if err := x.session.Keep(accepted + 1); err != nil {
		x.t.Fatal(err)
	}
	x.seq.Kept(x.session.Position())
	return accepted
}

// fork goes on independently.
func (x *text) fork() *text {
	f := *x
	f.session, f.seq, f.tokens = x.session.Fork(), x.seq.Fork().(draft.Watcher), slices.Clone(x.tokens)
	return &f
}

func logit(p float32) float64 { return math.Log(float64(p) / (1 - float64(p))) }

// slow says that the portable definition computes, which does with fewer of the longer checks.
func slow() bool { return kernel.Active() == "portable" }

// TestGoldenBlocks runs the golden prompts by proposal and verification, in all ways in which a session
// comes to the same place.
func TestGoldenBlocks(t *testing.T) {
	e := openEngine(t)
	p := openDraft(t, e, dspark.Options{})
	for _, run := range goldenRuns(t) {
		for _, way := range []struct {
			name string
			rows int // of a pass over the prompt
			fork bool
		}{{"one pass", len(run.Prompt), false}, {"passes of 3 rows", 3, false}, {"forks", len(run.Prompt), true}} {
			if slow() && !way.fork {
				continue
			}
			t.Run(run.Name+"/"+way.name, func(t *testing.T) {
				x := begin(t, e, p, run.Prompt, way.rows, 0)
				worst := 0.0
				for i, b := range run.Blocks {
					late := x.fork()
					if way.fork { // what happens to a fork, or to what it was made from, is nobody else's business
						astray, on := x, x.fork()
						if i%2 == 0 {
							astray, on = on, astray
						}
						astray.verify([]int{1, 2, 3})
						astray.propose(2)
						x = on
					}
					if newest := x.tokens[len(x.tokens)-1]; newest != b.Newest {
						t.Fatalf("block %d begins with token %d, the golden one with %d", i, newest, b.Newest)
					}
					g := x.propose(dspark.Rows)
					if !slices.Equal(ids(g), b.Proposal) {
						t.Fatalf("block %d: proposed %v, golden %v", i, ids(g), b.Proposal)
					}
					for r := range g {
						worst = max(worst, math.Abs(logit(g[r].P)-b.Confidence[r]))
					}
					if i == 0 {
						h := dspark.Hidden(p)
						for r, row := range run.First.Hidden {
							for c, v := range row {
								if d := math.Abs(float64(h.Row(r)[c]) - v); d > 3e-4 {
									t.Fatalf("row %d, value %d of the last norm is off by %g", r, c, d)
								}
							}
						}
					}
					accepted := x.verify(b.Proposal)
					if way.fork && !slices.Equal(ids(late.propose(dspark.Rows)), b.Proposal) {
						t.Fatalf("block %d: a fork does not propose what its original did then", i)
					}
					if accepted != b.Accepted {
						t.Fatalf("block %d: %d tokens accepted, golden %d", i, accepted, b.Accepted)
					}
				}
				got := x.tokens[len(run.Prompt):]
				if n := min(len(got), len(run.Tokens)); !slices.Equal(got[:n], run.Tokens[:n]) {
					t.Errorf("tokens are %v, golden %v", got, run.Tokens)
				}
				if worst > 1e-3 {
					t.Errorf("a confidence is off by %g", worst)
				}
				t.Logf("%d blocks, largest deviation of a confidence %.1e", len(run.Blocks), worst)
			})
		}
	}
}

func TestFewerGuessesAreTheFirstOnes(t *testing.T) {
	e := openEngine(t)
	p := openDraft(t, e, dspark.Options{})
	x := begin(t, e, p, goldenRuns(t)[0].Prompt, 100, 0)
	all := x.propose(dspark.Rows)
	for _, k := range []int{-1, 0, 1, 3, 7, 100} {
		if g := x.propose(k); !slices.Equal(g, all[:max(min(k, 7), 0)]) {
			t.Errorf("%d guesses are %v, of seven %v", k, g, all)
		}
	}
	if g, err := p.Start().Propose(context.Background(), []int{1}, 7); err != nil || g != nil {
		t.Errorf("where nothing was watched the guess is %v, error %v", g, err)
	}
}

func BenchmarkPropose(b *testing.B) {
	e := openEngine(b)
	x := begin(b, e, openDraft(b, e, dspark.Options{}), goldenRuns(b)[1].Prompt, 1000, 0)
	x.propose(7)
	for b.Loop() {
		x.propose(7)
	}
}

// BenchmarkDecode is a pass of one row, and of eight, as verification has.
func BenchmarkDecode(b *testing.B) {
	e := openEngine(b)
	x := begin(b, e, openDraft(b, e, dspark.Options{}), goldenRuns(b)[1].Prompt, 1000, 0)
	for _, rows := range []int{1, 8} {
		b.Run(fmt.Sprint(rows, " rows"), func(b *testing.B) {
			for b.Loop() {
				if _, err := x.session.Try(context.Background(), make([]int, rows)); err != nil {
					b.Fatal(err)
				}
				if err := x.session.Keep(0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestTheEngineGuessesWithADraft lets the engine do all that the tests above do by hand.
func TestTheEngineGuessesWithADraft(t *testing.T) {
	for _, rows := range []int{0, 16} {
		if slow() && rows == 0 {
			continue
		}
		e, err := engine.Open(context.Background(), golden.ModelDir("nano"), engine.Options{
			Draft: []string{draftDir}, Guesses: dspark.Rows, PassRows: rows, Warn: func(line string) { t.Error(line) },
		})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		for _, run := range goldenRuns(t) {
			r, err := e.NewSession().Generate(context.Background(), engine.Request{Prompt: run.Prompt, MaxNew: len(run.Tokens)})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(r.IDs, run.Tokens) {
				t.Errorf("%s: tokens %v, golden %v", run.Name, r.IDs, run.Tokens)
			}
			if n := r.Stats.Draft.Passes; n != len(run.Blocks) {
				t.Errorf("%s, passes of %d rows: %d passes, golden %d", run.Name, rows, n, len(run.Blocks))
			}
		}
	}
}
