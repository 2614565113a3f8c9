package sdktest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anthropics/anthropic-sdk-go"
	aoption "github.com/anthropics/anthropic-sdk-go/option"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/shared"

	"deltafin/engine"
	server "deltafin/engine/openai"
	"deltafin/engine/tokenizer"
	"deltafin/golden"
)

const key = "a-key-for-tests"

// What the miniature says, by the oracle.
const (
	capitalQuestion = "What is the capital of Japan?"
	capitalThought  = "The user asks for the capital of Japan. It is Tokyo."
	capitalAnswer   = "The capital of Japan is Tokyo."
	weatherQuestion = "What is the weather in Paris?"
)

var weatherSchema = map[string]any{
	"type": "object", "properties": map[string]any{"city": map[string]any{"type": "string"}}, "required": []string{"city"},
}

// url is a server of the miniature in this process, at the shortest possible signs of
// life, so that every client meets them.
var url = sync.OnceValue(func() string {
	addr := make(chan net.Addr)
	go server.Serve(context.Background(), server.Options{
		Port: -1, Key: key, ModelID: "k3-nano", Tick: 2 * time.Millisecond, Log: slog.New(slog.DiscardHandler),
		Listen: func(a net.Addr) { addr <- a },
	}, func(ctx context.Context) (server.Model, error) {
		dir := golden.ModelDir("nano")
		tok, err := tokenizer.Open(dir)
		if err != nil {
			return nil, err
		}
		e, err := engine.Open(ctx, dir, engine.Options{PassRows: 16})
		if err != nil {
			return nil, err
		}
		return server.NewModel(e, tok)
	})
	u := "http://" + (<-addr).String()
	for {
		resp, err := http.Get(u + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return u
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
})

func client() openai.Client {
	return openai.NewClient(option.WithBaseURL(url()+"/v1"), option.WithAPIKey(key), option.WithMaxRetries(0))
}

func ask(text string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:    "k3-nano",
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(text)},
	}
}

func withWeather(p openai.ChatCompletionNewParams) openai.ChatCompletionNewParams {
	p.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
		Name: "get_weather", Description: openai.String("Get the current weather for a city."), Parameters: weatherSchema,
	})}
	return p
}

func TestOpenAIChat(t *testing.T) {
	c := client()
	got, err := c.Chat.Completions.New(context.Background(), ask(capitalQuestion))
	if err != nil {
		t.Fatal(err)
	}
	m := got.Choices[0].Message
	if m.Content != capitalAnswer || got.Choices[0].FinishReason != "stop" || got.Usage.PromptTokens == 0 || got.Usage.TotalTokens != got.Usage.PromptTokens+got.Usage.CompletionTokens {
		t.Errorf("%s", got.RawJSON())
	}
	var thought string
	if err := json.Unmarshal([]byte(m.JSON.ExtraFields["reasoning_content"].Raw()), &thought); err != nil || thought != capitalThought {
		t.Errorf("thinking %q, %v", thought, err)
	}
	// The message goes back as the client's own type makes it.
	next := ask(capitalQuestion)
	next.Messages = append(next.Messages, m.ToParam(), openai.UserMessage(capitalQuestion))
	if _, err := c.Chat.Completions.New(context.Background(), next); err != nil {
		t.Error(err)
	}
}

