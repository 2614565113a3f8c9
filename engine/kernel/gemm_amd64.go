//go:build !noasm

package kernel

import "unsafe"

// tile adds columns to the running lanes of groups of weight rows; see stubs_amd64.go.
type tile func(w *byte, ws int, x *float32, xs int, acc *float32, as int, groups, blocks int)

// tiler holds the tiles of one format: for T rows of x, tall[T] takes height[T]
// weight rows at a time and one[T] a single one.
type tiler struct {
	height    [5]int
	tall, one [5]tile
}

var avx2Tiles = [...]tiler{
	F32: {
		[5]int{0, 4, 4, 3, 3},
		[5]tile{nil, tileF324x1, tileF324x2, tileF323x3, tileF323x4},
		[5]tile{nil, tileF321x1, tileF321x2, tileF321x3, tileF321x4},
	},
	BF16: {
		[5]int{0, 4, 4, 3, 3},
		[5]tile{nil, tileBF164x1, tileBF164x2, tileBF163x3, tileBF163x4},
		[5]tile{nil, tileBF161x1, tileBF161x2, tileBF161x3, tileBF161x4},
	},
	Int8: {
		[5]int{0, 4, 4, 3, 3},
		[5]tile{nil, tileInt84x1, tileInt84x2, tileInt83x3, tileInt83x4},
		[5]tile{nil, tileInt81x1, tileInt81x2, tileInt81x3, tileInt81x4},
	},
	MXFP4: { // over expanded weights
		[5]int{0, 3, 3, 3, 3},
		[5]tile{nil, mxTile3x1, mxTile3x2, mxTile3x3, mxTile3x4},
		[5]tile{nil, mxTile1x1, mxTile1x2, mxTile1x3, mxTile1x4},
	},
}

// run adds columns to n outputs for T rows of x.
func (k *tiler) run(T int, w *byte, ws int, x *float32, xs int, acc *float32, as, n, blocks int) {
	h := k.height[T]
	if g := n / h; g > 0 {
		k.tall[T](w, ws, x, xs, acc, as, g, blocks)
		if n -= g * h; n > 0 {
			w, acc = at(w, g*h*ws), at(acc, g*h*8)
		}
	}
	if n > 0 {
		k.one[T](w, ws, x, xs, acc, as, n, blocks)
	}
}

// at is the address of p[i], which must exist.
func at[T any](p *T, i int) *T {
	return (*T)(unsafe.Add(unsafe.Pointer(p), i*int(unsafe.Sizeof(*p))))
}

// Rows of one pass: their lanes are 32 bytes for each of the outputs of a chunk
// and must stay in the second-level cache.
const passRows = 64

// width is how many of the remaining rows the next tile takes: as even a split
// into at most four as there is, because a tile of one row loads too much.
func width(rows int) int {
	tiles := (rows + 3) / 4
	return (rows + tiles - 1) / tiles
}

// Panels and chunks of the two ways, chosen by measurement on a Zen 5: the
// weights of a chunk's panel and four rows of x are to fit the first-level cache.
const (
	tileChunk  = 12 // outputs
	tilePanel  = 12 // blocks of 32 columns
	thinPanel  = 32 // for 2 to 4 rows of x
	wholePanel = 1 << 30
)

// gemmAVX2 is defGemm.
func gemmAVX2(y []float32, ys int, w *Matrix, lo, hi int, x *acts, s *Scratch) {
	gemmTiles(&avx2Tiles[w.Format], y, ys, w, lo, hi, x, s)
}

func gemmTiles(k *tiler, y []float32, ys int, w *Matrix, lo, hi int, x *acts, s *Scratch) {
	if w.Format == MXFP4 {
		if x.rows <= 4 || !mayScale(x.span, w.Scale[lo*w.Stride/Lane32:hi*w.Stride/Lane32]) {
			avx2Thin.gemm(y, ys, w, lo, hi, x, s)
			return
		}
	}
	chunk, panel := tileChunk, tilePanel
	if x.rows <= 4 {
		chunk, panel = hi-lo, thinPanel
		if x.rows == 1 {
			panel = wholePanel
		}
	}
	bytes, blocks := w.rowBytes(), w.Stride/Lane32
	panel = min(panel, blocks)
	for r0 := 0; r0 < x.rows; r0 += passRows {
		rows := min(passRows, x.rows-r0)
		for o := lo; o < hi; o += chunk {
			n := min(chunk, hi-o)
			buf := s.Floats(rows*n*8 + tileChunk*tilePanel*Lane32)
			acc, wide := buf[:rows*n*8], buf[rows*n*8:]
			clear(acc)
			for b := 0; b < blocks; b += panel {
				nb := min(panel, blocks-b)
				wp, ws := &w.Data[o*bytes+b*bytes/blocks], bytes
				if w.Format == MXFP4 {
					ws = nb * Lane32 * 4
					mxExpand(&wide[0], wp, bytes, &w.Scale[o*blocks+b], blocks, n, nb)
					wp = (*byte)(unsafe.Pointer(&wide[0]))
				}
				for r := 0; r < rows; {
					t := width(rows - r)
					k.run(t, wp, ws, &x.data[(r0+r)*x.stride+b*Lane32], x.stride*4, &acc[r*n*8], n*32, n, nb)
					r += t
				}
			}
			finish(y[r0*ys+o-lo:], ys, w, o, n, rows, acc)
		}
	}
}

