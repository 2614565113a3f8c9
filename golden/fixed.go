package golden

import "fmt"

// fixedBits is the number of fraction bits of a frozen number: absolute accuracy
// 2^-37 = 7e-12, far below what float32 can show.
const fixedBits = 36

// unpack reads one [rows][cols] tensor from the front of b and returns the rest.
// A number is a zigzag integer of 8 bytes in units of 2^-36; byte j of all numbers
// comes before byte j+1 of any, so that the high bytes compress away.
func unpack(b []byte, rows, cols int) (t [][]float64, rest []byte, err error) {
	if rows < 1 || cols < 1 || cols > len(b)/8/rows {
		return nil, nil, fmt.Errorf("%d bytes cannot hold %d x %d numbers", len(b), rows, cols)
	}
	n := rows * cols
	flat := make([]float64, n)
	for i := range flat {
		var u uint64
		for j := range 8 {
			u |= uint64(b[j*n+i]) << (8 * j)
		}
		flat[i] = float64(int64(u>>1)^-int64(u&1)) / (1 << fixedBits)
	}
	t = make([][]float64, rows)
	for r := range t {
		t[r] = flat[r*cols : (r+1)*cols : (r+1)*cols]
	}
	return t, b[8*n:], nil
}
