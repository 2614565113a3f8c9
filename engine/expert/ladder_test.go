package expert

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/k3"
	"deltafin/engine/synth"
)

var record = flag.String("record", "", "write the rows of the drive ladder as JSON to this `file`")

// ladderRow is one layout of copies of a layer's experts over drives.
type ladderRow struct {
	Layout     string    `json:"layout"`
	Rates      []float64 `json:"drive_bytes_per_second"` // one per drive
	Bytes      int64     `json:"bytes"`                  // of the layer's experts
	Model      float64   `json:"model_seconds"`          // Bytes over the sum of Rates
	Balanced   float64   `json:"balanced_over_model"`
	Unbalanced float64   `json:"unbalanced_over_model"`
}

// rungs are the rates of the drives of a ladder, in bytes per second.
var rungs = []float64{120e6, 80e6, 60e6, 40e6}

// ladderCheckpoint has MoE layers of 64 experts of 0.4 MB, large enough for rates to be
// measured.
func ladderCheckpoint(t testing.TB, layers int) *checkpoint.Checkpoint {
	t.Helper()
	p, err := synth.Preset("tiny")
	if err != nil {
		t.Fatal(err)
	}
	p.Layers, p.Experts, p.TopK, p.MoEInter, p.Latent = 1+layers, 64, 16, 512, 512
	dir := filepath.Join(t.TempDir(), "model")
	if err := synth.Write(t.Context(), dir, p, nil); err != nil {
		t.Fatal(err)
	}
	ck, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ck.Close() })
	return ck
}

// twins links a checkpoint's shards into n more directories.
func twins(t testing.TB, ck *checkpoint.Checkpoint, n int) (dirs []string) {
	t.Helper()
	for range n {
		dir := t.TempDir()
		for i := range ck.Files() {
			if err := os.Link(ck.Path(i), filepath.Join(dir, filepath.Base(ck.Path(i)))); err != nil {
				t.Fatal(err)
			}
		}
		dirs = append(dirs, dir)
	}
	return dirs
}

// ladder opens a source over the checkpoint on a drive of the first rung and dirs on
// the next.
func ladder(t testing.TB, ck *checkpoint.Checkpoint, dirs []string) *Source {
	t.Helper()
	d := drive.Options{Buffered: true, Warn: func(string) {}, Pace: map[string]drive.Pace{ck.Dir(): {BytesPerSecond: rungs[0]}}}
	for i, dir := range dirs {
		d.Pace[dir] = drive.Pace{BytesPerSecond: rungs[i+1]}
	}
	drives := drive.NewSet(d)
	t.Cleanup(drives.Close)
	s, err := Open(ck, drives, Options{Dirs: dirs, Slots: 40, Reorder: 64})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// timed reads experts and returns how long it took.
func timed(t testing.TB, s *Source, ids []int32) time.Duration {
	t.Helper()
	begin := time.Now()
	if err := s.Stream(t.Context(), 1, ids, func(int, *k3.Expert) error { return nil }, nil); err != nil {
		t.Fatal(err)
	}
	return time.Since(begin)
}

func sum(xs []float64) (s float64) {
	for _, x := range xs {
		s += x
	}
	return s
}

func upTo(n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(i)
	}
	return ids
}

