package expert

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"deltafin/engine/drive"

	"github.com/cockroachdb/datadriven"
)

// paper is a drive on paper.
type paper struct {
	rate           float64 // MB per second
	queued, flying float64 // MB
	latency        time.Duration
	dead           bool
}

func (d *paper) Expect(_ drive.Class, n int64) time.Duration {
	if d.dead {
		return math.MaxInt64
	}
	return d.latency + time.Duration((float64(n)/1e6+d.queued+d.flying)/d.rate*float64(time.Second))
}

// TestBalance runs testdata/balance:
//
//	balance
//	drive NAME rate=MB/s [queued=MB] [flying=MB] [latency=D] [must=MB] [dead=true]
//	read MB NAME...        from the home that is chosen, which then has it queued
//	split MB NAME...       the same, in two parts where that pays
func TestBalance(t *testing.T) {
	datadriven.RunTest(t, "testdata/balance", func(t *testing.T, d *datadriven.TestData) string {
		drives, must := map[string]*paper{}, map[string]int64{}
		var out strings.Builder
		for line := range strings.Lines(d.Input) {
			f := strings.Fields(line)
			if f[0] == "drive" {
				p := &paper{}
				for _, arg := range f[2:] {
					k, v, _ := strings.Cut(arg, "=")
					x := 0.0
					fmt.Sscan(v, &x)
					switch k {
					case "rate":
						p.rate = x
					case "queued":
						p.queued = x
					case "flying":
						p.flying = x
					case "must":
						must[f[1]] = int64(x * 1e6)
					case "latency":
						p.latency, _ = time.ParseDuration(v)
					case "dead":
						p.dead = true
					}
				}
				drives[f[1]] = p
				continue
			}
			n := 0.0
			fmt.Sscan(f[1], &n)
			names := f[2:]
			var cs []candidate
			for _, name := range names {
				cs = append(cs, candidate{drives[name], must[name]})
			}
			give := func(i int, n float64) {
				p := drives[names[i]]
				p.queued += n
				fmt.Fprintf(&out, " %s %gMB at %.2fs", names[i], n, p.Expect(drive.Demand, 0).Seconds())
			}
			if a, b, ok := split(drive.Demand, int64(n*1e6), cs); f[0] == "split" && ok {
				fmt.Fprintf(&out, "split:")
				give(a, n-n/3)
				give(b, n/3)
			} else {
				fmt.Fprintf(&out, "whole:")
				give(choose(drive.Demand, int64(n*1e6), cs), n)
			}
			fmt.Fprintln(&out)
		}
		return out.String()
	})
}
