package drive

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestQueue runs the scripts of testdata/queue against a paced device in a bubble of
// fake time. Sizes are in MB of 1e6 bytes, rates in MB/s.
//
//	run [depth=D] [rate=R] [latency=L]
//	0ms submit NAME demand|ahead SIZE
//	5ms promote|cancel NAME
//	5ms expect demand|ahead SIZE
//	5ms rate R
//	5ms fail|close|stats
//	----
//	the log, with the time of each event
func TestQueue(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 1e9); err != nil { // a hole: reads cost little
		t.Fatal(err)
	}
	datadriven.RunTest(t, "testdata/queue", func(t *testing.T, td *datadriven.TestData) string {
		if td.Cmd != "run" {
			return "unknown command " + td.Cmd
		}
		depth, rate, latency := 1, 100, "0s"
		td.MaybeScanArgs(t, "depth", &depth)
		td.MaybeScanArgs(t, "rate", &rate)
		td.MaybeScanArgs(t, "latency", &latency)
		lag, err := time.ParseDuration(latency)
		if err != nil {
			return err.Error()
		}
		var out string
		synctest.Test(t, func(t *testing.T) {
			out = play(t, path, td.Input, depth, Pace{BytesPerSecond: float64(rate) * 1e6, Latency: lag})
		})
		return out
	})
}

func play(t *testing.T, path, script string, depth int, p Pace) string {
	begin := time.Now()
	type event struct {
		at   time.Duration
		what string
	}
	var mu sync.Mutex
	var events []event
	log := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, event{time.Since(begin), fmt.Sprintf(format, args...)})
	}
	names := map[int64]string{} // by offset
	s := NewSet(Options{
		Depth: depth, Buffered: true, Pace: map[string]Pace{filepath.Dir(path): p},
		Fault: func(_ string, off int64, _ int) error {
			mu.Lock()
			name := names[off]
			mu.Unlock()
			log("%s starts", name)
			return nil
		},
	})
	f := openFile(t, s, path)
	tickets := map[string]*Ticket{}
	class := map[string]Class{"demand": Demand, "ahead": Ahead}
	size := func(s string) int64 {
		n, err := strconv.ParseFloat(s, 64)
		if err != nil {
			t.Fatal(err)
		}
		return int64(n * 1e6)
	}
	for line := range strings.Lines(script) {
		w := strings.Fields(line)
		at, err := time.ParseDuration(w[0])
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(at - time.Since(begin))
		synctest.Wait()
		switch w[1] {
		case "submit":
			name, n := w[2], size(w[4])
			b, err := NewBuffer(n)
			if err != nil {
				t.Fatal(err)
			}
			off := int64(len(tickets)) * 1e6
			mu.Lock()
			names[off] = name
			mu.Unlock()
			tickets[name] = s.Submit(context.Background(), Read{File: f, Offset: off, Bytes: n, Into: b, Class: class[w[3]], Done: func(err error) {
				b.Free()
				for _, c := range []error{context.Canceled, ErrFailed, ErrClosed} {
					if errors.Is(err, c) {
						log("%s ends: %v", name, c)
						return
					}
				}
				if err != nil {
					log("%s ends: %v", name, err)
					return
				}
				log("%s is done", name)
			}})
		case "promote":
			tickets[w[2]].Promote()
		case "cancel":
			tickets[w[2]].Cancel()
		case "expect":
			log("expect %s %s: %v", w[2], w[3], f.dev.Expect(class[w[2]], size(w[3])).Round(100*time.Microsecond))
		case "rate":
			f.dev.pace.BytesPerSecond = float64(size(w[2]))
		case "fail":
			f.dev.Fail(syscall.EIO)
		case "close":
			s.Close()
		case "stats":
			st := f.dev.Stats()
			for _, a := range []struct {
				name string
				Account
			}{{"demand", st.Demand}, {"ahead", st.Ahead}} {
				log("%s: %d reads, %d bytes, waited %v, served %v", a.name, a.Reads, a.Bytes, a.Wait, a.Service)
			}
			log("busy %v, rate %.1f MB/s, latency %v, cancelled %d, promoted %d, discarded %d, errors %d",
				st.Busy, st.Rate/1e6, st.Latency.Round(100*time.Microsecond), st.Cancelled, st.Promoted, st.Discarded, st.Errors)
		default:
			t.Fatalf("unknown command %q", w[1])
		}
		synctest.Wait()
	}
	time.Sleep(time.Hour)
	s.Close()
	// Events of one moment come in no order that could be relied on.
	slices.SortStableFunc(events, func(a, b event) int {
		if a.at != b.at {
			return int(a.at - b.at)
		}
		return strings.Compare(a.what, b.what)
	})
	var out strings.Builder
	for _, e := range events {
		fmt.Fprintf(&out, "%v %s\n", e.at.Round(10*time.Microsecond), e.what)
	}
	return out.String()
}
