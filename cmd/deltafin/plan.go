package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/kernel"
	"deltafin/engine/machine"
	"deltafin/engine/plan"
)

type planCmd struct {
	Model   string    `placeholder:"DIR" type:"path" help:"Checkpoint whose sizes are taken. Default: the full Kimi K3."`
	Drive   []string  `placeholder:"DIR" type:"path" help:"Directory on a drive that will hold experts; its large files are read to measure it. May be repeated. Default: the checkpoint's directory."`
	Rate    []float64 `placeholder:"GB/S" help:"Take a drive of this rate instead of measuring one. May be repeated."`
	Memory  string    `placeholder:"SIZE" help:"Memory the engine may use, such as 24GB. Default: three quarters of what is available."`
	Threads int       `placeholder:"N" help:"Worker threads. Default: one per processor."`
}

// Help is shown below the flags.
func (*planCmd) Help() string {
	return "Measures this machine's kernels and drives for a few seconds and prints where the model's bytes would lie, how many move per token, how long the first token of a prompt and each further one would take, and what one more drive or 32 GB more would change." + exitCodes
}

// Run measures and prints.
func (c *planCmd) Run(ctx context.Context, std streams) error {
	cfg := plan.K3()
	if c.Model != "" {
		ck, err := checkpoint.Open(c.Model)
		if err != nil {
			return failure{exitModel, err}
		}
		cfg = ck.Config()
		ck.Close()
	}
	memory, err := parseSize("--memory", c.Memory)
	if err != nil {
		return err
	}
	m := plan.Machine{Memory: memory}
	if m.Memory == 0 {
		m.Memory = machine.AvailableMemory() / 4 * 3
	}
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
	shape := plan.ShapeOf(cfg)
	for _, d := range dirs {
		rate, err := plan.MeasureDrive(ctx, d, shape.ExpertBytes, 2*time.Second)
		if err != nil {
			return err
		}
		m.Drives = append(m.Drives, rate)
	}
	if c.Threads < 0 || c.Threads > maxThreads {
		return usage("--threads %d: give 1 to %d", c.Threads, maxThreads)
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
	fmt.Fprintf(std.out, "model     %d layers, %d experts of %.2f MB, %d per token\n", shape.Layers, shape.Experts, float64(shape.ExpertBytes)/1e6, shape.TopK)
	plan.Write(std.out, shape, m)
	return nil
}
