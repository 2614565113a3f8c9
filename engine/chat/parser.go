package chat

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"deltafin/engine/tokenizer"
)

// Kind says what an [Event] brings.
type Kind int

const (
	Thinking Kind = iota // more of the think channel's text
	Response             // more of the response channel's text
	Call                 // one whole tool call
	End                  // the message is over; once
)

// Event is a piece of what the model wrote.
type Event struct {
	Kind  Kind
	Text  string   // Thinking, Response: valid UTF-8, never empty
	Call  ToolCall // Call: without an ID; Arguments is a JSON object unless the model wrote its arguments as raw text
	Index int      // Call: the number the model gave it; it counts from 1
}

// Parser turns the ids that a model writes after a rendered prompt into events.
// It goes by control ids, never by their spelling, so a response may speak of
// "<|close|>" as it likes.
//
// Nothing that the model wrote is lost. A tag that is not one of the format, or
// not where the format has it, is spelled out in the channel it stands in, or in
// the response if it stands in none. Text outside of any channel is response. A
// tool call that breaks off, names an argument twice or holds anything else but
// arguments becomes response text as a whole, spelled out. A channel or message
// that closes what is still open inside it is accepted, and so is an end of
// message anywhere; a tag's name that the end cuts short is left out.
type Parser struct {
	tok *tokenizer.Tokenizer
	controls

	place  place
	tag    []int // a tag that has begun: its bracket and what came since
	call   call  // in places call, argument and raw
	stream *tokenizer.Stream
	kind   Kind // of the text in stream
	events []Event
}

type place int

const (
	inMessage place = iota // in no channel
	inThink
	inResponse
	inTools
	inCall
	inArgument
	inRaw // in the json element that stands for all arguments
	ended
)

// call is a tool call that is not closed yet.
type call struct {
	ids   []int // all of it, to spell it out should it break off
	name  string
	index int
	args  []argument
	raw   bool  // args is one raw text instead
	value []int // ids of the value that is open
}

type argument struct{ key, kind, value string }

// maxTag bounds the ids held back for one tag: a bracket without an end must not
// swallow the rest of a stream.
const maxTag = 512

// NewParser starts a parser at the end of a prompt rendered with the same thinking
// option. A vocabulary without the chat format's control tokens is an error.
func NewParser(tok *tokenizer.Tokenizer, thinking bool) (*Parser, error) {
	c, err := controlsOf(tok)
	if err != nil {
		return nil, err
	}
	p := &Parser{tok: tok, controls: c, place: inResponse, stream: tok.Stream()}
	if thinking {
		p.place = inThink
	}
	return p, nil
}

// Push takes the next id and gives the events it completes, often none. Both
// <|end_of_msg|> and [EOS] end the message. What follows the end, which no caller
// should send, still comes out as response text.
func (p *Parser) Push(id int) []Event {
	p.events = nil
	switch {
	case p.place == ended:
		p.text(id)
	case id == p.end || id == p.eos:
		p.finish()
	case id == p.open || id == p.close:
		p.dropTag()
		p.tag = append(p.tag, id)
	case len(p.tag) == 0:
		p.text(id)
	case id == p.sep:
		p.closeTag()
	default:
		p.tag = append(p.tag, id)
		if len(p.tag) > maxTag {
			p.dropTag()
		}
	}
	return p.events
}

// Finish ends the message if no id has: the events are what was still held back,
// then End. It is to be called when generation stops, for whatever reason.
func (p *Parser) Finish() []Event {
	p.events = nil
	if p.place == ended {
		p.flush()
	} else {
		p.finish()
	}
	return p.events
}

func (p *Parser) finish() {
	if len(p.tag) > 0 && !p.inCall() && p.beginsName(p.tag[1:]) {
		p.tag = nil // a reply cut off within a tag; what there is of it is no text
	}
	p.dropTag()
	if p.inCall() {
		p.abandonCall()
	}
	p.enter(ended)
	p.events = append(p.events, Event{Kind: End})
}

// Reply is a whole message of the model.
type Reply struct {
	Thinking, Response string
	Calls              []ToolCall // in the order they came
}

