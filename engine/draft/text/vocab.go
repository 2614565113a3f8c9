package text

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// Bounds on what an untrusted tokenizer.json can make us allocate. That of Qwen3 is
// 11 MB with 151,643 tokens, 151,387 merges and 26 added tokens.
const (
	vocabFileLimit = 64 << 20
	mergeLimit     = 1 << 20
	addedLimit     = 1 << 12
	tokenLimit     = 1 << 10 // bytes of a token

	// A piece of more bytes is cut, so that the merges of one cost little. Only
	// guesses depend on it.
	pieceLimit = 512
)

// splitPattern is the split of Qwen2's and Qwen3's tokenizers, which [piece] implements.
const splitPattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// vocab is a byte-level BPE as a tokenizer.json describes it.
type vocab struct {
	tokens  []string // id -> bytes; "" where there is none, and for added tokens
	byteID  [256]int32
	merges  map[uint64]merge // by the ids of both sides
	added   map[string]int32
	compose bool // text is brought into NFC first
}

type merge struct{ rank, id int32 }

func sides(left, right int32) uint64 { return uint64(left)<<32 | uint64(right) }

// vocabFile is the part of a tokenizer.json that matters.
type vocabFile struct {
	Added []struct {
		ID      int    `json:"id"`
		Content string `json:"content"`
	} `json:"added_tokens"`
	Normalizer *struct {
		Type string `json:"type"`
	} `json:"normalizer"`
	PreTokenizer struct {
		Type  string `json:"type"`
		Parts []struct {
			Type    string `json:"type"`
			Pattern struct {
				Regex string `json:"Regex"`
			} `json:"pattern"`
			Behavior       string `json:"behavior"`
			Invert         bool   `json:"invert"`
			AddPrefixSpace bool   `json:"add_prefix_space"`
			UseRegex       *bool  `json:"use_regex"`
		} `json:"pretokenizers"`
	} `json:"pre_tokenizer"`
	Model struct {
		Type         string         `json:"type"`
		Dropout      *float64       `json:"dropout"`
		Prefix       *string        `json:"continuing_subword_prefix"`
		Suffix       *string        `json:"end_of_word_suffix"`
		ByteFallback bool           `json:"byte_fallback"`
		IgnoreMerges bool           `json:"ignore_merges"`
		Vocab        map[string]int `json:"vocab"`
		Merges       []pair         `json:"merges"`
	} `json:"model"`
}

// pair is the two sides of a merge: "a b" in older files, ["a","b"] in newer ones.
type pair [2]string

func (p *pair) UnmarshalJSON(b []byte) error {
	var two []string
	if b[0] == '"' {
		var one string
		if err := json.Unmarshal(b, &one); err != nil {
			return err
		}
		two = strings.Split(one, " ")
	} else if err := json.Unmarshal(b, &two); err != nil {
		return err
	}
	if len(two) != 2 {
		return fmt.Errorf("merge %.60q has %d sides, not 2", b, len(two))
	}
	*p = pair(two)
	return nil
}

// readVocab reads the tokenizer.json of a model with that many rows.
func readVocab(path string, rows int) (*vocab, error) {
	// Opening a pipe would wait for its other end.
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("%w: put the tokenizer.json that belongs to the weights there", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file: put the model's own file there", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, vocabFileLimit+1))
	if err != nil {
		return nil, err
	}
	v, err := parseVocab(b, rows)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: use the tokenizer.json that belongs to the weights", path, err)
	}
	return v, nil
}

