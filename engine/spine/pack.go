package spine

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/checkpoint"
	"deltafin/engine/disk"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
)

const (
	packBlock  = 4096 // units and the whole file are multiples of it, as direct reads are
	packAlign  = 64   // of the parts of a unit: a cache line
	packChunk  = 8 << 20
	repack     = "pack it again with 'deltafin pack spine'"
	partSuffix = ".part"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// unit is a part of a packed file with a digest of its own: the vectors, or what
// streams of a section, the router apart.
type unit struct {
	name    string
	at      extent
	crc     uint32
	checked atomic.Bool

	tensors []*tensor
	vecs    []packedVector
}

type packedVector struct {
	named
	at extent
}

// packing lays a packed file out. It depends on the configuration alone, so that a
// file's table has only one right form.
type packing struct {
	units  []*unit
	pieces [][]*unit // those of each section with matrices, in the order of a pass
	names  []string  // of these sections
	end    int64     // length of the file
}

// layOut places the sections in file number file, matrices but the routers as Int8 if narrow.
func layOut(sections []*section, file int, narrow bool) *packing {
	p := &packing{}
	add := func(name string) *unit {
		u := &unit{name: name, at: extent{file: file}}
		p.units = append(p.units, u)
		return u
	}
	take := func(u *unit, n int64) extent {
		x := extent{file, roundUp(u.at.n, packAlign), n}
		u.at.n = x.end()
		return x
	}
	vectors := add("vectors")
	for _, s := range sections {
		for _, v := range s.vecs {
			vectors.vecs = append(vectors.vecs, packedVector{v, take(vectors, 4*int64(v.n))})
		}
	}
	for _, s := range sections {
		if len(s.mats) == 0 {
			continue
		}
		var units []*unit
		var u *unit
		for _, m := range s.mats {
			isRouter := strings.HasSuffix(m.name, routerName)
			switch {
			case isRouter:
				u = add(strings.Replace(s.name, "feed-forward", "router", 1))
				units = append(units, u)
			case u == nil || strings.HasSuffix(u.name, "router"):
				u = add(s.name)
				units = append(units, u)
			}
			format, size := kernel.BF16, int64(2)
			if narrow && !isRouter {
				format, size = kernel.Int8, 1
			}
			t := newTensor(m, format, take(u, int64(m.rows)*int64(kernel.Pad(m.cols))*size))
			t.padded = true
			if format == kernel.Int8 {
				t.scale = take(u, 4*int64(m.rows))
			}
			u.tensors = append(u.tensors, t)
		}
		p.pieces, p.names = append(p.pieces, units), append(p.names, s.name)
	}
	at := headerRoom(len(p.units))
	for _, u := range p.units {
		u.at.off = at
		for _, t := range u.tensors {
			t.data.off += at
			t.scale.off += at
		}
		for i := range u.vecs {
			u.vecs[i].at.off += at
		}
		at = roundUp(at+u.at.n, packBlock)
	}
	p.end = at
	return p
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// fromPack places everything in the packed file at path, after it has been compared with
// the checkpoint.
func (p *plan) fromPack(ck *checkpoint.Checkpoint, sections []*section, path string) error {
	h, err := openHeader(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	at := ck.Files()
	p.files[at] = path
	p.narrow = h.Int8
	l := layOut(sections, at, h.Int8)
	if err := h.compare(ck, l); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for i, u := range l.units {
		u.crc = h.Units[i].crc
	}
	p.vectors.units = l.units[:1]
	for _, v := range l.units[0].vecs {
		p.vectors.vecs[v.name] = vector{v.at, checkpoint.F32}
	}
	for i, units := range l.pieces {
		x := p.add(l.names[i])
		x.units = units
		for _, u := range units {
			x.tensors = append(x.tensors, u.tensors...)
		}
	}
	return nil
}

// Pack writes the spine of ck to a packed file at out: pieces in the order of a pass, each
// in one run that begins at a multiple of 4 KiB. With narrow, matrices but the routers
// become signed bytes with a float32 scale per row: half the bytes, and another model,
// which is labelled so wherever it is used. Progress, if not nil, is told how many bytes of
// the work are done; what was written is read once more from the drive and compared.
//
// The file appears under its name when it is complete and on the drive. What an interrupted
// Pack leaves is out with ".part" appended; the next one overwrites it.
func Pack(ctx context.Context, ck *checkpoint.Checkpoint, out string, narrow bool, progress func(done, of int64)) error {
	w := &packer{ck: ck, narrow: narrow, progress: progress, free: disk.Free, step: func(string) {}}
	if err := w.pack(ctx, out); err != nil {
		return fmt.Errorf("packing the dense weights into %s: %w", out, err)
	}
	return nil
}

type packer struct {
	ck       *checkpoint.Checkpoint
	narrow   bool
	progress func(done, of int64)
	free     func(dir string) (int64, error)
	step     func(name string) // tests end the process here

	l        *packing
	in, out  []byte
	done, of int64
}

func (w *packer) pack(ctx context.Context, out string) (err error) {
	sections, err := outline(w.ck.Config())
	if err != nil {
		return err
	}
	w.l = layOut(sections, 0, w.narrow)
	w.of = 2 * w.l.end
	part := out + partSuffix
	f, err := disk.LockFile(part)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && !disk.RenameNeedsClose {
			os.Remove(part) // while nobody else can lock it
		}
		if f != nil {
			f.Close()
		}
		if err != nil && disk.RenameNeedsClose {
			os.Remove(part)
		}
	}()
	w.step("locked")
	if err := f.Truncate(0); err != nil {
		return err
	}
	free, err := w.free(filepath.Dir(out))
	if err != nil {
		return fmt.Errorf("finding out how much space is free: %w", err)
	}
	if free < w.l.end {
		return fmt.Errorf("%w: %s are needed and the file system has %s free: make room, or choose another directory", disk.ErrFull, gigabytes(w.l.end), gigabytes(free))
	}
	if err := w.write(ctx, f); err != nil {
		return err
	}
	w.step("written")
	if err := f.Sync(); err != nil {
		return err
	}
	w.step("synced")
	if err := w.verify(ctx, part); err != nil {
		return err
	}
	w.step("verified")
	if disk.RenameNeedsClose {
		err, f = f.Close(), nil
		if err != nil {
			return err
		}
	}
	if err := disk.Rename(part, out); err != nil {
		return err
	}
	w.step("renamed")
	return nil
}

func (w *packer) advance(n int64) {
	w.done += n
	if w.progress != nil {
		w.progress(w.done, w.of)
	}
}

// write writes the units and then the header, without which the rest is nothing.
func (w *packer) write(ctx context.Context, f *os.File) error {
	at := w.l.units[0].at.off
	if _, err := f.Seek(at, io.SeekStart); err != nil {
		return err
	}
	w.advance(at)
	b := bufio.NewWriterSize(f, packChunk)
	for _, u := range w.l.units {
		s := &summer{w: b, advance: w.advance}
		if err := w.writeUnit(ctx, u, s); err != nil {
			return fmt.Errorf("%s: %w", u.name, err)
		}
		u.crc = s.crc
		gap := roundUp(u.at.end(), packBlock) - u.at.end()
		if _, err := b.Write(make([]byte, gap)); err != nil {
			return err
		}
		w.advance(gap)
		w.step(u.name)
	}
	if err := b.Flush(); err != nil {
		return err
	}
	h, err := newHeader(w.ck, w.l, w.narrow)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(h.marshal(), 0)
	return err
}

// summer sums what is written through it.
type summer struct {
	w       io.Writer
	advance func(n int64)
	n       int64
	crc     uint32
}

func (s *summer) Write(b []byte) (int, error) {
	s.crc = crc32.Update(s.crc, castagnoli, b)
	s.n += int64(len(b))
	s.advance(int64(len(b)))
	return s.w.Write(b)
}

// align writes zeros up to where x begins in u.
func (s *summer) align(u *unit, x extent) error {
	_, err := s.Write(make([]byte, x.off-u.at.off-s.n))
	return err
}

func (w *packer) writeUnit(ctx context.Context, u *unit, s *summer) error {
	for _, v := range u.vecs {
		t, err := w.ck.Tensor(v.name)
		if err != nil {
			return err
		}
		raw := make([]byte, t.Bytes)
		if err := w.ck.Read(t, raw); err != nil {
			return err
		}
		f := make([]float32, v.n)
		if int64(v.n) > t.Bytes/t.DType.Size() {
			return fmt.Errorf("tensor %s has %d elements, needs %d", v.name, t.Bytes/t.DType.Size(), v.n)
		}
		widen(f, raw, t.DType)
		if err := s.align(u, v.at); err != nil {
			return err
		}
		if err := binary.Write(s, binary.LittleEndian, f); err != nil {
			return err
		}
	}
	for _, t := range u.tensors {
		if err := w.writeTensor(ctx, u, t, s); err != nil {
			return fmt.Errorf("tensor %s: %w", t.name, err)
		}
	}
	return nil
}

// writeTensor copies a matrix, several rows at a time.
func (w *packer) writeTensor(ctx context.Context, u *unit, t *tensor, s *summer) error {
	src, err := w.ck.Tensor(t.name)
	if err != nil {
		return err
	}
	if src.DType != checkpoint.BF16 {
		return fmt.Errorf("is %v, a packed file holds BF16", src.DType)
	}
	if err := s.align(u, t.data); err != nil {
		return err
	}
	rows, from, to := t.m.Rows, 2*int64(t.m.Cols), t.data.n/int64(t.m.Rows)
	scales := make([]float32, rows)
	step := min(int(max(packChunk/from, 1)), rows)
	w.in, w.out = grow(w.in, int64(step)*from), grow(w.out, int64(step)*to)
	for lo := 0; lo < rows; lo += step {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(step, rows-lo)
		raw, dst := w.in[:int64(n)*from], w.out[:int64(n)*to]
		if err := w.ck.ReadExtent(checkpoint.Extent{File: src.File, Offset: src.Offset + int64(t.lo+lo)*from, Bytes: int64(len(raw))}, raw); err != nil {
			return err
		}
		if err := convert(dst, raw, n, t.format == kernel.Int8, scales[lo:]); err != nil {
			return err
		}
		if _, err := s.Write(dst); err != nil {
			return err
		}
	}
	if t.scale.n == 0 {
		return nil
	}
	if err := s.align(u, t.scale); err != nil {
		return err
	}
	return binary.Write(s, binary.LittleEndian, scales)
}

func grow(b []byte, n int64) []byte {
	if int64(len(b)) < n {
		return make([]byte, n)
	}
	return b
}

// convert turns n bf16 rows into padded rows of bf16 or of bytes with scales.
func convert(dst, src []byte, n int, narrow bool, scales []float32) error {
	from, to := len(src)/n, len(dst)/n
	var g errgroup.Group
	workers := runtime.GOMAXPROCS(0)
	for k := range workers {
		g.Go(func() error {
			for r := n * k / workers; r < n*(k+1)/workers; r++ {
				in, out := src[r*from:][:from], dst[r*to:][:to]
				if !narrow {
					clear(out[copy(out, in):])
					continue
				}
				var err error
				if scales[r], err = quantize(out, in); err != nil {
					return err
				}
				clear(out[from/2:])
			}
			return nil
		})
	}
	return g.Wait()
}

// quantize writes the bf16 weights of a row as signed bytes q, weight = q * scale up to
// rounding: scale = max |weight| / 127 in float32, q = weight / scale in float32, rounded to
// the nearest, ties to even. A row of zeros has scale 1.
func quantize(dst, src []byte) (scale float32, err error) {
	var top uint32 // magnitudes of floats are ordered as their bits are
	for i := 0; i < len(src); i += 2 {
		top = max(top, uint32(binary.LittleEndian.Uint16(src[i:]))&0x7fff)
	}
	if top >= 0x7f80 {
		return 0, errors.New("has a weight that is no finite number: fetch the checkpoint again")
	}
	scale = math.Float32frombits(top<<16) / 127
	if scale == 0 { // all zeros, or so near to it that no float32 is a scale
		clear(dst[:len(src)/2])
		return 1, nil
	}
	for i := range dst[:len(src)/2] {
		w := math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
		q := math.RoundToEven(float64(w / scale))
		dst[i] = byte(int8(max(-127, min(127, q)))) // a subnormal scale may be far from exact
	}
	return scale, nil
}

// verify reads the whole file back from the drive.
func (w *packer) verify(ctx context.Context, path string) error {
	h, err := openHeader(path)
	if err != nil {
		return err
	}
	if err := h.compare(w.ck, w.l); err != nil {
		return err
	}
	set := drive.NewSet(drive.Options{Warn: func(string) {}})
	defer set.Close()
	f, err := set.Open(path)
	if err != nil {
		return err
	}
	b, err := drive.NewBuffer(packChunk)
	if err != nil {
		return err
	}
	defer b.Free()
	for i, u := range w.l.units {
		crc := uint32(0)
		for at := u.at.off; at < u.at.end(); at += packChunk {
			n := min(packChunk, u.at.end()-at)
			if err := set.Read(ctx, drive.Read{File: f, Offset: at, Bytes: n, Into: b}); err != nil {
				return err
			}
			crc = crc32.Update(crc, castagnoli, b.Bytes())
			w.advance(n)
		}
		if crc != u.crc || h.Units[i].crc != u.crc {
			return fmt.Errorf("%s has the digest %08x on the drive and had %08x when it was written: check that drive", u.name, crc, u.crc)
		}
	}
	w.advance(w.of - w.done)
	return nil
}
