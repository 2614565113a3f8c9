package k3

import (
	"fmt"

	"deltafin/engine/checkpoint"
	"deltafin/engine/kernel"
)

// State is what a sequence keeps between passes (spec C.12): per KDA layer the
// recurrent matrices and the convolution tail, per MLA layer the latent cache.
type State struct {
	pos    int  // committed positions
	held   int  // rows of a pass that are not committed yet
	past   int  // rows of it that are
	cut    *cut // the pass that the state stands inside of; unless it is the model's too, the state is unusable
	config *checkpoint.Config
	kda    []kdaState
	mla    []mlaState
}

// NewState returns the state before the first token.
func NewState(c *checkpoint.Config) *State {
	st := &State{config: c, kda: make([]kdaState, c.Layers), mla: make([]mlaState, c.Layers)}
	for l := range c.Layers {
		if c.MLA[l] {
			st.mla[l] = mlaState{kernel.NewMat(0, c.KVLora), kernel.NewMat(0, c.Rope)}
			continue
		}
		k := &st.kda[l]
		k.s = kernel.Floats(c.KDAHeads * c.KDADim * stateStride(c.KDADim))
		for s := range k.tail {
			for range c.ConvKernel - 1 {
				k.tail[s] = append(k.tail[s], make([]float32, c.KDAHeads*c.KDADim))
			}
		}
	}
	return st
}

// Position is the number of committed tokens.
func (st *State) Position() int { return st.pos }

// whole panics if st stands inside a pass that was ended by an error.
func (st *State) whole() {
	if st.cut != nil {
		panic("k3: a copy of a state inside a pass")
	}
}

// Fork returns an independent copy, without rows that are not committed. It panics if a
// pass was ended by an error.
func (st *State) Fork() *State {
	st.whole()
	f := &State{pos: st.pos, config: st.config, kda: make([]kdaState, len(st.kda)), mla: make([]mlaState, len(st.mla))}
	for l := range st.kda {
		f.kda[l] = kdaState{s: kernel.Floats(len(st.kda[l].s)), tail: st.kda[l].tail} // tail vectors are never written to
		copy(f.kda[l].s, st.kda[l].s)
		f.mla[l] = st.mla[l]
		f.mla[l].latent.Data = append([]float32(nil), st.mla[l].latent.Data...)
		f.mla[l].key.Data = append([]float32(nil), st.mla[l].key.Data...)
		if st.config.MLA[l] {
			f.mla[l].truncate(st.pos)
		}
	}
	return f
}

// Bytes is the memory that the state occupies.
func (st *State) Bytes() int64 {
	n := 0
	for l := range st.kda {
		n += len(st.kda[l].s) + len(st.mla[l].latent.Data) + len(st.mla[l].key.Data)
		for _, t := range st.kda[l].tail {
			n += len(t) * st.config.KDAHeads * st.config.KDADim
		}
	}
	return 4 * int64(n)
}

// Advance commits the next n rows of the held pass and leaves the others held.
func (m *Model) Advance(st *State, n int) error {
	if n < 0 || n > st.held {
		return fmt.Errorf("commit of %d rows: %d are held", n, st.held)
	}
	if n == 0 {
		return nil
	}
	for l := range st.kda {
		if !st.config.MLA[l] {
			st.kda[l].replay(m.Pool, st.config.KDAHeads, st.config.KDADim, st.past, st.past+n)
		}
	}
	st.pos, st.held, st.past = st.pos+n, st.held-n, st.past+n
	return nil
}

// Commit keeps the next n rows of the held pass and forgets the rest. The state
// is then, bit for bit, that of a pass over the committed rows alone.
func (m *Model) Commit(st *State, n int) error {
	if err := m.Advance(st, n); err != nil {
		return err
	}
	m.release(st)
	return nil
}

// release forgets what is held.
func (m *Model) release(st *State) {
	for l := range st.kda {
		if st.config.MLA[l] {
			st.mla[l].truncate(st.pos)
		} else if held := st.kda[l].held; held != nil {
			st.kda[l].held, m.spare = nil, append(m.spare, held)
		}
	}
	st.held, st.past = 0, 0
}
