package spine

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"deltafin/engine/checkpoint"
)

// A packed file begins with
//
//	bytes 0-7    "DFSPINE" and the format's version
//	bytes 8-11   length of the table, little-endian
//	bytes 12-15  CRC-32C of the table
//
// and the table, in JSON. The units follow at multiples of 4 KiB, in the order of a pass.
const (
	magic       = "DFSPINE"
	version     = 1
	preamble    = 16
	tableLimit  = 4 << 20
	unitsLimit  = 1 << 14
	tableOfUnit = 160 // bytes that a unit may take in the table
)

// header is the table of a packed file. It has one spelling: what marshal writes.
type header struct {
	Int8   bool         `json:"int8"`          // matrices but the routers; else bf16
	Config string       `json:"config_sha256"` // of the checkpoint's config.json
	Sample string       `json:"sample_sha256"` // of some of its weights
	Bytes  int64        `json:"bytes"`         // of the whole file
	Units  []headerUnit `json:"units"`
}

type headerUnit struct {
	Name   string `json:"name"`
	Offset int64  `json:"offset"`
	Bytes  int64  `json:"bytes"`
	CRC32C string `json:"crc32c"` // eight hexadecimal digits
	crc    uint32
}

// headerRoom is where the first unit begins.
func headerRoom(units int) int64 {
	return roundUp(preamble+512+tableOfUnit*int64(units), packBlock)
}

func newHeader(ck *checkpoint.Checkpoint, l *packing, narrow bool) (*header, error) {
	h := &header{Int8: narrow, Bytes: l.end}
	var err error
	if h.Config, h.Sample, err = identify(ck); err != nil {
		return nil, err
	}
	for _, u := range l.units {
		h.Units = append(h.Units, headerUnit{u.name, u.at.off, u.at.n, fmt.Sprintf("%08x", u.crc), u.crc})
	}
	if n, room := int64(len(h.marshal())), headerRoom(len(l.units)); n > room {
		return nil, fmt.Errorf("the table has %d bytes, there is room for %d", n, room)
	}
	return h, nil
}

func (h *header) marshal() []byte {
	table, err := json.Marshal(h)
	if err != nil {
		panic(err) // strings and numbers only
	}
	b := append([]byte(magic), version)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(table)))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(table, castagnoli))
	return append(b, table...)
}

// openHeader reads the header of the file at path and compares it with the file's size.
func openHeader(path string) (*header, error) {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file: give the path of a packed spine")
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("is not there: write it with 'deltafin pack spine'")
	}
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseHeader(f, info.Size())
}

// parseHeader reads the header of a packed file of the given size. What it returns
// is in order by itself: units follow one another up to the end of the file.
func parseHeader(r io.Reader, size int64) (*header, error) {
	var pre [preamble]byte
	if _, err := io.ReadFull(r, pre[:]); err != nil || string(pre[:len(magic)]) != magic {
		return nil, errors.New("is no packed spine: " + repack)
	}
	if v := pre[len(magic)]; v != version {
		return nil, fmt.Errorf("has format version %d, this program reads %d: %s", v, version, repack)
	}
	n := int64(binary.LittleEndian.Uint32(pre[8:]))
	if n > tableLimit || n > size-preamble {
		return nil, fmt.Errorf("has a table of %d bytes in %d: the file is damaged: %s", n, size, repack)
	}
	table := make([]byte, n)
	if _, err := io.ReadFull(r, table); err != nil {
		return nil, fmt.Errorf("reading its table: %w", err)
	}
	if crc32.Checksum(table, castagnoli) != binary.LittleEndian.Uint32(pre[12:]) {
		return nil, errors.New("has a table that does not match its digest: the file is damaged: " + repack)
	}
	h := &header{}
	if err := json.Unmarshal(table, h); err != nil || len(h.Units) > unitsLimit || !bytes.Equal(h.marshal()[preamble:], table) {
		return nil, errors.New("has a table that this program would not write: " + repack)
	}
	if len(h.Units) == 0 || h.Bytes != size {
		return nil, fmt.Errorf("has %d bytes, and %d by its table: it was cut or added to: %s", size, h.Bytes, repack)
	}
	at := headerRoom(len(h.Units))
	for i := range h.Units {
		u := &h.Units[i]
		crc, err := strconv.ParseUint(u.CRC32C, 16, 32)
		if err != nil || u.CRC32C != fmt.Sprintf("%08x", crc) || u.Offset != at || u.Bytes <= 0 || u.Bytes > size-at {
			return nil, fmt.Errorf("has a wrong entry %d in its table: %s", i, repack)
		}
		u.crc = uint32(crc)
		at = roundUp(at+u.Bytes, packBlock)
	}
	if at != size {
		return nil, fmt.Errorf("has units up to byte %d of %d: %s", at, size, repack)
	}
	return h, nil
}

// compare demands that the file was packed from ck, and is laid out as l.
func (h *header) compare(ck *checkpoint.Checkpoint, l *packing) error {
	config, sample, err := identify(ck)
	if err != nil {
		return err
	}
	if h.Config != config || h.Sample != sample {
		return fmt.Errorf("was packed from another checkpoint than %s: give the one that belongs to it, or %s", ck.Dir(), repack)
	}
	if len(h.Units) != len(l.units) {
		return fmt.Errorf("has %d units, expected %d: %s", len(h.Units), len(l.units), repack)
	}
	for i, u := range l.units {
		if x := h.Units[i]; x.Name != u.name || x.Offset != u.at.off || x.Bytes != u.at.n {
			return fmt.Errorf("has %q, %d bytes at %d, where %q, %d bytes at %d, is expected: %s", x.Name, x.Bytes, x.Offset, u.name, u.at.n, u.at.off, repack)
		}
	}
	return nil
}

// identify tells a checkpoint from another with the same shapes: by its config.json, and
// by the small tensors of its last layer, which no training leaves as they are.
func identify(ck *checkpoint.Checkpoint) (config, sample string, err error) {
	b, err := os.ReadFile(filepath.Join(ck.Dir(), "config.json"))
	if err != nil {
		return "", "", err
	}
	c := sha256.Sum256(b)
	s := sha256.New()
	layer := fmt.Sprintf("model.layers.%d.", ck.Config().Layers-1)
	for _, t := range ck.Tensors() {
		if !strings.HasPrefix(t.Name, layer) || t.Bytes > 1<<20 {
			continue
		}
		b := make([]byte, t.Bytes)
		if err := ck.Read(t, b); err != nil {
			return "", "", err
		}
		s.Write(b)
	}
	return hex.EncodeToString(c[:]), hex.EncodeToString(s.Sum(nil)), nil
}
