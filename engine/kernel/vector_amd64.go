//go:build !noasm

package kernel

// Whole groups of eight go to the assembly, what remains to the definition:
// elements are independent. In the reductions the remainder is padded with zeros to 32,
// as the definition says.

func expAVX2(dst, x []float32) {
	n := len(x) &^ 7
	if n > 0 {
		exp8(&dst[0], &x[0], n/8)
	}
	defExp(dst[n:], x[n:])
}

func sigmoidAVX2(dst, x []float32) {
	n := len(x) &^ 7
	if n > 0 {
		sigmoid8(&dst[0], &x[0], n/8)
	}
	defSigmoid(dst[n:], x[n:])
}

func tanhAVX2(dst, x []float32) {
	n := len(x) &^ 7
	if n > 0 {
		tanh8(&dst[0], &x[0], n/8)
	}
	defTanh(dst[n:], x[n:])
}

func situAVX2(dst, g, u []float32, beta, linear float32) {
	n := len(g) &^ 7
	if n > 0 {
		situ8(&dst[0], &g[0], &u[0], n/8, beta, linear)
	}
	defSiTU(dst[n:], g[n:], u[n:], beta, linear)
}

func scaleMulAVX2(dst, x, w []float32, inv float32) {
	n := len(x) &^ 7
	if n > 0 {
		scaleMul8(&dst[0], &x[0], &w[0], n/8, inv)
	}
	defScaleMul(dst[n:], x[n:], w[n:], inv)
}

func gateAVX2(dst, x, g []float32) {
	n := len(x) &^ 7
	if n > 0 {
		gate8(&dst[0], &x[0], &g[0], n/8)
	}
	defGate(dst[n:], x[n:], g[n:])
}

func addAVX2(dst, x, y []float32) {
	n := len(x) &^ 7
	if n > 0 {
		add8(&dst[0], &x[0], &y[0], n/8)
	}
	defAdd(dst[n:], x[n:], y[n:])
}

func axpyAVX2(dst, x []float32, a float32) {
	n := len(x) &^ 7
	if n > 0 {
		axpy8(&dst[0], &x[0], &dst[0], n/8, a)
	}
	defAxpy(dst[n:], x[n:], a)
}

func scaleAVX2(dst, x []float32, a float32) {
	n := len(x) &^ 7
	if n > 0 {
		scale8(&dst[0], &x[0], n/8, a)
	}
	defScale(dst[n:], x[n:], a)
}

func scaleDivAVX2(dst []float32, a float32) {
	n := len(dst) &^ 7
	if n > 0 {
		div8(&dst[0], &dst[0], n/8, a)
	}
	defScaleDiv(dst[n:], a)
}

func decayAVX2(dst, z, bias []float32, a, lower float32) {
	n := len(z) &^ 7
	if n > 0 {
		decay8(&dst[0], &z[0], &bias[0], n/8, a, lower)
	}
	defDecay(dst[n:], z[n:], bias[n:], a, lower)
}

// convAVX2 has four taps in assembly, the number that K3 has.
func convAVX2(dst []float32, w, u [][]float32) {
	n := len(dst) &^ 7
	if len(w) != 4 || n == 0 {
		defConv(dst, w, u)
		return
	}
	conv8(&dst[0], &w[0][:n][0], &w[1][:n][0], &w[2][:n][0], &w[3][:n][0],
		&u[0][:n][0], &u[1][:n][0], &u[2][:n][0], &u[3][:n][0], n/8)
	for c := n; c < len(dst); c++ {
		var a float32
		for j := range w {
			a = FMA(w[j][c], u[j][c], a)
		}
		dst[c] = silu1(a)
	}
}

func dotAVX2(x, y []float32) float32 {
	var a [8]float32
	n := len(x) &^ 31
	if n > 0 {
		dotLanes(&a, &x[0], &y[:n][0], n/32)
	}
	if n < len(x) {
		var xt, yt [32]float32
		copy(xt[:], x[n:])
		copy(yt[:], y[n:len(x)])
		dotLanes(&a, &xt[0], &yt[0], 1)
	}
	return tree(&a)
}

