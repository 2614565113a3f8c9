package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"unicode"
	"unicode/utf8"
)

// tokens walks JSON token by token, so that a document of any length is checked
// without being held: an index of half a million names is a few bytes at a time.
type tokens struct {
	dec *json.Decoder
}

func newTokens(r io.Reader) *tokens {
	d := json.NewDecoder(r)
	d.UseNumber()
	return &tokens{dec: d}
}

func (t *tokens) next() (json.Token, error) {
	tok, err := t.dec.Token()
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return nil, fmt.Errorf("JSON ends early at byte %d", t.dec.InputOffset())
	case err != nil:
		return nil, fmt.Errorf("JSON is malformed near byte %d: %w", t.dec.InputOffset(), err)
	}
	return tok, nil
}

// open consumes one opening delimiter: '{' or '['.
func (t *tokens) open(d json.Delim) error {
	tok, err := t.next()
	if err != nil {
		return err
	}
	if tok != d {
		return fmt.Errorf("found %s at byte %d, expected %s", describe(tok), t.dec.InputOffset(), describe(d))
	}
	return nil
}

// close consumes the delimiter that ends an object or array whose More is false.
func (t *tokens) close() error {
	_, err := t.next()
	return err
}

func (t *tokens) text() (string, error) {
	tok, err := t.next()
	if err != nil {
		return "", err
	}
	s, ok := tok.(string)
	if !ok {
		return "", fmt.Errorf("found %s, expected a string", describe(tok))
	}
	return s, nil
}

// count reads an integer >= 0 that is written as one: no fraction, no exponent.
func (t *tokens) count() (int64, error) {
	tok, err := t.next()
	if err != nil {
		return 0, err
	}
	n, ok := tok.(json.Number)
	if !ok {
		return 0, fmt.Errorf("found %s, expected an integer", describe(tok))
	}
	v, err := strconv.ParseInt(n.String(), 10, 64)
	if err != nil || v < 0 || n.String()[0] == '-' {
		return 0, fmt.Errorf("found %s, expected an integer from 0 to 9223372036854775807", quoted(n.String()))
	}
	return v, nil
}

// end demands that nothing but white space is left.
func (t *tokens) end() error {
	tok, err := t.dec.Token()
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("unreadable bytes after the JSON document, near byte %d", t.dec.InputOffset())
	}
	return fmt.Errorf("%s after the end of the JSON document", describe(tok))
}

// value reads one value as map[string]any, []any, string, json.Number, bool or
// nil. Nesting deeper than depth and repeated keys are errors.
func (t *tokens) value(depth int) (any, error) {
	tok, err := t.next()
	if err != nil {
		return nil, err
	}
	d, ok := tok.(json.Delim)
	if !ok {
		return tok, nil
	}
	if depth == 0 {
		return nil, errors.New("JSON is nested too deeply")
	}
	if d == '[' {
		list := []any{}
		for t.dec.More() {
			v, err := t.value(depth - 1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		return list, t.close()
	}
	m := map[string]any{}
	for t.dec.More() {
		k, err := t.text()
		if err != nil {
			return nil, err
		}
		if _, dup := m[k]; dup {
			return nil, fmt.Errorf("%s is given twice", quoted(k))
		}
		if m[k], err = t.value(depth - 1); err != nil {
			return nil, err
		}
	}
	return m, t.close()
}

// parseTree reads a whole document that must be one object.
func parseTree(b []byte, depth int) (map[string]any, error) {
	t := newTokens(bytes.NewReader(b))
	v, err := t.value(depth)
	if err != nil {
		return nil, err
	}
	m, ok := v.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("found %s, expected an object", describe(v))
	}
	return m, t.end()
}

// describe shows a JSON value or token in an error, shortened.
func describe(v any) string {
	if d, ok := v.(json.Delim); ok {
		return "'" + d.String() + "'"
	}
	b, err := json.Marshal(v)
	if err != nil {
		return "a value that is not JSON"
	}
	return clip(string(b))
}

// quoted shows a string from an untrusted file: plain if every character prints,
// escaped if not, and never longer than a line.
func quoted(s string) string {
	if !utf8.ValidString(s) {
		return strconv.QuoteToASCII(clip(s))
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return strconv.QuoteToASCII(clip(s))
		}
	}
	return clip(s)
}

func clip(s string) string {
	const most = 160
	if len(s) <= most {
		return s
	}
	for cut := most; ; cut-- {
		if utf8.RuneStart(s[cut]) || cut < most-4 {
			return s[:cut] + "..."
		}
	}
}
