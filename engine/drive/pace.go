package drive

import (
	"sync"
	"time"
)

// Pace is the speed of a paced device.
type Pace struct {
	BytesPerSecond float64       // all reads together; 0 means unlimited
	Latency        time.Duration // of each call; those of concurrent calls overlap
}

// pacer is a link that carries one call's bytes after another's.
type pacer struct {
	Pace
	mu   sync.Mutex
	free time.Time     // when the link has carried all that was reserved
	late time.Duration // by which the sleep until free overran
}

// reserve books the link for n bytes and returns when they will have arrived.
func (p *pacer) reserve(n int) *slot {
	p.mu.Lock()
	defer p.mu.Unlock()
	// A caller that was woken late would have come that much earlier.
	begin := time.Now().Add(p.Latency - p.late)
	if p.free.After(begin) {
		begin = p.free
	}
	p.free, p.late = begin, 0
	if p.BytesPerSecond > 0 {
		p.free = begin.Add(seconds(float64(n) / p.BytesPerSecond))
	}
	return &slot{p, p.free}
}

// slot is the time at which a call's bytes will have arrived.
type slot struct {
	p  *pacer
	at time.Time
}

func (s *slot) wait() {
	time.Sleep(time.Until(s.at))
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if s.at.Equal(s.p.free) {
		s.p.late = time.Since(s.at)
	}
}
