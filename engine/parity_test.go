package engine

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/draft"
	"deltafin/engine/drive"
	"deltafin/engine/expert"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/engine/opt"
	"deltafin/engine/spine"
	"deltafin/golden"
)

var full = flag.Bool("full", false, "parity over every golden prompt instead of a few")

// variation is one way to run that must not change a bit.
type variation struct {
	name    string
	options Options
	split   func(n int) []int // how the tokens are cut into passes; nil: all at once
	setup   func() (undo func())
	slow    bool     // portable arithmetic: fewer prompts
	storage bool     // as scarce has it, where the switches of storage have something to do
	without []string // switches that are off
	run     func(t *testing.T, e *Engine, ids []int, split []int, from int) [][]float32
}

// replay feeds ids in passes of the given sizes and returns the logits rows of
// positions from and later.
func replay(t *testing.T, e *Engine, ids []int, split []int, from int) [][]float32 {
	t.Helper()
	s := e.NewSession()
	var rows [][]float32
	for _, n := range split {
		got, err := s.Try(context.Background(), ids[:n])
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if s.Position()+i >= from {
				rows = append(rows, slices.Clone(got[i]))
			}
		}
		if err := s.Keep(n); err != nil {
			t.Fatal(err)
		}
		ids = ids[n:]
	}
	return rows
}

// wander gets to the same place by detours: it forks, feeds rubbish to the fork,
// rolls rubbish back, keeps prefixes of what it tried, and abandons forks.
func wander(t *testing.T, e *Engine, ids []int, _ []int, from int) [][]float32 {
	t.Helper()
	rng := rand.New(rand.NewPCG(7, uint64(len(ids))))
	ctx, s := context.Background(), e.NewSession()
	var rows [][]float32
	rubbish := func(n int) []int {
		r := make([]int, n)
		for i := range r {
			r[i] = rng.IntN(e.Config().Vocab)
		}
		return r
	}
	for pos := 0; pos < len(ids); {
		switch rng.IntN(4) {
		case 0: // a fork that goes astray must not touch the original
			f := s.Fork()
			if _, err := f.Feed(ctx, rubbish(1+rng.IntN(5)), nil); err != nil {
				t.Fatal(err)
			}
		case 1: // go on with the fork instead of the original
			f := s.Fork()
			if _, err := s.Feed(ctx, rubbish(3), nil); err != nil {
				t.Fatal(err)
			}
			s = f
		default: // the right tokens, then rubbish; only the right ones are kept
			n := min(1+rng.IntN(9), len(ids)-pos)
			got, err := s.Try(ctx, append(slices.Clone(ids[pos:pos+n]), rubbish(rng.IntN(4))...))
			if err != nil {
				t.Fatal(err)
			}
			keep := rng.IntN(n + 1)
			for i := range keep {
				if pos+i >= from {
					rows = append(rows, slices.Clone(got[i]))
				}
			}
			if err := s.Keep(keep); err != nil {
				t.Fatal(err)
			}
			pos += keep
		}
	}
	return rows
}

// tiled runs all in one pass whose dense parts take 7 rows at a time.
func tiled(t *testing.T, e *Engine, ids []int, _ []int, from int) [][]float32 {
	t.Helper()
	e.model.TileRows = 7
	logits, err := e.model.Forward(context.Background(), k3.NewState(e.Config()), ids, k3.Pass{Logits: len(ids) - from})
	if err != nil {
		t.Fatal(err)
	}
	var rows [][]float32
	for r := range logits.Rows {
		rows = append(rows, logits.Row(r))
	}
	return rows
}

// nanoDraft is the directory of a draft model of K3-nano. The other miniatures go on without.
func nanoDraft(name string) string { return filepath.Join(golden.Dir(), "nano", name) }

