package text

import (
	"bytes"
	"fmt"
	"unicode/utf8"
)

// K3's chat format and the draft model's are two markups of the same dialogue. A dialogue
// reads K3's tokens and writes what the draft model would have seen:
//
//	K3                                               draft model (ChatML)
//	<|open|>message role="user"<|sep|>               <|im_start|>user\n
//	<|open|>think<|sep|>                             <think>\n
//	<|close|>think<|sep|>                            \n</think>\n\n
//	<|open|>response<|sep|> without a think channel  <think>\n\n</think>\n\n
//	<|end_of_msg|>                                   <|im_end|>\n
//	<|open|>call tool="f"<|sep|> and the like        <call tool="f">
//
// A thought that K3 keeps is kept. Text outside any message stays as it is.
type dialogue struct {
	f *formats

	ids     []int32 // the draft model's tokens, but for those of pending
	pending []byte  // text since the last border

	state
	inTag, opening bool
	tag            []byte
	// Where the channel that was open last was closed, as long as only tags follow; else -1.
	closedAt int
	closed   channel

	marks []mark
}

// state is what a border in the text says about what follows.
type state struct {
	channel channel
	thought bool // the message has had a think channel
}

// mark is a place from which reading can go on: tokens of K3 and of the draft model before it.
type mark struct {
	from, to int
	state
}

// channel is what kind of text is being written.
type channel uint8

const (
	raw    channel = iota // outside any message
	silent                // where the model does not write, or nothing is to be guessed
	think
	response
)

// formats are the control tokens of both markups.
type formats struct {
	tokens Tokens
	vocab  *vocab

	open, shut, sep, endMsg                    int
	imStart, imEnd, endText, thinkOn, thinkOff int32

	// ending is what K3 writes, by channel, when the draft model ends its text.
	ending [response + 1][]int
}

func newFormats(tokens Tokens, v *vocab) (*formats, error) {
	f := &formats{tokens: tokens, vocab: v}
	for _, s := range []struct {
		name string
		id   *int
	}{{"<|open|>", &f.open}, {"<|close|>", &f.shut}, {"<|sep|>", &f.sep}, {"<|end_of_msg|>", &f.endMsg}} {
		id, ok := tokens.Special(s.name)
		if !ok {
			return nil, fmt.Errorf("the model's tokenizer has no %s: a text model can guess for Kimi K3's chat format only", s.name)
		}
		*s.id = id
	}
	for _, s := range []struct {
		name string
		id   *int32
	}{{"<|im_start|>", &f.imStart}, {"<|im_end|>", &f.imEnd}, {"<|endoftext|>", &f.endText}, {"<think>", &f.thinkOn}, {"</think>", &f.thinkOff}} {
		id, ok := v.added[s.name]
		if !ok {
			return nil, fmt.Errorf("tokenizer.json has no added token %s: use a model with Qwen3's tokenizer", s.name)
		}
		*s.id = id
	}
	tag := func(bracket int, name string) []int {
		return append(append([]int{bracket}, tokens.Encode(name)...), f.sep)
	}
	f.ending[raw] = []int{f.endMsg}
	f.ending[think] = append(tag(f.shut, "think"), tag(f.open, "response")...)
	f.ending[response] = append(append(tag(f.shut, "response"), tag(f.shut, "message")...), f.endMsg)
	return f, nil
}

// borderAfter is how much text may pend before a border in it is used.
const borderAfter = 256

// read goes on with tokens[from:].
func (d *dialogue) read(tokens []int, from int) error {
	for i, id := range tokens[from:] {
		t, ok := d.f.tokens.Token(id)
		switch {
		case !ok:
			return fmt.Errorf("token %d is not in the model's vocabulary", id)
		case !d.f.tokens.IsSpecial(id):
			if d.inTag {
				d.tag = append(d.tag, t...)
				break
			}
			if len(d.pending) >= borderAfter {
				a, _ := utf8.DecodeLastRune(d.pending)
				if b, _ := utf8.DecodeRuneInString(t); border(a, b) {
					d.flush()
					d.mark(from + i)
				}
			}
			d.pending, d.closedAt = append(d.pending, t...), -1
		case id == d.f.open || id == d.f.shut:
			d.inTag, d.opening, d.tag = true, id == d.f.open, d.tag[:0]
			if id == d.f.shut && (d.channel == think || d.channel == response) {
				d.closedAt, d.closed = from+i, d.channel
				if d.channel == think {
					d.write("\n")
					d.control(d.f.thinkOff)
					d.write("\n\n")
				}
				d.channel = silent
			}
		case id == d.f.sep:
			if d.inTag {
				d.inTag = false
				d.element()
			}
		case id == d.f.endMsg:
			d.control(d.f.imEnd)
			d.write("\n")
			d.inTag, d.closedAt, d.state = false, -1, state{}
			d.mark(from + i + 1)
		default: // has no counterpart
			d.flush()
		}
	}
	return nil
}

// element is called at the end of a tag.
func (d *dialogue) element() {
	name, attributes, _ := bytes.Cut(d.tag, []byte(" "))
	switch s := string(name); {
	case s == "message" && d.opening:
		_, role, _ := bytes.Cut(attributes, []byte(`role="`))
		role, _, _ = bytes.Cut(role, []byte(`"`))
		d.control(d.f.imStart)
		d.pending = append(d.pending, role...)
		d.write("\n")
		d.state = state{channel: silent}
	case s == "think" && d.opening:
		d.control(d.f.thinkOn)
		d.write("\n")
		d.state = state{channel: think, thought: true}
	case s == "response" && d.opening:
		if !d.thought {
			d.control(d.f.thinkOn)
			d.write("\n\n")
			d.control(d.f.thinkOff)
			d.write("\n\n")
		}
		d.channel = response
	case s == "message", s == "think", s == "response":
	case d.opening:
		d.write("<" + string(d.tag) + ">")
	default:
		d.write("</" + s + ">")
	}
}

func (d *dialogue) write(s string) { d.pending = append(d.pending, s...) }

func (d *dialogue) flush() {
	d.ids = d.f.vocab.encode(d.ids, d.pending)
	d.pending = d.pending[:0]
}

func (d *dialogue) control(id int32) {
	d.flush()
	d.ids = append(d.ids, id)
}

func (d *dialogue) mark(from int) {
	d.flush()
	d.marks = append(d.marks, mark{from, len(d.ids), d.state})
}

// rewind goes back to the last mark that is not behind the first n tokens, and returns how many
// tokens are before it.
func (d *dialogue) rewind(n int) int {
	m := mark{}
	for len(d.marks) > 0 {
		if m = d.marks[len(d.marks)-1]; m.from <= n {
			break
		}
		m, d.marks = mark{}, d.marks[:len(d.marks)-1]
	}
	d.ids, d.pending, d.state = d.ids[:m.to], d.pending[:0], m.state
	d.inTag, d.closedAt = false, -1
	return m.from
}
