package plan

import (
	"math"
	"testing"
)

// TestShapeOfK3 holds the sizes to those of the released files (spec B.4, C.12).
func TestShapeOfK3(t *testing.T) {
	s := ShapeOf(K3())
	if s.ExpertBytes != 17547264 {
		t.Errorf("an expert has %d bytes", s.ExpertBytes)
	}
	if s.MoELayers != 92 || s.HeadBytes != 2348810240 {
		t.Errorf("%d MoE layers, head of %d bytes", s.MoELayers, s.HeadBytes)
	}
	// 108811877376 with norms, convolutions, biases and A_log, which are not projections.
	if d := 108811877376 - s.SpineBytes; d < 0 || d > 60e6 {
		t.Errorf("dense weights of %d bytes, %d less than the files have", s.SpineBytes, d)
	}
	if want := int64(434110464 + 30523392); s.StateBytes != want {
		t.Errorf("state of %d bytes, want %d", s.StateBytes, want)
	}
	if s.PositionBytes != 55296 {
		t.Errorf("%d bytes of cache per token", s.PositionBytes)
	}
}

// TestDecodeBytesAreThoseOfThePublishedFloor: 92 layers of 16 experts.
func TestDecodeBytesAreThoseOfThePublishedFloor(t *testing.T) {
	s := ShapeOf(K3())
	m := Machine{Drives: []float64{1e9}, Memory: 130e9, DenseRow: 1e10, ExpertRow: 1e10, DenseRows: 1e10, ExpertRows: 1e10}
	l := Place(s, m)
	if l.SpineStreamed != 0 {
		t.Fatalf("%d bytes of dense weights are streamed with 130 GB", l.SpineStreamed)
	}
	p := s.PassOf(1, 0, l, m)
	if want := 25829572608 * (1 - l.ExpertHit); math.Abs(p.Bytes-want) > 1 {
		t.Errorf("a token reads %.0f bytes, want %.0f", p.Bytes, want)
	}
	if full := s.Union(1 << 20); math.Abs(full-896) > 1e-6 {
		t.Errorf("a long prompt routes to %g experts", full)
	}
}

// TestPlaceNeverUsesMoreThanTheMemory walks budgets.
func TestPlaceNeverUsesMoreThanTheMemory(t *testing.T) {
	s := ShapeOf(K3())
	last := int64(math.MaxInt64)
	for gb := int64(6); gb < 1800; gb += 7 {
		m := Machine{Memory: gb * 1e9}
		l := Place(s, m)
		if used := l.State + l.Slots + l.Ring + l.SpineResident + l.ExpertResident; used > m.Memory {
			t.Fatalf("%d GB: uses %d", gb, used)
		}
		if onDrives := l.SpineStreamed + l.ExpertOnDrives; onDrives > last {
			t.Fatalf("%d GB: more on drives than with less memory", gb)
		} else {
			last = onDrives
		}
	}
	if l := Place(s, Machine{Memory: 6e9}); l.MemoryNeeded > 6e9 {
		t.Errorf("the least that works is %d bytes, more than 6 GB", l.MemoryNeeded)
	}
}
