package engine

import (
	"context"
	"testing"

	"deltafin/golden"
)

func TestRoutesCountEachExpertOfEachRow(t *testing.T) {
	e, err := Open(context.Background(), golden.ModelDir("nano"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	r, c := e.CountRoutes(), e.Config()
	if _, err := e.NewSession().Feed(context.Background(), []int{1, 2, 3, 4, 5}, nil); err != nil {
		t.Fatal(err)
	}
	first, count := r.Counts()
	if first != c.FirstDense || len(count) != c.Layers-c.FirstDense || r.Layer() != c.Layers-1 {
		t.Fatalf("%d layers from %d on, the last routed is %d", len(count), first, r.Layer())
	}
	for i, layer := range count {
		sum := uint64(0)
		for _, n := range layer {
			sum += n
		}
		if len(layer) != c.Experts || sum != uint64(5*c.TopK) {
			t.Errorf("layer %d: %d experts, %d routes, want %d and %d", first+i, len(layer), sum, c.Experts, 5*c.TopK)
		}
	}
	read := int64(0)
	for _, d := range e.Drives() {
		read += d.Bytes
	}
	if st := e.Storage(); read < st.Spine.Demand+st.Spine.Ahead {
		t.Errorf("the drives delivered %d bytes, the dense weights alone are %d", read, st.Spine.Demand+st.Spine.Ahead)
	}
}
