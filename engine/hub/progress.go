package hub

import (
	"math"
	"sync"
	"time"
)

// Progress is where a fetch or a verification stands.
type Progress struct {
	Done, Total           int64 // bytes, of all files
	FilesDone, FilesTotal int
	Rate                  float64       // bytes per second over the last seconds
	ETA                   time.Duration // at this rate; negative if unknown
	Files                 []FileProgress
}

// FileProgress is a file that is being worked on.
type FileProgress struct {
	Name     string
	Done     int64 // bytes that have arrived
	Verified int64 // bytes that the digest has seen
	Total    int64
}

const (
	progressEvery = 250 * time.Millisecond
	rateWindow    = 10 * time.Second
)

// meter turns a growing count into a rate.
type meter struct {
	rate float64
	last int64
	at   time.Time
}

func (m *meter) update(count int64, now time.Time) float64 {
	if !m.at.IsZero() {
		dt := now.Sub(m.at)
		if dt < 50*time.Millisecond {
			return m.rate
		}
		r := max(0, float64(count-m.last)/dt.Seconds())
		if m.rate == 0 {
			m.rate = r
		} else {
			w := math.Exp(-dt.Seconds() / rateWindow.Seconds())
			m.rate = w*m.rate + (1-w)*r
		}
	}
	m.last, m.at = count, now
	return m.rate
}

func eta(rest int64, rate float64) time.Duration {
	if rate <= 0 {
		return -1
	}
	return time.Duration(min(float64(rest)/rate, 1e9) * float64(time.Second))
}

// report calls f now and then until the returned function is called, which calls it
// a last time.
func report(f func()) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTicker(progressEvery)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				f()
			case <-done:
				return
			}
		}
	})
	return func() {
		close(done)
		wg.Wait()
		f()
	}
}
