// Command switchbench measures what each optimisation is worth: the same work with
// the switch off and on, in turn, in one process, and the median of the paired
// ratios. The hashes of the logits must be equal or it fails.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"

	"deltafin/engine"
	"deltafin/engine/opt"
)

var (
	model  = flag.String("model", "golden/nano/model", "checkpoint `directory`")
	prompt = flag.Int("prompt", 400, "`tokens` of the prompt")
	decode = flag.Int("decode", 64, "`tokens` to generate")
	pairs  = flag.Int("pairs", 7, "`runs` with the switch off and on each")
	memory = flag.Float64("memory", 0, "memory ceiling in `GB`, experts not kept; 0: as much as there is")
	only   = flag.String("switch", "", "measure only the switch of this `name`")
	file   = flag.String("json", "", "write a record to this `file`")
)

// row is the effect of one switch: time off divided by time on.
type row struct {
	Switch                string
	Prefill, Decode       float64 // medians of the paired ratios
	PrefillSpread, Spread [2]float64
}

func main() {
	flag.Parse()
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "switchbench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if *pairs < 1 || *prompt < 1 || *decode < 2 {
		return errors.New("-pairs and -prompt count from 1, -decode from 2")
	}
	var rows []row
	fmt.Printf("%s, prompt %d, decode %d, %d pairs: time with the switch off / on, median (min-max)\n", *model, *prompt, *decode, *pairs)
	for _, s := range opt.All() {
		if *only != "" && s.Name != *only {
			continue
		}
		var p, d []float64
		for i := range *pairs + 1 {
			off, err := measure(ctx, s, false)
			if err != nil {
				return err
			}
			on, err := measure(ctx, s, true)
			if err != nil {
				return err
			}
			if off.LogitsSHA256 != on.LogitsSHA256 {
				return errors.New(s.Name + " changes the logits")
			}
			if i > 0 { // the first pair warms up
				p = append(p, off.Stats.PrefillSeconds/on.Stats.PrefillSeconds)
				d = append(d, off.Stats.DecodeSeconds/on.Stats.DecodeSeconds)
			}
		}
		slices.Sort(p)
		slices.Sort(d)
		r := row{s.Name, p[len(p)/2], d[len(d)/2], [2]float64{p[0], p[len(p)-1]}, [2]float64{d[0], d[len(d)-1]}}
		rows = append(rows, r)
		fmt.Printf("%-18s prefill %5.2fx (%.2f-%.2f)   decode %5.2fx (%.2f-%.2f)\n", r.Switch,
			r.Prefill, r.PrefillSpread[0], r.PrefillSpread[1], r.Decode, r.Spread[0], r.Spread[1])
	}
	if len(rows) == 0 {
		return fmt.Errorf("no switch is called %q", *only)
	}
	if *file == "" {
		return nil
	}
	b, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(*file, append(b, '\n'), 0o644)
}

// measure generates with a fresh engine, so that nothing is resident from before.
func measure(ctx context.Context, s *opt.Switch, on bool) (engine.Result, error) {
	s.Set(on)
	defer s.Set(true)
	o := engine.Options{PassRows: *prompt}
	if *memory > 0 {
		o.Memory, o.ExpertMemory = int64(*memory*1e9), -1
	}
	e, err := engine.Open(ctx, *model, o)
	if err != nil {
		return engine.Result{}, err
	}
	defer e.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	ids := make([]int, *prompt)
	for i := range ids {
		ids[i] = rng.IntN(e.Config().Vocab)
	}
	return e.NewSession().Generate(ctx, engine.Request{Prompt: ids, MaxNew: *decode})
}
