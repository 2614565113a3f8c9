// Command slicebench measures prefill, decode and guessing on a checkpoint with K3's true
// dimensions, against what the machine's own drive and memory allow in the same run.
//
//	go run ./engine/slicebench decode    # seconds per token against bytes / raw rates
//	go run ./engine/slicebench prefill   # time to first token, bytes, passes, per prompt length
//	go run ./engine/slicebench draft     # a set rate of right guesses on a paced drive
//
// Without -dir it writes a synthetic checkpoint (36 GB) to the user's cache directory
// and removes it afterwards.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"deltafin/engine"
	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
	"deltafin/engine/opt"
	"deltafin/engine/plan"
	"deltafin/engine/synth"
)

var (
	dir     = flag.String("dir", "", "checkpoint `directory`; empty: a synthetic one is written and removed")
	preset  = flag.String("preset", "k3-slice", "synthetic checkpoint to write")
	memory  = flag.Float64("memory", 6.44, "memory ceiling in `GB`")
	threads = flag.Int("threads", runtime.NumCPU(), "workers")
	lengths = flag.String("lengths", "1,17,128,512,2048", "prompt lengths of prefill")
	rows    = flag.Int("rows", 0, "most rows of a pass; 0: as many as the memory allows")
	against = flag.Int("against", 64, "prefill: also run the same engine with passes of this many rows; 0: do not")
	tokens  = flag.Int("tokens", 16, "decode, draft: tokens after a prompt of 17")
	pace    = flag.Float64("pace", 1, "draft: rate of the drive in `GB/s`")
	limits  = flag.String("limits", "3,6.44", "draft: memory ceilings in `GB`, instead of -memory")
	runs    = flag.Int("runs", 1, "runs of each measurement")
	options = flag.String("opt", "", "turn an optimisation: `NAME=on|off`")
	seed    = flag.Uint64("seed", 0, "of the random prompts; 0: another one each time, so that no cache of the disk's host knows them")
	file    = flag.String("json", "", "write a record to this `file`")
)

