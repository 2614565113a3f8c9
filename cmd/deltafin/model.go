package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"slices"

	"deltafin/engine"
	"deltafin/engine/checkpoint"
	"deltafin/engine/draft"
	"deltafin/engine/hub"
	"deltafin/engine/opt"
	"deltafin/engine/tokenizer"
)

// modelFlag is shared by the commands that need a checkpoint directory.
type modelFlag struct {
	Model string `placeholder:"DIR" type:"path" help:"Checkpoint directory in the released layout. Default: K3-nano, the built-in miniature."`
}

// miniatureRemark is printed whenever the built-in model runs.
const miniatureRemark = "deltafin: running K3-nano, the built-in miniature, which knows little; for the full Kimi K3 run 'deltafin fetch --full DIR' and give --model DIR"

// miniature tells whether the built-in model is meant.
func (f *modelFlag) miniature() bool { return f.Model == "" }

// dir is the checkpoint directory; the built-in model is unpacked to one first.
func (f *modelFlag) dir() (string, error) {
	if f.miniature() {
		return unpackNano()
	}
	info, err := os.Stat(f.Model)
	switch {
	case err != nil:
		return "", failure{exitModel, fmt.Errorf("--model: %w: give the directory of a checkpoint", err)}
	case !info.IsDir():
		return "", failure{exitModel, fmt.Errorf("--model: %s is not a directory: give the directory of a checkpoint", f.Model)}
	}
	return f.Model, nil
}

// tokenizer opens the tokenizer of the checkpoint.
func (f *modelFlag) tokenizer() (*tokenizer.Tokenizer, error) {
	dir, err := f.dir()
	if err != nil {
		return nil, err
	}
	return openTokenizer(dir)
}

// engineFlags are shared by the commands that run a model.
type engineFlags struct {
	modelFlag
	Threads int      `placeholder:"N" help:"Worker threads. Default: one per processor. Changes speed only."`
	Rows    int      `placeholder:"N" help:"Most tokens to compute in one pass. Default: ${rows}, or what the memory allows. Changes speed and memory only."`
	Memory  string   `placeholder:"SIZE" help:"Ceiling of memory, such as 12GB. Default: three quarters of what is available. Changes speed only."`
	Context int      `placeholder:"N" help:"Most tokens of prompt and text together; memory is reserved for them. Default: 4096, or more if the request asks for more."`
	Experts []string `placeholder:"DIR|URL" help:"Further directory with copies of experts ('deltafin place'), or the address of a web server that serves one; may be repeated. Changes speed only."`
	Spine   string   `placeholder:"FILE" type:"path" help:"Packed dense weights ('deltafin pack spine')."`
	Heat    string   `placeholder:"FILE" type:"path" help:"File that counts how often each expert is used, updated by the run."`
	Trace   string   `placeholder:"FILE" type:"path" help:"Write the routes of all passes to this file, for 'deltafin simulate'."`
	Draft   []string `placeholder:"NAME|DIR" default:"ngram" sep:"none" help:"Guess tokens and check several at once: ngram looks them up in the text, DIR is a draft model's directory, off guesses none; may be repeated. Default: ngram. Changes speed only."`
	Guesses int      `placeholder:"N" help:"Check N guesses in every pass, 1 to ${guesses}. Default: as many as pay, by measurement. Changes speed only."`
	Opt     []string `placeholder:"NAME=on|off" help:"Turn an optimisation on or off; may be repeated. Changes speed and memory only."`
}

// maxThreads is more than any machine has processors.
const maxThreads = 1024

// apply checks what can be checked without a model, and turns the optimisations.
func (f *engineFlags) apply() error {
	if f.Threads < 0 || f.Rows < 0 || f.Context < 0 {
		return usage("--threads, --rows and --context count from 1: leave them out for the default")
	}
	if f.Threads > maxThreads {
		return usage("--threads %d: %d is the most", f.Threads, maxThreads)
	}
	if f.Guesses < 0 || f.Guesses > draft.MaxGuesses {
		return usage("--guesses %d: from 1 to %d, or leave it out for as many as pay", f.Guesses, draft.MaxGuesses)
	}
	var err error
	if f.Draft, err = checkDraft(f.Draft); err != nil {
		return err
	}
	for flag, path := range map[string]string{"--trace": f.Trace, "--heat": f.Heat} {
		if err := checkOutput(flag, path, f.Model); err != nil {
			return err
		}
	}
	for _, o := range f.Opt {
		if err := opt.Parse(o); err != nil {
			return usage("--opt: %w", err)
		}
	}
	return nil
}

