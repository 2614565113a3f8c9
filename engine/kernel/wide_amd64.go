//go:build !noasm

package kernel

// The AVX-512 form is the AVX2 form with other tiles where they pay: MXFP4, whose
// unpacking has a wider table lookup, and bf16 and int8 with one row. Everything else
// waits for memory or for nothing worth the code.

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

// gemmAVX512 is defGemm. For MXFP4 it never expands a tile: unpacking sixteen
// values at a time for every four rows is faster than the AVX2 tiles.
func gemmAVX512(y []float32, ys int, w *Matrix, lo, hi int, x *acts, s *Scratch) {
	if w.Format == MXFP4 {
		avx512Thin.gemm(y, ys, w, lo, hi, x, s)
		return
	}
	gemmTiles(&avx512Tiles[w.Format], y, ys, w, lo, hi, x, s)
}
