package reference

import (
	"fmt"
	"math"
)

// e2m1 are the eight magnitudes of a 4-bit code; bit 3 is the sign (spec B.3).
var e2m1 = [8]float64{0, 0.5, 1, 1.5, 2, 3, 4, 6}

// MXFP4Decode widens packed [rows][cols/2] with scale [rows][cols/32] to a matrix
// [rows][cols] (spec B.3): the low nibble is the even column, and each 32 columns share a
// factor 2^(scale-127). Error: lengths that do not fit, a scale of 255, or a weight that
// F cannot hold.
func MXFP4Decode[F Float](packed, scale []byte, rows, cols int) (Matrix[F], error) {
	if rows < 1 || cols < 1 || cols%32 != 0 || rows > len(scale) || cols/32 > len(scale) || len(packed) != rows*(cols/2) || len(scale) != rows*(cols/32) {
		return Matrix[F]{}, fmt.Errorf("%d packed and %d scale bytes are not a %d x %d MXFP4 matrix", len(packed), len(scale), rows, cols)
	}
	m := Matrix[F]{rows, cols, make([]F, rows*cols)}
	for r := range rows {
		for c := range cols {
			s := scale[r*(cols/32)+c/32]
			if s == 255 {
				return m, fmt.Errorf("row %d, block %d: scale 255 is not a number", r, c/32)
			}
			code := packed[r*(cols/2)+c/2]
			if c%2 == 1 {
				code >>= 4
			}
			v := math.Ldexp(e2m1[code&7], int(s)-127)
			if v > math.MaxFloat32 {
				return m, fmt.Errorf("row %d, block %d: scale %d makes a weight overflow float32", r, c/32, s)
			}
			if code&8 != 0 {
				v = -v
			}
			m.Row(r)[c] = F(v)
		}
	}
	return m, nil
}
