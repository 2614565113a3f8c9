// Package chat hides K3's chat format: how messages, reasoning, tools and request
// options become token ids ([Render]), and how the ids that the model writes
// become thinking, response and tool calls again ([Parser]).
//
// # Format
//
// A message is an element of a markup whose brackets are control tokens:
//
//	<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>
//
// An assistant message has a think channel (in thinking mode only), a response
// channel and, when it calls tools, a tools channel. A prompt ends inside the
// assistant message that the model is to write, at the beginning of its first
// channel.
//
// Only this package's own brackets are encoded as control tokens. Everything else,
// tag names, attributes and contents, is encoded as ordinary text, so no text of
// a user, a tool or a name can close its message or open another.
//
// # History
//
// In thinking mode every assistant message of the history has its think channel,
// with the reasoning that came with it: the model was trained with its earlier
// thoughts in place, and a client that drops them makes it less reliable. With
// thinking off no message has the channel.
package chat

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"deltafin/engine/tokenizer"
)

// The control tokens of the format (spec D.4).
const (
	openToken  = "<|open|>"
	closeToken = "<|close|>"
	sepToken   = "<|sep|>"
	endToken   = "<|end_of_msg|>"
)

// Options are what a request says beside its messages. The zero value is a plain
// chat without thinking; [Defaults] is what the model expects.
type Options struct {
	// Thinking gives every assistant message a think channel.
	Thinking bool
	// Effort is "low", "high" or "max": how much to think. Empty leaves it unsaid,
	// as does Thinking being off.
	Effort string
	// Tools is a JSON array of tool declarations; empty or null for none.
	Tools json.RawMessage
	// ToolChoice is "required", "none", or "auto" or empty to leave it unsaid.
	ToolChoice string
	// ResponseFormat is {"type": "json_object"}, or {"type": "json_schema",
	// "json_schema": {"schema": ...}}; {"type": "text"}, empty or null say nothing.
	ResponseFormat json.RawMessage
}

// Defaults are thinking on, with the greatest effort.
func Defaults() Options { return Options{Thinking: true, Effort: "max"} }

// Segment is a stretch of a prompt that is encoded on its own: no token crosses
// its ends. A special segment is one control token by name, any other is ordinary
// text.
type Segment struct {
	Text    string
	Special bool
}

// Render gives the ids of a prompt (spec D.5). Errors name the message and the
// field; a vocabulary without the chat format's control tokens is an error.
func Render(tok *tokenizer.Tokenizer, msgs []Message, opt Options) ([]int, error) {
	if _, err := controlsOf(tok); err != nil {
		return nil, err
	}
	segments, err := Segments(msgs, opt)
	if err != nil {
		return nil, err
	}
	var ids []int
	for _, s := range segments {
		if !s.Special {
			ids = append(ids, tok.Encode(s.Text)...)
			continue
		}
		id, _ := tok.Special(s.Text) // controlsOf has seen all of them
		ids = append(ids, id)
	}
	return ids, nil
}

// Segments gives a prompt before it is encoded.
func Segments(msgs []Message, opt Options) ([]Segment, error) {
	if !slices.Contains([]string{"", "low", "high", "max"}, opt.Effort) {
		return nil, fmt.Errorf("effort is %q: use low, high or max", opt.Effort)
	}
	var w writer
	if _, err := w.tools(opt.Tools, toolsBody); err != nil {
		return nil, err
	}
	if opt.Thinking && opt.Effort != "" {
		w.option("thinking-effort", fmt.Sprintf(effortBody, opt.Effort))
	}
	msgs = sortToolResults(msgs)
	var calls []ToolCall // of the last assistant message
	results := 0         // tool messages since then
	for i, m := range msgs {
		var err error
		switch m.Role {
		case "assistant":
			calls, results = m.ToolCalls, 0
			err = w.assistant(m, opt.Thinking)
		case "tool":
			results++
			err = w.toolResult(m, calls, results)
		case "system":
			var declared bool
			if declared, err = w.tools(m.Tools, newToolsBody); !declared && err == nil {
				w.message(m)
			}
		case "user":
			w.message(m)
		default:
			err = fmt.Errorf("role is %q: use system, user, assistant or tool", m.Role)
		}
		if err != nil {
			return nil, fmt.Errorf("message %d: %w", i+1, err)
		}
	}
	if err := w.toolChoice(opt.ToolChoice); err != nil {
		return nil, err
	}
	if err := w.responseFormat(opt.ResponseFormat); err != nil {
		return nil, fmt.Errorf("response format: %w", err)
	}
	w.open("message", "role", "assistant")
	if opt.Thinking {
		w.open("think")
	} else {
		w.open("response")
	}
	return w.segments, nil
}

