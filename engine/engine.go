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
// # What is where
//
// engine/k3 is the model, engine/kernel the arithmetic, engine/checkpoint the file
// format, engine/spine and engine/expert say where dense and routed weights come from, prefill
// plans which rows an expert works on, engine/opt lists the optimisations.
//
// An Engine serves one pass at a time: sessions of one engine may not run
// concurrently.
package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"deltafin/engine/checkpoint"
	"deltafin/engine/expert"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/engine/opt"
	"deltafin/engine/spine"
)

// assembly chooses between the two forms of every kernel.
var assembly = opt.New("assembly", "use the processor's vector kernels instead of the portable definition", func(on bool) {
	names := kernel.Implementations()
	name := names[len(names)-1]
	if !on {
		name = names[0]
	}
	if err := kernel.Use(name); err != nil {
		panic(err) // the names are kernel's own
	}
})

// Options are choices that change speed and memory, never a result.
type Options struct {
	Threads      int   // workers; 0 means one per processor
	PassRows     int   // most rows of a pass; 0 means DefaultPassRows
	Memory       int64 // bytes that weights may take; 0 means three quarters of what the machine has available
	ExpertMemory int64 // bytes of experts that may stay in memory; 0 means what Memory leaves, negative none
}

// DefaultPassRows bounds the memory of a pass: a row takes about 1 MB at K3's size.
const DefaultPassRows = 1024

// ErrMemory is wrapped by Open's error when the model needs more memory than it may
// use.
var ErrMemory = errors.New("not enough memory")

// Engine is an open checkpoint.
type Engine struct {
	ck       *checkpoint.Checkpoint
	model    k3.Model
	passRows int
}

// Open opens the checkpoint in dir, checks that it is complete, and reads its
// dense weights. It refuses when they do not fit the memory.
func Open(ctx context.Context, dir string, o Options) (*Engine, error) {
	ck, err := checkpoint.Open(dir)
	if err != nil {
		return nil, err
	}
	e, err := open(ctx, ck, o)
	if err != nil {
		ck.Close()
		return nil, err
	}
	return e, nil
}

func open(ctx context.Context, ck *checkpoint.Checkpoint, o Options) (*Engine, error) {
	if o.Threads <= 0 {
		o.Threads = runtime.GOMAXPROCS(0)
	}
	if o.PassRows <= 0 {
		o.PassRows = DefaultPassRows
	}
	if o.Memory <= 0 {
		o.Memory = AvailableMemory() / 4 * 3
	}
	dense := spine.Bytes(ck)
	if need := dense + ck.ExpertLayout().ExpertBytes; need > o.Memory {
		return nil, fmt.Errorf("%s: %w: the dense weights and one expert take %.1f GB, and %.1f GB may be used: free some or use a larger machine", ck.Dir(), ErrMemory, float64(need)/1e9, float64(o.Memory)/1e9)
	}
	if o.ExpertMemory == 0 {
		o.ExpertMemory = o.Memory - dense
	}
	s, err := spine.Load(ctx, ck)
	if err != nil {
		return nil, err
	}
	return &Engine{ck: ck, passRows: o.PassRows, model: k3.Model{
		Config: ck.Config(), Spine: s, Experts: expert.NewSource(ck, o.ExpertMemory), Pool: kernel.NewPool(o.Threads),
	}}, nil
}

// Close releases the files and workers.
func (e *Engine) Close() error {
	e.model.Pool.Close()
	return e.ck.Close()
}

// Config is the model's configuration.
func (e *Engine) Config() *checkpoint.Config { return e.ck.Config() }

// Model is the model itself, for tests that look inside a pass.
func (e *Engine) Model() *k3.Model { return &e.model }
