package openai

import (
	"encoding/json"

	"deltafin/engine/chat"
)

// messageFields is the table of Anthropic's messages API.
var (
	messageFields          []field[request]
	anthropicMessageFields []field[message]
	blockKinds             []blockKind
)

func init() { // the tables' readers refer to other tables
	messageFields = []field[request]{
		{name: "model", note: "as in chat", read: into(readString, func(r *request, v string) { r.model = v })},
		{name: "messages", note: "required, at least one, the last not of the assistant", read: readAnthropicMessages},
		{name: "max_tokens", note: "required but by count_tokens; as max_completion_tokens in chat, `stop_reason` is then `max_tokens`", read: func(r *request, v json.RawMessage, p string) *apiError { return readCount(&r.maxTokens)(v, p) }},
		{name: "system", note: "a string or text blocks", read: readSystem},
		{name: "stream", note: "server-sent events", read: into(readBool, func(r *request, v bool) { r.stream = v })},
		{name: "stop_sequences", note: "up to 4, as stop in chat", read: readStops},
		{name: "thinking", note: "thinking is off unless this says `enabled` or `adaptive`; see below", read: func(r *request, v json.RawMessage, p string) *apiError {
			return readFields(r, anthropicThinkingFields, v, p)
		}},
		{name: "output_config", note: "see below", read: func(r *request, v json.RawMessage, p string) *apiError {
			return readFields(r, outputConfigFields, v, p)
		}},
		{name: "tools", note: "the client's own tools; see below", read: readAnthropicTools},
		{name: "tool_choice", note: "see below", read: readAnthropicChoice},
		{name: "temperature", note: "0 to 1; " + noteTemperature, read: readTemperature(1)},
		{name: "top_p", note: "0 to 1; " + noteTemperature, read: readTopP},

		{name: "top_k", support: noEffect, note: "a whole number from 1 on: the most likely token is among any number of them; refused with `--sampling`", read: readTopK},
		{name: "metadata", support: noEffect, note: "any object", read: anyObject[request]},
		{name: "cache_control", support: noEffect, note: "any object: a known beginning is always reused", read: anyObject[request]},
		{name: "context_management", support: noEffect, note: "no edits, or the one that keeps all thinking: the conversation is taken as it is sent", read: only[request]("{}", `{"edits":[]}`, `{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]}`, `{"edits":[{"keep":"all","type":"clear_thinking_20251015"}]}`)},
		{name: "service_tier", support: noEffect, note: "`auto` or `standard_only`", read: only[request](`"auto"`, `"standard_only"`)},
		{name: "inference_geo", support: noEffect, note: "any string", read: anyString[request]},

		{name: "container", support: refused, note: "the server runs no code for the model"},
		{name: "mcp_servers", support: refused, note: "nothing is fetched from a network"},
	}
	anthropicMessageFields = []field[message]{
		{name: "role", note: "`user`, `assistant`, or `system` for instructions that come within the conversation", read: func(m *message, v json.RawMessage, p string) (err *apiError) {
			m.Role, err = readChoice(v, p, "user", "assistant", "system")
			return err
		}},
		{name: "content", note: "a string or blocks; see below", read: func(m *message, v json.RawMessage, _ string) *apiError {
			m.content = v
			return nil
		}},
	}
	blockKinds = []blockKind{
		{"text", []field[block]{
			blockType,
			{name: "text", note: "the text; it never becomes a control token", read: into(readString, func(b *block, v string) { b.text = &v })},
			blockCache,
			{name: "citations", support: noEffect, note: "null or `[]`", read: only[block]("[]")},
		}},
		{"thinking", []field[block]{
			blockType,
			{name: "thinking", note: "assistant: its earlier thoughts. Send them back: the model was trained with them in place", read: into(readString, func(b *block, v string) { b.text = &v })},
			{name: "signature", support: noEffect, note: "any string; the server's own is empty", read: anyString[block]},
		}},
		{"tool_use", []field[block]{
			blockType,
			{name: "id", note: "as it was given", read: into(readString, func(b *block, v string) { b.id = v })},
			{name: "name", note: "the tool", read: into(readString, func(b *block, v string) { b.name = v })},
			{name: "input", note: "an object", read: func(b *block, v json.RawMessage, p string) *apiError {
				_, err := object(v, p)
				b.input = v
				return err
			}},
			blockCache,
		}},
		{"tool_result", []field[block]{
			blockType,
			{name: "tool_use_id", note: "the call that this is the result of", read: into(readString, func(b *block, v string) { b.id = v })},
			{name: "content", note: "a string or text blocks; nothing is an empty result", read: func(b *block, v json.RawMessage, p string) (err *apiError) {
				b.parts, err = readTexts(v, p)
				return err
			}},
			{name: "is_error", support: noEffect, note: "`true` or `false`: the model's format has no place for it, so let the content say it", read: only[block]("true", "false")},
			blockCache,
		}},
	}
}

