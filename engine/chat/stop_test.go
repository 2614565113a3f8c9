package chat

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestStopStringsAreFoundAcrossPieces(t *testing.T) {
	for _, c := range []struct {
		stops  []string
		pieces []string
		want   []string // shown by each push
		flush  string
		stop   bool
	}{
		{[]string{"DEFGHIJ"}, []string{"ABC", "DE", "FG", "HIJ", "KL"}, []string{"ABC", "", "", "", ""}, "", true},
		{[]string{"beta gamma"}, []string{"alpha beta", " gam", "ma delta"}, []string{"alpha ", "", ""}, "", true},
		{[]string{"beta gamma"}, []string{"alpha beta", " gam", "e"}, []string{"alpha ", "", "beta game"}, "", false},
		{[]string{"\n\n"}, []string{"a\n", "b\n", "\nc"}, []string{"a", "\nb", ""}, "", true},
		{[]string{"aab"}, []string{"aa", "a", "b"}, []string{"", "a", ""}, "", true},
		{[]string{"ab"}, []string{"xa"}, []string{"x"}, "a", false},
		{[]string{"停止"}, []string{"好停", "下停", "止x"}, []string{"好", "停下", ""}, "", true},
		{[]string{"END", "STOP"}, []string{"a STOP END"}, []string{"a "}, "", true},
		{[]string{"bc", "abc"}, []string{"xab", "c"}, []string{"x", ""}, "", true},
		{[]string{"abcd", "bc"}, []string{"abcd"}, []string{"a"}, "", true},
		{nil, []string{"abc", ""}, []string{"abc", ""}, "", false},
	} {
		s, err := NewStopper(c.stops)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		stopped := false
		for _, p := range c.pieces {
			var show string
			show, stopped = s.Push(p)
			got = append(got, show)
		}
		if flush := s.Flush(); !slices.Equal(got, c.want) || flush != c.flush || stopped != c.stop {
			t.Errorf("stops %q, pieces %q: shown %q, then %q, stopped %v; want %q, %q, %v",
				c.stops, c.pieces, got, flush, stopped, c.want, c.flush, c.stop)
		}
	}
	if _, err := NewStopper([]string{"a", ""}); err == nil || !strings.Contains(err.Error(), "stop string 2") {
		t.Errorf("empty stop string: error %v", err)
	}
}

// The oracle looks at the whole text, one more byte at a time.
func oracleStop(stops []string, text string) (show string, stopped bool) {
	for n := 1; n <= len(text); n++ {
		longest := 0
		for _, s := range stops {
			if strings.HasSuffix(text[:n], s) {
				longest = max(longest, len(s))
			}
		}
		if longest > 0 {
			return text[:n-longest], true
		}
	}
	return text, false
}

func checkStops(t *testing.T, stops []string, text string, cut func(left int) int) {
	t.Helper()
	s, err := NewStopper(stops)
	if err != nil {
		t.Fatal(err)
	}
	want, wantStopped := oracleStop(stops, text)
	got, stopped := "", false
	for rest := text; rest != ""; {
		n := cut(len(rest))
		var show string
		show, stopped = s.Push(rest[:n])
		got += show
		rest = rest[n:]
		if seen := text[:len(text)-len(rest)]; !stopped && !strings.HasPrefix(want, got) {
			t.Fatalf("stops %q: shown %q of %q", stops, got, seen)
		}
	}
	got += s.Flush()
	if got != want || stopped != wantStopped {
		t.Fatalf("stops %q in %q: shown %q, stopped %v; want %q, %v", stops, text, got, stopped, want, wantStopped)
	}
}

func TestPiecesMakeNoDifferenceToStops(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	word := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = "aab"[rnd.IntN(3)]
		}
		return string(b)
	}
	for range 20000 {
		var stops []string
		for range rnd.IntN(4) {
			stops = append(stops, word(1+rnd.IntN(7)))
		}
		checkStops(t, stops, word(rnd.IntN(30)), func(left int) int { return 1 + rnd.IntN(left) })
	}
}

func FuzzStopper(f *testing.F) {
	f.Add("aab", "ab", "aaaab", uint8(1))
	f.Add("停止", "止", "好停下停止x", uint8(2))
	f.Fuzz(func(t *testing.T, a, b, text string, size uint8) {
		if a == "" || b == "" || len(text) > 2000 {
			return
		}
		checkStops(t, []string{a, b}, text, func(left int) int { return min(left, 1+int(size)) })
	})
}
