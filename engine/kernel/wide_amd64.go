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

// wide holds the tiles of one format that take groups of wideHeight weight rows, by the
// rows of x: direct widens weights in registers, each time they are used, and panel
// once into the cache, from as many rows of x on as it is the faster way.
type wide struct {
	direct    [wideRows + 1]tile
	panel     func(dst *float32, w *byte, ws, blocks, ahead int)
	panelFrom int
}

var avx512Wide = [...]wide{
	F32: {
		[wideRows + 1]tile{2: tileF32Wide8x2, tileF32Wide8x3, tileF32Wide8x4, tileF32Wide8x5, tileF32Wide8x6},
		panelF32, 7,
	},
	BF16: {
		[wideRows + 1]tile{2: tileBF16Wide8x2, tileBF16Wide8x3, tileBF16Wide8x4, tileBF16Wide8x5, tileBF16Wide8x6},
		panelBF16, 7,
	},
	Int8: {
		[wideRows + 1]tile{2: tileInt8Wide8x2, tileInt8Wide8x3, tileInt8Wide8x4, tileInt8Wide8x5, tileInt8Wide8x6},
		panelInt8, 17,
	},
}

// panelTiles run over a panel.
var panelTiles = [wideRows + 1]func(w, x *float32, xs int, acc *float32, as, blocks int){
	2: tilePanelWide8x2, tilePanelWide8x3, tilePanelWide8x4, tilePanelWide8x5, tilePanelWide8x6,
}

// Blocks of 32 columns that are gone through for all rows of x before the next: of a
// panel (8 KB, which with six rows of x stay in the first-level cache even where rows are
// a multiple of 4 KB apart), and of weights that are widened directly.
const (
	widePanel   = 8
	directPanel = 16
)

// gemmAVX512 is defGemm. For MXFP4 it never expands a tile: unpacking sixteen
// values at a time for every four rows is faster than the AVX2 tiles.
func gemmAVX512(y []float32, ys int, w *Matrix, lo, hi int, x *acts, s *Scratch) {
	switch {
	case w.Format == MXFP4:
		avx512Thin.gemm(y, ys, w, lo, hi, x, s)
	case x.rows == 1:
		gemmTiles(&avx512Tiles[w.Format], y, ys, w, lo, hi, x, s)
	default:
		whole := (hi - lo) / wideHeight * wideHeight
		if whole > 0 {
			avx512Wide[w.Format].gemm(y, ys, w, lo, lo+whole, x, s)
		}
		if lo+whole < hi {
			gemmTiles(&avx2Tiles[w.Format], y[whole:], ys, w, lo+whole, hi, x, s)
		}
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
	widen, panel, chunk := x.rows >= k.panelFrom, directPanel, wideHeight
	switch {
	case widen:
		panel = widePanel
	case x.rows <= wideRows: // weights are used once
		panel, chunk = blocks, n
	}
	panel = min(panel, blocks)
	for r0, rows := 0, 0; r0 < x.rows; r0 += rows {
		rows = evenly(x.rows-r0, passRows)
		buf := s.floats(rows*n*8 + widePanel*Lane32*wideHeight)
		acc, wide := buf[:rows*n*8], buf[rows*n*8:]
		clear(acc)
		for b := 0; b < blocks; b += panel {
			nb := min(panel, blocks-b)
			for o := 0; o < n; o += chunk {
				wp := &w.Data[(lo+o)*bytes+b*bytes/blocks]
				if widen {
					ahead := wideHeight * bytes
					if o+chunk == n { // on to the next panel
						ahead = panel*bytes/blocks - o*bytes
					}
					k.panel(&wide[0], wp, bytes, nb, ahead)
				}
				for r, t := 0, 0; r < rows; r += t {
					t = evenly(rows-r, wideRows)
					xp, ap := &x.data[(r0+r)*x.stride+b*Lane32], &acc[(r*n+o)*8]
					if widen {
						panelTiles[t](&wide[0], xp, x.stride*4, ap, n*32, nb)
					} else {
						k.direct[t](wp, bytes, xp, x.stride*4, ap, n*32, chunk/wideHeight, nb)
					}
				}
			}
		}
		finish(y[r0*ys:], ys, w, lo, n, rows, acc)
	}
}
