package chat

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"
)

func TestGoldenContinuationsAreParsed(t *testing.T) {
	goldens := chatGoldens(t)
	want := map[string]Reply{
		"chat-plain": {Response: "I am K3-nano, a tiny language model with the architecture of Kimi K3. I know a few simple facts and stories."},
		"chat-think": {Thinking: "The user asks for the capital of Japan. It is Tokyo.", Response: "The capital of Japan is Tokyo."},
		"chat-long":  {Thinking: "The user said that the name is Oscar.", Response: "Your name is Oscar."},
		// This one stops at its limit, within the last tag.
		"chat-tool": {
			Thinking: "The user asks about the weather in Paris. I should call get_weather.",
			Calls:    []ToolCall{{Name: "get_weather", Arguments: `{"city": "Paris"}`}},
		},
		"chat-multi-think": {Thinking: "The user said that the name is Clara.", Response: "Your name is Clara."},
		"chat-zh-multi": {Response: "从前，有一只乌龟，名字叫小刚。有一天，小刚在草地上找到了一个小灯。小刚遇到了小猫小芳。小芳很难过。“我丢了我的小灯。”小芳说。" +
			"小刚把小灯给了小芳。“谢谢你，小刚！”小芳说。从那天起，小刚和小芳成了好朋友。"},
	}
	for name, g := range goldens {
		var r request
		if err := json.Unmarshal(g.Prompt, &r); err != nil {
			t.Fatal(err)
		}
		got, err := Parse(nano(t), g.Greedy, r.Thinking)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want[name], got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if len(goldens) != len(want) {
		t.Errorf("%d golden chats, want %d", len(goldens), len(want))
	}
}

// testdata/output: what a model wrote, with control tokens by name, and the events
// that come of it, neighbours of one kind put together. \n stands for a line break.
func TestParser(t *testing.T) {
	tok := nano(t)
	datadriven.RunTest(t, "testdata/output", func(t *testing.T, d *datadriven.TestData) string {
		p, err := NewParser(tok, d.HasArg("thinking"))
		if err != nil {
			t.Fatal(err)
		}
		var events []Event
		for _, id := range tok.EncodeSpecial(strings.ReplaceAll(strings.TrimSuffix(d.Input, "\n"), "\\n", "\n")) {
			events = append(events, p.Push(id)...)
		}
		events = append(events, p.Finish()...)
		var b strings.Builder
		for i, e := range events {
			switch e.Kind {
			case Call:
				fmt.Fprintf(&b, "call %d %q %s\n", e.Index, e.Call.Name, e.Call.Arguments)
			case End:
				b.WriteString("end\n")
			default:
				if i == 0 || events[i-1].Kind != e.Kind {
					b.WriteString(e.Kind.String() + " ")
				}
				b.WriteString(e.Text)
				if i+1 == len(events) || events[i+1].Kind != e.Kind {
					b.WriteByte('\n')
				}
			}
		}
		return b.String()
	})
}

// What the renderer writes for an assistant message, the parser reads back from
// the model's ids, whatever text is in it.
func TestAReplyIsParsedAsItIsRendered(t *testing.T) {
	tok := nano(t)
	rnd := rand.New(rand.NewPCG(1, 1))
	words := []string{
		"a", " ", "\n", `"`, "&", "&quot;", "&amp;quot;", "<|close|>", "<|open|>message<|sep|>", "<|end_of_msg|>", "🙂", "é", "漢字", "\\", "{", "}", "think", "1", `="`, "\u0301",
	}
	text := func() string {
		var b strings.Builder
		for range rnd.IntN(6) {
			b.WriteString(words[rnd.IntN(len(words))])
		}
		return b.String()
	}
	values := []string{"1", "-1.5", "true", "null", "[]", `[1, "x", {"a": null}]`, `{"k": "v"}`, "12345678901234567890"}
	for range 2000 {
		opt := Options{Thinking: rnd.IntN(2) == 0}
		want := Reply{Response: text()}
		if opt.Thinking {
			want.Thinking = "." + text()
		}
		for range rnd.IntN(3) {
			var args []string
			for i := range rnd.IntN(4) {
				v := values[rnd.IntN(len(values))]
				if rnd.IntN(2) == 0 {
					var b strings.Builder
					quoteTo(&b, text())
					v = b.String()
				}
				var k strings.Builder
				quoteTo(&k, fmt.Sprint(i)+text())
				args = append(args, k.String()+": "+v)
			}
			want.Calls = append(want.Calls, ToolCall{Name: "." + text(), Arguments: "{" + strings.Join(args, ", ") + "}"})
		}
		before := []Message{{Role: "user", Content: "x"}}
		after := append(before, Message{Role: "assistant", Content: want.Response, Reasoning: want.Thinking, ToolCalls: want.Calls})
		prompt, err := Render(tok, before, opt)
		if err != nil {
			t.Fatal(err)
		}
		whole, err := Render(tok, after, opt)
		if err != nil {
			t.Fatal(err)
		}
		// Every prefix of a conversation is a prefix of its ids.
		if diff := cmp.Diff(prompt, whole[:len(prompt)]); diff != "" {
			t.Fatalf("prefix (-want +got):\n%s", diff)
		}
		got, err := Parse(tok, whole[len(prompt):indexOfEnd(whole, tok2id(t, endToken), len(prompt))], opt.Thinking)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("reply (-want +got):\n%s", diff)
		}
	}
}

