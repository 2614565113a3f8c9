package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"deltafin/engine/drive"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/golden"
)

// tripwire cancels a context at a place of a pass, and counts what runs.
type tripwire struct {
	k3.Experts
	place  string // "" for nowhere
	cancel context.CancelFunc
	ran    map[string]int // by the name of what was observed, and its layer
}

// lay puts a tripwire into e.
func lay(e *Engine) *tripwire {
	m := e.Model()
	w := &tripwire{Experts: m.Experts, ran: map[string]int{}}
	m.Experts = w
	m.Observe = func(l int, name string, _ kernel.Mat) { w.at(name, l) }
	m.ObserveRoutes = func(l int, _ []int32, _ []float32) { w.at("routes", l) }
	return w
}

func (w *tripwire) at(what string, l int) {
	place := fmt.Sprint(what, " ", l)
	w.ran[place]++
	if place == w.place {
		w.cancel()
	}
}

func (w *tripwire) Stream(ctx context.Context, layer int, ids []int32, use func(i int, e *k3.Expert) error, idle func() bool) error {
	uses := 0
	return w.Experts.Stream(ctx, layer, ids, func(i int, e *k3.Expert) error {
		if uses++; uses == (len(ids)+1)/2 {
			w.at("half of the experts", layer)
		}
		return use(i, e)
	}, idle)
}

// place is where a pass may be cut off, with the whole layers that are done by then.
type place struct {
	name   string
	layers int
}

func places(c interface{ IsMoE(int) bool }, layers int) (all []place) {
	for l := range layers {
		all = append(all, place{fmt.Sprint("attn_out ", l), l})
		if c.IsMoE(l) {
			all = append(all, place{fmt.Sprint("half of the experts ", l), l})
		}
		all = append(all, place{fmt.Sprint("stream ", l), l + 1}) // after the last layer: before the head
	}
	return all
}

// cutOff feeds ids and demands that it is cut off at p, inside a pass of n tokens.
func cutOff(t *testing.T, w *tripwire, s *Session, ids []int, p place, n int) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.cancel, w.place = cancel, p.name
	if _, err := s.Feed(ctx, ids, nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("cut off at %s: %v", p.name, err)
	}
	w.place = ""
	if cut, layers := s.Suspended(); len(cut) != n || layers != p.layers {
		t.Fatalf("cut off at %s: %d tokens and %d layers are done, want %d and %d", p.name, len(cut), layers, n, p.layers)
	}
}

