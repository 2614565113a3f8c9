package checkpoint

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
)

// DType is the element type of a stored tensor.
type DType uint8

// The element types that a safetensors file may declare. Kimi K3's text model
// uses F32, BF16 and U8 (spec B.2); the others only occur in tensors that are
// skipped.
const (
	invalid DType = iota
	F32
	BF16
	U8
	Bool
	I8
	F8E5M2
	F8E4M3
	F8E8M0
	I16
	U16
	F16
	I32
	U32
	F64
	I64
	U64
)

var dtypes = [...]struct {
	name string
	size int64
}{
	invalid: {"?", 0},
	F32:     {"F32", 4}, BF16: {"BF16", 2}, U8: {"U8", 1},
	Bool: {"BOOL", 1}, I8: {"I8", 1}, F8E5M2: {"F8_E5M2", 1}, F8E4M3: {"F8_E4M3", 1}, F8E8M0: {"F8_E8M0", 1},
	I16: {"I16", 2}, U16: {"U16", 2}, F16: {"F16", 2},
	I32: {"I32", 4}, U32: {"U32", 4},
	F64: {"F64", 8}, I64: {"I64", 8}, U64: {"U64", 8},
}

// String returns the name that safetensors uses, such as "BF16".
func (d DType) String() string {
	if int(d) < len(dtypes) {
		return dtypes[d].name
	}
	return dtypes[invalid].name
}

// Size returns the bytes of one element.
func (d DType) Size() int64 {
	if int(d) < len(dtypes) {
		return dtypes[d].size
	}
	return 0
}

func dtypeNamed(s string) DType {
	for d := F32; int(d) < len(dtypes); d++ {
		if dtypes[d].name == s {
			return d
		}
	}
	return invalid
}

const (
	headerLimit  = 100_000_000 // bytes of JSON, the limit of the format's own library
	headerPrefix = 8           // the little-endian length in front of it
	rankLimit    = 8
	nameLimit    = 512
)

// entry is one tensor of a shard header. Begin and end count from the first byte
// of the file.
type entry struct {
	name       string
	dtype      DType
	shape      []int
	begin, end int64
}

// parseHeader reads the header of a safetensors file of size bytes from r, calls
// emit for every tensor in the order of the header, and then checks that the
// tensors cover the data section without gap or overlap up to the last byte of
// the file. r is read no further than the header ends. Errors name no file.
func parseHeader(r io.Reader, size int64, emit func(entry) error) error {
	var prefix [headerPrefix]byte
	if size < headerPrefix {
		return fmt.Errorf("is %d bytes long, too short for a safetensors file: the download is incomplete, fetch the file again", size)
	}
	if _, err := io.ReadFull(r, prefix[:]); err != nil {
		return fmt.Errorf("header cannot be read: %w", err)
	}
	length := binary.LittleEndian.Uint64(prefix[:])
	if length > headerLimit {
		return fmt.Errorf("claims a header of %d bytes, more than the %d allowed: not a safetensors file, fetch it again", length, headerLimit)
	}
	if int64(length) > size-headerPrefix {
		return fmt.Errorf("claims a header of %d bytes but is %d bytes long: the file is truncated, fetch it again", length, size)
	}
	data := headerPrefix + int64(length)

	type span struct {
		begin, end int64
	}
	var spans []span
	seen := map[string]struct{}{}
	var names []string

	t := newTokens(io.LimitReader(r, int64(length)))
	if err := t.open('{'); err != nil {
		return fmt.Errorf("header: %w", err)
	}
	for t.dec.More() {
		name, err := t.text()
		if err != nil {
			return fmt.Errorf("header: %w", err)
		}
		if len(name) > nameLimit {
			return fmt.Errorf("header: tensor name %s is longer than %d bytes", quoted(name), nameLimit)
		}
		if _, dup := seen[name]; dup {
			return fmt.Errorf("header: %s is given twice", quoted(name))
		}
		seen[name] = struct{}{}
		if name == "__metadata__" {
			if _, err := t.value(2); err != nil {
				return fmt.Errorf("header: __metadata__: %w", err)
			}
			continue
		}
		e, err := parseEntry(t)
		if err != nil {
			return fmt.Errorf("header: tensor %s: %w", quoted(name), err)
		}
		if e.end > math.MaxInt64-data {
			return fmt.Errorf("header: tensor %s ends at byte %d of the data, beyond any file", quoted(name), e.end)
		}
		e.name = name
		e.begin += data
		e.end += data
		spans = append(spans, span{e.begin, e.end})
		names = append(names, name)
		if err := emit(e); err != nil {
			return err
		}
	}
	if err := t.close(); err != nil {
		return fmt.Errorf("header: %w", err)
	}
	if err := t.end(); err != nil {
		return fmt.Errorf("header: %w", err)
	}

	order := make([]int32, len(spans))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortFunc(order, func(a, b int32) int {
		x, y := spans[a], spans[b]
		return cmp.Or(cmp.Compare(x.begin, y.begin), cmp.Compare(x.end, y.end))
	})
	at := data
	for _, i := range order {
		switch s := spans[i]; {
		case s.begin < at:
			return fmt.Errorf("header: tensor %s starts at byte %d, inside the tensor before it, which ends at %d", quoted(names[i]), s.begin, at)
		case s.begin > at:
			return fmt.Errorf("header: tensor %s starts at byte %d, leaving a gap after byte %d", quoted(names[i]), s.begin, at)
		default:
			at = s.end
		}
	}
	switch {
	case size < at:
		return fmt.Errorf("is %d bytes long, %d short of the %d its header describes: the file is truncated, fetch it again", size, at-size, at)
	case size > at:
		return fmt.Errorf("is %d bytes long, %d more than the %d its header describes: fetch it again", size, size-at, at)
	}
	return nil
}

