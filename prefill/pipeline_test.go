package prefill

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestPipelineSpecification runs testdata/pipeline: experts arrive in the order that
// the input says; the output is what the pipeline then does.
func TestPipelineSpecification(t *testing.T) {
	datadriven.RunTest(t, "testdata/pipeline", func(t *testing.T, d *datadriven.TestData) string {
		var n int
		var p Pipeline
		d.ScanArgs(t, "experts", &n)
		d.ScanArgs(t, "window", &p.Window)
		d.ScanArgs(t, "reorder", &p.Reorder)
		q := p.queue(n)
		var out strings.Builder
		act := func() {
			for {
				if q.mayStart() {
					fmt.Fprintf(&out, " start %d,", q.started)
					q.started++
				} else if i := q.usable(); i >= 0 {
					fmt.Fprintf(&out, " use %d,", i)
					q.use(i)
				} else if q.used == n {
					fmt.Fprintln(&out, " end")
					return
				} else {
					fmt.Fprintln(&out, " wait")
					return
				}
			}
		}
		fmt.Fprint(&out, "at first:")
		act()
		for line := range strings.Lines(d.Input) {
			var i int
			if _, err := fmt.Sscanf(line, "arrive %d", &i); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&out, "%d arrives:", i)
			q.arrived[i] = true
			act()
		}
		return out.String()
	})
}

// TestPipelineUsesEachExpertOnceInsideItsBounds arrives in random order from other
// goroutines.
func TestPipelineUsesEachExpertOnceInsideItsBounds(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		n := 1 + rng.IntN(50)
		p := Pipeline{Window: 1 + rng.IntN(9), Reorder: 1 + rng.IntN(9)}
		started, used := 0, make([]bool, n)
		err := p.Run(context.Background(), n, func(i int, done func(error)) {
			if i != started {
				t.Fatalf("started %d, not %d", i, started)
			}
			started++
			delay := time.Duration(rng.IntN(200)) * time.Microsecond
			go func() { time.Sleep(delay); done(nil) }()
		}, func(i int) error {
			inFlight := started
			for _, u := range used {
				if u {
					inFlight--
				}
			}
			lowest := slices.Index(used, false)
			if used[i] || inFlight > p.Window || i >= lowest+p.Reorder {
				t.Fatalf("%+v: used %d with %d in flight and %d the lowest", p, i, inFlight, lowest)
			}
			used[i] = true
			return nil
		}, func() {})
		if err != nil || slices.Contains(used, false) {
			t.Fatalf("error %v, used %v", err, used)
		}
	}
}

// TestPipelineWorksWhileItWaits: idle work is done only while nothing can be used, and a
// read that lands meanwhile is used before more of it.
func TestPipelineWorksWhileItWaits(t *testing.T) {
	var log []string
	var land func(error)
	pieces := 3
	p := Pipeline{Window: 1, Idle: func() bool {
		if pieces == 0 {
			return false
		}
		pieces--
		log = append(log, "idle")
		if pieces == 1 {
			land(nil)
		}
		return true
	}}
	err := p.Run(context.Background(), 2, func(i int, done func(error)) {
		log = append(log, fmt.Sprint("start ", i))
		if land = done; i == 1 {
			done(nil)
		}
	}, func(i int) error {
		log = append(log, fmt.Sprint("use ", i))
		return nil
	}, func() {})
	if got, want := strings.Join(log, ", "), "start 0, idle, idle, use 0, start 1, use 1"; got != want || err != nil {
		t.Errorf("%s (error %v), want %s", got, err, want)
	}
}

// TestPipelineEndsCleanly fails and cancels at random moments: Run returns only when
// everything it started has landed.
func TestPipelineEndsCleanly(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for round := range 200 {
		n, at := 30, rng.IntN(30)
		ctx, cancel := context.WithCancel(context.Background())
		p := Pipeline{Window: 1 + rng.IntN(6), Reorder: 1 + rng.IntN(6)}
		started, used, last, landed := 0, 0, false, make(chan int, n)
		broken := errors.New("broken")
		err := p.Run(ctx, n, func(i int, done func(error)) {
			started++
			var err error
			if round%3 == 0 && i == at {
				err = broken
			}
			go func() { landed <- i; done(err) }()
		}, func(i int) error {
			used++
			last = last || i == at && used == n
			if i == at && round%3 == 1 {
				return broken
			}
			if i == at && round%3 == 2 {
				cancel()
			}
			return nil
		}, func() {})
		cancel()
		if len(landed) != started {
			t.Fatalf("%d of %d had landed", len(landed), started)
		}
		want := broken
		if round%3 == 2 {
			want = context.Canceled
		}
		if last && round%3 == 2 {
			want = nil // cancelled after the last one was used
		}
		if !errors.Is(err, want) || want == nil && err != nil {
			t.Fatalf("round %d: %v, want %v", round, err, want)
		}
	}
}
