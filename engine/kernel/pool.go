package kernel

import (
	"sync"
	"sync/atomic"
)

// Pool is a fixed set of workers. Work is split over outputs only, never over a
// reduction, so the number of workers cannot change a bit.
//
// A Pool serves one caller at a time.
type Pool struct {
	scratch []*Scratch
	wake    []chan *region
	pack    Scratch
}

// region is one parallel loop.
type region struct {
	f    func(s *Scratch, i int)
	n    int64
	next atomic.Int64
	done sync.WaitGroup
}

func (r *region) run(s *Scratch) {
	for {
		i := r.next.Add(1) - 1
		if i >= r.n {
			return
		}
		r.f(s, int(i))
	}
}

// NewPool starts threads-1 workers; the caller of Run is the remaining one.
func NewPool(threads int) *Pool {
	p := &Pool{scratch: []*Scratch{{}}}
	for range max(threads, 1) - 1 {
		s, c := &Scratch{}, make(chan *region, 1)
		p.scratch, p.wake = append(p.scratch, s), append(p.wake, c)
		go func() {
			for r := range c {
				r.run(s)
				r.done.Done()
			}
		}()
	}
	return p
}

// Close ends the workers.
func (p *Pool) Close() {
	for _, c := range p.wake {
		close(c)
	}
	p.wake = nil
}

// Threads is the number of workers, the caller included.
func (p *Pool) Threads() int { return len(p.scratch) }

// Run calls f(scratch, i) for every 0 <= i < n, in any order, on all workers.
func (p *Pool) Run(n int, f func(s *Scratch, i int)) {
	r := &region{f: f, n: int64(n)}
	for i, c := range p.wake {
		if i+1 >= n {
			break
		}
		r.done.Add(1)
		c <- r
	}
	r.run(p.scratch[0])
	r.done.Wait()
}

// wakeCost is about how many multiply-adds one core does while another wakes:
// less work than that is not worth sharing.
const wakeCost = 1 << 18

// RunCost is Run for n calls of about cost multiply-adds each; little work stays
// on the caller.
func (p *Pool) RunCost(n, cost int, f func(s *Scratch, i int)) {
	if n*cost < wakeCost {
		for i := range n {
			f(p.scratch[0], i)
		}
		return
	}
	p.Run(n, f)
}
