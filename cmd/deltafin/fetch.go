package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/term"

	"deltafin/engine/hub"
)

// hubFlags say where a model comes from.
type hubFlags struct {
	Source      []string `placeholder:"URL" help:"Address of a hub, or of a mirror; the next serves while one fails. Default: ${hub}."`
	Repo        string   `default:"${repo}" placeholder:"NAME" help:"Model on the hub. Default: ${repo}."`
	Revision    string   `placeholder:"ID" help:"Commit to fetch. Default: the pinned one."`
	Connections int      `default:"8" placeholder:"N" help:"Requests at a time. Default: 8."`
	Limit       string   `placeholder:"SIZE" help:"Most bytes per second, such as 50MB."`
}

func (f *hubFlags) options(std streams) (hub.Options, error) {
	limit, err := parseSize("--limit", f.Limit)
	if err != nil {
		return hub.Options{}, err
	}
	if f.Connections < 1 || f.Connections > 256 {
		return hub.Options{}, usage("--connections %d: give 1 to 256", f.Connections)
	}
	return hub.Options{
		Sources: f.Source, Repo: f.Repo, Revision: f.Revision, Connections: f.Connections, BytesPerSecond: float64(limit),
		Token: os.Getenv("HF_TOKEN"), Log: remark(std),
	}, nil
}

type fetchCmd struct {
	Dir    string   `arg:"" type:"path" help:"Directory for the model."`
	Full   bool     `required:"" xor:"how" help:"Fetch all files of the model (1.56 TB for Kimi K3)."`
	Stream bool     `required:"" xor:"how" help:"Fetch everything but the routed experts (111 GB of weights for Kimi K3); they come when a run needs them."`
	Keep   string   `placeholder:"SIZE" help:"With --stream: most bytes of experts to keep, such as 200GB; what was not used for the longest time goes. Remembered. 'all' keeps all, which is the default."`
	Trust  bool     `name:"trust-http" help:"With --stream: take experts from http sources too, though nobody states a digest for them. Remembered."`
	Spread []string `placeholder:"DIR[=WEIGHT]" help:"Drive that takes a share of the files; may be repeated. The model's directory then holds links."`
	Yes    bool     `short:"y" help:"Do not ask before the first byte."`
	DryRun bool     `help:"Only say what would be fetched and where it would go."`
	hubFlags
}

// Help is shown below the flags.
func (*fetchCmd) Help() string {
	return "Every file appears under its name only when all of it has arrived and its SHA-256 is right. Whatever ends a fetch, the same command goes on where it stopped. HF_TOKEN is sent to the hub only, and never printed." + exitCodes
}

// Run fetches.
func (c *fetchCmd) Run(ctx context.Context, std streams) error {
	o, err := c.options(std)
	if err != nil {
		return err
	}
	o.Dir = c.Dir
	if c.Stream {
		return c.stream(ctx, std, o)
	}
	if c.Keep != "" || c.Trust {
		return usage("--keep and --trust-http go with --stream")
	}
	for _, s := range c.Spread {
		dir, weight, given := strings.Cut(s, "=")
		t := hub.Target{Dir: dir, Weight: 1}
		if given {
			if t.Weight, err = strconv.ParseFloat(weight, 64); err != nil || !sensible(t.Weight) {
				return usage("--spread %q: %q is not a weight", s, weight)
			}
		}
		o.Spread = append(o.Spread, t)
	}
	if c.DryRun {
		o.Retries = 3 // somebody waits for an answer, not for a model
		p, err := hub.Preview(ctx, o)
		if err != nil {
			return spaceError(err)
		}
		c.describe(std, p)
		return nil
	}
	o.Confirm = func(p *hub.Plan) error {
		c.describe(std, p)
		return c.confirm(std, p)
	}
	bar := newProgress(std.err, "fetched", true)
	o.Progress = func(p hub.Progress) { bar.update(p.Done, p.Total) }
	err = hub.Fetch(ctx, o)
	bar.done()
	if err != nil {
		return spaceError(err)
	}
	fmt.Fprintf(std.out, "%s: complete and verified\n", c.Dir)
	return nil
}

func (c *fetchCmd) describe(std streams, p *hub.Plan) {
	gb := func(n int64) float64 { return float64(n) / 1e9 }
	fmt.Fprintf(std.err, "%s at %.12s: %d files, %.2f GB; here already %.2f, to be checked %.2f, unfinished %.2f, to be fetched %.2f GB\n",
		p.Repo, p.Revision, p.Files, gb(p.Bytes), gb(p.Have), gb(p.Check), gb(p.Arrived), gb(p.Need))
	for _, d := range p.Drives {
		fmt.Fprintf(std.err, "  %s: %d files, %.2f GB to write, %.2f GB free\n", d.Dir, d.Files, gb(d.Need), gb(d.Free))
	}
}

// confirm asks on a terminal; elsewhere --yes is needed for more than a gigabyte.
func (c *fetchCmd) confirm(std streams, p *hub.Plan) error {
	if c.Yes || p.Need < 1e9 {
		return nil
	}
	f, ok := std.in.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return usage("%.2f GB would be fetched: give --yes to agree", float64(p.Need)/1e9)
	}
	fmt.Fprint(std.err, "Fetch? [y/N] ")
	line, err := bufio.NewReader(f).ReadString('\n')
	if err != nil || !strings.EqualFold(strings.TrimSpace(line), "y") {
		return usage("nothing was fetched")
	}
	return nil
}
