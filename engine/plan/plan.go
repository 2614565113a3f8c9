// Package plan predicts what a model will do on a machine: where its bytes will
// lie, how many move per token, and what that takes.
//
// The prediction is arithmetic on measured rates and the model's shapes, nothing
// else, and each of its assumptions is a named number:
//
//   - A pass costs the larger of its reads and its computing: the engine overlaps
//     them. What cannot overlap (the first layer's reads of a pass) is left out.
//   - A pass of R rows routes to experts·(1 − (1 − topK/experts)^R) experts per layer,
//     which is the uniform router: real ones choose fewer, so this is an upper bound. A
//     measured union replaces it.
//   - Resident experts are hit as often as their share of all experts: no luck.
package plan

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"

	"deltafin/engine/checkpoint"
)

// Shape is the sizes of a model that decide its speed.
type Shape struct {
	Layers, MoELayers int
	Experts, TopK     int
	ExpertBytes       int64
	SpineBytes        int64 // dense weights of all layers, as they will be read
	HeadBytes         int64
	StateBytes        int64 // recurrent state, without the latent cache
	PositionBytes     int64 // latent cache per token
	// Multiply-adds per row: dense weights of all layers, and one expert.
	SpineMACs, ExpertMACs int64
}

// ShapeOf takes the sizes from a model's configuration (spec B.4, C.12).
func ShapeOf(c *checkpoint.Config) Shape {
	h, p := int64(c.Hidden), int64(c.KDAHeads*c.KDADim)
	kda := 5*p*h + int64(c.KDADim)*(h+p) + int64(c.KDAHeads)*h // q k v g o, f_a f_b, b
	qk := int64(c.Heads * (c.Nope + c.Rope))
	v := int64(c.Heads * c.VDim)
	mla := h*int64(c.QLora) + qk*int64(c.QLora) + h*int64(c.KVLora+c.Rope) + int64(c.Heads*(c.Nope+c.VDim))*int64(c.KVLora) + 2*v*h
	moe := h*int64(c.Experts) + 2*h*int64(c.Latent) + 3*h*int64(c.SharedExperts*c.MoEInter)
	dense := 3 * h * int64(c.Intermediate)
	s := Shape{
		Layers: c.Layers, Experts: c.Experts, TopK: c.TopK,
		ExpertMACs:  3 * int64(c.MoEInter) * int64(c.Latent),
		ExpertBytes: 3 * int64(c.MoEInter) * int64(c.Latent) * 17 / 32, // a nibble each and a byte per 32
		HeadBytes:   2 * int64(c.Vocab) * h,
	}
	for l := range c.Layers {
		if c.MLA[l] {
			s.SpineMACs += mla
			s.PositionBytes += 4 * int64(c.KVLora+c.Rope)
		} else {
			s.SpineMACs += kda
			s.StateBytes += 4 * (p*int64(c.KDADim) + 3*p*int64(c.ConvKernel-1))
		}
		if c.IsMoE(l) {
			s.MoELayers++
			s.SpineMACs += moe
		} else {
			s.SpineMACs += dense
		}
	}
	s.SpineBytes = 2 * s.SpineMACs // bf16; norms and the like are a few MB
	return s
}

// K3 is the released model (spec A.3).
func K3() *checkpoint.Config {
	c := &checkpoint.Config{
		Hidden: 7168, Layers: 93, Vocab: 163840, Intermediate: 33792, KDAHeads: 96, KDADim: 128, ConvKernel: 4,
		Heads: 96, QLora: 1536, KVLora: 512, Nope: 128, Rope: 64, VDim: 128,
		Experts: 896, TopK: 16, SharedExperts: 2, MoEInter: 3072, Latent: 3584, FirstDense: 1, MLA: make([]bool, 93),
	}
	for l := range c.MLA {
		c.MLA[l] = l%4 == 3 || l == 92
	}
	return c
}

// Machine is what was measured of the machine, in bytes or multiply-adds per second.
type Machine struct {
	Drives []float64 // direct-read rate of each
	Memory int64     // bytes that the engine may use
	// DenseRow and ExpertRow are the bytes of weights per second of a pass of one row.
	DenseRow, ExpertRow float64
	// DenseRows and ExpertRows are the multiply-adds per second of a pass of many rows.
	DenseRows, ExpertRows float64
}

// Layout is where the bytes lie under a memory budget.
type Layout struct {
	State, Slots, Ring             int64
	SpineResident, SpineStreamed   int64
	ExpertResident, ExpertOnDrives int64
	ExpertHit                      float64 // share of expert uses served from memory
	MemoryNeeded                   int64   // the least that works
}

// Choices of the layout.
const (
	slots       = 24 // expert slots
	workBytes   = 600 << 20
	contextRows = 4096
)

