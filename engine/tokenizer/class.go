package tokenizer

import (
	"sync"
	"unicode"
	"unicode/utf8"
)

// class is a set of the character classes that the split pattern (spec D.2)
// speaks of. A character in none of them is what the pattern calls
// [^\s\p{L}\p{N}].
type class uint8

const (
	han     class = 1 << iota // \p{Han}: Script=Han, which also holds numbers (〇) and symbols (radicals)
	letter                    // \p{L}
	number                    // \p{N}
	space                     // \s: White_Space
	newline                   // \r \n
	upper                     // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
	lower                     // [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
)

// classTable holds the class of every code point: 1.1 MB of address space, of
// which only the pages with assigned characters are ever touched.
type classTable [unicode.MaxRune + 1]class

// classes fills the table once, walking the ranges of each class instead of
// asking about every code point.
var classes = sync.OnceValue(func() *classTable {
	t := new(classTable)
	add := func(c class, tables ...*unicode.RangeTable) {
		for _, table := range tables {
			eachRune(table, func(r rune) { t[r] |= c })
		}
	}
	add(letter, unicode.L)
	add(number, unicode.N)
	add(space, unicode.White_Space)
	add(upper, unicode.Lu, unicode.Lt, unicode.Lm, unicode.Lo, unicode.M)
	add(lower, unicode.Ll, unicode.Lm, unicode.Lo, unicode.M)
	eachRune(unicode.Han, func(r rune) { t[r] = t[r]&^(upper|lower) | han })
	t['\r'] |= newline
	t['\n'] |= newline
	return t
})

func eachRune(table *unicode.RangeTable, do func(rune)) {
	for _, r := range table.R16 {
		for x := rune(r.Lo); x <= rune(r.Hi); x += rune(r.Stride) {
			do(x)
		}
	}
	for _, r := range table.R32 {
		for x := rune(r.Lo); x <= rune(r.Hi); x += rune(r.Stride) {
			do(x)
		}
	}
}

// at gives the class and the size in bytes of the character at s[i:]. A byte that
// is no part of valid UTF-8 is a character of its own, in no class.
func (t *classTable) at(s string, i int) (class, int) {
	if b := s[i]; b < utf8.RuneSelf {
		return t[b], 1
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	return t[r], n // U+FFFD is in no class
}

// run gives the end of the characters from s[i:] on that are in one of the
// classes.
func (t *classTable) run(s string, i int, in class) int {
	for i < len(s) {
		c, n := t.at(s, i)
		if c&in == 0 {
			break
		}
		i += n
	}
	return i
}

// pythonSpace is Python's str.isspace, by which very long text is cut: the four
// separators U+001C to U+001F count as space there, not in the pattern.
func (t *classTable) pythonSpace(r rune) bool {
	return t[r]&space != 0 || r >= 0x1c && r <= 0x1f
}
