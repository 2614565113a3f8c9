package dspark

import (
	"context"
	"math"
	"slices"

	"deltafin/engine/draft"
	"deltafin/engine/kernel"
)

// sequence implements [draft.Watcher]. What it was shown is first pending: the streams of the
// watched layers side by side, in bf16, as the network was trained. The next proposal projects
// the pending rows, which takes weights, and the caches get their latents and keys.
//
// Both hold the Window most recent positions and no more, so that a pass of
// thousands of rows costs no more than its end. Positions are absolute: those that were
// never watched are just not attended to.
type sequence struct {
	p       *proposer
	caches  []cache // per draft layer
	watched int     // positions that were added to the caches, those overwritten since included

	positions []int    // of the pending rows, ascending
	pending   []uint16 // [positions][watched layers * hidden]
	decided   int      // positions below are part of the sequence
	pass      int      // pending rows that were there before the latest pass
	layers    int      // watched layers that the latest pass has shown
	failed    bool     // nothing will be proposed any more
}

// cache is what one draft layer keeps: a ring of the window's positions, and behind
// it room for the rows of a proposal.
type cache struct {
	latent, key kernel.Mat // [room][kv_lora], [room][rope]
}

// cacheRoom is how many rows the caches are made for when n positions are in them.
func (p *proposer) cacheRoom(n int) int {
	n += Rows
	return min(max(64, n+n/2), p.window+Rows)
}

// cacheBytes is the memory of the caches of all layers with that many rows.
func (p *proposer) cacheBytes(room int) int64 {
	return 4 * int64(p.c.Layers) * int64(room) * int64(kernel.Pad(p.c.KVLora)+kernel.Pad(p.c.Rope))
}

// held is how many positions are in the caches.
func (s *sequence) held() int { return min(s.watched, s.p.window) }

// reserve makes room in the caches for n positions and the rows of a proposal.
func (s *sequence) reserve(n int) {
	n = min(n, s.p.window)
	if n+Rows <= s.caches[0].latent.Rows {
		return
	}
	grown := func(m kernel.Mat, cols int) kernel.Mat {
		g := kernel.NewMat(s.p.cacheRoom(n), cols)
		copy(g.Data, m.Data)
		return g
	}
	for i := range s.caches {
		c := &s.caches[i]
		c.latent, c.key = grown(c.latent, s.p.c.KVLora), grown(c.key, s.p.c.Rope)
	}
}

// Layers are the layers whose streams the draft was trained on.
func (s *sequence) Layers() []int { return s.p.c.TargetLayers }

// trial is how many rows a pass has at most of which only the first may be kept. A
// longer one is a prompt, whose last rows are those that count.
const trial = 32

// pendingBytes is the memory of pending rows when room is made for so many.
func (p *proposer) pendingBytes(rows int) int64 {
	const position = 2 * 8 // append may double it
	return int64(max(rows, trial)) * int64(2*p.width()+position)
}

// width is the values of a pending row.
func (p *proposer) width() int { return len(p.c.TargetLayers) * p.c.Hidden }

// Watch keeps the stream of the last rows of the pass, as far as the window goes. A pass may be cut
// off after any layer and go on later.
func (s *sequence) Watch(layer, first int, stream kernel.Mat) {
	i := slices.Index(s.p.c.TargetLayers, layer)
	if i < 0 || s.failed {
		return
	}
	if i == 0 {
		s.begin(first, stream.Rows)
	}
	s.layers++
	n := len(s.positions) - s.pass
	s.p.target.Pool.RunCost(n, stream.Cols, func(_ *kernel.Scratch, r int) {
		round(s.pending[(s.pass+r)*s.p.width()+i*stream.Cols:], stream.Row(stream.Rows-n+r))
	})
}

// begin makes pending rows for the positions from first to first+n-1 or the last of them.
func (s *sequence) begin(first, n int) {
	s.forget(first)
	limit, end := s.p.window+trial, first+n
	first = max(first, end-limit)
	s.consume(max(len(s.positions)+end-first-limit, 0))
	s.pass, s.layers = len(s.positions), 0
	for ; first < end; first++ {
		s.positions = append(s.positions, first)
	}
	need := len(s.positions) * s.p.width()
	if need > cap(s.pending) {
		s.pending = append(make([]uint16, 0, max(need, trial*s.p.width())), s.pending...)
	}
	s.pending = s.pending[:need]
}

// forget drops the pending rows of the positions from end on.
func (s *sequence) forget(end int) {
	n, _ := slices.BinarySearch(s.positions, end)
	s.truncate(n)
}

