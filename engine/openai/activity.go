package openai

import (
	"fmt"
	"sync"
	"time"

	"deltafin/prefill"
)

// activity is what the engine does now, for whoever waits for it.
type activity struct {
	mu sync.Mutex
	Snapshot
	began   time.Time // of the phase
	ran     time.Duration
	runs    int64
	skipped int64            // layers that did not run again, since the start
	totals  prefill.Counters // as the engine counts, since it was opened
	started prefill.Counters // at the beginning of this generation
}

// Snapshot is one moment of the server, as GET /events sends it.
type Snapshot struct {
	Phase        string  `json:"phase"` // "idle", "prompt" or "answer"
	Queue        int     `json:"queue"` // requests that wait
	PromptTokens int     `json:"prompt_tokens"`
	CachedTokens int     `json:"cached_tokens"`
	LayersDone   int     `json:"layers_done"` // of the prompt, over all its passes
	LayersOf     int     `json:"layers_of"`
	LayersKnown  int     `json:"layers_known"` // of those done, for a client that left and came back
	Layers       int     `json:"layers"`       // of the model
	NewTokens    int     `json:"new_tokens"`
	TokensPerSec float64 `json:"tokens_per_second"` // of the answer so far
	Seconds      float64 `json:"seconds"`           // in this phase
	SecondsLeft  float64 `json:"seconds_left"`      // of the prompt, 0 where unknown
	Read         int64   `json:"expert_bytes_read"` // of this generation
	Resident     int64   `json:"expert_bytes_resident"`
}

func (a *activity) start(layers int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.Snapshot = Snapshot{Phase: "prompt", Layers: layers}
	a.began, a.started = time.Now(), a.totals
	a.runs++
}

func (a *activity) prompt(tokens, known, layers int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.PromptTokens, a.CachedTokens, a.LayersKnown = tokens, known, layers
	a.skipped += int64(layers)
}

// pass gives a progress callback for pass i of n.
func (a *activity) pass(m Model, i, n int) func(done, of int) {
	return func(done, of int) {
		c := m.Counters()
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.Phase == "prompt" {
			a.LayersDone, a.LayersOf = i*of+done, n*of
		}
		a.totals = c
	}
}

func (a *activity) decode() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ran += time.Since(a.began)
	a.Phase, a.began = "answer", time.Now()
}

func (a *activity) token(c prefill.Counters) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.NewTokens++
	a.totals = c
}

func (a *activity) stop(c prefill.Counters) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ran += time.Since(a.began)
	a.totals = c
	a.Snapshot = Snapshot{Phase: "idle", Layers: a.Layers}
	a.began = time.Now()
}

func (a *activity) snapshot(queued int) Snapshot {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.Snapshot
	s.Queue = queued
	if s.Phase == "" {
		s.Phase = "idle"
	}
	if s.Phase == "idle" {
		return s
	}
	s.Seconds = time.Since(a.began).Seconds()
	c := a.totals.Sub(a.started)
	s.Read, s.Resident = c.Read, c.Resident
	switch {
	case s.Phase == "prompt" && s.LayersDone > s.LayersKnown:
		s.SecondsLeft = s.Seconds / float64(s.LayersDone-s.LayersKnown) * float64(s.LayersOf-s.LayersDone)
	case s.Phase == "answer" && s.NewTokens > 1 && s.Seconds > 0:
		s.TokensPerSec = float64(s.NewTokens-1) / s.Seconds
	}
	return s
}

// mean is how long a generation takes, one minute where none has ended.
func (a *activity) mean() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.runs < 2 {
		return time.Minute
	}
	return a.ran / time.Duration(a.runs)
}

func (a *activity) counters() (c prefill.Counters, skipped int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.totals, a.skipped
}

// String says it in one line, as the comments of a stream do.
func (s Snapshot) String() string {
	switch {
	case s.Phase == "idle":
		return "about to begin"
	case s.Phase == "answer":
		return fmt.Sprintf("%d tokens, %.3g tokens/s, %.2f GB of experts read", s.NewTokens, s.TokensPerSec, float64(s.Read)/1e9)
	case s.LayersOf == 0:
		return s.known()
	}
	return fmt.Sprintf("%s: layer %d of %d, %.2f GB of experts read, about %s left", s.known(), s.LayersDone, s.LayersOf, float64(s.Read)/1e9, time.Duration(s.SecondsLeft*1e9).Round(time.Second))
}

func (s Snapshot) known() string {
	text := fmt.Sprintf("prompt of %d tokens, %d of them known", s.PromptTokens, s.CachedTokens)
	if s.LayersKnown > 0 {
		text += fmt.Sprintf(", and %d layers of what follows", s.LayersKnown)
	}
	return text
}
