package hub

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

// bucket bounds the rate of all connections together.
type bucket struct {
	rate float64 // bytes per second; 0 is unlimited

	mu   sync.Mutex
	free time.Time // when everything that was let through is paid for
}

// take waits until n more bytes may pass.
func (b *bucket) take(ctx context.Context, n int) error {
	if b.rate <= 0 {
		return nil
	}
	b.mu.Lock()
	now := time.Now()
	if b.free.Before(now) {
		b.free = now
	}
	b.free = b.free.Add(time.Duration(float64(n) / b.rate * float64(time.Second)))
	at := b.free
	b.mu.Unlock()
	return sleepUntil(ctx, at)
}

var errStalled = errors.New("no bytes arrive")

// stallBytes have to arrive within the stall time, so that a server that sends a
// byte now and then does not hold a connection for ever.
const stallBytes = 64 << 10

// watched cancels a transfer that has stalled. Only time spent waiting for the
// network counts, not what the disk and the bandwidth limit take.
type watched struct {
	body   io.Reader
	cancel context.CancelCauseFunc
	limit  time.Duration

	waited time.Duration
	got    int
}

func (w *watched) Read(p []byte) (int, error) {
	began := time.Now()
	t := time.AfterFunc(w.limit-w.waited, func() { w.cancel(errStalled) })
	n, err := w.body.Read(p)
	t.Stop()
	w.waited += time.Since(began)
	if w.got += n; w.got >= stallBytes {
		w.got, w.waited = 0, 0
	}
	return n, err
}
