package kernel

import "math"

// Positions of the latent attention are cut into segments of Segment, counted
// from position 0, and these into blocks of blockLen. Both are part of the
// contract: they fix the order of the online softmax.
const (
	Segment  = 1024
	blockLen = 32
)

// Attention is one MLA layer's attention over its cache, in the latent space
// (spec C.8, absorbed form).
type Attention struct {
	Heads int
	// Scale multiplies every score: 1/sqrt(nope + rope).
	Scale float32
	// Latent [positions][kv_lora] and Key [positions][rope] are the cache. Their
	// strides are multiples of 32 and the padding is zero.
	Latent, Key Mat
	// First is the position of row 0; row r sees positions 0..First+r.
	First int
}

// headGroup is how many heads of a row one worker takes.
const headGroup = 12

// Attend writes the softmax-weighted latent of every row and head to out
// [rows*heads][kv_lora]; row r, head h is out row r*Heads+h. q [rows*heads][kv_lora] is
// the absorbed query, qr [rows*heads][rope] the shared-key part; their strides
// are padded like the cache's, with zeros.
func (p *Pool) Attend(out, q, qr Mat, a Attention) {
	rows := q.Rows / a.Heads
	groups := (a.Heads + headGroup - 1) / headGroup
	segments := (a.First+rows-1)/Segment + 1
	parts := make([]partial, rows*groups*segments)
	p.RunCost(len(parts), headGroup*min(Segment, a.First+rows)*(q.Stride*2+qr.Stride), func(s *Scratch, i int) {
		seg, g, r := i%segments, i/segments%groups, i/segments/groups
		n := a.First + r + 1
		if lo := seg * Segment; lo < n {
			h := r*a.Heads + g*headGroup
			heads := min(headGroup, a.Heads-g*headGroup)
			acc := out.Slice(h, h+heads)
			if segments > 1 {
				acc = NewMat(heads, out.Cols)
			}
			parts[i] = a.segment(acc, q.Slice(h, h+heads), qr.Slice(h, h+heads), lo, min(lo+Segment, n), s)
		}
	})
	k := active.Load()
	p.RunCost(rows*groups, headGroup*out.Cols*segments, func(_ *Scratch, i int) {
		r, g := i/groups, i%groups
		h := r*a.Heads + g*headGroup
		ps := parts[i*segments:][:segments]
		for j := range min(headGroup, a.Heads-g*headGroup) {
			o := out.Row(h + j)
			l := ps[0].l[j]
			if segments > 1 {
				l = merge(k, o, ps, j)
			}
			k.scaleDiv(o, l)
		}
	})
}

// partial is one segment's online softmax of a group of heads: running
// maximum, sum and unnormalised weighted latent per head.
type partial struct {
	m, l [headGroup]float32
	acc  Mat
}

// segment runs positions lo..hi-1 block by block.
func (a *Attention) segment(acc, q, qr Mat, lo, hi int, s *Scratch) partial {
	k := active.Load()
	t := partial{acc: acc}
	for h := range acc.Rows {
		t.m[h] = float32(math.Inf(-1))
		clear(acc.Row(h))
	}
	var sa, sb [headGroup * blockLen]float32
	var c [(headGroup + 7) &^ 7]float32 // whole vectors: the rest of one is slow
	for b := lo; b < hi; b += blockLen {
		n := min(blockLen, hi-b)
		lat := FloatMatrix(n, a.Latent.Cols, a.Latent.Stride, a.Latent.Data[b*a.Latent.Stride:])
		key := FloatMatrix(n, a.Key.Cols, a.Key.Stride, a.Key.Data[b*a.Key.Stride:])
		k.gemm(sa[:], blockLen, &lat, 0, n, &acts{data: q.Data, stride: q.Stride, rows: q.Rows}, s)
		k.gemm(sb[:], blockLen, &key, 0, n, &acts{data: qr.Data, stride: qr.Stride, rows: qr.Rows}, s)
		// Of all heads at once; what lies beyond n values of a head is computed for nothing.
		p := sa[:acc.Rows*blockLen]
		k.add(p, p, sb[:len(p)])
		k.scale(p, p, a.Scale)
		for h := range acc.Rows {
			p := sa[h*blockLen:][:n]
			m := max(t.m[h], most(p))
			c[h], t.m[h] = t.m[h]-m, m
			for i := range p {
				p[i] -= m
			}
		}
		k.exp(p, p)
		k.exp(c[:], c[:])
		for h := range acc.Rows {
			t.l[h] = FMA(t.l[h], c[h], k.sum(sa[h*blockLen:][:n]))
			o := acc.Row(h)
			k.scale(o, o, c[h])
		}
		k.chain(acc.Data, acc.Stride, &lat, sa[:], blockLen, acc.Rows, s)
	}
	return t
}

// most is the greatest value of p, by four chains that do not wait for each other.
func most(p []float32) float32 {
	inf := float32(math.Inf(-1))
	m := [4]float32{inf, inf, inf, inf}
	for ; len(p) >= 4; p = p[4:] {
		m[0], m[1], m[2], m[3] = max(m[0], p[0]), max(m[1], p[1]), max(m[2], p[2]), max(m[3], p[3])
	}
	for _, v := range p {
		m[0] = max(m[0], v)
	}
	return max(m[0], m[1], m[2], m[3])
}

// merge joins the segments of head j in ascending order into o and returns the sum: the
// first is taken as it is, and each further one is an entry of weight exp(m - m') by the rule
// of the blocks.
func merge(k *primitives, o []float32, ps []partial, j int) float32 {
	copy(o, ps[0].acc.Row(j))
	m, l := ps[0].m[j], ps[0].l[j]
	for i := range ps[1:] {
		s := &ps[1+i]
		if s.acc.Rows == 0 {
			break // beyond what this row sees
		}
		m2 := max(m, s.m[j])
		c, e := exp1(m-m2), exp1(s.m[j]-m2)
		l = FMA(l, c, float32(e*s.l[j]))
		k.scale(o, o, c)
		k.axpy(o, s.acc.Row(j), e)
		m = m2
	}
	return l
}
