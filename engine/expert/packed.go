package expert

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"deltafin/engine/checkpoint"
)

// A packed file holds experts of one layer, some or all, in ascending id. It says
// itself what it holds, so that a file is either complete or not there, and no
// second file can contradict it:
//
//	 0  "DFEXPERT"
//	 8  version        uint32, little endian as all numbers
//	12  layer          uint32, 0-based
//	16  count          uint32, experts in the file
//	20  header bytes   uint32, a multiple of 4096
//	24  expert bytes   uint64
//	32  stride         uint64, expert bytes rounded up to 4096
//	40  fingerprint    32 bytes, see [Fingerprint]
//	72  per expert: id uint32, SHA-256 of its bytes
//	    SHA-256 of everything above
//	    zeros up to header bytes; then the experts, stride bytes apart
const (
	packedMagic   = "DFEXPERT"
	packedVersion = 1
	packedFixed   = 72
	packedEntry   = 4 + sha256.Size
	packedBlock   = 4096
	packedMost    = 1 << 16 // experts of a layer: an id has 16 bits in the catalogue
)

type packed struct {
	layer       int
	ids         []int32
	digests     [][sha256.Size]byte
	expertBytes int64
	fingerprint [sha256.Size]byte

	base, stride int64 // derived
}

func roundUp(n int64) int64 { return (n + packedBlock - 1) &^ (packedBlock - 1) }

// headerBytes is the length of the header of a file of n experts.
func headerBytes(n int) int64 {
	return roundUp(packedFixed + int64(n)*packedEntry + sha256.Size)
}

// packedBytes is the length of such a file.
func packedBytes(n int, expertBytes int64) int64 {
	return headerBytes(n) + int64(n)*roundUp(expertBytes)
}

// encode writes the header.
func (p *packed) encode() []byte {
	size := headerBytes(len(p.ids))
	le := binary.LittleEndian
	b := append(make([]byte, 0, size), packedMagic...)
	for _, v := range []int{packedVersion, p.layer, len(p.ids), int(size)} {
		b = le.AppendUint32(b, uint32(v))
	}
	b = le.AppendUint64(b, uint64(p.expertBytes))
	b = le.AppendUint64(b, uint64(roundUp(p.expertBytes)))
	b = append(b, p.fingerprint[:]...)
	for i, id := range p.ids {
		b = le.AppendUint32(b, uint32(id))
		b = append(b, p.digests[i][:]...)
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)[:size]
}

// readPacked reads the header of a file of size bytes. It trusts nothing: memory is
// taken for as many experts as the file has room for.
func readPacked(r io.ReaderAt, size int64) (*packed, error) {
	damaged := func(what string) error { return fmt.Errorf("%s: the file is damaged: stage it again", what) }
	var f [packedFixed]byte
	if size < packedFixed {
		return nil, damaged(fmt.Sprintf("has %d bytes, too few for its header", size))
	}
	if _, err := r.ReadAt(f[:], 0); err != nil {
		return nil, reason(err)
	}
	le := binary.LittleEndian
	if string(f[:8]) != packedMagic {
		return nil, errors.New("is no file of packed experts: remove it from the directory")
	}
	if v := le.Uint32(f[8:]); v != packedVersion {
		return nil, fmt.Errorf("has version %d, this program reads %d: stage it again", v, packedVersion)
	}
	n := int(le.Uint32(f[16:]))
	bytesEach, stride := le.Uint64(f[24:]), le.Uint64(f[32:])
	switch {
	case n < 1 || n > packedMost:
		return nil, damaged(fmt.Sprintf("claims to hold %d experts", n))
	case bytesEach == 0 || bytesEach > 1<<40 || stride != uint64(roundUp(int64(bytesEach))):
		return nil, damaged(fmt.Sprintf("claims experts of %d bytes, %d apart", bytesEach, stride))
	case int64(le.Uint32(f[20:])) != headerBytes(n):
		return nil, damaged(fmt.Sprintf("claims a header of %d bytes", le.Uint32(f[20:])))
	case size != packedBytes(n, int64(bytesEach)):
		return nil, damaged(fmt.Sprintf("has %d bytes, its header describes %d", size, packedBytes(n, int64(bytesEach))))
	}
	b := make([]byte, headerBytes(n))
	if _, err := r.ReadAt(b, 0); err != nil {
		return nil, reason(err)
	}
	end := packedFixed + n*packedEntry
	if sum := sha256.Sum256(b[:end]); !bytes.Equal(sum[:], b[end:end+sha256.Size]) || !zero(b[end+sha256.Size:]) {
		return nil, damaged("its header does not match its digest")
	}
	p := &packed{
		layer: int(le.Uint32(f[12:])), expertBytes: int64(bytesEach),
		base: headerBytes(n), stride: int64(stride),
	}
	copy(p.fingerprint[:], f[40:])
	last := int64(-1)
	for at := packedFixed; at < end; at += packedEntry {
		id := int64(le.Uint32(b[at:]))
		if id <= last || id >= packedMost {
			return nil, damaged(fmt.Sprintf("lists expert %d after %d", id, last))
		}
		last = id
		p.ids = append(p.ids, int32(id))
		p.digests = append(p.digests, [sha256.Size]byte(b[at+4:]))
	}
	return p, nil
}

// openPacked reads the header of the file at path and compares it with the model.
func openPacked(path string, c *catalogue, print [sha256.Size]byte) (*packed, error) {
	f, info, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readPackedOf(f, info.Size(), c, print)
}

// readPackedOf reads the header of a file of size bytes and compares it with the model.
func readPackedOf(r io.ReaderAt, size int64, c *catalogue, print [sha256.Size]byte) (*packed, error) {
	p, err := readPacked(r, size)
	if err != nil {
		return nil, err
	}
	if p.fingerprint != print || p.expertBytes != c.layout.ExpertBytes || !c.ck.Config().IsMoE(p.layer) || int(p.ids[len(p.ids)-1]) >= c.per {
		return nil, errors.New("holds experts of another model: stage it again from this checkpoint")
	}
	return p, nil
}

const printedBytes = 64

// printed is what a layer adds to a fingerprint.
func printed(ck *checkpoint.Checkpoint, layer int) checkpoint.Extent {
	p := ck.ExpertLayout().Parts[checkpoint.W2Packed]
	x := ck.Expert(layer, layer%ck.Config().Experts)
	x.Offset, x.Bytes = x.Offset+p.Offset, min(printedBytes, p.Bytes)
	return x
}

// sum is the digest of an expert, or nil.
func (p *packed) sum(id int) *[sha256.Size]byte {
	if p == nil {
		return nil
	}
	if i, ok := slices.BinarySearch(p.ids, int32(id)); ok {
		return &p.digests[i]
	}
	return nil
}

// Fingerprint tells checkpoints apart whose experts differ: a SHA-256 of their
// dimensions and of 64 bytes of weights from one expert of each layer, wherever
// they lie. It reads some kilobytes.
func Fingerprint(ck *checkpoint.Checkpoint) ([sha256.Size]byte, error) {
	c, l := ck.Config(), ck.ExpertLayout()
	h := sha256.New()
	fmt.Fprintf(h, "deltafin experts: %d %d %d %d %d %d %d\n", c.Layers, c.FirstDense, c.Experts, c.TopK, c.Latent, c.MoEInter, l.ExpertBytes)
	b := make([]byte, printedBytes)
	for layer := c.FirstDense; layer < c.Layers; layer++ {
		x := printed(ck, layer)
		if err := ck.ReadExtent(x, b[:x.Bytes]); err != nil {
			return [sha256.Size]byte{}, err
		}
		h.Write(b[:x.Bytes])
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}
