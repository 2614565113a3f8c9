package text

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"deltafin/golden"
)

var nanoVocab = sync.OnceValues(func() (*vocab, error) { return readVocab(filepath.Join(modelDir, "tokenizer.json"), 2080) })

func testVocab(t testing.TB) *vocab {
	t.Helper()
	v, err := nanoVocab()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// texts are the golden texts and strings that are hard on a split.
func texts(t testing.TB) []string {
	t.Helper()
	cases, err := golden.Cases("nano")
	if err != nil {
		t.Fatal(err)
	}
	list := []string{
		"", " ", "\n", "a\r\n\r\nb  c ", "\t x\u00a0\n \n  y", "don't I'LL 'S it'ſ x'ſy", "汉字，漢字。〇⺀字", "123456 ١٢٣ 1½²", "🙂🚀👩\u200d💻!", "e\u0301 ＡＢＣ 한국어 \u1112\u1161\u11ab हिन्दी",
		"<|im_start|>user\n<think></think><|im_end|>", "!!\n\n'l 'll", "a\u2028b\u0085c\u001cd", "\u212b\u1e9b\u0323",
	}
	for _, c := range cases {
		list = append(list, c.Prompt, c.Text)
	}
	return list
}

func TestTextIsEncodedAsTheTokenizersLibraryDoes(t *testing.T) {
	b, err := os.ReadFile("testdata/encode.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases [][2]json.RawMessage
	if err := json.Unmarshal(b, &cases); err != nil {
		t.Fatal(err)
	}
	v := testVocab(t)
	for _, c := range cases {
		var s string
		var want, got []int32
		if json.Unmarshal(c[0], &s) != nil || json.Unmarshal(c[1], &want) != nil {
			t.Fatalf("case %s", c)
		}
		// The library finds added tokens in text; here the caller knows them.
		for s != "" {
			at, name := len(s), ""
			for a := range v.added {
				if i := strings.Index(s, a); i >= 0 && i < at {
					at, name = i, a
				}
			}
			got = v.encode(got, []byte(s[:at]))
			if s = s[at:]; name != "" {
				got, s = append(got, v.added[name]), s[len(name):]
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, expected %v", c[0], got, want)
		}
	}
}

func TestDecodingIsTheInverseOfEncoding(t *testing.T) {
	v := testVocab(t)
	check := func(s []byte) {
		if got, want := v.join(v.encode(nil, s)), norm.NFC.Bytes(s); got != string(want) {
			t.Errorf("%q comes back as %q, composed it is %q", s, got, want)
		}
	}
	for _, s := range texts(t) {
		check([]byte(s))
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		b := make([]byte, r.IntN(80))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		check(b)
	}
	check(bytes.Repeat([]byte("ab汉"), 5000)) // one piece, longer than pieceLimit
}

// checkBorders sees that both tokenizers encode the two sides of each border by themselves.
func checkBorders(t *testing.T, v *vocab, k3 Tokens, s string) {
	whole, whole3 := v.encode(nil, []byte(s)), k3.Encode(s)
	for i := range s {
		a, _ := utf8.DecodeLastRuneInString(s[:i])
		if b, _ := utf8.DecodeRuneInString(s[i:]); i == 0 || !border(a, b) {
			continue
		}
		if parts := v.encode(v.encode(nil, []byte(s[:i])), []byte(s[i:])); !slices.Equal(parts, whole) {
			t.Errorf("%q cut at %d: %v, whole %v", s, i, parts, whole)
		}
		if parts := append(k3.Encode(s[:i]), k3.Encode(s[i:])...); !slices.Equal(parts, whole3) {
			t.Errorf("%q cut at %d: K3's %v, whole %v", s, i, parts, whole3)
		}
	}
}

func TestBothTokenizersCutAtBorders(t *testing.T) {
	v, k3 := testVocab(t), k3Tokens(t)
	borders := 0
	for _, s := range texts(t) {
		checkBorders(t, v, k3, s)
		for i := range s {
			if i > 0 && border(rune(s[i-1]), rune(s[i])) {
				borders++
			}
		}
	}
	if borders < 100 {
		t.Errorf("only %d borders", borders)
	}
}

func FuzzBorder(f *testing.F) {
	for _, s := range texts(f) {
		if len(s) < 100 { // the others are a test's
			f.Add(s)
		}
	}
	v, k3 := testVocab(f), k3Tokens(f)
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) < 2000 {
			checkBorders(t, v, k3, s)
		}
	})
}

