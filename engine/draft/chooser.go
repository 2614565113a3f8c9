package draft

import (
	"math"
	"time"
)

// MaxGuesses is the most tokens that are checked at once.
const MaxGuesses = 8

// Chooser decides, pass by pass, whose guesses are checked and how many. It goes by what
// it has measured: how long passes of so many rows take, how long proposers think, and how
// often guesses of a stated probability were right. Checking is worth it if it is expected to
// give more tokens per second than passes of one row.
//
// Once guessing has lost one token's time and lossShare of the time spent against plain
// decoding, nothing is asked. Within that a proposer that does not pay is tried again now and
// then. What it may lose is more by what the last try went beyond it, and by two calls of
// each proposer: the first loads, the second tells what a call takes.
type Chooser struct {
	force int // guesses to check always, 0 to decide
	now   func() time.Time
	arms  []arm
	pass  [MaxGuesses + 2]mean // seconds by rows
	slope mean                 // what a further row takes, in passes of one row
	lost  float64              // seconds that guessing has cost, less what it has won lately
	since int                  // passes since one with a single row

	stats Stats // but for the proposers'

	// of the pass under way
	arm     int
	guesses []Guess
	asking  float64 // seconds
}

const outlier = 2

const (
	lossShare = 0.015
	// rowShare is what a further row is taken to cost, in passes of one row, before any
	// is measured: with experts from drives most of a pass is theirs.
	rowShare = 0.6
	// firstBlock is how many guesses a proposer begins with; whole blocks that are right double
	// it.
	firstBlock = 2
	// margin is how much better guessing must look than not guessing.
	margin = 1.02
	// remeasure is after how many passes the plain one is measured again: often at first,
	// when caches are cold.
	remeasure, remeasureFirst = 64, 8
)

// arm is what is known of one proposer.
type arm struct {
	name   string
	failed bool
	most   int  // guesses that it is asked for at most: what it has shown to be worth
	asks   mean // seconds of a call
	gain   mean // what asking gave: its expected rate against the plain one, thinking included
	levels [levels]calibration
	stats  ProposerStats
}

// levels cut the probabilities that a proposer states into bands, finer towards 1.
const levels = 8

func level(p float32) int {
	return min(max(int(-math.Log2(1-min(float64(p), 0.9999))*1.2), 0), levels-1)
}

// calibration is how often guesses of a band were right, recent ones counting more.
type calibration struct{ right, all float64 }

const (
	priorWeight = 2    // guesses that the proposer's own estimate counts for
	forget      = 0.97 // per guess
)

func (c *calibration) add(right bool) {
	c.right, c.all = c.right*forget, c.all*forget+1
	if right {
		c.right++
	}
}

func (c *calibration) estimate(p float32) float64 {
	return (c.right + priorWeight*float64(p)) / (c.all + priorWeight)
}

// mean is a running mean of the last few values; weight is how many.
type mean struct{ value, weight float64 }

// add takes v into account, as no more than outlier times the mean: other processes
// and drives have their moments.
func (m *mean) add(v float64) {
	if m.weight >= 2 && m.value > 0 {
		v = min(v, outlier*m.value)
	}
	m.weight = min(m.weight+1, 6)
	m.value += (v - m.value) / m.weight
}

// Stats accounts for guessing.
type Stats struct {
	Proposers []ProposerStats `json:"proposers"`
	Passes    int             `json:"passes"`  // that decided tokens, but for the prompt's
	Tokens    int             `json:"tokens"`  // that they decided
	Seconds   float64         `json:"seconds"` // of passes and proposers, but for the first call of each, which loads

	Plain        int     `json:"plain_passes"` // with one row
	PlainSeconds float64 `json:"plain_seconds"`
}

