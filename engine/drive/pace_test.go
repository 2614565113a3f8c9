package drive

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// paced reads n times 0.1 MB from each of the directories at once and returns the
// wall time.
func paced(t *testing.T, s *Set, dirs []string, n int) time.Duration {
	var wg sync.WaitGroup
	begin := time.Now()
	for _, dir := range dirs {
		f := openFile(t, s, filepath.Join(dir, "f"))
		for range n {
			b := newBuffer(t, 1e5)
			wg.Add(1)
			s.Submit(context.Background(), Read{File: f, Bytes: 1e5, Into: b, Done: func(err error) {
				defer wg.Done()
				if err != nil {
					t.Error(err)
				}
			}})
		}
	}
	wg.Wait()
	return time.Since(begin)
}

func TestPacedDrivesKeepTheirPaceAndAddUp(t *testing.T) {
	for _, c := range []struct {
		name  string
		depth int
		pace  Pace
		dirs  int
		reads int
		want  time.Duration
	}{
		{"one drive", 4, Pace{BytesPerSecond: 10e6}, 1, 30, 300 * time.Millisecond},
		{"one drive, one read at a time", 1, Pace{BytesPerSecond: 10e6}, 1, 30, 300 * time.Millisecond},
		{"four drives", 4, Pace{BytesPerSecond: 10e6}, 4, 30, 300 * time.Millisecond},
		{"latency is hidden by reads in flight", 4, Pace{BytesPerSecond: 10e6, Latency: 20 * time.Millisecond}, 1, 30, 320 * time.Millisecond},
		{"latency is not hidden without", 1, Pace{BytesPerSecond: 20e6, Latency: 10 * time.Millisecond}, 1, 20, 300 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			dirs, paces := pacedDirs(t, c.dirs, c.pace)
			synctest.Test(t, func(t *testing.T) {
				s := NewSet(Options{Depth: c.depth, Buffered: true, Pace: paces})
				defer s.Close()
				if took := paced(t, s, dirs, c.reads); took != c.want {
					t.Errorf("took %v, the pace wants %v", took, c.want)
				}
			})
		})
	}
}

func pacedDirs(t *testing.T, n int, p Pace) (dirs []string, paces map[string]Pace) {
	root := t.TempDir()
	paces = map[string]Pace{}
	for i := range n {
		dir := filepath.Join(root, string(rune('a'+i)))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 1e5), 0o600); err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, dir)
		paces[dir] = p
	}
	return dirs, paces
}

// No run may be early. On a busy machine a run can be late, so the best of a few
// counts: within 5% ends the search, beyond 15% is no pace.
func TestPaceHoldsInRealTime(t *testing.T) {
	const want = 300 * time.Millisecond
	dirs, paces := pacedDirs(t, 1, Pace{BytesPerSecond: 10e6})
	best := time.Duration(1 << 62)
	for range 8 {
		s := newSet(t, Options{Buffered: true, Pace: paces})
		took := paced(t, s, dirs, 30)
		if took < want*98/100 {
			t.Fatalf("took %v, the pace allows %v", took, want)
		}
		if best = min(best, took); best <= want*105/100 {
			break
		}
	}
	if best > want*115/100 {
		t.Errorf("took %v at best, the pace wants %v", best, want)
	}
}

// A test double that lost what sleeps overrun would be slower the smaller its reads.
func TestPaceForgivesALateWakeUpAndNoIdleTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pacer{Pace: Pace{BytesPerSecond: 1e6}}
		first := p.reserve(1000)
		time.Sleep(1500 * time.Microsecond) // woken 0.5 ms late
		first.wait()
		second := p.reserve(1000)
		if got := second.at.Sub(first.at); got != time.Millisecond {
			t.Errorf("the second read ends %v after the first", got)
		}
		second.wait()
		time.Sleep(time.Second)
		third := p.reserve(1000)
		if got := third.at.Sub(second.at); got != time.Second+time.Millisecond {
			t.Errorf("after a second of idleness a read ends %v after the last", got)
		}
	})
}
