//go:build !noasm

package main

import "golang.org/x/sys/cpu"

var haveBase = cpu.X86.HasAVX2 && cpu.X86.HasFMA

func has512() bool { return cpu.X86.HasAVX512F }
