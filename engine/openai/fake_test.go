package openai

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"deltafin/engine"
	"deltafin/engine/tokenizer"
	"deltafin/golden"
	"deltafin/prefill"
)

// fake is a model whose answers and pace a test decides. A session's state is the
// tokens that it was fed.
type fake struct {
	tok   *tokenizer.Tokenizer
	info  Info
	layer func(ctx context.Context) error // called for every layer of every pass

	mu      sync.Mutex
	answers [][2][]int // prompt, answer
	fed     []int      // tokens of each pass
	cut     *fakePass  // that a session may go on with
	busy    atomic.Bool
	clash   atomic.Bool // two passes at once
}

var nanoTokenizer = sync.OnceValue(func() *tokenizer.Tokenizer {
	tok, err := tokenizer.Open(golden.ModelDir("nano"))
	if err != nil {
		panic(err)
	}
	return tok
})

func newFake() *fake {
	return &fake{tok: nanoTokenizer(), info: Info{EOS: 2818, Vocab: 3072, Context: 4096, Layers: 9, PassRows: 16, Digest: [32]byte{7}}}
}

// say makes the model answer the prompt of a request by text, in which control tokens
// are spelled by name.
func (f *fake) say(t testing.TB, a api, body, text string) []int {
	t.Helper()
	prompt := promptOf(t, f, a, body)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers = append(f.answers, [2][]int{prompt, f.tok.EncodeSpecial(text)})
	return prompt
}

func promptOf(t testing.TB, m Model, a api, body string) []int {
	t.Helper()
	o := Options{}.withDefaults()
	r, err := decode(a, []byte(body), &o)
	if err == nil {
		err = r.render(m)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r.prompt
}

func (f *fake) next(ids []int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.answers {
		n := len(ids) - len(a[0])
		if n >= 0 && n <= len(a[1]) && slices.Equal(ids[:len(a[0])], a[0]) && slices.Equal(ids[len(a[0]):], a[1][:n]) {
			if n == len(a[1]) {
				return f.info.EOS
			}
			return a[1][n]
		}
	}
	return f.info.EOS
}

func (f *fake) passes() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.fed)
}

func (f *fake) Info() Info                      { return f.info }
func (f *fake) Tokenizer() *tokenizer.Tokenizer { return f.tok }
func (f *fake) NewSession() Session             { return &fakeSession{f: f} }
func (f *fake) Counters() prefill.Counters      { return prefill.Counters{Read: 5, Union: 5} }

func (f *fake) LoadSession(r io.Reader, _ int64) (Session, []int, []float32, error) {
	var saved savedFake
	if err := json.NewDecoder(r).Decode(&saved); err != nil {
		return nil, nil, nil, err
	}
	return &fakeSession{f: f, ids: saved.IDs}, saved.IDs, saved.Logits, nil
}

func (f *fake) ReadIDs(r io.Reader, _ int64) ([]int, error) {
	var saved savedFake
	err := json.NewDecoder(r).Decode(&saved)
	return saved.IDs, err
}

type savedFake struct {
	IDs    []int
	Logits []float32
}

type fakeSession struct {
	f   *fake
	ids []int
	cut *fakePass
}

// fakePass is one that a cancelled context ended before layer done.
type fakePass struct {
	ids  []int
	done int
}

func (s *fakeSession) Suspended() ([]int, int) {
	if s.cut == nil || s.cut != s.f.cut {
		return nil, 0
	}
	return s.cut.ids, s.cut.done
}

func (s *fakeSession) Position() int { return len(s.ids) }
func (s *fakeSession) Bytes() int64  { return 1000 + 8*int64(len(s.ids)) }
func (s *fakeSession) Fork() Session { return &fakeSession{f: s.f, ids: slices.Clone(s.ids)} }

func (s *fakeSession) Save(w io.Writer, ids []int, logits []float32) error {
	if len(ids) != len(s.ids) {
		return fmt.Errorf("%d ids of a session with %d", len(ids), len(s.ids))
	}
	return json.NewEncoder(w).Encode(savedFake{ids, logits})
}

func (s *fakeSession) Feed(ctx context.Context, ids []int, progress func(done, of int)) ([]float32, error) {
	if !s.f.busy.CompareAndSwap(false, true) {
		s.f.clash.Store(true)
	}
	defer s.f.busy.Store(false)
	p := &fakePass{ids: slices.Clone(ids)}
	if s.cut != nil {
		if p = s.cut; p != s.f.cut || !slices.Equal(ids, p.ids) {
			return nil, errors.New("fed something else inside a pass")
		}
	}
	s.cut, s.f.cut = p, nil
	for ; p.done < s.f.info.Layers; p.done++ {
		err := ctx.Err()
		if err == nil && s.f.layer != nil {
			err = s.f.layer(ctx)
		}
		if err != nil {
			s.f.cut = p
			return nil, err
		}
		if progress != nil {
			progress(p.done+1, s.f.info.Layers)
		}
	}
	s.cut = nil
	s.f.mu.Lock()
	s.f.fed = append(s.f.fed, len(ids))
	s.f.mu.Unlock()
	s.ids = append(s.ids, ids...)
	row := make([]float32, s.f.info.Vocab)
	row[s.f.next(s.ids)] = 10
	return row, nil
}

func (s *fakeSession) Generate(ctx context.Context, r engine.Request) (res engine.Result, err error) {
	res.Finish = engine.FinishLength
	feed := r.Prompt
	for len(res.IDs) < r.MaxNew {
		row, err := s.Feed(ctx, feed, r.Progress)
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			res.Finish = engine.FinishCancelled
			return res, nil
		}
		if err != nil {
			return res, err
		}
		r.Logits(row)
		id := r.Choose(row, s.Position())
		if slices.Contains(r.Stop, id) {
			res.Finish = engine.FinishStop
			return res, nil
		}
		res.IDs = append(res.IDs, id)
		if err := r.Token(id); err != nil {
			return res, fmt.Errorf("token %d: %w", id, err)
		}
		feed, r.Progress = []int{id}, nil
	}
	return res, nil
}

