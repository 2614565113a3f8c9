package openai

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"deltafin/engine/draft"
)

// metrics counts for GET /metrics.
type metrics struct {
	mu        sync.Mutex
	requests  map[[2]string]int64 // path and status
	finished  map[[2]string]int64 // api and reason
	prompt    int64
	cached    int64
	generated int64
	memos     int64
	drafts    map[[2]string]int64 // proposer and "accepted" or "rejected"
}

func (m *metrics) memo() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memos++
}

// draft counts the guesses of a generation.
func (m *metrics) draft(s *draft.Stats) {
	if s == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.drafts == nil {
		m.drafts = map[[2]string]int64{}
	}
	for _, p := range s.Proposers {
		m.drafts[[2]string{p.Name, "accepted"}] += int64(p.Accepted)
		m.drafts[[2]string{p.Name, "rejected"}] += int64(p.Checked - p.Accepted)
	}
}

// ended counts a generation that the engine worked on.
func (m *metrics) ended(a api, g *generation) {
	_, begun, _, err := g.take()
	reason := string(g.rec.finish)
	if err != nil {
		reason = "error"
		if err == errClientGone {
			reason = "client_gone"
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.finished == nil {
		m.finished = map[[2]string]int64{}
	}
	m.finished[[2]string{a.String(), reason}]++
	if begun {
		u := g.usage()
		m.prompt += int64(u.prompt)
		m.cached += int64(u.cached)
		m.generated += int64(u.completion)
	}
}

// count counts a path's requests by their status.
func (s *Server) count(path string, h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		rec := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		defer func() {
			s.metrics.mu.Lock()
			if s.metrics.requests == nil {
				s.metrics.requests = map[[2]string]int64{}
			}
			s.metrics.requests[[2]string{path, fmt.Sprint(rec.status)}]++
			s.metrics.mu.Unlock()
			s.o.Log.Debug("request", "path", path, "status", rec.status, "seconds", time.Since(began).Seconds())
		}()
		h(rec, r)
	})
}

type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController find what it needs.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// serveMetrics writes Prometheus's text format, version 0.0.4.
func (s *Server) serveMetrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	var b strings.Builder
	head := func(name, kind, help string) { fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind) }
	one := func(name, kind, help string, v any) {
		head(name, kind, help)
		fmt.Fprintf(&b, "%s %v\n", name, v)
	}
	labelled := func(name, help string, keys [2]string, values map[[2]string]int64) {
		head(name, "counter", help)
		var lines []string
		for k, v := range values {
			lines = append(lines, fmt.Sprintf("%s{%s=%q,%s=%q} %d\n", name, keys[0], k[0], keys[1], k[1], v))
		}
		slices.Sort(lines)
		b.WriteString(strings.Join(lines, ""))
	}
	m := &s.metrics
	m.mu.Lock()
	labelled("deltafin_requests_total", "HTTP requests by path and status.", [2]string{"path", "code"}, m.requests)
	labelled("deltafin_generations_total", "Generations that the engine worked on, by API and how they ended.", [2]string{"api", "finish"}, m.finished)
	one("deltafin_prompt_tokens_total", "counter", "Tokens of prompts.", m.prompt)
	one("deltafin_cached_tokens_total", "counter", "Tokens of prompts that were known and not computed again.", m.cached)
	one("deltafin_generated_tokens_total", "counter", "Tokens of answers.", m.generated)
	labelled("deltafin_guessed_tokens_total", "Guessed tokens that were checked, by proposer and outcome.", [2]string{"proposer", "outcome"}, m.drafts)
	one("deltafin_memo_hits_total", "counter", "Requests answered from the memo of answers.", m.memos)
	m.mu.Unlock()
	c, skipped := s.activity.counters()
	one("deltafin_layer_passes_total", "counter", "Layers that ran, each over all rows of its pass.", c.LayerPasses)
	one("deltafin_layers_skipped_total", "counter", "Layers that did not run again, as a client that had left inside a pass came back.", skipped)
	one("deltafin_expert_bytes_used_total", "counter", "Bytes of routed experts, each once per layer pass.", c.Union)
	one("deltafin_expert_bytes_read_total", "counter", "Bytes of routed experts that came from drives.", c.Read)
	one("deltafin_expert_bytes_resident_total", "counter", "Bytes of routed experts that were in memory.", c.Resident)
	one("deltafin_expert_bytes_wasted_total", "counter", "Bytes of routed experts that were read for nothing.", c.Wasted)
	now := s.activity.snapshot(s.queue.length())
	one("deltafin_queue_length", "gauge", "Requests that wait.", now.Queue)
	busy := 0
	if now.Phase != "idle" {
		busy = 1
	}
	one("deltafin_busy", "gauge", "1 while a request is answered.", busy)
	one("deltafin_answer_tokens_per_second", "gauge", "Rate of the answer under way.", now.TokensPerSec)
	n, memory, disk, discarded := s.states.sizes()
	one("deltafin_states", "gauge", "Conversations that are kept.", n)
	one("deltafin_state_memory_bytes", "gauge", "Bytes of conversations in memory.", memory)
	one("deltafin_state_disk_bytes", "gauge", "Bytes of conversations on disk.", disk)
	one("deltafin_states_discarded_total", "counter", "Saved conversations that were of no use.", discarded)
	_, bytes := s.memo.size()
	one("deltafin_memo_bytes", "gauge", "Bytes of the memo of answers.", bytes)
	one("deltafin_uptime_seconds", "gauge", "Seconds since the model was opened.", time.Since(s.opened).Seconds())
	w.Write([]byte(b.String()))
}