func main() {
	if len(os.Args) < 2 || !slices.Contains([]string{"decode", "prefill", "draft"}, os.Args[1]) {
		fmt.Fprintln(os.Stderr, "usage: slicebench decode|prefill|draft [flags]")
		os.Exit(2)
	}
	what := os.Args[1] // the flags follow it
	os.Args = append(os.Args[:1], os.Args[2:]...)
	flag.Parse()
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	if *options != "" {
		if err := opt.Parse(*options); err != nil {
			fmt.Fprintln(os.Stderr, "slicebench:", err)
			os.Exit(2)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, what); err != nil {
		fmt.Fprintln(os.Stderr, "slicebench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, what string) error {
	if *tokens < 1 || *runs < 1 {
		return fmt.Errorf("-tokens and -runs count from 1")
	}
	if *dir == "" {
		p, err := synth.Preset(*preset)
		if err != nil {
			return err
		}
		// Not the system's directory for temporary files, which may be memory.
		cache, err := os.UserCacheDir()
		if err == nil {
			err = os.MkdirAll(cache, 0o755)
		}
		if err == nil {
			*dir, err = os.MkdirTemp(cache, "deltafin-slice-")
		}
		if err != nil {
			return fmt.Errorf("no room for a checkpoint: %w: give -dir", err)
		}
		defer synth.Remove(*dir)
		fmt.Fprintf(os.Stderr, "writing %s to %s ...\n", *preset, *dir)
		if err := synth.Write(ctx, *dir, p, nil); err != nil {
			return err
		}
	}
	b, err := newBench(*dir)
	if err != nil {
		return err
	}
	var record any
	switch what {
	case "decode":
		record, err = b.decode(ctx)
	case "draft":
		record, err = b.draft(ctx)
	default:
		record, err = b.prefill(ctx)
	}
	if err != nil || *file == "" {
		return err
	}
	text, err := json.MarshalIndent(record, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(*file, append(text, '\n'), 0o644)
}

type bench struct {
	dir    string
	config *checkpoint.Config
	shape  plan.Shape
	rates  plan.Machine // of the kernels
	out    *os.File
}

// predict is what 'deltafin plan' says of a prompt of n rows with a union of so many bytes, on a
// drive of the given rate.
func (b *bench) predict(n int, union int64, l engine.Ledger, rate float64) float64 {
	m := b.rates
	m.Drives = []float64{rate}
	return b.shape.PromptOf(n, float64(union)/float64(b.shape.ExpertBytes), l, m).Seconds
}

func newBench(dir string) (*bench, error) {
	ck, err := checkpoint.Open(dir)
	if err != nil {
		return nil, err
	}
	defer ck.Close()
	b := &bench{dir: dir, config: ck.Config(), shape: plan.ShapeOf(ck.Config()), out: os.Stdout}
	pool := kernel.NewPool(*threads)
	defer pool.Close()
	return b, plan.MeasureKernels(pool, &b.rates)
}

func (b *bench) open(ctx context.Context, rows int) (*engine.Engine, error) {
	return engine.Open(ctx, b.dir, engine.Options{
		Threads: *threads, Memory: int64(*memory * 1e9), PassRows: rows, ExpertMemory: -1, Context: 4096,
	})
}

func (b *bench) prompt(n int, salt uint64) []int {
	rng := rand.New(rand.NewPCG(*seed, salt<<32|uint64(n)))
	ids := make([]int, n)
	for i := range ids {
		ids[i] = rng.IntN(b.config.Vocab)
	}
	return ids
}

// rawRate is the direct-read rate of the checkpoint's drive in bytes per second, read in the
// engine's order.
func (b *bench) rawRate(ctx context.Context) (float64, error) {
	drives := drive.NewSet(drive.Options{})
	defer drives.Close()
	return plan.MeasureDrive(ctx, drives, b.dir, b.shape.ExpertBytes, 3*time.Second)
}

// memoryRate is the rate in bytes per second at which all workers together read memory.
func memoryRate() float64 {
	p := kernel.NewPool(*threads)
	defer p.Close()
	const n = 32 << 20 // floats per worker
	buf := make([][]float32, *threads)
	for i := range buf {
		buf[i] = kernel.Floats(n)
		for j := range buf[i] {
			buf[i][j] = 1
		}
	}
	best := 0.0
	for range 5 {
		began := time.Now()
		p.Run(*threads, func(_ *kernel.Scratch, i int) { kernel.Sum(buf[i]) })
		best = max(best, float64(*threads*n*4)/time.Since(began).Seconds())
	}
	return best
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if len(v)%2 == 0 {
		return (v[len(v)/2-1] + v[len(v)/2]) / 2
	}
	return v[len(v)/2]
}

// decodeRecord is one decode measurement.
type decodeRecord struct {
	Machine        string    `json:"machine"`
	MemoryGB       float64   `json:"memory_gb"`
	Threads        int       `json:"threads"`
	RawBefore      float64   `json:"raw_bytes_per_second_before"`
	RawAfter       float64   `json:"raw_bytes_per_second_after"`
	MemoryRate     float64   `json:"memory_bytes_per_second"`
	TokenSeconds   []float64 `json:"token_seconds"`
	Median         float64   `json:"median_token_seconds"`
	ExpertBytes    float64   `json:"expert_bytes_per_token"`
	ExpectedBytes  float64   `json:"expected_expert_bytes_per_token"`
	SpineBytes     float64   `json:"streamed_spine_bytes_per_token"`
	TouchedBytes   float64   `json:"touched_bytes_per_token"`
	Bound          float64   `json:"bound_seconds"`
	Ratio          float64   `json:"median_over_bound"`
	Predicted      float64   `json:"predicted_seconds"` // by plan
	PeakRSS        int64     `json:"peak_rss_bytes"`
	ReadAheadBytes float64   `json:"ahead_bytes_per_token"`
	WastedBytes    float64   `json:"wasted_bytes_per_token"`

	ledger engine.Ledger
}

func (b *bench) decode(ctx context.Context) (any, error) {
	var records []decodeRecord
	for range *runs {
		raw, err := b.rawRate(ctx)
		if err != nil {
			return nil, err
		}
		r := decodeRecord{Machine: machine(), MemoryGB: *memory, Threads: *threads, RawBefore: raw, MemoryRate: memoryRate()}
		if err := b.decodeOnce(ctx, &r); err != nil {
			return nil, err
		}
		if r.RawAfter, err = b.rawRate(ctx); err != nil {
			return nil, err
		}
		rate := (r.RawBefore + r.RawAfter) / 2
		r.Bound = max((r.ExpertBytes+r.SpineBytes)/rate, r.TouchedBytes/r.MemoryRate)
		r.Ratio = r.Median / r.Bound
		r.Predicted = b.predict(1, int64(r.ExpectedBytes), r.ledger, rate)
		fmt.Fprintf(b.out, "decode: %.3f s/token median (%.3f to %.3f); experts %.3f GB/token (routed: %.3f), read ahead %.3f, for nothing %.3f, dense weights streamed %.3f GB/token\n",
			r.Median, slices.Min(r.TokenSeconds), slices.Max(r.TokenSeconds), r.ExpertBytes/1e9, r.ExpectedBytes/1e9, r.ReadAheadBytes/1e9, r.WastedBytes/1e9, r.SpineBytes/1e9)
		fmt.Fprintf(b.out, "        raw direct reads %.2f and %.2f GB/s, memory %.1f GB/s: bound %.3f s, ratio %.2f; peak memory, the benchmark's own buffers included, %.2f GB\n",
			r.RawBefore/1e9, r.RawAfter/1e9, r.MemoryRate/1e9, r.Bound, r.Ratio, float64(r.PeakRSS)/1e9)
		fmt.Fprintf(b.out, "        plan predicted %.3f s, %+.0f%%\n", r.Predicted, 100*(r.Predicted/r.Median-1))
		records = append(records, r)
	}
	return records, nil
}

func (b *bench) decodeOnce(ctx context.Context, r *decodeRecord) error {
	e, err := b.open(ctx, *rows)
	if err != nil {
		return err
	}
	defer e.Close()
	r.ledger = e.Ledger()
	s := e.NewSession()
	if _, err := s.Feed(ctx, b.prompt(17, 1), nil); err != nil {
		return err
	}
	before := e.Storage()
	var last time.Time
	result, err := s.Generate(ctx, engine.Request{Prompt: b.prompt(1, 2), MaxNew: *tokens + 1, Token: func(int) error {
		if now := time.Now(); last.IsZero() {
			last = now
		} else {
			r.TokenSeconds, last = append(r.TokenSeconds, now.Sub(last).Seconds()), now
		}
		return nil
	}})
	if err != nil {
		return err
	}
	after, st, n := e.Storage(), result.Stats, float64(*tokens+1)
	r.Median, r.PeakRSS = median(r.TokenSeconds), st.PeakRSS
	r.ExpertBytes = float64(st.ExpertRead-st.ExpertWasted) / n
	r.ReadAheadBytes, r.WastedBytes = float64(st.ExpertAhead)/n, float64(st.ExpertWasted)/n
	r.ExpectedBytes = float64(b.shape.TopK*b.shape.MoELayers) * float64(b.shape.ExpertBytes)
	r.SpineBytes = float64(after.Spine.Demand+after.Spine.Ahead-before.Spine.Demand-before.Spine.Ahead) / n
	r.TouchedBytes = float64(b.shape.SpineBytes+b.shape.HeadBytes) + r.ExpectedBytes
	return nil
}

// prefillRecord is one prompt.
type prefillRecord struct {
	Tokens        int     `json:"tokens"`
	PassRows      int     `json:"pass_rows"`
	Seconds       float64 `json:"seconds_to_first_token"`
	LayerPasses   int64   `json:"layer_passes"`
	Union         int64   `json:"union_bytes"`
	Read          int64   `json:"read_bytes"`
	Wasted        int64   `json:"wasted_bytes"`
	Once          int64   `json:"union_bytes_in_one_pass"`
	Amplification float64 `json:"amplification"`
	Busy          float64 `json:"drive_busy_share"`
	Rate          float64 `json:"expert_bytes_per_second"`
	RawRate       float64 `json:"raw_bytes_per_second"`
	MACRate       float64 `json:"macs_per_second"`
	Predicted     float64 `json:"predicted_seconds"` // by plan, from the union of the run
	SHA256        string  `json:"logits_sha256"`
	PeakRSS       int64   `json:"peak_rss_bytes"`
}

func (b *bench) prefill(ctx context.Context) (any, error) {
	var records []prefillRecord
	fmt.Fprintf(b.out, "%s, %.2f GB, %d threads\n", machine(), *memory, *threads)
	fmt.Fprintf(b.out, "%7s %9s %9s %7s %10s %8s %7s %6s %10s %10s %9s %9s\n", "tokens", "pass rows", "first (s)", "passes", "read (GB)", "of union", "wasted", "busy", "read GB/s", "raw GB/s", "GMAC/s", "plan")
	for text := range strings.SplitSeq(*lengths, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("-lengths %q: give numbers separated by commas", *lengths)
		}
		var once int64
		var hash string
		limits := []int{*rows}
		if *against > 0 && n > *against {
			limits = append(limits, *against)
		}
		for _, limit := range limits {
			for range *runs {
				r, err := b.prefillOnce(ctx, n, limit)
				if err != nil {
					return nil, err
				}
				if limit == *rows {
					once = r.Union
				}
				r.Once, r.Amplification = once, float64(r.Read)/float64(once)
				fmt.Fprintf(b.out, "%7d %9d %9.2f %7d %10.2f %8.3f %6.2f%% %5.0f%% %10.2f %10.2f %9.1f %+8.0f%%\n", n, r.PassRows, r.Seconds, r.LayerPasses, float64(r.Read)/1e9,
					r.Amplification, 100*float64(r.Wasted)/float64(r.Union), 100*r.Busy, r.Rate/1e9, r.RawRate/1e9, r.MACRate/1e9, 100*(r.Predicted/r.Seconds-1))
				records = append(records, r)
				if hash == "" {
					hash = r.SHA256
				} else if hash != r.SHA256 {
					return nil, fmt.Errorf("%d tokens: the logits depend on the passes", n)
				}
			}
		}
	}
	return records, nil
}

func (b *bench) prefillOnce(ctx context.Context, n, limit int) (prefillRecord, error) {
	raw, err := b.rawRate(ctx)
	if err != nil {
		return prefillRecord{}, err
	}
	e, err := b.open(ctx, limit)
	if err != nil {
		return prefillRecord{}, err
	}
	defer e.Close()
	// Dense weights are read once per start, not per prompt: have them there.
	if _, err := e.NewSession().Feed(ctx, b.prompt(1, 9), nil); err != nil {
		return prefillRecord{}, err
	}
	busy := func() (t float64) {
		for _, d := range e.Storage().Experts.Devices {
			t += d.BusySeconds
		}
		return t
	}
	before := busy()
	result, err := e.NewSession().Generate(ctx, engine.Request{Prompt: b.prompt(n, 1), MaxNew: 1})
	if err != nil {
		return prefillRecord{}, err
	}
	st := result.Stats
	macs := float64(n) * (float64(b.shape.SpineMACs) + float64(b.shape.TopK*b.shape.MoELayers)*float64(b.shape.ExpertMACs))
	return prefillRecord{
		Tokens: n, PassRows: min(e.Ledger().PassRows, n), Seconds: st.PrefillSeconds, LayerPasses: st.LayerPasses,
		Union: st.ExpertUnion, Read: st.ExpertRead, Wasted: st.ExpertWasted, Busy: (busy() - before) / st.PrefillSeconds,
		Rate: float64(st.ExpertRead) / st.PrefillSeconds, RawRate: raw, MACRate: macs / st.PrefillSeconds,
		Predicted: b.predict(n, st.ExpertUnion, e.Ledger(), raw), SHA256: result.LogitsSHA256, PeakRSS: st.PeakRSS,
	}, nil
}

func machine() string {
	return fmt.Sprintf("%s/%s, %d processors, %s kernels", runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), kernel.Active())
}
