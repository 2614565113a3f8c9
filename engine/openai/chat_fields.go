package openai

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"

	"deltafin/engine/chat"
)

var chatFields []field[request]

func init() { // the table's readers refer to other tables
	chatFields = []field[request]{
		{name: "model", note: "the served model's id, or one of its aliases, or left out; others get 404", read: into(readString, func(r *request, v string) { r.model = v })},
		{name: "messages", note: "required, at least one", read: readChatMessages},
		{name: "stream", note: "server-sent events", read: into(readBool, func(r *request, v bool) { r.stream = v })},
		{name: "stream_options", note: "see below", read: readStreamOptions},
		{name: "max_completion_tokens", note: noteMax, read: func(r *request, v json.RawMessage, p string) *apiError { return readCount(&r.maxCompletion)(v, p) }},
		{name: "max_tokens", note: "the older name of max_completion_tokens; give one of them", read: func(r *request, v json.RawMessage, p string) *apiError { return readCount(&r.maxTokens)(v, p) }},
		{name: "stop", note: "a string or up to 4, looked for in the response (not in the thinking), also across token borders", read: readStops},
		{name: "logprobs", note: "log-probabilities of the response's tokens, from the logits that chose them", read: into(readBool, func(r *request, v bool) { r.logprobs = v })},
		{name: "top_logprobs", note: "0 to 20", read: func(r *request, v json.RawMessage, p string) *apiError {
			n, err := readInt(v, p, 0, maxTopLogs)
			r.top = int(n)
			return err
		}},
		{name: "reasoning_effort", note: "`low`, `high`, `max` as the model was trained with (default `max`), or `none` for no thinking", read: readEffort},
		{name: "thinking", note: "`{\"type\": \"enabled\"}` or `{\"type\": \"disabled\"}`", read: readThinking},
		{name: "tools", note: "functions; see below", read: readTools},
		{name: "tool_choice", note: "`auto`, `none` or `required`, told to the model in its own format and not enforced; a named function is `required` if it is the only one declared, and refused otherwise: the format has no words for it", read: readToolChoice},
		{name: "parallel_tool_calls", note: "`false` ends the answer after its first call; else the model decides how many it makes", read: into(readBool, func(r *request, v bool) { r.oneCall = !v })},
		{name: "response_format", note: "`text`, `json_object` or `json_schema`: told to the model in its own format, not enforced; `strict: true` is refused, as it promises what only other tokens than the model's own could keep", read: readResponseFormat},
		{name: "seed", note: noteSeed, read: readSeed},
		{name: "temperature", note: "0 to 2; " + noteTemperature, read: readTemperature(2)},
		{name: "top_p", note: "0 to 1; " + noteTemperature, read: readTopP},

		{name: "n", support: noEffect, note: "`1`", read: only[request]("1")},
		{name: "frequency_penalty", support: noEffect, note: "`0`", read: zero[request]},
		{name: "presence_penalty", support: noEffect, note: "`0`", read: zero[request]},
		{name: "logit_bias", support: noEffect, note: "`{}`", read: only[request]("{}")},
		{name: "modalities", support: noEffect, note: "`[\"text\"]`", read: only[request](`["text"]`)},
		{name: "service_tier", support: noEffect, note: "`auto` or `default`", read: only[request](`"auto"`, `"default"`)},
		{name: "store", support: noEffect, note: "`false`", read: only[request]("false")},
		{name: "verbosity", support: noEffect, note: "`medium`", read: only[request](`"medium"`)},
		{name: "user", support: noEffect, note: "any string", read: anyString[request]},
		{name: "safety_identifier", support: noEffect, note: "any string", read: anyString[request]},
		{name: "prompt_cache_key", support: noEffect, note: "any string: a known beginning is reused without it", read: anyString[request]},
		{name: "prompt_cache_retention", support: noEffect, note: "any string", read: anyString[request]},
		{name: "metadata", support: noEffect, note: "any object", read: anyObject[request]},

		{name: "audio", support: refused, note: "the model writes text only"},
		{name: "function_call", support: refused, note: "use tool_choice"},
		{name: "functions", support: refused, note: "use tools"},
		{name: "prediction", support: refused, note: "there is no such speed-up here"},
		{name: "web_search_options", support: refused, note: "nothing is fetched from a network"},
	}
	chatMessageFields = []field[message]{
		{name: "role", note: "`system`, `developer` (as system), `user`, `assistant` or `tool`", read: into(readRole, func(m *message, v string) { m.Role = v })},
		{name: "content", note: "a string or text parts; null where an assistant only called tools", read: func(m *message, v json.RawMessage, p string) *apiError {
			m.content = v
			return readContent(&m.Message, v, p)
		}},
		{name: "name", note: "of the author; shown to the model", read: into(readString, func(m *message, v string) { m.Name = v })},
		{name: "reasoning_content", note: "assistant: its earlier thoughts. Send them back: the model was trained with them in place", read: into(readString, func(m *message, v string) { m.Reasoning = v })},
		{name: "reasoning", note: "another name of reasoning_content", read: into(readString, func(m *message, v string) { m.Reasoning = v })},
		{name: "tool_calls", note: "assistant: the calls that it made", read: readToolCalls},
		{name: "tool_call_id", note: "tool: the call that this is the result of", read: into(readString, func(m *message, v string) { m.ToolCallID = v })},
		{name: "refusal", support: noEffect, note: "null", read: only[message]("null")},
		{name: "annotations", support: noEffect, note: "`[]`", read: only[message]("[]")},
		{name: "parsed", support: noEffect, note: "anything: OpenAI's clients add what they made of content"},
		{name: "audio", support: refused, note: "the model reads text only"},
		{name: "function_call", support: refused, note: "use tool_calls"},
	}
}

