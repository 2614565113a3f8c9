// Command draftbench measures what guessing tokens is worth.
//
//	go run ./engine/draft/draftbench nano   # proposers on K3-nano's golden prompts
//	go run ./engine/draft/draftbench slice  # true dimensions, a paced drive, a set rate of right guesses
//
// Each way runs the same texts in turn with plain decoding, and every text must come out
// with the same logits. slice compares what was gained with what the rate of right guesses
// and the bytes of the passes allow. Without -dir it writes a synthetic checkpoint (36 GB) to a
// temporary directory and removes it afterwards.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"deltafin/engine"
	"deltafin/engine/draft"
	"deltafin/engine/drive"
	"deltafin/engine/synth"
	"deltafin/golden"
)

var (
	rounds = flag.Int("rounds", 3, "nano: times that every way runs every text")
	drafts = flag.String("draft", "ngram", "nano: proposers, separated by commas")
	dir    = flag.String("dir", "", "slice: checkpoint `directory`; empty: a synthetic one is written and removed")
	pace   = flag.Float64("pace", 1, "slice: rate of the drive in `GB/s`")
	limits = flag.String("memory", "3,6.44", "slice: memory ceilings in `GB`, separated by commas")
	tokens = flag.Int("tokens", 32, "slice: length of a text")
	file   = flag.String("json", "", "write a record to this `file`")
)

func main() {
	if len(os.Args) < 2 || os.Args[1] != "nano" && os.Args[1] != "slice" {
		fmt.Fprintln(os.Stderr, "usage: draftbench nano|slice [flags]")
		os.Exit(2)
	}
	what := os.Args[1]
	os.Args = append(os.Args[:1], os.Args[2:]...)
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	measure := nano
	if what == "slice" {
		measure = slice
	}
	fmt.Printf("%s/%s, %d processors\n", runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	record, err := measure(ctx)
	if err == nil && *file != "" {
		err = write(*file, record)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "draftbench:", err)
		os.Exit(1)
	}
}

