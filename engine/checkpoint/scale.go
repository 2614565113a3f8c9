package checkpoint

import (
	"encoding/binary"
	"fmt"
)

// firstBadScale is the least E8M0 byte that no weight may have: 6 * 2^(253-127)
// is beyond float32, and 255 is the format's NaN (spec B.3).
const firstBadScale = 253

// CheckScales returns the index of the first byte of an MXFP4 scale tensor that
// would make a weight infinite or NaN, or -1. It looks at eight bytes at a time,
// so that an expert can be checked each time it is read.
func CheckScales(scale []byte) int {
	const (
		ones = 0x0101010101010101
		high = 0x80 * ones
		bad  = 256 - firstBadScale // a byte is bad when its complement is below this
	)
	i := 0
	for ; i+8 <= len(scale); i += 8 {
		c := ^binary.LittleEndian.Uint64(scale[i:])
		if (c-bad*ones)&^c&high != 0 {
			break
		}
	}
	for ; i < len(scale); i++ {
		if scale[i] >= firstBadScale {
			return i
		}
	}
	return -1
}

// ScaleError is the error for the byte at index of a scale tensor that CheckScales
// refused. Part is W1Scale, W2Scale or W3Scale; layer is 0-based.
func (c *Checkpoint) ScaleError(layer, id, part, index int) error {
	i := c.r.expertAt(layer, id)
	cols := c.r.layout.Parts[part].Cols
	row, group := index/cols, index%cols
	return fmt.Errorf("%s: tensor %s: block [%d, %d:%d] has a scale byte of %d or more, which makes its weights infinite or NaN: the checkpoint is corrupt, fetch the file again",
		c.r.files[c.r.experts[i].file], c.r.expertName(i, part), row, group*groupSize, (group+1)*groupSize, firstBadScale)
}
