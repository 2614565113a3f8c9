package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// support says what the server does with a field.
type support int

const (
	honoured support = iota
	noEffect         // accepted with values that change nothing
	refused
)

func (s support) String() string { return [...]string{"honoured", "no effect", "refused"}[s] }

// field is one field of an object T of an API. The tables of fields are all that the
// server knows of an API: they read requests, refuse the rest, and print the
// documentation.
type field[T any] struct {
	name    string
	support support
	note    string // for the documentation; of a refused field, for its error too
	// read takes a value that is not null. A refused field has none; one without effect
	// checks its value, and any will do if it has none.
	read func(into *T, v json.RawMessage, path string) *apiError
}

// readFields reads an object by its table. null is as good as nothing, as in OpenAI's
// API, for refused fields too.
func readFields[T any](into *T, table []field[T], raw json.RawMessage, path string) *apiError {
	members, err := object(raw, path)
	if err != nil {
		return err
	}
	for _, m := range members {
		f := find(table, m.name)
		switch p := join(path, m.name); {
		case f == nil:
			return &apiError{
				status: 400, code: "unknown_parameter", param: p,
				message: "this field is not known: leave it out, or see docs/server.md for those that are",
			}
		case isNull(m.value) || f.support != refused && f.read == nil:
		case f.support == refused:
			return &apiError{status: 400, code: "unsupported_parameter", param: p, message: "this field is not supported: " + f.note}
		default:
			if err := f.read(into, m.value, p); err != nil {
				return err
			}
		}
	}
	return nil
}

func find[T any](table []field[T], name string) *field[T] {
	for i := range table {
		if table[i].name == name {
			return &table[i]
		}
	}
	return nil
}

// only accepts the given JSON values of a field that changes nothing by them.
func only[T any](values ...string) func(*T, json.RawMessage, string) *apiError {
	return func(_ *T, v json.RawMessage, path string) *apiError {
		var compact bytes.Buffer
		if err := json.Compact(&compact, v); err != nil {
			return badJSON(err)
		}
		for _, ok := range values {
			if compact.String() == ok {
				return nil
			}
		}
		return unsupported(path, "only %s is supported: leave the field out", orList(values))
	}
}

// zero accepts 0 in any spelling.
func zero[T any](_ *T, v json.RawMessage, path string) *apiError {
	f, err := readFloat(v, path, -1e300, 1e300)
	if err == nil && f != 0 {
		return unsupported(path, "only 0 is supported: leave the field out")
	}
	return err
}

// anyString accepts any string.
func anyString[T any](_ *T, v json.RawMessage, path string) *apiError {
	_, err := readString(v, path)
	return err
}

// anyObject accepts any object.
func anyObject[T any](_ *T, v json.RawMessage, path string) *apiError {
	_, err := object(v, path)
	return err
}

// into adapts a reader that needs no more than the value.
func into[T, V any](read func(json.RawMessage, string) (V, *apiError), set func(*T, V)) func(*T, json.RawMessage, string) *apiError {
	return func(t *T, v json.RawMessage, path string) *apiError {
		x, err := read(v, path)
		if err == nil {
			set(t, x)
		}
		return err
	}
}

// Fields is the table of all fields as docs/server.md has it.
func Fields() string {
	var b strings.Builder
	section(&b, "POST /v1/chat/completions", "", chatFields)
	section(&b, "", "messages[].", chatMessageFields)
	section(&b, "", "messages[].content[].", textPartFields)
	section(&b, "", "messages[].tool_calls[].", toolCallFields)
	section(&b, "", "messages[].tool_calls[].function.", calledFunctionFields)
	section(&b, "", "tools[].", toolFields)
	section(&b, "", "tools[].function.", functionFields)
	section(&b, "", "tool_choice.", choiceFields)
	section(&b, "", "stream_options.", streamOptionFields)
	section(&b, "POST /v1/completions", "", completionFields)
	section(&b, "POST /v1/messages, POST /v1/messages/count_tokens", "", messageFields)
	section(&b, "", "messages[].", anthropicMessageFields)
	for _, k := range blockKinds {
		section(&b, "", "content[type="+k.name+"].", k.fields)
	}
	section(&b, "", "thinking.", anthropicThinkingFields)
	section(&b, "", "tools[].", anthropicToolFields)
	section(&b, "", "tool_choice.", anthropicChoiceFields)
	section(&b, "", "output_config.", outputConfigFields)
	return b.String()
}

func section[T any](b *strings.Builder, title, prefix string, table []field[T]) {
	if title != "" {
		fmt.Fprintf(b, "\n### %s\n\n| field | | |\n|---|---|---|\n", title)
	}
	for _, f := range table {
		fmt.Fprintf(b, "| `%s%s` | %s | %s |\n", prefix, f.name, f.support, strings.ReplaceAll(f.note, "|", `\|`))
	}
}
