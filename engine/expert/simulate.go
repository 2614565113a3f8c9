package expert

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
)

// SimulateOptions say what to try on a trace.
type SimulateOptions struct {
	ExpertBytes int64      // of one expert
	Caches      []int64    // sizes of memory for experts, in bytes
	Drives      []SimDrive // the first has all experts; none: no placements
}

// SimDrive is a drive of a what-if.
type SimDrive struct {
	Name  string
	Rate  float64 // bytes per second
	Bytes int64   // room for copies of the hottest experts; ignored for the first drive
}

// Simulation is what a trace says about caches and placements. All figures are of
// the second half of the passes; the first half warms caches and gives the heat.
type Simulation struct {
	Passes int `json:"passes"` // measured
	Tokens int `json:"tokens"` // rows of these passes

	// Without any cache.
	Reads         int64   `json:"reads"` // of experts, each once per layer of a pass
	BytesPerToken float64 `json:"bytes_per_token"`

	Caches     []CacheResult     `json:"caches"`
	Placements []PlacementResult `json:"placements"`
}

// CacheResult is what is read from drives with a cache of some size, in bytes per
// token. No cache of the same size reads less than Belady's, which knows the future.
type CacheResult struct {
	Bytes  int64   `json:"bytes"`
	LRU    float64 `json:"lru"`    // keeps the latest used
	Pinned float64 `json:"pinned"` // keeps the hottest of the first half for good
	Belady float64 `json:"belady"`
}

// PlacementResult is the time that reads alone take with the first n drives, each
// layer lasting as long as its busiest drive.
type PlacementResult struct {
	Drives          int     `json:"drives"`
	SecondsPerToken float64 `json:"seconds_per_token"`
	Ideal           float64 `json:"ideal_seconds_per_token"` // bytes over the sum of the rates
	Copies          int     `json:"copies"`                  // experts on the further drives
}

// simulateUses bounds the memory that a trace can take, a few dozen bytes each.
const simulateUses = 1 << 26

// access is one layer of a pass: the experts that it needs, each once.
type access struct {
	pass int
	keys []int32
}

// Simulate reads a trace to its end and replays it. A trace whose end is missing is
// used as far as it goes.
func Simulate(r *TraceReader, o SimulateOptions) (*Simulation, error) {
	if o.ExpertBytes <= 0 {
		return nil, errors.New("an expert of no bytes: give the model's expert size")
	}
	for _, d := range o.Drives {
		if d.Rate <= 0 {
			return nil, fmt.Errorf("drive %s has a rate of %g bytes/s: give a rate above 0", d.Name, d.Rate)
		}
	}
	var log []access
	var rows []int // per pass
	uses := 0
	for {
		x, err := r.Next()
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if x.NewPass || len(rows) == 0 {
			rows = append(rows, x.Rows)
		}
		keys := slices.Clone(x.IDs)
		slices.Sort(keys)
		keys = slices.Clip(slices.Compact(keys))
		for i := range keys {
			keys[i] += int32((x.Layer - r.First) * r.Experts)
		}
		log = append(log, access{len(rows) - 1, keys})
		if uses += len(keys); uses > simulateUses {
			return nil, fmt.Errorf("the trace has more than %d uses of experts, too many to hold in memory: record a shorter run", simulateUses)
		}
	}
	if len(rows) < 2 {
		return nil, fmt.Errorf("the trace has %d whole passes, a simulation needs 2: record a longer run", len(rows))
	}
	half := len(rows) / 2
	s := &Simulation{Passes: len(rows) - half}
	for _, n := range rows[half:] {
		s.Tokens += n
	}
	sim := simulator{log: log, half: half, total: r.Layers * r.Experts, per: r.Experts}
	for _, a := range log {
		if a.pass >= half {
			s.Reads += int64(len(a.keys))
		}
	}
	perToken := func(reads int64) float64 {
		return float64(reads) * float64(o.ExpertBytes) / float64(s.Tokens)
	}
	s.BytesPerToken = perToken(s.Reads)
	for _, n := range o.Caches {
		k := int(min(n/o.ExpertBytes, int64(sim.total)))
		s.Caches = append(s.Caches, CacheResult{n, perToken(sim.lru(k)), perToken(sim.pinned(k)), perToken(sim.belady(k))})
	}
	for n := range o.Drives {
		t, copies := sim.place(o.Drives[:n+1], o.ExpertBytes)
		rates := 0.0
		for _, d := range o.Drives[:n+1] {
			rates += d.Rate
		}
		s.Placements = append(s.Placements, PlacementResult{n + 1, t / float64(s.Tokens), s.BytesPerToken / rates, copies})
	}
	return s, nil
}

