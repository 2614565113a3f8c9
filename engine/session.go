package engine

import (
	"context"
	"errors"
	"fmt"

	"deltafin/engine/k3"
	"deltafin/prefill"
)

// Session is one sequence of tokens: what has been fed, as the model's state.
type Session struct {
	engine *Engine
	state  *k3.State
	broken error // why the state cannot be used any more
}

// NewSession starts an empty sequence.
func (e *Engine) NewSession() *Session {
	return &Session{engine: e, state: k3.NewState(e.Config())}
}

// Position is the number of tokens fed and kept.
func (s *Session) Position() int { return s.state.Position() }

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
		m, err := s.engine.model.Forward(ctx, s.state, ids[:n], pass)
		if err != nil {
			if !k3.Cancelled(ctx, err) {
				s.broken = fmt.Errorf("the session ended with an error: %w", err)
			}
			return nil, err
		}
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
func (s *Session) Try(ctx context.Context, ids []int) ([][]float32, error) {
	if s.broken != nil {
		return nil, s.broken
	}
	m, err := s.engine.model.Forward(ctx, s.state, ids, k3.Pass{Logits: len(ids), Hold: true})
	if err != nil {
		s.broken = fmt.Errorf("the session ended with an error: %w", err)
		return nil, err
	}
	rows := make([][]float32, m.Rows)
	for r := range rows {
		rows[r] = m.Row(r)
	}
	return rows, nil
}

// Keep commits the first n tokens of the last [Session.Try] and forgets the others.
func (s *Session) Keep(n int) error { return s.engine.model.Commit(s.state, n) }

// Fork returns an independent copy of the session. It panics between Try and Keep, and
// when a pass was cut off.
func (s *Session) Fork() *Session {
	return &Session{engine: s.engine, state: s.state.Fork(), broken: s.broken}
}