// ProposerStats accounts for one proposer.
type ProposerStats struct {
	Name     string  `json:"name"`
	Asked    int     `json:"asked"`    // calls
	Seconds  float64 `json:"seconds"`  // of them
	Passes   int     `json:"passes"`   // that checked its guesses
	Checked  int     `json:"checked"`  // guesses
	Accepted int     `json:"accepted"` // of them
	// At counts by place in the block: those that were right, of those whose predecessors were.
	At [MaxGuesses]struct {
		Right int `json:"right"`
		All   int `json:"all"`
	} `json:"by_place"`
}

// Gain is how many tokens per second there were for each that passes of one row gave, 0
// if there were none of these to compare with.
func (s Stats) Gain() float64 {
	if s.Plain == 0 || s.Seconds == 0 {
		return 0
	}
	return float64(s.Tokens) * s.PlainSeconds / float64(s.Plain) / s.Seconds
}

// Sub returns the account since earlier.
func (s Stats) Sub(e Stats) Stats {
	s.Passes, s.Tokens, s.Seconds = s.Passes-e.Passes, s.Tokens-e.Tokens, s.Seconds-e.Seconds
	s.Plain, s.PlainSeconds = s.Plain-e.Plain, s.PlainSeconds-e.PlainSeconds
	for i := range e.Proposers {
		p, q := &s.Proposers[i], e.Proposers[i]
		p.Asked, p.Seconds, p.Passes, p.Checked, p.Accepted = p.Asked-q.Asked, p.Seconds-q.Seconds, p.Passes-q.Passes, p.Checked-q.Checked, p.Accepted-q.Accepted
		for j := range p.At {
			p.At[j].Right -= q.At[j].Right
			p.At[j].All -= q.At[j].All
		}
	}
	return s
}

// Stats returns the account so far.
func (c *Chooser) Stats() Stats {
	s := c.stats
	for i := range c.arms {
		s.Proposers = append(s.Proposers, c.arms[i].stats)
	}
	return s
}

// NewChooser decides among proposers of these names. force, if not 0, is how many guesses
// to check always, of the first that has any.
func NewChooser(names []string, force int) *Chooser {
	c := &Chooser{force: min(force, MaxGuesses), now: time.Now}
	for _, n := range names {
		c.arms = append(c.arms, arm{name: n, most: firstBlock, stats: ProposerStats{Name: n}})
	}
	return c
}

// seconds is the expected time of a pass of rows rows, 0 as long as none was measured: what
// such passes took, and what others say of it if that is long ago.
func (c *Chooser) seconds(rows int) float64 {
	one, own := c.pass[1].value, c.pass[rows]
	if rows == 1 {
		return one
	}
	line := one * (1 + (rowShare+c.slope.value*c.slope.weight)/(1+c.slope.weight)*float64(rows-1))
	return (line + own.value*own.weight) / (1 + own.weight)
}

// measured takes the time of a pass into account.
func (c *Chooser) measured(rows int, seconds float64) {
	for i := range c.pass {
		if i > 1 && i != rows {
			c.pass[i].weight *= fade
		}
	}
	c.pass[rows].add(seconds)
	if one := c.pass[1].value; rows > 1 && one > 0 {
		c.slope.add((seconds/one - 1) / float64(rows-1))
	}
}

// fade is how much of its weight a measurement keeps over a pass of other size.
const fade = 0.98

// best is how many of the guesses to check, and the expected rate of tokens against that
// of plain passes.
func (c *Chooser) best(a *arm, guesses []Guess) (k int, gain float64) {
	tokens, all := 1.0, 1.0
	for i, g := range guesses {
		all *= a.levels[level(g.P)].estimate(g.P)
		tokens += all
		if r := tokens * c.seconds(1) / c.seconds(i+2); r > gain {
			k, gain = i+1, r
		}
	}
	return k, gain
}

// Ask calls a proposer for up to k guesses.
type Ask func(proposer, k int) ([]Guess, error)