// WriteText renders the result as tables.
func (s *Simulation) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "%d tokens in %d passes; without a cache %.2f GB of experts per token\n", s.Tokens, s.Passes, s.BytesPerToken/1e9)
	if len(s.Caches) > 0 {
		fmt.Fprintf(t, "\nGB per token with a cache of\tLRU\tpinned by heat\tBelady\t\n")
		for _, c := range s.Caches {
			fmt.Fprintf(t, "%.1f GB\t%.2f\t%.2f\t%.2f\t\n", float64(c.Bytes)/1e9, c.LRU/1e9, c.Pinned/1e9, c.Belady/1e9)
		}
	}
	if len(s.Placements) > 0 {
		fmt.Fprintf(t, "\ndrives\tcopies\ts per token\tideal\tgain\t\n")
		for _, p := range s.Placements {
			fmt.Fprintf(t, "%d\t%d\t%.3f\t%.3f\t%.2fx\t\n", p.Drives, p.Copies, p.SecondsPerToken, p.Ideal, s.Placements[0].SecondsPerToken/p.SecondsPerToken)
		}
	}
	return t.Flush()
}

type simulator struct {
	log        []access
	half       int // the first measured pass
	total, per int
}

// lru counts the reads with a cache of n experts that forgets the least recently
// used.
func (m *simulator) lru(n int) (reads int64) {
	// A ring of keys in order of use; total is its anchor.
	next, prev, in := make([]int32, m.total+1), make([]int32, m.total+1), make([]bool, m.total)
	anchor, size := int32(m.total), 0
	next[anchor], prev[anchor] = anchor, anchor
	unlink := func(k int32) { next[prev[k]], prev[next[k]] = next[k], prev[k] }
	for _, a := range m.log {
		for _, k := range a.keys {
			if in[k] {
				unlink(k)
			} else {
				if a.pass >= m.half {
					reads++
				}
				if n == 0 {
					continue
				}
				if size == n {
					old := prev[anchor]
					unlink(old)
					in[old] = false
				} else {
					size++
				}
				in[k] = true
			}
			next[k], prev[k] = next[anchor], anchor
			prev[next[anchor]], next[anchor] = k, k
		}
	}
	return reads
}

// heat ranks experts by how many layers of passes of the first half needed them.
func (m *simulator) heat() (order []int32, count []int64) {
	count = make([]int64, m.total)
	for _, a := range m.log {
		if a.pass < m.half {
			for _, k := range a.keys {
				count[k]++
			}
		}
	}
	order = make([]int32, m.total)
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortFunc(order, func(a, b int32) int {
		return cmp.Or(cmp.Compare(count[b], count[a]), cmp.Compare(a%int32(m.per), b%int32(m.per)), cmp.Compare(a, b))
	})
	return order, count
}

// pinned counts the reads when the n hottest experts of the first half are in memory.
func (m *simulator) pinned(n int) (reads int64) {
	order, count := m.heat()
	in := make([]bool, m.total)
	for _, k := range order[:n] {
		in[k] = count[k] > 0 // what was never used was never read either
	}
	for _, a := range m.log {
		if a.pass >= m.half {
			for _, k := range a.keys {
				if !in[k] {
					reads++
				}
			}
		}
	}
	return reads
}

// future is an expert in Belady's cache and when it is needed next.
type future struct {
	key  int32
	next int64
}

// futures has the one that is needed last on top.
type futures []future

func (f futures) Len() int           { return len(f) }
func (f futures) Less(i, j int) bool { return f[i].next > f[j].next }
func (f futures) Swap(i, j int)      { f[i], f[j] = f[j], f[i] }
func (f *futures) Push(x any)        { *f = append(*f, x.(future)) }
func (f *futures) Pop() any {
	old := *f
	x := old[len(old)-1]
	*f = old[:len(old)-1]
	return x
}

