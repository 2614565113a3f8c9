//go:build !noasm

package kernel

import "golang.org/x/sys/cpu"

func init() {
	if !cpu.X86.HasAVX2 || !cpu.X86.HasFMA {
		return
	}
	avx2 := portable
	avx2.name, avx2.gemm, avx2.pack = "avx2", gemmAVX2, packAVX2
	implementations = append(implementations, &avx2)
	active.Store(&avx2)
}
