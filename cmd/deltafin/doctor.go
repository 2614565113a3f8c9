package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"deltafin/engine/doctor"
	"deltafin/golden/nano"
)

type doctorCmd struct {
	Model   string   `placeholder:"DIR" type:"path" help:"Checkpoint directory to examine. Without it only the machine and the built-in model are."`
	Experts []string `placeholder:"DIR" help:"Directory with copies of experts ('deltafin place'); may be repeated. Addresses of web servers are passed over."`
	Spine   string   `placeholder:"FILE" type:"path" help:"Packed dense weights ('deltafin pack spine')."`
	Memory  string   `placeholder:"SIZE" help:"Memory that a run is to use, such as 12GB. Default: three quarters of what is available."`
	Context int      `placeholder:"N" help:"Tokens of prompt and text together that a run is to hold. Default: 4096."`
	JSON    bool     `name:"json" help:"Print one JSON object; docs/doctor.md has its fields."`
	Quick   bool     `help:"Measure no drive and no kernel, and generate nothing."`
}

// Help is shown below the flags.
func (*doctorCmd) Help() string {
	return `Examines the machine, the drives and the model, and says what to do about what it finds. It takes a few seconds, uses no network and changes nothing (a copy of the built-in model may lie among the temporary files meanwhile). Of a model only names, sizes and headers are looked at: 'deltafin verify --deep' reads it.

Exit codes: 0 nothing that would keep a run from working, warnings included; 1 the machine computes or reads wrongly; 2 wrong flag;
3 the model is missing, incomplete or damaged; 4 not enough memory, disk, or open files; 130 interrupted. Of several errors the first of 1, 3, 4 counts.`
}

// examined is the object that --json prints.
type examined struct {
	Program string `json:"program"`
	*doctor.Report
	ExitCode int `json:"exit_code"`
}

// Run examines.
func (c *doctorCmd) Run(ctx context.Context, std streams) error {
	memory, err := parseSize("--memory", c.Memory)
	if err != nil {
		return err
	}
	if c.Context < 0 {
		return usage("--context counts from 1: leave it out for the default")
	}
	cache := nanoDir()
	o := doctor.Options{
		Model: c.Model, Experts: homes(c.Experts), Spine: c.Spine, Memory: memory, Context: c.Context, Quick: c.Quick,
		Cache: cache, Unpacked: isUnpacked(nano.FS(), cache), Miniature: temporaryNano,
	}
	if !c.JSON {
		o.Found = func(f doctor.Finding) { printFinding(std.out, f) }
	}
	r, err := doctor.Examine(ctx, o)
	if err != nil {
		return err
	}
	code := map[doctor.Fault]int{"": 0, doctor.Machine: exitFailed, doctor.Model: exitModel, doctor.Resources: exitResources}[r.Fault]
	if c.JSON {
		err = json.NewEncoder(std.out).Encode(examined{version(), r, code})
	} else {
		_, err = fmt.Fprintf(std.out, "ok %d, notes %d, warnings %d, errors %d\n", r.Count(doctor.OK), r.Count(doctor.Note), r.Count(doctor.Warning), r.Count(doctor.Error))
	}
	if err != nil {
		return fmt.Errorf("the findings cannot be written: %w", err)
	}
	if code != 0 {
		return failure{code, fmt.Errorf("errors: %d, the gravest about the %s: do what the findings say", r.Count(doctor.Error), r.Fault)}
	}
	return nil
}

// printFinding prints a finding as one line, and a second with what to do.
func printFinding(w io.Writer, f doctor.Finding) {
	what := f.What
	if what != "" {
		what += ": "
	}
	fmt.Fprintf(w, "%-8s %-16s %s%s\n", f.Level, f.ID, what, f.Value)
	if f.Do != "" {
		fmt.Fprintf(w, "%-8s %-16s -> %s\n", "", "", f.Do)
	}
}
