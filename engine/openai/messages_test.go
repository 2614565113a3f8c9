package openai

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const askWeather = `{"max_tokens":200,"thinking":{"type":"enabled","budget_tokens":1024},"tools":[{"name":"get_weather","description":"The weather.","input_schema":{"type":"object"}}],"messages":[{"role":"user","content":"Weather in Paris and Rome?"}]}`

const weatherAnswer = `Two calls.<|close|>think<|sep|><|open|>response<|sep|>One moment 🌦 请稍等.<|close|>response<|sep|><|open|>tools<|sep|>` +
	`<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|>` +
	`<|open|>call tool="get_weather" index="2"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>`

func TestMessagesHaveAnthropicsFormStreamedAndWhole(t *testing.T) {
	f := newFake()
	prompt := f.say(t, messagesAPI, askWeather, weatherAnswer)
	_, url := serve(t, f, Options{})
	got := answerOf[anthropicMessage](t, url+"/v1/messages", askWeather)
	if got.Type != "message" || got.Role != "assistant" || *got.StopReason != "tool_use" || len(got.Content) != 4 {
		t.Fatalf("%+v", got)
	}
	if got.Usage.Input != len(prompt) || got.Usage.Output == 0 {
		t.Errorf("usage %+v of a prompt of %d", got.Usage, len(prompt))
	}
	think, text, one, two := got.Content[0], got.Content[1], got.Content[2], got.Content[3]
	if *think.Thinking != "Two calls." || *text.Text != "One moment 🌦 请稍等." || string(one.Input) != `{"city":"Paris"}` || two.Name != "get_weather" || one.ID == two.ID {
		t.Errorf("%+v", got.Content)
	}

	_, _, stream := post(t, url+"/v1/messages", streaming(askWeather))
	streamed := joinMessage(t, stream)
	if diff := cmp.Diff(got, streamed); diff != "" {
		t.Errorf("streamed is not whole:\n%s", diff)
	}

	// The results go back under the calls' own ids, and the model sees the tools' names.
	turn := func(first, second string) string {
		return strings.Replace(askWeather, `}]}`, `},{"role":"assistant","content":[{"type":"tool_use","id":"`+one.ID+`","name":"get_weather","input":{"city":"Paris"}},{"type":"tool_use","id":"`+two.ID+`","name":"get_weather","input":{"city":"Rome"}}]},
		{"role":"user","content":[{"type":"tool_result","tool_use_id":"`+first+`","content":"rain"},{"type":"tool_result","tool_use_id":"`+second+`","content":"sun"},{"type":"text","text":"So?"}]}]}`, 1)
	}
	next, err := f.tok.Decode(promptOf(t, f, messagesAPI, turn(one.ID, two.ID)))
	if err != nil {
		t.Fatal(err)
	}
	if want := `role="tool" tool="get_weather" index="1"<|sep|>rain`; !strings.Contains(string(next), want) {
		t.Errorf("the prompt has no %s:\n%s", want, next)
	}
}