func parseVocab(b []byte, rows int) (*vocab, error) {
	if len(b) > vocabFileLimit {
		return nil, fmt.Errorf("more than %d bytes", vocabFileLimit)
	}
	var f vocabFile
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, err
	}
	if err := f.check(); err != nil {
		return nil, err
	}
	v := &vocab{tokens: make([]string, rows), merges: map[uint64]merge{}, added: map[string]int32{}, compose: f.Normalizer != nil}
	taken := make([]bool, rows)
	take := func(name string, id int) error {
		switch {
		case id < 0 || id >= rows:
			return fmt.Errorf("token %.60q has id %d, but the model has %d rows", name, id, rows)
		case taken[id]:
			return fmt.Errorf("id %d is given twice, once to %.60q", id, name)
		}
		taken[id] = true
		return nil
	}
	for name, id := range f.Model.Vocab {
		if err := take(name, id); err != nil {
			return nil, err
		}
		bytes, ok := rawBytes(name)
		if !ok || bytes == "" || len(bytes) > tokenLimit {
			return nil, fmt.Errorf("token %.60q with id %d is no byte-level token of at most %d bytes", name, id, tokenLimit)
		}
		v.tokens[id] = bytes
	}
	for i := range 256 {
		id, ok := f.Model.Vocab[string(byteRunes[i])]
		if !ok {
			return nil, fmt.Errorf("byte %d has no token", i)
		}
		v.byteID[i] = int32(id)
	}
	for rank, m := range f.Model.Merges {
		left, ok := f.Model.Vocab[m[0]]
		right, ok2 := f.Model.Vocab[m[1]]
		id, ok3 := f.Model.Vocab[m[0]+m[1]]
		if !ok || !ok2 || !ok3 {
			return nil, fmt.Errorf("merge %d, %.60q, has a side or a result that is no token", rank, m)
		}
		key := sides(int32(left), int32(right))
		if _, twice := v.merges[key]; twice {
			return nil, fmt.Errorf("merge %d, %.60q, is given twice", rank, m)
		}
		v.merges[key] = merge{int32(rank), int32(id)}
	}
	for _, a := range f.Added {
		if _, twice := v.added[a.Content]; twice || a.Content == "" || len(a.Content) > tokenLimit {
			return nil, fmt.Errorf("added token %.60q is empty, too long or given twice", a.Content)
		}
		if err := take(a.Content, a.ID); err != nil {
			return nil, err
		}
		v.added[a.Content] = int32(a.ID)
	}
	return v, nil
}

// check demands the one kind of tokenizer that is implemented.
func (f *vocabFile) check() error {
	m, off := &f.Model, func(s *string) bool { return s == nil || *s == "" }
	switch {
	case m.Type != "BPE" || m.Dropout != nil || !off(m.Prefix) || !off(m.Suffix) || m.ByteFallback || m.IgnoreMerges:
		return fmt.Errorf("model is not a plain byte-level BPE (type %.60q)", m.Type)
	case len(m.Merges) > mergeLimit:
		return fmt.Errorf("%d merges, more than the %d allowed", len(m.Merges), mergeLimit)
	case len(f.Added) > addedLimit:
		return fmt.Errorf("%d added tokens, more than the %d allowed", len(f.Added), addedLimit)
	case f.Normalizer != nil && f.Normalizer.Type != "NFC":
		return fmt.Errorf("normalizer is %.60q, not NFC", f.Normalizer.Type)
	}
	p := f.PreTokenizer
	if p.Type != "Sequence" || len(p.Parts) != 2 || p.Parts[0].Type != "Split" || p.Parts[1].Type != "ByteLevel" {
		return fmt.Errorf("pre_tokenizer is not a Split and a ByteLevel")
	}
	if s := p.Parts[0]; s.Pattern.Regex != splitPattern || s.Behavior != "Isolated" || s.Invert {
		return fmt.Errorf("pre_tokenizer splits by %.120q, not as Qwen2 and Qwen3 do", s.Pattern.Regex)
	}
	if l := p.Parts[1]; l.AddPrefixSpace || l.UseRegex == nil || *l.UseRegex {
		return fmt.Errorf("pre_tokenizer's ByteLevel adds a space or splits again")
	}
	return nil
}

// byteRunes is the character that stands for each byte in a byte-level vocabulary: itself if
// it prints in Latin-1, else the next free one from U+0100 on, in the order of the bytes.
var byteRunes = func() (t [256]rune) {
	next := rune(256)
	for b := range rune(256) {
		if b > ' ' && b < 127 || b > 160 && b != 173 {
			t[b] = b
		} else {
			t[b], next = next, next+1
		}
	}
	return t
}()

var runeBytes = func() map[rune]byte {
	m := map[rune]byte{}
	for b, r := range byteRunes {
		m[r] = byte(b)
	}
	return m
}()

// rawBytes gives the bytes that a name of the vocabulary stands for.
func rawBytes(name string) (string, bool) {
	b := make([]byte, 0, len(name))
	for _, r := range name {
		x, ok := runeBytes[r]
		if !ok {
			return "", false
		}
		b = append(b, x)
	}
	return string(b), true
}

