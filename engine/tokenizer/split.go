package tokenizer

import (
	"iter"
	"unicode/utf8"
)

// The cuts of very long text, in code points (spec D.3).
const (
	sliceRunes = 400000
	runRunes   = 25000
)

// parts cuts text as the model's own encoder does before anything else (spec
// D.3): slices of 400000 code points, and within a slice a new part wherever a
// run of whitespace or of non-whitespace would exceed 25000. Pieces and merges
// never cross a cut, which also keeps every later step near-linear.
func parts(text string, class *classTable) iter.Seq[string] {
	return func(yield func(string) bool) {
		if len(text) <= runRunes {
			if text != "" {
				yield(text)
			}
			return
		}
		start, inSlice, inRun, wasSpace := 0, 0, 0, false
		for i, r := range text { // an invalid byte counts as one code point
			isSpace := class.pythonSpace(r)
			switch {
			case inSlice == sliceRunes:
				if !yield(text[start:i]) {
					return
				}
				start, inSlice, inRun = i, 0, 0
			case isSpace != wasSpace:
				inRun = 0
			case inRun == runRunes:
				if !yield(text[start:i]) {
					return
				}
				start, inRun = i, 0
			}
			inSlice++
			inRun++
			wasSpace = isSpace
		}
		yield(text[start:])
	}
}

// piece gives the length in bytes of the first piece of s, which is not empty.
// It is the split pattern (spec D.2), eight alternatives of which the first that
// matches wins, each with the semantics of a backtracking matcher:
//
//	1  [\p{Han}]+
//	2  prefix? upper* lower+ contraction?
//	3  prefix? upper+ lower* contraction?
//	4  \p{N}{1,3}
//	5  ' '? other+ [\r\n]*
//	6  \s*[\r\n]+
//	7  \s+(?!\S)
//	8  \s+
//
// where prefix is [^\r\n\p{L}\p{N}] and other is [^\s\p{L}\p{N}]. Marks and
// letters without case are both upper and lower, and marks are prefixes too;
// everything that needs care comes from that. The scan is linear: it reads a run
// of one class at most a few times before the run is consumed.
func (t *classTable) piece(s string) int {
	c, n := t.at(s, 0)
	if c&han != 0 {
		return t.run(s, n, han)
	}
	prefix := c&(newline|letter|number) == 0

	if prefix {
		if end := t.word(s, n); end > n {
			return contraction(s, end)
		}
	}
	if end := t.word(s, 0); end > 0 {
		return contraction(s, end)
	}

	// Here no lower follows the upper run, or alternative 2 had matched: lower*
	// is empty.
	if prefix {
		if end := t.run(s, n, upper); end > n {
			return contraction(s, end)
		}
	}
	if end := t.run(s, 0, upper); end > 0 {
		return contraction(s, end)
	}

	if c&number != 0 {
		end := n
		for range 2 {
			if end == len(s) {
				break
			}
			c, n := t.at(s, end)
			if c&number == 0 {
				break
			}
			end += n
		}
		return end
	}

	start := 0
	if s[0] == ' ' {
		start = 1
	}
	if end := t.others(s, start); end > start {
		return t.run(s, end, newline)
	}
	return t.spaces(s)
}

// word matches upper* lower+ at s[i:] and gives its end, or i when there is no
// match. upper* first takes all it can. If a lower follows, lower+ runs on from
// there; if not, the matcher gives characters back until lower+ can take one: the
// last of the upper run that is lower as well, and that one only, since what
// comes after it is not lower.
func (t *classTable) word(s string, i int) int {
	back := i
	for i < len(s) {
		c, n := t.at(s, i)
		if c&upper == 0 {
			if c&lower != 0 {
				return t.run(s, i+n, lower)
			}
			break
		}
		i += n
		if c&lower != 0 {
			back = i
		}
	}
	return back
}

// others gives the end of the run of characters in no class (Han symbols count
// as such here) from s[i:] on.
func (t *classTable) others(s string, i int) int {
	for i < len(s) {
		c, n := t.at(s, i)
		if c&(space|letter|number) != 0 {
			break
		}
		i += n
	}
	return i
}

// spaces is alternatives 6 to 8 on a run of whitespace at the start of s: up to
// and with its last line break; without one, the whole run at the end of the
// text, else all but its last character, which may belong to what follows.
func (t *classTable) spaces(s string) int {
	i, last, broken := 0, 0, 0
	for i < len(s) {
		c, n := t.at(s, i)
		if c&space == 0 {
			break
		}
		last = i
		i += n
		if c&newline != 0 {
			broken = i
		}
	}
	switch {
	case broken > 0:
		return broken
	case i == len(s) || last == 0:
		return i
	default:
		return last
	}
}

// contraction matches (?i:'s|'t|'re|'ve|'m|'ll|'d)? at s[i:] and gives its end.
// Case folding makes U+017F (ſ) an s.
func contraction(s string, i int) int {
	if i+1 >= len(s) || s[i] != '\'' {
		return i
	}
	rest := s[i+1:]
	second := byte(0)
	if len(rest) > 1 {
		second = rest[1] | 0x20
	}
	switch rest[0] | 0x20 {
	case 's', 't', 'm', 'd':
		return i + 2
	case 'r', 'v':
		if second == 'e' {
			return i + 3
		}
	case 'l':
		if second == 'l' {
			return i + 3
		}
	}
	if r, n := utf8.DecodeRuneInString(rest); r == 'ſ' {
		return i + 1 + n
	}
	return i
}
