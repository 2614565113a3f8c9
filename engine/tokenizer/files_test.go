package tokenizer

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func lines(edit func(l []string) []string) []byte {
	l := strings.Split(strings.TrimSuffix(string(modelFile("ab", "abc")), "\n"), "\n")
	return []byte(strings.Join(edit(l), "\n"))
}

func TestDamagedRankFilesAreRefused(t *testing.T) {
	set := func(i int, s string) []byte {
		return lines(func(l []string) []string { l[i] = s; return l })
	}
	for _, c := range []struct {
		name  string
		model []byte
		want  string // all of these, space for and
	}{
		{"empty", nil, "empty"},
		{"one newline", []byte("\n"), "line 1:"},
		{"no rank", set(7, "YWI="), "line 8: base64"},
		{"rank of the line before", set(257, "YWJj 256"), "line 258: 256 257"},
		{"rank with a sign", set(3, "Aw== +3"), "line 4:"},
		{"rank with a zero in front", set(3, "Aw== 03"), "line 4:"},
		{"two spaces", set(3, "Aw==  3"), "line 4:"},
		{"something after the rank", set(3, "Aw== 3 "), "line 4:"},
		{"not base64", set(5, "B!== 5"), "line 6: base64"},
		{"no padding", set(5, "BQ 5"), "line 6: base64"},
		{"loose bits after the last byte", set(5, "BR== 5"), "line 6: base64"},
		{"carriage returns", set(5, "BQ==\r 5"), "line 6: carriage"},
		{"lines ending in carriage returns", bytes.ReplaceAll(modelFile(), []byte("\n"), []byte("\r\n")), "line 1:"},
		{"empty token", set(256, " 256"), "line 257: empty"},
		{"empty line inside", lines(func(l []string) []string { l[9] = ""; return l }), "line 10:"},
		{"token twice", set(257, "YWI= 257"), "line 258: 257"},
		{"a byte missing", set(0, "YWJjZA== 0"), "0x00 incomplete"},
		{"only one token", []byte("YQ== 0\n"), "0x00 ... incomplete"},
		{"a line missing", lines(func(l []string) []string { return append(l[:100], l[101:]...) }), "line 101:"},
		{"too large", make([]byte, maxModelBytes+1), "allowed"},
	} {
		_, err := New(c.model, configFile(258))
		if err == nil || !strings.HasPrefix(err.Error(), "tiktoken.model: ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v, want one line about tiktoken.model", c.name, err)
			continue
		}
		for _, w := range strings.Fields(strings.Replace(c.want, "line ", "line_", 1)) {
			if w = strings.Replace(w, "_", " ", 1); !strings.Contains(err.Error(), w) {
				t.Errorf("%s: error %q does not say %q", c.name, err, w)
			}
		}
	}
}

func TestTheLastNewlineIsOptional(t *testing.T) {
	m := modelFile("ab")
	for _, model := range [][]byte{m, bytes.TrimSuffix(m, []byte("\n"))} {
		if tok, err := New(model, configFile(257)); err != nil || tok.Size() != 257+256 {
			t.Errorf("size of a vocabulary of 257 ranks: %v, %v", tok, err)
		}
	}
}

func TestContradictoryConfigurationsAreRefused(t *testing.T) {
	for _, c := range []struct {
		config string
		want   string
	}{
		{``, "JSON"},
		{`[]`, "array"},
		{`{}`, "added_tokens_decoder is missing"},
		{`{"added_tokens_decoder":null}`, "missing"},
		{`{"added_tokens_decoder":[]}`, "not an object"},
		{`{"added_tokens_decoder":{"x":{"content":"a"}}}`, `"x"`},
		{`{"added_tokens_decoder":{"0256":{"content":"a"}}}`, `"0256"`},
		{`{"added_tokens_decoder":{"99999999999999999999":{"content":"a"}}}`, `"99999999999999999999"`},
		{`{"added_tokens_decoder":{"255":{"content":"a"}}}`, "id 255"},
		{`{"added_tokens_decoder":{"-1":{"content":"a"}}}`, "id -1"},
		{`{"added_tokens_decoder":{"512":{"content":"a"}}}`, "256 to 511"},
		{`{"added_tokens_decoder":{"256":{"content":"a"},"256":{"content":"b"}}}`, "256 occurs twice"},
		{`{"added_tokens_decoder":{"256":{"content":"a"},"300":{"content":"a"}}}`, "256 and 300"},
		{`{"added_tokens_decoder":{"256":{"content":"<|reserved_token_300|>"}}}`, "256 and 300"},
		{`{"added_tokens_decoder":{"256":{"special":true}}}`, "id 256 has no content"},
		{`{"added_tokens_decoder":{"256":{"content":""}}}`, "id 256 has no content"},
		{`{"added_tokens_decoder":{"256":{"content":7}}}`, "id 256"},
		{`{"added_tokens_decoder":{"256":{"content":"\ud800"}}}`, "damaged"},
		{`{"added_tokens_decoder":{"256":7}}`, "id 256"},
		{`{"added_tokens_decoder":{"256":{"content":"a"}},"bos_token":"b"}`, `bos_token is "b"`},
		{`{"added_tokens_decoder":{"256":{"content":"a"}},"eos_token":{"content":"b"}}`, `eos_token is "b"`},
		{`{"added_tokens_decoder":{"256":{"content":"a"}},"pad_token":7}`, "pad_token"},
		{`{"added_tokens_decoder":{"256":{"content":"a"}},"additional_special_tokens":["a","b"]}`, "additional_special_tokens[1]"},
	} {
		_, err := New(modelFile(), []byte(c.config))
		if err == nil || !strings.HasPrefix(err.Error(), "tokenizer_config.json: ") ||
			!strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v, want one line that says %q", c.config, err, c.want)
		}
	}
	var many strings.Builder
	for i := range 257 {
		fmt.Fprintf(&many, `,"%d":{"content":"n%d"}`, 256+i, i)
	}
	if _, err := New(modelFile(), []byte(`{"added_tokens_decoder":{`+many.String()[1:]+`}}`)); err == nil || !strings.Contains(err.Error(), "more than 256") {
		t.Errorf("257 entries: %v", err)
	}
}

