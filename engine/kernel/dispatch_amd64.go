//go:build !noasm

package kernel

import "golang.org/x/sys/cpu"

func init() {
	if !cpu.X86.HasAVX2 || !cpu.X86.HasFMA {
		return
	}
	implementations = append(implementations, &avx2)
	if cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VL && cpu.X86.HasAVX512DQ {
		implementations = append(implementations, &avx512)
	}
	active.Store(implementations[len(implementations)-1])
}

var avx2 = primitives{
	name: "avx2",
	dot:  dotAVX2, sum: sumAVX2, exp: expAVX2, sigmoid: sigmoidAVX2, tanh: tanhAVX2, situ: situAVX2,
	scaleMul: scaleMulAVX2, gate: gateAVX2, add: addAVX2, axpy: axpyAVX2, scale: scaleAVX2, scaleDiv: scaleDivAVX2,
	decay: decayAVX2, conv: convAVX2, kdaStep: kdaAVX2, chain: chainAVX2, pack: packAVX2, gemm: gemmAVX2,
}

var avx512 = primitives{
	name: "avx512",
	dot:  dotAVX2, sum: sumAVX2, exp: expAVX512, sigmoid: sigmoidAVX512, tanh: tanhAVX512, situ: situAVX512,
	scaleMul: scaleMulAVX512, gate: gateAVX512, add: addAVX512, axpy: axpyAVX512, scale: scaleAVX512, scaleDiv: scaleDivAVX512,
	decay: decayAVX512, conv: convAVX512, kdaStep: kdaAVX512, chain: chainAVX512, pack: packAVX2, gemm: gemmAVX512,
}
