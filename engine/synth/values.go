package synth

import (
	"encoding/binary"
	"hash/fnv"
	"math"
	"sync"
)

// values says what a tensor is filled with.
type values struct {
	kind   kind
	mean   float64
	spread float64 // standard deviation; half the width if uniform
	count  int     // of values, the rest being 0; 0 means all
}

type kind int

const (
	normal  kind = iota // about normal, F32 or BF16
	uniform             // F32
	nibbles             // any two E2M1 values a byte
	scales              // E8M0 bytes that give nibbles a standard deviation of spread
)

// The random numbers are those of splitmix64 by position: the i-th eight bytes of
// a tensor come from mix(key + i*gamma), so any part of any tensor can be
// made by anyone. The constants are those of Java's SplittableRandom.
const gamma = 0x9e3779b97f4a7c15

func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// key is the stream of a tensor. The name alone tells tensors of a layer apart.
func key(seed uint64, name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return mix(h.Sum64() ^ mix(seed+gamma))
}

// painter turns random numbers into the bytes of a tensor. All its arithmetic is
// exact or rounded once per operation, on every machine: products that are added to
// something are converted first, which forbids the compiler to fuse the two.
type painter struct {
	values values
	dtype  dtype
	half   []uint16  // normal BF16: by 16 random bits
	float  []float32 // F32: by 16 random bits
	scale  []byte    // scales: by 8 random bits
}

func newPainter(d dtype, v values) *painter {
	p := &painter{values: v, dtype: d}
	switch {
	case v.kind == scales:
		p.scale = scaleTable(v.spread)
	case d == bf16:
		p.half = make([]uint16, 1<<16)
		for i := range p.half {
			p.half[i] = toBF16(float32(v.at(i)))
		}
	case d == f32:
		p.float = make([]float32, 1<<16)
		for i := range p.float {
			p.float[i] = float32(v.at(i))
		}
	}
	return p
}

// at is the i-th of 65536 values that are equally likely.
func (v values) at(i int) float64 {
	if v.kind == uniform {
		return v.mean + float64(v.spread*((float64(2*i)+1)/(1<<16)-1))
	}
	return v.mean + float64(v.spread*normalTable()[i])
}

// paint fills dst with the bytes of a tensor from byte off, a multiple of 8.
func (p *painter) paint(dst []byte, key uint64, off int64) {
	i := uint64(off / 8)
	for ; len(dst) >= 8; dst = dst[8:] {
		binary.LittleEndian.PutUint64(dst, p.word(i, mix(key+i*gamma)))
		i++
	}
	if len(dst) > 0 {
		var tail [8]byte
		binary.LittleEndian.PutUint64(tail[:], p.word(i, mix(key+i*gamma)))
		copy(dst, tail[:])
	}
}

// word makes the i-th eight bytes of a tensor from a random number.
func (p *painter) word(i, r uint64) uint64 {
	switch {
	case p.half != nil:
		t := (*[1 << 16]uint16)(p.half)
		return uint64(t[r&0xffff]) | uint64(t[r>>16&0xffff])<<16 | uint64(t[r>>32&0xffff])<<32 | uint64(t[r>>48])<<48
	case p.scale != nil:
		t := (*[256]byte)(p.scale)
		var w uint64
		for b := 0; b < 64; b += 8 {
			w |= uint64(t[r>>b&0xff]) << b
		}
		return w
	case p.float != nil:
		lo := uint64(math.Float32bits(p.float[r&0xffff]))
		hi := uint64(math.Float32bits(p.float[r>>32&0xffff]))
		if n := uint64(p.values.count); n > 0 {
			if 2*i >= n {
				lo = 0
			}
			if 2*i+1 >= n {
				hi = 0
			}
		}
		return lo | hi<<32
	}
	return r
}

// normalTable returns 65536 equally likely values of mean 0 and standard deviation
// 1: the quantiles of the sum of twelve random bytes. Counting the sums takes
// additions only, so that the table is the same everywhere; a logarithm is not.
var normalTable = sync.OnceValue(func() []float64 {
	const dice, sides, most = 12, 256, 12 * 255
	weight := []float64{1} // weight[s]: how many ways there are to the sum s
	for range dice {
		next := make([]float64, len(weight)+sides-1)
		for s, n := range weight {
			for side := range sides {
				next[s+side] += n
			}
		}
		weight = next
	}
	var all float64
	for _, n := range weight {
		all += n
	}
	const entries = 1 << 16
	table := make([]float64, entries)
	sum, below := 0, weight[0]
	deviation := math.Sqrt(dice * (sides*sides - 1) / 12.0)
	for i := range table {
		for below < all*((float64(2*i)+1)/(2*entries)) {
			sum++
			below += weight[sum]
		}
		table[i] = (float64(sum) - most/2) / deviation
	}
	return table
})

// nibbleSquare is the mean square of the E2M1 values 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
const nibbleSquare = (0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8

// scaleTable returns 256 equally likely E8M0 bytes, a power of two and its
// neighbours as in the released experts, for weights of standard deviation std
// within 2%.
func scaleTable(std float64) []byte {
	const bias, low = 127, 0.25 // low: share of the lower neighbour
	square, exponent := std*std/nibbleSquare, bias
	for ; square < 0.8; square *= 4 {
		exponent--
	}
	for ; square >= 3.2; square /= 4 {
		exponent++
	}
	exponent = min(max(exponent, 1), 250)
	// square = low/4 + (1-low-high) + 4*high
	high := min(max((square-(1-low*3/4))/3, 0), 1-low)
	table := make([]byte, 256)
	for i := range table {
		switch x := (float64(i) + 0.5) / 256; {
		case x < low:
			table[i] = byte(exponent - 1)
		case x < 1-high:
			table[i] = byte(exponent)
		default:
			table[i] = byte(exponent + 1)
		}
	}
	return table
}

// toBF16 rounds to nearest, ties to even.
func toBF16(x float32) uint16 {
	b := math.Float32bits(x)
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}
