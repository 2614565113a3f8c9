package openai

import (
	"context"
	"sync"
)

// queue lets one generation at a time have the engine, in the order in which they
// came, and no more than limit wait.
type queue struct {
	limit int

	mu      sync.Mutex
	busy    bool
	waiting []*ticket
}

// ticket is a place in the queue, or the turn itself.
type ticket struct {
	q    *queue
	turn chan struct{} // closed when the turn has come
}

// enter takes a place behind all others; false if none is free.
func (q *queue) enter() (*ticket, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := &ticket{q: q, turn: make(chan struct{})}
	switch {
	case !q.busy:
		q.busy = true
		close(t.turn)
	case len(q.waiting) >= q.limit:
		return nil, false
	default:
		q.waiting = append(q.waiting, t)
	}
	return t, true
}

// wait returns when the turn has come; after an error the place is given up. A turn
// that came is to be ended by leave.
func (t *ticket) wait(ctx context.Context) error {
	select {
	case <-t.turn:
		return nil
	case <-ctx.Done():
	}
	t.q.mu.Lock()
	for i, w := range t.q.waiting {
		if w == t {
			t.q.waiting = append(t.q.waiting[:i:i], t.q.waiting[i+1:]...)
			t.q.mu.Unlock()
			return context.Cause(ctx)
		}
	}
	t.q.mu.Unlock()
	t.leave() // the turn came at the same moment
	return context.Cause(ctx)
}

// leave hands the turn to the next.
func (t *ticket) leave() {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	if len(t.q.waiting) == 0 {
		t.q.busy = false
		return
	}
	next := t.q.waiting[0]
	t.q.waiting = t.q.waiting[1:]
	close(next.turn)
}

// place is how many generations go first, the running one included; 0 is the turn
// itself.
func (t *ticket) place() int {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	for i, w := range t.q.waiting {
		if w == t {
			return i + 1
		}
	}
	return 0
}

// length is how many wait.
func (q *queue) length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}
