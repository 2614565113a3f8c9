package openai

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"deltafin/engine"
	"deltafin/engine/draft"
	"deltafin/prefill"
)

// generation is one answer being made. The engine's goroutine adds events to it, the
// connection's takes them: a slow client never holds up the engine.
type generation struct {
	req *request
	key [32]byte
	rec record

	mu     sync.Mutex
	events []event
	begun  bool // the number of known tokens is settled
	ended  bool
	err    error
	wake   chan struct{} // has room for one signal

	reader *reader
	row    []float32 // that chose the token under way
	kept   *state    // the last state that was kept of it, if a later one is to take its place
}

func (s *Server) newGeneration(r *request) (*generation, error) {
	g := &generation{req: r, key: r.key(), wake: make(chan struct{}, 1)}
	g.rec, _ = s.memo.get(g.key)
	if !g.known() {
		g.rec.id, g.rec.created, g.rec.cached = r.api.newID(), time.Now().Unix(), -1
	}
	var err error
	g.reader, err = newReader(r, s.model.Tokenizer(), g.rec.id)
	return g, err
}

// known tells whether the whole answer is.
func (g *generation) known() bool { return g.rec.finish != "" }

func (g *generation) add(events []event) {
	if len(events) == 0 {
		return
	}
	g.mu.Lock()
	g.events = append(g.events, events...)
	g.mu.Unlock()
	g.signal()
}

func (g *generation) signal() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

func (g *generation) begin(cached int) {
	if g.rec.cached < 0 {
		g.rec.cached = cached
	}
	g.mu.Lock()
	g.begun = true
	g.mu.Unlock()
	g.signal()
}

// end settles how it ended; rec.finish is set unless by an error.
func (g *generation) end(err error) {
	if err == nil {
		g.add(g.reader.flush())
	}
	g.mu.Lock()
	g.ended, g.err = true, err
	g.mu.Unlock()
	g.signal()
}

// take gives what has come since the last call.
func (g *generation) take() (events []event, begun, ended bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	events, g.events = g.events, nil
	return events, g.begun, g.ended, g.err
}

// replay gives the events of the tokens that are known; ended tells that the text ends
// among them.
func (g *generation) replay() (ended bool) {
	for _, st := range g.rec.steps {
		events, end := g.reader.push(st)
		g.add(events)
		if end {
			return true
		}
	}
	return false
}

var errTextEnds = errors.New("the text ends here")

// accept takes a chosen token, g.row being what chose it.
func (g *generation) accept(s *Server, id int) error {
	st := step{id: id}
	if g.req.logprobs {
		st.logs = logprobsOf(s.model.Tokenizer(), g.row, id, g.req.top)
	}
	g.rec.steps = append(g.rec.steps, st)
	events, end := g.reader.push(st)
	g.add(events)
	if end {
		return errTextEnds
	}
	return nil
}

func (g *generation) ids() []int {
	ids := slices.Clone(g.req.prompt)
	for _, st := range g.rec.steps {
		ids = append(ids, st.id)
	}
	return ids
}

// run makes the answer when its turn has come. It owns g until g.ended.
func (s *Server) run(ctx context.Context, g *generation, t *ticket) {
	if err := t.wait(ctx); err != nil {
		g.end(err)
		return
	}
	s.activity.start(s.model.Info().Layers)
	f, err := s.generate(ctx, g)
	if cause := context.Cause(ctx); cause != nil && err != nil {
		err = cause
	}
	if err == nil {
		g.rec.finish = f
	}
	// The memo gets it before the client does, and the turn is over before both: a client
	// that asks again at once finds everything in its place.
	if err == nil || errors.Is(err, errClientGone) || errors.Is(err, errShutdown) {
		if len(g.rec.steps) > 0 || err == nil {
			s.memo.put(g.key, g.rec)
		}
	}
	s.activity.stop(s.model.Counters())
	t.leave()
	g.end(err)
}

// cutOff is a session as its client left it: inside a pass, as a rule.
type cutOff struct {
	ids     []int // that it was fed, those of a pass that is not done included
	session Session
}

// sessionFor gives a session that has been fed the longest known beginning of ids, how many
// tokens that is, and the logits of the last if it is all of them. A session that was
// cut off is forgotten unless it is this one: the engine goes on only inside its last pass.
func (s *Server) sessionFor(ids []int) (Session, int, []float32) {
	cut, beyond := s.cut, 0
	s.cut = nil
	// There has to be something to feed: the logits of its last token are not known.
	if cut != nil && len(ids) > cut.session.Position() && len(ids) >= len(cut.ids) && slices.Equal(ids[:len(cut.ids)], cut.ids) {
		beyond = cut.session.Position()
	} else {
		cut = nil
	}
	switch session, n, logits := s.states.longest(ids, beyond); {
	case session != nil:
		return session, n, logits
	case cut != nil:
		return cut.session, beyond, nil
	}
	return s.model.NewSession(), 0, nil
}

