//go:build !noasm

package kernel

import "golang.org/x/sys/cpu"

func init() {
	if !cpu.X86.HasAVX2 || !cpu.X86.HasFMA {
		return
	}
	implementations = append(implementations, &avx2)
	active.Store(&avx2)
}

var avx2 = primitives{
	name: "avx2",
	dot:  dotAVX2, sum: sumAVX2, exp: expAVX2, sigmoid: sigmoidAVX2, tanh: tanhAVX2, situ: situAVX2,
	scaleMul: scaleMulAVX2, gate: gateAVX2, add: addAVX2, axpy: axpyAVX2, scale: scaleAVX2, scaleDiv: scaleDivAVX2,
	decay: decayAVX2, conv: convAVX2, kdaStep: kdaAVX2, chain: chainAVX2, pack: packAVX2, gemm: gemmAVX2,
}
