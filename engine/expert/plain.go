package expert

import (
	"context"

	"deltafin/engine/checkpoint"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/prefill"
)

// Plain reads the experts of a checkpoint one after another through the page cache.
// It implements [k3.Experts] and serves one caller at a time. [Source] is what a run
// should use.
type Plain struct {
	ck       *checkpoint.Checkpoint
	layout   checkpoint.ExpertLayout
	slot     *held
	resident map[int64]*held
	budget   int64 // bytes of resident experts
	counters prefill.Counters
}

// held is an expert in memory.
type held struct {
	bytes []byte
	e     k3.Expert
}

// NewSource reads experts from ck and keeps up to budget bytes of them.
func NewSource(ck *checkpoint.Checkpoint, budget int64) *Plain {
	return &Plain{ck: ck, layout: ck.ExpertLayout(), budget: budget, resident: map[int64]*held{}}
}

// Counters accounts for all streams so far.
func (s *Plain) Counters() prefill.Counters { return s.counters }

// Stream calls use for each of ids in order.
func (s *Plain) Stream(ctx context.Context, layer int, ids []int32, use func(i int, e *k3.Expert) error, idle func() bool) error {
	for i, id := range ids {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := s.get(layer, int(id))
		if err != nil {
			return err
		}
		if err := use(i, &h.e); err != nil {
			return err
		}
	}
	return nil
}

func (s *Plain) get(layer, id int) (*held, error) {
	n := s.layout.ExpertBytes
	s.counters.Union += n
	key := int64(layer)<<32 | int64(id)
	if h := s.resident[key]; h != nil && keep.On() {
		s.counters.Resident += n
		return h, nil
	}
	if s.slot == nil {
		s.slot = s.newSlot()
	}
	h := s.slot
	if err := s.ck.ReadExtent(s.ck.Expert(layer, id), h.bytes); err != nil {
		return nil, err
	}
	s.counters.Read += n
	for _, part := range []int{checkpoint.W1Scale, checkpoint.W2Scale, checkpoint.W3Scale} {
		if bad := checkpoint.CheckScales(h.part(s.layout, part)); bad >= 0 {
			return nil, s.ck.ScaleError(layer, id, part, bad)
		}
	}
	if keep.On() && int64(len(s.resident)+1)*n <= s.budget {
		s.resident[key] = h
		s.slot = nil
	}
	return h, nil
}

func (s *Plain) newSlot() *held {
	h := &held{bytes: kernel.Bytes(int(s.layout.ExpertBytes))}
	matrix := func(packed, scale int) kernel.Matrix {
		p := s.layout.Parts[packed]
		m, err := kernel.NewMatrix(kernel.MXFP4, p.Rows, 2*p.Cols, h.part(s.layout, packed), h.part(s.layout, scale))
		if err != nil {
			panic(err) // the layout was derived from a checked config
		}
		return *m
	}
	h.e = k3.Expert{
		Gate: matrix(checkpoint.W1Packed, checkpoint.W1Scale),
		Down: matrix(checkpoint.W2Packed, checkpoint.W2Scale),
		Up:   matrix(checkpoint.W3Packed, checkpoint.W3Scale),
	}
	return h
}

func (h *held) part(l checkpoint.ExpertLayout, part int) []byte {
	p := l.Parts[part]
	return h.bytes[p.Offset:][:p.Bytes]
}
