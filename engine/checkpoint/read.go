package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
)

// readCap bounds one read call. Kernels refuse or shorten reads of 2 GiB and more,
// and K3's embedding is larger than that.
const readCap = 1 << 30

// readFull fills dst from offset off on, in calls of at most most bytes. A short
// read is continued and an interrupted one repeated.
func readFull(r io.ReaderAt, dst []byte, off int64, most int) error {
	idle := 0
	for len(dst) > 0 {
		n, err := r.ReadAt(dst[:min(len(dst), most)], off)
		dst, off = dst[n:], off+int64(n)
		switch {
		case len(dst) == 0:
			return nil
		case n > 0:
			idle = 0
		case err == nil || errors.Is(err, syscall.EINTR):
			if idle++; idle == 100 {
				return fmt.Errorf("no bytes arrive at byte %d: %w", off, io.ErrNoProgress)
			}
		}
		switch {
		case err == nil, errors.Is(err, syscall.EINTR):
		case errors.Is(err, io.EOF):
			return fmt.Errorf("the file ends at byte %d, %d bytes short; it was longer when it was opened: fetch it again", off, len(dst))
		default:
			return fmt.Errorf("read at byte %d: %w", off, err)
		}
	}
	return nil
}

// Read reads a whole tensor as stored; len(dst) must be t.Bytes.
func (c *Checkpoint) Read(t Tensor, dst []byte) error {
	if err := c.read(Extent{t.File, t.Offset, t.Bytes}, dst); err != nil {
		return fmt.Errorf("%s: tensor %s: %w", c.shardName(t.File), Prefix+t.Name, err)
	}
	return nil
}

// ReadExtent reads a run of bytes, such as an expert, which is brought if it is not
// there; len(dst) must be e.Bytes.
func (c *Checkpoint) ReadExtent(e Extent, dst []byte) error {
	err := error(nil)
	switch {
	case !c.filling:
		err = c.read(e, dst)
	case c.filler == nil || int64(len(dst)) != e.Bytes:
		err = errors.New("may not be there, and nobody is asked to bring it")
	default:
		err = c.filler.Read(context.Background(), c.shardName(e.File), e.Offset, dst)
	}
	if err != nil {
		return fmt.Errorf("%s: %s: %w", c.shardName(e.File), c.contents(e), err)
	}
	return nil
}

func (c *Checkpoint) read(e Extent, dst []byte) error {
	if int64(len(dst)) != e.Bytes {
		return fmt.Errorf("buffer has %d bytes, expected %d", len(dst), e.Bytes)
	}
	if e.File < 0 || e.File >= len(c.files) || c.files[e.File] == nil {
		return fmt.Errorf("shard %d is not open", e.File)
	}
	return readFull(c.files[e.File], dst, e.Offset, readCap)
}

func (c *Checkpoint) shardName(file int) string {
	if file < 0 || file >= len(c.r.files) {
		return fmt.Sprintf("shard %d", file)
	}
	return c.r.files[file]
}

// contents says what lies in a run of bytes, for an error.
func (c *Checkpoint) contents(e Extent) string {
	for i := range c.r.experts {
		x := &c.r.experts[i]
		if int(x.file) == e.File && x.offset <= e.Offset && e.Offset < x.offset+c.r.layout.ExpertBytes {
			return fmt.Sprintf("layer %d expert %d", c.r.cfg.FirstDense+i/c.r.cfg.Experts, i%c.r.cfg.Experts)
		}
	}
	for i := range c.r.dense {
		d := &c.r.dense[i]
		if d.File == e.File && d.Offset <= e.Offset && e.Offset < d.Offset+d.Bytes {
			return "tensor " + Prefix + d.Name
		}
	}
	return fmt.Sprintf("bytes %d to %d", e.Offset, e.Offset+e.Bytes)
}