// checkDraft returns the proposers that --draft names, and refuses what can be none. One that turns out to be of no use later is
// left out with a remark instead.
func checkDraft(given []string) (names []string, err error) {
	for _, d := range given {
		switch info, err := os.Stat(d); {
		case d == "off":
			continue
		case d == "ngram":
		case err != nil || !info.IsDir():
			return nil, usage("--draft %q: give ngram, off, or the directory of a draft model", d)
		}
		if slices.Contains(names, d) {
			return nil, usage("--draft %s is there twice: once is enough", d)
		}
		names = append(names, d)
	}
	if len(names) < len(given) && len(names) > 0 {
		return nil, usage("--draft off leaves nothing for the others to do: give one or the other")
	}
	return names, nil
}

// open opens the model; tokens is how many the run may come to. The caller calls close
// when it is done with the engine.
func (f *engineFlags) open(ctx context.Context, std streams, dir string, tokens int, reserve int64) (e *engine.Engine, close func() error, err error) {
	memory, err := parseSize("--memory", f.Memory)
	if err != nil {
		return nil, nil, err
	}
	depot, err := openStream(ctx, std, dir)
	if err != nil {
		return nil, nil, err
	}
	o := engine.Options{
		Threads: f.Threads, PassRows: f.Rows, Memory: memory, Context: f.Context,
		ExpertDirs: homes(f.Experts), SpinePack: f.Spine, Heat: f.Heat, Reserve: reserve,
		Draft: f.Draft, Guesses: f.Guesses,
		Warn: remark(std),
	}
	if o.Context == 0 {
		o.Context = max(4096, tokens)
	}
	var trace lateFile
	if f.Trace != "" {
		trace.path, o.Trace = f.Trace, &trace
	}
	if depot != nil {
		o.Filler = depot
	}
	e, err = engine.Open(ctx, dir, o)
	if err != nil {
		closeStream(depot)
		return nil, nil, openError(err)
	}
	// Garbage may fill what the ledger leaves to the Go heap, no more.
	l := e.Ledger()
	debug.SetMemoryLimit(l.Runtime + l.State + l.Pass + l.Reserved)
	if !e.Exact() {
		fmt.Fprintln(std.err, "deltafin: --spine holds dense weights in eight bits: the model is not the released one")
	}
	return e, func() error {
		return errors.Join(e.Close(), trace.close(), closeStream(depot))
	}, nil
}

// lateFile is a file that is made when something is first written to it, so that a run
// that is refused leaves an older one alone.
type lateFile struct {
	path string
	f    *os.File
}

func (l *lateFile) Write(b []byte) (int, error) {
	if l.f == nil {
		var err error
		if l.f, err = os.Create(l.path); err != nil {
			return 0, err
		}
	}
	return l.f.Write(b)
}

func (l *lateFile) close() error {
	if l.f == nil {
		return nil
	}
	return l.f.Close()
}

// openTokenizer opens the tokenizer of a checkpoint directory. A missing one is
// fs.ErrNotExist.
func openTokenizer(dir string) (*tokenizer.Tokenizer, error) {
	tok, err := tokenizer.Open(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, failure{exitModel, fmt.Errorf("no tokenizer: %w: copy the model's tokenizer files there; only 'run --ids' works without them", err)}
	case err != nil:
		return nil, failure{exitModel, err}
	}
	return tok, nil
}

// openCheckpoint opens a model whose experts are read, complete or not.
func openCheckpoint(ctx context.Context, std streams, dir string) (ck *checkpoint.Checkpoint, end func(), err error) {
	d, err := openStream(ctx, std, dir)
	if err != nil {
		return nil, nil, err
	}
	if d == nil {
		ck, err = checkpoint.Open(dir)
	} else {
		ck, err = checkpoint.OpenFilling(dir, d)
	}
	if err != nil {
		closeStream(d)
		return nil, nil, failure{exitModel, err}
	}
	return ck, func() {
		ck.Close()
		closeStream(d)
	}, nil
}

// lookAt opens a model whose structure alone is of interest.
func lookAt(dir string) (*checkpoint.Checkpoint, error) {
	if hub.IsStream(dir) {
		return checkpoint.OpenFilling(dir, nil)
	}
	return checkpoint.Open(dir)
}
