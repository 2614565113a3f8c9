package prefill

import "context"

// Pipeline bounds what is on its way at once while the experts of a plan are read
// and used.
type Pipeline struct {
	// Window is how many experts may be started and not yet used: as many as there
	// are slots to read them into. At least 1.
	Window int
	// Reorder is how far use may run ahead of the lowest expert that is not used yet,
	// in experts: it bounds the results that wait to be combined in ascending order. 1
	// is strictly in order.
	Reorder int
	// Idle, if set, does a piece of other work while reads are on their way and
	// nothing can be used, and reports whether it did any. It is called from Run's own
	// goroutine; after an error it is not called again.
	Idle func() bool
}

// queue is the state of one run of a Pipeline: which of n experts have been
// started, have arrived, and were used. It decides; it does nothing.
type queue struct {
	Pipeline
	n, started, used int
	lowest           int // not used yet
	arrived, done    []bool
}

func (p Pipeline) queue(n int) *queue {
	p.Window, p.Reorder = max(p.Window, 1), max(p.Reorder, 1)
	return &queue{Pipeline: p, n: n, arrived: make([]bool, n), done: make([]bool, n)}
}

// mayStart reports whether the next expert, number started, may be started.
func (q *queue) mayStart() bool { return q.started < q.n && q.started-q.used < q.Window }

// usable is the lowest expert that may be used now, or -1.
func (q *queue) usable() int {
	for i := q.lowest; i < min(q.lowest+q.Reorder, q.started); i++ {
		if q.arrived[i] && !q.done[i] {
			return i
		}
	}
	return -1
}

func (q *queue) use(i int) {
	q.done[i] = true
	q.used++
	for q.lowest < q.n && q.done[q.lowest] {
		q.lowest++
	}
}

// Run starts experts 0..n-1 in ascending order and uses each as soon as it has
// arrived and may be used; among those it takes the lowest.
//
// start begins the read of expert i and returns at once; it must arrange that done
// is called exactly once, from any goroutine, when the bytes are there or the
// read has failed. use is called from Run's own goroutine, one call at a time. When a
// read fails, use fails, or ctx is cancelled, no further expert is started or used,
// stop is called once, to cancel what is only queued, and Run returns the first error
// after everything that was started has landed.
func (p Pipeline) Run(ctx context.Context, n int, start func(i int, done func(error)), use func(i int) error, stop func()) error {
	type arrival struct {
		i   int
		err error
	}
	q := p.queue(n)
	arrivals := make(chan arrival, q.Window) // no sender ever blocks
	landed := 0
	run := func() error {
		for q.used < n {
			for q.mayStart() {
				i := q.started
				q.started++
				start(i, func(err error) { arrivals <- arrival{i, err} })
			}
			if err := ctx.Err(); err != nil {
				return err
			}
			i := q.usable()
			if i < 0 && len(arrivals) == 0 && q.Idle != nil && q.Idle() {
				continue
			}
			if i < 0 || len(arrivals) > 0 {
				select {
				case a := <-arrivals:
					landed++
					if a.err != nil {
						return a.err
					}
					q.arrived[a.i] = true
				case <-ctx.Done():
					return ctx.Err()
				}
				continue
			}
			if err := use(i); err != nil {
				return err
			}
			q.use(i)
		}
		return nil
	}
	err := run()
	if err != nil {
		stop()
		for ; landed < q.started; landed++ {
			<-arrivals
		}
	}
	return err
}
