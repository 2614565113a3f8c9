package draft

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
)

func ids(t *testing.T, s Sequence, tokens []int, k int) []int {
	t.Helper()
	g, err := s.Propose(context.Background(), tokens, k)
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, g := range g {
		if g.P <= 0 || g.P >= 1 {
			t.Errorf("a guess has the probability %v", g.P)
		}
		out = append(out, g.ID)
	}
	return out
}

func TestLookupProposesWhatFollowed(t *testing.T) {
	for _, c := range []struct {
		name   string
		tokens []int
		k      int
		want   []int
	}{
		{"nothing", nil, 3, nil},
		{"one token", []int{5}, 3, nil},
		{"no run repeats", []int{1, 2, 3, 4, 5, 6, 7}, 3, nil},
		{"one token is no evidence", []int{1, 2, 3, 1}, 3, nil},
		{"two are", []int{1, 2, 3, 4, 9, 1, 2}, 3, []int{3, 4, 9}},
		{"the last occurrence counts", []int{1, 2, 3, 8, 1, 2, 4, 8, 1, 2}, 2, []int{4, 8}},
		{"but a longer run more", []int{7, 6, 1, 2, 3, 8, 5, 1, 2, 4, 8, 7, 6, 1, 2}, 2, []int{3, 8}},
		{"a loop goes on", []int{1, 2, 1, 2, 1, 2}, 5, []int{1, 2, 1, 2, 1}},
		{"one token over and over", []int{4, 4, 4}, 4, []int{4, 4, 4, 4}},
	} {
		if got := ids(t, NGram{}.Start(), c.tokens, c.k); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v proposes %v, want %v", c.name, c.tokens, got, c.want)
		}
	}
}

func TestLookupIsTheSameHoweverTheTextArrives(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var tokens []int
	s := NGram{}.Start()
	for range 2000 {
		tokens = append(tokens, rng.IntN(5))
		if rng.IntN(10) == 0 {
			s = s.Fork()
		}
		if rng.IntN(3) > 0 {
			continue // the sequence sees it later
		}
		if got, want := ids(t, s, tokens, 4), ids(t, NGram{}.Start(), tokens, 4); !slices.Equal(got, want) {
			t.Fatalf("after %d tokens: %v, from the beginning %v", len(tokens), got, want)
		}
	}
	if _, most := (NGram{}).Bytes(len(tokens)); s.Bytes() > most {
		t.Errorf("%d bytes, the account says at most %d", s.Bytes(), most)
	}
}
