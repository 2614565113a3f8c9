package openai

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"deltafin/engine"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
	"deltafin/golden"
)

// slowNano is K3-nano, all of whose experts come off a slow drive in every pass. It counts
// what runs.
type slowNano struct {
	Model
	mu     sync.Mutex
	ran    map[string]int // by what was observed, in all layers
	passes int            // that began
	place  string
	within func() // called in the pass
}

func newSlowNano(t *testing.T) *slowNano {
	dir := golden.ModelDir("nano")
	e, err := engine.Open(context.Background(), dir, engine.Options{PassRows: 32, ExpertMemory: -1, Drive: drive.Options{
		Pace: map[string]drive.Pace{dir: {BytesPerSecond: 400e6, Latency: 100 * time.Microsecond}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	m, err := NewModel(e, nanoTokenizer())
	if err != nil {
		t.Fatal(err)
	}
	n := &slowNano{Model: m, ran: map[string]int{}}
	routes := e.Model().ObserveRoutes
	e.Model().Observe = func(l int, name string, _ kernel.Mat) { n.at(name, l) }
	e.Model().ObserveRoutes = func(l int, ids []int32, weights []float32) {
		routes(l, ids, weights)
		n.at("routes", l)
	}
	return n
}

func (n *slowNano) at(name string, l int) {
	n.mu.Lock()
	n.ran[name]++
	if name == "attn_in" && l == 0 {
		n.passes++
	}
	place := fmt.Sprintf("%s %d, pass %d", name, l, n.passes)
	var f func()
	if place == n.place {
		f, n.within, n.place = n.within, nil, ""
	}
	n.mu.Unlock()
	if f != nil {
		f()
	}
}

// reach arms a place: f is called there, once.
func (n *slowNano) reach(place string, f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.place, n.within = place, f
}

func (n *slowNano) clear() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.ran)
	n.passes = 0
}

// sum counts what ran in all layers since clear.
func (n *slowNano) sum(name string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ran[name]
}

func metric(t *testing.T, url, name string) int {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\d+)$`).FindSubmatch(b)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(string(m[1]))
	return n
}

// leave asks and is gone when the engine reaches place, where the pass waits until left
// says so. It returns when the engine has noticed.
func leave(t *testing.T, n *slowNano, left chan struct{}, url, body, place string) {
	t.Helper()
	before := metric(t, url, `deltafin_generations_total{api="completions",finish="client_gone"}`)
	reached := make(chan struct{})
	n.reach(place, func() {
		close(reached)
		select {
		case <-left:
		case <-time.After(10 * time.Second):
		}
		time.Sleep(5 * time.Millisecond) // the server's own goroutine is told at the same moment
	})
	l := start(t, url+"/v1/completions", streaming(body))
	select {
	case <-reached:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s is never reached", place)
	}
	l.cancel()
	eventually(t, "the generation is over", func() bool {
		return metric(t, url, `deltafin_generations_total{api="completions",finish="client_gone"}`) == before+1
	})
}

func TestARetryGoesOnInsideThePassThatWasCutOff(t *testing.T) {
	n := newSlowNano(t)
	rng := rand.New(rand.NewPCG(21, 22))
	ids := make([]int, 100) // passes of 25
	for i := range ids {
		ids[i] = rng.IntN(2800)
	}
	body := func(ids []int) string {
		return string(encode(map[string]any{"prompt": ids, "max_tokens": 3, "logprobs": 3}))
	}
	edit := func(at int) []int {
		edited := slices.Clone(ids)
		edited[at]++
		return edited
	}
	answer := func(url, body string) (string, completion) {
		c := answerOf[completion](t, url+"/v1/completions", body)
		return string(encode(c.Choices)), c // with the logits' digits
	}
	layers := n.Info().Layers
	for _, tt := range []struct {
		name   string
		places []string // where clients leave, one after the other
		then   []int    // what the last one asks
		other  bool     // another request comes in between
		known  int      // whole positions that the last one finds
		lost   bool     // what the pass had done is
	}{
		{name: "between layers", places: []string{"stream 3, pass 1"}, then: ids},
		{name: "between the halves of a layer", places: []string{"attn_out 3, pass 1"}, then: ids},
		{name: "inside experts", places: []string{"routes 4, pass 1"}, then: ids},
		{name: "again and again", places: []string{"attn_in 0, pass 1", "routes 2, pass 1", "stream 8, pass 2", "mlp_in 7, pass 4"}, then: ids, known: 75},
		{name: "inside the answer", places: []string{"routes 4, pass 6"}, then: ids},
		{name: "with a longer prompt", places: []string{"routes 4, pass 2"}, then: append(slices.Clone(ids), 5, 6, 7), known: 25},
		{name: "edited behind the pass", places: []string{"routes 4, pass 2"}, then: edit(98), known: 25},
		{name: "edited inside the pass", places: []string{"routes 4, pass 2"}, then: edit(49), known: 25, lost: true},
		{name: "edited before the pass", places: []string{"routes 4, pass 2"}, then: edit(24), lost: true},
		{name: "after another request", places: []string{"routes 4, pass 2"}, then: ids, other: true, known: 25, lost: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, undisturbed := serve(t, n, Options{})
			n.clear()
			want, _ := answer(undisturbed, body(tt.then))
			most := n.sum("attn_in")

			s, url := serve(t, n, Options{Tick: 5 * time.Millisecond})
			left := make(chan struct{}, len(tt.places))
			hs := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer context.AfterFunc(r.Context(), func() { left <- struct{}{} })()
				s.ServeHTTP(w, r)
			}))
			t.Cleanup(hs.Close)
			n.clear()
			for _, p := range tt.places {
				leave(t, n, left, hs.URL, body(ids), p)
			}
			ran := n.sum("attn_in")
			if tt.other {
				between := body(ids[50:80])
				wantOther, _ := answer(undisturbed, between)
				if got, _ := answer(url, between); got != wantOther {
					t.Errorf("the one in between got\n%s, undisturbed\n%s", got, wantOther)
				}
			}
			skipped := metric(t, url, "deltafin_layers_skipped_total")
			n.clear()
			got, c := answer(url, body(tt.then))
			skipped = metric(t, url, "deltafin_layers_skipped_total") - skipped
			if got != want {
				t.Errorf("got\n%s, undisturbed\n%s", got, want)
			}
			if c.Usage.Details.Cached != tt.known {
				t.Errorf("%d tokens were known, want %d", c.Usage.Details.Cached, tt.known)
			}
			rest := n.sum("attn_in")
			if tt.lost {
				// Whole passes only: those that were done are not done again.
				if whole := tt.known / 25 * layers; rest != most-whole || skipped != 0 {
					t.Errorf("%d layers attended and %d were skipped, want %d and none", rest, skipped, most-whole)
				}
				return
			}
			if again := n.sum("mlp_in") - rest; ran+rest != most || again > 1 || skipped == 0 {
				t.Errorf("%d layers attended before and %d after, want %d together; %d fed forward again, want at most 1; %d were skipped", ran, rest, most, again, skipped)
			}
		})
	}
}

// A client that leaves between two passes leaves a session whose last logits are gone: it
// is of use to a request that has more to feed, and of none to one that asks for these.
func TestASessionLeftBetweenPassesNeedsSomethingToFeed(t *testing.T) {
	f := newFake()
	s, _ := serve(t, f, Options{})
	for _, tt := range []struct{ ids, known int }{{3, 0}, {4, 3}} {
		session := f.NewSession()
		if _, err := session.Feed(context.Background(), []int{1, 2, 3}, nil); err != nil {
			t.Fatal(err)
		}
		s.cut = &cutOff{[]int{1, 2, 3}, session}
		if _, known, _ := s.sessionFor([]int{1, 2, 3, 4}[:tt.ids]); known != tt.known || s.cut != nil {
			t.Errorf("of %d tokens %d are known, want %d", tt.ids, known, tt.known)
		}
	}
}
