package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// product does one MatMul of rows first..first+n-1 of x.
func product(threads int, m *Matrix, x Mat, first, n int) []float32 {
	p := NewPool(threads)
	defer p.Close()
	y := NewMat(n, m.Rows)
	p.MatMul(Job{Y: y, X: x.Slice(first, first+n), W: m})
	out := make([]float32, 0, n*m.Rows)
	for r := range n {
		out = append(out, y.Row(r)...)
	}
	return out
}

func wantSame(t testing.TB, what string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values, want %d", what, len(got), len(want))
	}
	for i := range want {
		if !same(got[i], want[i]) {
			t.Errorf("%s: value %d is %x, want %x", what, i, got[i], want[i])
			return
		}
	}
}

// TestRowsAndThreadsDoNotChangeABit: 64 rows at once on one thread, against every
// smaller number of rows and 2 and 5 threads.
func TestRowsAndThreadsDoNotChangeABit(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for _, f := range formats {
		m := randomMatrix(rng, f, 113, 160)
		x := Mat{64, 160, 160, random(rng, 64*160)}
		all := product(1, m, x, 0, 64)
		for _, rows := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 64} {
			for _, threads := range []int{1, 2, 5} {
				first := rng.IntN(64 - rows + 1)
				got := product(threads, m, x, first, rows)
				wantSame(t, fmt.Sprintf("%v, %d rows from %d, %d threads", f, rows, first, threads), got, all[first*m.Rows:][:rows*m.Rows])
			}
		}
	}
}

// TestJobsShareAndGatherActivations: several jobs of one call, with and without an
// index, equal the same jobs one by one.
func TestJobsShareAndGatherActivations(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	x := Mat{9, 96, 101, random(rng, 9*101)}
	index := []int32{8, 0, 3, 3, 7}
	var jobs []Job
	for _, f := range []Format{MXFP4, MXFP4, BF16, Int8, F32} {
		w := randomMatrix(rng, f, 50, 96)
		jobs = append(jobs, Job{Y: NewMat(9, 50), X: x, W: w}, Job{Y: NewMat(5, 50), X: x, W: w, Index: index})
	}
	jobs = append(jobs, Job{Y: NewMat(0, 50), X: x, W: jobs[0].W})
	p := NewPool(2)
	defer p.Close()
	p.MatMul(jobs...)
	for i, j := range jobs {
		for r := range j.Y.Rows {
			from := r
			if j.Index != nil {
				from = int(j.Index[r])
			}
			wantSame(t, fmt.Sprintf("job %d row %d", i, r), j.Y.Row(r), product(1, j.W, x, from, 1))
		}
	}
}

func TestRunCallsEveryIndexOnce(t *testing.T) {
	p := NewPool(5)
	defer p.Close()
	for _, n := range []int{0, 1, 3, 1000} {
		seen := make([]int, n)
		p.Run(n, func(_ *Scratch, i int) { seen[i]++ })
		for i, k := range seen {
			if k != 1 {
				t.Fatalf("n %d: index %d was called %d times", n, i, k)
			}
		}
	}
}

// plainAttention is the softmax in binary64, without blocks or segments.
func plainAttention(q, qr []float32, a Attention, n int) []float64 {
	s := make([]float64, n)
	m := math.Inf(-1)
	for i := range s {
		for d, v := range a.Latent.Row(i) {
			s[i] += float64(q[d]) * float64(v)
		}
		for d, v := range a.Key.Row(i) {
			s[i] += float64(qr[d]) * float64(v)
		}
		s[i] *= float64(a.Scale)
		m = max(m, s[i])
	}
	out := make([]float64, a.Latent.Cols)
	var z float64
	for i := range s {
		e := math.Exp(s[i] - m)
		z += e
		for d, v := range a.Latent.Row(i) {
			out[d] += e * float64(v)
		}
	}
	for d := range out {
		out[d] /= z
	}
	return out
}

// fill writes random values to the columns of m and leaves its padding zero.
func fill(rng *rand.Rand, m Mat) Mat {
	for r := range m.Rows {
		copy(m.Row(r), random(rng, m.Cols))
	}
	return m
}

// TestAttention: close to a plain softmax, over one and several segments, and the
// same bits for any number of threads and when rows come one at a time.
func TestAttention(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	const latent, rope = 40, 8
	for _, c := range []struct{ heads, first, rows int }{
		{1, 0, 1}, {3, 0, 5}, {13, 30, 4}, {2, 1023, 1}, {2, 1021, 6}, {3, 2100, 2},
	} {
		positions := c.first + c.rows
		a := Attention{
			Heads: c.heads, Scale: .3, First: c.first,
			Latent: fill(rng, NewMat(positions, latent)), Key: fill(rng, NewMat(positions, rope)),
		}
		q, qr := fill(rng, NewMat(c.rows*c.heads, latent)), fill(rng, NewMat(c.rows*c.heads, rope))
		attend := func(threads int) Mat {
			p := NewPool(threads)
			defer p.Close()
			out := NewMat(c.rows*c.heads, latent)
			p.Attend(out, q, qr, a)
			return out
		}
		out := attend(1)
		for i := range out.Rows {
			want := plainAttention(q.Row(i), qr.Row(i), a, c.first+i/c.heads+1)
			for d, v := range out.Row(i) {
				if err := math.Abs(float64(v) - want[d]); !(err < 2e-6) {
					t.Fatalf("%+v: row %d column %d is %v, plain softmax %v", c, i, d, v, want[d])
				}
			}
		}
		for _, threads := range []int{2, 5} {
			wantSame(t, fmt.Sprintf("%+v, %d threads", c, threads), attend(threads).Data, out.Data)
		}
		p := NewPool(1)
		for r := range c.rows {
			b, one := a, NewMat(c.heads, latent)
			b.First += r
			p.Attend(one, q.Slice(r*c.heads, (r+1)*c.heads), qr.Slice(r*c.heads, (r+1)*c.heads), b)
			wantSame(t, fmt.Sprintf("%+v, row %d alone", c, r), one.Data, out.Slice(r*c.heads, (r+1)*c.heads).Data[:len(one.Data)])
		}
	}
}
