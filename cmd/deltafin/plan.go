package main

import (
	"context"
	"runtime"
	"time"

	"deltafin/engine"
	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
	"deltafin/engine/plan"
)

type planCmd struct {
	Model   string    `placeholder:"DIR" type:"path" help:"Checkpoint to plan for. Default: the full Kimi K3, which need not be there."`
	Drive   []string  `placeholder:"DIR" type:"path" help:"Directory on a drive that will hold experts; its large files are read to measure it. May be repeated. Default: the checkpoint's directory."`
	Rate    []float64 `placeholder:"GB/S" help:"Take a drive of this rate instead of measuring one. May be repeated."`
	Memory  string    `placeholder:"SIZE" help:"Ceiling of memory, such as 24GB. Default: three quarters of what is available."`
	Context int       `placeholder:"N" help:"Most tokens of prompt and text together. Default: 4096."`
	Rows    int       `placeholder:"N" help:"Most tokens to compute in one pass. Default: ${rows}, or what the memory allows."`
	Draft   []string  `placeholder:"NAME|DIR" default:"ngram" sep:"none" help:"What will guess tokens, as in a run. Default: ngram."`
	Spine   string    `placeholder:"FILE" type:"path" help:"Packed dense weights ('deltafin pack spine') of the checkpoint."`
	Threads int       `placeholder:"N" help:"Worker threads. Default: one per processor."`
}

// Help is shown below the flags.
func (*planCmd) Help() string {
	return "Shares the memory out as 'run' with the same flags would, measures this machine's kernels and drives for a few seconds, and prints where the model's bytes would lie, how many move per token, how long the first token of a prompt and each further one would take, and what one more drive or 32 GB more would change." + exitCodes
}

// Run measures and prints.
func (c *planCmd) Run(ctx context.Context, std streams) error {
	memory, err := parseSize("--memory", c.Memory)
	if err != nil {
		return err
	}
	if c.Context < 0 || c.Rows < 0 {
		return usage("--context and --rows count from 1: leave them out for the default")
	}
	if c.Threads < 0 || c.Threads > maxThreads {
		return usage("--threads %d: give 1 to %d", c.Threads, maxThreads)
	}
	var m plan.Machine
	for _, r := range c.Rate {
		if !sensible(r) {
			return usage("--rate %g is not a rate in GB/s", r)
		}
		m.Drives = append(m.Drives, r*1e9)
	}
	dirs := c.Drive
	if len(dirs) == 0 && len(c.Rate) == 0 {
		if c.Model == "" {
			return usage("no drive to plan for: give --drive DIR with a checkpoint on it, or --rate GB/S")
		}
		dirs = []string{c.Model}
	}
	ck := checkpoint.Sketch("the full Kimi K3", checkpoint.K3())
	if c.Model != "" {
		if ck, err = lookAt(c.Model); err != nil {
			return failure{exitModel, err}
		}
		defer ck.Close()
	} else if c.Spine != "" {
		return usage("--spine needs --model DIR, the checkpoint that it was packed from")
	}
	proposers, err := checkDraft(c.Draft)
	if err != nil {
		return err
	}
	// One drive holds the checkpoint, the others copies.
	o := engine.Options{Memory: memory, Context: c.Context, PassRows: c.Rows, SpinePack: c.Spine, Draft: proposers, ExpertDirs: make([]string, len(dirs)+len(c.Rate)-1), Warn: remark(std)}
	if _, err := engine.Account(ck, o); err != nil {
		return openError(err)
	}
	o.Warn = func(string) {} // once is enough
	drives := drive.NewSet(drive.Options{Warn: remark(std)})
	defer drives.Close()
	for _, d := range dirs {
		rate, err := plan.MeasureDrive(ctx, drives, d, ck.ExpertLayout().ExpertBytes, 2*time.Second)
		if err != nil {
			return err
		}
		m.Drives = append(m.Drives, rate)
	}
	threads := c.Threads
	if threads <= 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	pool := kernel.NewPool(threads)
	defer pool.Close()
	if err := plan.MeasureKernels(pool, &m); err != nil {
		return err
	}
	return openError(plan.Write(std.out, ck, o, m))
}