func sumAVX2(x []float32) float32 {
	var a [8]float32
	n := len(x) &^ 31
	if n > 0 {
		sumLanes(&a, &x[0], n/32)
	}
	if n < len(x) {
		var t [32]float32
		copy(t[:], x[n:])
		sumLanes(&a, &t[0], 1)
	}
	return tree(&a)
}

// kdaAVX2 leaves odd widths to the definition; K3's heads are 128 wide.
func kdaAVX2(s []float32, stride int, decay, k, q, v []float32, beta float32, o []float32) {
	if len(v)%8 != 0 || len(v) == 0 || len(decay) == 0 {
		defKDAStep(s, stride, decay, k, q, v, beta, o)
		return
	}
	_ = s[(len(decay)-1)*stride+len(v)-1]
	n := len(v) / 32
	if n > 0 {
		kda32(&s[0], stride*4, &decay[0], &k[0], &q[0], len(decay), &v[0], &o[0], n, beta)
	}
	if c := n * 32; c < len(v) {
		kda8(&s[c], stride*4, &decay[0], &k[0], &q[0], len(decay), &v[c], &o[c], (len(v)-c)/8, beta)
	}
}

// chainTiles are the widths of chain: for one row and for four rows, wide and
// eight columns at a time.
type chainTiles struct {
	wide, narrow        [2]chainTile
	wideColumns, height [2]int
}

type chainTile func(y *float32, ys int, w *byte, ws int, x *float32, xs int, terms, groups int)

var avx2Chains = [...]chainTiles{
	F32: {
		wide: [2]chainTile{chainF321x8, chainF324x2}, wideColumns: [2]int{64, 16},
		narrow: [2]chainTile{chainF321x1, chainF324x1}, height: [2]int{1, 4},
	},
	BF16: {
		wide: [2]chainTile{chainBF161x8, chainBF164x2}, wideColumns: [2]int{64, 16},
		narrow: [2]chainTile{chainBF161x1, chainBF164x1}, height: [2]int{1, 4},
	},
}

// chainAVX2 reads the padding of w's rows but writes no column beyond its width.
func chainAVX2(y []float32, ys int, w *Matrix, x []float32, xs, rows int, s *Scratch) {
	if rows == 0 || w.Rows == 0 || w.Cols == 0 {
		return
	}
	if w.Format == Int8 || w.Format == MXFP4 {
		row := s.Floats(w.Cols)
		for j := range w.Rows {
			w.Widen(row, j)
			for r := range rows {
				axpyAVX2(y[r*ys:][:w.Cols], row, x[r*xs+j])
			}
		}
		return
	}
	_, _ = y[(rows-1)*ys+w.Cols-1], x[(rows-1)*xs+w.Rows-1]
	k, bytes := &avx2Chains[w.Format], w.rowBytes()
	size := bytes / w.Stride
	for r := 0; r < rows; {
		i := 0
		if rows-r >= 4 {
			i = 1
		}
		c := 0
		if g := w.Cols / k.wideColumns[i]; g > 0 {
			k.wide[i](&y[r*ys], ys*4, &w.Data[0], bytes, &x[r*xs], xs*4, w.Rows, g)
			c = g * k.wideColumns[i]
		}
		if g := (w.Cols - c) / 8; g > 0 {
			k.narrow[i](&y[r*ys+c], ys*4, &w.Data[c*size], bytes, &x[r*xs], xs*4, w.Rows, g)
			c += g * 8
		}
		if n := w.Cols - c; n > 0 {
			for t := r; t < r+k.height[i]; t++ {
				var tail [8]float32
				copy(tail[:n], y[t*ys+c:])
				k.narrow[0](&tail[0], 0, &w.Data[c*size], bytes, &x[t*xs], 0, w.Rows, 1)
				copy(y[t*ys+c:][:n], tail[:n])
			}
		}
		r += k.height[i]
	}
}
