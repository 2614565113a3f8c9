// Command draftbench measures what proposers of tokens are worth.
//
//	go run ./engine/draft/draftbench -draft ngram,golden/nano/model-dspark
//
// Proposers run on K3-nano's golden prompts, freely and with set numbers of guesses, each
// way in turn with plain decoding, and every text must come out with the same logits. What known
// odds are worth at true dimensions is measured by slicebench.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"deltafin/engine"
	"deltafin/engine/draft"
	"deltafin/golden"
)

var (
	rounds = flag.Int("rounds", 3, "times that every way runs every text")
	drafts = flag.String("draft", "ngram", "proposers, separated by commas")
	file   = flag.String("json", "", "write a record to this `file`")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	fmt.Printf("%s/%s, %d processors\n", runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	rows, err := nano(ctx)
	if err == nil && *file != "" {
		err = write(*file, rows)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "draftbench:", err)
		os.Exit(1)
	}
}

func write(path string, rows []Row) error {
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// way is one way to decode.
type way struct {
	name    string
	options engine.Options
	e       *engine.Engine

	seconds  []float64 // per round
	tokens   int
	passes   int
	checked  int
	accepted int
	thinking float64
	expertGB float64
	byPlace  [draft.MaxGuesses][2]int
}

func (w *way) add(r engine.Result) {
	w.tokens += r.Stats.NewTokens - 1
	w.expertGB += float64(r.Stats.ExpertUnion) / 1e9
	d := r.Stats.Draft
	if d == nil {
		w.passes += r.Stats.NewTokens - 1
		return
	}
	w.passes += d.Passes
	for _, p := range d.Proposers {
		w.checked, w.accepted, w.thinking = w.checked+p.Checked, w.accepted+p.Accepted, w.thinking+p.Seconds
		for i, at := range p.At {
			w.byPlace[i][0] += at.Right
			w.byPlace[i][1] += at.All
		}
	}
}

// Row is one line of the table.
type Row struct {
	Name          string    `json:"name"`
	Rate          float64   `json:"tokens_per_second"` // median of the rounds
	Gain          float64   `json:"gain"`              // median of the rounds' ratios to plain decoding
	Low           float64   `json:"gain_low"`
	High          float64   `json:"gain_high"`
	PerPass       float64   `json:"tokens_per_pass"`
	Acceptance    float64   `json:"acceptance"` // of checked guesses
	ByPlace       []float64 `json:"acceptance_by_place"`
	Thinking      float64   `json:"proposer_seconds_per_token"`
	BytesPerToken float64   `json:"expert_bytes_per_token"`
}

func (w *way) row(plain *way) Row {
	var ratio []float64
	for i := range w.seconds {
		ratio = append(ratio, plain.seconds[i]/w.seconds[i])
	}
	n := float64(w.tokens)
	r := Row{
		Name: w.name, Rate: n / float64(len(w.seconds)) / median(w.seconds), Gain: median(ratio), Low: slices.Min(ratio), High: slices.Max(ratio),
		PerPass: n / float64(w.passes), Thinking: w.thinking / n, BytesPerToken: w.expertGB * 1e9 / n,
	}
	if w.checked > 0 {
		r.Acceptance = float64(w.accepted) / float64(w.checked)
	}
	for _, at := range w.byPlace {
		if at[1] > 0 {
			r.ByPlace = append(r.ByPlace, float64(at[0])/float64(at[1]))
		}
	}
	return r
}

// nano runs the golden prompts with each proposer, freely and with set numbers of guesses.
func nano(ctx context.Context) ([]Row, error) {
	ways := []*way{{name: "none"}}
	for d := range strings.SplitSeq(*drafts, ",") {
		name := filepath.Base(d)
		for _, k := range []int{0, 1, 2, 4, 8} {
			w := &way{name: fmt.Sprintf("%s, %d", name, k), options: engine.Options{Draft: []string{d}, Guesses: k}}
			if k == 0 {
				w.name = name + ", as pays"
			}
			ways = append(ways, w)
		}
	}
	if all := strings.Split(*drafts, ","); len(all) > 1 {
		ways = append(ways, &way{name: "all, as pays", options: engine.Options{Draft: all}})
	}
	for _, w := range ways {
		var err error
		if w.e, err = engine.Open(ctx, golden.ModelDir("nano"), w.options); err != nil {
			return nil, err
		}
		defer w.e.Close()
	}
	cases, err := golden.Cases("nano")
	if err != nil {
		return nil, err
	}
	for round := range *rounds + 1 { // the first warms up
		for _, w := range ways {
			seconds := 0.0
			for _, c := range cases {
				r, err := w.e.NewSession().Generate(ctx, engine.Request{Prompt: c.PromptIDs, MaxNew: len(c.Greedy)})
				if err != nil {
					return nil, err
				}
				if r.LogitsSHA256 != c.LogitsSHA256 {
					return nil, fmt.Errorf("%s, %s: the logits are not the golden ones", w.name, c.Name)
				}
				seconds += r.Stats.DecodeSeconds
				if round > 0 {
					w.add(r)
				}
			}
			if round > 0 {
				w.seconds = append(w.seconds, seconds)
			}
		}
	}
	fmt.Printf("K3-nano, %d golden prompts, %d rounds in turn; gain is the median ratio to plain decoding of the same round\n", len(cases), *rounds)
	fmt.Printf("%-24s %9s %20s %11s %10s %10s %9s  %s\n", "proposer, guesses", "tokens/s", "gain", "tokens/pass", "accepted", "ms/token", "MB/token", "right by place")
	var rows []Row
	for _, w := range ways {
		r := w.row(ways[0])
		rows = append(rows, r)
		fmt.Printf("%-24s %9.0f %6.2f (%.2f to %.2f) %11.2f %9.0f%% %10.3f %9.3f ", r.Name, r.Rate, r.Gain, r.Low, r.High, r.PerPass, 100*r.Acceptance, 1000*r.Thinking, r.BytesPerToken/1e6)
		for _, p := range r.ByPlace {
			fmt.Printf(" %.0f", 100*p)
		}
		fmt.Println()
	}
	return rows, nil
}
