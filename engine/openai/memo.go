package openai

import (
	"container/list"
	"sync"
)

// record is what a generation has given so far, as tokens. Whoever plays it through
// the same reader and writer gets the same bytes.
type record struct {
	id      string // of the response; calls of tools have ids made from it
	created int64  // Unix seconds
	cached  int    // tokens of the prompt that were known
	steps   []step
	draft   *guessing // nil without proposers
	finish  finish    // empty: it was cut off, and can be gone on with
}

// step is one token.
type step struct {
	id   int
	logs *tokenLogprob // nil unless asked for
}

// finish says why a generation ended.
type finish string

const (
	finishStop   finish = "stop"   // the model's end of the text, or a stop string
	finishLength finish = "length" // the number of tokens asked for, or the context
)

// bytes is the memory that r takes, roughly.
func (r *record) bytes() int64 {
	n := int64(256)
	for _, s := range r.steps {
		n += 24
		if s.logs != nil {
			n += 96 + 64*int64(len(s.logs.Top))
		}
	}
	return n
}

// memo keeps the records of the last requests: the same request again costs nothing,
// and one that was cut off goes on where it ended.
type memo struct {
	limit int64 // bytes

	mu    sync.Mutex
	bytes int64
	byKey map[[32]byte]*list.Element
	order list.List // of *memoEntry, the last used first
}

type memoEntry struct {
	key   [32]byte
	rec   record
	bytes int64
}

func newMemo(limit int64) *memo { return &memo{limit: limit, byKey: map[[32]byte]*list.Element{}} }

// get gives a copy; its steps are not to be written to, but may be appended to.
func (m *memo) get(key [32]byte) (record, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.byKey[key]
	if !ok {
		return record{}, false
	}
	m.order.MoveToFront(e)
	r := e.Value.(*memoEntry).rec
	r.steps = r.steps[:len(r.steps):len(r.steps)]
	return r, true
}

// put keeps r unless there is a better record: a finished or longer one.
func (m *memo) put(key [32]byte, r record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e, ok := m.byKey[key]; ok {
		old := e.Value.(*memoEntry)
		if old.rec.finish != "" || r.finish == "" && len(r.steps) <= len(old.rec.steps) {
			return
		}
		m.drop(e)
	}
	e := &memoEntry{key, r, r.bytes()}
	if e.bytes > m.limit {
		return
	}
	m.byKey[key] = m.order.PushFront(e)
	m.bytes += e.bytes
	for m.bytes > m.limit {
		m.drop(m.order.Back())
	}
}

func (m *memo) drop(e *list.Element) {
	old := m.order.Remove(e).(*memoEntry)
	m.bytes -= old.bytes
	delete(m.byKey, old.key)
}

func (m *memo) size() (n int, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.order.Len(), m.bytes
}