// Parse reads a whole message at once; it is Push for every id, and Finish.
func Parse(tok *tokenizer.Tokenizer, ids []int, thinking bool) (Reply, error) {
	p, err := NewParser(tok, thinking)
	if err != nil {
		return Reply{}, err
	}
	var thought, response strings.Builder
	var calls []ToolCall
	collect := func(events []Event) {
		for _, e := range events {
			switch e.Kind {
			case Thinking:
				thought.WriteString(e.Text)
			case Response:
				response.WriteString(e.Text)
			case Call:
				calls = append(calls, e.Call)
			}
		}
	}
	for _, id := range ids {
		collect(p.Push(id))
	}
	collect(p.Finish())
	return Reply{thought.String(), response.String(), calls}, nil
}

// text takes ids that are no structure.
func (p *Parser) text(ids ...int) {
	switch p.place {
	case inThink:
		p.show(Thinking, ids)
	case inArgument, inRaw:
		p.call.ids = append(p.call.ids, ids...)
		p.call.value = append(p.call.value, ids...)
	case inCall:
		p.abandonCall()
		p.show(Response, ids)
	default:
		p.show(Response, ids)
	}
}

func (p *Parser) show(kind Kind, ids []int) {
	if kind != p.kind {
		p.flush()
		p.kind = kind
	}
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(p.stream.Push(id))
	}
	p.emit(b.String())
}

// flush brings out the beginning of a character that will not be completed.
func (p *Parser) flush() { p.emit(p.stream.Flush()) }

func (p *Parser) emit(text string) {
	if text == "" {
		return
	}
	if n := len(p.events); n > 0 && p.events[n-1].Kind == p.kind {
		p.events[n-1].Text += text
		return
	}
	p.events = append(p.events, Event{Kind: p.kind, Text: text})
}

func (p *Parser) enter(where place) {
	p.flush()
	p.place = where
}

func (p *Parser) inCall() bool {
	return p.place == inCall || p.place == inArgument || p.place == inRaw
}

// dropTag makes text of a tag that did not come to its end.
func (p *Parser) dropTag() {
	if len(p.tag) == 0 {
		return
	}
	ids := p.tag
	p.tag = nil
	if p.inCall() {
		p.abandonCall()
	}
	p.text(ids...)
}

// abandonCall makes response text of the tool call under way.
func (p *Parser) abandonCall() {
	p.place = inTools
	p.show(Response, p.call.ids)
	p.call = call{}
}

// closeTag acts on a tag that is complete.
func (p *Parser) closeTag() {
	ids := append(p.tag, p.sep)
	p.tag = nil
	t, ok := p.parseTag(ids)
	if p.inCall() {
		if ok && p.inCallTag(t) {
			// A call that has just closed has left nothing to keep.
			if p.inCall() {
				p.call.ids = append(p.call.ids, ids...)
			}
			return
		}
		p.abandonCall()
	}
	if !ok || !p.channelTag(t, ids) {
		p.text(ids...)
	}
}

// channelTag acts on a tag outside of a tool call; false if it is out of place.
func (p *Parser) channelTag(t tag, ids []int) bool {
	switch {
	case t.is(opens, "think"):
		p.enter(inThink)
	case t.is(opens, "response"):
		p.enter(inResponse)
	case t.is(opens, "tools"):
		p.enter(inTools)
	case t.is(opens, "call", "tool", "index") && p.place == inTools:
		index, err := strconv.Atoi(t.attrs[1].value)
		if err != nil || index < 0 || t.attrs[0].value == "" {
			return false
		}
		p.enter(inCall)
		p.call = call{ids: ids, name: t.attrs[0].value, index: index}
	case t.is(closes, "think") && p.place == inThink,
		t.is(closes, "response") && p.place == inResponse,
		t.is(closes, "tools") && p.place == inTools,
		t.is(closes, "message"):
		p.enter(inMessage)
	default:
		return false
	}
	return true
}