var chatMessageFields []field[message]

var textPartFields = []field[textPart]{
	{name: "type", note: "`text`; images, audio and files are refused", read: into(readPartType, func(t *textPart, v string) { t.kind = v })},
	{name: "text", note: "the text; it never becomes a control token", read: into(readString, func(t *textPart, v string) { t.text = &v })},
}

type textPart struct {
	kind string
	text *string
}

func readPartType(raw json.RawMessage, path string) (string, *apiError) {
	return readChoice(raw, path, "text")
}

var toolCallFields = []field[chat.ToolCall]{
	{name: "id", note: "as it was given", read: into(readString, func(c *chat.ToolCall, v string) { c.ID = v })},
	{name: "type", note: "`function`", read: only[chat.ToolCall](`"function"`)},
	{name: "index", support: noEffect, note: "any number", read: func(_ *chat.ToolCall, v json.RawMessage, p string) *apiError {
		_, err := readInt(v, p, 0, 1<<31)
		return err
	}},
	{name: "function", note: "name and arguments", read: func(c *chat.ToolCall, v json.RawMessage, p string) *apiError {
		return readFields(c, calledFunctionFields, v, p)
	}},
}

var calledFunctionFields = []field[chat.ToolCall]{
	{name: "name", note: "the function", read: into(readString, func(c *chat.ToolCall, v string) { c.Name = v })},
	{name: "arguments", note: "a JSON object as a string", read: into(readString, func(c *chat.ToolCall, v string) { c.Arguments = v })},
	{name: "parsed_arguments", support: noEffect, note: "anything: OpenAI's clients add what they made of arguments"},
}

// tool is a declaration, checked; the model is shown the client's own JSON.
type tool struct {
	kind, name string
}

var functionName = regexp.MustCompile(`^[a-zA-Z0-9_.-]{1,64}$`)

var (
	toolType = field[tool]{name: "type", note: "`function`", read: func(t *tool, v json.RawMessage, p string) (err *apiError) {
		t.kind, err = readChoice(v, p, "function")
		return err
	}}
	toolName = field[tool]{name: "name", note: "letters, digits, `_`, `-` and `.`, at most 64", read: func(t *tool, v json.RawMessage, p string) *apiError {
		s, err := readString(v, p)
		if err == nil && !functionName.MatchString(s) {
			err = invalid(p, "%q is not a function name: use letters, digits, _, - and ., at most 64", clip(s))
		}
		t.name = s
		return err
	}}
)

