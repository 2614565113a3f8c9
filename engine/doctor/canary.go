package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"deltafin/engine"
)

// The canary is a generation whose every bit is known: "The capital of France is" on the
// built-in model, until it stops. A test holds the numbers to golden/hashes.json.
var canaryPrompt = []int{289, 379, 322, 2312, 273}

const (
	canaryTokens = 23
	canaryHash   = "37a45953d3578f34984cce266fe9fd1e368c26c7dacd3c4702102c251378bc08"
	canaryMemory = 1e9 // the built-in model needs no more to stay in memory
)

// song is what the canary sang.
type song struct {
	tokens  int
	hash    string
	seconds float64
	err     error
}

func (e *examination) canary(ctx context.Context) {
	if e.o.Quick || e.o.Miniature == nil {
		return
	}
	dir := e.o.Cache
	if !e.o.Unpacked {
		at, remove, err := e.o.Miniature()
		if err != nil {
			e.tell(Finding{ID: "canary", Level: Warning, Value: fmt.Sprintf("not run: the built-in model cannot be unpacked: %v", err), Do: "make the directory for temporary files writable (TMPDIR), or make room there"})
			return
		}
		defer remove()
		dir = at
	}
	s := sing(ctx, dir, min(e.host.budget(), canaryMemory))
	if ctx.Err() == nil {
		e.tell(s.judge())
	}
}

// sing runs the canary.
func sing(ctx context.Context, dir string, memory int64) (s song) {
	e, err := engine.Open(ctx, dir, engine.Options{Memory: memory, Context: 64, Warn: func(string) {}})
	if err != nil {
		s.err = err
		return s
	}
	defer e.Close()
	r, err := e.NewSession().Generate(ctx, engine.Request{Prompt: slices.Clone(canaryPrompt), MaxNew: canaryTokens + 1, Stop: []int{e.Config().EOS}})
	return song{len(r.IDs), r.LogitsSHA256, r.Stats.PrefillSeconds + r.Stats.DecodeSeconds, err}
}

func (s song) judge() Finding {
	f := Finding{ID: "canary", Level: Error, Fault: Machine, Value: fmt.Sprintf("%d tokens of the built-in model in %.2g s, every bit of their logits as it must be", s.tokens, s.seconds)}
	switch {
	case errors.Is(s.err, engine.ErrMemory), errors.Is(s.err, syscall.ENOMEM), errors.Is(s.err, syscall.EMFILE):
		f.Fault, f.Value, f.Do = Resources, fmt.Sprintf("the built-in model does not run: %v", s.err), "see memory and descriptors"
	case s.err != nil:
		f.Value, f.Do = fmt.Sprintf("the built-in model does not run: %v", s.err), "if memory, processor and drive are sound, report this line"
	case s.hash != canaryHash:
		f.Value = fmt.Sprintf("the built-in model gave %d tokens whose logits have the hash %.16s, expected %.16s", s.tokens, s.hash, canaryHash)
		f.Do = "do not trust this machine: test its memory and processor; if they are sound, report the processor and this line"
	default:
		f.Level, f.Fault, f.Numbers = OK, "", map[string]float64{"tokens": float64(s.tokens), "seconds": s.seconds}
	}
	return f
}
