package openai

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"

	"deltafin/engine/chat"
)

// api is one of the forms in which a generation is asked for and answered.
type api int

const (
	chatAPI api = iota
	completionsAPI
	messagesAPI
)

func (a api) String() string { return [...]string{"chat", "completions", "messages"}[a] }

// Limits of a request beside its bytes.
const (
	maxMessages  = 1 << 14
	maxParts     = 1 << 12 // of one message
	maxTools     = 1 << 10
	maxStops     = 4
	maxStopBytes = 1 << 12
	maxTopLogs   = 20
)

// request is one generation.
type request struct {
	api    api
	prompt []int // what the model is fed first

	model    string
	messages []message
	system   []string // of the messages API
	text     *string  // prompt of the completions API, unless it gave ids
	options  chat.Options
	tools    []string // names of those that are declared
	theTool  string   // that is to be called, if one is named
	oneCall  bool     // the answer ends after its first

	stream   bool
	usage    bool // stream it too
	maxNew   int  // 0: not said
	stops    []string
	logprobs bool
	top      int // alternatives per token to report

	temperature *float64
	topP        *float64
	seed        *int64
	topK        bool // a bound on the candidates was asked for

	maxTokens, maxCompletion *int64 // as they were given
}

// message is a message while it is read: some APIs spread one over several.
type message struct {
	chat.Message
	content json.RawMessage
}

// settle checks what concerns several fields, and fills in the server's defaults.
func (r *request) settle(o *Options) *apiError {
	if r.model != "" && r.model != o.ModelID && !slices.Contains(o.Aliases, r.model) {
		return &apiError{
			status: 404, code: "model_not_found", param: "model",
			message: fmt.Sprintf("%q is not served here: use %q, or leave the field out", clip(r.model), o.ModelID),
		}
	}
	if r.maxTokens != nil && r.maxCompletion != nil {
		return invalid("max_tokens", "max_completion_tokens is there too: leave one out")
	}
	for _, n := range []*int64{r.maxTokens, r.maxCompletion} {
		if n != nil {
			r.maxNew = int(min(*n, int64(o.MaxTokens)))
		}
	}
	switch {
	case r.maxNew > 0:
	case r.api == completionsAPI:
		r.maxNew = min(16, o.MaxTokens) // the API's own default
	default:
		r.maxNew = o.MaxTokens
	}
	if r.top > 0 && !r.logprobs {
		return invalid("top_logprobs", "logprobs is not true: set it, or leave top_logprobs out")
	}
	if o.Sampling && r.topK {
		return unsupported("top_k", "drawing among a number of tokens is not supported: use top_p")
	}
	if !o.Sampling {
		r.temperature, r.topP, r.seed = nil, nil, nil
	}
	if r.sampled() && r.seed == nil {
		seed := int64(randomSeed())
		r.seed = &seed
	}
	return nil
}

// sampled tells whether the answer is drawn rather than the most likely one.
func (r *request) sampled() bool { return r.temperature != nil && *r.temperature > 0 }

// admit checks the prompt against the model.
func (r *request) admit(info Info) *apiError {
	name := "messages"
	if r.api == completionsAPI {
		name = "prompt"
	}
	if len(r.prompt) == 0 {
		return invalid(name, "it is empty: give at least one character")
	}
	// One token has to fit behind the prompt.
	if len(r.prompt) >= info.Context {
		return &apiError{
			status: 400, code: "context_length_exceeded", param: name,
			message: fmt.Sprintf("the prompt has %d tokens and the context of this model %d: shorten it", len(r.prompt), info.Context),
		}
	}
	r.maxNew = min(r.maxNew, info.Context-len(r.prompt))
	return nil
}

// key identifies all that decides about the answer's bytes: requests of one key get one
// answer.
func (r *request) key() [32]byte {
	h := sha256.New()
	n := func(v ...int64) { binary.Write(h, binary.LittleEndian, v) }
	n(int64(r.api), int64(len(r.prompt)))
	for _, id := range r.prompt {
		n(int64(id))
	}
	n(int64(r.maxNew), int64(r.top), int64(len(r.stops)))
	for _, s := range r.stops {
		n(int64(len(s)))
		h.Write([]byte(s))
	}
	fmt.Fprint(h, r.options.Thinking, r.logprobs, r.oneCall, r.sampled())
	if r.sampled() {
		fmt.Fprint(h, *r.temperature, r.topP == nil, *r.seed)
		if r.topP != nil {
			fmt.Fprint(h, *r.topP)
		}
	}
	return [32]byte(h.Sum(nil))
}

