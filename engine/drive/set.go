// Package drive hides how bytes come off physical drives: direct I/O where the file
// system allows it, one queue per drive with demand before read-ahead, a bounded
// number of open files, measured rates, and drives that stall or fail. It knows
// paths, offsets and bytes, and nothing of what the bytes mean.
//
// A [Set] holds the drives of an engine. A [File] is opened in it, a [Read] is
// submitted to it, and the bytes arrive in a [Buffer]:
//
//	s := drive.NewSet(drive.Options{})
//	f, err := s.Open("model-00001.safetensors")
//	b, err := drive.NewBuffer(n)
//	err = s.Read(ctx, drive.Read{File: f, Offset: off, Bytes: n, Into: b})
//	use(b.Bytes())
//
// A caller with several homes for the same bytes asks each home's [Device] what it
// expects ([Device.Expect]), submits to the best, and on an error drops that device
// ([Device.Fail]) and submits to the next.
package drive

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Options of a [Set]. The zero value is what a run uses.
type Options struct {
	// Depth is the number of reads in flight per device; 0 means 4. One of them is
	// kept free for demand, so that at most Depth-1 (but at least one) are ahead.
	Depth int

	// Buffered reads through the page cache and leaves the pages there.
	Buffered bool

	// MaxFiles bounds the open descriptors; 0 takes it from the process's limit.
	MaxFiles int

	// Deadline is how long a drive may take over one call, plus the time the bytes
	// of the call need at 10 MB/s; 0 means 30 s. A read that misses it fails with
	// [ErrStalled].
	Deadline time.Duration

	// Pace makes each directory a device of its own with a set rate and latency,
	// so that several drives can be had on one. The longest prefix of a path wins.
	Pace map[string]Pace

	// Filling is a directory whose files may be written to while they are open: only
	// their sizes have to stay. The caller sees to it that what is read was written.
	Filling string

	// Warn gets one line for each device that cannot be read directly; nil logs it.
	Warn func(line string)

	// Fault is called before each read call with the range that the call asks for.
	// Its error stands for the call's. It may block, as a dying drive does.
	Fault func(path string, off int64, n int) error

	most int // bytes of one call at most, for tests; 0 means callCap
}

// callCap bounds one read call: kernels refuse or shorten calls of 2 GiB and more.
const callCap = 1 << 30

// slowest is the rate (bytes per second) below which a drive counts as stalled.
const slowest = 10e6

// Causes of a failed read, for errors.Is. A cancelled read fails with
// context.Canceled or its context's error, a refused call with the system's error.
var (
	ErrStalled   = errors.New("the drive does not answer")
	ErrTruncated = errors.New("the file is too short")
	ErrChanged   = errors.New("the file was replaced or changed since it was opened")
	ErrFailed    = errors.New("the drive was given up")
	ErrClosed    = errors.New("the drives are closed")
)