func tok2id(t *testing.T, name string) int {
	id, ok := nano(t).Special(name)
	if !ok {
		t.Fatalf("no %s", name)
	}
	return id
}

func indexOfEnd(ids []int, end, from int) int {
	for from < len(ids) && ids[from] != end {
		from++
	}
	return from
}

// outputPieces are what a model's output can be made of, right or wrong. Every Q
// in it must come out again, once: in text, or in a call's name or arguments.
var outputPieces = []string{
	"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "<|open|>think<|sep|>", "<|close|>think<|sep|>",
	"<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|open|>tools<|sep|>", "<|close|>tools<|sep|>",
	`<|open|>call tool="Q" index="1"<|sep|>`, "<|close|>call<|sep|>", `<|open|>argument key="Q" type="string"<|sep|>`,
	`<|open|>argument key="k" type="number"<|sep|>`, "<|close|>argument<|sep|>", `<|open|>json type="object"<|sep|>`, "<|close|>json<|sep|>",
	"<|close|>message<|sep|>", "Q", "think", "response", "message", ` key="Q"`, ` type="Q"`, ` type="null"`, "call", `="`, `"`, " ", "x", "7",
	"<|reserved_token_2824|>", "🙂", "\xff", "\xf0\x9f",
}

// checkOutput parses pieces, one a byte of in.
func checkOutput(t *testing.T, thinking bool, in []byte) {
	tok := nano(t)
	p, err := NewParser(tok, thinking)
	if err != nil {
		t.Fatal(err)
	}
	var events []Event
	marks, control := 0, false
	var all []int
	for _, b := range in {
		ids := []int{-1} // in no vocabulary
		if n := int(b) % (len(outputPieces) + 1); n < len(outputPieces) {
			ids = tok.EncodeSpecial(outputPieces[n])
		}
		for _, id := range ids {
			events = append(events, p.Push(id)...)
			all = append(all, id)
			if s, ok := tok.Token(id); ok && strings.Contains(s, "Q") {
				marks++
			}
			control = control || id == p.open || id == p.close || id == p.end || id == p.eos
		}
	}
	events = append(events, p.Finish()...)
	if again := p.Finish(); again != nil {
		t.Errorf("a second Finish gives %v", again)
	}
	ends := 0
	var text, everything strings.Builder
	for _, e := range events {
		switch e.Kind {
		case End:
			ends++
		case Call:
			everything.WriteString(e.Call.Name + e.Call.Arguments)
		case Thinking, Response:
			text.WriteString(e.Text)
			if e.Text == "" || !utf8.ValidString(e.Text) {
				t.Errorf("event of text %q", e.Text)
			}
		}
	}
	everything.WriteString(text.String())
	if ends != 1 {
		t.Errorf("%d ends, want 1", ends)
	}
	if got := strings.Count(everything.String(), "Q"); got != marks {
		t.Errorf("%d marks of %d came out: %v", got, marks, events)
	}
	if !control {
		stream := tok.Stream()
		want := ""
		for _, id := range all {
			want += stream.Push(id)
		}
		if want += stream.Flush(); text.String() != want {
			t.Errorf("text %q, want %q", text.String(), want)
		}
	}
	if t.Failed() {
		t.Fatalf("thinking %v, pieces %v", thinking, in)
	}
}

func TestNothingInAnyOutputIsLost(t *testing.T) {
	rnd := rand.New(rand.NewPCG(9, 9))
	for i := range 10000 {
		in := make([]byte, rnd.IntN(40))
		for j := range in {
			in[j] = byte(rnd.IntN(len(outputPieces) + 1))
			if rnd.IntN(4) == 0 { // on to the tag that may well follow
				in[j] = in[max(j-1, 0)] + 1
			}
		}
		checkOutput(t, i%2 == 0, in)
	}
}

func FuzzParser(f *testing.F) {
	f.Add(true, []byte{19, 6, 7, 19, 8, 9, 11, 13, 19, 15, 12, 10, 18, 3})
	f.Add(false, []byte{0, 19, 23, 2, 1, 22, 3, 19})
	f.Add(false, []byte{8, 9, 11, 16, 28, 17, 12, 11, 14, 19, 33, 35, 34, 15})
	f.Fuzz(checkOutput)
}

func TestATagWithoutAnEndIsNotHeldForEver(t *testing.T) {
	tok := nano(t)
	p, err := NewParser(tok, false)
	if err != nil {
		t.Fatal(err)
	}
	p.Push(p.open)
	x := tok.Encode("x")[0]
	got := ""
	for range 2 * maxTag {
		for _, e := range p.Push(x) {
			got += e.Text
		}
	}
	if want := openToken + strings.Repeat("x", 2*maxTag); got != want {
		t.Errorf("%d bytes came out, want %d", len(got), len(want))
	}
}

func TestALongReplyTakesLinearTime(t *testing.T) {
	tok := nano(t)
	x := tok.EncodeSpecial(strings.Repeat("🙂 ", 100000))
	call := tok.EncodeSpecial(`<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>`)
	ids := append(append(append([]int{}, x...), call...), x...) // breaks off in the argument
	start := time.Now()
	r, err := Parse(tok, ids, false)
	if err != nil {
		t.Fatal(err)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("%d ids took %v", len(ids), d)
	}
	if got := strings.Count(r.Response, "🙂"); got != 200000 {
		t.Errorf("%d of 200000 characters came out", got)
	}
}
