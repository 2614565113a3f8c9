package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/disk"
	"deltafin/engine/drive"
	"deltafin/engine/expert"
	"deltafin/engine/plan"
	"deltafin/engine/spine"
)

type packCmd struct {
	Spine packSpineCmd `cmd:"" help:"Copy the dense weights into one file that streams faster."`
}

// Help is shown below the flags.
func (*packCmd) Help() string { return exitCodes }

type packSpineCmd struct {
	Model string `arg:"" type:"path" help:"Checkpoint directory."`
	Out   string `arg:"" type:"path" help:"File to write; give it to 'run --spine'."`
	Int8  bool   `name:"int8" help:"Narrow matrices to eight bits with a scale per row: half the bytes, and no longer the released weights."`
}

// Help is shown below the flags.
func (*packSpineCmd) Help() string {
	return "The file holds each piece of the dense weights as one aligned run, in the order of a pass. It appears whole or not at all." + exitCodes
}

// Run packs.
func (c *packSpineCmd) Run(ctx context.Context, std streams) error {
	if err := checkOutput("the packed file", c.Out, c.Model); err != nil {
		return err
	}
	ck, closeModel, err := openCheckpoint(ctx, std, c.Model)
	if err != nil {
		return err
	}
	defer closeModel()
	bar := newProgress(std.err, "dense weights", true)
	err = spine.Pack(ctx, ck, c.Out, c.Int8, bar.update)
	bar.done()
	return spaceError(err)
}

type placeCmd struct {
	Plan   placePlanCmd   `cmd:"" help:"Decide which experts get copies on further drives."`
	Stage  placeStageCmd  `cmd:"" help:"Make the copies that a plan asks for."`
	Verify placeVerifyCmd `cmd:"" help:"Re-read copies and compare them with their digests."`
}

// Help is shown below the flags.
func (*placeCmd) Help() string {
	return "Copies of experts on further drives are read beside the checkpoint: give their directories to 'run --experts DIR'. They change speed only." + exitCodes
}

type placePlanCmd struct {
	Model string   `required:"" placeholder:"DIR" type:"path" help:"Checkpoint directory."`
	To    []string `required:"" placeholder:"DIR=SIZE[@GB/S]" help:"Directory for copies, how many bytes it may take, and its drive's rate; without a rate the directory's own large files are read to measure it. May be repeated."`
	Heat  string   `placeholder:"FILE" type:"path" help:"Heat file of past runs (run --heat): copy what is used most."`
	Rate  float64  `placeholder:"GB/S" help:"Rate of the checkpoint's own drive. Default: measured."`
	Out   string   `required:"" placeholder:"FILE" type:"path" help:"File to write the plan to."`
}

