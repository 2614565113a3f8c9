package tokenizer

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// The oracle: a matcher that backtracks, written from the pattern's text alone.
// An expression gets the characters, a position and what has to match after it.

type (
	then func(i int) bool
	expr func(s []rune, i int, next then) bool
	set  func(r rune) bool
)

// invalid stands for a byte that is no part of valid UTF-8.
const invalid = -1

func isIn(tables ...*unicode.RangeTable) set {
	return func(r rune) bool { return r != invalid && unicode.In(r, tables...) }
}

func isOneOf(chars string) set {
	return func(r rune) bool { return r != invalid && strings.ContainsRune(chars, r) }
}

func not(sets ...set) set {
	return func(r rune) bool {
		return !slices.ContainsFunc(sets, func(s set) bool { return s(r) })
	}
}

func and(a, b set) set { return func(r rune) bool { return a(r) && b(r) } }

// between matches lo to hi characters of the set, as many as possible first.
func between(lo, hi int, in set) expr {
	return func(s []rune, i int, next then) bool {
		n := 0
		for n < hi && i+n < len(s) && in(s[i+n]) {
			n++
		}
		for ; n >= lo; n-- {
			if next(i + n) {
				return true
			}
		}
		return false
	}
}

const many = 1 << 30

func seq(parts ...expr) expr {
	return func(s []rune, i int, next then) bool {
		if len(parts) == 0 {
			return next(i)
		}
		return parts[0](s, i, func(i int) bool { return seq(parts[1:]...)(s, i, next) })
	}
}

// foldedOrNothing matches one of the words without regard to case, else nothing.
func foldedOrNothing(words ...string) expr {
	return func(s []rune, i int, next then) bool {
		for _, w := range words {
			n := len(w)
			if i+n <= len(s) && !slices.Contains(s[i:i+n], invalid) && strings.EqualFold(string(s[i:i+n]), w) && next(i+n) {
				return true
			}
		}
		return next(i)
	}
}

func notBefore(in set) expr {
	return func(s []rune, i int, next then) bool { return (i == len(s) || !in(s[i])) && next(i) }
}

var pattern = func() []expr {
	L, N, S := isIn(unicode.L), isIn(unicode.N), isIn(unicode.White_Space)
	Han := isIn(unicode.Han)
	crlf := isOneOf("\r\n")
	prefix := not(crlf, L, N)
	up := and(isIn(unicode.Lu, unicode.Lt, unicode.Lm, unicode.Lo, unicode.M), not(Han))
	lo := and(isIn(unicode.Ll, unicode.Lm, unicode.Lo, unicode.M), not(Han))
	suffix := foldedOrNothing("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
	return []expr{
		between(1, many, Han),
		seq(between(0, 1, prefix), between(0, many, up), between(1, many, lo), suffix),
		seq(between(0, 1, prefix), between(1, many, up), between(0, many, lo), suffix),
		between(1, 3, N),
		seq(between(0, 1, isOneOf(" ")), between(1, many, not(S, L, N)), between(0, many, crlf)),
		seq(between(0, many, S), between(1, many, crlf)),
		seq(between(1, many, S), notBefore(not(S))),
		between(1, many, S),
	}
}()

// oraclePieces splits text by trying the alternatives in order, as the pattern's
// words say.
func oraclePieces(text string) []string {
	var s []rune
	var size []int
	for b := []byte(text); len(b) > 0; {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			r = invalid
		}
		s, size, b = append(s, r), append(size, n), b[n:]
	}
	var pieces []string
	at := 0
	for i := 0; i < len(s); {
		end := -1
		for _, p := range pattern {
			if p(s, i, func(e int) bool { end = e; return true }) {
				break
			}
		}
		if end <= i {
			return append(pieces, "NO MATCH")
		}
		n := 0
		for _, b := range size[i:end] {
			n += b
		}
		pieces = append(pieces, text[at:at+n])
		at, i = at+n, end
	}
	return pieces
}

func scannedPieces(text string) []string {
	var pieces []string
	for text != "" {
		n := classes().piece(text)
		if n <= 0 {
			return append(pieces, "NO MATCH")
		}
		pieces = append(pieces, text[:n])
		text = text[n:]
	}
	return pieces
}

func TestSplitOfKnownTexts(t *testing.T) {
	for _, c := range []struct {
		text string
		want []string
	}{
		{"Hello, world!", []string{"Hello", ",", " world", "!"}},
		{"Hello\n\nworld  ", []string{"Hello", "\n\n", "world", "  "}},
		{"I'M we're they'LL 1234567", []string{"I'M", " we're", " they'LL", " ", "123", "456", "7"}},
		{"it'ſ 'tis", []string{"it'ſ", " '", "tis"}},
		{"Hello世界! 今天是2024年", []string{"Hello", "世界", "!", " ", "今天是", "202", "4", "年"}},
		{"漢字〇々a", []string{"漢字〇々", "a"}},
		{"1〇2x", []string{"1〇2", "x"}},
		{"!⺀漢", []string{"!⺀", "漢"}},
		{"fooBAR XMLHttpRequest", []string{"foo", "BAR", " XMLHttp", "Request"}},
		{"   x\t\ty \n  \n z", []string{"  ", " x", "\t", "\ty", " \n  \n", " z"}},
		{"a\u001cb", []string{"a", "\u001cb"}},
		{" \u001c a", []string{" \u001c", " a"}},
		{"a\u2028b", []string{"a", "\u2028b"}},
		{"x\"<|sep|>", []string{"x", "\"<|", "sep", "|>"}},
		{"e\u0301te\u0301", []string{"e\u0301te\u0301"}},
		{"\u0301A", []string{"\u0301", "A"}},
		{"ʰABC", []string{"ʰ", "ABC"}},
		{"\xffok\xfe\xfeok\xc3", []string{"\xffok", "\xfe\xfe", "ok", "\xc3"}},
	} {
		if got := scannedPieces(c.text); !slices.Equal(got, c.want) {
			t.Errorf("pieces of %q = %q, want %q", c.text, got, c.want)
		}
		if got := oraclePieces(c.text); !slices.Equal(got, c.want) {
			t.Errorf("the oracle's pieces of %q = %q, want %q", c.text, got, c.want)
		}
	}
}

