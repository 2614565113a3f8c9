package draft

import "context"

// NGram proposes what followed the last time that the text's last few tokens occurred in
// it: prompt lookup (Saxena, 2023). It knows only the text itself, so it costs next to
// nothing, and helps where text repeats: code, quotations, tables, lists.
type NGram struct{}

// orders are the lengths of the runs of tokens that are looked up, the longest first.
// One token is no evidence.
var orders = [...]int{6, 4, 2}

// Name is "ngram".
func (NGram) Name() string { return "ngram" }

// Bytes is that of the tables of one sequence.
func (NGram) Bytes(context int) (loaded, sequence int64) {
	return 0, int64(context) * int64(len(orders)) * entryBytes
}

// entryBytes is what an entry of a Go map from uint64 to int32 takes at its emptiest.
const entryBytes = 40

// Start begins an empty sequence.
func (NGram) Start() Sequence { return &ngrams{} }

// Close does nothing.
func (NGram) Close() error { return nil }

type ngrams struct {
	known int                           // tokens that the tables cover
	after [len(orders)]map[uint64]int32 // of a run of tokens: the place of the token behind its last occurrence
}

// run is a key for tokens. Equal keys are no proof: the tokens are compared.
func run(tokens []int) uint64 {
	h := uint64(14695981039346656037)
	for _, t := range tokens {
		h = (h ^ uint64(t)) * 1099511628211
	}
	return h
}

func (s *ngrams) learn(tokens []int) {
	for o, n := range orders {
		if s.after[o] == nil {
			s.after[o] = map[uint64]int32{}
		}
		for i := max(s.known, n); i < len(tokens); i++ {
			s.after[o][run(tokens[i-n:i])] = int32(i)
		}
	}
	s.known = len(tokens)
}

// matching is how many tokens before a and before b are the same, at most 32.
func matching(tokens []int, a, b int) (n int) {
	for n < min(a, b, 32) && tokens[a-1-n] == tokens[b-1-n] {
		n++
	}
	return n
}

// Propose copies what followed the longest known run. Where the copy reaches the text's
// end it goes on with its own beginning, as a loop does.
func (s *ngrams) Propose(_ context.Context, tokens []int, k int) ([]Guess, error) {
	s.learn(tokens)
	for o, n := range orders {
		if len(tokens) < n {
			continue
		}
		from, ok := s.after[o][run(tokens[len(tokens)-n:])]
		if !ok {
			continue
		}
		same := matching(tokens, int(from), len(tokens))
		if same < n {
			continue // another run with the same key
		}
		guesses := make([]Guess, k)
		for i := range guesses {
			at := int(from) + i
			for at >= len(tokens) {
				at -= len(tokens) - int(from)
			}
			// The longer the run, the likelier; how much so is for the [Chooser] to learn.
			guesses[i] = Guess{tokens[at], 1 - 1/float32(1+same)}
		}
		return guesses, nil
	}
	return nil, nil
}

// Fork returns a sequence that reads the text again when it is asked.
func (s *ngrams) Fork() Sequence { return &ngrams{} }

// Bytes is the memory of the tables.
func (s *ngrams) Bytes() (n int64) {
	for _, m := range s.after {
		n += int64(len(m)) * entryBytes
	}
	return n
}