// edited is the tokenizer.json with one value replaced.
func edited(t testing.TB, change func(m map[string]any)) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(modelDir, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err = json.Unmarshal(b, &m); err == nil {
		change(m)
		b, err = json.Marshal(m)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestMergesMayBeStringsOrPairs(t *testing.T) {
	b := edited(t, func(m map[string]any) {
		merges := m["model"].(map[string]any)["merges"].([]any)
		for i, x := range merges {
			merges[i] = x.([]any)[0].(string) + " " + x.([]any)[1].(string)
		}
	})
	v, err := parseVocab(b, 2080)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range texts(t) {
		if got, want := v.encode(nil, []byte(s)), testVocab(t).encode(nil, []byte(s)); !slices.Equal(got, want) {
			t.Errorf("%q: %v, expected %v", s, got, want)
		}
	}
}

func TestTokenizersOfAnotherKindAreRefused(t *testing.T) {
	model := func(m map[string]any) map[string]any { return m["model"].(map[string]any) }
	split := func(m map[string]any) map[string]any {
		return m["pre_tokenizer"].(map[string]any)["pretokenizers"].([]any)[0].(map[string]any)
	}
	for want, change := range map[string]func(m map[string]any){
		"plain byte-level BPE (type \"WordPiece\")": func(m map[string]any) { model(m)["type"] = "WordPiece" },
		"plain byte-level BPE (type \"BPE\")":       func(m map[string]any) { model(m)["byte_fallback"] = true },
		"not NFC":                                   func(m map[string]any) { m["normalizer"].(map[string]any)["type"] = "NFKC" },
		"not a Split":                               func(m map[string]any) { m["pre_tokenizer"] = map[string]any{"type": "ByteLevel"} },
		"not as Qwen2":                              func(m map[string]any) { split(m)["pattern"] = map[string]any{"Regex": `\s+`} },
		"splits by":                                 func(m map[string]any) { split(m)["invert"] = true },
		"byte 33 has no token":                      func(m map[string]any) { delete(model(m)["vocab"].(map[string]any), "!") },
		"has id 2080":                               func(m map[string]any) { model(m)["vocab"].(map[string]any)["!"] = 2080 },
		"has id -1":                                 func(m map[string]any) { model(m)["vocab"].(map[string]any)["!"] = -1 },
		"is given twice":                            func(m map[string]any) { model(m)["vocab"].(map[string]any)["!"] = 5 },
		"no byte-level token":                       func(m map[string]any) { model(m)["vocab"].(map[string]any)["汉"] = 2070 },
		"that is no token":                          func(m map[string]any) { model(m)["merges"] = []any{[]any{"!", "汉"}} },
		"has 3 sides":                               func(m map[string]any) { model(m)["merges"] = []any{"a b c"} },
		"merge 1":                                   func(m map[string]any) { model(m)["merges"] = []any{[]any{"h", "e"}, []any{"h", "e"}} },
		"added token \"<think>\"":                   func(m map[string]any) { a := m["added_tokens"].([]any); a[0].(map[string]any)["content"] = "<think>" },
		"cannot unmarshal":                          func(m map[string]any) { m["added_tokens"] = "none" },
		"more than the 4096 allowed":                func(m map[string]any) { m["added_tokens"] = make([]struct{}, addedLimit+1) },
	} {
		_, err := parseVocab(edited(t, change), 2080)
		oneLine(t, err, want)
	}
	_, err := parseVocab(make([]byte, vocabFileLimit+1), 2080)
	oneLine(t, err, "more than")
	_, err = newFormats(k3Tokens(t), &vocab{added: map[string]int32{}})
	oneLine(t, err, "<|im_start|>")
}

func TestATokenizerThatIsNoFileIsRefused(t *testing.T) {
	_, err := readVocab(t.TempDir(), 10)
	oneLine(t, err, "not a regular file")
	_, err = readVocab(filepath.Join(t.TempDir(), "tokenizer.json"), 10)
	oneLine(t, err, "put the tokenizer.json that belongs to the weights there")
}

func FuzzParseVocab(f *testing.F) {
	for _, change := range []func(m map[string]any){
		func(map[string]any) {},
		func(m map[string]any) { m["model"].(map[string]any)["merges"] = []any{"h e", []any{"Ġ", "t"}} },
		func(m map[string]any) { m["normalizer"] = nil },
	} {
		f.Add(edited(f, change))
	}
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0},"merges":[""]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := parseVocab(b, 2080)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than a line: %q", err)
			}
			return
		}
		s := "The 汉字 🙂 don't\n\xff"
		got := v.join(v.encode(nil, []byte(s)))
		if v.compose {
			s = norm.NFC.String(s)
		}
		if got != s {
			t.Errorf("%q comes back as %q", s, got)
		}
	})
}