var anthropicThinkingFields = []field[request]{
	{name: "type", note: "`enabled`, `adaptive` (the same) or `disabled`", read: func(r *request, v json.RawMessage, p string) *apiError {
		s, err := readChoice(v, p, "enabled", "adaptive", "disabled")
		r.options.Thinking = err == nil && s != "disabled"
		return err
	}},
	{name: "budget_tokens", support: noEffect, note: "a whole number from 1 on: the model cannot be held to it; use output_config.effort", read: func(_ *request, v json.RawMessage, p string) *apiError {
		_, err := readInt(v, p, 1, 1<<53)
		return err
	}},
	{name: "display", support: noEffect, note: "`summarized`: thoughts are always shown, whole", read: only[request](`"summarized"`)},
}

var outputConfigFields = []field[request]{
	{name: "effort", note: "`low`, `high` or `max` (the default): how much to think, if thinking is on", read: func(r *request, v json.RawMessage, p string) (err *apiError) {
		r.options.Effort, err = readChoice(v, p, "low", "high", "max")
		return err
	}},
}

// anthropicChoice is a tool_choice in Anthropic's form.
type anthropicChoice struct {
	kind, name string
	oneCall    bool
}

var anthropicChoiceFields = []field[anthropicChoice]{
	{name: "type", note: "`auto`, `any` or `none`, told to the model in its own format and not enforced; `tool` is `any` if it names the only one declared, and refused otherwise", read: func(c *anthropicChoice, v json.RawMessage, p string) (err *apiError) {
		c.kind, err = readChoice(v, p, "auto", "any", "none", "tool")
		return err
	}},
	{name: "name", note: "of the tool, with the type `tool`", read: into(readString, func(c *anthropicChoice, v string) { c.name = v })},
	{name: "disable_parallel_tool_use", note: "`true` ends the answer after its first call; else the model decides how many it makes", read: into(readBool, func(c *anthropicChoice, v bool) { c.oneCall = v })},
}

func readAnthropicChoice(r *request, v json.RawMessage, path string) *apiError {
	var c anthropicChoice
	if err := readFields(&c, anthropicChoiceFields, v, path); err != nil {
		return err
	}
	switch {
	case c.kind == "":
		return missing(path + ".type")
	case (c.kind == "tool") != (c.name != ""):
		return invalid(path+".name", "a name and the type tool belong together: give both or neither")
	case c.kind == "any" || c.kind == "tool":
		c.kind = "required"
	}
	r.options.ToolChoice, r.theTool, r.oneCall = c.kind, c.name, c.oneCall
	return nil
}

// anthropicTool is a declaration in Anthropic's form.
type anthropicTool struct {
	name        string
	description string
	schema      json.RawMessage
}

