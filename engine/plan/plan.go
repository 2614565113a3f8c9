// Package plan predicts how fast a model will be on a machine: how many bytes move per
// token, and what that takes. Where its bytes lie is the engine's own account
// ([engine.Account]).
//
// The prediction is arithmetic on measured rates and the model's shapes, nothing
// else. It assumes:
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
	"slices"
	"text/tabwriter"

	"deltafin/engine"
	"deltafin/engine/checkpoint"
	"deltafin/prefill"
)

// Shape is the sizes of a model that decide its speed.
type Shape struct {
	Layers, MoELayers int
	Experts, TopK     int
	ExpertBytes       int64
	SpineBytes        int64 // dense weights of all layers
	HeadBytes         int64
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
		} else {
			s.SpineMACs += kda
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

// Machine is what was measured of the machine, in bytes or multiply-adds per second.
type Machine struct {
	Drives []float64 // direct-read rate of each
	// DenseRow and ExpertRow are the bytes of weights per second of a pass of one row.
	DenseRow, ExpertRow float64
	// DenseRows and ExpertRows are the multiply-adds per second of a pass of many rows.
	DenseRows, ExpertRows float64
}

func (m Machine) rate() (sum float64) {
	for _, d := range m.Drives {
		sum += d
	}
	return sum
}

// Union is the expected number of distinct experts of a layer in a pass of r rows.
func (s Shape) Union(r int) float64 {
	return float64(s.Experts) * (1 - math.Pow(1-float64(s.TopK)/float64(s.Experts), float64(r)))
}

// Pass is the prediction for a pass, or for several.
type Pass struct {
	Rows           int
	Bytes          float64 // read from drives
	ReadSeconds    float64
	ComputeSeconds float64
	Seconds        float64
}

// PassOf predicts a pass of r rows. union is the experts of all layers together; 0 takes
// the uniform router's.
func (s Shape) PassOf(r int, union float64, l engine.Ledger, m Machine) Pass {
	if union == 0 {
		union = s.Union(r) * float64(s.MoELayers)
	}
	miss := 1.0
	if l.Experts > 0 {
		miss -= float64(l.Resident) / float64(l.Experts)
	}
	p := Pass{Rows: r, Bytes: union*float64(s.ExpertBytes)*miss + float64(l.Streamed)}
	p.ReadSeconds = p.Bytes / m.rate()
	dense, experts := float64(s.SpineBytes+s.HeadBytes), float64(s.ExpertBytes)
	byBytes := dense/m.DenseRow + union*experts/m.ExpertRow
	byWork := float64(r)*float64(s.SpineMACs)/m.DenseRows + float64(r*s.TopK*s.MoELayers)*float64(s.ExpertMACs)/m.ExpertRows
	// A pass touches every weight at least once and does its multiply-adds: it takes the
	// longer of the two, part by part, and in sum no less than either.
	p.ComputeSeconds = max(byBytes, byWork)
	p.Seconds = max(p.ReadSeconds, p.ComputeSeconds)
	return p
}

// PromptOf predicts the passes that a prompt of r rows is cut into. union is as that of
// [Shape.PassOf], of all of them together.
func (s Shape) PromptOf(r int, union float64, l engine.Ledger, m Machine) Pass {
	sum := Pass{Rows: r}
	chunks := prefill.Chunks(r, l.PassRows)
	for _, n := range chunks {
		p := s.PassOf(n, union/float64(len(chunks)), l, m)
		sum.Bytes += p.Bytes
		sum.ReadSeconds += p.ReadSeconds
		sum.ComputeSeconds += p.ComputeSeconds
		sum.Seconds += p.Seconds
	}
	return sum
}

// Write prints what the model ck, which may be a sketch, would do on the machine if it were
// opened with o, and what more hardware would change. Its error is that of [engine.Account].
func Write(w io.Writer, ck *checkpoint.Checkpoint, o engine.Options, m Machine) error {
	gb := func(n float64) string { return fmt.Sprintf("%.1f GB", n/1e9) }
	s := ShapeOf(ck.Config())
	l, err := engine.Account(ck, o)
	if err != nil {
		return err
	}
	o.Memory = l.Limit + 32e9
	more, err := engine.Account(ck, o)
	if err != nil {
		return err
	}
	o.Memory = l.Limit
	one := m
	one.Drives = append(slices.Clone(m.Drives), m.Drives[len(m.Drives)-1])
	fmt.Fprintf(w, "model     %d layers, %d experts of %.2f MB, %d per token\n", s.Layers, s.Experts, float64(s.ExpertBytes)/1e6, s.TopK)
	fmt.Fprintf(w, "machine   %d drive(s), %.2f GB/s together; one row %.1f GB/s bf16, %.1f GB/s MXFP4; many rows %.0f and %.0f GMAC/s\n",
		len(m.Drives), m.rate()/1e9, m.DenseRow/1e9, m.ExpertRow/1e9, m.DenseRows/1e9, m.ExpertRows/1e9)
	fmt.Fprintf(w, "memory    %s; the least that works is %.2f GB\n", l, math.Ceil(float64(l.Floor)/1e7)/100)
	fmt.Fprintf(w, "drives    each pass reads %.2f GB of dense weights; %s of %s of experts are read when they are used\n\n",
		float64(l.Streamed)/1e9, gb(float64(l.Experts-l.Resident)), gb(float64(l.Experts)))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tpasses\tread\tread time\tcompute time\ttakes\twith one more drive\twith 32 GB more\t")
	for _, r := range []int{1, 17, 512, 4096, 32768} {
		if r > l.Context {
			break
		}
		p := s.PromptOf(r, 0, l, m)
		name := fmt.Sprintf("first token of %d", r)
		if r == 1 {
			name = "each token of decode"
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%.1f s\t%.1f s\t%.1f s\t%.1f s\t%.1f s\t\n", name, len(prefill.Chunks(r, l.PassRows)), gb(p.Bytes), p.ReadSeconds, p.ComputeSeconds, p.Seconds,
			s.PromptOf(r, 0, l, one).Seconds, s.PromptOf(r, 0, more, m).Seconds)
	}
	t.Flush()
	fmt.Fprintln(w, "\nThe router is taken as uniform, which reads most; reads and computing overlap; resident experts are hit by their share.")
	return nil
}