// inCallTag acts on a tag within a tool call; false if it is out of place, which
// breaks the call off.
func (p *Parser) inCallTag(t tag) bool {
	c := &p.call
	switch {
	case p.place == inCall && t.is(opens, "argument", "key", "type") && !c.raw:
		a := argument{key: t.attrs[0].value, kind: t.attrs[1].value}
		twice := slices.ContainsFunc(c.args, func(b argument) bool { return a.key == b.key })
		if twice || !slices.Contains([]string{"string", "number", "boolean", "null", "object", "array"}, a.kind) {
			return false
		}
		c.args = append(c.args, a)
		p.place = inArgument
	case p.place == inCall && t.is(opens, "json", "type") && len(c.args) == 0:
		if t.attrs[0].value != "object" {
			return false
		}
		c.raw = true
		c.args = append(c.args, argument{})
		p.place = inRaw
	case p.place == inArgument && t.is(closes, "argument"), p.place == inRaw && t.is(closes, "json"):
		text, err := p.tok.DecodeText(c.value)
		if err != nil {
			return false
		}
		c.args[len(c.args)-1].value = text
		c.value = nil
		p.place = inCall
	case p.place == inCall && t.is(closes, "call"):
		p.flush()
		p.events = append(p.events, Event{Kind: Call, Index: c.index, Call: ToolCall{Name: c.name, Arguments: c.arguments()}})
		p.call = call{}
		p.place = inTools
	default:
		return false
	}
	return true
}

// arguments puts the arguments together as a JSON object. Every type but string is
// JSON already; where the model's value is not, its text stands as a string.
func (c *call) arguments() string {
	if c.raw {
		return c.args[0].value
	}
	var b strings.Builder
	b.WriteByte('{')
	for i, a := range c.args {
		if i > 0 {
			b.WriteString(spaced.comma)
		}
		quoteTo(&b, a.key)
		b.WriteString(spaced.colon)
		if a.kind != "string" && json.Valid([]byte(a.value)) {
			b.WriteString(a.value)
		} else {
			quoteTo(&b, a.value)
		}
	}
	b.WriteByte('}')
	return b.String()
}

// tag is what stands between a bracket and <|sep|>.
type tag struct {
	way   way
	name  string
	attrs []attr
}

type way int

const (
	opens way = iota
	closes
)

type attr struct{ key, value string }

// is tells whether t is the tag of this name with exactly these attributes, in
// this order.
func (t tag) is(w way, name string, keys ...string) bool {
	return t.way == w && t.name == name &&
		slices.EqualFunc(t.attrs, keys, func(a attr, key string) bool { return a.key == key })
}

// beginsName tells whether ids spell the beginning of a tag's name, nothing
// included.
func (p *Parser) beginsName(ids []int) bool {
	b, err := p.tok.Decode(ids)
	return err == nil && slices.ContainsFunc([]string{"message", "think", "response", "tools", "call"},
		func(name string) bool { return strings.HasPrefix(name, string(b)) })
}

var unescapeAttr = strings.NewReplacer("&quot;", `"`, "&amp;", "&")

// parseTag reads a tag from its bracket to its <|sep|>; ok is false for what no
// renderer writes.
func (p *Parser) parseTag(ids []int) (t tag, ok bool) {
	if ids[0] == p.close {
		t.way = closes
	}
	inner := ids[1 : len(ids)-1]
	if slices.ContainsFunc(inner, p.tok.IsSpecial) {
		return t, false
	}
	b, err := p.tok.Decode(inner)
	if err != nil {
		return t, false
	}
	text := string(b)
	name, rest := text, ""
	if i := strings.IndexByte(text, ' '); i >= 0 {
		name, rest = text[:i], text[i:]
	}
	t.name = name
	for rest != "" {
		key, after, found := strings.Cut(rest, `="`)
		value, next, closed := strings.Cut(after, `"`)
		key, spaced := strings.CutPrefix(key, " ")
		if !found || !closed || !spaced {
			return t, false
		}
		t.attrs = append(t.attrs, attr{key, unescapeAttr.Replace(value)})
		rest = next
	}
	return t, true
}

// String names the kind for messages and tests.
func (k Kind) String() string {
	switch k {
	case Thinking:
		return "thinking"
	case Response:
		return "response"
	case Call:
		return "call"
	case End:
		return "end"
	}
	return fmt.Sprintf("Kind(%d)", int(k))
}