// alphabet has characters on both sides of every distinction the pattern makes.
var alphabet = []string{
	"a", "z", "s", "t", "l", "r", "e", "v", "m", "d", "A", "Z", "S", "T", "L", "R", "E", "ſ",
	"'", "'", "’", " ", " ", "\t", "\n", "\r", "\u00a0", "\u0085", "\u2028", "\u3000", "\u001c", "\u001f", "\u200b", "\ufeff",
	"é", "É", "ǅ", "ʰ", "ª", "ك", "あ", "ー", "ˇ", "\u0301", "\u0903", "\u20dd", "\ufe0f",
	"漢", "字", "々", "〇", "〡", "⺀", "\U00020000", "\U00016ff0", "\U00016fe2", "한",
	"1", "9", "½", "٣", "Ⅷ", "!", "\"", "<", "|", "_", "-", "🙂", "👩\u200d💻", "\u00ad", "�",
	"\xff", "\x80", "\xe2\x82", "\xf0\x9f", "\xed\xa0\x80", "\x00", "\x7f",
}

func randomText(rnd *rand.Rand) string {
	var b strings.Builder
	letters := alphabet
	if rnd.IntN(2) == 0 { // few different characters make the long runs
		letters = nil
		for range 1 + rnd.IntN(5) {
			letters = append(letters, alphabet[rnd.IntN(len(alphabet))])
		}
	}
	for range rnd.IntN(24) {
		b.WriteString(letters[rnd.IntN(len(letters))])
	}
	return b.String()
}

func TestSplitIsThePattern(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 30000 {
		text := randomText(rnd)
		if got, want := scannedPieces(text), oraclePieces(text); !slices.Equal(got, want) {
			t.Fatalf("pieces of %q = %q, want %q", text, got, want)
		}
	}
}

func FuzzSplit(f *testing.F) {
	f.Add("Hello, world's 1234\r\n  x")
	f.Add(strings.Join(alphabet, ""))
	f.Add("ʰABC'LL\u0301\u0301A漢⺀1〇")
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > 1000 {
			text = text[:1000] // the oracle is slow
		}
		if got, want := scannedPieces(text), oraclePieces(text); !slices.Equal(got, want) {
			t.Fatalf("pieces of %q = %q, want %q", text, got, want)
		}
	})
}

func TestEveryCharacterHasTheClassItsPropertiesSay(t *testing.T) {
	table := classes()
	for r := range rune(unicode.MaxRune + 1) {
		var want class
		isHan := unicode.Is(unicode.Han, r)
		for _, p := range []struct {
			is bool
			c  class
		}{
			{isHan, han},
			{unicode.Is(unicode.L, r), letter},
			{unicode.Is(unicode.N, r), number},
			{unicode.Is(unicode.White_Space, r), space},
			{r == '\r' || r == '\n', newline},
			{!isHan && unicode.In(r, unicode.Lu, unicode.Lt, unicode.Lm, unicode.Lo, unicode.M), upper},
			{!isHan && unicode.In(r, unicode.Ll, unicode.Lm, unicode.Lo, unicode.M), lower},
		} {
			if p.is {
				want |= p.c
			}
		}
		if table[r] != want {
			t.Fatalf("class of %U is %07b, want %07b", r, table[r], want)
		}
	}
}

func TestLongTextIsCut(t *testing.T) {
	const a, sp = "a", " "
	rep := strings.Repeat
	for _, c := range []struct {
		name string
		text string
		want []int // code points of the parts
	}{
		{"nothing", "", nil},
		{"a run at the limit", rep(a, 25000), []int{25000}},
		{"a run over the limit", rep(a, 25001), []int{25000, 1}},
		{"a run of spaces over the limit", rep(sp, 50001), []int{25000, 25000, 1}},
		{"runs that change at the limit", rep(a, 25000) + rep(sp, 25000) + a, []int{50001}},
		{"separators counting as space, not breaking a run", rep("\u001c ", 12500) + "\u001f" + a, []int{25000, 2}},
		{"code points, not bytes", rep("🙂", 25001), []int{25000, 1}},
		{"invalid bytes counting one each", rep("\xff", 25001), []int{25000, 1}},
		{"short runs in more than a slice", rep("a ", 200001), []int{400000, 2}},
		{"a slice starting its runs anew", rep("a ", 190000) + rep(a, 40000), []int{400000, 20000}},
	} {
		var got []int
		joined := ""
		for p := range parts(c.text, classes()) {
			got = append(got, utf8.RuneCountInString(p))
			joined += p
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: parts of %v code points, want %v", c.name, got, c.want)
		}
		if joined != c.text {
			t.Errorf("%s: the parts do not join to the text", c.name)
		}
	}
}
