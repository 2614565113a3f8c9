//go:build !linux

package kernel

import "testing"

// fenced returns n zero bytes; without a fence here.
func fenced(_ testing.TB, n int) []byte { return make([]byte, n) }
