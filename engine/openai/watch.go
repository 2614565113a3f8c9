package openai

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"time"
)

// Watched is a [Model] that tells GET /events what its memory and drives do. The methods
// may be called at any time by any goroutine.
type Watched interface {
	Machine() Machine
	Heat() Heat
}

// Machine is one moment of memory and drives, as events of the type "machine" have it.
type Machine struct {
	Layer           int     `json:"layer"` // that was routed last, of Snapshot.Layers
	Drives          []Drive `json:"drives"`
	Experts         int     `json:"experts"` // of all layers
	ResidentExperts int     `json:"resident_experts"`
	ResidentBytes   int64   `json:"resident_expert_bytes"` // of memory
	DenseResident   int64   `json:"dense_bytes_resident"`
	DenseStreamed   int64   `json:"dense_bytes_streamed"` // read again in every pass
	Limit           int64   `json:"memory_limit"`         // bytes that the engine may use
}

// Drive is one drive of a [Machine].
type Drive struct {
	Name           string  `json:"name"` // a directory on it
	Bytes          int64   `json:"bytes"`
	BytesPerSecond float64 `json:"bytes_per_second"` // by the clock, over the last two seconds
	Failed         bool    `json:"failed"`
}

// Heat is how often experts were routed since the model was opened, as events of the type
// "heat" have it. A row of cells is a layer, a cell a few neighbouring experts.
type Heat struct {
	First   int    `json:"first_layer"`
	Experts int    `json:"experts"` // of a layer
	Rows    int    `json:"rows"`
	Columns int    `json:"columns"`
	Per     int    `json:"experts_per_cell"`
	Cells   []byte `json:"cells"` // base64 of [rows][columns], 0 for never, on to 255 by the logarithm
}

// heatColumns bounds the size of an event: 22 kB for Kimi K3.
const heatColumns = 256

func newHeat(first int, count [][]uint64) Heat {
	h := Heat{First: first, Rows: len(count), Per: 1}
	if h.Rows == 0 {
		return h
	}
	h.Experts = len(count[0])
	h.Per = max(1, (h.Experts+heatColumns-1)/heatColumns)
	h.Columns = (h.Experts + h.Per - 1) / h.Per
	sums := make([]uint64, 0, h.Rows*h.Columns)
	for _, row := range count {
		for part := range slices.Chunk(row, h.Per) {
			sum := uint64(0)
			for _, n := range part {
				sum += n
			}
			sums = append(sums, sum)
		}
	}
	most := math.Log1p(float64(slices.Max(sums)))
	h.Cells = make([]byte, len(sums))
	for i, n := range sums {
		if n > 0 {
			h.Cells[i] = byte(max(1, math.Round(255*math.Log1p(float64(n))/most)))
		}
	}
	return h
}

const (
	rateWindow = 2 * time.Second // of a drive's rate
	heatEvery  = 2 * time.Second // between two heats at least
)

// watch is what one client of GET /events has been told.
type watch struct {
	s       *Server
	model   Watched // nil if the model is not
	last    map[string][]byte
	heated  time.Time
	samples []moment // of the last rateWindow, and one before
}

type moment struct {
	at     time.Time
	drives []Drive
}

func newWatch(s *Server) *watch {
	m, _ := s.model.(Watched)
	return &watch{s: s, model: m, last: map[string][]byte{}}
}

// news appends the events for what has changed.
func (v *watch) news(out *bytes.Buffer) {
	now := time.Now()
	v.tell(out, "", v.s.activity.snapshot(v.s.queue.length()))
	if v.model == nil {
		return
	}
	m := v.model.Machine()
	v.rate(now, m.Drives)
	v.tell(out, "machine", m)
	if now.Sub(v.heated) >= heatEvery {
		v.heated = now
		v.tell(out, "heat", v.model.Heat())
	}
}

// tell appends an event unless the client knows it already. The empty type is that of
// events without one.
func (v *watch) tell(out *bytes.Buffer, kind string, what any) {
	b := encode(what)
	if bytes.Equal(b, v.last[kind]) {
		return
	}
	v.last[kind] = b
	if kind != "" {
		fmt.Fprintf(out, "event: %s\n", kind)
	}
	fmt.Fprintf(out, "data: %s\n\n", b)
}

// rate sets the drives' rates by what they had delivered two seconds ago.
func (v *watch) rate(now time.Time, drives []Drive) {
	v.samples = append(v.samples, moment{now, slices.Clone(drives)})
	for len(v.samples) > 2 && now.Sub(v.samples[1].at) >= rateWindow {
		v.samples = v.samples[1:]
	}
	then := v.samples[0]
	seconds := now.Sub(then.at).Seconds()
	for i := range drives {
		// A drive that is used for the first time is new in the list.
		if seconds > 0 && i < len(then.drives) && then.drives[i].Name == drives[i].Name {
			drives[i].BytesPerSecond = math.Round(float64(drives[i].Bytes-then.drives[i].Bytes) / seconds)
		}
	}
}
