package expert

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math"
	"os"
	"slices"

	"deltafin/engine/checkpoint"
	"deltafin/engine/disk"
)

// Heat counts how often each expert was routed, over many runs. It is advice: a
// heat that is lost or wrong costs speed.
//
// Its file is "DFHEAT", a version byte, the model's [Fingerprint], layer and expert
// counts and one count per expert as uvarints, and the CRC-32C of all of it in four
// little-endian bytes.
type Heat struct {
	print      [32]byte
	first, per int
	count      []uint32
	changed    bool // by Observe
}

const (
	heatMagic   = "DFHEAT"
	heatVersion = 1
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// NewHeat returns a heat in which no expert was routed yet. print is the model's
// [Fingerprint].
func NewHeat(c *checkpoint.Config, print [32]byte) *Heat {
	return &Heat{print: print, first: c.FirstDense, per: c.Experts, count: make([]uint32, (c.Layers-c.FirstDense)*c.Experts)}
}

// Observe counts the routes of a layer: each of ids once, as often as it stands
// there.
func (h *Heat) Observe(layer int, ids []int32) {
	h.changed = true
	row := h.count[(layer-h.first)*h.per:][:h.per]
	for _, id := range ids {
		if row[id] == math.MaxUint32 {
			for i := range h.count { // only ratios matter
				h.count[i] /= 2
			}
		}
		row[id]++
	}
}

// Count returns how often an expert was routed.
func (h *Heat) Count(layer, id int) uint32 { return h.count[(layer-h.first)*h.per+id] }

// Hottest returns up to n experts that were routed, the most frequent first and
// the same set for the same counts, as (layer-FirstDense)*Experts + id.
func (h *Heat) Hottest(n int) []int32 {
	order := h.rank()
	for i, x := range order {
		if h.count[x] == 0 {
			order = order[:i]
			break
		}
	}
	return order[:min(n, len(order))]
}

// All returns all experts, in the order of Hottest and then those that were not routed.
func (h *Heat) All() []int32 { return h.rank() }

// ObserveTrace counts the routes of a trace.
func (h *Heat) ObserveTrace(r *TraceReader) error {
	if r.Fingerprint != h.print || r.First != h.first || r.Experts != h.per || r.Layers != len(h.count)/h.per {
		return errors.New("is of another model: record one with this model")
	}
	for {
		routes, err := r.Next()
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // a run that was killed leaves what it had
			return nil
		}
		if err != nil {
			return err
		}
		h.Observe(routes.Layer, routes.IDs)
	}
}

// rank orders all experts by heat. Among equals all layers' lower ids come first,
// so that a cut treats layers alike.
func (h *Heat) rank() []int32 {
	order := make([]int32, len(h.count))
	for i := range order {
		order[i] = int32(i)
	}
	per := int32(h.per)
	slices.SortFunc(order, func(a, b int32) int {
		return cmp.Or(cmp.Compare(h.count[b], h.count[a]), cmp.Compare(a%per, b%per), cmp.Compare(a, b))
	})
	return order
}

func (h *Heat) encode() []byte {
	b := append([]byte(heatMagic), heatVersion)
	b = append(b, h.print[:]...)
	b = binary.AppendUvarint(b, uint64(len(h.count)/h.per))
	b = binary.AppendUvarint(b, uint64(h.per))
	for _, n := range h.count {
		b = binary.AppendUvarint(b, uint64(n))
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// decode fills h from a file's bytes; on an error h is as it was.
func (h *Heat) decode(b []byte) error {
	const least = len(heatMagic) + 1 + 32 + 4
	if len(b) < least || string(b[:len(heatMagic)]) != heatMagic {
		return errors.New("is no heat file")
	}
	if v := b[len(heatMagic)]; v != heatVersion {
		return fmt.Errorf("has version %d, this program writes %d", v, heatVersion)
	}
	body, sum := b[:len(b)-4], binary.LittleEndian.Uint32(b[len(b)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return errors.New("is damaged: its checksum is wrong")
	}
	r := bytes.NewReader(body[len(heatMagic)+1:])
	var print [32]byte
	if _, err := io.ReadFull(r, print[:]); err != nil {
		return err
	}
	layers, err1 := binary.ReadUvarint(r)
	per, err2 := binary.ReadUvarint(r)
	if err := errors.Join(err1, err2); err != nil {
		return errors.New("is damaged: it ends early")
	}
	if print != h.print || per != uint64(h.per) || layers != uint64(len(h.count)/h.per) {
		return errors.New("is of another model")
	}
	count := make([]uint32, len(h.count))
	for i := range count {
		n, err := binary.ReadUvarint(r)
		if err != nil || n > math.MaxUint32 {
			return errors.New("is damaged: a count is missing or too large")
		}
		count[i] = uint32(n)
	}
	if r.Len() > 0 {
		return errors.New("is damaged: more follows its last count")
	}
	h.count = count
	return nil
}

// LoadHeat reads the heat file at path, which is to be written again. A file that is not
// there, damaged or of another model gives an empty heat; warn is told of the last two.
func LoadHeat(path string, c *checkpoint.Config, print [32]byte, warn func(string)) *Heat {
	h, err := ReadHeat(path, c, print)
	if err == nil {
		return h
	}
	if !errors.Is(err, fs.ErrNotExist) {
		warn(fmt.Sprintf("%v: the heat starts anew, and the file will be replaced", err))
	}
	return NewHeat(c, print)
}

// ReadHeat reads the heat file at path. Its error begins with path.
func ReadHeat(path string, c *checkpoint.Config, print [32]byte) (*Heat, error) {
	h := NewHeat(c, print)
	err := func() error {
		info, err := os.Stat(path)
		if err != nil {
			return reason(err)
		}
		if !info.Mode().IsRegular() || info.Size() > int64(len(h.count))*binary.MaxVarintLen32+100 {
			return errors.New("is no heat file")
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return reason(err)
		}
		return h.decode(b)
	}()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return h, nil
}

// Save writes the heat file at path, whole or not at all.
func (h *Heat) Save(path string) error {
	if err := disk.WriteFile(path, h.encode(), 0o644); err != nil {
		return fmt.Errorf("%s: %w: the heat of this run is lost: name a file in a directory that can be written", path, reason(err))
	}
	return nil
}