// belady counts the reads of a cache of n experts that always forgets, or does not
// even keep, the one that is needed last. Of the first half it starts with the best n
// of all experts that were used there, so that no cache that has seen only these
// can read less.
func (m *simulator) belady(n int) (reads int64) {
	var count int64
	for _, a := range m.log {
		count += int64(len(a.keys))
	}
	upcoming := make([]int64, count) // when the key of each use is used again
	seen := make([]int64, m.total)
	for i := range seen {
		seen[i] = math.MaxInt64
	}
	at := count
	for _, a := range slices.Backward(m.log) {
		for _, k := range slices.Backward(a.keys) {
			at--
			upcoming[at] = seen[k]
			seen[k] = at
		}
	}
	in := make([]int64, m.total) // the key's next use, if it is in the cache
	for i := range in {
		in[i] = -1
	}
	var h futures            // with entries that are out of date, which in tells
	size, most := 0, m.total // of which the first half may use all
	// last is the next use of the key that is needed last.
	last := func() int64 {
		for in[h[0].key] != h[0].next {
			heap.Pop(&h)
		}
		return h[0].next
	}
	forget := func() {
		in[heap.Pop(&h).(future).key] = -1
		size--
	}
	for _, a := range m.log {
		if a.pass >= m.half && most > n {
			for most = n; size > n; {
				last()
				forget()
			}
		}
		for _, k := range a.keys {
			again := upcoming[at]
			at++
			if in[k] < 0 {
				if a.pass >= m.half {
					reads++
				}
				if size == most && (most == 0 || last() <= again) {
					continue
				}
				if size == most {
					forget()
				}
				size++
			}
			in[k] = again
			heap.Push(&h, future{k, again})
		}
	}
	return reads
}

// place is the time of all reads of the second half when the hottest experts of the
// first half also lie on the further drives, as [PlacePlan] would put them: shares of
// heat as the rates are, then more copies while there is room.
func (m *simulator) place(drives []SimDrive, expertBytes int64) (seconds float64, copies int) {
	order, count := m.heat()
	mass, rates := 0.0, 0.0
	weight := func(k int32) float64 { return float64(count[k]) + 0.5 }
	for _, k := range order {
		mass += weight(k)
	}
	for _, d := range drives {
		rates += d.Rate
	}
	homes := make([]uint64, m.total)
	room, got := make([]int64, len(drives)), make([]float64, len(drives))
	for i, d := range drives {
		room[i] = d.Bytes / roundUp(expertBytes)
	}
	add := func(i int, k int32) bool {
		if room[i] == 0 || homes[k]&(1<<i) != 0 {
			return false
		}
		homes[k] |= 1 << i
		room[i]--
		got[i] += weight(k)
		copies++
		return true
	}
	for _, k := range order {
		best := 0
		for i := 1; i < len(drives); i++ {
			if room[i] > 0 && got[i] < mass*drives[i].Rate/rates && (best == 0 || got[i]/drives[i].Rate < got[best]/drives[best].Rate) {
				best = i
			}
		}
		if best > 0 {
			add(best, k)
		}
	}
	for i := 1; i < len(drives); i++ {
		for _, k := range order {
			add(i, k)
		}
	}
	busy := make([]float64, len(drives))
	for _, a := range m.log {
		if a.pass < m.half {
			continue
		}
		clear(busy)
		for _, k := range a.keys {
			if homes[k] == 0 {
				busy[0] += 1 / drives[0].Rate // as the balancer, which looks at what has no choice first
			}
		}
		for _, k := range a.keys {
			if homes[k] == 0 {
				continue
			}
			best := 0
			for i := 1; i < len(drives); i++ {
				if homes[k]&(1<<i) != 0 && busy[i]+1/drives[i].Rate < busy[best]+1/drives[best].Rate {
					best = i
				}
			}
			busy[best] += 1 / drives[best].Rate
		}
		seconds += slices.Max(busy) * float64(expertBytes)
	}
	return seconds, copies
}
