// Package weights decides how the tensors of a draft model come into memory: whole, read
// through the drives, outside the Go heap, and proven to be numbers.
package weights

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
)

// Set is tensors in memory, by name.
type Set struct {
	Matrix map[string]*kernel.Matrix // bf16, as stored
	Vector map[string][]float32      // those with one row, widened

	buffers []*drive.Buffer // that the matrices lie in
}

// readers is how many tensors are read at a time.
const readers = 4

// Read reads BF16 tensors; a tensor's File is its index in paths. An error is one line that names
// the file and the tensor.
func Read(ctx context.Context, drives *drive.Set, paths []string, tensors []checkpoint.Tensor) (*Set, error) {
	files := make([]*drive.File, len(paths))
	for i, path := range paths {
		var err error
		if files[i], err = drives.Open(path); err != nil {
			return nil, err
		}
	}
	s := &Set{Matrix: map[string]*kernel.Matrix{}, Vector: map[string][]float32{}}
	var mu sync.Mutex
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(readers)
	for _, t := range tensors {
		g.Go(func() error {
			b, err := read(ctx, drives, files[t.File], t)
			if err != nil {
				return fmt.Errorf("%s: tensor %s: %w", paths[t.File], t.Name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			return s.add(t, b)
		})
	}
	if err := g.Wait(); err != nil {
		s.Free()
		return nil, err
	}
	return s, nil
}

// vector says of a tensor that it is widened, not kept as it is stored.
func vector(t checkpoint.Tensor) bool { return len(t.Shape) == 1 || t.Shape[0] == 1 }

func (s *Set) add(t checkpoint.Tensor, b *drive.Buffer) error {
	if vector(t) {
		s.Vector[t.Name] = widened(b.Bytes())
		b.Free()
		return nil
	}
	m, err := kernel.NewMatrix(kernel.BF16, t.Shape[0], t.Shape[1], b.Bytes(), nil)
	if err != nil || m.Stride != m.Cols { // padded rows are a copy
		b.Free()
	} else {
		s.buffers = append(s.buffers, b)
	}
	s.Matrix[t.Name] = m
	return err
}

// Free gives the memory of the matrices back.
func (s *Set) Free() {
	for _, b := range s.buffers {
		b.Free()
	}
	s.buffers = nil
}

// Bytes is the most memory that a tensor takes once it is read.
func Bytes(t checkpoint.Tensor) int64 {
	const page = 4096
	switch cols := t.Shape[len(t.Shape)-1]; {
	case vector(t):
		return 2 * t.Bytes
	case cols%kernel.Lane32 != 0: // padded
		return t.Bytes / int64(cols) * int64(kernel.Pad(cols))
	default: // what a buffer has at most beyond its bytes
		return t.Bytes + 2*page
	}
}

func read(ctx context.Context, drives *drive.Set, f *drive.File, t checkpoint.Tensor) (*drive.Buffer, error) {
	b, err := drive.NewBuffer(t.Bytes)
	if err != nil {
		return nil, err
	}
	if err = drives.Read(ctx, drive.Read{File: f, Offset: t.Offset, Bytes: t.Bytes, Into: b}); err == nil {
		if i := notFinite(b.Bytes()); i >= 0 {
			err = fmt.Errorf("weight %d is not a finite number: the file is damaged, fetch it again", i)
		}
	}
	if err != nil {
		b.Free()
		return nil, err
	}
	return b, nil
}

// notFinite is the index of the first bf16 value whose exponent is all ones, or -1.
func notFinite(b []byte) int {
	const exponents, one, top = 0x7f80_7f80_7f80_7f80, 0x0080_0080_0080_0080, 0x8000_8000_8000_8000
	i := 0
	// One more carries an exponent of all ones, and no other, into the place of the sign.
	for i+8 <= len(b) && (binary.LittleEndian.Uint64(b[i:])&exponents+one)&top == 0 {
		i += 8
	}
	for ; i+2 <= len(b); i += 2 {
		if binary.LittleEndian.Uint16(b[i:])&0x7f80 == 0x7f80 {
			return i / 2
		}
	}
	return -1
}

// widened is bf16 values as float32.
func widened(b []byte) []float32 {
	f := kernel.Floats(len(b) / 2)
	for i := range f {
		f[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16)
	}
	return f
}
