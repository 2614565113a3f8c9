package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"deltafin/engine/hub"
)

type verifyCmd struct {
	Dir    string `arg:"" type:"path" help:"Directory that 'deltafin fetch' filled."`
	Deep   bool   `help:"Read every byte and compare digests; an interrupted run goes on where it stopped."`
	Sample string `placeholder:"1/N" help:"Read one chunk in so many, chosen at random."`
	Repair bool   `help:"Fetch what is bad or missing."`
	JSON   bool   `name:"json" help:"Print one JSON object."`
	hubFlags
}

// Help is shown below the flags.
func (*verifyCmd) Help() string {
	return "Without --deep or --sample it looks at names, sizes and structure, which takes seconds." + exitCodes
}

// Run looks.
func (c *verifyCmd) Run(ctx context.Context, std streams) error {
	v := hub.VerifyOptions{Deep: c.Deep, Log: remark(std)}
	if c.Sample != "" {
		n, err := strconv.Atoi(strings.TrimPrefix(c.Sample, "1/"))
		if err != nil || n < 1 {
			return usage("--sample %q: write 1/64 for one chunk in 64", c.Sample)
		}
		v.Sample = n
	}
	if c.Repair {
		o, err := c.options(std)
		if err != nil {
			return err
		}
		v.Repair = &o
	}
	bar := newProgress(std.err, "verified", true)
	v.Progress = func(p hub.Progress) { bar.update(p.Done, p.Total) }
	r, err := hub.Verify(ctx, c.Dir, v)
	bar.done()
	if err != nil {
		return streamError(err)
	}
	if c.JSON {
		err = json.NewEncoder(std.out).Encode(r)
	} else {
		for _, d := range r.Repaired {
			fmt.Fprintf(std.out, "repaired %s\n", d)
		}
		for _, d := range r.Bad {
			fmt.Fprintln(std.out, d)
		}
		away := ""
		if r.Away > 0 {
			away = fmt.Sprintf(", %.2f GB of them to come on demand", float64(r.Away)/1e9)
		}
		_, err = fmt.Fprintf(std.out, "%s: %d files, %.2f GB%s, %.2f GB read; %d faults left, %d repaired\n", c.Dir, r.Files, float64(r.Bytes)/1e9, away, float64(r.Read+r.Resumed)/1e9, len(r.Bad), len(r.Repaired))
	}
	if err == nil && !r.OK() {
		err = failure{exitModel, errors.New("the model is damaged: run 'deltafin verify --repair'")}
	}
	return err
}
