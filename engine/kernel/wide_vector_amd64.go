//go:build !noasm

package kernel

// Whole groups of sixteen go to the AVX-512 functions, what remains to the AVX2 ones.

func expAVX512(dst, x []float32) {
	n := len(x) &^ 15
	if n > 0 {
		exp16(&dst[0], &x[0], n/16)
	}
	expAVX2(dst[n:], x[n:])
}

func sigmoidAVX512(dst, x []float32) {
	n := len(x) &^ 15
	if n > 0 {
		sigmoid16(&dst[0], &x[0], n/16)
	}
	sigmoidAVX2(dst[n:], x[n:])
}

func tanhAVX512(dst, x []float32) {
	n := len(x) &^ 15
	if n > 0 {
		tanh16(&dst[0], &x[0], n/16)
	}
	tanhAVX2(dst[n:], x[n:])
}

func situAVX512(dst, g, u []float32, beta, linear float32) {
	n := len(g) &^ 15
	if n > 0 {
		situ16(&dst[0], &g[0], &u[0], n/16, beta, linear)
	}
	situAVX2(dst[n:], g[n:], u[n:], beta, linear)
}

func scaleMulAVX512(dst, x, w []float32, inv float32) {
	n := len(x) &^ 15
	if n > 0 {
		scaleMul16(&dst[0], &x[0], &w[0], n/16, inv)
	}
	scaleMulAVX2(dst[n:], x[n:], w[n:], inv)
}

func gateAVX512(dst, x, g []float32) {
	n := len(x) &^ 15
	if n > 0 {
		gate16(&dst[0], &x[0], &g[0], n/16)
	}
	gateAVX2(dst[n:], x[n:], g[n:])
}

func addAVX512(dst, x, y []float32) {
	n := len(x) &^ 15
	if n > 0 {
		add16(&dst[0], &x[0], &y[0], n/16)
	}
	addAVX2(dst[n:], x[n:], y[n:])
}

func axpyAVX512(dst, x []float32, a float32) {
	n := len(x) &^ 15
	if n > 0 {
		axpy16(&dst[0], &x[0], &dst[0], n/16, a)
	}
	axpyAVX2(dst[n:], x[n:], a)
}

func scaleAVX512(dst, x []float32, a float32) {
	n := len(x) &^ 15
	if n > 0 {
		scale16(&dst[0], &x[0], n/16, a)
	}
	scaleAVX2(dst[n:], x[n:], a)
}

func scaleDivAVX512(dst []float32, a float32) {
	n := len(dst) &^ 15
	if n > 0 {
		div16(&dst[0], &dst[0], n/16, a)
	}
	scaleDivAVX2(dst[n:], a)
}

func decayAVX512(dst, z, bias []float32, a, lower float32) {
	n := len(z) &^ 15
	if n > 0 {
		decay16(&dst[0], &z[0], &bias[0], n/16, a, lower)
	}
	decayAVX2(dst[n:], z[n:], bias[n:], a, lower)
}

// convAVX512 has four taps in assembly, the number that K3 has.
func convAVX512(dst []float32, w, u [][]float32) {
	n := len(dst) &^ 15
	if len(w) != 4 || n != len(dst) || n == 0 {
		convAVX2(dst, w, u)
		return
	}
	conv16(&dst[0], &w[0][:n][0], &w[1][:n][0], &w[2][:n][0], &w[3][:n][0],
		&u[0][:n][0], &u[1][:n][0], &u[2][:n][0], &u[3][:n][0], n/16)
}

// kdaAVX512 leaves widths that are no multiple of 16 to AVX2; K3's heads are 128 wide.
func kdaAVX512(s []float32, stride int, decay, k, q, v []float32, beta float32, o []float32) {
	if len(v)%16 != 0 || len(v) == 0 || len(decay) == 0 {
		kdaAVX2(s, stride, decay, k, q, v, beta, o)
		return
	}
	_ = s[(len(decay)-1)*stride+len(v)-1]
	n := len(v) / 64
	if n > 0 {
		kda64(&s[0], stride*4, &decay[0], &k[0], &q[0], len(decay), &v[0], &o[0], n, beta)
	}
	if c := n * 64; c < len(v) {
		kda16(&s[c], stride*4, &decay[0], &k[0], &q[0], len(decay), &v[c], &o[c], (len(v)-c)/16, beta)
	}
}

// wideChains take wideColumns of as many rows of y as their index, by format.
var wideChains = [...][wideRows + 1]chainTile{
	F32:  {2: chainF32Wide2, chainF32Wide3, chainF32Wide4, chainF32Wide5, chainF32Wide6},
	BF16: {1: chainBF16Wide1, chainBF16Wide2, chainBF16Wide3, chainBF16Wide4, chainBF16Wide5, chainBF16Wide6},
}

// chainAVX512 does whole groups of columns and leaves the rest to AVX2, and one row of
// f32, which waits for its loads.
func chainAVX512(y []float32, ys int, w *Matrix, x []float32, xs, rows int, s *Scratch) {
	columns := 64
	if rows == 1 {
		columns = 128
	}
	whole := w.Cols / columns * columns
	if rows == 0 || w.Rows == 0 || whole == 0 || w.Format == Int8 || w.Format == MXFP4 || w.Format == F32 && rows == 1 {
		chainAVX2(y, ys, w, x, xs, rows, s)
		return
	}
	_, _ = y[(rows-1)*ys+w.Cols-1], x[(rows-1)*xs+w.Rows-1]
	bytes := w.rowBytes()
	for r, t := 0, 0; r < rows; r += t {
		t = evenly(rows-r, wideRows)
		wideChains[w.Format][t](&y[r*ys], ys*4, &w.Data[0], bytes, &x[r*xs], xs*4, w.Rows, whole/columns)
	}
	if whole < w.Cols {
		rest := *w
		rest.Data, rest.Cols = w.Data[whole*bytes/w.Stride:], w.Cols-whole
		chainAVX2(y[whole:], ys, &rest, x, xs, rows, s)
	}
}