// Next decides which guesses, at most limit, the next pass checks; none for a pass of one
// row. It returns the error of a proposer that failed, once, and goes on without it.
// [Chooser.Passed] must follow.
func (c *Chooser) Next(limit int, ask Ask) (guesses []Guess, err error) {
	limit = min(limit, MaxGuesses)
	c.guesses, c.asking, c.arm = nil, 0, -1
	call := func(i, k int) []Guess {
		a, began := &c.arms[i], c.now()
		g, e := ask(i, k)
		took := c.now().Sub(began).Seconds()
		a.stats.Asked++
		a.stats.Seconds += took
		if a.stats.Asked > 1 { // the first loads, which says nothing of others
			c.asking += took
			a.asks.add(took)
		}
		if e != nil {
			a.failed, err = true, e
			return nil
		}
		return g[:min(len(g), k)]
	}
	if limit <= 0 {
		return nil, nil
	}
	if c.force > 0 {
		for i := range c.arms {
			if c.arms[i].failed {
				continue
			}
			if g := call(i, min(c.force, limit)); len(g) > 0 {
				c.arm, c.guesses = i, g
				return g, err
			}
		}
		return nil, err
	}
	one := c.seconds(1)
	if one == 0 || c.since >= min(remeasure, remeasureFirst<<min(c.stats.Plain, 3)) {
		return nil, nil // a plain pass, to know what it costs
	}
	room := c.room()
	if room < 0 {
		return nil, nil
	}
	most := 0.0 // the best expected rate so far, thinking included
	var probe []Guess
	prober := -1
	for i := range c.arms {
		a := &c.arms[i]
		// One that has not paid of late is asked only within what may be lost, and none
		// that is not likely to beat what is there.
		if a.failed || a.gain.weight > 0 && (a.gain.value < margin && a.asks.value > room*probeShare || a.gain.value < most) {
			continue
		}
		before := c.asking
		g := call(i, min(limit, a.most))
		if len(g) == 0 {
			continue
		}
		k, gain := c.best(a, g)
		gain *= c.seconds(k+1) / (c.seconds(k+1) + c.asking - before)
		a.gain.add(gain)
		if gain > margin && gain > most {
			most, c.arm, c.guesses = gain, i, g[:k]
		}
		if probe == nil {
			probe, prober = g[:1], i
		}
	}
	if c.arm < 0 && probe != nil {
		a := &c.arms[prober]
		right := a.levels[level(probe[0].P)].estimate(probe[0].P)
		if c.seconds(2)-(1+right)*one < room {
			c.arm, c.guesses = prober, probe
		}
	}
	return c.guesses, err
}

// probeShare is how much of what may be lost a call may cost that is not expected to pay.
const probeShare = 0.25

// room is how many seconds guessing may still lose.
func (c *Chooser) room() float64 { return c.seconds(1) + lossShare*c.stats.Seconds - c.lost }

// Passed tells how many tokens were chosen from the pass, how many of them had been guessed,
// which are the first ones, and how long it took. There is one more that was not, unless the
// text ended with a guess.
func (c *Chooser) Passed(chosen, right int, took time.Duration) {
	rows := len(c.guesses) + 1
	c.measured(rows, took.Seconds())
	c.stats.Seconds += took.Seconds() + c.asking
	c.since++
	if rows == 1 {
		c.since = 0
		c.stats.Plain++
		c.stats.PlainSeconds += took.Seconds()
	}
	c.stats.Passes++
	c.stats.Tokens += chosen
	one := c.seconds(1)
	c.lost += c.asking
	if one > 0 {
		c.lost = max(c.lost+c.seconds(rows)-float64(chosen)*one, 0)
	}
	if c.arm < 0 {
		return
	}
	a := &c.arms[c.arm]
	a.stats.Passes++
	a.stats.Checked += len(c.guesses)
	a.stats.Accepted += right
	switch {
	case right == 0:
		a.most = max(a.most/2, firstBlock)
	case right >= a.most:
		a.most = min(2*a.most, MaxGuesses)
	}
	for i, g := range c.guesses[:min(chosen, len(c.guesses))] {
		a.levels[level(g.P)].add(i < right)
		a.stats.At[i].All++
		if i < right {
			a.stats.At[i].Right++
		}
	}
}
