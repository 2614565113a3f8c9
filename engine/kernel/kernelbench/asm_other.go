//go:build !amd64 || noasm

package main

const haveBase = false

func has512() bool { return false }

func readBytes(*byte, int) {}
func peakFMA256(int)       {}
func peakFMA512(int)       {}
