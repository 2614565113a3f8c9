package kernel

// Job is one matrix product: Y[r] = W X[i] for every row r of Y, where i is r, or
// Index[r] if Index is set. Y.Cols is W.Rows and X.Cols is W.Cols.
type Job struct {
	Y, X  Mat
	W     *Matrix
	Index []int32
}

// outBlock is how many outputs a worker takes at a time: a multiple of every
// register tile's height.
const outBlock = 48

// MatMul does all jobs, their outputs shared out among the workers. Every
// output is one [Dot], so a row's result does not depend on the other rows.
func (p *Pool) MatMul(jobs ...Job) {
	type part struct {
		job int
		lo  int
	}
	packed := p.packAll(jobs)
	work := 0
	var parts []part
	for i, j := range jobs {
		if j.Y.Rows == 0 {
			continue
		}
		for lo := 0; lo < j.W.Rows; lo += outBlock {
			parts = append(parts, part{i, lo})
		}
		work += j.W.Rows * j.W.Stride * j.Y.Rows
	}
	n := len(parts)
	if n == 0 {
		return
	}
	k := active.Load()
	p.RunCost(n, work/n, func(s *Scratch, i int) {
		j, lo := &jobs[parts[i].job], parts[i].lo
		k.gemm(j.Y.Data[lo:], j.Y.Stride, j.W, lo, min(lo+outBlock, j.W.Rows), &packed[parts[i].job], s)
	})
}

// packAll returns for each job its activations as the kernels want them: rows
// W.Stride long, gathered, and permuted for MXFP4. Rows that are so already are
// used in place; consecutive jobs on the same rows share one copy.
func (p *Pool) packAll(jobs []Job) []acts {
	packed := make([]acts, len(jobs))
	inPlace := func(j *Job) bool {
		return j.W.Format != MXFP4 && j.Index == nil && j.X.Cols == j.W.Stride
	}
	shares := func(i int) bool {
		if i == 0 {
			return false
		}
		a, b := &jobs[i-1], &jobs[i]
		return a.X.Cols == b.X.Cols && a.Y.Rows == b.Y.Rows && (a.W.Format == MXFP4) == (b.W.Format == MXFP4) && !inPlace(a) &&
			&a.X.Data[0] == &b.X.Data[0] && a.X.Stride == b.X.Stride && sameIndex(a.Index, b.Index)
	}
	need := 0
	for i := range jobs {
		if j := &jobs[i]; j.Y.Rows > 0 && !inPlace(j) && !shares(i) {
			need += j.Y.Rows * j.W.Stride
		}
	}
	buf := p.pack.Floats(need)
	for i := range jobs {
		j := &jobs[i]
		switch {
		case j.Y.Rows == 0:
		case inPlace(j):
			packed[i] = acts{data: j.X.Data, stride: j.X.Stride, rows: j.Y.Rows}
		case shares(i):
			packed[i] = packed[i-1]
		default:
			m := Mat{j.Y.Rows, j.W.Stride, j.W.Stride, buf[:j.Y.Rows*j.W.Stride]}
			buf = buf[len(m.Data):]
			spans := make([]span, m.Rows)
			p.RunCost(m.Rows, m.Cols, func(_ *Scratch, r int) {
				from := r
				if j.Index != nil {
					from = int(j.Index[r])
				}
				spans[r] = packRow(m.Row(r), j.X.Row(from), j.W.Format)
			})
			packed[i] = acts{data: m.Data, stride: m.Stride, rows: m.Rows, span: noSpan}
			for _, t := range spans {
				packed[i].span = packed[i].span.union(t)
			}
		}
	}
	return packed
}

func sameIndex(a, b []int32) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// packRow writes x to dst with zeros behind it, permuted if f is MXFP4.
func packRow(dst, x []float32, f Format) span {
	if f != MXFP4 {
		clear(dst[copy(dst, x):])
		return noSpan
	}
	k := active.Load()
	whole := len(x) &^ (Lane32 - 1)
	s := k.pack(dst[:whole], x[:whole])
	if whole < len(x) {
		var tail [Lane32]float32
		copy(tail[:], x[whole:])
		s = s.union(k.pack(dst[whole:], tail[:]))
	}
	return s
}

// Chain is a matrix product from the other side: Y[r][c] = fma(X[r][j], W[j][c], Y[r][c])
// for j ascending, from the Y that is there. W.Cols is Y.Cols, W.Rows is X.Cols.
func Chain(y Mat, w *Matrix, x Mat, s *Scratch) {
	active.Load().chain(y.Data, y.Stride, w, x.Data, x.Stride, y.Rows, s)
}
