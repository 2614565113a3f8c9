package openai

import (
	"context"
	"encoding/json"
	"flag"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

var screenshots = flag.String("screenshots", "", "directory for pictures of the page")

func get(t testing.TB, h http.Handler, path string, header ...string) *http.Response {
	t.Helper()
	r := httptest.NewRequest("GET", "http://127.0.0.1"+path, nil)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func TestThePageNeedsNothingFromElsewhere(t *testing.T) {
	s, _ := serve(t, newFake(), Options{Key: "secret-key"})
	for name, h := range map[string]http.Handler{"with a key": s, "while the model opens": notReady()} {
		for path, kind := range map[string]string{"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript", "/page.svg": "image/svg+xml"} {
			resp := get(t, h, path)
			if resp.StatusCode != 200 || !strings.HasPrefix(resp.Header.Get("Content-Type"), kind) {
				t.Errorf("%s: %s is %d, %s", name, path, resp.StatusCode, resp.Header.Get("Content-Type"))
				continue
			}
			if p := resp.Header.Get("Content-Security-Policy"); !strings.HasPrefix(p, "default-src 'self';") || strings.Contains(p, "unsafe") {
				t.Errorf("%s: the policy of %s is %q", name, path, p)
			}
			if resp.Header.Get("X-Content-Type-Options") != "nosniff" {
				t.Errorf("%s: %s may be taken for another type", name, path)
			}
			if again := get(t, h, path, "If-None-Match", resp.Header.Get("ETag")); again.StatusCode != 304 {
				t.Errorf("%s: %s comes again with status %d", name, path, again.StatusCode)
			}
			b, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			body := strings.ReplaceAll(string(b), `xmlns="http://www.w3.org/2000/svg"`, "")
			if m := regexp.MustCompile(`https?://|src="//|<script>|<style|\son\w+=|style="|innerHTML|insertAdjacentHTML|document\.write|eval\(`).FindString(body); m != "" {
				t.Errorf("%s: %s has %q", name, path, m)
			}
		}
	}
}

func TestHeatIsByTheLogarithmOfNeighbours(t *testing.T) {
	count := make([][]uint64, 2)
	for i := range count {
		count[i] = make([]uint64, 600) // 3 a cell
	}
	count[0][0], count[0][2], count[1][599] = 500, 499, 1
	h := newHeat(1, count)
	if h.First != 1 || h.Experts != 600 || h.Rows != 2 || h.Columns != 200 || h.Per != 3 || len(h.Cells) != 400 {
		t.Fatalf("%+v", h)
	}
	for i, v := range h.Cells {
		want := map[int]byte{0: 255, 399: 26}[i] // 255 ln 2 / ln 1000
		if v != want {
			t.Errorf("cell %d is %d, want %d", i, v, want)
		}
	}
	if h := newHeat(1, [][]uint64{make([]uint64, 4)}); string(h.Cells) != "\x00\x00\x00\x00" || h.Per != 1 {
		t.Errorf("before the first route: %+v", h)
	}
}

func TestADrivesRateIsOfTheLastTwoSeconds(t *testing.T) {
	v := &watch{}
	start := time.Now()
	for _, tt := range []struct {
		after  time.Duration
		bytes  int64
		second int64 // bytes of a drive that appears later; 0 none
		want   float64
	}{
		{0, 1000, 0, 0},
		{time.Second, 3000, 0, 2000},
		{2 * time.Second, 3000, 700, 1000},
		{3 * time.Second, 3000, 700, 0},
	} {
		drives := []Drive{{Name: "a", Bytes: tt.bytes}}
		if tt.second > 0 {
			drives = append(drives, Drive{Name: "b", Bytes: tt.second})
		}
		v.rate(start.Add(tt.after), drives)
		if drives[0].BytesPerSecond != tt.want {
			t.Errorf("after %s: %g bytes/s, want %g", tt.after, drives[0].BytesPerSecond, tt.want)
		}
		if tt.second > 0 && drives[1].BytesPerSecond != 0 {
			t.Errorf("after %s: a drive that just came has %g bytes/s", tt.after, drives[1].BytesPerSecond)
		}
	}
}

func TestEventsTellOfDrivesMemoryAndExperts(t *testing.T) {
	m := nano(t)
	_, url := serve(t, m, Options{MaxTokens: 4})
	wholeChat(t, url, hello)
	resp, err := http.Get(url + "/events")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	l := live{t: t, lines: newLines(resp.Body)}
	next := func(kind string, v any) {
		t.Helper()
		l.until("event: " + kind)
		if err := json.Unmarshal([]byte(strings.TrimPrefix(l.line(), "data: ")), v); err != nil {
			t.Fatal(err)
		}
	}
	var now Machine
	var heat Heat
	next("machine", &now)
	next("heat", &heat)
	c := m.(*engineModel).e.Config()
	if len(now.Drives) == 0 || now.Drives[0].Bytes == 0 || now.Experts != (c.Layers-c.FirstDense)*c.Experts || now.DenseResident+now.DenseStreamed == 0 || now.Limit == 0 || now.Layer != c.Layers-1 {
		t.Errorf("%+v", now)
	}
	if heat.Rows != c.Layers-c.FirstDense || heat.Columns != c.Experts || slices.Max(heat.Cells) != 255 {
		t.Errorf("%d by %d cells, at most %d", heat.Rows, heat.Columns, slices.Max(heat.Cells))
	}
}

const (
	busyTurn   = `document.querySelector(".turn.busy") !== null`
	answered   = `document.querySelector(".turn.assistant") !== null && document.querySelector(".turn.busy") === null`
	lastAnswer = `[...document.querySelectorAll(".turn.assistant")].at(-1)`
)

// shoot takes a picture if pictures are asked for.
func shoot(p *tab, name string) {
	if *screenshots != "" {
		p.screenshot(filepath.Join(*screenshots, name+".png"))
	}
}

func TestThePageInABrowser(t *testing.T) {
	b := newBrowser(t)

	t.Run("a chat by the keyboard alone says what the API says", func(t *testing.T) {
		m := nano(t)
		_, other := serve(t, m, Options{MaxTokens: 96})
		_, url := serve(t, m, Options{MaxTokens: 96, EventEvery: 20 * time.Millisecond})
		p := b.open(t, url, 1200, 800, "light")
		p.until(`document.getElementById("state").dataset.phase === "idle"`)
		if got := eval[string](p, `document.activeElement.id`); got != "text" {
			t.Fatalf("the focus is on %q, want the message", got)
		}
		p.typeText("What is the capital")
		p.press("Enter", true)
		p.typeText("of France?")
		if got := eval[string](p, `document.getElementById("text").value`); got != "What is the capital\nof France?" {
			t.Fatalf("after Shift+Enter the message is %q", got)
		}
		p.press("Enter", false)
		p.until(answered)
		const asked = `{"role":"user","content":"What is the capital\nof France?"}`
		want, _ := wholeChat(t, other, `{"messages":[`+asked+`],"reasoning_effort":"low"}`)
		if got := eval[string](p, lastAnswer+`.querySelector(":scope > .text").textContent`); got != want.Text || got == "" {
			t.Errorf("the page shows %q, the API says %q", got, want.Text)
		}
		if got := eval[string](p, lastAnswer+`.querySelector(".thinking .text").textContent`); got != want.Thinking {
			t.Errorf("the page shows the thoughts %q, the API says %q", got, want.Thinking)
		}
		if eval[bool](p, lastAnswer+`.querySelector(".thinking").open`) {
			t.Error("the thoughts are not collapsed")
		}
		said := eval[string](p, `document.getElementById("say").innerText`)
		if !strings.Contains(said, "The answer is complete.") || !strings.Contains(said, strings.TrimSpace(want.Text)[:5]) {
			t.Errorf("a screen reader hears %q", said)
		}

		// The second turn has the first with it.
		p.typeText("And of Japan?")
		p.press("Enter", false)
		p.until(`document.querySelectorAll(".turn.assistant").length === 2 && ` + answered)
		turn := map[string]any{"role": "assistant", "content": want.Text}
		if want.Thinking != "" {
			turn["reasoning_content"] = want.Thinking
		}
		next, _ := wholeChat(t, other, `{"messages":[`+asked+`,`+string(encode(turn))+`,{"role":"user","content":"And of Japan?"}],"reasoning_effort":"low"}`)
		if got := eval[string](p, lastAnswer+`.querySelector(":scope > .text").textContent`); got != next.Text {
			t.Errorf("the second turn: the page shows %q, the API says %q", got, next.Text)
		}
		if got := eval[string](p, lastAnswer+`.querySelector(".note").textContent`); !strings.Contains(got, "known") {
			t.Errorf("the second turn knows nothing of the first: %q", got)
		}

		// What the machine did is in view.
		p.until(`/ [1-9]\d* of \d+ cells were used/.test(document.getElementById("heat").getAttribute("aria-label"))`)
		p.until(`document.getElementById("state").dataset.phase === "idle"`)
		if n := eval[int](p, `new Set(new Uint32Array(document.getElementById("heat").getContext("2d").getImageData(0, 0, 64, 8).data.buffer)).size`); n < 4 {
			t.Errorf("the heat map has %d colours", n)
		}
		if c := m.(*engineModel).e.Config(); eval[int](p, `document.getElementById("heat").height`) != c.Layers-c.FirstDense || eval[int](p, `document.getElementById("heat").width`) != c.Experts {
			t.Errorf("the heat map is %d by %d", eval[int](p, `document.getElementById("heat").width`), eval[int](p, `document.getElementById("heat").height`))
		}
		for _, id := range []string{"rate", "kept", "dense", "limit"} {
			if got := eval[string](p, `document.getElementById("`+id+`").textContent`); got == "–" || got == "" || strings.Contains(got, "NaN") {
				t.Errorf("%s shows %q", id, got)
			}
		}
		if got := eval[string](p, `document.getElementById("drives").innerText`); !strings.Contains(got, "/s") {
			t.Errorf("the drives show %q", got)
		}
		shoot(p, "wide-light")
		p.call("Emulation.setEmulatedMedia", params{"features": []params{{"name": "prefers-color-scheme", "value": "dark"}}})
		shoot(p, "wide-dark")
		p.resize(360, 740)
		p.until(`!document.getElementById("live").open`)
		if got := eval[int](p, `document.documentElement.scrollWidth`); got > 360 {
			t.Errorf("in a window of 360 pixels the page is %d wide", got)
		}
		shoot(p, "phone-dark")
		eval[bool](p, `document.querySelector("#live summary").focus(), true`)
		p.press("Space", false)
		p.until(`document.getElementById("live").open`)
		shoot(p, "phone-live")
		if got := eval[int](p, `document.documentElement.scrollWidth`); got > 360 {
			t.Errorf("with the machine in view it is %d wide", got)
		}

		// New chat, reached by the keyboard.
		p.press("Tab", true)
		if got := eval[string](p, `document.activeElement.id`); got != "new" {
			t.Fatalf("before the machine comes %q, want New chat", got)
		}
		if eval[string](p, `getComputedStyle(document.activeElement).outlineStyle`) == "none" {
			t.Error("the focus cannot be seen")
		}
		p.press("Enter", false)
		p.until(`document.querySelectorAll(".turn").length === 0 && document.activeElement.id === "text"`)
	})

	t.Run("what the model says is text and never a part of the page", func(t *testing.T) {
		const evil = `<img src=x onerror="document.title='bad'"><script>document.title='bad'</script>**&amp;`
		f := newFake()
		body := `{"messages":[{"role":"user","content":"<b>Hello</b>"}],"reasoning_effort":"none"}`
		f.say(t, chatAPI, body, evil+"<|close|>response<|sep|>")
		_, url := serve(t, f, Options{})
		p := b.open(t, url, 800, 600, "dark")
		eval[bool](p, `document.getElementById("effort").value = "none", true`)
		p.typeText("<b>Hello</b>")
		p.press("Enter", false)
		p.until(answered)
		if got := eval[string](p, lastAnswer+`.querySelector(":scope > .text").textContent`); got != evil {
			t.Errorf("the page shows %q, the model said %q", got, evil)
		}
		if n := eval[int](p, `document.querySelectorAll("#log img, #log script, #log b").length`); n != 0 || eval[string](p, "document.title") != "deltafin" {
			t.Errorf("%d elements of the page are of the model's making", n)
		}
	})

	t.Run("Escape ends an answer and gives the question back", func(t *testing.T) {
		f, g := newFake(), newGate()
		f.layer = g.layer
		s, url := serve(t, f, Options{Tick: 10 * time.Millisecond, EventEvery: 10 * time.Millisecond})
		p := b.open(t, url, 800, 600, "light")
		p.typeText("Hello")
		p.press("Enter", false)
		p.until(busyTurn)
		for range 2 {
			g.step <- struct{}{}
		}
		p.until(`document.querySelector(".busy .note").textContent.includes("layer 2 of ")`)
		p.until(`document.getElementById("layers").value === 2`)
		shoot(p, "busy")
		p.press("Escape", false)
		p.until(answered)
		eventually(t, "the engine is idle", func() bool { return s.activity.snapshot(0).Phase == "idle" })
		if got := eval[string](p, lastAnswer+`.querySelector(".note").textContent`); !strings.HasPrefix(got, "stopped after") {
			t.Errorf("the note says %q", got)
		}
		if got := eval[string](p, `document.activeElement.id + ":" + document.getElementById("text").value`); got != "text:Hello" {
			t.Errorf("focus and message are %q", got)
		}
		p.press("Enter", false) // asked again, it goes on
		p.until(busyTurn)
		g.step <- struct{}{}
		p.until(`/: layer \d of .*, 2 of them known/.test(document.getElementById("layers-text").textContent)`)
		g.open()
	})

	t.Run("a key is asked for, checked, and kept for the tab", func(t *testing.T) {
		f := newFake()
		f.say(t, chatAPI, `{"messages":[{"role":"user","content":"Hello"}],"reasoning_effort":"low"}`, "Thought.<|close|>think<|sep|><|open|>response<|sep|>Hi there.<|close|>response<|sep|>")
		_, url := serve(t, f, Options{Key: "secret-key"})
		p := b.open(t, url, 360, 740, "light")
		p.until(`document.activeElement.id === "key-value"`)
		shoot(p, "phone-key")
		p.typeText("wrong-key")
		p.press("Enter", false)
		p.until(`document.getElementById("key-error").textContent !== ""`)
		p.typeText("secret-key")
		p.press("Enter", false)
		p.until(`document.getElementById("state").dataset.phase === "idle" && document.getElementById("key").hidden`)
		p.typeText("Hello")
		p.press("Enter", false)
		p.until(answered)
		if got := eval[string](p, lastAnswer+`.querySelector(":scope > .text").textContent`); got != "Hi there." {
			t.Errorf("the page shows %q", got)
		}
		if eval[string](p, `sessionStorage.getItem("deltafin-key")`) != "secret-key" || eval[int](p, "localStorage.length") != 0 || eval[string](p, "document.cookie") != "" {
			t.Error("the key is not where it should be, or elsewhere too")
		}
	})

	t.Run("the page waits for the model to be opened", func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		addr, opened, served := make(chan net.Addr, 1), make(chan struct{}), make(chan error, 1)
		o := Options{Port: -1, Log: slog.New(slog.DiscardHandler), Listen: func(a net.Addr) { addr <- a }}
		go func() {
			served <- Serve(ctx, o, func(context.Context) (Model, error) {
				<-opened
				return newFake(), nil
			})
		}()
		defer func() {
			cancel()
			if err := <-served; err != nil {
				t.Error(err)
			}
		}()
		p := b.open(t, "http://"+(<-addr).String(), 800, 600, "light")
		p.until(`document.getElementById("state").textContent.includes("being opened")`)
		close(opened)
		p.until(`document.getElementById("state").textContent === "ready" && document.getElementById("model").textContent === "kimi-k3"`)
	})
}