// finish reduces the lanes of n outputs from o on, and applies row scales.
func finish(y []float32, ys int, w *Matrix, o, n, rows int, acc []float32) {
	for r := range rows {
		yr := y[r*ys:][:n]
		reduce(&yr[0], &acc[r*n*8], n)
		if w.Format == Int8 {
			for i, v := range w.RowScale[o:][:n] {
				yr[i] *= v
			}
		}
	}
}

// The MXFP4 forms. With 1 to 4 rows of x the weights are unpacked in registers
// and used at once (fused); with more, AVX2 expands a panel of scaled weights
// once into the cache and runs the 3x4 tile over it, which leaves one addition per
// partial where the definition has a fused multiply-add by the scale: on a Zen the
// adders are pipes of their own. mayScale says when that gives the same bits.

// fused is a tile over packed MXFP4 weights and their scales.
type fused func(w *byte, ws int, sc *byte, ss int, x *float32, xs int, acc *float32, as int, groups, blocks int)

// thin holds them: tall[T] takes height[T] weight rows at a time.
type thin struct {
	height    [5]int
	tall, one [5]fused
}

var avx2Thin = thin{
	[5]int{0, 1, 1, 1, 1},
	[5]fused{nil, mxFused1x1, mxFused1x2, mxFused1x3, mxFused1x4},
	[5]fused{},
}

// run adds columns to n outputs for T rows of x.
func (k *thin) run(T int, w *byte, ws int, sc *byte, ss int, x *float32, xs int, acc *float32, as, n, blocks int) {
	h := k.height[T]
	if g := n / h; g > 0 {
		k.tall[T](w, ws, sc, ss, x, xs, acc, as, g, blocks)
		if n -= g * h; n > 0 {
			w, sc, acc = at(w, g*h*ws), at(sc, g*h*ss), at(acc, g*h*8)
		}
	}
	if n > 0 {
		k.one[T](w, ws, sc, ss, x, xs, acc, as, n, blocks)
	}
}

// gemm unpacks the weights anew for every four rows of x. It works for all values.
func (k *thin) gemm(y []float32, ys int, w *Matrix, lo, hi int, x *acts, s *Scratch) {
	bytes, blocks, n := w.rowBytes(), w.Stride/Lane32, hi-lo
	panel := thinPanel
	if x.rows == 1 {
		panel = wholePanel
	}
	panel = min(panel, blocks)
	for r0 := 0; r0 < x.rows; r0 += passRows {
		rows := min(passRows, x.rows-r0)
		acc := s.Floats(rows * n * 8)
		clear(acc)
		for b := 0; b < blocks; b += panel {
			nb := min(panel, blocks-b)
			for r := 0; r < rows; {
				t := width(rows - r)
				k.run(t, &w.Data[lo*bytes+b*16], bytes, &w.Scale[lo*blocks+b], blocks,
					&x.data[(r0+r)*x.stride+b*Lane32], x.stride*4, &acc[r*n*8], n*32, n, nb)
				r += t
			}
		}
		finish(y[r0*ys:], ys, w, lo, n, rows, acc)
	}
}

// mayScale reports whether weights multiplied by their scale beforehand give the
// bits that the definition gives, which multiplies a block's partial instead.
//
// A scale is a power of two, so the two differ only where one of them leaves
// the normal range. Every nonzero |x| is a multiple of 2^(e-150), e being its biased
// exponent, and every weight of 1/2: partials and their exact values before
// rounding are multiples of 2^(e-151) unscaled, and of that times the scale scaled.
// If both of these are at least 2^-149 then whatever lies below the normal range is
// a representable number and is not rounded. At the other end a partial is less
// than 24 * 2^(E-126) < 2^(E-121), and a scaled weight at most 6 * 2^125.
func mayScale(x span, scale []byte) bool {
	least, most := scaleSpan(scale)
	return int(x.least>>23)+min(0, least-127) >= 2 &&
		int(x.most>>23)+max(0, most-127) <= 248 && most <= 252
}

func scaleSpan(scale []byte) (least, most int) {
	var lo, hi [32]byte
	for i := range lo {
		lo[i] = 255
	}
	whole := len(scale) &^ 31
	if whole > 0 {
		byteSpan(&scale[0], whole, &lo, &hi)
	}
	least, most = 255, 0
	for i := range lo {
		least, most = min(least, int(lo[i])), max(most, int(hi[i]))
	}
	for _, e := range scale[whole:] {
		least, most = min(least, int(e)), max(most, int(e))
	}
	return least, most
}

func packAVX2(dst, x []float32) span {
	if len(x) == 0 {
		return noSpan
	}
	var lanes [16]uint32
	for i := range 8 {
		lanes[i] = noSpan.least
	}
	mxPack(&dst[0], &x[0], len(x)/Lane32, &lanes)
	s := noSpan
	for i := range 8 {
		if lanes[i] != noSpan.least {
			s.least = min(s.least, lanes[i]+1)
		}
		s.most = max(s.most, lanes[8+i])
	}
	return s
}
