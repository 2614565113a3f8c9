package text

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"unicode/utf8"

	"deltafin/engine/draft"
)

// answerLimit bounds the draft model's tokens beyond the decided text in one call.
const answerLimit = 64

// certain is the P of a guess that the draft model was not asked for: what the form of the
// dialogue demands, or the rest of a token that it chose.
const certain = 0.995

// propose reads tokens and guesses what follows.
func (p *proposer) propose(ctx context.Context, tokens []int, k int) ([]draft.Guess, error) {
	if k <= 0 || len(tokens) == 0 {
		return nil, nil
	}
	if err := p.load(ctx); err != nil {
		return nil, err
	}
	d, err := p.read(tokens)
	if err != nil {
		return nil, err
	}
	if len(d.ids)+len(d.pending) == 0 {
		return nil, nil
	}
	var guesses []draft.Guess
	in := d.channel
	if d.inTag {
		in = silent
	}
	if d.closedAt >= 0 { // perhaps between a channel and what follows it
		done, form := tokens[d.closedAt:], p.formats.ending[d.closed]
		if len(done) < len(form) && slices.Equal(done, form[:len(done)]) {
			guesses = follows(guesses, form[len(done):], certain)
			if d.closed == think {
				in, tokens = response, nil
			}
		}
	}
	for in != silent && len(guesses) < k {
		a := &answer{p: p, channel: in, tail: p.tail(tokens), want: k - len(guesses)}
		if err := a.write(ctx, d); err != nil {
			return nil, err
		}
		guesses = append(guesses, a.guesses...)
		if !a.ended || in != think {
			break
		}
		// The thought is over; the response follows.
		in, tokens = response, nil
		d.ids, d.pending = a.ids, []byte("\n\n")
	}
	return guesses[:min(k, len(guesses))], nil
}

// follows appends ids of which the first has probability p and the others follow from it.
func follows(g []draft.Guess, ids []int, p float32) []draft.Guess {
	for _, id := range ids {
		g = append(g, draft.Guess{ID: id, P: min(p, certain)})
		p = certain
	}
	return g
}

// read brings the dialogue up to tokens and returns a copy that may be changed.
func (p *proposer) read(tokens []int) (*dialogue, error) {
	same := 0
	for same < len(tokens) && same < len(p.tokens) && tokens[same] == p.tokens[same] {
		same++
	}
	from := p.dialogue.rewind(same)
	p.tokens = append(p.tokens[:from], tokens[from:]...)
	if err := p.dialogue.read(tokens, from); err != nil {
		p.dialogue.rewind(0)
		p.tokens = nil
		return nil, err
	}
	d := p.dialogue
	d.ids, d.pending = slices.Clip(d.ids), slices.Clip(d.pending)
	return &d, nil
}

// tail is how many tokens at the end of a text say how more of it is encoded.
func (p *proposer) tail(tokens []int) []int {
	const enough, most = 16, 256
	f, i := p.formats, len(tokens)
	var after rune // first of tokens[i]
	for ; i > 0 && !f.tokens.IsSpecial(tokens[i-1]); i-- {
		t, _ := f.tokens.Token(tokens[i-1])
		before, _ := utf8.DecodeLastRuneInString(t)
		if n := len(tokens) - i; n >= most || n >= enough && border(before, after) {
			break
		}
		after, _ = utf8.DecodeRuneInString(t)
	}
	return tokens[i:]
}

// answer is the draft model's continuation of one channel.
type answer struct {
	p       *proposer
	channel channel
	tail    []int // K3's tokens at the end of the decided text
	want    int   // guesses

	ids   []int32 // the draft model's tokens so far
	from  int     // of them the first that the model is shown
	text  []byte  // beyond the decided text
	spans []span  // the tokens that made it, and the one that ended it
	ended bool    // the model ended the channel

	guesses []draft.Guess
}

// span is a token of the draft model: where in the text it begins, and its probability.
type span struct {
	at int
	p  float32
}

// write lets the model go on after d until enough guesses are made or the channel ends.
func (a *answer) write(ctx context.Context, d *dialogue) error {
	c, err := a.begin(ctx, d)
	for range answerLimit {
		if err != nil {
			return err
		}
		text := a.p.formats.vocab.tokens[c.id]
		if text == "" { // a control token
			a.spans = append(a.spans, span{len(a.text), c.p})
			a.end(c.id)
			return nil
		}
		a.take(c, text)
		if !a.encode(false) || len(a.guesses) >= a.want {
			return nil
		}
		c, err = a.p.model.follow(ctx, a.ids[a.from:])
	}
	return err
}

