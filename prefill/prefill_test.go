package prefill

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestSpecification runs testdata: routes in, groups out; rows and a limit in,
// chunks out.
func TestSpecification(t *testing.T) {
	datadriven.Walk(t, "testdata/plan", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "plan":
				var experts int
				d.ScanArgs(t, "experts", &experts)
				var routes []int32
				topK := 0
				for line := range strings.Lines(d.Input) {
					f := strings.Fields(line)
					topK = len(f)
					for _, s := range f {
						e, err := strconv.Atoi(s)
						if err != nil {
							t.Fatal(err)
						}
						routes = append(routes, int32(e))
					}
				}
				var b strings.Builder
				for _, g := range Plan(routes, topK, experts) {
					fmt.Fprintf(&b, "expert %d: rows %v slots %v\n", g.Expert, g.Rows, g.Slots)
				}
				return b.String()
			case "chunks":
				var rows, limit int
				d.ScanArgs(t, "rows", &rows)
				d.ScanArgs(t, "limit", &limit)
				return fmt.Sprintln(Chunks(rows, limit))
			}
			t.Fatalf("unknown command %s", d.Cmd)
			return ""
		})
	})
}

// TestPlanCoversEveryRouteOnce checks the plan of random routes.
func TestPlanCoversEveryRouteOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		rows, topK, experts := 1+rng.IntN(60), 1+rng.IntN(6), 6+rng.IntN(40)
		routes := make([]int32, 0, rows*topK)
		for range rows {
			for _, e := range rng.Perm(experts)[:topK] {
				routes = append(routes, int32(e))
			}
		}
		seen, last := make([]bool, len(routes)), int32(-1)
		for _, g := range Plan(routes, topK, experts) {
			if g.Expert <= last {
				t.Fatalf("expert %d after %d", g.Expert, last)
			}
			last = g.Expert
			if !slices.IsSorted(g.Rows) || len(g.Rows) != len(g.Slots) || len(g.Rows) == 0 {
				t.Fatalf("expert %d has rows %v and slots %v", g.Expert, g.Rows, g.Slots)
			}
			for i, s := range g.Slots {
				if seen[s] || routes[s] != g.Expert || int(g.Rows[i]) != int(s)/topK {
					t.Fatalf("slot %d is wrong for expert %d", s, g.Expert)
				}
				seen[s] = true
			}
		}
		if slices.Contains(seen, false) {
			t.Fatal("a route is in no group")
		}
	}
}
