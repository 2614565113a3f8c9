package openai

import (
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var sample = regexp.MustCompile(`^([a-z_]+)(\{[a-z]+="[^"\n]*"(?:,[a-z]+="[^"\n]*")*\})? (\S+)$`)

// parseMetrics reads Prometheus's text format strictly.
func parseMetrics(t *testing.T, text string) map[string]float64 {
	t.Helper()
	values := map[string]float64{}
	var name, kind string
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if rest, ok := strings.CutPrefix(line, "# HELP "); ok {
			name, _, _ = strings.Cut(rest, " ")
			kind = ""
			continue
		}
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			var typed string
			typed, kind, _ = strings.Cut(rest, " ")
			if typed != name || kind != "counter" && kind != "gauge" {
				t.Errorf("type line %q behind the help of %s", line, name)
			}
			continue
		}
		m := sample.FindStringSubmatch(line)
		if m == nil || m[1] != name || kind == "" {
			t.Fatalf("line %q", line)
		}
		v, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		if kind == "counter" != strings.HasSuffix(name, "_total") {
			t.Errorf("%s is a %s", name, kind)
		}
		if _, twice := values[m[1]+m[2]]; twice {
			t.Errorf("%s is there twice", m[1]+m[2])
		}
		values[m[1]+m[2]] = v
	}
	return values
}

func TestMetricsCountWhatHappened(t *testing.T) {
	f := newFake()
	prompt := f.say(t, chatAPI, hello, "Hi!<|close|>response<|sep|>")
	_, url := serve(t, f, Options{})
	get := func() map[string]float64 {
		resp, err := http.Get(url + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return parseMetrics(t, string(b))
	}
	get()
	wholeChat(t, url, hello)
	wholeChat(t, url, hello) // from the memo
	wholeChat(t, url, strings.Replace(hello, "{", `{"max_tokens":1,`, 1))
	post(t, url+"/v1/chat/completions", "{}")
	m := get()
	for name, want := range map[string]float64{
		`deltafin_requests_total{path="/v1/chat/completions",code="200"}`: 3,
		`deltafin_requests_total{path="/v1/chat/completions",code="400"}`: 1,
		`deltafin_generations_total{api="chat",finish="stop"}`:            1,
		`deltafin_generations_total{api="chat",finish="length"}`:          1,
		`deltafin_memo_hits_total`:                                        1,
		`deltafin_prompt_tokens_total`:                                    float64(2 * len(prompt)),
		`deltafin_cached_tokens_total`:                                    float64(len(prompt)),
		`deltafin_generated_tokens_total`:                                 float64(len(f.answers[0][1]) + 1),
		`deltafin_expert_bytes_read_total`:                                5,
		`deltafin_busy`:                                                   0,
	} {
		if got, ok := m[name]; !ok || got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}