func (s *Server) generate(ctx context.Context, g *generation) (end finish, err error) {
	r, info := g.req, s.model.Info()
	ids := g.ids()
	if len(g.rec.steps) > 0 { // of an answer whose client left, what was known then included
		g.begin(0)
		if g.replay() { // it did not leave before the end of the text
			return finishStop, nil
		}
		if len(g.rec.steps) >= r.maxNew {
			return finishLength, nil
		}
	}
	session, known, logits := s.sessionFor(ids)
	g.begin(min(known, len(r.prompt)))
	cut, layers := session.Suspended()
	s.activity.prompt(len(ids), known, layers)
	defer func() {
		if err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			cut, _ := session.Suspended()
			s.cut = &cutOff{slices.Concat(g.ids()[:session.Position()], cut), session}
		}
	}()

	// The prompt, pass by pass. What is finished stays known, whatever happens next.
	var progress *state
	rest := ids[known:]
	chunks := prefill.Chunks(len(rest)-len(cut), info.PassRows)
	if len(cut) > 0 {
		chunks = append([]int{len(cut)}, chunks...)
	}
	for i, n := range chunks {
		if i == len(chunks)-1 {
			break // the last goes with the first new token
		}
		if _, err = session.Feed(ctx, rest[:n], s.activity.pass(s.model, i, len(chunks))); err != nil {
			return "", err
		}
		rest = rest[n:]
		progress = s.states.put(ids[:session.Position()], session.Fork(), nil, progress)
	}

	// What is known of the prompt's end is kept when the first row comes: by then the
	// whole prompt has been fed. The state before its last pass stays, too: another
	// conversation that begins with the same long instructions goes on from there.
	fed := func(row []float32) {
		if progress != nil || len(rest) > 0 {
			s.states.put(ids, session.Fork(), row, nil)
		}
		s.activity.decode()
	}
	if len(rest) == 0 {
		// Every token is known, and so are the logits behind them.
		fed(logits)
		g.row = logits
		id := r.choose(logits, len(ids))
		if id == info.EOS {
			return finishStop, nil
		}
		if err := g.accept(s, id); err != nil {
			return finishStop, nil
		}
		s.activity.token(s.model.Counters())
		if len(g.rec.steps) == r.maxNew || len(ids) == info.Context {
			return finishLength, nil
		}
		rest, fed = []int{id}, func([]float32) {}
	}
	if end, err = s.decode(ctx, g, session, rest, len(chunks), fed); err == nil {
		s.states.put(g.ids()[:session.Position()], session, nil, g.kept)
	}
	return end, err
}

// decode feeds rest and generates to the end. fed is called with the first row.
func (s *Server) decode(ctx context.Context, g *generation, session Session, rest []int, passes int, fed func([]float32)) (finish, error) {
	r, info := g.req, s.model.Info()
	kept := time.Now()
	look := func(row []float32) {
		if fed != nil {
			fed(row)
			fed = nil
		}
		g.row = row
	}
	take := func(id int) error {
		// An answer takes hours: what there is of it is kept now and then, for a client that
		// comes back. The session has been fed all but id.
		if time.Since(kept) >= s.o.KeepEvery {
			kept = time.Now()
			g.kept = s.states.putBriefly(g.ids()[:session.Position()], session.Fork(), g.kept)
		}
		err := g.accept(s, id)
		s.activity.token(s.model.Counters())
		return err
	}
	room := r.maxNew - len(g.rec.steps)
	onPass := s.activity.pass(s.model, passes-1, passes)
	res, err := session.Generate(ctx, engine.Request{
		Prompt: rest, MaxNew: room, Stop: []int{info.EOS}, Choose: r.choose, Logits: look, Token: take, Progress: onPass,
	})
	g.rec.draft = guessingOf(res.Stats.Draft)
	s.metrics.draft(res.Stats.Draft)
	switch {
	case errors.Is(err, errTextEnds):
		return finishStop, nil
	case err != nil:
		return "", err
	case res.Finish == engine.FinishCancelled:
		return "", ctx.Err()
	}
	return finish(res.Finish), nil
}

// usage is what an answer took, in tokens.
type usage struct {
	prompt, cached, completion, reasoning int

	draft *guessing
}

// guessing is how an answer's tokens were guessed: those that the engine made last, if a
// client left and came back.
type guessing struct {
	Passes   int     `json:"passes"`   // that decided tokens
	Tokens   int     `json:"tokens"`   // that they decided
	Checked  int     `json:"checked"`  // guesses
	Accepted int     `json:"accepted"` // of them
	Gain     float64 `json:"gain"`     // see [draft.Stats.Gain]
}

func guessingOf(s *draft.Stats) *guessing {
	if s == nil {
		return nil
	}
	g := &guessing{Passes: s.Passes, Tokens: s.Tokens, Gain: math.Round(100*s.Gain()) / 100}
	for _, p := range s.Proposers {
		g.Checked += p.Checked
		g.Accepted += p.Accepted
	}
	return g
}

func (g *generation) usage() usage {
	return usage{len(g.req.prompt), max(0, g.rec.cached), len(g.rec.steps), g.reader.reasoning, g.rec.draft}
}

func (u usage) String() string {
	return fmt.Sprintf("%d prompt tokens, %d of them known, %d new", u.prompt, u.cached, u.completion)
}
