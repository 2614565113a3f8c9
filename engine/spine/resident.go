package spine

import (
	"context"
	"fmt"

	"deltafin/engine/checkpoint"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
)

// Resident is a spine that is held in memory. It implements [k3.Spine].
type Resident struct {
	ck    *checkpoint.Checkpoint
	embed checkpoint.Tensor
	attn  []*k3.Attention
	ffn   []*k3.FeedForward
	out   *k3.Output
	head  *kernel.Matrix
	row   []byte
}

// Bytes is the memory that a resident spine of ck takes: its dense tensors but the
// embedding table, as stored.
func Bytes(ck *checkpoint.Checkpoint) int64 {
	var n int64
	for _, t := range ck.Tensors() {
		if t.Name != embedName {
			n += t.Bytes
		}
	}
	return n
}

// Load reads the whole spine of ck.
func Load(ctx context.Context, ck *checkpoint.Checkpoint) (*Resident, error) {
	c := ck.Config()
	s := &Resident{ck: ck, row: make([]byte, 2*c.Hidden)}
	var err error
	if s.embed, err = ck.Tensor(embedName); err != nil {
		return nil, err
	}
	for l := range c.Layers {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		a, err := k3.BindAttention(c, l, tensors{ck})
		if err != nil {
			return nil, err
		}
		f, err := k3.BindFeedForward(c, l, tensors{ck})
		if err != nil {
			return nil, err
		}
		s.attn, s.ffn = append(s.attn, a), append(s.ffn, f)
	}
	if s.out, err = k3.BindOutput(c, tensors{ck}); err != nil {
		return nil, err
	}
	s.head, err = tensors{ck}.Matrix(k3.HeadName, c.Vocab, c.Hidden)
	return s, err
}

// Attention returns the first half of layer l.
func (s *Resident) Attention(_ context.Context, l int) (*k3.Attention, func(), error) {
	return s.attn[l], func() {}, nil
}

// FeedForward returns the second half of layer l.
func (s *Resident) FeedForward(_ context.Context, l int) (*k3.FeedForward, func(), error) {
	return s.ffn[l], func() {}, nil
}

// Head hands out lm_head as one slice.
func (s *Resident) Head(_ context.Context, use func(lo int, w *kernel.Matrix) error) error {
	return use(0, s.head)
}

// Output returns what follows the last layer.
func (s *Resident) Output(context.Context) (*k3.Output, func(), error) {
	return s.out, func() {}, nil
}

// Embed writes the embedding row of each id to dst.
func (s *Resident) Embed(ctx context.Context, dst kernel.Mat, ids []int) error {
	for r, id := range ids {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := int64(len(s.row))
		if err := s.ck.ReadExtent(checkpoint.Extent{File: s.embed.File, Offset: s.embed.Offset + int64(id)*n, Bytes: n}, s.row); err != nil {
			return err
		}
		widen(dst.Row(r), s.row, checkpoint.BF16)
	}
	return nil
}

// tensors reads tensors of a checkpoint into memory. It implements [k3.Tensors].
type tensors struct{ ck *checkpoint.Checkpoint }

func (t tensors) read(name string) (checkpoint.Tensor, []byte, error) {
	x, err := t.ck.Tensor(name)
	if err != nil {
		return x, nil, err
	}
	b := kernel.Bytes(int(x.Bytes))
	return x, b, t.ck.Read(x, b)
}

func (t tensors) Matrix(name string, rows, cols int) (*kernel.Matrix, error) {
	x, b, err := t.read(name)
	if err != nil {
		return nil, err
	}
	format := kernel.BF16
	if x.DType == checkpoint.F32 {
		format = kernel.F32
	}
	m, err := kernel.NewMatrix(format, rows, cols, b, nil)
	if err != nil {
		return nil, fmt.Errorf("tensor %s: %w", name, err)
	}
	return m, nil
}

func (t tensors) Vector(name string, n int) ([]float32, error) {
	x, b, err := t.read(name)
	if err != nil {
		return nil, err
	}
	if have := int(x.Bytes / x.DType.Size()); have < n {
		return nil, fmt.Errorf("tensor %s has %d elements, needs %d", name, have, n)
	}
	v := kernel.Floats(n)
	widen(v, b, x.DType)
	return v, nil
}
