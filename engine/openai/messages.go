package openai

import (
	"encoding/json"
	"fmt"

	"deltafin/engine/chat"
)

// The objects of Anthropic's API.
type (
	anthropicUsage struct {
		Input    int `json:"input_tokens"` // without those that were known
		Creation int `json:"cache_creation_input_tokens"`
		Cached   int `json:"cache_read_input_tokens"`
		Output   int `json:"output_tokens"`
	}
	contentBlock struct {
		Type      string          `json:"type"`
		Text      *string         `json:"text,omitempty"`
		Thinking  *string         `json:"thinking,omitempty"`
		Signature *string         `json:"signature,omitempty"`
		ID        string          `json:"id,omitempty"`
		Name      string          `json:"name,omitempty"`
		Input     json.RawMessage `json:"input,omitempty"`
	}
	anthropicMessage struct {
		ID           string         `json:"id"`
		Type         string         `json:"type"`
		Role         string         `json:"role"`
		Model        string         `json:"model"`
		Content      []contentBlock `json:"content"`
		StopReason   *string        `json:"stop_reason"`
		StopSequence *string        `json:"stop_sequence"`
		Usage        anthropicUsage `json:"usage"`
	}
)

func (u usage) anthropic() anthropicUsage {
	return anthropicUsage{Input: u.prompt - u.cached, Cached: u.cached, Output: u.completion}
}

func anthropicReason(f finish, calls int, stopped string) (reason string, sequence *string) {
	switch {
	case stopped != "":
		return "stop_sequence", &stopped
	case f == finishLength:
		return "max_tokens", nil
	case calls > 0:
		return "tool_use", nil
	}
	return "end_turn", nil
}

// newBlock is the block of an event, with its text if whole is set.
func newBlock(e event, whole bool) contentBlock {
	text := ""
	if whole {
		text = e.text
	}
	switch e.kind {
	case chat.Thinking:
		signature := "" // there is nothing to sign: the server takes any thoughts back
		return contentBlock{Type: "thinking", Thinking: &text, Signature: &signature}
	case chat.Call:
		input := json.RawMessage("{}")
		if whole {
			input = toolInput(e.call)
		}
		return contentBlock{Type: "tool_use", ID: e.call.ID, Name: e.call.Name, Input: input}
	}
	return contentBlock{Type: "text", Text: &text}
}

// toolInput is a call's arguments as an object, which they are unless the model wrote
// something else in their place.
func toolInput(c chat.ToolCall) json.RawMessage {
	if _, err := object(json.RawMessage(c.Arguments), ""); err == nil && json.Valid([]byte(c.Arguments)) {
		return json.RawMessage(c.Arguments)
	}
	if c.Arguments == "" {
		return json.RawMessage("{}")
	}
	return encode(map[string]string{"raw": c.Arguments})
}

func (w *whole) message(f finish, u usage, stopped string) anthropicMessage {
	m := w.newMessage()
	reason, sequence := anthropicReason(f, len(w.calls), stopped)
	m.StopReason, m.StopSequence, m.Usage = &reason, sequence, u.anthropic()
	for _, e := range w.order {
		m.Content = append(m.Content, newBlock(e, true))
	}
	return m
}

func (b *base) newMessage() anthropicMessage {
	return anthropicMessage{ID: b.id, Type: "message", Role: "assistant", Model: b.model, Content: []contentBlock{}}
}

// messageStream streams Anthropic's messages.
type messageStream struct {
	base
	blocks int // begun so far
	open   bool
	kind   chat.Kind // of the open block
	calls  int
	begun  bool
}

func (w *messageStream) send(kind string, v any) {
	fmt.Fprintf(w.out, "event: %s\ndata: %s\n\n", kind, encode(v))
}

func (w *messageStream) begin(u usage) {
	w.begun = true
	m := w.newMessage()
	u.completion = 0
	m.Usage = u.anthropic()
	w.send("message_start", struct {
		Type    string           `json:"type"`
		Message anthropicMessage `json:"message"`
	}{"message_start", m})
}

func (w *messageStream) event(e event) {
	if w.open && (w.kind != e.kind || e.kind == chat.Call) {
		w.closeBlock()
	}
	if !w.open {
		w.send("content_block_start", struct {
			Type  string       `json:"type"`
			Index int          `json:"index"`
			Block contentBlock `json:"content_block"`
		}{"content_block_start", w.blocks, newBlock(e, false)})
		w.open, w.kind = true, e.kind
	}
	switch e.kind {
	case chat.Thinking:
		w.delta(map[string]string{"type": "thinking_delta", "thinking": e.text})
	case chat.Response:
		w.delta(map[string]string{"type": "text_delta", "text": e.text})
	case chat.Call:
		w.calls++
		w.delta(map[string]string{"type": "input_json_delta", "partial_json": string(toolInput(e.call))})
		w.closeBlock()
	}
}

func (w *messageStream) delta(d map[string]string) {
	w.send("content_block_delta", struct {
		Type  string            `json:"type"`
		Index int               `json:"index"`
		Delta map[string]string `json:"delta"`
	}{"content_block_delta", w.blocks, d})
}

func (w *messageStream) closeBlock() {
	w.send("content_block_stop", struct {
		Type  string `json:"type"`
		Index int    `json:"index"`
	}{"content_block_stop", w.blocks})
	w.open = false
	w.blocks++
}

func (w *messageStream) end(f finish, u usage, stopped string) {
	if w.open {
		w.closeBlock()
	}
	reason, sequence := anthropicReason(f, w.calls, stopped)
	type delta struct {
		StopReason   string  `json:"stop_reason"`
		StopSequence *string `json:"stop_sequence"`
	}
	w.send("message_delta", struct {
		Type  string         `json:"type"`
		Delta delta          `json:"delta"`
		Usage anthropicUsage `json:"usage"`
	}{"message_delta", delta{reason, sequence}, u.anthropic()})
	w.send("message_stop", map[string]string{"type": "message_stop"})
}

func (w *messageStream) fail(e *apiError) {
	fmt.Fprintf(w.out, "event: error\ndata: %s\n\n", e.body(messagesAPI))
}

// idle has the API's own sign of life too, for clients that pass over comments.
func (w *messageStream) idle(status string) {
	w.comment(status)
	if w.begun {
		w.send("ping", map[string]string{"type": "ping"})
	}
}
