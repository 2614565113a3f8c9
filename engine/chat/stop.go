package chat

import "fmt"

// Stopper cuts a text that comes in pieces at the first stop string. It holds back
// only what may turn out to be the beginning of one, so a stop string that is
// spread over pieces never shows. How the text is cut into pieces makes no
// difference.
//
// The stop string that is complete first counts, and the longest of those that
// are complete at the same place.
type Stopper struct {
	stops   []stop
	held    string // a suffix of the text so far: the longest that begins a stop string
	stopped bool
}

// stop is one stop string and how much of it the text now ends with, kept up by
// the Knuth-Morris-Pratt table.
type stop struct {
	text string
	back []int // back[n]: the longest proper suffix of text[:n] that begins text
	n    int
}

// NewStopper takes the stop strings; none at all lets everything through. An empty
// one is an error: it would stop everything.
func NewStopper(stops []string) (*Stopper, error) {
	s := &Stopper{}
	for i, text := range stops {
		if text == "" {
			return nil, fmt.Errorf("stop string %d is empty: leave it out", i+1)
		}
		back := make([]int, len(text)+1)
		for n, k := 2, 0; n <= len(text); n++ {
			for k > 0 && text[k] != text[n-1] {
				k = back[k]
			}
			if text[k] == text[n-1] {
				k++
			}
			back[n] = k
		}
		s.stops = append(s.stops, stop{text: text, back: back})
	}
	return s, nil
}

// Push takes more text and gives what can be shown of it. stopped tells that a
// stop string was met, now or earlier; the text then ends before it.
func (s *Stopper) Push(text string) (show string, stopped bool) {
	if s.stopped {
		return "", true
	}
	whole := s.held + text
	for i := len(s.held); i < len(whole); i++ {
		longest := 0
		for j := range s.stops {
			if s.stops[j].step(whole[i]) {
				longest = max(longest, len(s.stops[j].text))
			}
		}
		if longest > 0 {
			s.stopped, s.held = true, ""
			return whole[:i+1-longest], true
		}
	}
	hold := 0
	for _, st := range s.stops {
		hold = max(hold, st.n)
	}
	s.held = whole[len(whole)-hold:]
	return whole[:len(whole)-hold], false
}

// Flush gives what is held back, for the end of a text that met no stop string.
func (s *Stopper) Flush() string {
	held := s.held
	s.held = ""
	for i := range s.stops {
		s.stops[i].n = 0
	}
	return held
}

// step takes one byte and tells whether it completes the stop string.
func (st *stop) step(b byte) bool {
	for st.n > 0 && st.text[st.n] != b {
		st.n = st.back[st.n]
	}
	if st.text[st.n] == b {
		st.n++
	}
	return st.n == len(st.text)
}
