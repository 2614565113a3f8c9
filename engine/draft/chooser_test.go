package draft

import (
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"
)

// world is a model and proposers whose costs and luck are known.
type world struct {
	cost  func(rows int) float64 // seconds of a pass
	arms  []luck
	noise float64 // share of a pass's time, as a standard deviation
}

// luck is one proposer: how likely its guesses really are, what it says, what it takes.
type luck struct {
	p, says float64
	think   float64
	turns   int // after so many tokens p becomes then; 0 for never
	then    float64
}

func (l luck) at(token int) float64 {
	if l.turns > 0 && token >= l.turns {
		return l.then
	}
	return l.p
}

// decode makes tokens and returns the seconds that they took, against plain ones.
func (w world) decode(t *testing.T, c *Chooser, tokens int, seed uint64) (took, plain float64) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 3))
	at := time.Unix(0, 0)
	c.now = func() time.Time { return at }
	for n := 0; n < tokens; {
		thought := 0.0
		g, err := c.Next(min(MaxGuesses, tokens-n-1), func(i, k int) ([]Guess, error) {
			thought += w.arms[i].think
			at = at.Add(time.Duration(w.arms[i].think * 1e9))
			g := make([]Guess, k)
			for j := range g {
				g[j].P = float32(w.arms[i].says)
			}
			return g, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		right := 0
		for right < len(g) && rng.Float64() < w.arms[c.arm].at(n) {
			right++
		}
		pass := w.cost(len(g)+1) * max(1+w.noise*rng.NormFloat64(), 0.3)
		took += pass + thought
		c.Passed(right+1, right, time.Duration(pass*1e9))
		n += right + 1
	}
	return took, float64(tokens) * w.cost(1)
}

func linear(slope float64) func(int) float64 {
	return func(rows int) float64 { return 0.25 * (1 + slope*float64(rows-1)) }
}

// union is the cost of experts from drives: rows share some.
func union(rows int) float64 {
	return 0.02 + 0.23*(1-math.Pow(1-16./896, float64(rows)*0.8))/(1-math.Pow(1-16./896, 0.8))
}

// bound is what the best constant number of guesses would give, knowing everything.
func (w world) bound(l luck) (gain float64) {
	gain = 1
	for k := 1; k <= MaxGuesses; k++ {
		tokens, all := 1.0, 1.0
		for range k {
			all *= l.p
			tokens += all
		}
		gain = max(gain, tokens*w.cost(1)/(w.cost(k+1)+l.think))
	}
	return gain
}

func names(n int) []string { return []string{"a", "b", "c"}[:n] }

func TestGuessesThatAreWrongCostAlmostNothing(t *testing.T) {
	for _, c := range []struct {
		name string
		world
	}{
		{"modest", world{linear(0.6), []luck{{p: 0, says: 0.3}}, 0}},
		{"boastful", world{linear(0.6), []luck{{p: 0, says: 0.97}}, 0.05}},
		{"dear", world{linear(0.6), []luck{{p: 0.05, says: 0.9, think: 0.08}}, 0.05}},
		{"very dear", world{linear(0.9), []luck{{p: 0.05, says: 0.9, think: 0.4}}, 0.05}},
		{"from drives", world{union, []luck{{p: 0.2, says: 0.9}}, 0.05}},
		{"two", world{union, []luck{{p: 0, says: 0.9}, {p: 0.1, says: 0.9, think: 0.05}}, 0.05}},
	} {
		worst, sum := 0.0, 0.0
		for seed := range uint64(20) {
			took, plain := c.decode(t, NewChooser(names(len(c.arms)), 0), 256, seed)
			// The noise of the passes themselves is nobody's loss.
			worst, sum = max(worst, took/plain-1), sum+took/plain-1
		}
		t.Logf("%-12s loses %.1f%% on average, %.1f%% at worst", c.name, 5*sum, 100*worst)
		if sum/20 > 0.03 {
			t.Errorf("%s: loses %.1f%% on average", c.name, 5*sum)
		}
	}
}

// TestWhatGuessingMayLoseIsBounded holds every world to the account: a share of the time, a
// few tokens, and the two calls of each proposer whose time nobody knew.
func TestWhatGuessingMayLoseIsBounded(t *testing.T) {
	for _, c := range []struct {
		name string
		world
	}{
		{"boastful", world{linear(0.95), []luck{{p: 0, says: 0.97}}, 0}},
		{"calls that cost a little each", world{linear(0.6), []luck{{p: 0, says: 0.1, think: 0.03}}, 0}},
		{"calls that cost more than they give", world{linear(0.2), []luck{{p: 0.95, says: 0.9, think: 2.5}}, 0}},
		{"calls of ten tokens' time", world{linear(0.9), []luck{{p: 0.05, says: 0.9, think: 2.5}}, 0}},
		{"from drives", world{union, []luck{{p: 0.2, says: 0.9}}, 0}},
		{"three", world{union, []luck{{p: 0, says: 0.9}, {p: 0.1, says: 0.9, think: 0.05}, {p: 0, says: 0.99, think: 0.1}}, 0}},
		{"right, then wrong", world{union, []luck{{p: 0.95, says: 0.9, turns: 100}}, 0}},
	} {
		unknown := 0.0
		for _, l := range c.arms {
			unknown += 2 * l.think
		}
		for _, tokens := range []int{64, 256, 2048} {
			for seed := range uint64(10) {
				took, plain := c.decode(t, NewChooser(names(len(c.arms)), 0), tokens, seed)
				if beyond := (took - plain - lossShare*took - unknown) / c.cost(1); beyond > 2.5 {
					t.Errorf("%s, %d tokens: the time of %.1f tokens was lost beyond the share", c.name, tokens, beyond)
					break
				}
			}
		}
	}
}

func TestGuessesThatAreRightAreUsed(t *testing.T) {
	for _, c := range []struct {
		name string
		world
		best int // arm
	}{
		{"cheap rows", world{linear(0.15), []luck{{p: 0.9, says: 0.8}}, 0.05}, 0},
		{"dear rows", world{linear(0.5), []luck{{p: 0.9, says: 0.8}}, 0.05}, 0},
		{"from drives", world{union, []luck{{p: 0.95, says: 0.9}}, 0.05}, 0},
		{"two, the second better", world{linear(0.3), []luck{{p: 0.3, says: 0.8}, {p: 0.95, says: 0.9, think: 0.02}}, 0.05}, 1},
		{"shy", world{linear(0.3), []luck{{p: 0.9, says: 0.2}}, 0.05}, 0},
	} {
		got, want := 0.0, c.bound(c.arms[c.best])
		for seed := range uint64(20) {
			took, plain := c.decode(t, NewChooser(names(len(c.arms)), 0), 512, seed)
			got += plain / took / 20
		}
		t.Logf("%-22s %.2f times as fast, at most %.2f", c.name, got, want)
		if got < 0.85*want {
			t.Errorf("%s: %.2f times as fast as plain decoding, %.2f is possible", c.name, got, want)
		}
	}
}

func TestTheChooserFollowsATextThatTurns(t *testing.T) {
	w := world{linear(0.3), []luck{{p: 0.95, says: 0.9, turns: 256, then: 0}}, 0.05}
	took, plain := w.decode(t, NewChooser(names(1), 0), 512, 1)
	if gain := plain / took; gain < 1.25 {
		t.Errorf("friendly, then not: %.2f times as fast", gain)
	}
	w.arms[0] = luck{p: 0, says: 0.9, turns: 256, then: 0.95}
	took, plain = w.decode(t, NewChooser(names(1), 0), 768, 1)
	if gain := plain / took; gain < 1.25 {
		t.Errorf("unfriendly, then friendly: %.2f times as fast", gain)
	}
}

func TestForcedGuessesAreAlwaysChecked(t *testing.T) {
	c := NewChooser(names(2), 3)
	for range 50 {
		g, err := c.Next(5, func(i, k int) ([]Guess, error) {
			if i == 0 {
				return nil, nil
			}
			return make([]Guess, k), nil
		})
		if err != nil || len(g) != 3 {
			t.Fatalf("%d guesses, error %v", len(g), err)
		}
		c.Passed(1, 0, time.Second)
	}
	if g, _ := c.Next(1, func(_, k int) ([]Guess, error) { return make([]Guess, k), nil }); len(g) != 1 {
		t.Errorf("%d guesses where one has room", len(g))
	}
}

func TestAProposerThatFailsIsNotAskedAgain(t *testing.T) {
	for _, force := range []int{0, 2} {
		c, bad := NewChooser(names(2), force), errors.New("bad weights")
		var errs []error
		asked := []int{0, 0}
		for range 40 {
			g, err := c.Next(4, func(i, k int) ([]Guess, error) {
				asked[i]++
				if i == 0 {
					return nil, bad
				}
				return slices.Repeat([]Guess{{P: 0.9}}, k+3), nil // more than asked for
			})
			if err != nil {
				errs = append(errs, err)
			}
			if len(g) > 4 {
				t.Fatalf("%d guesses where 4 have room", len(g))
			}
			c.Passed(len(g)+1, len(g), time.Second)
		}
		if len(errs) != 1 || asked[0] != 1 || asked[1] < 20 {
			t.Errorf("force %d: errors %v, asked %v", force, errs, asked)
		}
	}
}

func TestTheAccountAddsUp(t *testing.T) {
	c, at := NewChooser([]string{"a"}, 2), time.Unix(0, 0)
	c.now = func() time.Time { return at }
	pass := func(limit, chosen, right int, took time.Duration) {
		if _, err := c.Next(limit, func(_, k int) ([]Guess, error) {
			at = at.Add(time.Second / 2)
			return make([]Guess, k), nil
		}); err != nil {
			t.Fatal(err)
		}
		c.Passed(chosen, right, took)
	}
	pass(0, 1, 0, time.Second)
	pass(2, 2, 1, 2*time.Second) // the first call loads, and counts for the proposer only
	before := c.Stats()
	pass(2, 1, 1, 2*time.Second) // the text ended with the first guess

	want := Stats{Passes: 3, Tokens: 4, Seconds: 5.5, Plain: 1, PlainSeconds: 1}
	a := ProposerStats{Name: "a", Asked: 2, Seconds: 1, Passes: 2, Checked: 4, Accepted: 2}
	a.At[0].Right, a.At[0].All, a.At[1].All = 2, 2, 1
	want.Proposers = []ProposerStats{a}
	if got := c.Stats(); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := want.Gain(); got != 4/5.5 {
		t.Errorf("gain %v", got)
	}
	last := Stats{Passes: 1, Tokens: 1, Seconds: 2.5}
	a = ProposerStats{Name: "a", Asked: 1, Seconds: 0.5, Passes: 1, Checked: 2, Accepted: 1}
	a.At[0].Right, a.At[0].All = 1, 1
	last.Proposers = []ProposerStats{a}
	if got := c.Stats().Sub(before); !reflect.DeepEqual(got, last) {
		t.Errorf("of the last pass %+v, want %+v", got, last)
	}
}
