package main

import (
	"context"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/checkpoint"
	"deltafin/engine/expert"
	"deltafin/engine/hub"
)

// openStream opens what fills a model's directory on demand; nil if it is complete.
func openStream(ctx context.Context, std streams, dir string) (*hub.Depot, error) {
	if !hub.IsStream(dir) {
		return nil, nil
	}
	d, err := hub.OpenStream(ctx, hub.DepotOptions{Options: hub.Options{Dir: dir, Token: os.Getenv("HF_TOKEN"), Log: remark(std)}})
	return d, streamError(err)
}

// closeStream closes what openStream returned.
func closeStream(d *hub.Depot) error {
	if d == nil {
		return nil
	}
	return d.Close()
}

// stream installs a model whose experts come on demand.
func (c *fetchCmd) stream(ctx context.Context, std streams, o hub.Options) error {
	if len(c.Spread) > 0 || c.DryRun {
		return usage("--spread and --dry-run go with --full")
	}
	keep := int64(-1) // all of them
	if c.Keep != "all" {
		var err error
		if keep, err = parseSize("--keep", c.Keep); err != nil {
			return err
		}
	}
	o.Confirm = func(p *hub.Plan) error {
		c.describe(std, p)
		return c.confirm(std, p)
	}
	bar := newProgress(std.err, "fetched", true)
	o.Progress = func(p hub.Progress) { bar.update(p.Done, p.Total) }
	d, err := hub.OpenDepot(ctx, hub.DepotOptions{Options: o, Keep: keep, TrustHTTP: c.Trust})
	bar.done()
	if err != nil {
		return spaceError(err)
	}
	defer d.Close()
	d.Prove()
	if !hub.IsStream(c.Dir) {
		fmt.Fprintf(std.out, "%s: complete and verified\n", c.Dir)
		return d.Close()
	}
	ck, err := checkpoint.OpenFilling(c.Dir, d)
	if err != nil {
		return failure{exitModel, err}
	}
	defer ck.Close()
	// What tells models apart lies in the experts; it is here from now on.
	if _, err := expert.Fingerprint(ck); err != nil {
		return err
	}
	fmt.Fprintf(std.out, "%s: ready; experts come when they are needed\n", c.Dir)
	return d.Close()
}

type warmCmd struct {
	Dir         string `arg:"" type:"path" help:"Directory that 'deltafin fetch --stream' made."`
	Heat        string `xor:"of" placeholder:"FILE" type:"path" help:"Heat file of past runs (run --heat): the experts that were used most come first."`
	Trace       string `xor:"of" placeholder:"FILE" type:"path" help:"Trace of routes (run --trace), likewise."`
	Experts     int    `xor:"size" placeholder:"N" help:"How many experts to have here afterwards. Default: those that the heat or the trace has."`
	Bytes       string `xor:"size" placeholder:"SIZE" help:"How many bytes of experts to have here afterwards."`
	Connections int    `default:"8" placeholder:"N" help:"Requests at a time. Default: 8."`
	Limit       string `placeholder:"SIZE" help:"Most bytes per second, such as 50MB."`
}

// Help is shown below the flags.
func (*warmCmd) Help() string {
	return "What is here already is not fetched again, so that the same command goes on where it stopped. Without --heat or --trace the first experts of all layers are taken. It stays within the bound that 'fetch --stream --keep' set." + exitCodes
}

