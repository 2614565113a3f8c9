package engine

import (
	"slices"
	"sync"
)

// Routes counts how often each expert was routed, for whoever watches. Its methods may be
// called at any time.
type Routes struct {
	mu    sync.Mutex
	first int // MoE layer
	layer int // that was routed last
	count [][]uint64
}

// CountRoutes begins to count, from zero. It is called before any pass and once: a second
// count makes each pass slower.
func (e *Engine) CountRoutes() *Routes {
	c := e.Config()
	r := &Routes{first: c.FirstDense, count: make([][]uint64, c.Layers-c.FirstDense)}
	for i := range r.count {
		r.count[i] = make([]uint64, c.Experts)
	}
	others := e.model.ObserveRoutes
	e.model.ObserveRoutes = func(l int, ids []int32, weights []float32) {
		others(l, ids, weights)
		r.observe(l, ids)
	}
	return r
}

func (r *Routes) observe(layer int, ids []int32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.layer = layer
	for _, id := range ids {
		r.count[layer-r.first][id]++
	}
}

// Layer is the layer that was routed last, 0 before the first.
func (r *Routes) Layer() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.layer
}

// Counts gives the first MoE layer and how often each expert was routed so far,
// [MoE layers][experts].
func (r *Routes) Counts() (first int, count [][]uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	count = make([][]uint64, len(r.count))
	for i, c := range r.count {
		count[i] = slices.Clone(c)
	}
	return r.first, count
}

// DriveUse is what one drive has delivered, for experts and dense weights alike.
type DriveUse struct {
	Name   string // a directory on it
	Bytes  int64
	Failed bool // it was given up
}

// Drives tells what each drive has delivered since the engine was opened. It may be called
// at any time.
func (e *Engine) Drives() []DriveUse {
	var use []DriveUse
	for _, d := range e.drives.Devices() {
		s := d.Stats()
		use = append(use, DriveUse{d.Name(), s.Demand.Bytes + s.Ahead.Bytes, s.Failed != nil})
	}
	return use
}