var anthropicToolFields = []field[anthropicTool]{
	{name: "name", note: "letters, digits, `_`, `-` and `.`, at most 64", read: func(t *anthropicTool, v json.RawMessage, p string) *apiError {
		s, err := readString(v, p)
		if err == nil && !functionName.MatchString(s) {
			err = invalid(p, "%q is not a tool name: use letters, digits, _, - and ., at most 64", clip(s))
		}
		t.name = s
		return err
	}},
	{name: "description", note: "shown to the model", read: into(readString, func(t *anthropicTool, v string) { t.description = v })},
	{name: "input_schema", note: "a JSON schema, shown to the model", read: func(t *anthropicTool, v json.RawMessage, p string) *apiError {
		_, err := object(v, p)
		t.schema = v
		return err
	}},
	{name: "type", note: "`custom`; the tools of Anthropic's own servers are refused", read: only[anthropicTool](`"custom"`)},
	{name: "cache_control", support: noEffect, note: "any object", read: anyObject[anthropicTool]},
	{name: "strict", support: noEffect, note: "`false`: arguments are not forced into the schema", read: only[anthropicTool]("false")},
	{name: "eager_input_streaming", support: noEffect, note: "`true` or `false`", read: only[anthropicTool]("true", "false")},
}

// block is one content block of any kind.
type block struct {
	kind  string
	text  *string
	id    string
	name  string
	input json.RawMessage
	parts []string
}

type blockKind struct {
	name   string
	fields []field[block]
}

var (
	blockType  = field[block]{name: "type", note: "images, documents and blocks of Anthropic's own servers are refused", read: into(readString, func(b *block, v string) { b.kind = v })}
	blockCache = field[block]{name: "cache_control", support: noEffect, note: "any object: a known beginning is always reused", read: anyObject[block]}
)

func readTopK(r *request, v json.RawMessage, path string) *apiError {
	_, err := readInt(v, path, 1, 1<<31)
	r.topK = true
	return err
}

// settleMessages checks what concerns several of the fields.
func (r *request) settleMessages() *apiError {
	if len(r.messages) == 0 {
		return missing("messages")
	}
	if err := r.settleTools(); err != nil {
		return err
	}
	if r.options.Thinking && r.options.Effort == "" {
		r.options.Effort = chat.Defaults().Effort
	}
	if len(r.system) > 0 {
		r.messages = append([]message{{Message: chat.Message{Role: "system", Parts: r.system}}}, r.messages...)
	}
	return nil
}

func readSystem(r *request, raw json.RawMessage, path string) (err *apiError) {
	r.system, err = readTexts(raw, path)
	return err
}

// readTexts reads a string or text blocks.
func readTexts(raw json.RawMessage, path string) ([]string, *apiError) {
	if raw[0] == '"' {
		s, err := readString(raw, path)
		return []string{s}, err
	}
	blocks, err := readBlocks(raw, path, "text")
	if err != nil {
		return nil, err
	}
	texts := make([]string, len(blocks))
	for i, b := range blocks {
		texts[i] = *b.text
	}
	return texts, nil
}

// readBlocks reads blocks of the given kinds.
func readBlocks(raw json.RawMessage, path string, kinds ...string) ([]block, *apiError) {
	list, err := array(raw, path, maxParts)
	if err != nil {
		return nil, invalid(path, "expected a string or an array of blocks, got %s", describe(raw))
	}
	blocks := make([]block, len(list))
	for i, v := range list {
		b, p := &blocks[i], at(path, i)
		members, err := object(v, p)
		if err != nil {
			return nil, err
		}
		for _, m := range members {
			if m.name == "type" {
				if b.kind, err = readChoice(m.value, p+".type", kinds...); err != nil {
					return nil, err
				}
			}
		}
		if b.kind == "" {
			return nil, missing(p + ".type")
		}
		for _, k := range blockKinds {
			if k.name == b.kind {
				err = readFields(b, k.fields, v, p)
			}
		}
		switch {
		case err != nil:
			return nil, err
		case (b.kind == "text" || b.kind == "thinking") && b.text == nil:
			return nil, missing(p + "." + b.kind)
		case b.kind == "tool_use" && b.id == "":
			return nil, missing(p + ".id")
		case b.kind == "tool_use" && b.name == "":
			return nil, missing(p + ".name")
		case b.kind == "tool_use" && b.input == nil:
			return nil, missing(p + ".input")
		case b.kind == "tool_result" && b.id == "":
			return nil, missing(p + ".tool_use_id")
		}
	}
	return blocks, nil
}