// The texts below are part of the format: the model was trained with them, to the
// letter.
const (
	toolsBody = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n%s\n```"

	newToolsBody = "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n" +
		"You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n%s\n```"

	effortBody = "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), " +
		"supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort=%s`."

	requiredBody = "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
	noneBody     = "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."

	formatBody = "The system is invoked with `response_format=%s`.\n" +
		"Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
	schemaBody = "\nThe JSON data must match the following schema:\n```json\n%s\n```"
)

// writer collects segments.
type writer struct{ segments []Segment }

func (w *writer) control(name string) {
	w.segments = append(w.segments, Segment{name, true})
}

// text adds ordinary text; empty text makes no segment.
func (w *writer) text(s string) {
	if s != "" {
		w.segments = append(w.segments, Segment{s, false})
	}
}

var escapeAttr = strings.NewReplacer("&", "&amp;", `"`, "&quot;")

// open writes <|open|>tag key="value" ...<|sep|>. The four segments of an
// attribute are as the model saw them in training.
func (w *writer) open(tag string, attrs ...string) {
	w.control(openToken)
	w.text(tag)
	for i := 0; i < len(attrs); i += 2 {
		w.text(" " + attrs[i])
		w.text(`="`)
		w.text(escapeAttr.Replace(attrs[i+1]))
		w.text(`"`)
	}
	w.control(sepToken)
}

func (w *writer) close(tag string) {
	w.control(closeToken)
	w.text(tag)
	w.control(sepToken)
}

func (w *writer) endMessage() {
	w.close("message")
	w.control(endToken)
}

// option writes a request option as the system message the model reads it from.
func (w *writer) option(kind, body string) {
	w.open("message", "role", "system", "type", kind)
	w.text(body)
	w.endMessage()
}

func (w *writer) content(m Message) {
	if m.Parts == nil {
		w.text(m.Content)
	}
	for _, p := range m.Parts {
		w.text(p)
	}
}

// roleAttrs are the attributes of a message that is no tool result.
func roleAttrs(m Message) []string {
	attrs := []string{"role", m.Role}
	if m.Name != "" {
		attrs = append(attrs, "name", m.Name)
	}
	return attrs
}

func (w *writer) message(m Message) {
	w.open("message", roleAttrs(m)...)
	w.content(m)
	w.endMessage()
}

func (w *writer) assistant(m Message, thinking bool) error {
	w.open("message", roleAttrs(m)...)
	if thinking {
		w.open("think")
		if strings.TrimSpace(m.Reasoning) != "" {
			w.text(m.Reasoning)
		}
		w.close("think")
	}
	w.open("response")
	w.content(m)
	w.close("response")
	if len(m.ToolCalls) > 0 {
		w.open("tools")
		for i, c := range m.ToolCalls {
			if err := w.call(c, i+1); err != nil {
				return fmt.Errorf("tool call %d: %w", i+1, err)
			}
		}
		w.close("tools")
	}
	w.endMessage()
	return nil
}

func (w *writer) call(c ToolCall, index int) error {
	if c.Name == "" {
		return fmt.Errorf("it names no function: give function.name")
	}
	w.open("call", "tool", c.Name, "index", strconv.Itoa(index))
	if strings.TrimSpace(c.Arguments) != "" {
		args, err := parseJSON([]byte(c.Arguments))
		switch {
		case err != nil:
			// Arguments that the model itself wrote without a right form go back to it
			// as they were.
			w.open("json", "type", "object")
			w.text(c.Arguments)
			w.close("json")
		case args.kind != object:
			return fmt.Errorf("arguments of %s are %.60q: give a JSON object", c.Name, c.Arguments)
		}
		for i, key := range args.keys {
			v := args.items[i]
			w.open("argument", "key", key, "type", v.kind.String())
			if v.kind == str {
				w.text(v.text)
			} else {
				w.text(v.print(spaced))
			}
			w.close("argument")
		}
	}
	w.close("call")
	return nil
}

func (w *writer) toolResult(m Message, calls []ToolCall, index int) error {
	name := m.Tool
	if name == "" {
		name = m.Name
	}
	if name == "" && index <= len(calls) {
		name = calls[index-1].Name
	}
	if name == "" {
		return fmt.Errorf("no tool call belongs to this tool result: give its tool_call_id, or tool, the tool's name")
	}
	w.open("message", "role", "tool", "tool", name, "index", strconv.Itoa(index))
	w.content(m)
	w.endMessage()
	return nil
}

