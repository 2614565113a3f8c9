package chat

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// value is a JSON value that keeps the order of its keys. It prints what Python's
// json module would print after reading the same text, since that is what the
// model was trained on.
type value struct {
	kind  kind
	text  string   // of a string or a number
	keys  []string // of an object
	items []value  // of an array, or an object's values
}

// kind is a JSON type; its name is the one the format gives to arguments.
type kind int

const (
	null kind = iota
	boolFalse
	boolTrue
	number
	str
	array
	object
)

func (k kind) String() string {
	return [...]string{"null", "boolean", "boolean", "number", "string", "array", "object"}[k]
}

// parseJSON reads one JSON value. Of a key that occurs twice the later value
// counts, in the place of the earlier, as in Python. Nesting is limited to what
// encoding/json allows (10000 levels).
func parseJSON(text []byte) (value, error) {
	// Unmarshal checks the whole text first, depth included; below nothing can fail
	// half-way.
	var whole json.RawMessage
	if err := json.Unmarshal(text, &whole); err != nil {
		return value{}, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return readValue(d)
}

func readValue(d *json.Decoder) (value, error) {
	token, err := d.Token()
	if err != nil {
		return value{}, err
	}
	switch x := token.(type) {
	case nil:
		return value{kind: null}, nil
	case bool:
		if x {
			return value{kind: boolTrue}, nil
		}
		return value{kind: boolFalse}, nil
	case json.Number:
		return value{kind: number, text: x.String()}, nil
	case string:
		return value{kind: str, text: x}, nil
	}
	v := value{kind: array}
	at := map[string]int{}
	if token == json.Delim('{') {
		v.kind = object
	}
	for d.More() {
		where := len(v.items)
		if v.kind == object {
			token, err := d.Token()
			if err != nil {
				return value{}, err
			}
			key := token.(string)
			if i, twice := at[key]; twice {
				where = i
			} else {
				at[key] = where
				v.keys = append(v.keys, key)
			}
		}
		item, err := readValue(d)
		if err != nil {
			return value{}, err
		}
		if where == len(v.items) {
			v.items = append(v.items, value{})
		}
		v.items[where] = item
	}
	_, err = d.Token()
	return v, err
}

func (v value) get(key string) (value, bool) {
	if i := slices.Index(v.keys, key); i >= 0 {
		return v.items[i], true
	}
	return value{}, false
}

// sortKeys sorts the keys of all objects in v by code point.
func (v *value) sortKeys() {
	for i := range v.items {
		v.items[i].sortKeys()
	}
	if v.kind == object {
		sort.Sort(byKey{v})
	}
}

type byKey struct{ v *value }

func (b byKey) Len() int           { return len(b.v.keys) }
func (b byKey) Less(i, j int) bool { return b.v.keys[i] < b.v.keys[j] }
func (b byKey) Swap(i, j int) {
	b.v.keys[i], b.v.keys[j] = b.v.keys[j], b.v.keys[i]
	b.v.items[i], b.v.items[j] = b.v.items[j], b.v.items[i]
}

// layout is the separators of printed JSON.
type layout struct{ comma, colon string }

var (
	compact = layout{",", ":"}
	spaced  = layout{", ", ": "}
)

func (v value) print(l layout) string {
	var b strings.Builder
	v.printTo(&b, l)
	return b.String()
}

func (v value) printTo(b *strings.Builder, l layout) {
	switch v.kind {
	case null:
		b.WriteString("null")
	case boolFalse:
		b.WriteString("false")
	case boolTrue:
		b.WriteString("true")
	case number:
		b.WriteString(pythonNumber(v.text))
	case str:
		quoteTo(b, v.text)
	case array, object:
		brackets := "[]"
		if v.kind == object {
			brackets = "{}"
		}
		b.WriteByte(brackets[0])
		for i, item := range v.items {
			if i > 0 {
				b.WriteString(l.comma)
			}
			if v.kind == object {
				quoteTo(b, v.keys[i])
				b.WriteString(l.colon)
			}
			item.printTo(b, l)
		}
		b.WriteByte(brackets[1])
	}
}

// quoteTo writes a JSON string with everything but quotes, backslashes and control
// characters as it is.
func quoteTo(b *strings.Builder, s string) {
	b.WriteByte('"')
	for i := range len(s) {
		switch c := s[i]; c {
		case '"', '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case '\n':
			b.WriteString(`\n`)
		case '\r':
			b.WriteString(`\r`)
		case '\t':
			b.WriteString(`\t`)
		case '\f':
			b.WriteString(`\f`)
		case '\b':
			b.WriteString(`\b`)
		default:
			if c < 0x20 {
				fmt.Fprintf(b, `\u%04x`, c)
			} else {
				b.WriteByte(c)
			}
		}
	}
	b.WriteByte('"')
}

// pythonNumber prints a JSON number as Python does after reading it: integers of
// any length keep their digits, others become the shortest decimal that reads
// back as the same float64, with an exponent below 1e-4 and from 1e16 on.
func pythonNumber(literal string) string {
	if !strings.ContainsAny(literal, ".eE") {
		if literal == "-0" {
			return "0"
		}
		return literal
	}
	f, err := strconv.ParseFloat(literal, 64)
	if err != nil { // out of range
		return strings.Replace(strings.TrimPrefix(strconv.FormatFloat(f, 'f', -1, 64), "+"), "Inf", "Infinity", 1)
	}
	scientific := strconv.FormatFloat(f, 'e', -1, 64)
	exponent, _ := strconv.Atoi(scientific[strings.IndexByte(scientific, 'e')+1:])
	if exponent < -4 || exponent >= 16 {
		return scientific
	}
	plain := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(plain, ".") {
		plain += ".0"
	}
	return plain
}
