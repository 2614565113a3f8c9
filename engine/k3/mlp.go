package k3

import "deltafin/engine/kernel"

// MLP is a SiTU-GLU feed-forward: Down(situ(Gate x, Up x)) (spec C.9, C.10, and the
// shared experts of C.11).
type MLP struct {
	Gate, Up *kernel.Matrix // [inter][hidden]
	Down     *kernel.Matrix // [hidden][inter]
}

// situ sets g to the activation of g and u, row by row.
func (m *Model) situ(g, u kernel.Mat) {
	c := m.Config
	m.Pool.RunCost(g.Rows, 32*g.Cols, func(_ *kernel.Scratch, r int) {
		kernel.SiTU(g.Row(r), g.Row(r), u.Row(r), c.SituBeta, c.SituLinearBeta)
	})
}

func (m *Model) mlp(out, x kernel.Mat, w *MLP) {
	g, u := m.arena.mat(x.Rows, w.Gate.Rows), m.arena.mat(x.Rows, w.Up.Rows)
	m.Pool.MatMul(kernel.Job{Y: g, X: x, W: w.Gate}, kernel.Job{Y: u, X: x, W: w.Up})
	m.situ(g, u)
	m.Pool.MatMul(kernel.Job{Y: out, X: g, W: w.Down})
}
