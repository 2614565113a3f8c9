package openai

import (
	"math"
	"slices"
	"unicode/utf8"

	"deltafin/engine/tokenizer"
)

// tokenLogprob is a token with its log-probability, natural logarithm, and the likeliest
// tokens in its place. Bytes are exact; Token is text, so a part of a character in it is
// U+FFFD.
type tokenLogprob struct {
	topLogprob
	Top []topLogprob `json:"top_logprobs"`
}

type topLogprob struct {
	Token   string  `json:"token"`
	Logprob float64 `json:"logprob"`
	Bytes   []int   `json:"bytes"`
}

// logprobsOf computes them in float64 from the row [vocab] that chose id.
func logprobsOf(tok *tokenizer.Tokenizer, row []float32, id, top int) *tokenLogprob {
	most := float64(slices.Max(row))
	sum := 0.0
	for _, v := range row {
		sum += math.Exp(float64(v) - most)
	}
	norm := most + math.Log(sum)
	of := func(id int) topLogprob {
		text, _ := tok.Token(id)
		t := topLogprob{Token: text, Logprob: float64(row[id]) - norm, Bytes: make([]int, len(text))}
		for i := range len(text) {
			t.Bytes[i] = int(text[i])
		}
		if !utf8.ValidString(text) {
			t.Token, _ = tok.DecodeText([]int{id})
		}
		return t
	}
	l := &tokenLogprob{topLogprob: of(id), Top: []topLogprob{}}
	for _, id := range likeliest(row, top) {
		l.Top = append(l.Top, of(id))
	}
	return l
}

// likeliest gives the n ids of the greatest values, the lower id first among equals.
func likeliest(row []float32, n int) []int {
	best := make([]int, 0, n+1)
	for id, v := range row {
		if n == 0 || len(best) == n && v <= row[best[n-1]] {
			continue
		}
		i := len(best)
		for i > 0 && v > row[best[i-1]] {
			i--
		}
		best = slices.Insert(best, i, id)
		best = best[:min(n, len(best))]
	}
	return best
}
