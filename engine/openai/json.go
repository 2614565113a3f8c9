package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth bounds the nesting of a body; the deepest place of the API itself is a tool's
// JSON schema.
const maxDepth = 64

// marshal is JSON as the API has it: no HTML escapes, no line break at the end.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// checkJSON refuses what is not one JSON value, too deep, or not Unicode, which
// encoding/json would mend in silence.
func checkJSON(b []byte) *apiError {
	if !utf8.Valid(b) {
		return &apiError{status: 400, code: "invalid_json", message: "the body is not valid UTF-8: encode it so"}
	}
	if tooDeep(b) {
		return &apiError{status: 400, code: "invalid_json", message: fmt.Sprintf("the body is nested more than %d levels deep: make it flatter", maxDepth)}
	}
	var whole json.RawMessage
	if err := json.Unmarshal(b, &whole); err != nil {
		return badJSON(err)
	}
	if halfCharacter(b) {
		return &apiError{status: 400, code: "invalid_json", message: `the body has half a character, an escape from \ud800 to \udfff without its other half: send whole characters`}
	}
	return nil
}

// halfCharacter finds one half of a pair of escapes in valid JSON without the other.
func halfCharacter(b []byte) bool {
	unit := func(b []byte) rune {
		if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
			return 0
		}
		n, _ := strconv.ParseUint(string(b[2:6]), 16, 16) // four digits, as the JSON is valid
		return rune(n)
	}
	for i := 0; i < len(b); i++ {
		switch r := unit(b[i:]); {
		case !utf16.IsSurrogate(r):
			if b[i] == '\\' {
				i++
			}
		case utf16.DecodeRune(r, unit(b[i+6:])) == utf8.RuneError:
			return true
		default:
			i += 11
		}
	}
	return false
}

// tooDeep looks at brackets alone, so that no parser has to recurse to find out.
func tooDeep(b []byte) bool {
	depth, quoted, escaped := 0, false, false
	for _, c := range b {
		switch {
		case escaped:
			escaped = false
		case quoted:
			escaped, quoted = c == '\\', c != '"'
		case c == '"':
			quoted = true
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return true
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return false
}

// member is one field of an object.
type member struct {
	name  string
	value json.RawMessage
}

// object gives the fields of valid JSON in their order. A field that is there twice is
// refused: which one would count is anybody's guess.
func object(raw json.RawMessage, path string) ([]member, *apiError) {
	d := json.NewDecoder(bytes.NewReader(raw))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, invalid(path, "expected an object, got %s", describe(raw))
	}
	var out []member
	seen := map[string]bool{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, badJSON(err)
		}
		m := member{name: key.(string)}
		if seen[m.name] {
			return nil, invalid(join(path, m.name), "the field is there twice: leave one out")
		}
		seen[m.name] = true
		if err := d.Decode(&m.value); err != nil {
			return nil, badJSON(err)
		}
		out = append(out, m)
	}
	return out, nil
}

// array gives the elements of valid JSON, at most limit.
func array(raw json.RawMessage, path string, limit int) ([]json.RawMessage, *apiError) {
	d := json.NewDecoder(bytes.NewReader(raw))
	if t, err := d.Token(); err != nil || t != json.Delim('[') {
		return nil, invalid(path, "expected an array, got %s", describe(raw))
	}
	var out []json.RawMessage
	for d.More() {
		if len(out) == limit {
			return nil, invalid(path, "more than %d elements", limit)
		}
		var v json.RawMessage
		if err := d.Decode(&v); err != nil {
			return nil, badJSON(err)
		}
		out = append(out, v)
	}
	return out, nil
}

// join names a field of what stands at path.
func join(path, name string) string {
	if len(name) > 60 {
		name = name[:60] + "..."
	}
	if path == "" {
		return name
	}
	return path + "." + name
}

func at(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

// describe names a JSON value for an error, without repeating much of it.
func describe(raw json.RawMessage) string {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 {
		return "nothing"
	}
	switch raw[0] {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "the number " + clip(string(raw))
}

func clip(s string) string {
	if len(s) > 40 {
		return s[:40] + "..."
	}
	return s
}

func isNull(raw json.RawMessage) bool { return string(bytes.TrimSpace(raw)) == "null" }

func readString(raw json.RawMessage, path string) (string, *apiError) {
	var s string
	if len(raw) == 0 || raw[0] != '"' || json.Unmarshal(raw, &s) != nil {
		return "", invalid(path, "expected a string, got %s", describe(raw))
	}
	return s, nil
}

func readBool(raw json.RawMessage, path string) (bool, *apiError) {
	switch string(raw) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, invalid(path, "expected true or false, got %s", describe(raw))
}

func readInt(raw json.RawMessage, path string, least, most int64) (int64, *apiError) {
	n, err := strconv.ParseInt(string(raw), 10, 64)
	switch {
	case err != nil:
		return 0, invalid(path, "expected a whole number, got %s", describe(raw))
	case n < least && least == 1:
		return 0, invalid(path, "%d is too small: it counts from 1", n)
	case n < least || n > most:
		return 0, invalid(path, "%d is not from %d to %d", n, least, most)
	}
	return n, nil
}

func readFloat(raw json.RawMessage, path string, least, most float64) (float64, *apiError) {
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || math.IsInf(f, 0) || math.IsNaN(f) {
		return 0, invalid(path, "expected a number, got %s", describe(raw))
	}
	if f < least || f > most {
		return 0, invalid(path, "%g is not from %g to %g", f, least, most)
	}
	return f, nil
}

// readChoice reads one of a few strings.
func readChoice(raw json.RawMessage, path string, choices ...string) (string, *apiError) {
	s, err := readString(raw, path)
	if err != nil {
		return "", err
	}
	for _, c := range choices {
		if s == c {
			return s, nil
		}
	}
	return "", unsupported(path, "%q is not supported: use %s", clip(s), orList(choices))
}

func orList(choices []string) string {
	out := ""
	for i, c := range choices {
		switch {
		case i == 0:
		case i == len(choices)-1:
			out += " or "
		default:
			out += ", "
		}
		out += c
	}
	return out
}