func TestOpenAIStream(t *testing.T) {
	c := client()
	p := ask(capitalQuestion)
	p.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
	p.Logprobs = openai.Bool(true)
	p.TopLogprobs = openai.Int(2)
	stream := c.Chat.Completions.NewStreaming(context.Background(), p)
	var acc openai.ChatCompletionAccumulator
	chunks, logs := 0, ""
	for stream.Next() {
		chunk := stream.Current()
		chunks++
		if !acc.AddChunk(chunk) {
			t.Fatalf("the client cannot add %s", chunk.RawJSON())
		}
		for _, ch := range chunk.Choices {
			for _, l := range ch.Logprobs.Content {
				logs += l.Token
				if len(l.TopLogprobs) != 2 || l.TopLogprobs[0].Logprob != l.Logprob {
					t.Errorf("log-probabilities %+v", l)
				}
			}
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if acc.Choices[0].Message.Content != capitalAnswer || acc.Choices[0].FinishReason != "stop" || acc.Usage.CompletionTokens == 0 || chunks < 5 {
		t.Errorf("%d chunks: %+v", chunks, acc.ChatCompletion)
	}
	if logs != capitalAnswer {
		t.Errorf("log-probabilities of %q", logs)
	}
}

func TestOpenAITools(t *testing.T) {
	c := client()
	p := withWeather(ask(weatherQuestion))
	whole, err := c.Chat.Completions.New(context.Background(), p)
	if err != nil {
		t.Fatal(err)
	}
	stream := c.Chat.Completions.NewStreaming(context.Background(), p)
	var acc openai.ChatCompletionAccumulator
	finished := 0
	for stream.Next() {
		acc.AddChunk(stream.Current())
		if _, ok := acc.JustFinishedToolCall(); ok {
			finished++
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	for form, got := range map[string]openai.ChatCompletion{"whole": *whole, "streamed": acc.ChatCompletion} {
		calls := got.Choices[0].Message.ToolCalls
		if len(calls) != 1 || calls[0].Function.Name != "get_weather" || got.Choices[0].FinishReason != "tool_calls" {
			t.Fatalf("%s: %+v", form, got.Choices[0])
		}
		var args struct{ City string }
		if err := json.Unmarshal([]byte(calls[0].Function.Arguments), &args); err != nil || args.City != "Paris" || calls[0].ID == "" {
			t.Errorf("%s: %v, %+v", form, err, calls[0])
		}
	}
	if finished != 1 {
		t.Errorf("the client saw %d calls finish", finished)
	}
	p.Messages = append(p.Messages, whole.Choices[0].Message.ToParam(), openai.ToolMessage(`{"weather": "rain"}`, whole.Choices[0].Message.ToolCalls[0].ID))
	if _, err := c.Chat.Completions.New(context.Background(), p); err != nil {
		t.Errorf("the result of the call: %v", err)
	}
}

func TestOpenAICompletionsAndModels(t *testing.T) {
	c := client()
	g, err := golden.Find("nano", "france")
	if err != nil {
		t.Fatal(err)
	}
	got, err := c.Completions.New(context.Background(), openai.CompletionNewParams{
		Model: "k3-nano", Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String(g.Prompt)}, MaxTokens: openai.Int(4),
	})
	if err != nil {
		t.Fatal(err)
	}
	if text := got.Choices[0].Text; text == "" || !strings.HasPrefix(g.Text, text) {
		t.Errorf("%q, the oracle %q", text, g.Text)
	}
	list, err := c.Models.List(context.Background())
	if err != nil || len(list.Data) != 1 || list.Data[0].ID != "k3-nano" {
		t.Errorf("%+v, %v", list, err)
	}
}

func TestOpenAIErrors(t *testing.T) {
	p := ask("Hi")
	p.N = openai.Int(3)
	c := client()
	_, err := c.Chat.Completions.New(context.Background(), p)
	var e *openai.Error
	if !errors.As(err, &e) || e.StatusCode != 400 || e.Param != "n" || e.Type != "invalid_request_error" || !strings.Contains(e.Message, "only 1") {
		t.Errorf("n = 3: %v", err)
	}
	stream := c.Chat.Completions.NewStreaming(context.Background(), p)
	if stream.Next() || !errors.As(stream.Err(), &e) || e.StatusCode != 400 {
		t.Errorf("n = 3, streamed: %v", stream.Err())
	}
	wrong := openai.NewClient(option.WithBaseURL(url()+"/v1"), option.WithAPIKey("another key"), option.WithMaxRetries(0))
	if _, err := wrong.Chat.Completions.New(context.Background(), ask("Hi")); !errors.As(err, &e) || e.StatusCode != 401 {
		t.Errorf("wrong key: %v", err)
	}
}

func TestOpenAICancel(t *testing.T) {
	c := client()
	ctx, cancel := context.WithCancel(context.Background())
	stream := c.Chat.Completions.NewStreaming(ctx, ask("Tell me a story about a fox."))
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	cancel()
	for stream.Next() {
	}
	if !errors.Is(stream.Err(), context.Canceled) {
		t.Errorf("after cancelling: %v", stream.Err())
	}
	if got, err := c.Chat.Completions.New(context.Background(), ask(capitalQuestion)); err != nil || got.Choices[0].Message.Content != capitalAnswer {
		t.Errorf("the next request: %v", err)
	}
}

func claude() anthropic.Client {
	return anthropic.NewClient(aoption.WithBaseURL(url()), aoption.WithAPIKey(key), aoption.WithMaxRetries(0))
}

func say(text string) anthropic.MessageNewParams {
	return anthropic.MessageNewParams{
		Model: "k3-nano", MaxTokens: 200, Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(text))},
		Thinking: anthropic.ThinkingConfigParamOfEnabled(1024),
	}
}

func TestAnthropicMessagesWholeAndStreamed(t *testing.T) {
	c := claude()
	whole, err := c.Messages.New(context.Background(), say(capitalQuestion))
	if err != nil {
		t.Fatal(err)
	}
	stream := c.Messages.NewStreaming(context.Background(), say(capitalQuestion))
	var acc anthropic.Message
	for stream.Next() {
		if err := acc.Accumulate(stream.Current()); err != nil {
			t.Fatal(err)
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	for form, m := range map[string]anthropic.Message{"whole": *whole, "streamed": acc} {
		if len(m.Content) != 2 || m.Content[0].Thinking != capitalThought || m.Content[1].Text != capitalAnswer || m.StopReason != anthropic.StopReasonEndTurn || m.Usage.OutputTokens == 0 {
			t.Errorf("%s: %+v", form, m)
		}
	}
	next := say(capitalQuestion)
	next.Messages = append(next.Messages, whole.ToParam(), anthropic.NewUserMessage(anthropic.NewTextBlock(capitalQuestion)))
	if got, err := c.Messages.New(context.Background(), next); err != nil || got.Usage.CacheReadInputTokens == 0 {
		t.Errorf("the next turn: %v", err)
	}
	n, err := c.Messages.CountTokens(context.Background(), anthropic.MessageCountTokensParams{Model: "k3-nano", Messages: next.Messages})
	if err != nil || n.InputTokens == 0 {
		t.Errorf("counting: %+v, %v", n, err)
	}
}

func TestAnthropicTools(t *testing.T) {
	c := claude()
	p := say(weatherQuestion)
	p.Tools = []anthropic.ToolUnionParam{{OfTool: &anthropic.ToolParam{
		Name: "get_weather", Description: anthropic.String("Get the current weather for a city."),
		InputSchema: anthropic.ToolInputSchemaParam{Properties: weatherSchema["properties"], Required: []string{"city"}},
	}}}
	stream := c.Messages.NewStreaming(context.Background(), p)
	var m anthropic.Message
	for stream.Next() {
		if err := m.Accumulate(stream.Current()); err != nil {
			t.Fatal(err)
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if m.StopReason != anthropic.StopReasonToolUse {
		t.Fatalf("stop reason %s: %+v", m.StopReason, m.Content)
	}
	use := m.Content[len(m.Content)-1].AsToolUse()
	var in struct{ City string }
	if err := json.Unmarshal(use.Input, &in); err != nil || in.City != "Paris" || use.Name != "get_weather" {
		t.Errorf("%+v, %v", use, err)
	}
	p.Messages = append(p.Messages, m.ToParam(), anthropic.NewUserMessage(anthropic.NewToolResultBlock(use.ID, "rain", false)))
	if _, err := c.Messages.New(context.Background(), p); err != nil {
		t.Errorf("the result of the call: %v", err)
	}
}

func TestAnthropicErrorsAndCancel(t *testing.T) {
	c := claude()
	p := say("Hi")
	p.Model = "claude-9"
	var e *anthropic.Error
	if _, err := c.Messages.New(context.Background(), p); !errors.As(err, &e) || e.StatusCode != 404 {
		t.Errorf("another model: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stream := c.Messages.NewStreaming(ctx, say("Tell me a story about a fox."))
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	cancel()
	for stream.Next() {
	}
	if !errors.Is(stream.Err(), context.Canceled) {
		t.Errorf("after cancelling: %v", stream.Err())
	}
}

// The clients for JavaScript: npm ci in js/ brings them.
func TestJavaScriptClients(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("NOT RUN: node is not installed")
	}
	if m, _ := filepath.Glob("js/node_modules/ai/package.json"); len(m) == 0 {
		t.Skip("NOT RUN: the packages are not installed: run npm ci in js/")
	}
	for _, script := range []string{"openai.mjs", "anthropic.mjs", "ai.mjs"} {
		t.Run(script, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, node, script, url(), key)
			cmd.Dir = "js"
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Run(); err != nil {
				t.Errorf("%v\n%s", err, out.String())
			}
			if !strings.HasSuffix(out.String(), "done\n") {
				t.Errorf("it did not come to its end: %s", out.String())
			}
		})
	}
}