// serve starts a server for a test.
func serve(t testing.TB, m Model, o Options) (*Server, string) {
	t.Helper()
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s, err := New(m, o)
	if err != nil {
		t.Fatal(err)
	}
	hs := httptest.NewServer(s)
	t.Cleanup(func() {
		hs.CloseClientConnections()
		hs.Close()
		s.Close()
	})
	return s, hs.URL
}

// post sends a body and gives the whole answer.
func post(t testing.TB, url, body string) (status int, header http.Header, text string) {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

// answerOf posts and decodes an answer that has to be 200.
func answerOf[T any](t testing.TB, url, body string) (v T) {
	t.Helper()
	status, _, text := post(t, url, body)
	if status != 200 {
		t.Fatalf("status %d: %s", status, text)
	}
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	return v
}

// completion is what tests look at of a chat completion or one of its chunks.
type completion struct {
	ID      string
	Choices []struct {
		Text    string
		Message struct {
			Content   *string
			Reasoning string `json:"reasoning_content"`
			Calls     []call `json:"tool_calls"`
		}
		Delta struct {
			Role      string
			Content   string
			Reasoning string `json:"reasoning_content"`
			Calls     []call `json:"tool_calls"`
		}
		Logprobs json.RawMessage
		Finish   *string `json:"finish_reason"`
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
		More struct {
			Reasoning int `json:"reasoning_tokens"`
		} `json:"completion_tokens_details"`
	}
	Error *struct{ Message, Code string }
}

type call struct {
	Index    int
	ID, Type string
	Function struct{ Name, Arguments string }
}

// joined is an answer, streamed or not.
type joined struct {
	Thinking, Text, Finish string
	Calls                  []call
}

func wholeChat(t testing.TB, url, body string) (joined, completion) {
	t.Helper()
	c := answerOf[completion](t, url+"/v1/chat/completions", body)
	m := c.Choices[0].Message
	j := joined{Thinking: m.Reasoning, Calls: m.Calls, Finish: *c.Choices[0].Finish}
	if m.Content != nil {
		j.Text = *m.Content
	}
	return j, c
}

// streamedChat posts body with "stream": true and puts the chunks together as clients do.
func streamedChat(t testing.TB, url, body string) joined {
	t.Helper()
	status, _, text := post(t, url+"/v1/chat/completions", strings.Replace(body, "{", `{"stream":true,`, 1))
	if status != 200 {
		t.Fatalf("status %d: %s", status, text)
	}
	return joinChunks(t, text)
}

func joinChunks(t testing.TB, text string) (j joined) {
	t.Helper()
	data := dataLines(text)
	if len(data) == 0 || data[len(data)-1] != "[DONE]" {
		t.Fatalf("the stream does not end with [DONE]: %q", text)
	}
	for i, line := range data[:len(data)-1] {
		var c completion
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		if c.Error != nil {
			t.Fatal(c.Error.Message)
		}
		if i == 0 && c.Choices[0].Delta.Role != "assistant" {
			t.Errorf("the first chunk has no role: %s", line)
		}
		for _, ch := range c.Choices {
			if j.Finish != "" {
				t.Errorf("a choice after the one with finish_reason: %s", line)
			}
			j.Thinking += ch.Delta.Reasoning
			j.Text += ch.Delta.Content
			for _, tc := range ch.Delta.Calls {
				if tc.ID != "" {
					if tc.Index != len(j.Calls) {
						t.Errorf("call %d has index %d", len(j.Calls), tc.Index)
					}
					tc.Index = 0
					j.Calls = append(j.Calls, tc)
				} else {
					j.Calls[tc.Index].Function.Arguments += tc.Function.Arguments
				}
			}
			if ch.Finish != nil {
				j.Finish = *ch.Finish
			}
		}
	}
	return j
}

// dataLines are the data of a stream's events.
func dataLines(stream string) (data []string) {
	for line := range strings.Lines(stream) {
		if d, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "data: "); ok {
			data = append(data, d)
		}
	}
	return data
}

// live is a request whose answer a test reads line by line.
type live struct {
	t      testing.TB
	status int
	header http.Header
	body   io.ReadCloser
	lines  *bufio.Reader
	cancel context.CancelFunc
}

func start(t testing.TB, url, body string) *live {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	req, err := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); resp.Body.Close() })
	return &live{t, resp.StatusCode, resp.Header, resp.Body, bufio.NewReader(resp.Body), cancel}
}

func (l *live) line() string {
	l.t.Helper()
	s, err := l.lines.ReadString('\n')
	if err != nil {
		l.t.Fatalf("the connection ended: %v", err)
	}
	return strings.TrimSuffix(s, "\n")
}

// until reads lines up to one that contains part.
func (l *live) until(part string) string {
	l.t.Helper()
	for {
		if s := l.line(); strings.Contains(s, part) {
			return s
		}
	}
}

// eventually waits for what another goroutine is about to make true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not true after 10 s: %s", what)
		}
	}
}

func logTo(b *bytes.Buffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(&lockedWriter{w: b}, nil))
}

type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

var full = flag.Bool("full", false, "run the long tests at their full length")

func newLines(r io.Reader) *bufio.Reader { return bufio.NewReader(r) }

func newServer(s *Server) *httptest.Server { return httptest.NewServer(s) }
