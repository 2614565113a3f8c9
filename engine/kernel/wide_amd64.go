//go:build !noasm

package kernel

// The AVX-512 form is the AVX2 form with other tiles and loops where they pay.

var avx512Thin = thin{
	[5]int{0, 6, 4, 2, 2},
	[5]fused{nil, mxWide1, mxWide4x2, mxWide2x3, mxWide2x4},
	[5]fused{nil, mxFused1x1, mxFused1x2, mxFused1x3, mxFused1x4},
}

// mxWide1 is mxWide6x1 for any number of blocks.
func mxWide1(w *byte, ws int, sc *byte, ss int, x *float32, xs int, acc *float32, as int, groups, blocks int) {
	eights := blocks / 8
	if eights > 0 {
		mxWide6x1(w, ws, sc, ss, x, acc, groups, eights)
	}
	if d := eights * 8; d < blocks {
		mxFused1x1(at(w, d*16), ws, at(sc, d), ss, at(x, d*Lane32), xs, acc, as, 6*groups, blocks-d)
	}
}

var avx512Tiles = func() [4]tiler {
	k := avx2Tiles
	k[Int8].height[1], k[Int8].tall[1] = 8, tileInt8Wide8x1
	k[BF16].height[1], k[BF16].tall[1] = 8, tileBF16Wide8x1
	return k
}()

// Rows of x that a wide tile takes at most, and weight rows of every wide tile.
const (
	wideRows   = 6
	wideHeight = 8
)

// wide holds the tiles of one format for groups of wideHeight weight rows, by the
// rows of x. The direct ones widen weights in registers each time they are used. From
// panelFrom rows of x on it is faster to let panel widen some columns of a group once
// into the cache, for all rows, and to go over that.
type wide struct {
	direct    [wideRows + 1]tile
	panel     func(dst *float32, w *Matrix, row, block, blocks, ahead int)
	panelFrom int
	over      []panelTile
}

// panelTile is a tile over a panel.
type panelTile func(w, x *float32, xs int, acc *float32, as, blocks int)

var avx512Wide = [...]wide{
	F32: {
		[wideRows + 1]tile{2: tileF32Wide8x2, tileF32Wide8x3, tileF32Wide8x4, tileF32Wide8x5, tileF32Wide8x6},
		panelOf(panelF32), 13, panelTiles,
	},
	BF16: {
		[wideRows + 1]tile{2: tileBF16Wide8x2, tileBF16Wide8x3, tileBF16Wide8x4, tileBF16Wide8x5, tileBF16Wide8x6},
		panelOf(panelBF16), 7, panelTiles,
	},
	Int8: {
		[wideRows + 1]tile{2: tileInt8Wide8x2, tileInt8Wide8x3, tileInt8Wide8x4, tileInt8Wide8x5, tileInt8Wide8x6},
		panelOf(panelInt8), 17, panelTiles,
	},
	MXFP4: { // weights scaled beforehand; with few rows avx512Thin is faster
		[wideRows + 1]tile{},
		panelOfMX, 5,
		[]panelTile{2: tileMXWide8x2, tileMXWide8x3},
	},
}

var panelTiles = []panelTile{
	3: tilePanelWide8x3, tilePanelWide8x4, tilePanelWide8x5, tilePanelWide8x6,
}

// Blocks of 32 columns that are gone through for all rows of x before the next: of a
// panel (8 KB, which with six rows of x stay in the first-level cache even where rows are
// a multiple of 4 KB apart), and of weights that are widened directly.
const (
	widePanel   = 8
	directPanel = 16
)

// gemmAVX512 is defGemm.
func gemmAVX512(y []float32, ys int, w *Matrix, lo, hi int, x *acts, s *Scratch) {
	k, whole := &avx512Wide[w.Format], (hi-lo)/wideHeight*wideHeight
	if w.Format == MXFP4 {
		if x.rows < k.panelFrom || !mayScale(x.span, w.Scale[lo*w.Stride/Lane32:hi*w.Stride/Lane32]) {
			whole = 0
		}
	} else if x.rows == 1 {
		whole = 0
	}
	if whole > 0 {
		k.gemm(y, ys, w, lo, lo+whole, x, s)
	}
	if lo += whole; lo == hi {
		return
	}
	if w.Format == MXFP4 {
		avx512Thin.gemm(y[whole:], ys, w, lo, hi, x, s)
	} else {
		gemmTiles(&avx512Tiles[w.Format], y[whole:], ys, w, lo, hi, x, s)
	}
}

// evenly is the first part of n cut into as few and even parts of at most most as
// there are. From two on no part is a single one.
func evenly(n, most int) int {
	parts := (n + most - 1) / most
	return (n + parts - 1) / parts
}

// gemm is defGemm for a multiple of wideHeight outputs and at least two rows of x.
func (k *wide) gemm(y []float32, ys int, w *Matrix, lo, hi int, x *acts, s *Scratch) {
	bytes, blocks, n := w.rowBytes(), w.Stride/Lane32, hi-lo
	widen, panel, chunk, most := x.rows >= k.panelFrom, directPanel, wideHeight, len(k.over)-1
	switch {
	case widen:
		panel = widePanel
	case x.rows <= wideRows: // weights are used once
		panel, chunk = blocks, n
	}
	panel = min(panel, blocks)
	for r0, rows := 0, 0; r0 < x.rows; r0 += rows {
		rows = evenly(x.rows-r0, passRows)
		buf := s.Floats(rows*n*8 + widePanel*Lane32*wideHeight)
		acc, wide := buf[:rows*n*8], buf[rows*n*8:]
		clear(acc)
		for b := 0; b < blocks; b += panel {
			nb := min(panel, blocks-b)
			for o := 0; o < n; o += chunk {
				if widen {
					ahead := wideHeight * bytes
					if o+chunk == n { // on to the next panel
						ahead = panel*bytes/blocks - o*bytes
					}
					k.panel(&wide[0], w, lo+o, b, nb, ahead)
				}
				for r, t := 0, 0; r < rows; r += t {
					t = evenly(rows-r, most)
					xp, ap := &x.data[(r0+r)*x.stride+b*Lane32], &acc[(r*n+o)*8]
					if widen {
						k.over[t](&wide[0], xp, x.stride*4, ap, n*32, nb)
					} else {
						k.direct[t](&w.Data[(lo+o)*bytes+b*bytes/blocks], bytes, xp, x.stride*4, ap, n*32, chunk/wideHeight, nb)
					}
				}
			}
		}
		finish(y[r0*ys:], ys, w, lo, n, rows, acc)
	}
}

// panelOf is a panel function of plain weights.
func panelOf(f func(dst *float32, w *byte, ws, blocks, ahead int)) func(*float32, *Matrix, int, int, int, int) {
	return func(dst *float32, w *Matrix, row, block, blocks, ahead int) {
		bytes := w.rowBytes()
		f(dst, &w.Data[row*bytes+block*bytes/(w.Stride/Lane32)], bytes, blocks, ahead)
	}
}

func panelOfMX(dst *float32, w *Matrix, row, block, blocks, ahead int) {
	bytes, k := w.rowBytes(), w.Stride/Lane32
	panelMX(dst, &w.Data[row*bytes+block*16], bytes, &w.Scale[row*k+block], k, blocks, ahead)
}
