package k3

import (
	"context"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/kernel"
	"deltafin/golden"
	"deltafin/prefill"
)

// zeros is a spine and a source of experts whose weights are all zero.
type zeros struct{ c *checkpoint.Config }

func (z zeros) Matrix(_ string, rows, cols int) (*kernel.Matrix, error) {
	return kernel.NewMatrix(kernel.BF16, rows, cols, make([]byte, 2*rows*cols), nil)
}
func (zeros) Vector(_ string, n int) ([]float32, error) { return make([]float32, n), nil }

func (z zeros) Attention(_ context.Context, l int) (*Attention, func(), error) {
	w, err := BindAttention(z.c, l, z)
	return w, func() {}, err
}

func (z zeros) FeedForward(_ context.Context, l int) (*FeedForward, func(), error) {
	w, err := BindFeedForward(z.c, l, z)
	return w, func() {}, err
}

func (z zeros) Output(context.Context) (*Output, func(), error) {
	w, err := BindOutput(z.c, z)
	return w, func() {}, err
}

func (z zeros) Head(_ context.Context, use func(int, *kernel.Matrix) error) error {
	m, _ := z.Matrix("", z.c.Vocab, z.c.Hidden)
	return use(0, m)
}

func (zeros) Embed(_ context.Context, dst kernel.Mat, ids []int) error {
	for r := range ids {
		clear(dst.Row(r))
	}
	return nil
}

func (z zeros) Stream(_ context.Context, _ int, ids []int32, use func(int, *Expert) error, _ func() bool) error {
	matrix := func(rows, cols int) kernel.Matrix {
		m, err := kernel.NewMatrix(kernel.MXFP4, rows, cols, make([]byte, rows*cols/2), make([]byte, rows*cols/32))
		if err != nil {
			panic(err)
		}
		return *m
	}
	e := Expert{Gate: matrix(z.c.MoEInter, z.c.Latent), Up: matrix(z.c.MoEInter, z.c.Latent), Down: matrix(z.c.Latent, z.c.MoEInter)}
	for i := range ids {
		if err := use(i, &e); err != nil {
			return err
		}
	}
	return nil
}
func (zeros) Counters() prefill.Counters { return prefill.Counters{} }

// TestPassBytesIsWhatAPassTakes: the arena of a pass is never larger than the
// ledger was told, and not much smaller. All tokens take the same experts here, which is
// the most that an expert's rows can need.
func TestPassBytesIsWhatAPassTakes(t *testing.T) {
	for _, set := range golden.Sets {
		ck, err := checkpoint.Open(golden.ModelDir(set))
		if err != nil {
			t.Fatal(err)
		}
		defer ck.Close()
		c := ck.Config()
		for _, rows := range []int{1, 2, 33, 64, 300, 700} {
			m := Model{Config: c, Spine: zeros{c}, Experts: zeros{c}, Pool: kernel.NewPool(1)}
			st := NewState(c)
			if _, err := m.Forward(context.Background(), st, make([]int, rows), Pass{Logits: 1}); err != nil {
				t.Fatal(err)
			}
			got, want := int64(4*m.arena.need), PassBytes(c, rows, 1)
			if got > want {
				t.Errorf("%s: a pass of %d rows takes %d bytes, the ledger was told %d", set, rows, got, want)
			}
			if want > 2*got+1<<20 {
				t.Errorf("%s: the ledger was told %d bytes for %d rows, %d were taken", set, want, rows, got)
			}
			if got, want := st.Bytes(), StateBytes(c, rows); rows >= 64 && (got < want || got > 2*want) {
				t.Errorf("%s: the state of %d positions takes %d bytes, the ledger was told %d", set, rows, got, want)
			}
			m.Pool.Close()
		}
	}
}