// Run fetches.
func (c *warmCmd) Run(ctx context.Context, std streams) error {
	if c.Experts < 0 || c.Connections < 1 || c.Connections > 256 {
		return usage("--experts counts from 1, --connections goes from 1 to 256")
	}
	bytes, err := parseSize("--bytes", c.Bytes)
	if err != nil {
		return err
	}
	limit, err := parseSize("--limit", c.Limit)
	if err != nil {
		return err
	}
	if c.Heat == "" && c.Trace == "" && c.Experts == 0 && bytes == 0 {
		return usage("nobody says which experts are likely: give --heat FILE, --trace FILE, --experts N or --bytes SIZE; all of them come with 'fetch --full'")
	}
	if !hub.IsStream(c.Dir) {
		return usage("%s: is not streamed: 'deltafin fetch --stream' makes such a directory, and a complete one needs no warming", c.Dir)
	}
	d, err := hub.OpenStream(ctx, hub.DepotOptions{Options: hub.Options{
		Dir: c.Dir, Connections: c.Connections, BytesPerSecond: float64(limit), Token: os.Getenv("HF_TOKEN"), Log: remark(std),
	}})
	if err != nil {
		return streamError(err)
	}
	defer d.Close()
	ck, err := checkpoint.OpenFilling(c.Dir, d)
	if err != nil {
		return failure{exitModel, err}
	}
	defer ck.Close()
	heat, err := c.heat(ck)
	if err != nil {
		return err
	}
	size, m := ck.ExpertLayout().ExpertBytes, ck.Config()
	var chosen []int32
	switch {
	case c.Experts > 0:
		chosen = heat.All()
		chosen = chosen[:min(c.Experts, len(chosen))]
	case bytes > 0:
		chosen = heat.All()
		chosen = chosen[:min(bytes/size, int64(len(chosen)))]
	default:
		chosen = heat.Hottest(len(heat.All()))
	}
	if keep := d.Keep(); keep > 0 && int64(len(chosen))*size > keep {
		chosen = chosen[:keep/size]
		remark(std)(fmt.Sprintf("%s keeps %.2f GB of experts, so only the %d likeliest come", c.Dir, float64(keep)/1e9, len(chosen)))
	}
	return c.fetch(ctx, std, d, len(chosen), size, func(i int) (string, int64) {
		x := ck.Expert(m.FirstDense+int(chosen[i])/m.Experts, int(chosen[i])%m.Experts)
		return ck.Shard(x.File), x.Offset
	})
}

// heat is what is known of how likely experts are.
func (c *warmCmd) heat(ck *checkpoint.Checkpoint) (*expert.Heat, error) {
	print, err := expert.Fingerprint(ck)
	if err != nil {
		return nil, err
	}
	if c.Heat != "" {
		h, err := expert.ReadHeat(c.Heat, ck.Config(), print)
		return h, heatError(err)
	}
	heat := expert.NewHeat(ck.Config(), print)
	if c.Trace == "" {
		return heat, nil
	}
	f, err := os.Open(c.Trace)
	if err != nil {
		return nil, usage("--trace: %w: give a file that 'run --trace' wrote", err)
	}
	defer f.Close()
	r, err := expert.NewTraceReader(f)
	if err == nil {
		defer r.Close()
		err = heat.ObserveTrace(r)
	}
	if err != nil {
		return nil, usage("%s: %w", c.Trace, err)
	}
	return heat, nil
}

// heatError is for commands that only read a heat file, and so cannot do without it.
func heatError(err error) error {
	if err == nil {
		return nil
	}
	return usage("--heat: %w: give a file that 'run --heat' wrote for this model", err)
}

// fetch has n experts of size bytes, where at says, brought into the store.
func (c *warmCmd) fetch(ctx context.Context, std streams, d *hub.Depot, n int, size int64, at func(i int) (shard string, off int64)) error {
	bar := newProgress(std.err, "experts", true)
	defer bar.done()
	var mu sync.Mutex
	here, came := int64(0), 0
	step := func(fetched bool) {
		mu.Lock()
		defer mu.Unlock()
		if here += size; fetched {
			came++
		}
		bar.update(here, int64(n)*size)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(c.Connections)
	for i := range n {
		shard, off := at(i)
		if release, ok := d.Hold(shard, off, size); ok { // a use, so that it is not dropped for the others
			release()
			step(false)
			continue
		}
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error {
			err := d.Ensure(gctx, shard, off, size)
			if err == nil {
				step(true)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return spaceError(err)
	}
	bar.done()
	d.Prove()
	fmt.Fprintf(std.out, "%s: %d experts are here, %d of them fetched now, %.2f GB\n", c.Dir, n, came, float64(came)*float64(size)/1e9)
	return ctx.Err()
}