func TestAPassThatIsCutOffGoesOnAtTheSameHalfLayer(t *testing.T) {
	hashes, err := golden.LoadHashes()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"tiny-a/len17", "tiny-b/len17", "nano/france"} {
		set, name, _ := strings.Cut(key, "/")
		c, err := golden.Find(set, name)
		if err != nil {
			t.Fatal(err)
		}
		e := openSet(t, set, Options{ExpertMemory: -1})
		want, err := e.NewSession().Feed(context.Background(), c.PromptIDs, nil)
		if err != nil {
			t.Fatal(err)
		}
		want = slices.Clone(want)
		w, layers := lay(e), e.Config().Layers
		all := places(e.Config(), layers)
		cuts := [][]place{all}
		for _, p := range all {
			cuts = append(cuts, []place{p})
		}
		for _, cut := range cuts {
			s, before := e.NewSession(), e.Model().Counters()
			clear(w.ran)
			for _, p := range cut {
				cutOff(t, w, s, c.PromptIDs, p, len(c.PromptIDs))
			}
			var progress []int
			row, err := s.Feed(context.Background(), c.PromptIDs, func(done, _ int) { progress = append(progress, done) })
			if err != nil {
				t.Fatalf("%s after %v: %v", key, cut, err)
			}
			if !slices.Equal(row, want) {
				t.Errorf("%s cut off at %v: other logits", key, cut)
			}
			for l := range layers {
				again := 0 // only what an expert was missing for
				if slices.Contains(cut, place{fmt.Sprint("half of the experts ", l), l}) {
					again = 1
				}
				if a, f, r := w.ran[fmt.Sprint("attn_in ", l)], w.ran[fmt.Sprint("mlp_in ", l)], w.ran[fmt.Sprint("routes ", l)]; a != 1 || f != 1+again || e.Config().IsMoE(l) && r != 1 {
					t.Errorf("%s cut off at %v: layer %d attended %d times, fed forward %d times, showed its routes %d times", key, cut, l, a, f, r)
				}
			}
			if n := e.Model().Counters().Sub(before); n.LayerPasses != int64(layers) || n.Read+n.Resident-n.Wasted != n.Union {
				t.Errorf("%s cut off at %v: %+v", key, cut, n)
			}
			done := cut[len(cut)-1].layers
			if len(progress) != layers-done || len(progress) > 0 && progress[0] != done+1 {
				t.Errorf("%s cut off at %v: progress %v after %d layers", key, cut, progress, done)
			}
			if len(cut) == 1 {
				continue
			}
			// What it left in the state is right, too: the continuation, each token cut off once.
			rows := [][]float32{slices.Clone(row)}
			for i, id := range c.Greedy[:len(c.Greedy)-1] {
				cutOff(t, w, s, []int{id}, all[(7*i)%len(all)], 1)
				if row, err = s.Feed(context.Background(), []int{id}, nil); err != nil {
					t.Fatal(err)
				}
				rows = append(rows, slices.Clone(row))
			}
			if err := hashes.Check(key, golden.HashRows(rows)); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestALongerPromptGoesOnInsideThePass cuts off the second of several passes and comes back
// with more than was asked first.
func TestALongerPromptGoesOnInsideThePass(t *testing.T) {
	e := openSet(t, "nano", Options{PassRows: 16})
	rng := rand.New(rand.NewPCG(3, 4))
	ids := make([]int, 61)
	for i := range ids {
		ids[i] = rng.IntN(e.Config().Vocab)
	}
	want, err := e.NewSession().Feed(context.Background(), ids, nil)
	if err != nil {
		t.Fatal(err)
	}
	want = slices.Clone(want)
	w, s, before := lay(e), e.NewSession(), e.Model().Counters()
	layers := e.Config().Layers
	ctx, cancel := context.WithCancel(context.Background())
	if _, err := s.Feed(ctx, ids[:40], func(done, of int) { // 13, 13 and 14 rows
		if done == layers+3 {
			cancel()
		}
	}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if cut, done := s.Suspended(); s.Position() != 13 || !slices.Equal(cut, ids[13:26]) || done != 3 {
		t.Fatalf("position %d, inside a pass of %d tokens after %d layers", s.Position(), len(cut), done)
	}
	clear(w.ran)
	got, err := s.Feed(context.Background(), ids[13:], nil)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Error("other logits")
	}
	if n := e.Model().Counters().Sub(before).LayerPasses; n != int64(5*layers) || w.ran["attn_in 0"] != 3 {
		t.Errorf("%d layer passes, want 5 times %d; %d passes began anew, want 3", n, layers, w.ran["attn_in 0"])
	}
}

func TestNothingElseGoesOnInsideAPass(t *testing.T) {
	e := openSet(t, "nano", Options{})
	c, err := golden.Find("nano", "france")
	if err != nil {
		t.Fatal(err)
	}
	ctx, w, ids := context.Background(), lay(e), c.PromptIDs
	edited := slices.Clone(ids)
	edited[len(edited)-1]++
	feed := func(ids []int) func(*Session) error {
		return func(s *Session) error {
			_, err := s.Feed(ctx, ids, nil)
			return err
		}
	}
	for name, try := range map[string]func(*Session) error{
		"an edited prompt": feed(edited),
		"a shorter prompt": feed(ids[:len(ids)-1]),
		"nothing":          feed(nil),
		"a trial": func(s *Session) error {
			_, err := s.Try(ctx, ids)
			return err
		},
		"the prompt, after another session": func(s *Session) error {
			if _, err := e.NewSession().Feed(ctx, ids[:2], nil); err != nil {
				t.Fatal(err)
			}
			if cut, _ := s.Suspended(); cut != nil {
				t.Error("still suspended after another session's pass")
			}
			return feed(ids)(s)
		},
	} {
		s := e.NewSession()
		cutOff(t, w, s, ids, place{"attn_out 4", 4}, len(ids))
		err := try(s)
		if err == nil {
			t.Errorf("%s went on inside the pass", name)
		}
		if name != "nothing" && !strings.Contains(err.Error(), "begin again") {
			t.Errorf("%s: %v", name, err)
		}
		if name == "nothing" || name == "a trial" { // which changes nothing
			if _, err := s.Feed(ctx, ids, nil); err != nil {
				t.Errorf("after %s: %v", name, err)
			}
			continue
		}
		if _, err := s.Feed(ctx, ids, nil); err == nil {
			t.Errorf("the session could be used after %s", name)
		}
	}
	for name, copy := range map[string]func(*Session){
		"fork": func(s *Session) { s.Fork() },
		"save": func(s *Session) { _ = s.Save(nil, [32]byte{}, nil, nil) },
	} {
		s := e.NewSession()
		cutOff(t, w, s, ids, place{"stream 2", 3}, len(ids))
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s of a state inside a pass", name)
				}
			}()
			copy(s)
		}()
	}
}

// TestASlowPromptIsNeverBegunAgain takes a prompt's experts from a slow drive and cuts it off by
// the clock, again and again.
func TestASlowPromptIsNeverBegunAgain(t *testing.T) {
	c, err := golden.Find("nano", "france")
	if err != nil {
		t.Fatal(err)
	}
	e := openSet(t, "nano", Options{ExpertMemory: -1, Drive: drive.Options{
		Pace: map[string]drive.Pace{golden.ModelDir("nano"): {BytesPerSecond: 200e6, Latency: 200 * time.Microsecond}},
	}})
	w, s, before := lay(e), e.NewSession(), e.Model().Counters()
	rng := rand.New(rand.NewPCG(5, 6))
	cuts := 0
	var res Result
	for {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(2+rng.IntN(8))*time.Millisecond)
		if cuts == 200 { // a machine too slow for this pace gets there too
			ctx = context.Background()
		}
		res, err = s.Generate(ctx, Request{Prompt: c.PromptIDs, MaxNew: 1})
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		if res.Finish != FinishCancelled {
			break
		}
		cuts++
	}
	if cuts == 0 {
		t.Fatal("it was never cut off: the drive is too fast for this test")
	}
	layers, again := e.Config().Layers, 0
	for l := range layers {
		if n := w.ran[fmt.Sprint("attn_in ", l)]; n != 1 {
			t.Errorf("layer %d attended %d times", l, n)
		}
		again += w.ran[fmt.Sprint("mlp_in ", l)] - 1
	}
	n := e.Model().Counters().Sub(before)
	if n.LayerPasses != int64(layers) || again > cuts || n.Read+n.Resident-n.Wasted != n.Union {
		t.Errorf("%d feed-forward parts again after %d cuts: %+v", again, cuts, n)
	}
	t.Logf("%d cuts, %d feed-forward parts done again", cuts, again)
	if want := golden.HashRows(greedy(t, openSet(t, "nano", Options{}), c)[:1]); res.LogitsSHA256 != want {
		t.Errorf("logits hash %s, undisturbed %s", res.LogitsSHA256, want)
	}
}
