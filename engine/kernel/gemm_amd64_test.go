//go:build !noasm

package kernel

import "testing"

// TestScalingBeforehandIsGuarded pins the edges; that the guard is right inside
// them is TestGemmFormsEqualTheDefinition, whose subnormal and huge inputs fail
// without it.
func TestScalingBeforehandIsGuarded(t *testing.T) {
	one := uint32(127) << 23
	for _, c := range []struct {
		x       span
		scale   byte
		allowed bool
	}{
		{span{one, one}, 127, true},
		{noSpan, 0, true},
		{span{2 << 23, one}, 127, true},
		{span{1 << 23, one}, 127, false},
		{span{100 << 23, one}, 29, true},
		{span{100 << 23, one}, 28, false},
		{span{one, 248 << 23}, 127, true},
		{span{one, 249 << 23}, 127, false},
		{span{one, 127 << 23}, 248, true},
		{span{one, 127 << 23}, 249, false},
		{span{one, 0x7f800000}, 127, false},
		{span{2 << 23, 2 << 23}, 253, false},
		{span{one, one}, 255, false},
	} {
		if got := mayScale(c.x, []byte{c.scale}); got != c.allowed {
			t.Errorf("mayScale(%x, %d) = %v, want %v", c.x, c.scale, got, c.allowed)
		}
	}
}