func write(path string, record any) error {
	text, err := json.MarshalIndent(record, "", "  ")
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
func nano(ctx context.Context) (any, error) {
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

// oracle proposes the text that plain decoding gave, each token wrong at a set rate.
type oracle struct {
	text  []int
	right float64
	vocab int
	rng   *rand.Rand
}

func (o *oracle) Name() string             { return "oracle" }
func (o *oracle) Bytes(int) (int64, int64) { return 0, 0 }
func (o *oracle) Start() draft.Sequence    { return told{o} }
func (o *oracle) Close() error             { return nil }

type told struct{ *oracle }

func (t told) Bytes() int64         { return 0 }
func (t told) Fork() draft.Sequence { return t }

func (t told) Propose(_ context.Context, tokens []int, k int) (g []draft.Guess, _ error) {
	for _, id := range t.text[min(len(tokens), len(t.text)):min(len(tokens)+k, len(t.text))] {
		if t.rng.Float64() >= t.right {
			id = (id + 1) % t.vocab
		}
		g = append(g, draft.Guess{ID: id, P: 0.8})
	}
	return g, nil
}

// SliceRow is one measurement on the slice.
type SliceRow struct {
	Memory     float64 `json:"memory_gb"`
	Right      float64 `json:"right_guesses"` // set rate
	Guesses    int     `json:"guesses"`       // 0: as many as pay
	Seconds    float64 `json:"seconds_per_token"`
	Gain       float64 `json:"gain"`
	PerPass    float64 `json:"tokens_per_pass"`
	PassBytes  float64 `json:"bytes_per_pass"` // experts and dense weights
	TokenBytes float64 `json:"bytes_per_token"`
	Allowed    float64 `json:"gain_allowed"` // by tokens per pass and bytes per pass
}

func slice(ctx context.Context) (any, error) {
	if *dir == "" {
		p, err := synth.Preset("k3-slice")
		if err != nil {
			return nil, err
		}
		if *dir, err = os.MkdirTemp(".", "deltafin-slice-"); err != nil {
			return nil, err
		}
		defer synth.Remove(*dir)
		fmt.Fprintf(os.Stderr, "writing k3-slice to %s ...\n", *dir)
		if err := synth.Write(ctx, *dir, p, nil); err != nil {
			return nil, err
		}
	}
	var rows []SliceRow
	fmt.Printf("k3-slice on a drive paced to %.2f GB/s, experts not kept; gain against plain decoding of the same text, allowed: by tokens and bytes of a pass\n", *pace)
	fmt.Printf("%9s %6s %8s %8s %7s %12s %9s %9s %8s\n", "memory GB", "right", "guesses", "s/token", "gain", "tokens/pass", "GB/pass", "GB/token", "allowed")
	for m := range strings.SplitSeq(*limits, ",") {
		memory, err := strconv.ParseFloat(m, 64)
		if err != nil {
			return nil, fmt.Errorf("-memory %q: give numbers separated by commas", *limits)
		}
		var text []int
		var plain SliceRow
		for _, c := range []struct {
			right float64
			k     int
		}{{0, -1}, {0.9, 0}, {0.9, 1}, {0.9, 3}, {0.9, 7}, {0.1, 0}} {
			r, ids, err := sliceRun(ctx, memory, text, c.right, c.k)
			if err != nil {
				return nil, err
			}
			if c.k < 0 {
				text, plain = ids, r
			} else if !slices.Equal(ids, text) {
				return nil, fmt.Errorf("with guesses the text is another")
			}
			r.Gain = plain.Seconds / r.Seconds
			r.Allowed = r.PerPass * plain.PassBytes / r.PassBytes
			name := fmt.Sprint(c.k)
			switch c.k {
			case -1:
				name = "none"
			case 0:
				name = "as pays"
			}
			fmt.Printf("%9.2f %5.0f%% %8s %8.3f %7.2f %12.2f %9.3f %9.3f %8.2f\n", r.Memory, 100*r.Right, name, r.Seconds, r.Gain, r.PerPass, r.PassBytes/1e9, r.TokenBytes/1e9, r.Allowed)
			rows = append(rows, r)
		}
	}
	return rows, nil
}

// sliceRun decodes a text with k guesses a pass that are right at the given rate; none if
// k is negative. text is what comes out, with the prompt.
func sliceRun(ctx context.Context, memory float64, text []int, right float64, k int) (SliceRow, []int, error) {
	row := SliceRow{Memory: memory, Right: right, Guesses: max(k, 0)}
	root, err := filepath.Abs(*dir)
	if err != nil {
		return row, nil, err
	}
	o := engine.Options{
		Memory: int64(memory * 1e9), Context: 1024, ExpertMemory: -1, Guesses: max(k, 0),
		Drive: drive.Options{Pace: map[string]drive.Pace{root: {BytesPerSecond: *pace * 1e9, Latency: 100 * time.Microsecond}}},
	}
	guesser := &oracle{text: text, right: right, rng: rand.New(rand.NewPCG(1, 2))}
	if k >= 0 {
		o.Proposers = []draft.Proposer{guesser}
	}
	e, err := engine.Open(ctx, root, o)
	if err != nil {
		return row, nil, err
	}
	defer e.Close()
	guesser.vocab = e.Config().Vocab
	prompt := make([]int, 17)
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range prompt {
		prompt[i] = rng.IntN(e.Config().Vocab)
	}
	s := e.NewSession()
	if _, err := s.Feed(ctx, prompt[:16], nil); err != nil {
		return row, nil, err
	}
	bytes := func() float64 {
		st := e.Storage()
		n := st.Spine.Demand + st.Spine.Ahead
		for _, d := range st.Experts.Devices {
			n += d.DemandBytes + d.AheadBytes + d.WastedBytes
		}
		return float64(n)
	}
	// What comes before the second token is not decoding with warm buffers.
	var before float64
	var began time.Time
	n := 0
	r, err := s.Generate(ctx, engine.Request{Prompt: prompt[16:], MaxNew: *tokens, Token: func(int) error {
		if n++; n == 1 {
			before, began = bytes(), time.Now()
		}
		return nil
	}})
	if err != nil {
		return row, nil, err
	}
	took, passes := time.Since(began).Seconds(), *tokens-1
	if d := r.Stats.Draft; d != nil {
		passes = d.Passes
	}
	row.Seconds = took / float64(*tokens-1)
	row.PerPass = float64(*tokens-1) / float64(passes)
	row.PassBytes = (bytes() - before) / float64(passes)
	row.TokenBytes = row.PassBytes / row.PerPass
	return row, append(prompt, r.IDs...), nil
}
