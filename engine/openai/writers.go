package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"deltafin/engine/chat"
)

// writer puts an answer into an API's form. Its methods append to out; idle is what
// may be sent at any time to keep a connection alive.
type writer interface {
	begin(u usage)
	event(e event)
	end(f finish, u usage, stopped string)
	fail(e *apiError)
	idle(status string)
}

// base is what all writers know.
type base struct {
	out     *bytes.Buffer
	api     api
	id      string
	created int64
	model   string
	print   string // system_fingerprint
}

// comment is one line, without the empty line that would end an event: some clients
// take a comment that stands alone for an event without data.
func (b *base) comment(text string) {
	fmt.Fprintf(b.out, ": %s\n", strings.ReplaceAll(text, "\n", " "))
}

func (b *base) data(v any) { fmt.Fprintf(b.out, "data: %s\n\n", encode(v)) }

// The objects of OpenAI's API.
type (
	openAIUsage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
		CompletionDetails struct {
			Reasoning int `json:"reasoning_tokens"`
		} `json:"completion_tokens_details"`
		Draft *guessing `json:"draft,omitempty"` // not in OpenAI's API
	}
	toolCall struct {
		Index    *int   `json:"index,omitempty"`
		ID       string `json:"id,omitempty"`
		Type     string `json:"type,omitempty"`
		Function struct {
			Name      string `json:"name,omitempty"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	}
	chatLogprobs struct {
		Content []tokenLogprob `json:"content"`
		Refusal *string        `json:"refusal"`
	}
	delta struct {
		Role      string     `json:"role,omitempty"`
		Content   *string    `json:"content,omitempty"`
		Reasoning string     `json:"reasoning_content,omitempty"`
		Calls     []toolCall `json:"tool_calls,omitempty"`
	}
	chatMessage struct {
		Role      string     `json:"role"`
		Content   *string    `json:"content"`
		Reasoning *string    `json:"reasoning_content,omitempty"`
		Refusal   *string    `json:"refusal"`
		Calls     []toolCall `json:"tool_calls,omitempty"`
	}
	textLogprobs struct {
		Tokens  []string             `json:"tokens"`
		Logs    []float64            `json:"token_logprobs"`
		Top     []map[string]float64 `json:"top_logprobs"`
		Offsets []int                `json:"text_offset"`
	}
	choice struct {
		Index    int          `json:"index"`
		Delta    *delta       `json:"delta,omitempty"`
		Message  *chatMessage `json:"message,omitempty"`
		Text     *string      `json:"text,omitempty"`
		Logprobs any          `json:"logprobs"`
		Finish   *string      `json:"finish_reason"`
	}
	response struct {
		ID      string          `json:"id"`
		Object  string          `json:"object"`
		Created int64           `json:"created"`
		Model   string          `json:"model"`
		Choices []choice        `json:"choices"`
		Usage   json.RawMessage `json:"usage,omitempty"`
		Print   string          `json:"system_fingerprint"`
	}
)

func (u usage) openAI() json.RawMessage {
	var o openAIUsage
	o.Prompt, o.Completion, o.Total = u.prompt, u.completion, u.prompt+u.completion
	o.Details.Cached, o.CompletionDetails.Reasoning, o.Draft = u.cached, u.reasoning, u.draft
	return encode(o)
}

func newToolCall(c chat.ToolCall) toolCall {
	t := toolCall{ID: c.ID, Type: "function"}
	t.Function.Name, t.Function.Arguments = c.Name, c.Arguments
	return t
}

func (b *base) response(object string, choices ...choice) response {
	if choices == nil {
		choices = []choice{}
	}
	return response{ID: b.id, Object: object, Created: b.created, Model: b.model, Choices: choices, Print: b.print}
}

// textLogs gives log-probabilities in the completions API's form; offset is that of the
// first token in the answer's text.
func textLogs(logs []tokenLogprob, offset int) *textLogprobs {
	t := &textLogprobs{Tokens: []string{}, Logs: []float64{}, Top: []map[string]float64{}, Offsets: []int{}}
	for _, l := range logs {
		t.Tokens = append(t.Tokens, l.Token)
		t.Logs = append(t.Logs, l.Logprob)
		t.Offsets = append(t.Offsets, offset)
		offset += len(l.Bytes)
		top := map[string]float64{}
		for _, a := range l.Top {
			if _, twice := top[a.Token]; !twice { // parts of characters look alike; the likelier counts
				top[a.Token] = a.Logprob
			}
		}
		t.Top = append(t.Top, top)
	}
	return t
}

// openAIStream streams chat completions and completions.
type openAIStream struct {
	base
	usage  bool
	object string
	calls  int
	bytes  int // of the text so far
}

func (w *openAIStream) chunk(choices ...choice) response {
	r := w.response(w.object, choices...)
	if w.usage {
		r.Usage = json.RawMessage("null")
	}
	return r
}

func (w *openAIStream) begin(usage) {
	if w.api == chatAPI {
		empty := ""
		w.data(w.chunk(choice{Delta: &delta{Role: "assistant", Content: &empty}}))
	}
}

func (w *openAIStream) event(e event) {
	var c choice
	switch {
	case w.api == completionsAPI:
		c.Text = &e.text
		if e.logs != nil {
			c.Logprobs = textLogs(e.logs, w.bytes)
		}
		for _, l := range e.logs {
			w.bytes += len(l.Bytes)
		}
	case e.kind == chat.Thinking:
		c.Delta = &delta{Reasoning: e.text}
	case e.kind == chat.Response:
		c.Delta = &delta{Content: &e.text}
		if e.logs != nil {
			c.Logprobs = chatLogprobs{Content: e.logs}
		}
	case e.kind == chat.Call:
		t := newToolCall(e.call)
		index := w.calls
		w.calls++
		t.Index = &index
		// Name and arguments come apart, as clients that put them together expect.
		rest := toolCall{Index: &index}
		rest.Function.Arguments, t.Function.Arguments = t.Function.Arguments, ""
		w.data(w.chunk(choice{Delta: &delta{Calls: []toolCall{t}}}))
		c.Delta = &delta{Calls: []toolCall{rest}}
	}
	w.data(w.chunk(c))
}

func (w *openAIStream) end(f finish, u usage, _ string) {
	reason := openAIReason(f, w.calls)
	c := choice{Finish: &reason}
	if w.api == completionsAPI {
		empty := ""
		c.Text = &empty
	} else {
		c.Delta = &delta{}
	}
	w.data(w.chunk(c))
	if w.usage {
		r := w.response(w.object)
		r.Usage = u.openAI()
		w.data(r)
	}
	fmt.Fprint(w.out, "data: [DONE]\n\n")
}

func (w *openAIStream) fail(e *apiError) { fmt.Fprintf(w.out, "data: %s\n\n", e.body(w.api)) }

func (w *openAIStream) idle(status string) { w.comment(status) }

func openAIReason(f finish, calls int) string {
	if f == finishStop && calls > 0 {
		return "tool_calls"
	}
	return string(f)
}

// whole collects an answer that is sent in one piece.
type whole struct {
	base
	thinks   bool
	thinking strings.Builder
	text     strings.Builder
	calls    []chat.ToolCall
	logs     []tokenLogprob
	wantLogs bool
	order    []event // of the messages API: neighbours of one kind put together
}

func (w *whole) begin(usage) {}

func (w *whole) event(e event) {
	switch e.kind {
	case chat.Thinking:
		w.thinking.WriteString(e.text)
	case chat.Response:
		w.text.WriteString(e.text)
		w.logs = append(w.logs, e.logs...)
	case chat.Call:
		w.calls = append(w.calls, e.call)
	}
	if n := len(w.order); w.api == messagesAPI && n > 0 && e.kind != chat.Call && w.order[n-1].kind == e.kind {
		w.order[n-1].text += e.text
	} else if w.api == messagesAPI {
		w.order = append(w.order, e)
	}
}

// idle is white space, which may stand in front of any JSON.
func (w *whole) idle(string) { w.out.WriteByte('\n') }

func (w *whole) fail(e *apiError) { w.out.Write(append(e.body(w.api), '\n')) }

func (w *whole) end(f finish, u usage, stopped string) {
	if w.api == messagesAPI {
		w.out.Write(append(encode(w.message(f, u, stopped)), '\n'))
		return
	}
	text, reason := w.text.String(), openAIReason(f, len(w.calls))
	c := choice{Finish: &reason}
	object := "text_completion"
	if w.api == completionsAPI {
		c.Text = &text
		if w.wantLogs {
			c.Logprobs = textLogs(w.logs, 0)
		}
	} else {
		object = "chat.completion"
		c.Message = &chatMessage{Role: "assistant", Content: &text}
		if text == "" && len(w.calls) > 0 {
			c.Message.Content = nil
		}
		if thinking := w.thinking.String(); w.thinks {
			c.Message.Reasoning = &thinking
		}
		for _, call := range w.calls {
			c.Message.Calls = append(c.Message.Calls, newToolCall(call))
		}
		if w.wantLogs {
			l := chatLogprobs{Content: w.logs}
			if l.Content == nil {
				l.Content = []tokenLogprob{}
			}
			c.Logprobs = l
		}
	}
	r := w.response(object, c)
	r.Usage = u.openAI()
	w.out.Write(append(encode(r), '\n'))
}