// Error is a read that failed.
type Error struct {
	Device string // a directory on the device
	Path   string
	Offset int64 // bytes, as asked for
	Bytes  int64
	Err    error
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s: reading %d bytes at byte %d: %v", e.Path, e.Bytes, e.Offset, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// Set is all devices of an engine. Its methods may be called from any goroutine.
type Set struct {
	o     Options
	paces map[string]*pacer
	fds   *descriptors
	pread func(h handle, p []byte, off int64) (int, error) // tests shorten it

	mu      sync.Mutex
	devices []*Device
	closed  bool
	pending sync.WaitGroup // reads whose Done has not returned
}

// NewSet returns a set without devices; opening files adds them.
func NewSet(o Options) *Set {
	if o.Depth <= 0 {
		o.Depth = 4
	}
	if o.MaxFiles <= 0 {
		o.MaxFiles = defaultFiles(softLimit())
	}
	if o.Deadline <= 0 {
		o.Deadline = 30 * time.Second
	}
	if o.Warn == nil {
		o.Warn = func(line string) { slog.Warn(line) }
	}
	if o.most <= 0 {
		o.most = callCap
	}
	if o.Filling != "" {
		if abs, err := filepath.Abs(o.Filling); err == nil {
			o.Filling = abs
		}
	}
	s := &Set{o: o, paces: map[string]*pacer{}, fds: newDescriptors(o.MaxFiles), pread: handle.pread}
	for dir, p := range o.Pace {
		if abs, err := filepath.Abs(dir); err == nil {
			dir = abs
		}
		s.paces[dir] = &pacer{Pace: p}
	}
	return s
}

// Descriptors is how many files this process may have open, and how many of them a
// [Set] keeps open at most if nothing else is said.
func Descriptors() (limit, kept int) {
	limit = softLimit()
	return limit, defaultFiles(limit)
}

// defaultFiles leaves descriptors for the rest of the process: sockets, the
// checkpoint's own files, reads stuck in the kernel.
func defaultFiles(limit int) int {
	return min(max(limit/2, limit-128, 1), 4096)
}

// Open makes the file at path readable and finds the device that it lies on. It
// holds no descriptor afterwards, so that any number of files may be open.
func (s *Set) Open(path string) (*File, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	id, err := statPath(abs)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: check the path", path, err)
	}
	if !id.regular {
		return nil, fmt.Errorf("%s: not a regular file: give the path of a file with weights", path)
	}
	key, name := s.locate(abs, id)
	d, err := s.device(key, name)
	if err != nil {
		return nil, err
	}
	f := &File{path: abs, id: id, dev: d, filling: s.o.Filling != "" && filepath.Dir(abs) == s.o.Filling}
	if id.size > 0 {
		if err := d.probe(f); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	return f, nil
}

// locate says which device a file is on, and what to call it.
func (s *Set) locate(abs string, id identity) (key deviceKey, name string) {
	key, name = deviceKey{dev: id.dev}, filepath.Dir(abs)
	for dir := range s.paces {
		if strings.HasPrefix(abs, dir+string(filepath.Separator)) && len(dir) > len(key.pace) {
			key = deviceKey{pace: dir}
			name = dir
		}
	}
	return key, name
}

// device finds or adds a device.
func (s *Set) device(key deviceKey, name string) (*Device, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	for _, d := range s.devices {
		if d.key == key {
			return d, nil
		}
	}
	d := newDevice(s, key, name)
	s.devices = append(s.devices, d)
	return d, nil
}

// Devices returns the devices in the order in which they were found.
func (s *Set) Devices() []*Device {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*Device(nil), s.devices...)
}

// Submit queues r at its file's device and returns at once. r.Done is called
// exactly once, from another goroutine, whatever happens; by then the buffer is
// free for the next read and the device's account is up to date. The end of ctx
// cancels the read as [Ticket.Cancel] does.
func (s *Set) Submit(ctx context.Context, r Read) *Ticket {
	t := &Ticket{r: r, submitted: time.Now()}
	if err := t.check(s); err != nil {
		t.reject(err)
		return t
	}
	if err := ctx.Err(); err != nil {
		t.reject(err)
		return t
	}
	if err := r.Into.claim(); err != nil {
		t.reject(err)
		return t
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		r.Into.release(nil)
		t.reject(ErrClosed)
		return t
	}
	s.pending.Add(1)
	s.mu.Unlock()
	if ctx.Done() != nil {
		t.unhook = context.AfterFunc(ctx, func() { t.cancel(ctx.Err()) })
	}
	r.File.dev.enqueue(t)
	return t
}

// Read submits r and waits for it. After an error the buffer holds nothing.
func (s *Set) Read(ctx context.Context, r Read) error {
	done := make(chan error, 1)
	r.Done = func(err error) { done <- err }
	s.Submit(ctx, r)
	return <-done
}

// Close ends queued reads with [ErrClosed], waits for those in flight and for
// every Done, and closes the descriptors. It does not wait for reads that stalled.
// It must not be called from a Done.
func (s *Set) Close() {
	s.mu.Lock()
	s.closed = true
	devices := s.devices
	s.mu.Unlock()
	for _, d := range devices {
		d.close()
	}
	s.pending.Wait()
	s.fds.close()
}
