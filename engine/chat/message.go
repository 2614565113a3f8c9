package chat

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Message is one message of a conversation. It reads JSON in the form of OpenAI's
// chat messages, with reasoning_content (or reasoning) for an assistant's earlier
// thoughts; fields it does not know are ignored.
type Message struct {
	Role    string // system, user, assistant or tool
	Name    string // of the author, if there are several; optional
	Content string
	Parts   []string // instead of Content when not nil: texts that are encoded each on its own

	Reasoning string     // assistant: what it thought before its response
	ToolCalls []ToolCall // assistant

	ToolCallID string // tool: ID of the call that this is the result of
	Tool       string // tool: name of the tool; taken from the matching call if there is one

	Tools json.RawMessage // system: a JSON array of tools that are new from here on; Content is then not shown
}

// ToolCall is a call that the assistant made.
type ToolCall struct {
	ID   string // given by whoever serves the model; the model never sees it
	Name string
	// Arguments is a JSON object as text, or empty for none. Text that is no JSON is
	// what the model wrote in place of arguments.
	Arguments string
}

// UnmarshalJSON reads a message in OpenAI's form. Content may be a string, null,
// or a list of text parts.
func (m *Message) UnmarshalJSON(b []byte) error {
	var in struct {
		Role             string          `json:"role"`
		Name             string          `json:"name"`
		Content          json.RawMessage `json:"content"`
		ReasoningContent string          `json:"reasoning_content"`
		Reasoning        string          `json:"reasoning"`
		ToolCalls        []ToolCall      `json:"tool_calls"`
		ToolCallID       string          `json:"tool_call_id"`
		Tool             string          `json:"tool"`
		Tools            json.RawMessage `json:"tools"`
	}
	if err := json.Unmarshal(b, &in); err != nil {
		return err
	}
	*m = Message{
		Role: in.Role, Name: in.Name, Reasoning: in.ReasoningContent, ToolCalls: in.ToolCalls,
		ToolCallID: in.ToolCallID, Tool: in.Tool, Tools: in.Tools,
	}
	if m.Reasoning == "" {
		m.Reasoning = in.Reasoning
	}
	switch c := in.Content; {
	case blankJSON(c):
	case c[0] == '"':
		return json.Unmarshal(c, &m.Content)
	case c[0] == '[':
		var parts []struct {
			Type string  `json:"type"`
			Text *string `json:"text"`
		}
		if err := json.Unmarshal(c, &parts); err != nil {
			return fmt.Errorf("content: %w", err)
		}
		m.Parts = make([]string, len(parts))
		for i, p := range parts {
			if p.Type != "text" || p.Text == nil {
				return fmt.Errorf("content part %d is of type %q: only text parts can be read", i+1, p.Type)
			}
			m.Parts[i] = *p.Text
		}
	default:
		return fmt.Errorf("content is %.60q: give a string or a list of text parts", c)
	}
	return nil
}

// UnmarshalJSON reads a call in OpenAI's form, name and arguments within
// "function" or beside the id. Arguments may be an object, or a string that holds
// one.
func (c *ToolCall) UnmarshalJSON(b []byte) error {
	type function struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	}
	var in struct {
		ID       string    `json:"id"`
		Function *function `json:"function"`
		function
	}
	if err := json.Unmarshal(b, &in); err != nil {
		return err
	}
	f := in.function
	if in.Function != nil {
		f = *in.Function
	}
	*c = ToolCall{ID: in.ID, Name: f.Name}
	switch a := f.Arguments; {
	case blankJSON(a):
	case a[0] == '"':
		return json.Unmarshal(a, &c.Arguments)
	default:
		c.Arguments = string(a)
	}
	return nil
}

// blankJSON tells whether a JSON field is missing or null.
func blankJSON(raw json.RawMessage) bool {
	raw = bytes.TrimSpace(raw)
	return len(raw) == 0 || string(raw) == "null"
}
