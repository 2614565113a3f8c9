package synth

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"
)

func TestPiecesOfATensorAreThoseOfTheWhole(t *testing.T) {
	for _, l := range []look{
		{bf16, values{kind: normal, mean: 1, spread: 0.1}},
		{f32, values{kind: normal, spread: 0.6}},
		{f32, values{kind: uniform, spread: 1, count: 7}},
		{u8, values{kind: nibbles}},
		{u8, values{kind: scales, spread: 0.01}},
	} {
		p := newPainter(l.dtype, l.values)
		whole := make([]byte, 100)
		p.paint(whole, 42, 0)
		for off := 0; off < len(whole); off += 8 {
			for n := 0; off+n <= len(whole); n++ {
				part := make([]byte, n)
				p.paint(part, 42, int64(off))
				if !bytes.Equal(part, whole[off:off+n]) {
					t.Fatalf("%+v: bytes %d to %d are %x, of the whole %x", l, off, off+n, part, whole[off:off+n])
				}
			}
		}
	}
}

// moments decodes a painted tensor and returns its mean and standard deviation.
func moments(x []float64) (mean, std float64) {
	for _, v := range x {
		mean += v / float64(len(x))
	}
	for _, v := range x {
		std += (v - mean) * (v - mean) / float64(len(x))
	}
	return mean, math.Sqrt(std)
}

func near(got, want, tolerance float64) bool { return math.Abs(got-want) <= tolerance }

func TestValuesHaveTheMeanAndSpreadAskedFor(t *testing.T) {
	const n = 1 << 16
	for _, v := range []values{{mean: 1, spread: 0.1}, {spread: 0.02}, {spread: 2.5}} {
		b := make([]byte, 2*n)
		newPainter(bf16, v).paint(b, key(1, "x"), 0)
		x := make([]float64, n)
		beyond := 0
		for i := range x {
			x[i] = float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16))
			if math.Abs(x[i]-v.mean) > 2*v.spread {
				beyond++
			}
		}
		mean, std := moments(x)
		if !near(mean, v.mean, 0.02*v.spread) || !near(std, v.spread, 0.01*v.spread) {
			t.Errorf("normal %+v: mean %g, deviation %g", v, mean, std)
		}
		if share := float64(beyond) / n; !near(share, 0.0455, 0.004) { // of a normal distribution
			t.Errorf("normal %+v: %g are beyond two deviations", v, share)
		}
	}

	b := make([]byte, 4*n)
	newPainter(f32, dtBias).paint(b, key(1, "x"), 0)
	least, most := math.Inf(1), math.Inf(-1)
	for i := range n {
		x := float64(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
		least, most = min(least, x), max(most, x)
	}
	if !near(least, -5, 0.01) || !near(most, 1, 0.01) {
		t.Errorf("uniform %+v: from %g to %g", dtBias, least, most)
	}
}

func TestExpertWeightsHaveTheSpreadAskedForAtAnyScale(t *testing.T) {
	e2m1 := [8]float64{0, 0.5, 1, 1.5, 2, 3, 4, 6}
	const rows, groups = 64, 64
	packed := make([]byte, rows*groups*groupSize/2)
	newPainter(u8, values{kind: nibbles}).paint(packed, key(1, "p"), 0)
	for want := 0.001; want < 4; want *= 1.17 {
		scale := make([]byte, rows*groups)
		newPainter(u8, values{kind: scales, spread: want}).paint(scale, key(1, "s"), 0)
		kinds := map[byte]bool{}
		var x []float64
		for i, b := range packed {
			s := scale[i*2/groupSize]
			kinds[s] = true
			for _, nibble := range [2]byte{b & 15, b >> 4} {
				w := math.Ldexp(e2m1[nibble&7], int(s)-127)
				if nibble&8 != 0 {
					w = -w
				}
				x = append(x, w)
			}
		}
		mean, std := moments(x)
		if !near(mean, 0, 0.02*want) || !near(std, want, 0.04*want) {
			t.Errorf("spread %g: mean %g, deviation %g", want, mean, std)
		}
		if len(kinds) < 2 || len(kinds) > 3 {
			t.Errorf("spread %g: %d different scales", want, len(kinds))
		}
	}
}

func TestALogEndsInZeros(t *testing.T) {
	for _, heads := range []int{1, 2, 3, 8} {
		v := aLog
		v.count = heads
		b := make([]byte, 4*8)
		newPainter(f32, v).paint(b, key(1, "a"), 0)
		for i := range 8 {
			if zero := binary.LittleEndian.Uint32(b[4*i:]) == 0; zero != (i >= heads) {
				t.Errorf("%d heads: entry %d is zero: %t", heads, i, zero)
			}
		}
	}
}

func TestTensorsHaveStreamsOfTheirOwn(t *testing.T) {
	p, err := small().resolve()
	must(t, err)
	seen := map[uint64]string{}
	for _, seed := range []uint64{0, 1, 2} {
		for i := range p.shards() {
			for _, x := range p.shard(i) {
				k := key(seed, x.name)
				if other, ok := seen[k]; ok {
					t.Errorf("%s has the stream of %s", x.name, other)
				}
				seen[k] = x.name
			}
		}
	}
}

func BenchmarkPaint(b *testing.B) {
	buf := make([]byte, jobBytes)
	for _, c := range []struct {
		name string
		look look
	}{
		{"nibbles", look{u8, values{kind: nibbles}}},
		{"scales", look{u8, values{kind: scales, spread: 0.02}}},
		{"bf16", look{bf16, values{kind: normal, spread: 1}}},
		{"f32", look{f32, values{kind: uniform, spread: 1}}},
	} {
		b.Run(c.name, func(b *testing.B) {
			p := newPainter(c.look.dtype, c.look.values)
			b.SetBytes(int64(len(buf)))
			for b.Loop() {
				p.paint(buf, 1, 0)
			}
		})
	}
}