func TestAVocabularyWithoutChatNamesOpens(t *testing.T) {
	tok, err := New(modelFile(), []byte(`{"added_tokens_decoder":{"257":{"content":"[EOS]"}},"eos_token":{"content":"[EOS]"},"bos_token":null}`))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{"<|reserved_token_256|>": 256, "[EOS]": 257, "<|reserved_token_511|>": 511} {
		if id, ok := tok.Special(name); !ok || id != want {
			t.Errorf("Special(%q) = %d, %v, want %d", name, id, ok, want)
		}
	}
	if id, ok := tok.Special("<|open|>"); ok {
		t.Errorf("Special(<|open|>) = %d, want none", id)
	}
}

func TestOpenNamesTheFileInItsErrors(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(dir); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), filepath.Join(dir, "tiktoken.model")) {
		t.Errorf("no file: %v", err)
	}
	write := func(name string, size int64, b []byte) {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(b); err != nil {
			t.Fatal(err)
		}
		if size > 0 {
			if err := f.Truncate(size); err != nil {
				t.Fatal(err)
			}
		}
	}
	write("tiktoken.model", 0, modelFile())
	if _, err := Open(dir); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "tokenizer_config.json") {
		t.Errorf("no configuration: %v", err)
	}
	write("tokenizer_config.json", maxConfigBytes+1, nil)
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("large configuration: %v", err)
	}
	write("tokenizer_config.json", 0, configFile(999))
	if _, err := Open(dir); err != nil {
		t.Errorf("configuration without names: %v", err)
	}
	write("tokenizer_config.json", 0, configFile(999, "a"))
	if _, err := Open(dir); err == nil || !strings.HasPrefix(err.Error(), dir+": tokenizer_config.json: ") {
		t.Errorf("configuration of another vocabulary: %v", err)
	}
}

// FuzzNew puts anything into the middle of a good rank file, and anything in
// place of the configuration.
func FuzzNew(f *testing.F) {
	f.Add(uint16(0), uint16(0), []byte(""), configFile(258, "<|open|>", "[EOS]"))
	f.Add(uint16(2046), uint16(9), []byte("YWI= 257\n"), []byte(`{"added_tokens_decoder":{"258":{"content":"a"}}}`))
	f.Add(uint16(0), uint16(9999), []byte("YQ== 0\nYg== 1"), []byte(`{"added_tokens_decoder":{"2":{"content":"a"}}}`))
	f.Add(uint16(7), uint16(1), []byte("!"), []byte(`{`))
	good := modelFile("ab", "abc")
	f.Fuzz(func(t *testing.T, at, cut uint16, insert, config []byte) {
		start := min(int(at), len(good))
		end := min(start+int(cut), len(good))
		model := slices.Concat(good[:start], insert, good[end:])
		tok, err := New(model, config)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("error of several lines: %q", err)
			}
			return
		}
		text := "a <|open|> [EOS]\xff漢"
		for _, ids := range [][]int{tok.Encode(text), tok.EncodeSpecial(text)} {
			if b, err := tok.Decode(ids); err != nil || string(b) != text {
				t.Errorf("decoded %q (%v), want %q", b, err, text)
			}
		}
	})
}
