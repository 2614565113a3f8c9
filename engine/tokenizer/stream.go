package tokenizer

import "unicode/utf8"

const replacement = "\uFFFD"

// Stream turns ids into text as they come. What it gives is always whole
// characters: the bytes of a character that has begun are held until they are
// complete or can no longer become one, and then stand as one U+FFFD. All pieces
// and the flush together are [Tokenizer.DecodeText] of all ids.
type Stream struct {
	t    *Tokenizer
	tail []byte // the beginning of a character, at most 3 bytes
}

// Stream starts a stream of text.
func (t *Tokenizer) Stream() *Stream { return &Stream{t: t} }

// Push gives the text that id completes; it may be empty. Control tokens are
// spelled out: whoever does not want them looks at the id first. An id outside
// the vocabulary, which no model of this vocabulary can produce, gives U+FFFD.
func (s *Stream) Push(id int) string {
	token, ok := s.t.Token(id)
	if !ok {
		return s.Flush() + replacement
	}
	text, tail := validPrefix(nil, append(s.tail, token...))
	s.tail = append(s.tail[:0], tail...)
	return string(text)
}

// Flush gives the held tail as U+FFFD, or nothing; the stream may then go on.
func (s *Stream) Flush() string {
	if len(s.tail) == 0 {
		return ""
	}
	s.tail = s.tail[:0]
	return replacement
}

// validPrefix appends b to text, each longest beginning of a character that b
// breaks off, and each byte that begins none, as one U+FFFD. It returns the
// unfinished character at the end of b, at most 3 bytes, apart.
func validPrefix(text, b []byte) (out, tail []byte) {
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r != utf8.RuneError || n > 1 {
			text = append(text, b[:n]...)
			b = b[n:]
			continue
		}
		if !utf8.FullRune(b) {
			return text, b
		}
		n = 1
		for n < len(b) && !utf8.FullRune(b[:n+1]) {
			n++
		}
		// b[:n+1] is the first that is no beginning; for n = 1 the first byte may
		// itself be none, and is replaced all the same.
		text = append(text, replacement...)
		b = b[n:]
	}
	return text, nil
}
