// Package reference hides nothing: it is the Kimi K3 text model written down as slowly
// and plainly as the specification reads, one operation a function, in float64 or
// float32 ordinary arithmetic. It is what faster code is compared with, operation by
// operation, and no faster code may import it outside its tests.
//
// It shares no code with the engine, its checkpoint reader included, so that a
// misreading has to happen twice to go unseen. Its own numbers are held against
// frozen output of the numpy oracle in reference/oracle; README.md says what that
// oracle was held against.
//
// Vectors are []F and matrices Matrix[F], stored [out][in] row-major; "spec C.7" in a
// comment names a section of the model specification. On arm64 and others Go may fuse
// a product and a sum: the last bits of this package differ between machines, which is
// why everything is compared with it to a tolerance and nothing bit for bit.
package reference

import (
	"fmt"
)

// Float is the number type everything is computed in, weights included.
type Float interface{ float32 | float64 }

// Model is a checkpoint with every weight widened to F, exactly.
type Model[F Float] struct {
	Config  Config
	Embed   Matrix[F] // [vocab][hidden]
	Layers  []Layer[F]
	OutRes  ResWeights[F]
	OutNorm []F       // [hidden] model.norm
	Head    Matrix[F] // [vocab][hidden]
}

// Layer holds one decoder layer. Exactly one of KDA and MLA, and exactly one of Dense
// and MoE, is not nil.
type Layer[F Float] struct {
	AttnRes  ResWeights[F] // unused in layer 0, where there is nothing to mix
	AttnNorm []F           // [hidden] input_layernorm
	KDA      *KDAWeights[F]
	MLA      *MLAWeights[F]
	MLPRes   ResWeights[F]
	MLPNorm  []F // [hidden] post_attention_layernorm
	Dense    *GLUWeights[F]
	MoE      *MoEWeights[F]
}

// ResWeights are the two vectors of one attention residual, each [hidden].
type ResWeights[F Float] struct {
	Norm []F // *_res_norm.weight
	Proj []F // *_res_proj.weight[0]
}

// State is what a sequence carries from one Forward to the next (spec C.12).
type State[F Float] struct {
	KDA []*KDAState[F] // [layers], nil in MLA layers
	MLA []*MLAState[F] // [layers], nil in KDA layers
	Len int            // positions seen
}

// Trace holds what Forward computed on the way, each slice [positions].
type Trace[F Float] struct {
	Layers      []LayerTrace[F]
	OutResProbs [][]F // [sources] of the output mix
	Final       [][]F // [hidden] after model.norm, the head's input
}

// LayerTrace holds one layer's intermediate values, each slice [positions]; the step
// numbers are those of spec C.5.
type LayerTrace[F Float] struct {
	AttnResProbs [][]F // step 1, [sources]; a single 1 in layer 0
	AttnIn       [][]F // step 3, the normalised input
	AttnOut      [][]F // step 3
	MLPResProbs  [][]F // step 5, [sources]
	MLPIn        [][]F // step 6, the normalised input
	MLPOut       [][]F // step 6
	Stream       [][]F // step 7
	KDA          []KDATrace[F]
	MLA          []MLATrace[F]
	Routes       []Route[F] // nil in dense layers
}

// NewState is the state before the first token.
func (m *Model[F]) NewState() *State[F] {
	s := &State[F]{KDA: make([]*KDAState[F], len(m.Layers)), MLA: make([]*MLAState[F], len(m.Layers))}
	for i, l := range m.Layers {
		if l.KDA != nil {
			s.KDA[i] = NewKDAState[F](m.Config.Linear)
		} else {
			s.MLA[i] = &MLAState[F]{}
		}
	}
	return s
}

