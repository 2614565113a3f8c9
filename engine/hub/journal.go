package hub

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"time"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A journal says which runs of bytes of an unfinished file have arrived, with their
// CRC-32C as they came off the network. It is appended to after the bytes are
// written. Neither is flushed: if power fails, a record may be there without its
// bytes, which the digest of the whole file finds out and the CRC then locates.
type journal struct {
	f       *os.File
	records []record
	have    spans
	dropped spans // of a store that fills on demand
}

type record struct {
	span
	crc uint32
	sum bool // crc is known

	// In the ranges of a store that fills on demand: the run came because it was asked
	// for, was last used in this hour, or was dropped again.
	demand, dropped bool
	hour            uint32 // since 2025; 22 bits
}

// hourOf numbers hours for records.
func hourOf(t time.Time) uint32 {
	const year2025 = 1735689600
	return uint32(max(0, min((t.Unix()-year2025)/3600, 1<<22-1)))
}

const (
	journalMagic = "dfjrnl1\n"
	journalHead  = 8 + 8 + 32 + 4
	recordBytes  = 8 + 8 + 4 + 1 + 3 + 4
	journalLimit = 256 << 20
)

// identity is what a file's journal belongs to: the same name with another size or
// digest is another file.
func (f *File) identity() [32]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%d %s %s", f.Size, f.SHA256, f.Git))
}

// parseJournal reads a journal of a file. What follows the first torn record is
// ignored; keep is the length of what precedes it, 0 if the journal is another
// file's or none at all. Dropped are runs that were there once and are not now.
func parseJournal(b []byte, size int64, id [32]byte) (records []record, have, dropped spans, keep int64) {
	if len(b) < journalHead || !bytes.Equal(b[:journalHead], journalHeader(size, id)) {
		return nil, nil, nil, 0
	}
	at := map[span]int{} // of records
	keep = journalHead
	for b = b[journalHead:]; len(b) >= recordBytes; b = b[recordBytes:] {
		r := b[:recordBytes]
		if crc32.Checksum(r[:recordBytes-4], castagnoli) != binary.LittleEndian.Uint32(r[recordBytes-4:]) {
			break
		}
		off, end := binary.LittleEndian.Uint64(r), binary.LittleEndian.Uint64(r[8:])
		if off >= end || end > uint64(size) {
			break
		}
		keep += recordBytes
		bits := uint32(r[21]) | uint32(r[22])<<8 | uint32(r[23])<<16
		x := record{span{int64(off), int64(end)}, binary.LittleEndian.Uint32(r[16:]), r[20] == 1, bits&1 != 0, bits&2 != 0, bits >> 2}
		if i, ok := at[x.span]; x.dropped {
			if ok {
				records[i].span = span{}
				delete(at, x.span)
				have, dropped = have.without(x.span), dropped.add(x.span)
			}
			continue
		}
		if g := have.missing(x.span); len(g) != 1 || g[0] != x.span {
			continue // arrived twice; the first counts
		}
		at[x.span] = len(records)
		records, have = append(records, x), have.add(x.span)
	}
	for _, x := range have {
		dropped = dropped.without(x)
	}
	return slices.DeleteFunc(records, func(r record) bool { return r.span == span{} }), have, dropped, keep
}

func journalHeader(size int64, id [32]byte) []byte {
	b := append([]byte(journalMagic), make([]byte, 8)...)
	binary.LittleEndian.PutUint64(b[8:], uint64(size))
	b = append(b, id[:]...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func (r record) encode() []byte {
	b := make([]byte, recordBytes)
	binary.LittleEndian.PutUint64(b, uint64(r.off))
	binary.LittleEndian.PutUint64(b[8:], uint64(r.end))
	binary.LittleEndian.PutUint32(b[16:], r.crc)
	if r.sum {
		b[20] = 1
	}
	bits := r.hour << 2
	if r.demand {
		bits |= 1
	}
	if r.dropped {
		bits |= 2
	}
	b[21], b[22], b[23] = byte(bits), byte(bits>>8), byte(bits>>16)
	binary.LittleEndian.PutUint32(b[recordBytes-4:], crc32.Checksum(b[:recordBytes-4], castagnoli))
	return b
}

// openJournal opens the journal at path or begins one. Written is the length of the
// unfinished file: a run beyond it never arrived.
func openJournal(path string, f *File, written int64) (*journal, error) {
	out, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, plain(err)
	}
	j := &journal{f: out}
	b, err := io.ReadAll(io.LimitReader(out, journalLimit))
	if err != nil {
		out.Close()
		return nil, plain(err)
	}
	var keep int64
	j.records, j.have, j.dropped, keep = parseJournal(b, f.Size, f.identity())
	whole := true
	for _, r := range j.records {
		whole = whole && r.end <= written
	}
	if !whole {
		var fit []record
		for _, r := range j.records {
			if r.end <= written {
				fit = append(fit, r)
			}
		}
		return j, j.rewrite(f, fit)
	}
	if keep == 0 {
		return j, j.rewrite(f, nil)
	}
	if err = out.Truncate(keep); err == nil {
		_, err = out.Seek(keep, io.SeekStart)
	}
	return j, plain(err)
}

// rewrite replaces the records. A crash halfway leaves fewer of them, never wrong
// ones.
func (j *journal) rewrite(f *File, records []record) error {
	j.records, j.have = nil, nil
	if err := j.f.Truncate(0); err != nil {
		return plain(err)
	}
	b := journalHeader(f.Size, f.identity())
	for _, r := range records {
		j.records, j.have = append(j.records, r), j.have.add(r.span)
		b = append(b, r.encode()...)
	}
	if _, err := j.f.Seek(0, io.SeekStart); err != nil {
		return plain(err)
	}
	_, err := j.f.Write(b)
	return plain(err)
}

// add enters a run that has arrived and been written.
func (j *journal) add(r record) error {
	if g := j.have.missing(r.span); len(g) != 1 || g[0] != r.span {
		return nil
	}
	if _, err := j.f.Write(r.encode()); err != nil {
		return plain(err)
	}
	j.records, j.have = append(j.records, r), j.have.add(r.span)
	return nil
}

func (j *journal) close() error { return j.f.Close() }