// take appends a token and the text that it adds.
func (a *answer) take(c choice, text string) {
	a.ids = append(a.ids, c.id)
	a.spans = append(a.spans, span{len(a.text), c.p})
	a.text = append(a.text, text...)
}

// begin gives the model's first token after d.
//
// The decided text may end within what the draft model writes as one token: K3 has written
// " Par", the draft model knows " Paris", and " Par" as it would be encoded by itself is something
// that it never saw in front of "is". So the text since the last border is held against what the model
// prefers, given that the bytes are these: where that is a token which reaches beyond the
// decided text, it is the continuation.
func (a *answer) begin(ctx context.Context, d *dialogue) (choice, error) {
	v, m := a.p.formats.vocab, a.p.model
	cut := lastBorder(d.pending)
	ids := v.encode(d.ids, d.pending[:cut])
	last := v.encode(nil, d.pending[cut:])
	if skip := max(len(last)-lastRows+1, 0); skip > 0 || len(ids) == 0 { // the first token has none to be seen from
		skip = max(skip, 1)
		ids, last = append(ids, last[:skip]...), last[skip:]
	}
	a.ids = append(slices.Clip(ids), last...)
	a.from = a.p.windowStart(len(a.ids))
	window := a.ids[a.from:]
	logits, err := m.rows(ctx, window, len(window)-1-len(last))
	if err != nil {
		return choice{}, err
	}
	rest := v.join(last)
	for i, id := range last {
		if c := m.prefer(logits.Row(i), append(v.beginning(rest), id)); c.id != id {
			a.ids = a.ids[:len(ids)+i]
			a.take(c, v.tokens[c.id][len(rest):])
			return m.follow(ctx, a.ids[a.from:])
		}
		rest = rest[len(v.tokens[id]):]
	}
	return m.best[len(window)-1], nil
}

// windowStart is the first of n tokens that the model is shown: its text is at most a window, and
// where it would be longer it begins anew with the last half, so that few tokens need computing again.
func (p *proposer) windowStart(n int) int {
	half := p.window / 2
	return (max(n-p.window, 0) + half - 1) / half * half
}

// encode makes K3's guesses of the text. As long as more text may follow, what that could change
// is left out: all behind the last border. There are no guesses if K3's encoding of the text does not go
// through the decided tokens, since K3 would hardly go on like this; it then reports whether it still may.
func (a *answer) encode(final bool) bool {
	tokens := a.p.formats.tokens
	var decided strings.Builder
	for _, id := range a.tail {
		t, _ := tokens.Token(id)
		decided.WriteString(t)
	}
	full := decided.String() + string(a.text)
	limit := len(full)
	if !final {
		limit = lastBorder([]byte(full))
	}
	ids := tokens.Encode(full)
	a.guesses = a.guesses[:0]
	if len(ids) < len(a.tail) || !slices.Equal(ids[:len(a.tail)], a.tail) {
		return limit <= decided.Len()
	}
	at, spans := decided.Len(), a.spans
	for _, id := range ids[len(a.tail):] {
		t, _ := tokens.Token(id)
		if at += len(t); at > limit {
			break
		}
		p := float32(certain)
		if len(spans) > 0 && spans[0].at < at-decided.Len() {
			p = 1
		}
		for ; len(spans) > 0 && spans[0].at < at-decided.Len(); spans = spans[1:] {
			p *= spans[0].p
		}
		a.guesses = follows(a.guesses, []int{id}, p)
	}
	return true
}

// end is called when the model has chosen a control token.
func (a *answer) end(id int32) {
	f := a.p.formats
	ends := id == f.imEnd || id == f.endText
	if a.channel == think {
		if ends = id == f.thinkOff; ends {
			a.text = bytes.TrimSuffix(a.text, []byte("\n")) // stands before </think>
		}
	}
	if !ends || !a.encode(true) {
		return
	}
	p := float32(1)
	for _, s := range a.spans {
		if s.at >= len(a.text) {
			p *= s.p
		}
	}
	a.guesses = follows(a.guesses, f.ending[a.channel], p)
	a.ids, a.ended = append(a.ids, id), true
}

// lastBorder is the end of the text before the last border, or 0.
func lastBorder(text []byte) int {
	for i := len(text); i > 0; {
		b, n := utf8.DecodeLastRune(text[:i])
		i -= n
		if a, _ := utf8.DecodeLastRune(text[:i]); i > 0 && border(a, b) {
			return i
		}
	}
	return 0
}
