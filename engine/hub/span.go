package hub

import "slices"

// span is a run of bytes of a file.
type span struct{ off, end int64 }

func (s span) bytes() int64 { return s.end - s.off }

// spans are disjoint runs in ascending order with gaps between them.
type spans []span

// add enters a run, which may touch or overlap others.
func (s spans) add(x span) spans {
	if x.off >= x.end {
		return s
	}
	i, _ := slices.BinarySearchFunc(s, x.off, func(e span, off int64) int {
		if e.end < off {
			return -1
		}
		return 1
	})
	j := i
	for j < len(s) && s[j].off <= x.end {
		x.off, x.end = min(x.off, s[j].off), max(x.end, s[j].end)
		j++
	}
	return slices.Replace(s, i, j, x)
}

// has tells whether all of a run is there.
func (s spans) has(x span) bool {
	for _, e := range s {
		if e.off <= x.off && x.end <= e.end {
			return true
		}
	}
	return x.off >= x.end
}

// missing returns what of x is not there.
func (s spans) missing(x span) spans {
	var gaps spans
	for _, e := range s {
		if e.end <= x.off {
			continue
		}
		if e.off >= x.end {
			break
		}
		if x.off < e.off {
			gaps = append(gaps, span{x.off, e.off})
		}
		x.off = e.end
	}
	if x.off < x.end {
		gaps = append(gaps, x)
	}
	return gaps
}

// overlaps tells whether anything of x is there.
func (s spans) overlaps(x span) bool {
	for _, e := range s {
		if e.off < x.end && x.off < e.end {
			return true
		}
	}
	return false
}

// prefix is how many bytes are there without a gap from the first byte on.
func (s spans) prefix() int64 {
	if len(s) == 0 || s[0].off != 0 {
		return 0
	}
	return s[0].end
}

func (s spans) bytes() int64 {
	var n int64
	for _, e := range s {
		n += e.bytes()
	}
	return n
}

// beyond is how many of the bytes lie beyond the end of a file of size bytes.
func (s spans) beyond(size int64) int64 {
	var n int64
	for _, e := range s {
		n += max(0, e.end-max(e.off, size))
	}
	return n
}

// without takes a run out.
func (s spans) without(x span) spans {
	var rest spans
	for _, e := range s {
		rest = append(rest, spans{x}.missing(e)...)
	}
	return rest
}
