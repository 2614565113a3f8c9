package tokenizer

import (
	"math"
	"slices"
)

// encoder collects ids; it keeps the scratch of the merges between pieces.
type encoder struct {
	t   *Tokenizer
	ids []int

	nodes []node
	queue []uint64
}

// node is a token under construction, at the index of its first byte in the
// piece.
type node struct {
	next, prev int32  // first bytes of the neighbours; next of the last is the piece's length, prev of the first is -1
	id         int32  // the token these bytes are
	rank       uint32 // rank of the token that this and the next would make, noRank if none
}

const noRank = math.MaxUint32

// ordinary appends the ids of text, control names in it included as plain text.
func (e *encoder) ordinary(text string) {
	for text != "" {
		n := e.t.class.piece(text)
		e.piece(text[:n])
		text = text[n:]
	}
}

// piece appends the ids of one piece: its own if it is a token, else what is left
// after merging, again and again, the adjacent pair that makes the token of the
// lowest rank, the leftmost of equals (spec D.1). A queue of candidate pairs
// makes that n log n in the bytes of the piece.
func (e *encoder) piece(s string) {
	t := e.t
	if len(s) == 1 {
		e.ids = append(e.ids, int(t.byteID[s[0]]))
		return
	}
	if len(s) <= t.longest {
		if id, ok := t.ranks[s]; ok {
			e.ids = append(e.ids, int(id))
			return
		}
	}
	e.nodes = slices.Grow(e.nodes[:0], len(s))[:len(s)]
	e.queue = e.queue[:0]
	for i := range e.nodes {
		e.nodes[i] = node{next: int32(i + 1), prev: int32(i - 1), id: t.byteID[s[i]], rank: noRank}
	}
	for i := range e.nodes {
		e.pair(s, i)
	}
	for len(e.queue) > 0 {
		top := e.pop()
		i, rank := int(uint32(top)), uint32(top>>32)
		if e.nodes[i].rank != rank { // the pair has changed since it was queued
			continue
		}
		j := e.nodes[i].next
		k := e.nodes[j].next
		e.nodes[j].rank = noRank
		e.nodes[i].id = int32(rank)
		e.nodes[i].next = k
		if int(k) < len(s) {
			e.nodes[k].prev = int32(i)
		}
		e.pair(s, i)
		if p := e.nodes[i].prev; p >= 0 {
			e.pair(s, int(p))
		}
	}
	for i := 0; i < len(s); i = int(e.nodes[i].next) {
		e.ids = append(e.ids, int(e.nodes[i].id))
	}
}

// pair looks up what the node at i and its right neighbour would make, and queues
// it.
func (e *encoder) pair(s string, i int) {
	n := &e.nodes[i]
	n.rank = noRank
	if int(n.next) == len(s) {
		return
	}
	end := int(e.nodes[n.next].next)
	if end-i > e.t.longest {
		return
	}
	if id, ok := e.t.ranks[s[i:end]]; ok {
		n.rank = uint32(id)
		e.push(uint64(id)<<32 | uint64(i)) // orders by rank, then leftmost
	}
}

func (e *encoder) push(v uint64) {
	q := append(e.queue, v)
	i := len(q) - 1
	for i > 0 {
		up := (i - 1) / 2
		if q[up] <= v {
			break
		}
		q[i] = q[up]
		i = up
	}
	q[i] = v
	e.queue = q
}

func (e *encoder) pop() uint64 {
	q := e.queue
	top, v := q[0], q[len(q)-1]
	q = q[:len(q)-1]
	e.queue = q
	i := 0
	for {
		down := 2*i + 1
		if down >= len(q) {
			break
		}
		if down+1 < len(q) && q[down+1] < q[down] {
			down++
		}
		if v <= q[down] {
			break
		}
		q[i] = q[down]
		i = down
	}
	if len(q) > 0 {
		q[i] = v
	}
	return top
}
