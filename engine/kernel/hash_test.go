package kernel

import (
	"strings"
	"testing"
)

func TestOneHashOnEveryProcessor(t *testing.T) {
	if err := Check(); err != nil {
		t.Error(err)
	}
}

func TestCheckNamesAFormThatComputesSomethingElse(t *testing.T) {
	wrong := portable
	wrong.name = "wrong"
	wrong.add = func(dst, x, y []float32) {
		defAdd(dst, x, y)
		dst[len(dst)-1]++
	}
	implementations = append(implementations, &wrong)
	defer func() { implementations = implementations[:len(implementations)-1] }()
	if err := Check(); err == nil || !strings.Contains(err.Error(), "the wrong kernels") {
		t.Errorf("%v", err)
	}
}