// drafted generates the text with guesses on the way, and checks that it is the text.
func drafted(guesses int) func(t *testing.T, e *Engine, ids []int, _ []int, from int) [][]float32 {
	return func(t *testing.T, e *Engine, ids []int, _ []int, from int) (rows [][]float32) {
		t.Helper()
		s := e.NewSession()
		res, err := s.Generate(context.Background(), Request{
			Prompt: ids[:from+1], MaxNew: len(ids) - from,
			Logits: func(row []float32) {
				rows = append(rows, slices.Clone(row))
				if len(rows)%5 == 3 {
					s.Fork() // nobody notices
				}
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		if p := e.proposers; e.ck.Dir() == golden.ModelDir("nano") {
			if len(p) != 1 {
				t.Fatal("the proposer was left out")
			}
			d := res.Stats.Draft.Proposers[0]
			if p[0].Name() != "ngram" && guesses > 0 && len(rows) > 8 && d.Accepted == 0 {
				t.Errorf("asked %d times, %d of %d guesses accepted", d.Asked, d.Accepted, d.Checked)
			}
		}
		return rows
	}
}

func every(n int) func(int) []int {
	return func(total int) (s []int) {
		for ; total > n; total -= n {
			s = append(s, n)
		}
		return append(s, total)
	}
}

func random(seed uint64) func(int) []int {
	return func(total int) (s []int) {
		rng := rand.New(rand.NewPCG(seed, 1))
		for total > 0 {
			n := 1 + rng.IntN(min(total, 40))
			s, total = append(s, n), total-n
		}
		return s
	}
}

// turn turns switches off until undo.
func turn(off []string) (undo func()) {
	for _, s := range opt.All() {
		s.Set(!slices.Contains(off, s.Name))
	}
	return func() {
		for _, s := range opt.All() {
			s.Set(true)
		}
	}
}

// scarce is a golden set in memory for some of its dense weights, with copies of its experts
// on two further drives.
func scarce(t *testing.T, set string) Options {
	t.Helper()
	ctx, dir := context.Background(), golden.ModelDir(set)
	ck, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	l, err := Account(ck, Options{})
	if err != nil {
		t.Fatal(err)
	}
	spine, err := spine.Floor(ck, "")
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Memory: l.Floor + (l.Spine-spine)*3/4, Drive: drive.Options{Pace: map[string]drive.Pace{dir: {BytesPerSecond: 500e6}}}}
	var targets []expert.PlaceTarget
	for range 2 {
		d := t.TempDir()
		o.ExpertDirs, o.Drive.Pace[d] = append(o.ExpertDirs, d), drive.Pace{BytesPerSecond: 500e6}
		targets = append(targets, expert.PlaceTarget{Dir: d, Bytes: 1 << 30, Rate: 1})
	}
	p, err := expert.PlacePlan(ck, nil, 1, targets)
	if err != nil {
		t.Fatal(err)
	}
	drives := drive.NewSet(drive.Options{})
	defer drives.Close()
	for _, d := range p.Dirs {
		if err := expert.PlaceStage(ctx, ck, drives, d, expert.StageOptions{Reserve: -1}); err != nil {
			t.Fatal(err)
		}
	}
	return o
}

// effects counts what the switches of storage did in an engine, in bytes or reads.
func effects(e *Engine, copies []string, sum map[string]int64) {
	st, c := e.Storage(), e.model.Counters()
	reads := int64(0)
	for _, d := range st.Experts.Devices {
		reads += d.Reads
		if slices.Contains(copies, d.Name) {
			sum["balance-homes"] += d.Reads
		}
	}
	sum["split-reads"] += reads - c.Read/e.ck.ExpertLayout().ExpertBytes
	sum["read-ahead"] += c.Ahead
	sum["spine-ahead"] += st.Spine.Ahead
}

func variations() []variation {
	vs := []variation{
		{name: "1 thread", options: Options{Threads: 1}},
		{name: "2 threads", options: Options{Threads: 2}},
		{name: "5 threads", options: Options{Threads: 5}},
		{name: "1 row", split: every(1)},
		{name: "2 rows", split: every(2)},
		{name: "7 rows", split: every(7)},
		{name: "64 rows", split: every(64)},
		{name: "random rows 1", split: random(1)},
		{name: "random rows 2", split: random(2), options: Options{Threads: 2}},
		{name: "tiles of 7 rows", run: tiled},
		{name: "fork, roll back, replay", run: wander},
		{name: "experts never kept", options: Options{ExpertMemory: -1}},
		{name: "memory for 7 experts", options: Options{ExpertMemory: 7 * 80000}},
	}
	for _, name := range kernel.Implementations() {
		vs = append(vs, variation{name: name + " kernels", slow: name == "portable", setup: func() func() {
			before := kernel.Active()
			if err := kernel.Use(name); err != nil {
				panic(err)
			}
			return func() { _ = kernel.Use(before) }
		}})
	}
	for _, p := range [][2]string{{"lookup", "ngram"}, {"DSpark", nanoDraft("model-dspark")}, {"a text model", nanoDraft("model-text")}} {
		name, o := p[0], Options{Draft: []string{p[1]}, Warn: func(string) {}}
		for k := range draft.MaxGuesses + 1 {
			o.Guesses = k
			v := variation{name: fmt.Sprintf("%s, %d guesses", name, k), run: drafted(k), options: o}
			switch {
			case k == 0:
				v.name = name
			case k%3 == 1: // streamed, and in little memory
				v.options.ExpertMemory = -1
				v.options.Memory = 200 << 20
			case !*full:
				continue
			}
			vs = append(vs, v)
		}
	}
	var all []string
	for _, s := range opt.All() {
		all = append(all, s.Name)
		v := variation{name: s.Name + " off", without: []string{s.Name}, slow: s.Name == "assembly"}
		if slices.Contains(ofStorage, s.Name) {
			v.storage, v.split = true, random(4)
		}
		vs = append(vs, v)
	}
	return append(vs,
		variation{name: "scarce memory, three drives", storage: true, split: random(4)},
		variation{name: "every switch of storage off", storage: true, split: random(4), without: ofStorage},
		variation{name: "every switch off", without: all, slow: true, split: random(3)})
}

// ofStorage are the switches that [effects] counts. Without balance-homes no read is split.
var ofStorage = []string{"balance-homes", "read-ahead", "spine-ahead", "split-reads"}

// TestParity runs the golden prompts and their continuations in every way that
// must not matter and demands one hash, the frozen one.
func TestParity(t *testing.T) {
	hashes, err := golden.LoadHashes()
	if err != nil {
		t.Fatal(err)
	}
	few := map[string]bool{"tiny-a/len17": true, "tiny-b/len64": true, "tiny-b/len5": true, "nano/france": true, "nano/chat-think": true}
	quick := map[string]bool{"tiny-a/len5": true, "tiny-b/len17": true, "nano/planet": true}
	storage := map[string]Options{}
	for _, set := range golden.Sets {
		storage[set] = scarce(t, set)
	}
	for _, v := range variations() {
		t.Run(v.name, func(t *testing.T) {
			if v.setup != nil {
				defer v.setup()()
			}
			defer turn(v.without)()
			if v.split == nil {
				v.split = func(n int) []int { return []int{n} }
			}
			if v.run == nil {
				v.run = replay
			}
			n, did := 0, map[string]int64{}
			for _, set := range golden.Sets {
				if v.storage {
					v.options = storage[set]
				}
				e := openSet(t, set, v.options)
				cases, err := golden.Cases(set)
				if err != nil {
					t.Fatal(err)
				}
				for _, c := range cases {
					want := few
					if v.slow {
						want = quick
					}
					if !want[c.Key()] && (!*full || v.slow) {
						continue
					}
					n++
					ids := append(slices.Clone(c.PromptIDs), c.Greedy[:len(c.Greedy)-1]...)
					rows := v.run(t, e, ids, v.split(len(ids)), len(c.PromptIDs)-1)
					if err := hashes.Check(c.Key(), golden.HashRows(rows)); err != nil {
						t.Error(err)
					}
				}
				effects(e, v.options.ExpertDirs, did)
			}
			if n == 0 {
				t.Error("no prompt ran")
			}
			for _, name := range ofStorage {
				off := slices.Contains(v.without, name) || name == "split-reads" && slices.Contains(v.without, "balance-homes")
				if off && did[name] > 0 || v.storage && !off && did[name] == 0 {
					t.Errorf("%s is off: %v, and did %d", name, off, did[name])
				}
			}
			if *full {
				t.Logf("%-28s %2d prompts, one hash each", v.name, n)
			}
		})
	}
}

// shuffled hands experts out in random order.
type shuffled struct {
	k3.Experts
	rng *rand.Rand
}

func (s shuffled) Stream(ctx context.Context, layer int, ids []int32, use func(i int, e *k3.Expert) error, idle func() bool) error {
	for _, i := range s.rng.Perm(len(ids)) {
		if err := s.Experts.Stream(ctx, layer, ids[i:i+1], func(_ int, e *k3.Expert) error { return use(i, e) }, idle); err != nil {
			return err
		}
	}
	return nil
}

// TestArrivalOrderDoesNotMatter lets the experts of every layer come in random order.
func TestArrivalOrderDoesNotMatter(t *testing.T) {
	for _, set := range golden.Sets {
		e := openSet(t, set, Options{})
		e.model.Experts = shuffled{e.model.Experts, rand.New(rand.NewPCG(9, 9))}
		cases, err := golden.Cases(set)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cases[:5] {
			ids := append(slices.Clone(c.PromptIDs), c.Greedy[:len(c.Greedy)-1]...)
			rows := replay(t, e, ids, []int{len(ids)}, len(c.PromptIDs)-1)
			if got := golden.HashRows(rows); got != c.LogitsSHA256 {
				t.Errorf("%s: logits hash %s, frozen %s", c.Key(), got, c.LogitsSHA256)
			}
		}
	}
}

// TestLongContextIsOneHash goes over several segments of the attention (1024 positions
// each) in several ways: K3-nano, random tokens.
func TestLongContextIsOneHash(t *testing.T) {
	e := openSet(t, "nano", Options{})
	rng := rand.New(rand.NewPCG(11, 12))
	ids := make([]int, 2200)
	for i := range ids {
		ids[i] = rng.IntN(e.Config().Vocab)
	}
	hash := map[string]string{}
	for name, split := range map[string][]int{
		"at once": {2200}, "past the first segment": {1000, 1200}, "two segments and a bit": {2047, 1, 1, 151}, "of 64": every(64)(2200),
	} {
		hash[name] = golden.HashRows(replay(t, e, ids, split, 900))
	}
	for name, h := range hash {
		if h != hash["at once"] {
			t.Errorf("%s: logits hash %s, at once %s", name, h, hash["at once"])
		}
	}
}