// tools declares tools in one of the two bodies for it, unless there are none.
func (w *writer) tools(raw json.RawMessage, body string) (declared bool, err error) {
	if blankJSON(raw) {
		return false, nil
	}
	tools, err := parseJSON(raw)
	if err != nil {
		return false, fmt.Errorf("tools: %w: give a JSON array of tool declarations", err)
	}
	if tools.kind != array {
		return false, fmt.Errorf("tools: found %s %.60q: give a JSON array of tool declarations", tools.kind, raw)
	}
	if len(tools.items) == 0 {
		return false, nil
	}
	tools.sortKeys()
	w.option("tool-declare", fmt.Sprintf(body, tools.print(compact)))
	return true, nil
}

func (w *writer) toolChoice(choice string) error {
	switch choice {
	case "", "auto":
	case "required":
		w.option("tool-choice", requiredBody)
	case "none":
		w.option("tool-choice", noneBody)
	default:
		return fmt.Errorf("tool choice is %q: use auto, required or none", choice)
	}
	return nil
}

func (w *writer) responseFormat(raw json.RawMessage) error {
	if blankJSON(raw) {
		return nil
	}
	format, err := parseJSON(raw)
	if err != nil {
		return fmt.Errorf(`%w: give an object such as {"type": "json_object"}`, err)
	}
	kind := format
	if format.kind == object {
		kind, _ = format.get("type")
	}
	switch {
	case kind.kind == str && kind.text == "text":
		return nil
	case kind.kind == str && kind.text == "json_object":
		w.option("response-format", fmt.Sprintf(formatBody, kind.text))
		return nil
	case kind.kind == str && kind.text == "json_schema":
		holder, ok := format.get("json_schema")
		if !ok || holder.kind != object {
			return fmt.Errorf(`type json_schema has no schema: give {"type": "json_schema", "json_schema": {"schema": ...}}`)
		}
		schema, ok := holder.get("schema")
		if !ok {
			schema, ok = holder.get("json_schema")
		}
		if !ok {
			schema = holder
		}
		schema.sortKeys()
		w.option("response-format", fmt.Sprintf(formatBody+schemaBody, kind.text, schema.print(compact)))
		return nil
	}
	return fmt.Errorf("type is %.60s: use text, json_object or json_schema", kind.print(compact))
}

// sortToolResults puts each run of tool results into the order of the calls they
// answer, and gives them those calls' tool names. A run in which any result
// matches no call stays as it is. msgs is not changed.
func sortToolResults(msgs []Message) []Message {
	out := slices.Clone(msgs)
	byID := map[string]int{} // position of each call of the last assistant message
	var calls []ToolCall
	for i := 0; i < len(out); i++ {
		if out[i].Role == "assistant" {
			calls = out[i].ToolCalls
			clear(byID)
			for n, c := range calls {
				if _, twice := byID[c.ID]; c.ID != "" && !twice {
					byID[c.ID] = n
				}
			}
		}
		if out[i].Role != "tool" {
			continue
		}
		end := i
		matched := true
		for ; end < len(out) && out[end].Role == "tool"; end++ {
			_, ok := byID[out[end].ToolCallID]
			matched = matched && ok
		}
		if matched {
			run := out[i:end]
			slices.SortStableFunc(run, func(a, b Message) int { return byID[a.ToolCallID] - byID[b.ToolCallID] })
			for j := range run {
				run[j].Tool = calls[byID[run[j].ToolCallID]].Name
			}
		}
		i = end - 1
	}
	return out
}

// controls are the ids of the format's brackets.
type controls struct {
	open, close, sep, end int
	eos                   int // [EOS], -1 if the vocabulary has none
}

func controlsOf(tok *tokenizer.Tokenizer) (controls, error) {
	c := controls{eos: -1}
	for _, n := range []struct {
		name string
		id   *int
	}{{openToken, &c.open}, {closeToken, &c.close}, {sepToken, &c.sep}, {endToken, &c.end}} {
		id, ok := tok.Special(n.name)
		if !ok {
			return c, fmt.Errorf("the vocabulary has no control token %s, so this model has no chat format: give it a raw prompt", n.name)
		}
		*n.id = id
	}
	if id, ok := tok.Special("[EOS]"); ok {
		c.eos = id
	}
	return c, nil
}