// decode reads a body by the API's table.
func decode(a api, body []byte, o *Options) (*request, *apiError) {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil, &apiError{status: 400, code: "invalid_json", message: "the body is empty: send one JSON object"}
	}
	if err := checkJSON(body); err != nil {
		return nil, err
	}
	r := &request{api: a}
	var err *apiError
	switch a {
	case chatAPI:
		r.options = chat.Defaults()
		err = readFields(r, chatFields, body, "")
		if err == nil {
			err = r.settleChat()
		}
	case completionsAPI:
		err = readFields(r, completionFields, body, "")
		if err == nil && r.text == nil && r.prompt == nil {
			err = missing("prompt")
		}
	case messagesAPI:
		err = readFields(r, messageFields, body, "")
		if err == nil {
			err = r.settleMessages()
		}
	}
	if err == nil {
		err = r.settle(o)
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

// render makes the prompt's ids.
func (r *request) render(m Model) *apiError {
	switch {
	case r.text != nil:
		r.prompt = m.Tokenizer().Encode(*r.text)
	case r.prompt == nil:
		msgs := make([]chat.Message, len(r.messages))
		for i := range msgs {
			msgs[i] = r.messages[i].Message
		}
		ids, err := chat.Render(m.Tokenizer(), msgs, r.options)
		if err != nil {
			return invalid("messages", "%s", err)
		}
		r.prompt = ids
	}
	r.messages, r.system, r.text, r.options.Tools, r.options.ResponseFormat = nil, nil, nil, nil, nil // the queue holds tokens alone
	for i, id := range r.prompt {
		if id >= m.Info().Vocab {
			return invalid(at("prompt", i), "token %d is not in the vocabulary: ids are 0 to %d", id, m.Info().Vocab-1)
		}
	}
	return nil
}

func missing(name string) *apiError {
	return &apiError{status: 400, code: "missing_required_parameter", param: name, message: "the field is missing: give it"}
}

// Readers that several APIs share.

func readStops(r *request, v json.RawMessage, path string) *apiError {
	if len(v) > 0 && v[0] == '"' {
		v = slices.Concat(json.RawMessage("["), v, json.RawMessage("]"))
	}
	list, err := array(v, path, maxStops)
	if err != nil {
		return err
	}
	for i, raw := range list {
		s, err := readString(raw, at(path, i))
		switch {
		case err != nil:
			return err
		case s == "":
			return invalid(at(path, i), "it is empty and would stop everything: leave it out")
		case len(s) > maxStopBytes:
			return invalid(at(path, i), "it is longer than %d bytes", maxStopBytes)
		}
		r.stops = append(r.stops, s)
	}
	return nil
}

func readCount(r **int64) func(json.RawMessage, string) *apiError {
	return func(v json.RawMessage, path string) *apiError {
		n, err := readInt(v, path, 1, 1<<53)
		if err == nil {
			*r = &n
		}
		return err
	}
}

func readTemperature(most float64) func(*request, json.RawMessage, string) *apiError {
	return func(r *request, v json.RawMessage, path string) *apiError {
		f, err := readFloat(v, path, 0, most)
		r.temperature = &f
		return err
	}
}

func readTopP(r *request, v json.RawMessage, path string) *apiError {
	f, err := readFloat(v, path, 0, 1)
	r.topP = &f
	return err
}

func readSeed(r *request, v json.RawMessage, path string) *apiError {
	n, err := readInt(v, path, -1<<63, 1<<63-1)
	r.seed = &n
	return err
}

func readStreamOptions(r *request, v json.RawMessage, path string) *apiError {
	return readFields(r, streamOptionFields, v, path)
}

var streamOptionFields = []field[request]{
	{name: "include_usage", note: "a last chunk with usage and no choices", read: into(readBool, func(r *request, v bool) { r.usage = v })},
	{name: "include_obfuscation", support: noEffect, note: "`true` or `false`: nothing is ever added to hide lengths", read: only[request]("true", "false")},
}

// The notes on choosing tokens, the same for all APIs.
const (
	noteTemperature = "checked; the answer is the most likely one (greedy) unless the server was started with `--sampling`"
	noteSeed        = "any whole number; greedy answers are reproducible without it, with `--sampling` it is honoured"
	noteMax         = "most tokens to generate, thinking included, from 1; clamped to the server's `--max-tokens` and to the context, `finish_reason` is then `length`"
)