// Place lays a model out in a machine's memory: state, read slots, a ring for the dense
// weights that are streamed, then as much of the dense weights as fit, then experts.
func Place(s Shape, m Machine) Layout {
	l := Layout{State: s.StateBytes + contextRows*s.PositionBytes + workBytes, Slots: slots * s.ExpertBytes}
	// The ring holds two pieces; half a layer is the largest but for a dense layer.
	l.Ring = 2 * s.SpineBytes / int64(max(s.Layers, 1))
	dense := s.SpineBytes + s.HeadBytes
	l.MemoryNeeded = l.State + l.Slots + l.Ring
	free := m.Memory - l.State - l.Slots
	if free >= dense {
		l.Ring, l.SpineResident = 0, dense
		free -= dense
	} else {
		l.SpineResident = max(free-l.Ring, 0)
		free = 0
	}
	l.SpineStreamed = dense - l.SpineResident
	all := int64(s.MoELayers) * int64(s.Experts) * s.ExpertBytes
	l.ExpertResident = min(free, all)
	l.ExpertOnDrives = all - l.ExpertResident
	if all > 0 {
		l.ExpertHit = float64(l.ExpertResident) / float64(all)
	}
	return l
}

// Union is the expected number of distinct experts of a layer in a pass of r rows.
func (s Shape) Union(r int) float64 {
	return float64(s.Experts) * (1 - math.Pow(1-float64(s.TopK)/float64(s.Experts), float64(r)))
}

// Pass is the prediction for one pass.
type Pass struct {
	Rows           int
	Bytes          float64 // read from drives
	ReadSeconds    float64
	ComputeSeconds float64
	Seconds        float64
}

// PassOf predicts a pass of r rows. union is the experts of all layers together; 0 takes
// the uniform router's.
func (s Shape) PassOf(r int, union float64, l Layout, m Machine) Pass {
	if union == 0 {
		union = s.Union(r) * float64(s.MoELayers)
	}
	p := Pass{Rows: r, Bytes: union*float64(s.ExpertBytes)*(1-l.ExpertHit) + float64(l.SpineStreamed)}
	var rate float64
	for _, d := range m.Drives {
		rate += d
	}
	p.ReadSeconds = p.Bytes / rate
	dense, experts := float64(s.SpineBytes+s.HeadBytes), float64(s.ExpertBytes)
	byBytes := dense/m.DenseRow + union*experts/m.ExpertRow
	byWork := float64(r)*float64(s.SpineMACs)/m.DenseRows + float64(r*s.TopK*s.MoELayers)*float64(s.ExpertMACs)/m.ExpertRows
	// A pass touches every weight at least once and does its multiply-adds: it takes the
	// longer of the two, part by part, and in sum no less than either.
	p.ComputeSeconds = max(byBytes, byWork)
	p.Seconds = max(p.ReadSeconds, p.ComputeSeconds)
	return p
}

// Write prints what the model would do on the machine and what more hardware would
// change.
func Write(w io.Writer, s Shape, m Machine) {
	gb := func(n float64) string { return fmt.Sprintf("%.1f GB", n/1e9) }
	l := Place(s, m)
	var rate float64
	for _, d := range m.Drives {
		rate += d
	}
	fmt.Fprintf(w, "machine   %s of memory for the engine; %d drive(s), %.2f GB/s together; one row %.1f GB/s bf16, %.1f GB/s MXFP4; many rows %.0f and %.0f GMAC/s\n",
		gb(float64(m.Memory)), len(m.Drives), rate/1e9, m.DenseRow/1e9, m.ExpertRow/1e9, m.DenseRows/1e9, m.ExpertRows/1e9)
	if m.Memory < l.MemoryNeeded {
		fmt.Fprintf(w, "memory    too little: this model needs %s\n", gb(float64(l.MemoryNeeded)))
		return
	}
	fmt.Fprintf(w, "memory    state and buffers %s, read slots %s, ring %s, dense weights resident %s of %s, experts resident %s of %s (least that works %s)\n\n",
		gb(float64(l.State)), gb(float64(l.Slots)), gb(float64(l.Ring)), gb(float64(l.SpineResident)), gb(float64(s.SpineBytes+s.HeadBytes)),
		gb(float64(l.ExpertResident)), gb(float64(l.ExpertResident+l.ExpertOnDrives)), gb(float64(l.MemoryNeeded)))
	one := m
	one.Drives = append(append([]float64(nil), m.Drives...), m.Drives[len(m.Drives)-1])
	more := m
	more.Memory += 32e9
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tread\tread time\tcompute time\ttakes\twith one more drive\twith 32 GB more\t")
	for _, r := range []int{1, 17, 512, 8192} {
		p := s.PassOf(r, 0, l, m)
		name := fmt.Sprintf("first token of %d", r)
		if r == 1 {
			name = "each token of decode"
		}
		fmt.Fprintf(t, "%s\t%s\t%.1f s\t%.1f s\t%.1f s\t%.1f s\t%.1f s\t\n", name, gb(p.Bytes), p.ReadSeconds, p.ComputeSeconds, p.Seconds,
			s.PassOf(r, 0, l, one).Seconds, s.PassOf(r, 0, Place(s, more), more).Seconds)
	}
	t.Flush()
	fmt.Fprintln(w, "\nThe router is taken as uniform, which reads most; reads and computing overlap; resident experts are hit by their share.")
}
