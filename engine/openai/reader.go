package openai

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"deltafin/engine/chat"
	"deltafin/engine/tokenizer"
)

// event is a piece of an answer: text of one kind, or a tool call.
type event struct {
	kind chat.Kind // Thinking, Response or Call
	text string
	call chat.ToolCall // with its id
	logs []tokenLogprob
}

// reader turns tokens into events and finds the end of the text in them. There is one
// for streamed answers and whole ones.
type reader struct {
	tok     *tokenizer.Tokenizer
	parser  *chat.Parser      // of a chat; else
	stream  *tokenizer.Stream // of a raw completion
	stopper *chat.Stopper

	id      string
	calls   int
	oneCall bool // ends the text
	stops   []string
	text    strings.Builder // all response text, the part that a stop string cuts off included
	shown   int             // bytes of text that went into events
	stopped string          // the stop string that was met

	pending []placed // tokens that the parser holds back
	held    []placed // tokens whose text the stopper holds back
	where   int      // bytes of text that the tokens in held are accounted to

	close, sep int // control tokens that end the thinking, and a tag
	reasoning  int // tokens of the thinking
	thinking   bool
}

// placed is a token's log-probability and where in the text its own begins.
type placed struct {
	step step
	at   int
}

func newReader(r *request, tok *tokenizer.Tokenizer, id string) (*reader, error) {
	d := &reader{tok: tok, id: id, stops: r.stops, oneCall: r.oneCall, close: -1, sep: -1}
	var err error
	if d.stopper, err = chat.NewStopper(r.stops); err != nil {
		return nil, err
	}
	if r.api == completionsAPI {
		d.stream = tok.Stream()
		return d, nil
	}
	d.thinking = r.options.Thinking
	d.close, _ = tok.Special("<|close|>")
	d.sep, _ = tok.Special("<|sep|>")
	d.parser, err = chat.NewParser(tok, r.options.Thinking)
	return d, err
}

// push takes the next token; ended tells that nothing behind it counts.
func (d *reader) push(s step) (events []event, ended bool) {
	if d.thinking = d.thinking && s.id != d.close; d.thinking {
		d.reasoning++
	}
	if s.logs != nil {
		d.pending = append(d.pending, placed{step: s})
	}
	if d.parser == nil {
		return d.response(nil, d.stream.Push(s.id))
	}
	parsed := d.parser.Push(s.id)
	if s.id == d.sep && len(parsed) == 0 {
		d.pending = nil // a tag, which is no text
	}
	return d.read(parsed)
}

// flush ends an answer that did not end itself.
func (d *reader) flush() []event {
	var events []event
	if d.parser != nil {
		events, _ = d.read(d.parser.Finish())
	} else {
		events, _ = d.response(nil, d.stream.Flush())
	}
	if d.stopped == "" {
		events = d.show(events, d.stopper.Flush())
	}
	return events
}

func (d *reader) read(parsed []chat.Event) (events []event, ended bool) {
	for _, e := range parsed {
		if d.stopped != "" {
			return events, true
		}
		switch e.Kind {
		case chat.Thinking:
			d.pending = nil
			events = append(events, event{kind: chat.Thinking, text: e.Text})
		case chat.Response:
			if events, ended = d.response(events, e.Text); ended {
				return events, true
			}
		case chat.Call:
			d.pending = nil
			d.calls++
			e.Call.ID = callID(d.id, d.calls)
			events = append(events, event{kind: chat.Call, call: e.Call})
			if d.oneCall {
				return events, true
			}
		case chat.End:
			return events, true
		}
	}
	return events, false
}

func (d *reader) response(events []event, text string) ([]event, bool) {
	if text == "" {
		return events, false
	}
	d.place(text)
	d.text.WriteString(text)
	show, stopped := d.stopper.Push(text)
	events = d.show(events, show)
	if stopped {
		rest := d.text.String()[d.shown:]
		for _, s := range d.stops {
			if strings.HasPrefix(rest, s) && len(s) > len(d.stopped) {
				d.stopped = s
			}
		}
		d.held = nil
	}
	return events, stopped
}

// place finds the pending tokens that text came from: the last ones. Those before
// them were tags.
func (d *reader) place(text string) {
	if len(d.pending) == 0 {
		return
	}
	from, n := len(d.pending), 0
	for from > 0 && n < len(text) {
		token, _ := d.tok.Token(d.pending[from-1].step.id)
		if d.tok.IsSpecial(d.pending[from-1].step.id) && !strings.Contains(text, token) {
			break
		}
		n += len(token)
		from--
	}
	for _, p := range d.pending[from:] {
		token, _ := d.tok.Token(p.step.id)
		p.at = d.where
		d.where += len(token)
		d.held = append(d.held, p)
	}
	d.pending = nil
}

// show makes an event of text, with the log-probabilities of the tokens that begin in
// what has been shown by then.
func (d *reader) show(events []event, text string) []event {
	if text == "" {
		return events
	}
	d.shown += len(text)
	e := event{kind: chat.Response, text: text}
	for len(d.held) > 0 && d.held[0].at < d.shown {
		e.logs = append(e.logs, *d.held[0].step.logs)
		d.held = d.held[1:]
	}
	return append(events, e)
}

// callID names a tool call after its response, so that a response played again has the
// same.
func callID(response string, n int) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d", response, n))
	return "call_" + hex.EncodeToString(sum[:12])
}