var toolFields = []field[tool]{
	toolType,
	{name: "function", note: "the declaration", read: func(t *tool, v json.RawMessage, p string) *apiError {
		return readFields(t, functionFields, v, p)
	}},
}

var functionFields = []field[tool]{
	toolName,
	{name: "description", note: "shown to the model", read: anyString[tool]},
	{name: "parameters", note: "a JSON schema, shown to the model", read: anyObject[tool]},
	{name: "strict", support: noEffect, note: "`false`: arguments are not forced into the schema", read: only[tool]("false")},
}

// choiceFields are those of a tool_choice that names a function.
var choiceFields = []field[tool]{
	toolType,
	{name: "function", note: "its name", read: func(t *tool, v json.RawMessage, p string) *apiError {
		return readFields(t, []field[tool]{toolName}, v, p)
	}},
}

// settleChat checks what concerns several of chat's fields.
func (r *request) settleChat() *apiError {
	if len(r.messages) == 0 {
		return missing("messages")
	}
	return r.settleTools()
}

// settleTools checks tool_choice against what is declared.
func (r *request) settleTools() *apiError {
	if len(r.tools) == 0 && r.options.ToolChoice == "required" {
		return invalid("tool_choice", "there are no tools to choose from: give tools, or leave tool_choice out")
	}
	if r.theTool != "" && !slices.Equal(r.tools, []string{r.theTool}) {
		return unsupported("tool_choice", "the model can be told to call a tool, but not which: declare only that one, or let it choose")
	}
	return nil
}

func readRole(raw json.RawMessage, path string) (string, *apiError) {
	role, err := readChoice(raw, path, "system", "developer", "user", "assistant", "tool")
	if role == "developer" {
		role = "system"
	}
	return role, err
}

func readChatMessages(r *request, raw json.RawMessage, path string) *apiError {
	list, err := array(raw, path, maxMessages)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		return invalid(path, "it is empty: give at least one message")
	}
	calls := map[string]bool{} // ids of calls so far
	for i, v := range list {
		p := at(path, i)
		var m message
		if err := readFields(&m, chatMessageFields, v, p); err != nil {
			return err
		}
		if err := m.check(p, calls); err != nil {
			return err
		}
		r.messages = append(r.messages, m)
	}
	return nil
}

// check looks at a message as a whole.
func (m *message) check(path string, calls map[string]bool) *apiError {
	switch {
	case m.Role == "":
		return missing(path + ".role")
	case m.content == nil && m.Role != "assistant":
		return missing(path + ".content")
	case m.content == nil && len(m.ToolCalls) == 0 && m.Reasoning == "":
		return missing(path + ".content")
	case m.Role != "assistant" && m.ToolCalls != nil:
		return invalid(path+".tool_calls", "only an assistant makes calls")
	case m.Role != "assistant" && m.Reasoning != "":
		return invalid(path+".reasoning_content", "only an assistant has thoughts")
	case m.Role != "tool" && m.ToolCallID != "":
		return invalid(path+".tool_call_id", "only a message of role tool is the result of a call")
	case m.Role == "tool" && !calls[m.ToolCallID]:
		return invalid(path+".tool_call_id", "no earlier message made a call of the id %q", clip(m.ToolCallID))
	}
	for i, c := range m.ToolCalls {
		switch p := at(path+".tool_calls", i); {
		case c.ID == "":
			return missing(p + ".id")
		case c.Name == "":
			return missing(p + ".function.name")
		}
		calls[c.ID] = true
	}
	return nil
}

