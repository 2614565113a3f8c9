// Package prefill decides in which order routed experts are read and which rows
// each of them works on.
//
// The unit of work is a layer pass over R rows of activations, R being 1 in
// decode and a whole prompt in prefill; there is no second schedule. The routes of
// all rows are gathered, rows are grouped by expert, and each expert of the
// union is read once and applied to all rows that chose it, in ascending id, which is
// also the order in which the arithmetic contract combines them.
//
// The package knows rows, expert ids and bytes. It knows no tensor and does no
// I/O.
package prefill

// Group is one expert of the union and its work: Rows[i] is a row that chose it,
// ascending, and Slots[i] is the position of that choice in the route table.
type Group struct {
	Expert int32
	Rows   []int32
	Slots  []int32
}

// Plan groups a route table by expert, ascending. routes[r*topK+j] is the j-th
// expert of row r; experts is the number of experts of a layer, above every id. The
// cost is linear in both.
func Plan(routes []int32, topK, experts int) []Group {
	start := make([]int32, experts+1)
	for _, e := range routes {
		start[e+1]++
	}
	union := 0
	for e := range experts {
		if start[e+1] > 0 {
			union++
		}
		start[e+1] += start[e]
	}
	rows, slots := make([]int32, len(routes)), make([]int32, len(routes))
	next := append([]int32(nil), start[:experts]...)
	for i, e := range routes {
		rows[next[e]], slots[next[e]] = int32(i/topK), int32(i)
		next[e]++
	}
	groups := make([]Group, 0, union)
	for e := range experts {
		if lo, hi := start[e], start[e+1]; lo < hi {
			groups = append(groups, Group{int32(e), rows[lo:hi], slots[lo:hi]})
		}
	}
	return groups
}

// Chunks cuts rows rows into passes of at most limit rows, as even as possible.
// Any cutting gives the same bits; fewer passes read fewer bytes.
func Chunks(rows, limit int) []int {
	n := (rows + limit - 1) / limit
	out := make([]int, n)
	for i := range out {
		out[i] = rows*(i+1)/n - rows*i/n
	}
	return out
}

// Counters account for the bytes of routed experts, over all passes since they
// were zeroed. Read + Resident - Wasted == Union always holds: every byte that a pass
// needs comes from a drive or from memory, and what was read for nothing is
// counted apart.
type Counters struct {
	LayerPasses int64 // layers that ran, each over all rows of its pass
	Union       int64 // bytes of the routed experts, each once per layer pass
	Read        int64 // bytes that came from drives
	Resident    int64 // bytes that were already in memory
	Ahead       int64 // of Read: asked for before the route was known, and used
	Wasted      int64 // of Read: asked for and not used
}

// Sub returns the counters accumulated since earlier.
func (c Counters) Sub(earlier Counters) Counters {
	return Counters{
		c.LayerPasses - earlier.LayerPasses, c.Union - earlier.Union, c.Read - earlier.Read,
		c.Resident - earlier.Resident, c.Ahead - earlier.Ahead, c.Wasted - earlier.Wasted,
	}
}
