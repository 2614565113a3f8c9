// Package engine runs Kimi K3: it opens a checkpoint directory in the released
// layout and turns token ids into logits, one fixed sequence of bits for a given
// checkpoint and prompt.
//
// # Using it
//
//	e, err := engine.Open(ctx, "path/to/Kimi-K3", engine.Options{})
//	s := e.NewSession()
//	result, err := s.Generate(ctx, engine.Request{Prompt: ids, MaxNew: 64, Stop: []int{e.Config().EOS}})
//
// A [Session] is a sequence of tokens with the state that the model keeps of it.
// [Session.Feed] extends it; [Session.Try] runs tokens without committing to them, after
// which [Session.Keep] keeps any prefix; [Session.Fork] copies it.
//
// # Memory
//
// [Options.Memory] is a ceiling. The [Ledger] says what each part may take; weights
// that do not fit are read when they are needed, from the files as they were
// downloaded. Any budget from the floor up gives the same bits.
//
// # What is where
//
// engine/k3 is the model, engine/kernel the arithmetic, engine/checkpoint the file
// format, engine/spine and engine/expert say where dense and routed weights come from,
// engine/drive how bytes come off a drive, prefill plans which rows an expert works on,
// engine/opt lists the optimisations.
//
// An Engine serves one pass at a time: sessions of one engine may not run
// concurrently.
package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"

	"deltafin/engine/checkpoint"
	"deltafin/engine/draft"
	"deltafin/engine/drive"
	"deltafin/engine/expert"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/engine/opt"
	"deltafin/engine/spine"
)

// The switch of all kernels: the best form that the processor has, or the definition.
var _ = opt.New("assembly", "use the processor's vector kernels instead of the portable definition", func(on bool) {
	names := kernel.Implementations()
	name := names[len(names)-1]
	if !on {
		name = names[0]
	}
	if err := kernel.Use(name); err != nil {
		panic(err) // the names are kernel's own
	}
})

// Options are choices that change speed and memory, never a result (but for a
// SpinePack in eight bits, which is another model and says so).
type Options struct {
	Threads  int   // workers; 0 means one per processor
	Memory   int64 // ceiling in bytes; 0 means three quarters of what the machine has available
	Context  int   // most tokens of a session, which memory is reserved for; 0 means 4096, or the model's limit
	Reserve  int64 // bytes of Memory that the caller uses itself
	PassRows int   // most rows of a pass; 0 means DefaultPassRows, or fewer if memory is short

	ExpertDirs   []string // further directories that hold copies of experts, or addresses of web servers that do
	ExpertMemory int64    // most bytes of experts that stay in memory; 0 means what is left, negative none
	Slots        int      // experts on their way at once; 0 means as many as a token uses and a few more
	SpinePack    string   // packed dense weights; "" means the checkpoint's shards

	Draft     []string         // proposers: "ngram", or the directory of a draft model
	Guesses   int              // tokens to try always; 0 means as many as pay
	Proposers []draft.Proposer // further proposers, of the caller's own; the engine closes them

	// Filler brings the experts of a directory that fills on demand; nil for one that is
	// complete. It has to outlive the engine.
	Filler checkpoint.Filler

	Heat  string            // file that counts how often experts are used, across runs; "" for none
	Trace io.Writer         // gets the routes of every pass; nil for none
	Warn  func(line string) // gets remarks such as a drive that failed; nil logs them
	Drive drive.Options
}

// DefaultPassRows is the most rows that a pass takes when memory is plentiful.
const DefaultPassRows = 8192

// Engine is an open checkpoint.
type Engine struct {
	ck      *checkpoint.Checkpoint
	drives  *drive.Set
	spine   *spine.Spine
	experts *expert.Source
	model   k3.Model
	ledger  Ledger

	proposers []draft.Proposer
	chooser   *draft.Chooser
	warn      func(string)
}

// Open opens the checkpoint in dir, checks that it is complete, and shares the memory
// out; its error wraps [ErrMemory] when there is too little. Weights are read when a pass
// first needs them.
func Open(ctx context.Context, dir string, o Options) (*Engine, error) {
	ck, err := openCheckpoint(dir, &o)
	if err != nil {
		return nil, err
	}
	e := &Engine{ck: ck}
	if err := e.open(ctx, o); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

func openCheckpoint(dir string, o *Options) (*checkpoint.Checkpoint, error) {
	if o.Filler == nil {
		return checkpoint.Open(dir)
	}
	o.Drive.Filling = dir
	return checkpoint.OpenFilling(dir, o.Filler)
}

func (e *Engine) open(ctx context.Context, o Options) error {
	if o.Threads <= 0 {
		o.Threads = runtime.GOMAXPROCS(0)
	}
	e.model.Pool = kernel.NewPool(o.Threads)
	e.openProposers(o)
	ledger, so, xo, err := layout(e.ck, o, e.proposerBytes)
	if err != nil {
		return err
	}
	e.ledger = ledger
	e.startChoosing(o)
	if o.Drive.Warn == nil {
		o.Drive.Warn = o.Warn
	}
	// A model that will be in memory whole is read once: the page cache may help the
	// next start, and has nothing to push out.
	if ledger.Resident == ledger.Experts && ledger.Limit/2 > ledger.Resident+ledger.Spine {
		o.Drive.Buffered = true
	}
	e.drives = drive.NewSet(o.Drive)
	if e.spine, err = spine.Open(ctx, e.ck, e.drives, so); err != nil {
		if errors.Is(err, spine.ErrMemory) {
			err = fmt.Errorf("%w: %w", ErrMemory, err)
		}
		return err
	}
	if e.experts, err = expert.Open(e.ck, e.drives, xo); err != nil {
		return err
	}
	e.model.Config, e.model.Spine, e.model.Experts, e.model.ObserveRoutes = e.ck.Config(), e.spine, e.experts, e.experts.Observe
	return nil
}

// Close waits for reads on their way and releases files, memory and workers.
func (e *Engine) Close() error {
	var errs []error
	for _, p := range e.proposers {
		errs = append(errs, p.Close())
	}
	if e.experts != nil {
		errs = append(errs, e.experts.Close())
	}
	if e.spine != nil {
		e.spine.Close()
	}
	if e.drives != nil {
		e.drives.Close()
	}
	if e.model.Pool != nil {
		e.model.Pool.Close()
	}
	return errors.Join(append(errs, e.ck.Close())...)
}

// Config is the model's configuration.
func (e *Engine) Config() *checkpoint.Config { return e.ck.Config() }

// Ledger is where the memory goes.
func (e *Engine) Ledger() Ledger { return e.ledger }

// Exact reports whether the weights are the checkpoint's to the bit: false with dense
// weights packed in eight bits.
func (e *Engine) Exact() bool { return e.spine.Exact() }

// Model is the model itself: its counters and times, and, for tests, what happens inside
// a pass.
func (e *Engine) Model() *k3.Model { return &e.model }

// Storage is the account of the engine's reads since it was opened.
type Storage struct {
	Experts expert.Stats `json:"experts"`
	Spine   spine.Stats  `json:"spine"`
}

// Storage returns the account so far.
func (e *Engine) Storage() Storage { return Storage{e.experts.Stats(), e.spine.Stats()} }
