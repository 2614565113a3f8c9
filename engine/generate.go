package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"deltafin/engine/draft"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/engine/machine"
	"deltafin/prefill"
)

// Request is one generation.
type Request struct {
	Prompt []int // tokens to feed first; at least one
	MaxNew int   // most tokens to generate
	Stop   []int // tokens that end the text; they are not part of it

	// Logits, if set, is shown the row [vocab] that chooses each token, that of a stop
	// token included, before [Request.Token] gets the token. The session then stands right
	// after the tokens that led to the row and may be forked. The row is valid during the call.
	Logits func(row []float32)
	// Choose, if set, chooses each token from its row and its position. Guesses are checked
	// against its choice, so it must depend on nothing else. By default it is the most likely token, the
	// lowest id among equals.
	Choose func(row []float32, position int) int
	// Token, if set, receives each generated token; an error of it ends the
	// generation and is returned. The session stands as for Logits.
	Token func(id int) error
	// Progress, if set, is called during the prompt, see [Session.Feed].
	Progress func(done, of int)
}

// FinishReason says why a generation ended.
type FinishReason string

// The reasons.
const (
	FinishStop      FinishReason = "stop"      // a stop token was chosen
	FinishLength    FinishReason = "length"    // MaxNew or the context is exhausted
	FinishCancelled FinishReason = "cancelled" // the context was cancelled
)

// Result is what a generation gave, complete also when it was cancelled.
type Result struct {
	IDs    []int // without the stop token
	Finish FinishReason
	// LogitsSHA256 is over the little-endian bits of the logits rows that chose each
	// token, that of the stop token included.
	LogitsSHA256 string
	Stats        Stats
}

// Stats are the measurements of one generation. Expert bytes are those of all its
// passes, prompt and decode: Read + Resident - Wasted == Union.
type Stats struct {
	PromptTokens   int          `json:"prompt_tokens"`
	NewTokens      int          `json:"new_tokens"`
	PrefillSeconds float64      `json:"prefill_seconds"` // to the first token
	DecodeSeconds  float64      `json:"decode_seconds"`  // of the tokens after the first
	LayerPasses    int64        `json:"layer_passes"`    // of the prompt
	ExpertUnion    int64        `json:"expert_bytes_union"`
	ExpertRead     int64        `json:"expert_bytes_read"`
	ExpertResident int64        `json:"expert_bytes_resident"`
	ExpertAhead    int64        `json:"expert_bytes_ahead"`
	ExpertWasted   int64        `json:"expert_bytes_wasted"`
	PeakRSS        int64        `json:"peak_rss_bytes"`
	PrefillParts   Parts        `json:"prefill_parts_seconds"`
	DecodeParts    Parts        `json:"decode_parts_seconds"`
	Draft          *draft.Stats `json:"draft,omitempty"` // nil without proposers
}

// Parts is the wall-clock time of each component, in seconds. Experts includes
// waiting for their bytes.
type Parts struct {
	Embed   float64 `json:"embed"`
	Mix     float64 `json:"mix"`
	KDA     float64 `json:"kda"`
	MLA     float64 `json:"mla"`
	Dense   float64 `json:"dense"`
	Router  float64 `json:"router"`
	Experts float64 `json:"experts"`
	Shared  float64 `json:"shared"`
	Head    float64 `json:"head"`
}

func parts(t k3.Times) Parts {
	return Parts{
		t.Embed.Seconds(), t.Mix.Seconds(), t.KDA.Seconds(), t.MLA.Seconds(), t.Dense.Seconds(),
		t.Router.Seconds(), t.Experts.Seconds(), t.Shared.Seconds(), t.Head.Seconds(),
	}
}

// PrefillRate and DecodeRate are in tokens per second, 0 where nothing was timed.
func (s Stats) PrefillRate() float64 { return rate(s.PromptTokens, s.PrefillSeconds) }

// DecodeRate counts the tokens after the first: that one came from the prompt's pass.
func (s Stats) DecodeRate() float64 { return rate(s.NewTokens-1, s.DecodeSeconds) }

func rate(n int, seconds float64) float64 {
	if n <= 0 || seconds <= 0 {
		return 0
	}
	return float64(n) / seconds
}

// Generate feeds the prompt and then generates. What proposers guess is checked in one
// pass with the token before it, and kept as far as it is what the model chooses anyway: with and
// without them the result is the same, callbacks included.
func (s *Session) Generate(ctx context.Context, r Request) (Result, error) {
	m, chooser := &s.engine.model, s.engine.chooser
	counters, times, drafted, began := m.Counters(), m.Times(), chooser.Stats(), time.Now()
	hash := sha256.New()
	res := Result{Finish: FinishLength}
	finish := func(err error) (Result, error) {
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			res.Finish, err = FinishCancelled, nil
		}
		res.LogitsSHA256 = hex.EncodeToString(hash.Sum(nil))
		st := &res.Stats
		st.PromptTokens, st.NewTokens, st.PeakRSS = len(r.Prompt), len(res.IDs), machine.PeakRSS()
		st.setExperts(m.Counters().Sub(counters))
		if len(s.drafts) > 0 {
			d := chooser.Stats().Sub(drafted)
			st.Draft = &d
		}
		return res, err
	}

	logits, err := s.Feed(ctx, r.Prompt, r.Progress)
	st := &res.Stats
	st.PrefillSeconds = time.Since(began).Seconds()
	st.LayerPasses = m.Counters().LayerPasses - counters.LayerPasses
	st.PrefillParts = parts(m.Times().Sub(times))
	if err != nil {
		return finish(err)
	}
	began, times = time.Now(), m.Times()
	b := block{rows: [][]float32{logits}}
	for len(res.IDs) < r.MaxNew {
		row := b.rows[b.right]
		hash.Write(kernel.AsBytes(row))
		if r.Logits != nil {
			r.Logits(row)
		}
		var id int
		if r.Choose != nil {
			id = r.Choose(row, s.Position())
		} else {
			id = kernel.ArgMax(row)
		}
		guessed := b.compare(id)
		if slices.Contains(r.Stop, id) {
			res.Finish = FinishStop
			break
		}
		res.IDs = append(res.IDs, id)
		if r.Token != nil {
			if err = r.Token(id); err != nil {
				err = fmt.Errorf("token %d: %w", id, err)
				break
			}
		}
		if len(res.IDs) == r.MaxNew || s.Position() == s.engine.ledger.Context {
			break
		}
		if guessed {
			s.accept(1)
			continue
		}
		if err = s.finish(&b); err != nil {
			break
		}
		if b, err = s.next(ctx, id, r.MaxNew-len(res.IDs)-1); err != nil {
			break
		}
	}
	if end := s.finish(&b); err == nil {
		err = end
	}
	st.DecodeSeconds = time.Since(began).Seconds()
	st.DecodeParts = parts(m.Times().Sub(times))
	return finish(err)
}

func (st *Stats) setExperts(c prefill.Counters) {
	st.ExpertUnion, st.ExpertRead, st.ExpertResident, st.ExpertAhead, st.ExpertWasted = c.Union, c.Read, c.Resident, c.Ahead, c.Wasted
}
