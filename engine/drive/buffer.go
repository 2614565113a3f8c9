package drive

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// block is the unit of direct reads and of memory pages, in bytes. Drives with
// smaller blocks accept it; those with larger ones are read through the page cache.
const block = 4096

// allocated counts the bytes of all buffers.
var allocated atomic.Int64

// Allocated returns the bytes of memory that the buffers of the process hold,
// those stuck with stalled reads included.
func Allocated() int64 { return allocated.Load() }

// Buffer is reusable memory for reads, aligned as drives want it and outside the Go
// heap, so that the process holds what was allocated and no more. One read at a
// time may use it.
type Buffer struct {
	mem  []byte
	room int64

	mu    sync.Mutex
	state bufferState
	view  []byte // what the last read asked for
}

type bufferState uint8

const (
	unused bufferState = iota
	busy
	poisoned // a stalled read has it for good
	freed
)

// NewBuffer returns a buffer for reads of up to n bytes at any offset. It holds up
// to two blocks more than n.
func NewBuffer(n int64) (*Buffer, error) {
	if n < 0 || n > 1<<46 {
		return nil, fmt.Errorf("a buffer of %d bytes: ask for less", n)
	}
	// Widening to whole blocks adds less than one block at either end.
	size := (n+block-1)&^(block-1) + block
	mem, err := allocate(size)
	if err != nil {
		return nil, fmt.Errorf("allocating a buffer of %d bytes: %w: lower the memory budget", size, err)
	}
	allocated.Add(size)
	return &Buffer{mem: mem, room: n}, nil
}

// Bytes returns the bytes of the last read. They are valid until the next read or
// Free. After a failed read there are none.
func (b *Buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.view
}

// Room is the largest read that fits, in bytes.
func (b *Buffer) Room() int64 { return b.room }

// Allocated is the memory that the buffer holds, in bytes.
func (b *Buffer) Allocated() int64 { return int64(len(b.mem)) }

// Poisoned reports whether a stalled read took the buffer along. It cannot be used
// again; its memory is freed when the drive answers at last.
func (b *Buffer) Poisoned() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state == poisoned
}

// Free gives the memory back. It panics while a read is using it.
func (b *Buffer) Free() {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch b.state {
	case busy:
		panic("drive: a buffer is freed while a read fills it: wait for its Done")
	case unused:
		b.unmap()
	}
}

func (b *Buffer) unmap() {
	b.state, b.view = freed, nil
	allocated.Add(-int64(len(b.mem)))
	deallocate(b.mem)
}

// claim gives the buffer to a read.
func (b *Buffer) claim() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch b.state {
	case busy:
		return errors.New("the buffer is in use by another read: wait for its Done")
	case poisoned:
		return errors.New("the buffer is lost to a stalled read: use another")
	case freed:
		return errors.New("the buffer was freed: use another")
	}
	b.state, b.view = busy, nil
	return nil
}

// release takes the buffer back from its read.
func (b *Buffer) release(view []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.state, b.view = unused, view
}

// poison leaves the buffer to a stalled read, and abandon ends that.
func (b *Buffer) poison() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.state = poisoned
}

func (b *Buffer) abandon() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unmap()
	b.state = poisoned
}
