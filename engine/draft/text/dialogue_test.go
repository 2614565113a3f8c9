package text

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"deltafin/engine/tokenizer"
	"deltafin/golden"
)

func testFormats(t testing.TB) (*formats, *tokenizer.Tokenizer) {
	t.Helper()
	tok := k3Tokens(t)
	f, err := newFormats(tok, testVocab(t))
	if err != nil {
		t.Fatal(err)
	}
	return f, tok
}

// shown is what the draft model sees of tokens, as text.
func shown(t testing.TB, f *formats, tokens []int) (string, *dialogue) {
	t.Helper()
	d := &dialogue{f: f, closedAt: -1}
	if err := d.read(tokens, 0); err != nil {
		t.Fatal(err)
	}
	names := map[int32]string{}
	for name, id := range f.vocab.added {
		names[id] = name
	}
	var b strings.Builder
	for _, id := range f.vocab.encode(slices.Clone(d.ids), d.pending) {
		b.WriteString(f.vocab.tokens[id] + names[id])
	}
	return b.String(), d
}

func TestADialogueIsShownAsChatML(t *testing.T) {
	f, tok := testFormats(t)
	for _, c := range []struct {
		k3, chatml string
		channel    channel
	}{
		{"Once upon a time", "Once upon a time", raw},
		{"[BOS]The end.<|end_of_msg|>", "The end.<|im_end|>\n", raw},
		{
			`<|open|>message role="system" type="x"<|sep|>Be kind.<|close|>message<|sep|><|end_of_msg|><|open|>message role="user" name="A"<|sep|>Hi`,
			"<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi", silent,
		},
		{`<|open|>message role="assistant"<|sep|><|open|>response<|sep|>Hello`, "<|im_start|>assistant\n<think>\n\n</think>\n\nHello", response},
		{`<|open|>message role="assistant"<|sep|><|open|>think<|sep|>Hm`, "<|im_start|>assistant\n<think>\nHm", think},
		{
			`<|open|>message role="assistant"<|sep|><|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Hello`,
			"<|im_start|>assistant\n<think>\nHm.\n</think>\n\nHello", response,
		},
		{
			`<|open|>message role="assistant"<|sep|><|open|>response<|sep|>So:<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>1<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>`,
			"<|im_start|>assistant\n<think>\n\n</think>\n\nSo:<tools><call tool=\"f\" index=\"1\">1</call></tools><|im_end|>\n", raw,
		},
		{`<|open|>message role="user"<|sep|>`, "<|im_start|>user\n", silent},
		{"a<|sep|>b", "ab", raw}, // a bracket that closes nothing
	} {
		got, d := shown(t, f, tok.EncodeSpecial(c.k3))
		if got != c.chatml || d.channel != c.channel {
			t.Errorf("%s\nis shown as %q in channel %d,\nexpected    %q in channel %d", c.k3, got, d.channel, c.chatml, c.channel)
		}
	}
}

// randomTokens is a dialogue that may be broken in any way.
func randomTokens(r *rand.Rand, f *formats, golden [][]int, size int) []int {
	var list []int
	for range r.IntN(8) {
		switch g := golden[r.IntN(len(golden))]; r.IntN(4) {
		case 0:
			list = append(list, []int{f.open, f.shut, f.sep, f.endMsg}[r.IntN(4)])
		case 1:
			list = append(list, r.IntN(size))
		default:
			from := r.IntN(len(g))
			list = append(list, g[from:from+r.IntN(len(g)-from)]...)
		}
	}
	return list
}

func goldenTokens(t testing.TB) (list [][]int) {
	t.Helper()
	cases, err := golden.Cases("nano")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		list = append(list, slices.Concat(c.PromptIDs, c.Greedy))
	}
	return list
}

func TestReadingOnAndBackIsReadingAnew(t *testing.T) {
	f, tok := testFormats(t)
	p := &proposer{formats: f, dialogue: dialogue{f: f, closedAt: -1}}
	r := rand.New(rand.NewPCG(3, 4))
	golden := goldenTokens(t)
	var tokens []int
	marks := 0
	for range 200 {
		tokens = append(tokens[:len(tokens)-r.IntN(len(tokens)+1)/(1+r.IntN(9))], randomTokens(r, f, golden, tok.Size())...)
		got, err := p.read(tokens)
		if err != nil {
			t.Fatal(err)
		}
		marks = max(marks, len(got.marks))
		_, want := shown(t, f, tokens)
		if !slices.Equal(f.vocab.encode(got.ids, got.pending), f.vocab.encode(want.ids, want.pending)) ||
			got.state != want.state || got.inTag != want.inTag || string(got.tag) != string(want.tag) && got.inTag || got.closedAt != want.closedAt {
			b, _ := tok.Decode(tokens)
			t.Fatalf("%q: read on %+v, anew %+v", b, got, want)
		}
	}
	if marks < 5 {
		t.Errorf("at most %d marks", marks)
	}
	if _, err := p.read([]int{1, 2, tok.Size()}); err == nil {
		t.Error("a token that is in no vocabulary was read")
	}
	if d, err := p.read(tokens); err != nil || len(d.ids)+len(d.pending) == 0 {
		t.Errorf("after an error: %v", err)
	}
}

func TestNoTextIsTooStrangeToBeContinued(t *testing.T) {
	f, tok := testFormats(t)
	s := open(t, modelDir, Options{Window: leastWindow}).Start()
	r := rand.New(rand.NewPCG(5, 6))
	golden := goldenTokens(t)
	for range 70 {
		tokens := randomTokens(r, f, golden, tok.Size())
		k := 1 + r.IntN(10)
		g := propose(t, s, tokens, k)
		if _, err := tok.Decode(ids(g)); err != nil || len(g) > k {
			t.Fatalf("%v is continued with %v: %v", tokens, g, err)
		}
		for _, x := range g {
			if !(x.P > 0 && x.P < 1) {
				t.Errorf("a guess has P %g", x.P)
			}
		}
	}
}

func FuzzDialogue(f *testing.F) {
	formats, tok := testFormats(f)
	for _, tokens := range goldenTokens(f) {
		b, err := tok.Decode(tokens)
		if err != nil {
			f.Fatal(err)
		}
		if len(b) < 1000 {
			f.Add(string(b), len(tokens)/2)
		}
	}
	f.Add("<|close|>think<|sep|><|open|>message role=<|sep|><|sep|>", 3)
	f.Fuzz(func(t *testing.T, s string, back int) {
		tokens := tok.EncodeSpecial(s)
		p := &proposer{formats: formats, dialogue: dialogue{f: formats, closedAt: -1}}
		for _, n := range []int{len(tokens), min(max(back, 0), len(tokens)), len(tokens)} {
			d, err := p.read(tokens[:n])
			if err != nil {
				t.Fatal(err)
			}
			_, want := shown(t, formats, tokens[:n])
			if !slices.Equal(formats.vocab.encode(d.ids, d.pending), formats.vocab.encode(want.ids, want.pending)) {
				t.Errorf("%q: %d of %d tokens are read otherwise after others", s, n, len(tokens))
			}
		}
	})
}