// encode appends the ids of text, in which spellings of added tokens are ordinary. Text
// that is not valid UTF-8 is encoded byte by byte.
func (v *vocab) encode(ids []int32, text []byte) []int32 {
	if v.compose {
		text = norm.NFC.Bytes(text)
	}
	for len(text) > 0 {
		n := piece(text)
		for n > 0 {
			cut := min(n, pieceLimit)
			ids = v.piece(ids, text[:cut])
			text, n = text[cut:], n-cut
		}
	}
	return ids
}

// piece merges, again and again, the adjacent pair of the lowest rank, the leftmost of equals.
func (v *vocab) piece(ids []int32, s []byte) []int32 {
	first := len(ids)
	for _, b := range s {
		ids = append(ids, v.byteID[b])
	}
	for {
		best, at := merge{rank: -1}, 0
		for i := first; i+1 < len(ids); i++ {
			if m, ok := v.merges[sides(ids[i], ids[i+1])]; ok && (best.rank < 0 || m.rank < best.rank) {
				best, at = m, i
			}
		}
		if best.rank < 0 {
			return ids
		}
		ids[at] = best.id
		ids = append(ids[:at+1], ids[at+2:]...)
	}
}

// class is what the split pattern asks of a character.
type class uint8

const (
	other class = iota // [^\s\p{L}\p{N}], bytes that are no character included
	letter
	number
	newline // \r and \n, which are also white space
	space
)

// at gives the class and the length of the character at s[i:].
func at(s []byte, i int) (class, int) {
	r, n := utf8.DecodeRune(s[i:])
	switch {
	case r == '\r' || r == '\n':
		return newline, n
	case unicode.IsLetter(r):
		return letter, n
	case unicode.IsNumber(r):
		return number, n
	case unicode.IsSpace(r):
		return space, n
	}
	return other, n
}

// run gives the end of the characters of the class from s[i:] on.
func run(s []byte, i int, in class) int {
	for i < len(s) {
		c, n := at(s, i)
		if c != in {
			break
		}
		i += n
	}
	return i
}

// piece is the length of the first piece of s, which is not empty. The alternatives of
// [splitPattern] are tried in its order.
func piece(s []byte) int {
	if n := contraction(s); n > 0 {
		return n
	}
	c, n := at(s, 0)
	if c == letter {
		return run(s, n, letter)
	}
	if c == other || c == space {
		if end := run(s, n, letter); end > n {
			return end
		}
	}
	if c == number {
		return n
	}
	start := 0
	if s[0] == ' ' {
		start = 1
	}
	if end := run(s, start, other); end > start {
		return run(s, end, newline)
	}
	// White space: up to and with its last line break; without one all at the end of the
	// text, else all but its last character, which may belong to what follows.
	i, last, broken := 0, 0, 0
	for i < len(s) {
		c, n := at(s, i)
		if c != space && c != newline {
			break
		}
		last = i
		i += n
		if c == newline {
			broken = i
		}
	}
	switch {
	case broken > 0:
		return broken
	case i == len(s) || last == 0:
		return i
	}
	return last
}

// contraction is the length of (?i:'s|'t|'re|'ve|'m|'ll|'d) at the beginning of s, or 0.
func contraction(s []byte) int {
	if len(s) < 2 || s[0] != '\'' {
		return 0
	}
	switch s[1] | 0x20 {
	case 's', 't', 'm', 'd':
		return 2
	}
	if len(s) > 2 {
		switch string([]byte{s[1] | 0x20, s[2] | 0x20}) {
		case "re", "ve", "ll":
			return 3
		}
	}
	if r, n := utf8.DecodeRune(s[1:]); r == 'ſ' { // folds to s
		return 1 + n
	}
	return 0
}

// join is the bytes of ids.
func (v *vocab) join(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(v.tokens[id])
	}
	return b.String()
}

// beginning is the tokens that begin with s and go on.
func (v *vocab) beginning(s string) (ids []int32) {
	for id, t := range v.tokens {
		if len(t) > len(s) && strings.HasPrefix(t, s) {
			ids = append(ids, int32(id))
		}
	}
	return ids
}

// border says that both this split and K3's always cut between the characters a and b,
// whatever is around them, so that what is on either side may be encoded by itself. It is false
// more often than it must be.
func border(a, b rune) bool {
	if a == utf8.RuneError || b == utf8.RuneError { // perhaps half a character
		return false
	}
	if a == '\n' {
		return !unicode.IsSpace(b)
	}
	word := func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) }
	return word(a) && !word(b) && !unicode.In(b, unicode.M, unicode.Han) && b != '\''
}
