package drive

import "context"

// Remote is a place that no path of this system leads to, such as a web server. It is
// a device like any other: it has a queue, a measured rate, and reads that fail.
type Remote interface {
	// Name tells it apart from all others, and is shown in messages.
	Name() string

	// ReadAt fills p with the bytes of a file from off on, or fails. It ends soon
	// after ctx does, and has its own patience with a server that is silent: no
	// deadline of the set's applies to it.
	ReadAt(ctx context.Context, file string, p []byte, off int64) error
}

const (
	// Several requests on their way at a time hide the time that each takes to arrive.
	remoteDepth = 8

	// Before its first reads a remote is taken for one behind a gigabit network.
	remoteGuess = 1e8 // bytes per second
)

// OpenRemote makes a file of r readable that is size bytes long. It asks r nothing.
// Files of remotes with one name are on one device.
func (s *Set) OpenRemote(r Remote, file string, size int64) (*File, error) {
	d, err := s.device(deviceKey{remote: r.Name()}, r.Name())
	if err != nil {
		return nil, err
	}
	return &File{path: r.Name() + "/" + file, name: file, id: identity{size: size}, dev: d, remote: r}, nil
}

// Remote reports whether the device is a [Remote].
func (d *Device) Remote() bool { return d.key.remote != "" }

// fetch is run for a file of a remote.
func (t *Ticket) fetch() (physical int64, view []byte, err error) {
	f := t.r.File
	mem := t.r.Into.mem[:t.r.Bytes:t.r.Bytes]
	if why := t.stop.Load(); why != nil {
		return 0, nil, *why
	}
	if fault := f.dev.set.o.Fault; fault != nil {
		err = fault(f.path, t.r.Offset, len(mem))
	}
	if err == nil {
		err = f.remote.ReadAt(t.ctx, f.name, mem, t.r.Offset)
	}
	if why := t.stop.Load(); err != nil && why != nil {
		return 0, nil, *why
	}
	if err != nil {
		return 0, nil, err
	}
	return t.r.Bytes, mem, nil
}