// Run plans.
func (c *placePlanCmd) Run(ctx context.Context, std streams) error {
	if err := checkOutput("--out", c.Out, c.Model); err != nil {
		return err
	}
	if c.Rate != 0 && !sensible(c.Rate) {
		return usage("--rate %g is not a rate in GB/s", c.Rate)
	}
	ck, closeModel, err := openCheckpoint(ctx, std, c.Model)
	if err != nil {
		return err
	}
	defer closeModel()
	size := ck.ExpertLayout().ExpertBytes
	drives := drive.NewSet(drive.Options{Warn: remark(std)})
	defer drives.Close()
	primary := c.Rate * 1e9
	if primary <= 0 {
		if primary, err = plan.MeasureDrive(ctx, drives, c.Model, size, 2*time.Second); err != nil {
			return err
		}
	}
	var targets []expert.PlaceTarget
	for _, to := range c.To {
		dir, rest, ok := strings.Cut(to, "=")
		if !ok || dir == "" {
			return usage("--to %q: write DIR=SIZE or DIR=SIZE@GB/S", to)
		}
		text, rateText, given := strings.Cut(rest, "@")
		bytes, err := parseSize("--to", text)
		if err != nil {
			return err
		}
		t := expert.PlaceTarget{Dir: dir, Bytes: bytes}
		if given {
			gb, err := strconv.ParseFloat(rateText, 64)
			if err != nil || !sensible(gb) {
				return usage("--to %q: %q is not a rate in GB/s", to, rateText)
			}
			t.Rate = gb * 1e9
		} else if t.Rate, err = plan.MeasureDrive(ctx, drives, dir, size, 2*time.Second); err != nil {
			return err
		}
		targets = append(targets, t)
	}
	var heat *expert.Heat
	if c.Heat != "" {
		print, err := expert.Fingerprint(ck)
		if err != nil {
			return failure{exitModel, err}
		}
		if heat, err = expert.ReadHeat(c.Heat, ck.Config(), print); err != nil {
			return heatError(err)
		}
	}
	p, err := expert.PlacePlan(ck, heat, primary, targets)
	if err != nil {
		return usage("%w", err)
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := disk.WriteFile(c.Out, append(text, '\n'), 0o644); err != nil {
		return spaceError(err)
	}
	for _, d := range p.Dirs {
		fmt.Fprintf(std.out, "%s: %d experts, %.2f GB, %.1f%% of the routes\n", d.Dir, d.Count, float64(d.Bytes)/1e9, 100*d.Heat)
	}
	return nil
}

type placeStageCmd struct {
	Model   string `required:"" placeholder:"DIR" type:"path" help:"Checkpoint directory."`
	Plan    string `arg:"" type:"path" help:"File that 'place plan' wrote."`
	Reserve string `default:"4GB" placeholder:"SIZE" help:"Space to leave free on each drive."`
}

// Help is shown below the flags.
func (*placeStageCmd) Help() string {
	return "Each layer's file appears when it has been written, read back and compared. An interrupted stage goes on where it stopped." + exitCodes
}

// maxPlan bounds the file of a plan: 82,432 ids of up to 6 bytes for each of a few directories.
const maxPlan = 16 << 20

// Run copies.
func (c *placeStageCmd) Run(ctx context.Context, std streams) error {
	reserve, err := parseSize("--reserve", c.Reserve)
	if err != nil {
		return err
	}
	ck, closeModel, err := openCheckpoint(ctx, std, c.Model)
	if err != nil {
		return err
	}
	defer closeModel()
	p, err := readPlan(c.Plan)
	if err != nil {
		return err
	}
	drives := drive.NewSet(drive.Options{})
	defer drives.Close()
	for _, d := range p.Dirs {
		bar := newProgress(std.err, d.Dir, true)
		err := expert.PlaceStage(ctx, ck, drives, d, expert.StageOptions{Reserve: reserve, Progress: bar.update})
		bar.done()
		if err != nil {
			return spaceError(err)
		}
		fmt.Fprintf(std.out, "%s: %d experts staged\n", d.Dir, d.Count)
	}
	return nil
}

func readPlan(path string) (*expert.Placement, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, usage("the plan: %w", err)
	}
	if info.Size() > maxPlan {
		return nil, usage("%s has %d bytes, which no plan has: give a file that 'place plan' wrote", path, info.Size())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var p expert.Placement
	if err := json.Unmarshal(text, &p); err != nil {
		return nil, usage("%s is not a plan: %w: give a file that 'place plan' wrote", path, err)
	}
	return &p, nil
}

type placeVerifyCmd struct {
	Model string   `required:"" placeholder:"DIR" type:"path" help:"Checkpoint directory."`
	Dirs  []string `arg:"" name:"dir" help:"Directories with copies, or addresses of web servers that serve such."`
}

// Run compares.
func (c *placeVerifyCmd) Run(ctx context.Context, std streams) error {
	ck, closeModel, err := openCheckpoint(ctx, std, c.Model)
	if err != nil {
		return err
	}
	defer closeModel()
	bad := 0
	for _, dir := range homes(c.Dirs) {
		sound, faults, err := expert.PlaceVerify(ctx, ck, dir, nil)
		if err != nil {
			return failure{exitModel, err}
		}
		for _, f := range faults {
			bad++
			fmt.Fprintln(std.out, f)
		}
		fmt.Fprintf(std.out, "%s: %d experts sound, %d files with faults\n", dir, sound, len(faults))
	}
	if bad > 0 {
		return failure{exitModel, fmt.Errorf("%d files with faults: remove them and stage again", bad)}
	}
	return nil
}

type simulateCmd struct {
	Trace  string   `arg:"" type:"path" help:"Trace of routes (run --trace FILE)."`
	Model  string   `placeholder:"DIR" type:"path" help:"Checkpoint whose expert size is taken. Default: the full Kimi K3's."`
	Memory []string `default:"8GB,16GB,32GB,64GB,128GB" placeholder:"SIZE,..." help:"Sizes of memory for experts to try."`
	Drive  []string `placeholder:"GB/S[:SIZE]" help:"Drive of a placement to try: its rate and the room for copies on it; the first holds all experts. May be repeated."`
	JSON   bool     `name:"json" help:"Print one JSON object."`
}

// Help is shown below the flags.
func (*simulateCmd) Help() string {
	return "Replays a trace and prints how many bytes per token would come from drives with caches of several sizes (least recently used, pinned by heat, and Belady's, which no cache can beat), and how long reads would take with copies on further drives." + exitCodes
}

// Run replays.
func (c *simulateCmd) Run(std streams) error {
	o := expert.SimulateOptions{ExpertBytes: plan.ShapeOf(checkpoint.K3()).ExpertBytes}
	if c.Model != "" {
		ck, err := lookAt(c.Model)
		if err != nil {
			return failure{exitModel, err}
		}
		o.ExpertBytes = ck.ExpertLayout().ExpertBytes
		ck.Close()
	}
	for _, m := range c.Memory {
		bytes, err := parseSize("--memory", m)
		if err != nil {
			return err
		}
		o.Caches = append(o.Caches, bytes)
	}
	for i, d := range c.Drive {
		rate, room, _ := strings.Cut(d, ":")
		gb, err := strconv.ParseFloat(rate, 64)
		if err != nil || !sensible(gb) {
			return usage("--drive %q: %q is not a rate in GB/s", d, rate)
		}
		bytes, err := parseSize("--drive", room)
		if err != nil {
			return err
		}
		o.Drives = append(o.Drives, expert.SimDrive{Name: "drive " + strconv.Itoa(i+1), Rate: gb * 1e9, Bytes: bytes})
	}
	f, err := os.Open(c.Trace)
	if err != nil {
		return usage("the trace: %w", err)
	}
	defer f.Close()
	r, err := expert.NewTraceReader(f)
	if err != nil {
		return usage("%s: %w", c.Trace, err)
	}
	defer r.Close()
	s, err := expert.Simulate(r, o)
	if err != nil {
		return usage("%s: %w", c.Trace, err)
	}
	if c.JSON {
		return json.NewEncoder(std.out).Encode(s)
	}
	return s.WriteText(std.out)
}