// truncate leaves the first n pending rows.
func (s *sequence) truncate(n int) {
	s.positions, s.pending = s.positions[:n], s.pending[:n*s.p.width()]
	s.pass = min(s.pass, n)
}

// consume drops the first n pending rows.
func (s *sequence) consume(n int) {
	copy(s.positions, s.positions[n:])
	copy(s.pending, s.pending[n*s.p.width():])
	s.pass = max(s.pass-n, 0)
	s.truncate(len(s.positions) - n)
}

// Kept notes what is decided, which may be a pass's rows bit by bit, and forgets a pass that
// did not reach the last watched layer. Rows behind end wait: the next pass takes the place of those
// that were not kept.
func (s *sequence) Kept(end int) {
	if s.layers < len(s.p.c.TargetLayers) {
		s.truncate(s.pass)
	}
	s.decided = end
}

// undone is how many decided rows are pending.
func (s *sequence) undone() int {
	n, _ := slices.BinarySearch(s.positions, s.decided)
	return n
}

// project moves the decided pending rows into the caches.
func (s *sequence) project(ctx context.Context) (err error) {
	p, w, b := s.p, s.p.w, &s.p.work
	s.consume(max(s.undone()-p.window, 0))
	done, all := 0, s.undone()
	defer func() {
		s.consume(done)
		if cap(s.pending) > 2*trial*p.width() && len(s.positions) == 0 {
			s.positions, s.pending = nil, nil
		}
	}()
	jobs := make([]kernel.Job, len(w.layers))
	for done < all {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(tile, all-done)
		x, y := b.streams.Slice(0, n), b.context.Slice(0, n)
		p.target.Pool.RunCost(n, x.Cols, func(_ *kernel.Scratch, r int) {
			for j, v := range s.pending[(done+r)*p.width():][:x.Cols] {
				x.Data[r*x.Stride+j] = math.Float32frombits(uint32(v) << 16)
			}
		})
		p.target.Pool.MatMul(kernel.Job{Y: y, X: x, W: w.contextProj})
		for r := range n {
			kernel.RMSNorm(y.Row(r), y.Row(r), w.contextNorm, p.c.Eps)
		}
		kva := func(i int) kernel.Mat {
			at := i * kernel.Pad(p.c.KVLora+p.c.Rope)
			return b.kva.Slice(0, n).ColSlice(at, at+p.c.KVLora+p.c.Rope)
		}
		for i := range jobs {
			jobs[i] = kernel.Job{Y: kva(i), X: y, W: w.layers[i].kva}
		}
		p.target.Pool.MatMul(jobs...)
		s.reserve(s.watched + n)
		p.target.Pool.RunCost(n, 8*b.kva.Cols, func(_ *kernel.Scratch, r int) {
			t := turnAt(p.freq, s.positions[done+r])
			for i := range s.caches {
				s.caches[i].set((s.watched+r)%p.window, kva(i).Row(r), w.layers[i].kvNorm, p.c.Eps, t)
			}
		})
		s.watched += n
		done += n
	}
	return nil
}

// set makes row of the cache from the projection [kv_lora+rope] of one position.
func (c *cache) set(row int, kva, norm []float32, eps float32, t turn) {
	kernel.RMSNorm(c.latent.Row(row), kva[:c.latent.Cols], norm, eps)
	key := c.key.Row(row)
	copy(key, kva[c.latent.Cols:])
	t.rotate(key)
}

// round writes x to dst in bf16, to nearest even.
func round(dst []uint16, x []float32) {
	for i, v := range x {
		u := math.Float32bits(v)
		dst[i] = uint16((u + 0x7fff + u>>16&1) >> 16)
	}
}

// Fork copies all.
func (s *sequence) Fork() draft.Sequence {
	f := *s
	f.positions, f.pending = slices.Clone(s.positions), slices.Clone(s.pending)
	f.caches = slices.Clone(s.caches)
	for i := range f.caches {
		for _, m := range []*kernel.Mat{&f.caches[i].latent, &f.caches[i].key} {
			d := kernel.Floats(len(m.Data))
			copy(d, m.Data)
			m.Data = d
		}
	}
	return &f
}

// Bytes is the memory that the sequence occupies.
func (s *sequence) Bytes() int64 {
	return s.p.cacheBytes(s.caches[0].latent.Rows) + 2*int64(cap(s.pending)) + 8*int64(cap(s.positions))
}
