package main

import (
	"context"
	"fmt"

	"deltafin/engine/synth"
)

type synthCmd struct {
	Dir    string `arg:"" type:"path" help:"Directory to write; it must be empty, absent, or an interrupted run of the same command."`
	Preset string `required:"" enum:"${presets}" help:"Dimensions to start from: ${presets}."`
	Layers int    `placeholder:"N" help:"Number of layers instead of the preset's."`
	Vocab  int    `placeholder:"N" help:"Vocabulary instead of the preset's; K3's is 163840."`
	Seed   uint64 `placeholder:"N" help:"The same seed and dimensions give the same bytes everywhere."`
	DryRun bool   `help:"Only say how many bytes it takes."`
}

// Help is shown below the flags.
func (*synthCmd) Help() string {
	s := "Writes a checkpoint in the released layout with random weights, to measure storage and speed at true dimensions without the model. It has no tokenizer: run it with --ids.\n\nPresets:\n"
	for _, p := range synth.Presets() {
		s += fmt.Sprintf("  %-12s %s\n", p, synth.Summary(p))
	}
	return s + exitCodes
}

// Run writes the checkpoint.
func (c *synthCmd) Run(ctx context.Context, std streams) error {
	p, err := synth.Preset(c.Preset)
	if err != nil {
		return usage("%w", err)
	}
	if c.Layers < 0 || c.Vocab < 0 {
		return usage("--layers and --vocab count from 1")
	}
	p.Seed = c.Seed
	if c.Layers > 0 {
		p.Layers = c.Layers
	}
	if c.Vocab > 0 {
		p.Vocab = c.Vocab
	}
	size, err := synth.Size(p)
	if err != nil {
		return usage("%w", err)
	}
	if c.DryRun {
		fmt.Fprintf(std.out, "%d bytes (%.2f GB)\n", size, float64(size)/1e9)
		return nil
	}
	bar := newProgress(std.err, c.Dir, true)
	err = synth.Write(ctx, c.Dir, p, bar.update)
	bar.done()
	if err != nil {
		return spaceError(err)
	}
	fmt.Fprintf(std.out, "%s: %.2f GB written\n", c.Dir, float64(size)/1e9)
	return nil
}