// joinMessage puts a stream together as Anthropic's clients do.
func joinMessage(t *testing.T, stream string) (m anthropicMessage) {
	t.Helper()
	var kind string
	stopped := false
	for line := range strings.Lines(stream) {
		line = strings.TrimSuffix(line, "\n")
		if k, ok := strings.CutPrefix(line, "event: "); ok {
			kind = k
		}
		data, ok := strings.CutPrefix(line, "data: ")
		if !ok {
			continue
		}
		var e struct {
			Type    string
			Message anthropicMessage
			Index   int
			Block   contentBlock `json:"content_block"`
			Delta   struct {
				Type, Text, Thinking string
				JSON                 string  `json:"partial_json"`
				StopReason           *string `json:"stop_reason"`
				StopSequence         *string `json:"stop_sequence"`
			}
			Usage anthropicUsage
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			t.Fatalf("%v in %s", err, data)
		}
		if e.Type != kind {
			t.Errorf("event %s has data of type %s", kind, e.Type)
		}
		switch kind {
		case "message_start":
			m = e.Message
		case "content_block_start":
			if e.Index != len(m.Content) {
				t.Errorf("block %d has index %d", len(m.Content), e.Index)
			}
			if e.Block.Type == "tool_use" {
				e.Block.Input = nil
			}
			m.Content = append(m.Content, e.Block)
		case "content_block_delta":
			b := &m.Content[e.Index]
			switch e.Delta.Type {
			case "text_delta":
				*b.Text += e.Delta.Text
			case "thinking_delta":
				*b.Thinking += e.Delta.Thinking
			case "input_json_delta":
				b.Input = append(b.Input, e.Delta.JSON...)
			}
		case "message_delta":
			m.StopReason, m.StopSequence, m.Usage = e.Delta.StopReason, e.Delta.StopSequence, e.Usage
		case "message_stop":
			stopped = true
		case "error":
			t.Fatal(data)
		}
	}
	for i := range m.Content {
		if b := &m.Content[i]; b.Type == "tool_use" {
			var compact bytes.Buffer
			if err := json.Compact(&compact, b.Input); err != nil {
				t.Errorf("%v in the input %s", err, b.Input)
			}
			b.Input = compact.Bytes()
		}
	}
	if !stopped {
		t.Errorf("the stream does not end with message_stop: %s", stream)
	}
	return m
}

func TestWhyAMessageStops(t *testing.T) {
	f := newFake()
	const ask = `{"max_tokens":200,"messages":[{"role":"user","content":"Count."}]}`
	f.say(t, messagesAPI, ask, "alpha beta gamma delta<|close|>response<|sep|>")
	_, url := serve(t, f, Options{})
	for _, tt := range []struct{ change, text, reason, sequence string }{
		{`{`, "alpha beta gamma delta", "end_turn", ""},
		{`{"stop_sequences":["nothing","ta gam"],`, "alpha be", "stop_sequence", "ta gam"},
		{`{"stop_sequences":["gamma","gamma d"],`, "alpha beta ", "stop_sequence", "gamma"},
	} {
		body := strings.Replace(ask, "{", tt.change, 1)
		_, _, stream := post(t, url+"/v1/messages", streaming(body))
		for form, m := range map[string]anthropicMessage{"whole": answerOf[anthropicMessage](t, url+"/v1/messages", body), "streamed": joinMessage(t, stream)} {
			sequence := ""
			if m.StopSequence != nil {
				sequence = *m.StopSequence
			}
			if *m.Content[0].Text != tt.text || *m.StopReason != tt.reason || sequence != tt.sequence {
				t.Errorf("%s %s: %q, %s, %q", tt.change, form, *m.Content[0].Text, *m.StopReason, sequence)
			}
		}
	}
	m := answerOf[anthropicMessage](t, url+"/v1/messages", strings.Replace(ask, "200", "2", 1))
	if *m.StopReason != "max_tokens" || m.Usage.Output != 2 {
		t.Errorf("%s after %d tokens", *m.StopReason, m.Usage.Output)
	}
}

func TestCountingTokensIsWhatThePromptHas(t *testing.T) {
	f := newFake()
	_, url := serve(t, f, Options{})
	body := `{"messages":[{"role":"user","content":"Count these."}],"system":"Be exact."}`
	got := answerOf[map[string]int](t, url+"/v1/messages/count_tokens", body)
	if want := len(promptOf(t, f, messagesAPI, body)); got["input_tokens"] != want {
		t.Errorf("%v, want %d", got, want)
	}
	// More than the context holds has to be counted too: how else would one know how much to leave out?
	long := `{"messages":[{"role":"user","content":"` + strings.Repeat("many words ", f.info.Context) + `"}]}`
	if got := answerOf[map[string]int](t, url+"/v1/messages/count_tokens", long); got["input_tokens"] <= f.info.Context {
		t.Errorf("%v, want more than the context's %d", got, f.info.Context)
	}
	if len(f.passes()) != 0 {
		t.Error("counting took the engine")
	}
}
