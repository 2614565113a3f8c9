package expert

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/klauspost/compress/zstd"

	"deltafin/engine/checkpoint"
)

// A trace records the routes of a run. It is one zstd stream of
//
//	"DFTRACE", a version byte, the model's fingerprint (32 bytes)
//	uvarints: first MoE layer, MoE layers, experts of a layer, top-k
//	per layer of a pass: layer - first, rows, and per row its ids, ascending, each as
//	the distance from the one before, the first as itself
//
// where a layer that is not above the one before it begins a new pass.
const (
	traceMagic   = "DFTRACE"
	traceVersion = 1
	traceRoutes  = 1 << 24 // most routes of a layer in a pass: a million rows of K3
	traceMemory  = 16 << 20
)

// TraceHeader says what model a trace is of.
type TraceHeader struct {
	Fingerprint                  [32]byte
	First, Layers, Experts, TopK int
}

func (h *TraceHeader) check() error {
	if h.First < 0 || h.First > 1<<16 || h.Layers < 1 || h.Layers > 1<<16 || h.Experts < 1 || h.Experts > 1<<16 || h.TopK < 1 || h.TopK > h.Experts {
		return fmt.Errorf("claims %d layers of %d experts, %d of them routed: the trace is damaged: record it again", h.Layers, h.Experts, h.TopK)
	}
	return nil
}

// TraceWriter records routes.
type TraceWriter struct {
	h    TraceHeader
	z    *zstd.Encoder
	b    []byte
	last int
}

// NewTraceWriter starts a trace on w, which stays the caller's.
func NewTraceWriter(w io.Writer, c *checkpoint.Config, print [32]byte) (*TraceWriter, error) {
	z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(1<<20))
	if err != nil {
		return nil, err
	}
	t := &TraceWriter{h: TraceHeader{print, c.FirstDense, c.Layers - c.FirstDense, c.Experts, c.TopK}, z: z, last: -1}
	b := append([]byte(traceMagic), traceVersion)
	b = append(b, print[:]...)
	for _, n := range []int{t.h.First, t.h.Layers, t.h.Experts, t.h.TopK} {
		b = binary.AppendUvarint(b, uint64(n))
	}
	_, err = z.Write(b)
	return t, err
}

// Write records the routes of a layer [rows][top-k], ascending in each row.
func (t *TraceWriter) Write(layer int, ids []int32) error {
	b := binary.AppendUvarint(t.b[:0], uint64(layer-t.h.First))
	b = binary.AppendUvarint(b, uint64(len(ids)/t.h.TopK))
	for i, id := range ids {
		last := int32(0)
		if i%t.h.TopK > 0 {
			last = ids[i-1]
		}
		b = binary.AppendUvarint(b, uint64(id-last))
	}
	t.b = b
	if layer <= t.last { // a run that is killed leaves all passes but its last
		if err := t.z.Flush(); err != nil {
			return err
		}
	}
	t.last = layer
	_, err := t.z.Write(b)
	return err
}

// Close ends the trace. It does not close the writer below.
func (t *TraceWriter) Close() error { return t.z.Close() }

// TraceReader reads a trace.
type TraceReader struct {
	TraceHeader
	z    *zstd.Decoder
	r    *bufio.Reader
	last int
}

// NewTraceReader reads the header of a trace.
func NewTraceReader(r io.Reader) (*TraceReader, error) {
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(traceMemory), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, err
	}
	t := &TraceReader{z: z, r: bufio.NewReader(z), last: -1}
	if err := t.header(); err != nil {
		z.Close()
		return nil, err
	}
	return t, nil
}

func (t *TraceReader) header() error {
	b := make([]byte, len(traceMagic)+1)
	if _, err := io.ReadFull(t.r, b); err != nil || string(b[:len(traceMagic)]) != traceMagic {
		return errors.New("is no trace: give a file that was written with --trace")
	}
	if v := b[len(traceMagic)]; v != traceVersion {
		return fmt.Errorf("has version %d, this program reads %d: record it again", v, traceVersion)
	}
	if _, err := io.ReadFull(t.r, t.Fingerprint[:]); err != nil {
		return errors.New("ends inside its header: record it again")
	}
	for _, n := range []*int{&t.First, &t.Layers, &t.Experts, &t.TopK} {
		v, err := binary.ReadUvarint(t.r)
		if err != nil {
			return errors.New("ends inside its header: record it again")
		}
		*n = int(min(v, math.MaxInt32))
	}
	return t.check()
}

// TraceRoutes are the routes of one layer of a pass.
type TraceRoutes struct {
	Layer   int     // 0-based
	Rows    int     // of the pass
	IDs     []int32 // [Rows][TopK], ascending in each row; valid until the next Next
	NewPass bool
}

// Next returns the routes of the next layer in the order of the run. At the end it
// is io.EOF, and io.ErrUnexpectedEOF where the run that wrote the trace was killed:
// what came before is sound.
func (t *TraceReader) Next() (TraceRoutes, error) {
	x, err := t.next()
	if err != nil && err != io.EOF && !errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("the trace is damaged: %w: record it again", err)
	}
	return x, err
}

func (t *TraceReader) next() (x TraceRoutes, err error) {
	layer, err := binary.ReadUvarint(t.r)
	if err != nil {
		return x, err
	}
	rows, err := t.number()
	if err != nil {
		return x, err
	}
	if layer >= uint64(t.Layers) || rows < 1 || rows > traceRoutes/uint64(t.TopK) {
		return x, fmt.Errorf("layer %d with %d rows", layer, rows)
	}
	// The buffer grows with what is really there: a claim alone takes no memory.
	x = TraceRoutes{Layer: t.First + int(layer), Rows: int(rows), NewPass: int(layer) <= t.last}
	t.last = int(layer)
	for range rows {
		last := uint64(0)
		for j := range t.TopK {
			d, err := t.number()
			if err != nil {
				return x, err
			}
			if d >= uint64(t.Experts) || last+d >= uint64(t.Experts) || j > 0 && d == 0 {
				return x, fmt.Errorf("expert %d of %d after %d", last+d, t.Experts, last)
			}
			last += d
			x.IDs = append(x.IDs, int32(last))
		}
	}
	return x, nil
}

// number reads a number inside of something, where an end comes too early.
func (t *TraceReader) number() (uint64, error) {
	n, err := binary.ReadUvarint(t.r)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// Close frees the decoder. The reader below stays the caller's.
func (t *TraceReader) Close() { t.z.Close() }
