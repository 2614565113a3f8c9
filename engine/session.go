package engine

import (
	"context"
	"errors"
	"fmt"

	"deltafin/engine/draft"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/prefill"
)

// Session is one sequence of tokens: what has been fed, as the model's state.
type Session struct {
	engine   *Engine
	state    *k3.State
	tokens   []int            // that led to state
	drafts   []draft.Sequence // what each proposer keeps of them
	tried    []int            // tokens of a pass that is not committed
	accepted int              // of them are part of the sequence all the same
	broken   error            // why the state cannot be used any more
}

// NewSession starts an empty sequence.
func (e *Engine) NewSession() *Session { return e.session(k3.NewState(e.Config()), nil) }

func (e *Engine) session(st *k3.State, tokens []int) *Session {
	s := &Session{engine: e, state: st, tokens: tokens}
	for _, p := range e.proposers {
		s.drafts = append(s.drafts, p.Start())
	}
	return s
}

// Position is the number of tokens fed and kept.
func (s *Session) Position() int { return s.state.Position() + s.accepted }

// Feed extends the sequence by ids, in as few passes as the engine's memory
// allows, and returns the logits [vocab] of the last one, valid until the next pass.
// progress, if not nil, is called after each layer with how many of all layer passes
// are done. After an error the session cannot be used, but for one: when ctx was
// cancelled, Feed may be called again with what follows [Session.Position]. It goes on
// inside the pass that was cut off, if ids begin with that pass's tokens
// ([Session.Suspended]) and the engine has run no other pass since.
func (s *Session) Feed(ctx context.Context, ids []int, progress func(done, of int)) ([]float32, error) {
	if s.broken != nil {
		return nil, s.broken
	}
	cut, _ := s.Suspended()
	chunks := prefill.Chunks(max(0, len(ids)-len(cut)), s.engine.ledger.PassRows)
	if len(cut) > 0 && len(ids) > 0 {
		chunks = append([]int{min(len(cut), len(ids))}, chunks...)
	}
	if len(chunks) == 0 {
		return nil, errors.New("nothing to feed: the prompt has no tokens")
	}
	layers := s.engine.Config().Layers
	if room := s.engine.ledger.Context - s.Position(); len(ids) > room {
		return nil, fmt.Errorf("%d tokens do not fit: the context has room for %d more of %d", len(ids), room, s.engine.ledger.Context)
	}
	var logits []float32
	for i, n := range chunks {
		pass := k3.Pass{}
		if i == len(chunks)-1 {
			pass.Logits = 1
		}
		if progress != nil {
			pass.Progress = func(l int) { progress(i*layers+l+1, len(chunks)*layers) }
		}
		m, err := s.forward(ctx, ids[:n], pass)
		if err != nil {
			return nil, err
		}
		s.kept(ids[:n])
		if pass.Logits > 0 {
			logits = m.Row(0)
		}
		ids = ids[n:]
	}
	return logits, nil
}

// Suspended returns the tokens behind [Session.Position] whose pass a cancelled context
// cut off, and how many whole layers of it are done: [Session.Feed] has to go on with them, and
// before any other pass of the engine. It returns nil when there is no such pass, any more.
func (s *Session) Suspended() (ids []int, layers int) { return s.engine.model.Suspended(s.state) }

// Try runs ids as one pass without committing to them and returns the logits
// [len(ids)][vocab] of every row, valid until the next pass. [Session.Keep] must follow.
// An error leaves the session as it was.
func (s *Session) Try(ctx context.Context, ids []int) ([][]float32, error) {
	if s.broken != nil {
		return nil, s.broken
	}
	m, err := s.forward(ctx, ids, k3.Pass{Logits: len(ids), Hold: true})
	if err != nil {
		return nil, err
	}
	s.tried = append(s.tried[:0], ids...)
	rows := make([][]float32, m.Rows)
	for r := range rows {
		rows[r] = m.Row(r)
	}
	return rows, nil
}

// Keep commits the first n tokens of the last [Session.Try] and forgets the others.
func (s *Session) Keep(n int) error {
	if err := s.engine.model.Commit(s.state, n); err != nil {
		return err
	}
	s.kept(s.tried[:n])
	s.tried, s.accepted = s.tried[:0], 0
	return nil
}

// accept makes the next n tokens of the last Try part of the sequence. The state follows
// when it must.
func (s *Session) accept(n int) { s.accepted += n }

// settle brings the state to where the sequence stands, and leaves what may yet be
// accepted.
func (s *Session) settle() {
	n := s.accepted
	if n == 0 {
		return
	}
	if err := s.engine.model.Advance(s.state, n); err != nil {
		panic(err) // no more was accepted than was tried
	}
	s.kept(s.tried[:n])
	s.tried, s.accepted = s.tried[n:], 0
}

// forward is a pass with the proposers looking on.
func (s *Session) forward(ctx context.Context, ids []int, pass k3.Pass) (kernel.Mat, error) {
	first := s.Position()
	for _, w := range s.watchers() {
		others, layers := pass.Watch, w.Layers()
		pass.Watch = func(l int, stream kernel.Mat) {
			if others != nil {
				others(l, stream)
			}
			for _, wanted := range layers {
				if l == wanted {
					w.Watch(l, first, stream)
				}
			}
		}
	}
	m, err := s.engine.model.Forward(ctx, s.state, ids, pass)
	if err != nil && !pass.Hold && !k3.Cancelled(ctx, err) {
		s.broken = fmt.Errorf("the session ended with an error: %w", err)
	}
	return m, err
}

func (s *Session) watchers() (all []draft.Watcher) {
	for _, d := range s.drafts {
		if w, ok := d.(draft.Watcher); ok {
			all = append(all, w)
		}
	}
	return all
}

// kept records ids that the state has been committed to.
func (s *Session) kept(ids []int) {
	s.tokens = append(s.tokens, ids...)
	for _, w := range s.watchers() {
		w.Kept(len(s.tokens))
	}
}

// Fork returns an independent copy of the session. Between Try and Keep it is a copy of
// what was there before Try. It panics when a pass was cut off.
func (s *Session) Fork() *Session {
	s.settle()
	f := &Session{engine: s.engine, state: s.state.Fork(), tokens: append([]int(nil), s.tokens...), broken: s.broken}
	for _, d := range s.drafts {
		d = d.Fork()
		if w, ok := d.(draft.Watcher); ok {
			w.Kept(len(f.tokens)) // and no more
		}
		f.drafts = append(f.drafts, d)
	}
	return f
}
