//go:build !noasm

package kernel

import "golang.org/x/sys/cpu"

func init() {
	if !cpu.X86.HasAVX2 || !cpu.X86.HasFMA {
		return
	}
	implementations = append(implementations, &avx2)
	if cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VL && cpu.X86.HasAVX512DQ {
		wide := avx2
		wide.name, wide.gemm = "avx512", gemmAVX512
		implementations = append(implementations, &wide)
	}
	active.Store(implementations[len(implementations)-1])
}

var avx2 = primitives{
	name: "avx2",
	dot:  dotAVX2, sum: sumAVX2, exp: expAVX2, sigmoid: sigmoidAVX2, tanh: tanhAVX2, situ: situAVX2,
	scaleMul: scaleMulAVX2, gate: gateAVX2, add: addAVX2, axpy: axpyAVX2, scale: scaleAVX2, scaleDiv: scaleDivAVX2,
	decay: decayAVX2, conv: convAVX2, kdaStep: kdaAVX2, chain: chainAVX2, pack: packAVX2, gemm: gemmAVX2,
}
