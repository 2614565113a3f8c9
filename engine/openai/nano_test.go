package openai

import (
	"context"
	"encoding/json"
	"math"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"deltafin/engine"
	"deltafin/engine/chat"
	"deltafin/golden"
)

var nanoModel = sync.OnceValues(func() (Model, error) {
	e, err := engine.Open(context.Background(), golden.ModelDir("nano"), engine.Options{PassRows: 32})
	if err != nil {
		return nil, err
	}
	return NewModel(e, nanoTokenizer())
})

func nano(t testing.TB) Model {
	t.Helper()
	m, err := nanoModel()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// goldenChats are the frozen chats with the request that asks for each.
func goldenChats(t testing.TB) map[string]struct {
	golden.Case
	body string
} {
	t.Helper()
	out := map[string]struct {
		golden.Case
		body string
	}{}
	cases, err := golden.Cases("nano")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if c.Chat == nil {
			continue
		}
		type msg map[string]any
		var msgs []msg
		for _, m := range c.Chat.Messages {
			o := msg{"role": m.Role, "content": m.Content}
			if m.Reasoning != "" {
				o["reasoning_content"] = m.Reasoning
			}
			msgs = append(msgs, o)
		}
		body := map[string]any{"messages": msgs, "max_tokens": len(c.Greedy)}
		switch {
		case !c.Chat.Thinking:
			body["reasoning_effort"] = "none"
		case c.Chat.Effort != "":
			body["reasoning_effort"] = c.Chat.Effort
		}
		if len(c.Chat.Tools) > 0 {
			body["tools"] = c.Chat.Tools
		}
		out[c.Name] = struct {
			golden.Case
			body string
		}{c, string(encode(body))}
	}
	if len(out) < 6 {
		t.Fatalf("%d golden chats, want 6", len(out))
	}
	return out
}

func TestGoldenChatsAreTheOraclesStreamedAndWhole(t *testing.T) {
	m := nano(t)
	for name, c := range goldenChats(t) {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.PromptIDs, promptOf(t, m, chatAPI, c.body)); diff != "" {
				t.Fatalf("the prompt is not the oracle's:\n%s", diff)
			}
			reply, err := chat.Parse(m.Tokenizer(), c.Greedy, c.Chat.Thinking)
			if err != nil {
				t.Fatal(err)
			}
			// Two servers: the second must not know the first's answer.
			_, one := serve(t, m, Options{})
			_, two := serve(t, m, Options{})
			whole, full := wholeChat(t, one, c.body)
			streamed := streamedChat(t, two, c.body)
			for i := range whole.Calls {
				if whole.Calls[i].ID == "" || streamed.Calls[i].ID == whole.Calls[i].ID {
					t.Errorf("ids of calls %q and %q, want two different ones", whole.Calls[i].ID, streamed.Calls[i].ID)
				}
				streamed.Calls[i].ID = whole.Calls[i].ID
			}
			if diff := cmp.Diff(whole, streamed); diff != "" {
				t.Errorf("streamed is not whole:\n%s", diff)
			}
			if whole.Text != reply.Response || whole.Thinking != reply.Thinking || len(whole.Calls) != len(reply.Calls) {
				t.Errorf("got %+v, the oracle %+v", whole, reply)
			}
			for i, call := range reply.Calls {
				if f := whole.Calls[i].Function; f.Name != call.Name || f.Arguments != call.Arguments {
					t.Errorf("call %d is %v, the oracle's %v", i, f, call)
				}
			}
			if full.Usage.Prompt != len(c.PromptIDs) || full.Usage.Details.Cached != 0 {
				t.Errorf("usage %+v of a prompt of %d new tokens", full.Usage, len(c.PromptIDs))
			}
			// Every cut of the text by a stop string, wherever the tokens' borders are.
			if len(reply.Response) < 12 {
				return
			}
			cut := len(reply.Response) / 2
			for !utf8.RuneStart(reply.Response[cut]) {
				cut++
			}
			end := cut + 5
			for !utf8.RuneStart(reply.Response[end]) {
				end++
			}
			stop := reply.Response[cut:end]
			body := strings.Replace(c.body, "{", `{"stop":[`+string(encode(stop))+`],`, 1)
			want := reply.Response[:strings.Index(reply.Response, stop)]
			stopped, _ := wholeChat(t, one, body)
			if s := streamedChat(t, two, body); s.Text != want || stopped.Text != want || s.Finish != "stop" || stopped.Finish != "stop" {
				t.Errorf("stop %q: whole %q, streamed %q, want %q", stop, stopped.Text, s.Text, want)
			}
		})
	}
}

