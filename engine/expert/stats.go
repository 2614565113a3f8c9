package expert

import (
	"time"

	"deltafin/engine/drive"
)

// Stats is the account of a source since it was opened.
type Stats struct {
	Devices []DeviceStats `json:"devices"`
	Layers  []LayerStats  `json:"layers"`
	Homes   []HomeStats   `json:"homes"`

	ResidentExperts int   `json:"resident_experts"`
	ResidentBytes   int64 `json:"resident_bytes"` // of memory
	Slots           int   `json:"slots"`          // that exist
}

// DeviceStats is the account of one drive. Bytes and reads are those of experts;
// the rest, from QueueSeconds on, is of all reads that the drive served.
type DeviceStats struct {
	Name        string `json:"name"`
	DemandBytes int64  `json:"demand_bytes"`     // read because a route asked for it, and used
	AheadBytes  int64  `json:"ahead_used_bytes"` // read ahead, and used
	WastedBytes int64  `json:"wasted_bytes"`     // read, and not used
	Reads       int64  `json:"reads"`            // that delivered
	Slowest     int64  `json:"slowest_of_layer"` // streams whose last expert to arrive came from here

	QueueSeconds   float64 `json:"queue_seconds"`   // sum over reads
	ServiceSeconds float64 `json:"service_seconds"` // sum over reads
	BusySeconds    float64 `json:"busy_seconds"`
	BytesPerSecond float64 `json:"bytes_per_second"` // while busy, recent
	Errors         int64   `json:"errors"`
	Mode           string  `json:"mode"`
	Failed         string  `json:"failed,omitempty"`
}

// LayerStats is the account of one layer.
type LayerStats struct {
	Layer       int     `json:"layer"`
	Streams     int64   `json:"streams"`
	WaitSeconds float64 `json:"wait_seconds"` // in streams, while the model had nothing to do
	Precision   float64 `json:"precision"`    // share of recent hints that were right; 1 before the first
}

// HomeStats is what one home holds.
type HomeStats struct {
	Dir     string `json:"dir"`
	Kind    string `json:"kind"`
	Experts int    `json:"experts"`
	Avoided bool   `json:"avoided,omitempty"` // it failed
}

type account struct {
	devices  map[*drive.Device]*DeviceStats
	layers   []LayerStats
	arrivals int64
}

func (a *account) init(layers int) {
	a.devices = map[*drive.Device]*DeviceStats{}
	a.layers = make([]LayerStats, layers)
}

func (a *account) device(d *drive.Device) *DeviceStats {
	if a.devices[d] == nil {
		a.devices[d] = &DeviceStats{}
	}
	return a.devices[d]
}

// used counts a load that is handed to its user.
func (a *account) used(l *load) {
	for _, p := range l.parts {
		d := a.device(p.file.Device())
		d.Reads++
		if l.ahead {
			d.AheadBytes += p.n
		} else {
			d.DemandBytes += p.n
		}
	}
}

func (a *account) wasted(p part) {
	d := a.device(p.file.Device())
	d.Reads++
	d.WastedBytes += p.n
}

func (a *account) layer(i int, wait time.Duration, last *load) {
	a.layers[i].Streams++
	a.layers[i].WaitSeconds += wait.Seconds()
	if last != nil {
		a.device(last.parts[0].file.Device()).Slowest++
	}
}

// Stats returns the account so far.
func (s *Source) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Stats{ResidentExperts: len(s.resident), ResidentBytes: s.residentMem, Slots: s.made}
	for _, d := range s.drives.Devices() {
		x := *s.stats.device(d)
		t := d.Stats()
		x.Name = d.Name()
		x.QueueSeconds = (t.Demand.Wait + t.Ahead.Wait).Seconds()
		x.ServiceSeconds = (t.Demand.Service + t.Ahead.Service).Seconds()
		x.BusySeconds, x.BytesPerSecond = t.Busy.Seconds(), t.Rate
		x.Errors, x.Mode = t.Errors+t.Stalls, t.Mode
		if t.Failed != nil {
			x.Failed = t.Failed.Error()
		}
		st.Devices = append(st.Devices, x)
	}
	for i, l := range s.stats.layers {
		l.Layer, l.Precision = s.cat.first+i, s.ahead.precision[i]
		st.Layers = append(st.Layers, l)
	}
	s.homes.mu.Lock()
	defer s.homes.mu.Unlock()
	for i, h := range s.cat.homes {
		st.Homes = append(st.Homes, HomeStats{h.dir, h.kind, h.held, s.homes.avoid&(1<<i) != 0})
	}
	return st
}