// Forward appends ids to the sequence of st and returns the logits [len(ids)][vocab] of
// every new position and the values on the way (spec C.5, C.6). It changes st. Error: no
// ids, or an id outside the vocabulary; st is untouched then.
func (m *Model[F]) Forward(ids []int, st *State[F]) (logits [][]F, trace *Trace[F], err error) {
	if len(ids) == 0 {
		return nil, nil, fmt.Errorf("no token ids: give at least one")
	}
	for i, id := range ids {
		if id < 0 || id >= m.Embed.Rows {
			return nil, nil, fmt.Errorf("token id %d at position %d is outside the vocabulary of %d", id, i, m.Embed.Rows)
		}
	}
	eps := m.Config.RMSNormEps
	n := len(ids)
	stream := make([][]F, n)   // p, one row a position
	banked := make([][][]F, n) // B, per position the list of banked vectors
	trace = &Trace[F]{}
	for t, id := range ids {
		stream[t] = m.Embed.Row(id)
	}
	for i, l := range m.Layers {
		var tr LayerTrace[F]
		restart := i%m.Config.AttnResBlockSize == 0
		for t := range n {
			h, probs := AttnResMix(append(banked[t][:len(banked[t]):len(banked[t])], stream[t]), l.AttnRes.Norm, l.AttnRes.Proj, eps)
			tr.AttnResProbs = append(tr.AttnResProbs, probs)
			tr.AttnIn = append(tr.AttnIn, RMSNorm(h, l.AttnNorm, eps))
			if restart {
				banked[t] = append(banked[t], stream[t]) // the raw stream, not the mix
			}
		}
		for t := range n {
			var a []F
			if l.KDA != nil {
				var kt KDATrace[F]
				a, kt = KDALayer(l.KDA, tr.AttnIn[t], st.KDA[i], m.Config)
				tr.KDA = append(tr.KDA, kt)
			} else {
				var mt MLATrace[F]
				a, mt = MLALayer(l.MLA, tr.AttnIn[t], st.MLA[i], m.Config)
				tr.MLA = append(tr.MLA, mt)
			}
			tr.AttnOut = append(tr.AttnOut, a)
		}
		for t := range n {
			p := tr.AttnOut[t]
			if !restart {
				p = Add(stream[t], p)
			}
			h, probs := AttnResMix(append(banked[t][:len(banked[t]):len(banked[t])], p), l.MLPRes.Norm, l.MLPRes.Proj, eps)
			x := RMSNorm(h, l.MLPNorm, eps)
			var f []F
			if l.Dense != nil {
				f = GLU(l.Dense, x, m.Config)
			} else {
				var r Route[F]
				f, r = LatentMoE(l.MoE, x, m.Config)
				tr.Routes = append(tr.Routes, r)
			}
			stream[t] = Add(p, f)
			tr.MLPResProbs = append(tr.MLPResProbs, probs)
			tr.MLPIn = append(tr.MLPIn, x)
			tr.MLPOut = append(tr.MLPOut, f)
			tr.Stream = append(tr.Stream, stream[t])
		}
		trace.Layers = append(trace.Layers, tr)
	}
	for t := range n {
		h, probs := AttnResMix(append(banked[t], stream[t]), m.OutRes.Norm, m.OutRes.Proj, eps)
		y := RMSNorm(h, m.OutNorm, eps)
		trace.OutResProbs = append(trace.OutResProbs, probs)
		trace.Final = append(trace.Final, y)
		logits = append(logits, m.Head.Mul(y))
	}
	st.Len += n
	return logits, trace, nil
}

// Greedy runs the prompt and then n tokens, each the argmax of the row before it (the
// lowest id among equals). rows is [n][vocab], the row that chose each token.
func (m *Model[F]) Greedy(prompt []int, n int) (tokens []int, rows [][]F, err error) {
	st := m.NewState()
	next := prompt
	for range n {
		logits, _, err := m.Forward(next, st)
		if err != nil {
			return nil, nil, err
		}
		row := logits[len(logits)-1]
		next = []int{Argmax(row)}
		tokens = append(tokens, next[0])
		rows = append(rows, row)
	}
	return tokens, rows, nil
}
