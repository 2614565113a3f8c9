package drive

import (
	"math"
	"time"
)

// meter estimates a device's rate from bytes over busy time. Both decay with busy
// time, so that idle hours do not age the estimate and a drive that gets hot shows.
type meter struct {
	last        time.Time
	bytes, busy float64 // decayed sums; seconds

	newBytes, newBusy float64 // not yet folded in

	lat float64 // seconds
}

const (
	memory   = 2.0     // seconds of busy time after which evidence weighs 1/e
	evidence = 1 << 18 // bytes below which time says more of latency than of rate

	// Before the first reads every device is taken for a plain SSD, so that the
	// queues alone decide between homes. The guess weighs as much as 1 ms of reads.
	guess     = 1e9 // bytes per second
	guessBusy = 0.001
)

func (m *meter) seed(now time.Time, rate float64) {
	m.last = now
	m.bytes, m.busy = rate*guessBusy, guessBusy
}

func (m *meter) rate() float64                    { return m.bytes / m.busy }
func (m *meter) latency() time.Duration           { return seconds(m.lat) }
func (m *meter) duration(b float64) time.Duration { return seconds(b / m.rate()) }

// tick moves the clock and returns the time since the last tick.
func (m *meter) tick(now time.Time, inFlight bool) time.Duration {
	dt := max(now.Sub(m.last), 0)
	m.last = now
	if inFlight {
		m.newBusy += dt.Seconds()
	}
	return dt
}

// account adds the bytes of a read that left the flight; idle says that it was the
// last one.
func (m *meter) account(n int64, idle bool) {
	m.newBytes += float64(n)
	if m.newBytes >= evidence && m.newBusy > 0 {
		keep := math.Exp(-m.newBusy / memory)
		m.bytes = m.bytes*keep + m.newBytes
		m.busy = m.busy*keep + m.newBusy
		m.newBytes, m.newBusy = 0, 0
	}
	if idle {
		m.newBytes, m.newBusy = 0, 0
	}
}

// solo learns latency from a read that had the device to itself, or as good as that: n
// bytes were to come until it was complete.
func (m *meter) solo(n float64, took time.Duration) {
	over := max(took.Seconds()-n/m.rate(), 0)
	m.lat += (over - m.lat) / 8
}

func seconds(s float64) time.Duration {
	return time.Duration(min(s*float64(time.Second), math.MaxInt64/2))
}
