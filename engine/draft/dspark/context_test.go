package dspark_test

import (
	"context"
	"math"
	"slices"
	"testing"

	"deltafin/engine/draft"
	"deltafin/engine/draft/dspark"
	"deltafin/engine/kernel"
	"deltafin/reference"
)

// same holds a proposal against the float64 reference, which is given the
// streams of positions lo to the last that the model has seen.
func (x *text) same(d *reference.DSpark[float64], head reference.Matrix[float64], p draft.Proposer, lo int) {
	x.t.Helper()
	last := len(x.tokens) - 1
	d.Forget()
	for at := max(lo, 0); at < last; at++ {
		d.Append(at, x.streams[at])
	}
	want, got := d.Propose(x.tokens[last], last, head), x.propose(dspark.Rows)
	if !slices.Equal(ids(got), want.Tokens) {
		x.t.Fatalf("position %d: proposed %v, the reference %v", last, ids(got), want.Tokens)
	}
	h := dspark.Hidden(p)
	for r, row := range want.Hidden {
		if d := math.Abs(logit(got[r].P) - want.Confidence[r]); d > 1e-4 {
			x.t.Errorf("position %d, row %d: the confidence is off by %g", last, r, d)
		}
		for c, v := range row {
			if d := math.Abs(float64(h.Row(r)[c]) - v); d > 3e-5 {
				x.t.Fatalf("position %d, row %d: value %d is off by %g", last, r, c, d)
			}
		}
	}
}