// parseEntry reads {"dtype":..., "shape":[...], "data_offsets":[begin,end]}; the
// offsets of the result count from the start of the data section.
func parseEntry(t *tokens) (entry, error) {
	var e entry
	var dtype string
	var haveType, haveShape, haveOffsets bool
	if err := t.open('{'); err != nil {
		return e, err
	}
	twice := func(key string) error { return fmt.Errorf("%s is given twice", key) }
	for t.dec.More() {
		key, err := t.text()
		if err != nil {
			return e, err
		}
		switch key {
		case "dtype":
			if haveType {
				return e, twice(key)
			}
			haveType = true
			if dtype, err = t.text(); err != nil {
				return e, fmt.Errorf("dtype: %w", err)
			}
			if e.dtype = dtypeNamed(dtype); e.dtype == invalid {
				return e, fmt.Errorf("dtype %s is not known", quoted(dtype))
			}
		case "shape":
			if haveShape {
				return e, twice(key)
			}
			haveShape = true
			if err := t.open('['); err != nil {
				return e, fmt.Errorf("shape: %w", err)
			}
			for t.dec.More() {
				n, err := t.count()
				if err != nil {
					return e, fmt.Errorf("shape: %w", err)
				}
				if n > math.MaxInt32 {
					return e, fmt.Errorf("shape: dimension %d is not believable", n)
				}
				if len(e.shape) == rankLimit {
					return e, fmt.Errorf("shape has more than %d dimensions", rankLimit)
				}
				e.shape = append(e.shape, int(n))
			}
			if err := t.close(); err != nil {
				return e, fmt.Errorf("shape: %w", err)
			}
		case "data_offsets":
			if haveOffsets {
				return e, twice(key)
			}
			haveOffsets = true
			if err := t.open('['); err != nil {
				return e, fmt.Errorf("data_offsets: %w", err)
			}
			for _, p := range []*int64{&e.begin, &e.end} {
				if *p, err = t.count(); err != nil {
					return e, fmt.Errorf("data_offsets: %w", err)
				}
			}
			if t.dec.More() {
				return e, errors.New("data_offsets has more than two numbers")
			}
			if err := t.close(); err != nil {
				return e, fmt.Errorf("data_offsets: %w", err)
			}
		default:
			return e, fmt.Errorf("has the unknown field %s", quoted(key))
		}
	}
	if err := t.close(); err != nil {
		return e, err
	}
	switch {
	case !haveType:
		return e, errors.New("has no dtype")
	case !haveShape:
		return e, errors.New("has no shape")
	case !haveOffsets:
		return e, errors.New("has no data_offsets")
	case e.end < e.begin:
		return e, fmt.Errorf("ends at byte %d, before its start %d", e.end, e.begin)
	}
	want, ok := byteLen(e.dtype, e.shape)
	if !ok {
		return e, fmt.Errorf("shape %v is larger than any file", e.shape)
	}
	if e.end-e.begin != want {
		return e, fmt.Errorf("has %d bytes, expected %d for %s %v", e.end-e.begin, want, e.dtype, e.shape)
	}
	return e, nil
}

// byteLen returns the bytes of a dense tensor, or false when they overflow int64.
func byteLen(d DType, shape []int) (int64, bool) {
	n := d.Size()
	for _, dim := range shape {
		if dim != 0 && n > math.MaxInt64/int64(dim) {
			return 0, false
		}
		n *= int64(dim)
	}
	return n, true
}