func readContent(m *chat.Message, raw json.RawMessage, path string) *apiError {
	if raw[0] == '"' {
		text, err := readString(raw, path)
		m.Content = text
		return err
	}
	if raw[0] != '[' {
		return invalid(path, "expected a string or an array of text parts, got %s", describe(raw))
	}
	list, err := array(raw, path, maxParts)
	if err != nil {
		return err
	}
	m.Parts = make([]string, len(list))
	for i, v := range list {
		var t textPart
		p := at(path, i)
		// The type goes first: an image is refused as one, not for its fields.
		if err := readPartTypeFirst(v, p); err != nil {
			return err
		}
		if err := readFields(&t, textPartFields, v, p); err != nil {
			return err
		}
		if t.kind == "" {
			return missing(p + ".type")
		}
		if t.text == nil {
			return missing(p + ".text")
		}
		m.Parts[i] = *t.text
	}
	return nil
}

func readPartTypeFirst(raw json.RawMessage, path string) *apiError {
	members, err := object(raw, path)
	if err != nil {
		return err
	}
	for _, m := range members {
		if m.name == "type" {
			_, err = readPartType(m.value, path+".type")
		}
	}
	return err
}

func readToolCalls(m *message, raw json.RawMessage, path string) *apiError {
	list, err := array(raw, path, maxTools)
	if err != nil {
		return err
	}
	for i, v := range list {
		var c chat.ToolCall
		if err := readFields(&c, toolCallFields, v, at(path, i)); err != nil {
			return err
		}
		m.ToolCalls = append(m.ToolCalls, c)
	}
	return nil
}

func readTools(r *request, raw json.RawMessage, path string) *apiError {
	list, err := array(raw, path, maxTools)
	if err != nil {
		return err
	}
	r.tools = make([]string, len(list))
	for i, v := range list {
		var t tool
		p := at(path, i)
		if err := readFields(&t, toolFields, v, p); err != nil {
			return err
		}
		switch {
		case t.kind == "":
			return missing(p + ".type")
		case t.name == "":
			return missing(p + ".function.name")
		}
		r.tools[i] = t.name
	}
	r.options.Tools = raw
	return nil
}

func readToolChoice(r *request, raw json.RawMessage, path string) (err *apiError) {
	if raw[0] == '{' {
		var named tool
		if err := readFields(&named, choiceFields, raw, path); err != nil {
			return err
		}
		if named.kind == "" || named.name == "" {
			return invalid(path, `it names no function: give {"type": "function", "function": {"name": ...}}`)
		}
		r.options.ToolChoice, r.theTool = "required", named.name
		return nil
	}
	r.options.ToolChoice, err = readChoice(raw, path, "auto", "none", "required")
	return err
}

func readEffort(r *request, raw json.RawMessage, path string) *apiError {
	s, err := readChoice(raw, path, "none", "low", "high", "max")
	if s == "none" {
		r.options.Thinking, r.options.Effort = false, ""
	} else {
		r.options.Effort = s
	}
	return err
}

func readThinking(r *request, raw json.RawMessage, path string) *apiError {
	members, err := object(raw, path)
	if err != nil {
		return err
	}
	if len(members) != 1 || members[0].name != "type" {
		return invalid(path, `give {"type": "enabled"} or {"type": "disabled"}`)
	}
	s, err := readChoice(members[0].value, path+".type", "enabled", "disabled")
	if s == "disabled" {
		r.options.Thinking = false
	}
	return err
}

func readResponseFormat(r *request, raw json.RawMessage, path string) *apiError {
	members, err := object(raw, path)
	if err != nil {
		return err
	}
	kind := ""
	for _, m := range members {
		switch m.name {
		case "type":
			if kind, err = readChoice(m.value, path+".type", "text", "json_object", "json_schema"); err != nil {
				return err
			}
		case "json_schema":
			if err := checkSchema(m.value, path+".json_schema"); err != nil {
				return err
			}
		default:
			return &apiError{status: 400, code: "unknown_parameter", param: join(path, m.name), message: "this field is not known: leave it out"}
		}
	}
	switch {
	case kind == "":
		return missing(path + ".type")
	case kind == "json_schema" && len(members) != 2:
		return missing(path + ".json_schema")
	case kind != "json_schema" && len(members) != 1:
		return invalid(path+".json_schema", "it belongs to the type json_schema, and the type is %s", kind)
	}
	r.options.ResponseFormat = raw
	return nil
}

