package openai

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const hello = `{"messages":[{"role":"user","content":"Hello"}],"reasoning_effort":"none"}`

func streaming(body string) string { return strings.Replace(body, "{", `{"stream":true,`, 1) }

// long is a request whose prompt takes several passes.
func long() string {
	return `{"messages":[{"role":"user","content":"` + strings.Repeat("one two three four five ", 12) + `"}],"reasoning_effort":"none"}`
}

// gate lets layers through one at a time, or all once it is opened.
type gate struct {
	step    chan struct{}
	entered atomic.Int64
	left    atomic.Int64 // by cancellation
	passed  int64
}

func newGate() *gate { return &gate{step: make(chan struct{})} }

func (g *gate) layer(ctx context.Context) error {
	g.entered.Add(1)
	select {
	case <-g.step:
		return nil
	case <-ctx.Done():
		g.left.Add(1)
		return ctx.Err()
	}
}

func (g *gate) open() { close(g.step) }

// pass lets n layers through and returns when the next has begun.
func (g *gate) pass(t *testing.T, n int) {
	t.Helper()
	for range n {
		g.step <- struct{}{}
	}
	g.passed += int64(n)
	eventually(t, "the next layer begins", func() bool { return g.entered.Load() == g.passed+g.left.Load()+1 })
}

func TestASlowPromptIsNeverSilent(t *testing.T) {
	f, g := newFake(), newGate()
	f.layer = g.layer
	f.say(t, chatAPI, hello, "Hi!<|close|>response<|sep|>")
	_, url := serve(t, f, Options{Tick: 10 * time.Millisecond})

	l := start(t, url+"/v1/chat/completions", streaming(hello)) // returns when the headers are here
	if got := l.header.Get("Content-Type"); l.status != 200 || !strings.HasPrefix(got, "text/event-stream") {
		t.Fatalf("status %d, type %q", l.status, got)
	}
	// Not one layer has ended; comments come all the same, by the clock. The first chunk
	// comes too, which has no text yet.
	var early strings.Builder
	for comments := 0; comments < 4; {
		s := l.line()
		if strings.HasPrefix(s, ": ") {
			comments++
		}
		early.WriteString(s + "\n")
	}
	if d := dataLines(early.String()); len(d) != 1 || !strings.Contains(d[0], `"delta":{"role":"assistant","content":""}`) {
		t.Errorf("while the prompt is under way: %q", early.String())
	}
	for range 4 {
		g.step <- struct{}{}
	}
	l.until("layer 4 of 18") // the prompt has two passes
	g.open()
	io.Copy(&early, l.lines)
	if j := joinChunks(t, early.String()); j.Text != "Hi!" || j.Finish != "stop" {
		t.Errorf("answer %+v", j)
	}

	// A whole answer: its headers and white space come early too.
	g2 := newGate()
	f.layer = g2.layer
	other := strings.Replace(hello, "Hello", "Good day", 1)
	f.say(t, chatAPI, other, "Hi!<|close|>response<|sep|>")
	l = start(t, url+"/v1/chat/completions", other)
	for range 3 {
		if s := l.line(); s != "" {
			t.Fatalf("a line that is not empty while the prompt is under way: %q", s)
		}
	}
	g2.open()
	var c completion
	if err := json.NewDecoder(l.lines).Decode(&c); err != nil || *c.Choices[0].Message.Content != "Hi!" {
		t.Errorf("after white space %+v, %v", c, err)
	}
	if f.clash.Load() {
		t.Error("two passes ran at once")
	}
}

