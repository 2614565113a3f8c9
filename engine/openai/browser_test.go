package openai

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// browser is a headless Chromium, driven over the pipe of its DevTools protocol: each
// message is JSON and ends with a zero byte.
type browser struct {
	t   testing.TB
	in  *os.File
	out *bufio.Reader
	end *os.File // of out
	ids int
}

// newBrowser starts one, or skips the test where there is none.
func newBrowser(t testing.TB) *browser {
	t.Helper()
	name := ""
	for _, n := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if p, err := exec.LookPath(n); err == nil {
			name = p
			break
		}
	}
	if name == "" {
		t.Skip("NOT RUN: chromium is not installed")
	}
	home, err := os.MkdirTemp("", "page")
	if err != nil {
		t.Fatal(err)
	}
	theirIn, ourOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ourIn, theirOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(
		name, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
		"--disable-dev-shm-usage", "--user-data-dir="+home, "--remote-debugging-pipe", "about:blank",
	)
	cmd.ExtraFiles = []*os.File{theirIn, theirOut} // 3 and 4, as the option has them
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirIn.Close()
	theirOut.Close()
	t.Cleanup(func() {
		ourOut.Close() // it ends by itself when nobody drives it
		ended := make(chan struct{})
		go func() {
			cmd.Wait()
			close(ended)
		}()
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			cmd.Process.Kill()
			<-ended
		}
		ourIn.Close()
		os.RemoveAll(home) // what is left of it is of no use
	})
	return &browser{t: t, in: ourOut, out: bufio.NewReader(ourIn), end: ourIn}
}

// params are a call's parameters.
type params map[string]any

// tab is one page of a browser. Errors that the page logs are collected.
type tab struct {
	*browser
	t       testing.TB
	session string
	errors  []string
}

// call sends a command and waits for its result.
func (p *tab) call(method string, args params) (result map[string]json.RawMessage) {
	p.t.Helper()
	p.ids++
	msg := params{"id": p.ids, "method": method, "params": args}
	if p.session != "" {
		msg["sessionId"] = p.session
	}
	p.end.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := p.in.Write(append(encode(msg), 0)); err != nil {
		p.t.Fatal(err)
	}
	for {
		b, err := p.out.ReadBytes(0)
		if err != nil {
			p.t.Fatalf("%s: %v", method, err)
		}
		var m struct {
			ID     int
			Method string
			Params json.RawMessage
			Result map[string]json.RawMessage
			Error  *struct{ Message string }
		}
		if err := json.Unmarshal(b[:len(b)-1], &m); err != nil {
			p.t.Fatal(err)
		}
		switch {
		case m.ID == p.ids && m.Error != nil:
			p.t.Fatalf("%s: %s", method, m.Error.Message)
		case m.ID == p.ids:
			return m.Result
		case m.Method == "Runtime.exceptionThrown":
			p.errors = append(p.errors, string(m.Params))
		case m.Method == "Log.entryAdded" && strings.Contains(string(m.Params), `"level":"error"`) && !strings.Contains(string(m.Params), `"source":"network"`):
			p.errors = append(p.errors, string(m.Params)) // what breaks the page's policy is here
		}
	}
}

// open shows a page in a window of the given size.
func (b *browser) open(t testing.TB, url string, width, height int, scheme string) *tab {
	t.Helper()
	p := &tab{browser: b, t: t}
	var id string
	json.Unmarshal(p.call("Target.createTarget", params{"url": "about:blank"})["targetId"], &id)
	attached := p.call("Target.attachToTarget", params{"targetId": id, "flatten": true})
	json.Unmarshal(attached["sessionId"], &p.session)
	t.Cleanup(func() {
		for _, e := range p.errors {
			t.Errorf("the page logged an error: %s", e)
		}
		p.call("Page.close", nil)
	})
	for _, domain := range []string{"Page", "Runtime", "Log"} {
		p.call(domain+".enable", nil)
	}
	p.call("Emulation.setEmulatedMedia", params{"features": []params{{"name": "prefers-color-scheme", "value": scheme}}})
	p.resize(width, height)
	p.call("Page.navigate", params{"url": url})
	p.until(`document.readyState === "complete"`)
	return p
}

func (p *tab) resize(width, height int) {
	p.t.Helper()
	p.call("Emulation.setDeviceMetricsOverride", params{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false})
}

// eval gives the value of an expression.
func eval[T any](p *tab, expr string) (v T) {
	p.t.Helper()
	r := p.call("Runtime.evaluate", params{"expression": expr, "returnByValue": true, "awaitPromise": true})
	if r["exceptionDetails"] != nil {
		p.t.Fatalf("%s: %s", expr, r["exceptionDetails"])
	}
	var result struct{ Value json.RawMessage }
	if err := json.Unmarshal(r["result"], &result); err != nil {
		p.t.Fatal(err)
	}
	if err := json.Unmarshal(result.Value, &v); err != nil {
		p.t.Fatalf("%s gave %s: %v", expr, r["result"], err)
	}
	return v
}

// until waits for an expression to become true.
func (p *tab) until(expr string) {
	p.t.Helper()
	for end := time.Now().Add(20 * time.Second); !eval[bool](p, expr); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("not true after 20 s: %s\n%s", expr, eval[string](p, "document.body.innerText"))
		}
	}
}

func (p *tab) typeText(text string) {
	p.t.Helper()
	p.call("Input.insertText", params{"text": text})
}

// press presses and lets go a key; shift is held if asked for.
func (p *tab) press(key string, shift bool) {
	p.t.Helper()
	k := params{"key": key, "code": key, "windowsVirtualKeyCode": map[string]int{"Enter": 13, "Escape": 27, "Tab": 9, "Space": 32}[key]}
	if key == "Enter" {
		k["text"] = "\r"
	}
	if key == "Space" {
		k["key"], k["text"] = " ", " "
	}
	if shift {
		k["modifiers"] = 8
	}
	k["type"] = "keyDown"
	p.call("Input.dispatchKeyEvent", k)
	k["type"] = "keyUp"
	delete(k, "text")
	p.call("Input.dispatchKeyEvent", k)
}

// screenshot writes what the tab shows.
func (p *tab) screenshot(path string) {
	p.t.Helper()
	var data string
	json.Unmarshal(p.call("Page.captureScreenshot", params{"format": "png"})["data"], &data)
	b, err := base64.StdEncoding.DecodeString(data)
	if err == nil {
		err = os.WriteFile(path, b, 0o644)
	}
	if err != nil {
		p.t.Fatal(err)
	}
}