func checkSchema(raw json.RawMessage, path string) *apiError {
	members, err := object(raw, path)
	if err != nil {
		return err
	}
	schema := false
	for _, m := range members {
		p := join(path, m.name)
		switch {
		case m.name == "schema":
			schema = true
			_, err = object(m.value, p)
		case m.name == "name" || m.name == "description":
			_, err = readString(m.value, p)
		case m.name != "strict":
			err = &apiError{status: 400, code: "unknown_parameter", param: p, message: "this field is not known: leave it out"}
		case !isNull(m.value) && string(m.value) != "false":
			err = unsupported(p, "the model is told the schema but not forced into it: leave strict out and check the answer")
		}
		if err != nil {
			return err
		}
	}
	if !schema {
		return missing(path + ".schema")
	}
	return nil
}

// completionFields is the table of the raw completions API.
var completionFields = []field[request]{
	{name: "model", note: "as in chat", read: into(readString, func(r *request, v string) { r.model = v })},
	{name: "prompt", note: "required: a string, an array of one string, or an array of token ids, which alone may be control tokens", read: readPrompt},
	{name: "stream", note: "server-sent events", read: into(readBool, func(r *request, v bool) { r.stream = v })},
	{name: "stream_options", note: "as in chat", read: readStreamOptions},
	{name: "max_tokens", note: noteMax + "; default 16", read: func(r *request, v json.RawMessage, p string) *apiError { return readCount(&r.maxTokens)(v, p) }},
	{name: "stop", note: "a string or up to 4, also across token borders", read: readStops},
	{name: "logprobs", note: "a number of alternatives, 0 to 20: log-probabilities from the logits that chose the tokens", read: func(r *request, v json.RawMessage, p string) *apiError {
		n, err := readInt(v, p, 0, maxTopLogs)
		r.logprobs, r.top = true, int(n)
		return err
	}},
	{name: "seed", note: noteSeed, read: readSeed},
	{name: "temperature", note: "0 to 2; " + noteTemperature, read: readTemperature(2)},
	{name: "top_p", note: "0 to 1; " + noteTemperature, read: readTopP},

	{name: "n", support: noEffect, note: "`1`", read: only[request]("1")},
	{name: "best_of", support: noEffect, note: "`1`", read: only[request]("1")},
	{name: "echo", support: noEffect, note: "`false`", read: only[request]("false")},
	{name: "suffix", support: noEffect, note: "`\"\"`", read: only[request](`""`)},
	{name: "frequency_penalty", support: noEffect, note: "`0`", read: zero[request]},
	{name: "presence_penalty", support: noEffect, note: "`0`", read: zero[request]},
	{name: "logit_bias", support: noEffect, note: "`{}`", read: only[request]("{}")},
	{name: "user", support: noEffect, note: "any string", read: anyString[request]},
}

func readPrompt(r *request, raw json.RawMessage, path string) *apiError {
	if raw[0] == '"' {
		text, err := readString(raw, path)
		r.text = &text
		return err
	}
	list, err := array(raw, path, 1<<22)
	if err != nil {
		return invalid(path, "expected a string or an array, got %s", describe(raw))
	}
	if len(list) == 0 {
		return invalid(path, "it is empty: give at least one token")
	}
	switch list[0][0] {
	case '"', '[':
		if len(list) > 1 {
			return unsupported(path, "%d prompts in one request are not supported: send one request each", len(list))
		}
		if list[0][0] == '[' {
			if list, err = array(list[0], at(path, 0), 1<<22); err != nil {
				return err
			}
			return readIDs(r, list, at(path, 0))
		}
		text, err := readString(list[0], at(path, 0))
		r.text = &text
		return err
	}
	return readIDs(r, list, path)
}

func readIDs(r *request, list []json.RawMessage, path string) *apiError {
	r.prompt = make([]int, len(list))
	for i, v := range list {
		id, err := readInt(v, fmt.Sprintf("%s[%d]", path, i), 0, 1<<31-1)
		if err != nil {
			return err
		}
		r.prompt[i] = int(id)
	}
	return nil
}