func TestAClientThatLeavesStopsThePromptAndFindsItsPartLater(t *testing.T) {
	f, g := newFake(), newGate()
	f.layer = g.layer
	prompt := f.say(t, chatAPI, long(), "Yes<|close|>response<|sep|>")
	_, url := serve(t, f, Options{Tick: 10 * time.Millisecond})
	chunks := (len(prompt) + 15) / 16
	if chunks < 4 {
		t.Fatalf("the prompt has %d passes, too few to show anything", chunks)
	}
	for _, body := range []string{streaming(long()), long()} {
		before := len(f.passes())
		ctx, cancel := context.WithCancel(context.Background())
		req, _ := http.NewRequestWithContext(ctx, "POST", url+"/v1/chat/completions", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		go func() {
			if resp, err := http.DefaultClient.Do(req); err == nil {
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		}()
		g.pass(t, f.info.Layers+f.info.Layers/2) // a pass and a half
		left, entered := g.left.Load(), g.entered.Load()
		cancel()
		eventually(t, "the pass was stopped", func() bool { return g.left.Load() == left+1 })
		if more := g.entered.Load() - entered; more > 1 {
			t.Errorf("%d more layers began after the client had left", more)
		}
		if n := len(f.passes()) - before; n != 1 {
			t.Errorf("%d passes were finished, want 1", n)
		}
	}
	// Another that asks the same hears where it goes on.
	left := g.left.Load()
	l := start(t, url+"/v1/chat/completions", streaming(long()))
	l.until(fmt.Sprintf("%d of them known, and %d layers of what follows", f.passes()[0]+f.passes()[1], f.info.Layers-1))
	l.cancel()
	eventually(t, "the third was stopped", func() bool { return g.left.Load() == left+1 })
	g.open()
	before := f.passes()
	got, c := wholeChat(t, url, long())
	if got.Text != "Yes" {
		t.Errorf("answer %+v", got)
	}
	if ran, want := g.entered.Load()-g.left.Load(), int64(len(f.passes())*f.info.Layers); ran != want {
		t.Errorf("%d layers ran for %d passes, want %d", ran, len(f.passes()), want)
	}
	again := 0
	for _, n := range f.passes()[len(before):] {
		again += n
	}
	first := before[0] + before[1]
	if c.Usage.Details.Cached != first || again != len(prompt)-first+c.Usage.Completion {
		t.Errorf("the retry knew %d tokens and fed %d; %d of %d had been fed before", c.Usage.Details.Cached, again, first, len(prompt))
	}
}

func TestAnotherConversationGoesOnFromTheSameInstructions(t *testing.T) {
	f := newFake()
	ask := func(question string) string {
		return `{"messages":[{"role":"system","content":"` + strings.Repeat("Be kind. ", 30) + `"},{"role":"user","content":"` + question + `"}],"reasoning_effort":"none"}`
	}
	f.say(t, chatAPI, ask("One?"), "Yes<|close|>response<|sep|>")
	f.say(t, chatAPI, ask("Two?"), "No<|close|>response<|sep|>")
	_, url := serve(t, f, Options{})
	wholeChat(t, url, ask("One?"))
	passes := f.passes()
	known := 0
	for _, n := range passes {
		if n == 1 { // the answer's
			break
		}
		known += n
	}
	known -= passes[0] // its last pass, which the question is in; they are of one size
	if got, c := wholeChat(t, url, ask("Two?")); got.Text != "No" || c.Usage.Details.Cached < known-1 || known < 30 {
		t.Errorf("%q with %d of %d tokens known, want about %d", got.Text, c.Usage.Details.Cached, c.Usage.Prompt, known)
	}
}

func TestAnAnswerThatWasCutOffGoesOn(t *testing.T) {
	f, g := newFake(), newGate()
	f.layer = g.layer
	body := strings.Replace(hello, "{", `{"logprobs":true,`, 1)
	text := strings.Repeat("word after word ", 8)
	prompt := f.say(t, chatAPI, hello, text+"<|close|>response<|sep|>")
	_, url := serve(t, f, Options{KeepEvery: time.Nanosecond})
	l := start(t, url+"/v1/chat/completions", streaming(body))
	passes := (len(prompt) + 15) / 16
	g.pass(t, f.info.Layers*(passes+9))
	l.until("word")
	l.cancel()
	eventually(t, "the generation was stopped", func() bool { return g.left.Load() == 1 })
	g.open()
	before := len(f.passes())
	l = start(t, url+"/v1/chat/completions", streaming(body))
	var rest strings.Builder
	io.Copy(&rest, l.lines)
	if j := joinChunks(t, rest.String()); j.Text != text {
		t.Errorf("after the retry %q, want %q", j.Text, text)
	}
	logs := ""
	for _, line := range dataLines(rest.String()) {
		var c completion
		json.Unmarshal([]byte(line), &c)
		for _, ch := range c.Choices {
			var l struct{ Content []tokenLogprob }
			json.Unmarshal(ch.Logprobs, &l)
			for _, t := range l.Content {
				logs += t.Token
			}
		}
	}
	if logs != text {
		t.Errorf("log-probabilities of %q, want %q", logs, text)
	}
	answer := len(f.answers[0][1])
	if n := len(f.passes()) - before; n > answer-7 {
		t.Errorf("the retry took %d passes of %d: what was there was made again", n, answer)
	}
}

func TestTheQueueIsFairBoundedAndLive(t *testing.T) {
	f, g := newFake(), newGate()
	f.layer = g.layer
	bodies := make([]string, 4)
	for i := range bodies {
		bodies[i] = strings.Replace(hello, "Hello", fmt.Sprint("Hello ", i), 1)
		f.say(t, chatAPI, bodies[i], fmt.Sprint("answer ", i, "<|close|>response<|sep|>"))
	}
	s, url := serve(t, f, Options{Queue: 2, Tick: 10 * time.Millisecond})
	chat := url + "/v1/chat/completions"
	lives := []*live{start(t, chat, streaming(bodies[0]))}
	eventually(t, "the first runs", func() bool { return g.entered.Load() > 0 })
	lives = append(lives, start(t, chat, streaming(bodies[1])), start(t, chat, streaming(bodies[2])))
	lives[2].until("place 2 in the queue")

	status, header, text := post(t, chat, bodies[3])
	if status != 429 || header.Get("Retry-After") == "" || !strings.Contains(text, "queue_full") {
		t.Errorf("beyond the queue: status %d, Retry-After %q, %s", status, header.Get("Retry-After"), text)
	}
	for _, path := range []string{"/v1/models", "/healthz", "/readyz", "/metrics"} {
		if resp, err := http.Get(url + path); err != nil || resp.StatusCode != 200 {
			t.Errorf("%s while the engine is busy: %v %v", path, resp, err)
		} else {
			resp.Body.Close()
		}
	}
	// The second leaves while it waits; its place is free, and its turn never comes.
	lives[1].cancel()
	eventually(t, "the place is free", func() bool { return s.queue.length() == 1 })
	lives[2].until("place 1 in the queue")
	third := start(t, chat, streaming(bodies[3]))
	g.open()
	var order []string
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, l := range []*live{lives[0], lives[2], third} {
		want := fmt.Sprint("answer ", []int{0, 2, 3}[i])
		wg.Go(func() {
			b, _ := io.ReadAll(l.lines)
			mu.Lock()
			defer mu.Unlock()
			order = append(order, want)
			if j := joinChunks(t, string(b)); j.Text != want {
				t.Errorf("got %q, want %q", j.Text, want)
			}
		})
	}
	wg.Wait()
	if got := f.passes(); len(got) == 0 || f.clash.Load() {
		t.Error("passes ran at once")
	}
	if s.queue.busy || s.queue.length() != 0 {
		t.Error("the queue is not empty in the end")
	}
}

func TestTurnsComeInTheOrderOfArrival(t *testing.T) {
	q := queue{limit: 10}
	var tickets []*ticket
	for range 5 {
		k, ok := q.enter()
		if !ok {
			t.Fatal("no place")
		}
		tickets = append(tickets, k)
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if tickets[2].wait(gone) == nil {
		t.Error("a turn for one that left")
	}
	for _, i := range []int{0, 1, 3, 4} {
		for j, k := range tickets {
			select {
			case <-k.turn:
				if j > i {
					t.Fatalf("ticket %d had its turn before %d", j, i)
				}
			default:
			}
		}
		if err := tickets[i].wait(context.Background()); err != nil {
			t.Fatal(err)
		}
		tickets[i].leave()
	}
	if q.busy {
		t.Error("still busy")
	}
}

func TestTheSameRequestAgainGivesTheSameBytes(t *testing.T) {
	f := newFake()
	body := `{"messages":[{"role":"user","content":"Hello"}],"tools":[{"type":"function","function":{"name":"f"}}]}`
	f.say(t, chatAPI, body, `Hm.<|close|>think<|sep|><|open|>response<|sep|>Well<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>`)
	_, url := serve(t, f, Options{})
	_, _, first := post(t, url+"/v1/chat/completions", body)
	passes := len(f.passes())
	_, _, second := post(t, url+"/v1/chat/completions", body)
	if first != second {
		t.Errorf("first %s, second %s", first, second)
	}
	var c completion
	if err := json.Unmarshal([]byte(first), &c); err != nil {
		t.Fatal(err)
	}
	m := c.Choices[0].Message
	if *c.Choices[0].Finish != "tool_calls" || len(m.Calls) != 1 || m.Calls[0].Function.Arguments != `{"a": 1}` || *m.Content != "Well" || m.Reasoning != "Hm." {
		t.Errorf("answer %s", first)
	}
	_, _, one := post(t, url+"/v1/chat/completions", streaming(body))
	_, _, two := post(t, url+"/v1/chat/completions", streaming(body))
	if diff := cmp.Diff(dataLines(one), dataLines(two)); diff != "" {
		t.Error(diff)
	}
	if j := joinChunks(t, one); len(j.Calls) != 1 || j.Calls[0].ID != m.Calls[0].ID || j.Calls[0].Function != m.Calls[0].Function || j.Thinking != m.Reasoning {
		t.Errorf("streamed %+v", j)
	}
	if n := len(f.passes()); n != passes {
		t.Errorf("%d passes for what was known", n-passes)
	}
	// Anything that decides about the answer makes it another request.
	_, _, other := post(t, url+"/v1/chat/completions", strings.Replace(body, "{", `{"max_tokens":2,`, 1))
	if strings.Contains(other, m.Calls[0].ID) || !strings.Contains(other, `"length"`) {
		t.Errorf("another request got %s", other)
	}
}

func TestLengthsAreClampedAndSaid(t *testing.T) {
	f := newFake()
	f.info.Context = 60
	prompt := f.say(t, chatAPI, hello, strings.Repeat("and so on ", 60))
	_, url := serve(t, f, Options{MaxTokens: 50})
	for _, tt := range []struct {
		field string
		want  int
	}{
		{`"max_tokens":3,`, 3},
		{`"max_completion_tokens":1,`, 1},
		{`"max_tokens":1048576,`, 60 - len(prompt)}, // the context is the narrower
		{``, 60 - len(prompt)},
	} {
		_, c := wholeChat(t, url, strings.Replace(hello, "{", "{"+tt.field, 1))
		if c.Usage.Completion != tt.want || *c.Choices[0].Finish != "length" {
			t.Errorf("%s %d tokens, finish %s; want %d, length", tt.field, c.Usage.Completion, *c.Choices[0].Finish, tt.want)
		}
	}
}

func TestTheEngineFailsInTheOpen(t *testing.T) {
	f := newFake()
	boom := errors.New("pread /secret/path: input/output error")
	f.layer = func(context.Context) error { return boom }
	// At once, a whole answer has a status of its own.
	_, patient := serve(t, f, Options{})
	status, _, text := post(t, patient+"/v1/chat/completions", hello)
	if status != 500 || strings.Contains(text, "secret") || !strings.Contains(text, "engine_failed") {
		t.Errorf("status %d: %s", status, text)
	}
	// Later, a stream has an event and a whole answer is broken off.
	_, url := serve(t, f, Options{Tick: 10 * time.Millisecond})
	chat := url + "/v1/chat/completions"
	block := make(chan struct{})
	f.layer = func(context.Context) error { <-block; return boom }
	l := start(t, chat, streaming(hello))
	l2 := start(t, chat, strings.Replace(hello, "Hello", "Other", 1))
	l2.line()
	close(block)
	if s := l.until("engine_failed"); !strings.HasPrefix(s, "data: ") || strings.Contains(s, "secret") {
		t.Errorf("event %s", s)
	}
	b, err := io.ReadAll(l2.lines)
	if !errors.Is(err, io.ErrUnexpectedEOF) || !strings.Contains(string(b), "engine_failed") {
		t.Errorf("a whole answer ended with %v after %q, want it broken off", err, b)
	}
	// The next request is served.
	f.layer = nil
	f.say(t, chatAPI, hello, "Hi<|close|>response<|sep|>")
	if got, _ := wholeChat(t, url, hello); got.Text != "Hi" {
		t.Errorf("after a failure: %+v", got)
	}
}

func TestStoppingLetsAnswersEndUntilTheDeadline(t *testing.T) {
	f, g := newFake(), newGate()
	f.layer = g.layer
	f.say(t, chatAPI, hello, "Hi!<|close|>response<|sep|>")
	s, url := serve(t, f, Options{Tick: 10 * time.Millisecond})
	l := start(t, url+"/v1/chat/completions", streaming(hello))
	eventually(t, "it runs", func() bool { return g.entered.Load() > 0 })
	drained := make(chan struct{})
	go func() { s.Drain(context.Background()); close(drained) }()
	eventually(t, "new requests are refused", func() bool {
		status, _, _ := post(t, url+"/v1/chat/completions", hello)
		return status == 503
	})
	if resp, err := http.Get(url + "/readyz"); err != nil || resp.StatusCode != 503 {
		t.Errorf("readyz: %v, %v", resp, err)
	}
	select {
	case <-drained:
		t.Fatal("drained before the answer has ended")
	default:
	}
	g.open()
	<-drained
	b, _ := io.ReadAll(l.lines)
	if j := joinChunks(t, string(b)); j.Text != "Hi!" {
		t.Errorf("the answer under way: %+v", j)
	}

	g = newGate()
	f.layer = g.layer
	s, url = serve(t, f, Options{Tick: 10 * time.Millisecond})
	l = start(t, url+"/v1/chat/completions", streaming(hello))
	eventually(t, "it runs", func() bool { return g.entered.Load() > 0 })
	now, cancel := context.WithCancel(context.Background())
	cancel()
	s.Drain(now)
	if got := l.until("stopping"); !strings.HasPrefix(got, "data: ") {
		t.Errorf("after the deadline: %s", got)
	}
	if g.left.Load() != 1 {
		t.Error("the pass was not stopped")
	}
}

// open serves f by Serve itself, once it is ready.
func open(t *testing.T, f *fake, o Options) net.Addr {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	addr, ended := make(chan net.Addr, 1), make(chan error, 1)
	o.Port, o.Log, o.Listen = -1, slog.New(slog.DiscardHandler), func(a net.Addr) { addr <- a }
	go func() {
		ended <- Serve(ctx, o, func(context.Context) (Model, error) { return f, nil })
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return <-addr
}

func TestNobodyHoldsAConnectionForEver(t *testing.T) {
	a := open(t, newFake(), Options{ReadTimeout: 50 * time.Millisecond, WriteTimeout: 50 * time.Millisecond})
	for _, tt := range []struct {
		name, request string
		answered      bool
	}{
		{"a body that never comes, of a request that has none", "GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", true},
		{"a body that never comes, of a request that is refused", "POST /v1/chat/completions HTTP/1.1\r\nHost: elsewhere\r\nContent-Length: 100\r\n\r\n{", true},
		{"answers that nobody reads", strings.Repeat("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 1000), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := net.Dial("tcp", a.String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(20 * time.Second))
			var answer []byte
			for err == nil {
				if _, err = io.WriteString(c, tt.request); tt.answered {
					answer, err = io.ReadAll(c)
					break
				}
			}
			if errors.Is(err, os.ErrDeadlineExceeded) || tt.answered && !bytes.HasPrefix(answer, []byte("HTTP/1.1 ")) {
				t.Errorf("got %q, %v; the server did not let go", answer, err)
			}
		})
	}
}

func TestOneBodyIsParsedAtATime(t *testing.T) {
	s, url := serve(t, newFake(), Options{})
	s.parsing.Lock() // as another request does
	answered := make(chan int)
	go func() {
		status, _, _ := post(t, url+"/v1/chat/completions", "{}")
		answered <- status
	}()
	eventually(t, "the body comes in", func() bool { return len(s.reading) == 1 })
	select {
	case <-answered:
		t.Error("a body was parsed while another was")
	case <-time.After(20 * time.Millisecond):
		s.parsing.Unlock()
		if status := <-answered; status != 400 {
			t.Errorf("status %d", status)
		}
	}
}

// A client that closes its half of the connection counts as gone, but may still read.
func TestAnAnswerThatEndsEarlyIsNotTakenForAWholeOne(t *testing.T) {
	f, g := newFake(), newGate()
	f.layer = g.layer
	_, url := serve(t, f, Options{})
	for _, body := range []string{hello, streaming(hello)} {
		c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		g.step <- struct{}{}
		c.(*net.TCPConn).CloseWrite()
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil {
			_, err = io.ReadAll(resp.Body)
		}
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: the answer of a request that was given up ends with %v", body, err)
		}
	}
}

func TestServeOpensAnswersAndStops(t *testing.T) {
	f := newFake()
	f.say(t, chatAPI, hello, "Hi!<|close|>response<|sep|>")
	ctx, cancel := context.WithCancel(context.Background())
	addr := make(chan net.Addr, 1)
	opened := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- Serve(ctx, Options{Port: -1, Log: slog.New(slog.DiscardHandler), Listen: func(a net.Addr) { addr <- a }}, func(context.Context) (Model, error) {
			<-opened
			return f, nil
		})
	}()
	url := "http://" + (<-addr).String()
	get := func(path string) int {
		resp, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if h, r, m := get("/healthz"), get("/readyz"), get("/v1/models"); h != 200 || r != 503 || m != 503 {
		t.Errorf("while the model opens: healthz %d, readyz %d, models %d", h, r, m)
	}
	close(opened)
	eventually(t, "ready", func() bool { return get("/readyz") == 200 })
	if got, _ := wholeChat(t, url, hello); got.Text != "Hi!" {
		t.Errorf("answer %+v", got)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	bad := errors.New("no such model")
	if err := Serve(context.Background(), Options{Port: -1, Log: slog.New(slog.DiscardHandler)}, func(context.Context) (Model, error) { return nil, bad }); !errors.Is(err, bad) {
		t.Errorf("error %v", err)
	}
}

func TestWhoMayAsk(t *testing.T) {
	for _, tt := range []struct {
		o    Options
		fine bool
	}{
		{Options{}, true},
		{Options{Host: "localhost"}, true},
		{Options{Host: "::1"}, true},
		{Options{Host: "127.0.0.5"}, true},
		{Options{Host: "0.0.0.0"}, false},
		{Options{Host: "::"}, false},
		{Options{Host: "192.168.1.2"}, false},
		{Options{Host: "example.com"}, false},
		{Options{Host: "0.0.0.0", Key: "k"}, true},
		{Options{Port: 70000}, false},
	} {
		if err := checkBind(tt.o); (err == nil) != tt.fine || err != nil && !errors.Is(err, ErrOptions) {
			t.Errorf("%q key %q: %v", tt.o.Host, tt.o.Key, err)
		}
	}

	f := newFake()
	f.say(t, chatAPI, hello, "Hi!<|close|>response<|sep|>")
	_, locked := serve(t, f, Options{Key: "the-right-key"})
	_, open := serve(t, f, Options{})
	for _, tt := range []struct {
		url, path, header, value, host string
		want                           int
	}{
		{locked, "/v1/models", "", "", "", 401},
		{locked, "/v1/models", "Authorization", "Bearer the-wrong-key", "", 401},
		{locked, "/v1/models", "Authorization", "the-right-key", "", 401},
		{locked, "/v1/models", "Authorization", "Bearer the-right-key", "", 200},
		{locked, "/v1/models", "Authorization", "bearer the-right-key", "any.example", 200},
		{locked, "/v1/models", "X-Api-Key", "the-right-key", "", 200},
		{locked, "/v1/models", "X-Api-Key", "", "", 401},
		{locked, "/metrics", "", "", "", 401},
		{locked, "/events", "", "", "", 401},
		{locked, "/v1/chat/completions", "", "", "", 405},
		{locked, "/healthz", "", "", "", 200},
		{locked, "/readyz", "", "", "", 200},
		{open, "/v1/models", "", "", "", 200},
		{open, "/v1/models", "", "", "localhost:9", 200},
		{open, "/v1/models", "", "", "evil.example", 403},
		{open, "/healthz", "", "", "evil.example", 403},
		{open, "/v1/models/kimi-k3", "", "", "", 200},
		{open, "/v1/models/gpt-4", "", "", "", 404},
		{open, "/v1/embeddings", "", "", "", 404},
		{open, "/", "", "", "", 200},
	} {
		req, _ := http.NewRequest("GET", tt.url+tt.path, nil)
		if tt.header != "" {
			req.Header.Set(tt.header, tt.value)
		}
		req.Host = tt.host
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != tt.want {
			t.Errorf("%s %q %q at %q: status %d, want %d: %s", tt.path, tt.header, tt.value, tt.host, resp.StatusCode, tt.want, b)
		}
		if strings.Contains(string(b), "the-right-key") {
			t.Error("the key is in an answer")
		}
	}

	dir := t.TempDir()
	for text, want := range map[string]string{"sesame-open\n": "sesame-open", "  sesame-open  \nmore": "sesame-open", "short\n": "", "": ""} {
		path := filepath.Join(dir, "key")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if key, err := ReadKey(path); key != want || (err == nil) != (want != "") {
			t.Errorf("%q: key %q, %v", text, key, err)
		}
	}
	if _, err := ReadKey(filepath.Join(dir, "none")); !errors.Is(err, ErrOptions) {
		t.Errorf("no file: %v", err)
	}
}

func TestTheModelSaysWhatItReallyTakes(t *testing.T) {
	f := newFake()
	_, url := serve(t, f, Options{Aliases: []string{"gpt-4o"}, MaxTokens: 100})
	resp, err := http.Get(url + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var list struct {
		Object string
		Data   []struct {
			ID        string
			Context   int `json:"context_length"`
			MaxOutput int `json:"max_output_tokens"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		t.Fatal(err)
	}
	if len(list.Data) != 2 || list.Data[0].ID != "kimi-k3" || list.Data[1].ID != "gpt-4o" || list.Data[0].Context != 4096 || list.Data[0].MaxOutput != 100 {
		t.Errorf("%+v", list)
	}
}

func TestEventsTellWhatTheEngineDoes(t *testing.T) {
	f, g := newFake(), newGate()
	f.layer = g.layer
	f.say(t, chatAPI, hello, "Hi!<|close|>response<|sep|>")
	_, url := serve(t, f, Options{EventEvery: 2 * time.Millisecond, Tick: 5 * time.Millisecond})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "GET", url+"/events", nil)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	l := live{t: t, lines: newLines(resp.Body)}
	l.until(`"phase":"idle"`)
	l.until(": nothing new")
	start(t, url+"/v1/chat/completions", streaming(hello))
	for range 3 {
		g.step <- struct{}{}
	}
	var s Snapshot
	if err := json.Unmarshal([]byte(strings.TrimPrefix(l.until(`"layers_done":3`), "data: ")), &s); err != nil {
		t.Fatal(err)
	}
	if s.Phase != "prompt" || s.LayersOf != 18 || s.Layers != 9 || s.PromptTokens == 0 {
		t.Errorf("%+v", s)
	}
	g.open()
	l.until(`"phase":"idle"`)
}

// clients run for a moment, or for a minute with -full.
func TestManyClientsAtOnceGetTheirOwnAnswers(t *testing.T) {
	m := nano(t)
	clients, during := 100, time.Second
	if *full {
		during = time.Minute
	}
	type want struct{ body, text string }
	var wants []want
	_, alone := serve(t, m, Options{MaxTokens: 12})
	for i, city := range []string{"France", "Japan", "Italy", "Spain", "China", "Kenya", "Peru"} {
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":"What is the capital of %s?"}],"reasoning_effort":"none","max_tokens":%d}`, city, 6+i)
		got, _ := wholeChat(t, alone, body)
		wants = append(wants, want{body, got.Text})
	}
	before := runtime.NumGoroutine()
	// A client that left and comes again may be there before its first request has left the queue.
	s, err := New(m, Options{Log: slog.New(slog.DiscardHandler), Queue: 2 * clients, MaxTokens: 12, StateMemory: 20e6, MemoMemory: 1, Tick: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	hs := newServer(s)
	transport := &http.Transport{MaxIdleConnsPerHost: clients}
	client := &http.Client{Transport: transport}
	end := time.Now().Add(during)
	var answered, cancelled atomic.Int64
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			for n := i; n == i || time.Now().Before(end); n++ {
				w := wants[n%len(wants)]
				body, stream := w.body, n%2 == 0
				if stream {
					body = streaming(body)
				}
				ctx, cancel := context.WithCancel(context.Background())
				if n%11 == 5 { // some leave
					time.AfterFunc(time.Duration(n%50)*time.Millisecond, cancel)
				}
				req, _ := http.NewRequestWithContext(ctx, "POST", hs.URL+"/v1/chat/completions", strings.NewReader(body))
				req.Header.Set("Content-Type", "application/json")
				resp, err := client.Do(req)
				var b []byte
				if err == nil {
					b, err = io.ReadAll(resp.Body)
					resp.Body.Close()
				}
				gone := ctx.Err() != nil
				cancel()
				switch {
				case gone:
					cancelled.Add(1)
					continue
				case err != nil:
					t.Errorf("client %d: %v", i, err)
					return
				}
				got := ""
				if stream {
					got = joinChunks(t, string(b)).Text
				} else {
					var c completion
					if err := json.Unmarshal(b, &c); err != nil || len(c.Choices) == 0 {
						t.Errorf("client %d: %v in %q", i, err, b)
						return
					}
					got = *c.Choices[0].Message.Content
				}
				if got != w.text {
					t.Errorf("client %d: %q, want %q", i, got, w.text)
					return
				}
				answered.Add(1)
			}
		})
	}
	wg.Wait()
	_, memory, _, _ := s.states.sizes()
	if memory > 20e6 {
		t.Errorf("conversations take %d bytes, more than they may", memory)
	}
	t.Logf("%d answers, %d clients left early", answered.Load(), cancelled.Load())
	if answered.Load() < int64(clients)/2 {
		t.Errorf("only %d answers", answered.Load())
	}
	transport.CloseIdleConnections()
	hs.Close()
	s.Close()
	eventually(t, "no goroutine is left behind", func() bool { return runtime.NumGoroutine() <= before+2 })
}

func TestABodyThatIsTooMuchIsRefused(t *testing.T) {
	_, url := serve(t, newFake(), Options{MaxBytes: 200, ReadTimeout: 50 * time.Millisecond})
	status, _, text := post(t, url+"/v1/chat/completions", `{"user":"`+strings.Repeat("x", 300)+`"}`)
	if status != 413 || !strings.Contains(text, "larger than 200 bytes") {
		t.Errorf("status %d: %s", status, text)
	}
	status, _, text = post(t, url+"/v1/messages", `{"user":"`+strings.Repeat("x", 300)+`"}`)
	if status != 413 || !strings.Contains(text, "request_too_large") {
		t.Errorf("status %d: %s", status, text)
	}
	// One that does not come.
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
	var b bytes.Buffer
	c.SetReadDeadline(time.Now().Add(5 * time.Second))
	io.Copy(&b, c)
	if !strings.Contains(b.String(), "400 Bad Request") || !strings.Contains(b.String(), "incomplete_body") {
		t.Errorf("a body that stalls: %s", b.String())
	}
}

func TestABodyThatSaysItIsTooLargeIsNotWaitedFor(t *testing.T) {
	_, url := serve(t, newFake(), Options{MaxBytes: 200})
	for _, expect := range []string{"", "Expect: 100-continue\r\n"} {
		c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second)) // the body never comes
		fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 201\r\n%s\r\n", expect)
		if line, err := newLines(c).ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 413 ") {
			t.Errorf("%q: answered %q, %v", expect, line, err)
		}
	}
}