// TestDriveLadder reads a whole layer from one to four drives, in fake time. The
// model is what no placement can beat: bytes over the sum of the rates.
func TestDriveLadder(t *testing.T) {
	ck := ladderCheckpoint(t, 1)
	dirs := twins(t, ck, len(rungs)-1)
	all := upTo(64)
	var rows []ladderRow
	check := func(name string, dirs []string) {
		synctest.Test(t, func(t *testing.T) {
			s := ladder(t, ck, dirs)
			n := 1 + len(dirs)
			model := float64(len(all)) * float64(s.n) / sum(rungs[:n])
			for range 3 {
				timed(t, s, all) // rates become known
			}
			on := timed(t, s, all).Seconds() / model
			balanceHomes.Set(false)
			off := timed(t, s, all).Seconds() / model
			balanceHomes.Set(true)
			rows = append(rows, ladderRow{name, rungs[:n], int64(len(all)) * int64(s.n), model, on, off})
			t.Logf("%-22s %d drives: %.3f of the model's %.0f ms; without the balancer %.3f", name, n, on, model*1e3, off)
			if on > 1.10 || on < 0.99 {
				t.Errorf("%s, %d drives: %.3f times the model's time", name, n, on)
			}
		})
	}
	for n := range rungs {
		check("full mirrors", dirs[:n])
	}

	// Copies that follow the plan, each drive with room for little more than its share.
	var targets []PlaceTarget
	each := packedBytes(1, ck.ExpertLayout().ExpertBytes)
	for _, r := range rungs[1:] {
		targets = append(targets, PlaceTarget{t.TempDir(), 64 * each * int64(r/1e6) / 280, r})
	}
	plan, err := PlacePlan(ck, nil, rungs[0], targets)
	if err != nil {
		t.Fatal(err)
	}
	var partial []string
	for _, d := range plan.Dirs {
		mustStage(t, ck, d)
		partial = append(partial, d.Dir)
	}
	check("proportional placement", partial)

	if *record != "" && !t.Failed() {
		text, err := json.MarshalIndent(rows, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(*record, append(text, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestWhatSplittingIsWorth reads small unions, as decode has them, with and without
// splits, in fake time.
func TestWhatSplittingIsWorth(t *testing.T) {
	ck := ladderCheckpoint(t, 1)
	dirs := twins(t, ck, len(rungs)-1)
	for n := 2; n <= len(rungs); n++ {
		synctest.Test(t, func(t *testing.T) {
			s := ladder(t, ck, dirs[:n-1])
			rng := rand.New(rand.NewPCG(1, 2))
			for range 3 {
				timed(t, s, upTo(64))
			}
			var took [2]float64
			const streams = 40
			for range streams {
				ids := upTo(64)
				rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
				ids = ids[:16]
				slices.Sort(ids)
				for on := range took {
					splitReads.Set(on == 1)
					took[on] += timed(t, s, ids).Seconds() / (16 * float64(s.n) / sum(rungs[:n])) / streams
				}
			}
			splitReads.Set(true)
			t.Logf("16 experts, %d drives: %.3f of the model whole, %.3f split, ratio %.3f", n, took[0], took[1], took[1]/took[0])
			if took[1] > 0.98*took[0] {
				t.Errorf("%d drives: splits are not worth their trouble", n)
			}
		})
	}
}

// TestWhatReadAheadIsWorth decodes on one drive, in fake time: a layer reads 16 experts
// in 56 ms and computes for 36, of which 20 are dense and come after the experts.
// Hints are right with some probability, and are given while the layer before streams.
func TestWhatReadAheadIsWorth(t *testing.T) {
	ck := ladderCheckpoint(t, 2)
	for _, c := range []struct {
		right float64
		most  float64 // of the time without
	}{{1, 0.85}, {0.8, 0.90}, {0.6, 0.97}, {0.2, 1.03}} {
		synctest.Test(t, func(t *testing.T) {
			s := ladder(t, ck, nil)
			s.o.Slots, s.o.AheadSlots, s.o.Reorder = 20, 10, 4
			timed(t, s, upTo(64))
			var took [2]time.Duration
			for on := range took {
				readAhead.Set(on == 1)
				rng := rand.New(rand.NewPCG(5, 5))
				route := func() []int32 {
					var ids []int32
					for _, id := range rng.Perm(64)[:16] {
						ids = append(ids, int32(id))
					}
					slices.Sort(ids)
					return ids
				}
				begin := time.Now()
				next := route()
				for pass := range 40 {
					ids := next
					next = route()
					hints := slices.Clone(next)
					for i := range hints {
						for rng.Float64() > c.right && slices.Contains(next, hints[i]) {
							hints[i] = rng.Int32N(64)
						}
					}
					hinted := false
					err := s.Stream(t.Context(), 1+pass%2, ids, func(int, *k3.Expert) error {
						time.Sleep(time.Millisecond)
						return nil
					}, func() bool {
						defer func() { hinted = true }()
						if !hinted {
							s.Hint(1+(pass+1)%2, hints)
						}
						return !hinted
					})
					if err != nil {
						t.Fatal(err)
					}
					time.Sleep(20 * time.Millisecond)
				}
				took[on] = time.Since(begin)
			}
			readAhead.Set(true)
			k := s.Counters()
			ratio := took[1].Seconds() / took[0].Seconds()
			t.Logf("%.0f%% of the hints are right: %v a layer without, %v with, ratio %.3f; %.1f%% wasted; precision %.2f", 100*c.right, took[0]/40, took[1]/40, ratio, 100*float64(k.Wasted)/float64(k.Union), s.Stats().Layers[0].Precision)
			if ratio > c.most {
				t.Errorf("read-ahead takes %.3f of the time, at most %.2f is allowed", ratio, c.most)
			}
			identity(t, k)
			if n := s.drives.Devices()[0].Stats().Promoted; c.right == 1 && n == 0 {
				t.Error("no queued read was promoted when it was demanded")
			}
		})
	}
}

// Experts in memory take no slot: they must not keep reads behind them from starting.
func TestResidentExpertsHoldNoReadsUp(t *testing.T) {
	ck := ladderCheckpoint(t, 1)
	synctest.Test(t, func(t *testing.T) {
		drives := drive.NewSet(drive.Options{Buffered: true, Pace: map[string]drive.Pace{ck.Dir(): {Latency: 10 * time.Millisecond}}})
		t.Cleanup(drives.Close)
		s, err := Open(ck, drives, Options{Slots: 2, Reorder: 1, Resident: 8 * SlotBytes(ck)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		timed(t, s, upTo(9)[1:])
		if got := timed(t, s, upTo(10)); got != 10*time.Millisecond {
			t.Errorf("two reads took %v, both fit the slots and take 10ms", got)
		}
	})
}

// A cancelled stream waits for the reads in flight, not for those in the queue.
func TestCancelDropsTheQueue(t *testing.T) {
	ck := ladderCheckpoint(t, 1)
	synctest.Test(t, func(t *testing.T) {
		s := ladder(t, ck, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		begin := time.Now()
		err := s.Stream(ctx, 1, upTo(64), func(int, *k3.Expert) error { return nil }, nil)
		read := time.Duration(float64(s.n) / rungs[0] * 1e9)
		if took := time.Since(begin); !errors.Is(err, context.DeadlineExceeded) || took > 5*time.Millisecond+4*read {
			t.Errorf("returned %v after %v, a read takes %v and 4 are in flight", err, took, read)
		}
		identity(t, s.Counters())
	})
}
