package k3

import "deltafin/engine/kernel"

// depth holds, for every row of a pass, the sources of the attention residuals
// (spec C.2, C.3): the banked vectors in order and, behind them, the running
// stream. It lives for one pass only.
//
// A row's sources lie side by side, so banking the stream is moving the end by
// one: no copy.
type depth struct {
	rows                  int
	hidden, stride, slots int
	banked                int
	data                  []float32 // [rows][slots][stride]
	eps                   float32
}

// view returns rows lo..hi-1.
func (d depth) view(lo, hi int) depth {
	d.rows = hi - lo
	d.data = d.data[lo*d.slots*d.stride:]
	return d
}

// sources returns row r's banked vectors and stream, the stream last.
func (d *depth) sources(r int) kernel.Mat {
	return kernel.Mat{Rows: d.banked + 1, Cols: d.hidden, Stride: d.stride, Data: d.data[r*d.slots*d.stride:]}
}

// stream is the running stream of all rows.
func (d *depth) stream() kernel.Mat {
	return kernel.Mat{Rows: d.rows, Cols: d.hidden, Stride: d.slots * d.stride, Data: d.data[d.banked*d.stride:]}
}

// bank appends the raw stream to the banked vectors; the stream's new place has
// unspecified content.
func (d *depth) bank() { d.banked++ }

// mixNorm sets dst to RMSNorm(mix(sources, fold), norm) for every row: the input of
// an attention, a feed-forward or the head (spec C.5 steps 1, 3, 5, 7 and C.6).
func (m *Model) mixNorm(dst kernel.Mat, d *depth, fold, norm []float32) {
	s := d.stream()
	m.Pool.RunCost(d.rows, 3*d.hidden*(d.banked+1), func(sc *kernel.Scratch, r int) {
		h, out := s.Row(r), dst.Row(r)
		if d.banked > 0 {
			v := d.sources(r)
			inv := make([]float32, v.Rows)
			for i := range inv {
				inv[i] = kernel.InvRMS(v.Row(i), d.eps)
			}
			kernel.MixDepth(out, v, fold, inv, sc)
			h = out
		}
		kernel.RMSNorm(out, h, norm, d.eps)
	})
}
