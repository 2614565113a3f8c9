package expert

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"deltafin/engine/checkpoint"

	"github.com/cockroachdb/datadriven"
)

// TestSimulate runs testdata/simulate: each line of the input is a pass of one layer,
// the ids of its rows separated by /.
//
//	simulate experts=N topk=K caches=(1,2) [drives=(rate:room,...)]
//
// Experts have 1 GB, cache sizes and rooms are in GB, rates in GB/s.
func TestSimulate(t *testing.T) {
	datadriven.RunTest(t, "testdata/simulate", func(t *testing.T, d *datadriven.TestData) string {
		var experts, topK int
		d.ScanArgs(t, "experts", &experts)
		d.ScanArgs(t, "topk", &topK)
		o := SimulateOptions{ExpertBytes: int64(1e9) / packedBlock * packedBlock}
		for _, a := range d.CmdArgs {
			for _, v := range a.Vals {
				switch a.Key {
				case "caches":
					var n int64
					fmt.Sscan(v, &n)
					o.Caches = append(o.Caches, n*o.ExpertBytes)
				case "drives":
					var rate float64
					var room int64
					fmt.Sscanf(v, "%g:%d", &rate, &room)
					o.Drives = append(o.Drives, SimDrive{v, rate * float64(o.ExpertBytes), room * o.ExpertBytes})
				}
			}
		}
		var b bytes.Buffer
		w, err := NewTraceWriter(&b, &checkpoint.Config{Layers: 1, Experts: experts, TopK: topK}, [32]byte{})
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(d.Input) {
			var ids []int32
			for _, f := range strings.FieldsFunc(line, func(r rune) bool { return r == '/' || r == ' ' || r == '\n' }) {
				var id int32
				fmt.Sscan(f, &id)
				ids = append(ids, id)
			}
			if err := w.Write(0, ids); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		r, err := NewTraceReader(&b)
		if err != nil {
			return err.Error()
		}
		defer r.Close()
		s, err := Simulate(r, o)
		if err != nil {
			return err.Error()
		}
		var out strings.Builder
		if err := s.WriteText(&out); err != nil {
			t.Fatal(err)
		}
		return out.String()
	})
}

// Belady's cache is the best of its size; a cache for all experts reads each once;
// a larger cache never reads more but for LRU on odd traces.
func TestNoCacheBeatsBelady(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 50 {
		m := simulator{total: 30, per: 10}
		passes := 2 + rng.IntN(40)
		m.half = passes / 2
		seen := map[int32]bool{}
		fresh := int64(0)
		for p := range passes {
			for l := range 3 {
				var keys []int32
				for k := range int32(10) {
					if rng.IntN(4) < 1 {
						key := int32(l)*10 + k
						keys = append(keys, key)
						if !seen[key] && p >= m.half {
							fresh++
						}
						seen[key] = true
					}
				}
				m.log = append(m.log, access{p, keys})
			}
		}
		last := m.belady(0)
		if last != m.lru(0) || last != m.pinned(0) {
			t.Fatalf("without memory: %d, %d, %d", last, m.lru(0), m.pinned(0))
		}
		for n := 1; n <= m.total; n++ {
			b := m.belady(n)
			if b > m.lru(n) || b > m.pinned(n) || b > last {
				t.Fatalf("%d experts: Belady %d, LRU %d, pinned %d, Belady with one less %d", n, b, m.lru(n), m.pinned(n), last)
			}
			last = b
		}
		if m.belady(m.total) != fresh || m.lru(m.total) != fresh || m.pinned(m.total) < fresh {
			t.Fatalf("with memory for all: %d and %d reads, %d experts were new", m.belady(m.total), m.lru(m.total), fresh)
		}
	}
}