func TestLogprobsAreOfTheLogitsThatChose(t *testing.T) {
	m := nano(t)
	c := goldenChats(t)["chat-plain"]
	_, url := serve(t, m, Options{})
	body := strings.Replace(c.body, "{", `{"logprobs":true,"top_logprobs":3,`, 1)
	got, full := wholeChat(t, url, body)
	var logs struct{ Content []tokenLogprob }
	if err := json.Unmarshal(full.Choices[0].Logprobs, &logs); err != nil {
		t.Fatal(err)
	}
	text := ""
	for i, l := range logs.Content {
		row := c.Rows64[i] // no thinking: the response's tokens are the first
		most, sum := math.Inf(-1), 0.0
		for _, v := range row {
			most = math.Max(most, v)
		}
		for _, v := range row {
			sum += math.Exp(v - most)
		}
		if want := -math.Log(sum); math.Abs(l.Logprob-want) > 2e-4 {
			t.Errorf("token %d %q: logprob %g, the oracle's %g", i, l.Token, l.Logprob, want)
		}
		if len(l.Top) != 3 || l.Top[0].Token != l.Token || l.Top[1].Logprob > l.Top[0].Logprob || l.Top[2].Logprob > l.Top[1].Logprob {
			t.Errorf("token %d: alternatives %+v", i, l.Top)
		}
		for _, b := range l.Bytes {
			text += string(rune(b)) // ASCII here
		}
	}
	if text != got.Text {
		t.Errorf("the tokens are %q, the text %q", text, got.Text)
	}
}

func TestARawPromptIsContinuedAsTheOracleDoes(t *testing.T) {
	m := nano(t)
	c, err := golden.Find("nano", "france")
	if err != nil {
		t.Fatal(err)
	}
	_, url := serve(t, m, Options{})
	body := map[string]any{"prompt": c.Prompt, "max_tokens": len(c.Greedy), "logprobs": 2}
	got := answerOf[completion](t, url+"/v1/completions", string(encode(body)))
	want, err := m.Tokenizer().DecodeText(c.Greedy)
	if err != nil {
		t.Fatal(err)
	}
	if c.Stop {
		want = strings.TrimSuffix(want, "<|end_of_msg|>")
	}
	if got.Choices[0].Text != want {
		t.Errorf("got %q, want %q", got.Choices[0].Text, want)
	}
	// The same prompt as ids is the same prompt.
	body["prompt"] = c.PromptIDs
	again := answerOf[completion](t, url+"/v1/completions", string(encode(body)))
	if again.Choices[0].Text != want {
		t.Errorf("by ids %q, want %q", again.Choices[0].Text, want)
	}
}

// A conversation goes on from what is known of it, and says the same as one that does
// not know anything.
func TestTheNextTurnReusesTheConversation(t *testing.T) {
	m := nano(t)
	const first = `{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"My name is Clara."}`
	_, url := serve(t, m, Options{MaxTokens: 64})
	a, full := wholeChat(t, url, `{"messages":[`+first+`]}`)
	turn := func(reasoning string) string {
		msg := map[string]any{"role": "assistant", "content": a.Text}
		if reasoning != "" {
			msg["reasoning_content"] = reasoning
		}
		return `{"messages":[` + first + `,` + string(encode(msg)) + `,{"role":"user","content":"What is my name?"}]}`
	}
	for _, tt := range []struct {
		name, body string
		least      int
	}{
		{"with its thoughts", turn(a.Thinking), full.Usage.Prompt + full.Usage.Completion - 2},
		{"without", turn(""), full.Usage.Prompt},
	} {
		known, c := wholeChat(t, url, tt.body)
		if c.Usage.Details.Cached < tt.least {
			t.Errorf("%s: %d of %d tokens known, want %d", tt.name, c.Usage.Details.Cached, c.Usage.Prompt, tt.least)
		}
		_, fresh := serve(t, m, Options{MaxTokens: 64})
		if new, _ := wholeChat(t, fresh, tt.body); new.Text != known.Text || new.Thinking != known.Thinking {
			t.Errorf("%s: with what is known %+v, without %+v", tt.name, known, new)
		}
	}
}
