// Package tokenizer hides how text becomes token ids and back: the rank
// vocabulary, K3's split of text into pieces, the merges, and the control tokens
// that follow the ranks.
//
// # Ordinary text and control tokens
//
// [Tokenizer.Encode] treats every input as ordinary text: a control-token
// spelling such as "<|open|>" in it becomes several ordinary ids, so text from a
// user or a tool can never open or close a message. Only
// [Tokenizer.EncodeSpecial] emits control ids; callers give it text that they
// wrote themselves.
//
// # Bytes
//
// [Tokenizer.Decode] is the inverse of both: decoding the ids of any byte string
// gives the same bytes back. Text that is not valid UTF-8 is encoded without
// loss; each invalid byte counts as one character that is neither letter, number
// nor space. [Tokenizer.DecodeText] and [Stream] give valid UTF-8, with U+FFFD in
// place of what is not.
//
// # Unicode
//
// Character classes come from Go's unicode package ([unicode.Version], 15.0.0 in
// Go 1.26). Letters added to Unicode later count as "neither letter, number nor
// space" here, while the model's own splitter, built on newer tables, knows them
// as letters.
package tokenizer

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
)

// Sizes that no released file comes near; they bound what an untrusted file can
// make us allocate. K3's own files are 2.8 MB and 3.5 kB.
const (
	maxModelBytes  = 64 << 20
	maxConfigBytes = 4 << 20
)

// Tokenizer maps text to ids and back. It never changes after it is opened, and
// any number of goroutines may use one.
type Tokenizer struct {
	tokens  []string         // id -> bytes; the control tokens follow the ranks
	ranks   map[string]int32 // bytes -> rank (= id) of the ordinary tokens
	byteID  [256]int32       // rank of each single byte
	longest int              // bytes of the longest ordinary token

	special map[string]int // name -> id of the 256 control tokens
	names   *regexp.Regexp // leftmost, then longest control name

	class *classTable
}

// Open reads tiktoken.model and tokenizer_config.json in dir.
func Open(dir string) (*Tokenizer, error) {
	model, err := readBounded(filepath.Join(dir, "tiktoken.model"), maxModelBytes)
	if err != nil {
		return nil, err
	}
	config, err := readBounded(filepath.Join(dir, "tokenizer_config.json"), maxConfigBytes)
	if err != nil {
		return nil, err
	}
	t, err := New(model, config)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return t, nil
}

// New makes a tokenizer from the bytes of tiktoken.model and
// tokenizer_config.json (spec D.1, D.4). The errors name the file and its line or
// entry. The number of ids is that of the rank lines plus 256; whether it is the
// model's vocabulary size is for the caller to check with [Tokenizer.Size].
func New(model, config []byte) (*Tokenizer, error) {
	t := &Tokenizer{class: classes()}
	if err := t.readRanks(model); err != nil {
		return nil, fmt.Errorf("tiktoken.model: %w", err)
	}
	if err := t.readSpecials(config); err != nil {
		return nil, fmt.Errorf("tokenizer_config.json: %w", err)
	}
	return t, nil
}

// Size is the number of ids: every id is in [0, Size).
func (t *Tokenizer) Size() int { return len(t.tokens) }

// Special gives the id of a control token by its name, "<|open|>" for example.
func (t *Tokenizer) Special(name string) (id int, ok bool) {
	id, ok = t.special[name]
	return id, ok
}

// IsSpecial tells whether id is one of the 256 control tokens.
func (t *Tokenizer) IsSpecial(id int) bool {
	return id >= len(t.ranks) && id < len(t.tokens)
}

// Token gives the bytes of one id, a control token's being its name. They need
// not be valid UTF-8: a character may be spread over several tokens. ok is false
// for an id outside [0, Size).
func (t *Tokenizer) Token(id int) (bytes string, ok bool) {
	if id < 0 || id >= len(t.tokens) {
		return "", false
	}
	return t.tokens[id], true
}

// Encode gives the ids of text as ordinary text; it never emits a control id.
func (t *Tokenizer) Encode(text string) []int {
	e := encoder{t: t, ids: make([]int, 0, len(text)/3+1)}
	for part := range parts(text, t.class) {
		e.ordinary(part)
	}
	return e.ids
}

// EncodeSpecial is Encode except that control-token names in text become their
// ids, leftmost first and the longest of those that begin at one place. It is for
// text from the program itself, never for text from a user. Names are looked for
// after the cuts of very long text (spec D.3), so a name that lies across a cut
// stays ordinary, as it does for the model's own encoder.
func (t *Tokenizer) EncodeSpecial(text string) []int {
	e := encoder{t: t, ids: make([]int, 0, len(text)/3+1)}
	for part := range parts(text, t.class) {
		for {
			at := t.names.FindStringIndex(part)
			if at == nil {
				break
			}
			e.ordinary(part[:at[0]])
			e.ids = append(e.ids, t.special[part[at[0]:at[1]]])
			part = part[at[1]:]
		}
		e.ordinary(part)
	}
	return e.ids
}

// Decode gives the bytes of ids, control tokens spelled out by name. It is the
// exact inverse of Encode and EncodeSpecial. An id outside [0, Size) is an error.
func (t *Tokenizer) Decode(ids []int) ([]byte, error) {
	n := 0
	for i, id := range ids {
		b, ok := t.Token(id)
		if !ok {
			return nil, fmt.Errorf("token id %d (number %d of %d) is not in the vocabulary: ids go from 0 to %d",
				id, i, len(ids), t.Size()-1)
		}
		n += len(b)
	}
	out := make([]byte, 0, n)
	for _, id := range ids {
		out = append(out, t.tokens[id]...)
	}
	return out, nil
}

// DecodeText is Decode as valid UTF-8: what is not valid becomes U+FFFD, as in
// [Stream], whose pieces join to the same text.
func (t *Tokenizer) DecodeText(ids []int) (string, error) {
	b, err := t.Decode(ids)
	if err != nil {
		return "", err
	}
	text, tail := validPrefix(nil, b)
	if len(tail) > 0 {
		text = append(text, replacement...)
	}
	return string(text), nil
}

func readBounded(path string, limit int64) ([]byte, error) {
	// Opening a pipe would wait for its other end.
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file: put the model's own file there", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes, so it is no K3 tokenizer file: check the model directory", path, limit)
	}
	return b, nil
}