func readAnthropicMessages(r *request, raw json.RawMessage, path string) *apiError {
	list, err := array(raw, path, maxMessages)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		return invalid(path, "it is empty: give at least one message")
	}
	calls := map[string]bool{}
	for i, v := range list {
		p := at(path, i)
		var m message
		if err := readFields(&m, anthropicMessageFields, v, p); err != nil {
			return err
		}
		switch {
		case m.Role == "":
			return missing(p + ".role")
		case m.content == nil:
			return missing(p + ".content")
		case i == 0 && m.Role == "system":
			return unsupported(p+".role", "what comes before the conversation goes into the field system")
		case i == len(list)-1 && m.Role == "assistant":
			return unsupported(p, "the last message is the assistant's, and an answer cannot be begun for the model: end with a message of the user")
		}
		switch m.Role {
		case "user":
			err = r.addUser(m.content, p+".content", calls)
		case "assistant":
			err = r.addAssistant(m.content, p+".content", calls)
		default:
			m.Parts, err = readTexts(m.content, p+".content")
			r.messages = append(r.messages, m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// addUser turns a user's message into results of tools and a message of its own.
func (r *request) addUser(raw json.RawMessage, path string, calls map[string]bool) *apiError {
	if raw[0] == '"' {
		text, err := readString(raw, path)
		r.messages = append(r.messages, message{Message: chat.Message{Role: "user", Content: text}})
		return err
	}
	blocks, err := readBlocks(raw, path, "text", "tool_result")
	if err != nil {
		return err
	}
	var texts []string
	results := false
	for i, b := range blocks {
		switch {
		case b.kind == "text":
			texts = append(texts, *b.text)
		case texts != nil:
			return invalid(at(path, i), "a tool result stands behind text: put the results first")
		case !calls[b.id]:
			return invalid(at(path, i)+".tool_use_id", "no earlier message made a call of the id %q", clip(b.id))
		default:
			results = true
			r.messages = append(r.messages, message{Message: chat.Message{Role: "tool", ToolCallID: b.id, Parts: b.parts}})
		}
	}
	if texts == nil && !results {
		return invalid(path, "it is empty: give at least one block")
	}
	if texts != nil {
		r.messages = append(r.messages, message{Message: chat.Message{Role: "user", Parts: texts}})
	}
	return nil
}

func (r *request) addAssistant(raw json.RawMessage, path string, calls map[string]bool) *apiError {
	m := chat.Message{Role: "assistant"}
	if raw[0] == '"' {
		text, err := readString(raw, path)
		m.Content = text
		r.messages = append(r.messages, message{Message: m})
		return err
	}
	blocks, err := readBlocks(raw, path, "text", "thinking", "tool_use")
	if err != nil {
		return err
	}
	for _, b := range blocks {
		switch b.kind {
		case "text":
			m.Parts = append(m.Parts, *b.text)
		case "thinking":
			m.Reasoning += *b.text
		case "tool_use":
			m.ToolCalls = append(m.ToolCalls, chat.ToolCall{ID: b.id, Name: b.name, Arguments: string(b.input)})
			calls[b.id] = true
		}
	}
	r.messages = append(r.messages, message{Message: m})
	return nil
}

// readAnthropicTools puts declarations into the form that the model knows.
func readAnthropicTools(r *request, raw json.RawMessage, path string) *apiError {
	list, err := array(raw, path, maxTools)
	if err != nil {
		return err
	}
	type function struct {
		Name        string          `json:"name"`
		Description string          `json:"description,omitempty"`
		Parameters  json.RawMessage `json:"parameters"`
	}
	type declaration struct {
		Type     string   `json:"type"`
		Function function `json:"function"`
	}
	tools := make([]declaration, len(list))
	for i, v := range list {
		var t anthropicTool
		p := at(path, i)
		if err := readFields(&t, anthropicToolFields, v, p); err != nil {
			return err
		}
		switch {
		case t.name == "":
			return missing(p + ".name")
		case t.schema == nil:
			return missing(p + ".input_schema")
		}
		tools[i] = declaration{"function", function{t.name, t.description, t.schema}}
		r.tools = append(r.tools, t.name)
	}
	r.options.Tools = encode(tools)
	return nil
}