// TestTheWindowIsTheLatestPositions compares with the reference, which sees the same streams and nothing
// before the window, over a whole text: windows that are smaller than the prompt and that fill
// on the way, prompts in passes longer and shorter than they, forks, and texts whose beginning the draft was
// not shown.
func TestTheWindowIsTheLatestPositions(t *testing.T) {
	e := openEngine(t)
	d, err := reference.LoadDSpark[float64](draftDir)
	if err != nil {
		t.Fatal(err)
	}
	c := e.Config()
	head := reference.Matrix[float64]{Rows: c.Vocab, Cols: c.Hidden, Data: make([]float64, 0, c.Vocab*c.Hidden)}
	if err := target(e).Head(context.Background(), func(_ int, w *kernel.Matrix) error {
		row := make([]float32, w.Cols)
		for r := range w.Rows {
			w.Widen(row, r)
			head.Data = append(head.Data, wide(row)...)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	run := goldenRuns(t)[1]
	for _, c := range []struct {
		name           string
		window, rows   int
		unseen, blocks int // positions that are not shown; proposals
		fork           bool
	}{
		{name: "a window larger than the text", window: 1000, rows: 1000, blocks: 2},
		{name: "one position", window: 1, rows: 7, blocks: 3},
		{name: "smaller than a verification pass", window: 4, rows: 1000, blocks: 3},
		{name: "in one pass", window: 40, rows: 1000, blocks: 3, fork: true},
		{name: "in passes of 7 rows", window: 40, rows: 7, blocks: 3},
		{name: "in passes longer than the window", window: 16, rows: 50, blocks: 3},
		{name: "filled on the way", window: 100, rows: 1000, blocks: 5, fork: true},
		{name: "beginning unseen", window: 1000, rows: 1000, unseen: 50, blocks: 3},
		{name: "beginning unseen, small window", window: 30, rows: 1000, unseen: 70, blocks: 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := openDraft(t, e, dspark.Options{Window: c.window})
			x := begin(t, e, p, run.Prompt, c.rows, c.unseen)
			if slow() {
				c.blocks = 1
			}
			for i := range c.blocks {
				x.same(d, head, p, max(c.unseen, len(x.tokens)-1-c.window))
				if c.fork {
					f := x.fork()
					f.verify([]int{9, 9})
					f.propose(1)
				}
				// Right guesses at first, then wrong ones, so that all, some and none are kept.
				proposal := ids(x.propose(dspark.Rows))
				for r := range proposal {
					if r > 6-2*i {
						proposal[r] = 5
					}
				}
				x.verify(proposal)
			}
			x.same(d, head, p, max(c.unseen, len(x.tokens)-1-c.window))
		})
	}
}

// synthetic is a target whose streams the test makes up, at the width of the nano draft.
func synthetic(t *testing.T, o dspark.Options) (draft.Proposer, *kernel.Pool) {
	t.Helper()
	pool := kernel.NewPool(2)
	t.Cleanup(pool.Close)
	p, err := dspark.Open(draftDir, draft.Target{
		Hidden: 192, Vocab: 3072, Layers: 9, Pool: pool,
		Embed: func(_ context.Context, dst kernel.Mat, ids []int) error {
			for r, id := range ids {
				for c := range dst.Cols {
					dst.Row(r)[c] = float32(math.Sin(float64(id*192 + c)))
				}
			}
			return nil
		},
		Head: func(_ context.Context, use func(int, *kernel.Matrix) error) error {
			w := kernel.FloatMatrix(1024, 192, 192, kernel.Floats(1024*192))
			for lo := 0; lo < 3072; lo += 1024 {
				if err := use(lo, &w); err != nil {
					return err
				}
			}
			return nil
		},
	}, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p, pool
}

// show lets s watch a pass of rows rows; what it sees depends on position, layer and salt.
func show(s draft.Watcher, first, rows int, salt float64, layers ...int) {
	for _, l := range layers {
		m := kernel.NewMat(rows, 192)
		for r := range rows {
			for c := range 192 {
				m.Row(r)[c] = float32(math.Cos(float64(first+r)*0.7 + float64(l) + float64(c)*0.01 + salt))
			}
		}
		s.Watch(l, first, m)
	}
}

// TestWhatIsNotKeptIsForgotten shows rubbish between the passes that count: rejected rows, passes that
// failed on their way, layers that nobody asked for. The guesses are those without it.
func TestWhatIsNotKeptIsForgotten(t *testing.T) {
	p, _ := synthetic(t, dspark.Options{Window: 50})
	all := []int{1, 3, 5, 7, 8}
	tokens := make([]int, 121)
	plain, troubled := p.Start().(draft.Watcher), p.Start().(draft.Watcher)
	if !slices.Equal(plain.Layers(), all) {
		t.Fatalf("layers %v", plain.Layers())
	}
	guess := func(s draft.Sequence, at int) []draft.Guess {
		g, err := s.Propose(context.Background(), tokens[:at+1], 7)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	for at, i := 0, 0; at < 120; i++ {
		n := []int{60, 1, 9, 3, 17, 30}[i%6]
		show(plain, at, n, 0, all...)
		plain.Kept(at + n)
		switch i % 3 {
		case 0: // rejected rows behind those that count
			show(troubled, at, n+dspark.Trial-min(n, dspark.Trial), 0, all...)
		case 1: // a pass that ended with an error, then the same again
			show(troubled, at, n+3, 1, all[:3]...)
			show(troubled, at, n, 0, all...)
			troubled.Kept(at + n/2) // of which the engine is sure first
		case 2: // layers that are none of ours, in a pass that is cut off and goes on
			show(troubled, at, n, 0, 0, 1, 2, 3, 4)
			guess(troubled, at)
			show(troubled, at, n, 0, 5, 6, 7, 8)
		}
		troubled.Kept(at + n)
		at += n
		if i%2 == 1 {
			if a, b := guess(plain, at), guess(troubled, at); !slices.Equal(a, b) {
				t.Fatalf("after %d positions: %v, without trouble %v", at, b, a)
			}
		}
	}
	// A pass that failed and whose end nobody decided leaves nothing behind either.
	before := guess(plain, 120)
	show(plain, 120, 5, 3, all[:4]...)
	plain.Kept(125)
	if after := guess(plain, 120); !slices.Equal(before, after) {
		t.Errorf("an unfinished pass changed %v to %v", before, after)
	}
}
