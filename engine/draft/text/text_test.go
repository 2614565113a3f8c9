package text

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"deltafin/engine/draft"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
	"deltafin/engine/tokenizer"
	"deltafin/golden"
)

var modelDir = filepath.Join(golden.Dir(), "nano", "model-text")

// oracle is what reference/oracle/text_oracle.py says.
type oracle struct {
	PromptIDs   []int       `json:"prompt_ids"`
	Greedy      []int       `json:"greedy"` // K3's
	DraftIDs    []int32     `json:"draft_ids"`
	DraftGreedy []int32     `json:"draft_greedy"`
	Logits      [][]float64 `json:"logits"` // of the first and the last of DraftGreedy
	Blocks      []struct {
		Decided  int       `json:"decided"`
		IDs      []int     `json:"ids"`
		P        []float64 `json:"p"`
		Accepted int       `json:"accepted"`
	} `json:"blocks"`
}

var goldens = []string{"france", "story", "zh-capital", "chat-think", "chat-plain"}

func readOracle(t testing.TB, name string) (o oracle) {
	t.Helper()
	b, err := golden.ReadFile("nano", "golden/text/"+name+".json")
	if err == nil {
		err = json.Unmarshal(b, &o)
	}
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func k3Tokens(t testing.TB) *tokenizer.Tokenizer {
	t.Helper()
	tok, err := tokenizer.Open(golden.ModelDir("nano"))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func open(t testing.TB, dir string, o Options) *proposer {
	t.Helper()
	pool := kernel.NewPool(2)
	p, err := Open(dir, draft.Target{Pool: pool}, k3Tokens(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); pool.Close() })
	return p.(*proposer)
}

func propose(t testing.TB, s draft.Sequence, tokens []int, k int) []draft.Guess {
	t.Helper()
	g, err := s.Propose(context.Background(), tokens, k)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func ids(g []draft.Guess) []int {
	var list []int
	for _, x := range g {
		list = append(list, x.ID)
	}
	return list
}

func TestLogitsAndGreedyTokensAreTheOracles(t *testing.T) {
	p := open(t, modelDir, Options{})
	if err := p.load(context.Background()); err != nil {
		t.Fatal(err)
	}
	// Where a key or value lies between two bf16 values, float32 and float64 round it to different ones.
	const most = 0.005
	for _, name := range goldens {
		o := readOracle(t, name)
		text := slices.Clone(o.DraftIDs)
		for i, want := range o.DraftGreedy {
			logits, err := p.model.rows(context.Background(), text, len(text)-1)
			if err != nil {
				t.Fatal(err)
			}
			if row := map[int]int{0: 0, len(o.DraftGreedy) - 1: 1}; i == 0 || row[i] == 1 {
				worst := 0.0
				for j, x := range logits.Row(0) {
					worst = math.Max(worst, math.Abs(float64(x)-o.Logits[row[i]][j]))
				}
				t.Logf("%s, token %d: logits differ by at most %.2g", name, i, worst)
				if worst > most {
					t.Errorf("%s, token %d: logits differ by up to %g, more than %g", name, i, worst, most)
				}
			}
			if got := p.model.best[len(text)-1].id; got != want {
				t.Fatalf("%s: token %d is %d, the oracle's %d", name, i, got, want)
			}
			text = append(text, want)
		}
	}
}

func TestProposalsAreTheOracles(t *testing.T) {
	s := open(t, modelDir, Options{}).Start()
	for _, name := range goldens {
		o := readOracle(t, name)
		all, accepted := slices.Concat(o.PromptIDs, o.Greedy), 0
		for _, b := range o.Blocks {
			g := propose(t, s, all[:b.Decided], 4)
			if !slices.Equal(ids(g), b.IDs) {
				t.Fatalf("%s after %d tokens: %v, the oracle's are %v", name, b.Decided, ids(g), b.IDs)
			}
			for i, x := range g {
				if x.P <= 0 || x.P >= 1 || math.Abs(float64(x.P)-b.P[i]) > 0.01 {
					t.Errorf("%s after %d tokens: guess %d has P %g, the oracle's %g", name, b.Decided, i, x.P, b.P[i])
				}
			}
			n := 0
			for n < len(g) && b.Decided+n < len(all) && g[n].ID == all[b.Decided+n] {
				n++
			}
			accepted += n
		}
		t.Logf("%-11s %.2f of 4 accepted in each of %d blocks", name, float64(accepted)/float64(len(o.Blocks)), len(o.Blocks))
	}
}

func TestGuessesDoNotDependOnWhatWasAskedBefore(t *testing.T) {
	s, fresh := open(t, modelDir, Options{}).Start(), open(t, modelDir, Options{})
	var asked [][]int
	for _, name := range goldens {
		o := readOracle(t, name)
		all := slices.Concat(o.PromptIDs, o.Greedy)
		for n := len(all); n > len(o.PromptIDs); n -= 16 { // backwards: each cuts the cache
			asked = append(asked, all[:n])
		}
	}
	asked = append(asked, asked[2], asked[2][:len(asked[2])-3], asked[0])
	for i, tokens := range asked {
		fresh.tokens, fresh.dialogue = nil, dialogue{f: fresh.formats, closedAt: -1}
		if fresh.model != nil {
			fresh.model.ids, fresh.model.best = nil, nil
		}
		if got, want := propose(t, s.Fork(), tokens, 6), propose(t, fresh.Start(), tokens, 6); !slices.Equal(got, want) {
			t.Errorf("question %d: %v, a fresh proposer says %v", i, got, want)
		}
	}
}

func TestCachedRowsAreThoseOfAFreshComputation(t *testing.T) {
	p := open(t, modelDir, Options{})
	ctx := context.Background()
	if err := p.load(ctx); err != nil {
		t.Fatal(err)
	}
	text := readOracle(t, "chat-think").DraftIDs
	whole, err := p.model.rows(ctx, text, len(text)-3)
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Clone(whole.Data)
	other := append(slices.Clone(text[:20]), 5, 6, 7)
	if _, err := p.model.rows(ctx, other, len(other)-1); err != nil {
		t.Fatal(err)
	}
	for n := 25; n < len(text)-3; n += 11 { // in small steps from the common prefix on
		if _, err := p.model.follow(ctx, text[:n]); err != nil {
			t.Fatal(err)
		}
	}
	again, err := p.model.rows(ctx, text, len(text)-3)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(again.Data, want) {
		t.Error("logits after cut and refilled caches are not bit for bit those of one computation")
	}
}

func TestAFullWindowGoesOnWithItsLastHalf(t *testing.T) {
	p := open(t, modelDir, Options{Window: leastWindow})
	s := p.Start()
	tokens := k3Tokens(t).Encode(strings.Repeat("The capital of France is Paris. The capital of Kenya is Nairobi. ", 12) + "The capital of France is")
	for n := len(tokens) - 60; n <= len(tokens); n++ {
		propose(t, s, tokens[:n], 4)
		if got := len(p.model.ids); got > p.room() {
			t.Fatalf("%d positions in a cache of %d", got, p.room())
		}
	}
	g := propose(t, s, tokens, 1)
	if want := k3Tokens(t).Encode(" Paris"); len(g) == 0 || g[0].ID != want[0] {
		t.Errorf("guesses %v, expected %v first", g, want)
	}
	for _, c := range []struct{ n, want int }{{1, 0}, {64, 0}, {65, 32}, {96, 32}, {97, 64}, {1000, 960}} {
		if got := p.windowStart(c.n); got != c.want {
			t.Errorf("of %d tokens the window begins with %d", c.n, got)
		}
	}
}

func TestEveryGuessContinuesTheTextWithTokensOfK3(t *testing.T) {
	tok, s := k3Tokens(t), open(t, modelDir, Options{}).Start()
	cases, err := golden.Cases("nano")
	if err != nil {
		t.Fatal(err)
	}
	asked, guessed := 0, 0
	for _, c := range cases {
		all := slices.Concat(c.PromptIDs, c.Greedy)
		for n := 1; n <= len(all); n += 11 {
			g := propose(t, s, all[:n], 5)
			asked++
			if len(g) > 5 {
				t.Fatalf("%s: %d guesses, 5 were asked for", c.Name, len(g))
			}
			if len(g) == 0 {
				continue
			}
			guessed++
			if _, err := tok.Decode(ids(g)); err != nil {
				t.Fatalf("%s after %d tokens: %v", c.Name, n, err)
			}
			// K3's own encoding of the text with the guesses goes through what is decided.
			from := n
			for from > 0 && !tok.IsSpecial(all[from-1]) {
				from--
			}
			end := 0
			for end < len(g) && !tok.IsSpecial(g[end].ID) {
				end++
			}
			through := slices.Concat(all[from:n], ids(g[:end]))
			if b, _ := tok.Decode(through); !slices.Equal(tok.Encode(string(b)), through) {
				t.Errorf("%s after %d tokens: guesses %q are not as K3 would encode them", c.Name, n, b)
			}
		}
	}
	if guessed < asked/4 {
		t.Errorf("guesses for %d of %d texts only", guessed, asked)
	}
}

func TestNothingIsGuessedWhereTheModelDoesNotWrite(t *testing.T) {
	tok, s := k3Tokens(t), open(t, modelDir, Options{}).Start()
	for _, text := range []string{
		`<|open|>`, `<|open|>message role="us`, `<|open|>message role="user"<|sep|>What is the capital of`,
		`<|open|>message role="assistant"<|sep|><|open|>tools<|sep|>`, `[BOS]`,
		`<|open|>message role="assistant"<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|><|open|>too`,
	} {
		if g := propose(t, s, tok.EncodeSpecial(text), 4); len(g) > 0 {
			t.Errorf("%q is continued with %v", text, g)
		}
	}
	if g := propose(t, s, tok.EncodeSpecial("The capital of France is"), 0); len(g) > 0 {
		t.Errorf("%v where none was wanted", g)
	}
}

func TestTheEndOfAChannelIsGuessedFromEachOfItsTokens(t *testing.T) {
	tok, s := k3Tokens(t), open(t, modelDir, Options{}).Start()
	o := readOracle(t, "chat-think")
	for _, end := range []string{
		"<|close|>think<|sep|><|open|>response<|sep|>The capital of Japan is Tokyo.",
		"<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
	} {
		all := slices.Concat(o.PromptIDs, o.Greedy)
		want := tok.EncodeSpecial(end)
		from := -1
		for i := range all {
			if i+len(want) <= len(all) && slices.Equal(all[i:i+len(want)], want) {
				from = i
			}
		}
		if from < 0 {
			t.Fatalf("%q is not in the golden text", end)
		}
		for i := range want {
			if got := ids(propose(t, s, all[:from+i], len(want)-i)); !slices.Equal(got, want[i:]) {
				t.Errorf("%q from token %d on: %v, expected %v", end, i, got, want[i:])
			}
		}
	}
}

func TestCancellingEndsAProposal(t *testing.T) {
	p := open(t, modelDir, Options{})
	s := p.Start()
	tokens := k3Tokens(t).Encode(strings.Repeat("A cow eats grass. ", 40))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := s.Propose(ctx, tokens, 4); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	want := propose(t, s, tokens, 4)
	if got := propose(t, open(t, modelDir, Options{}).Start(), tokens, 4); !slices.Equal(got, want) {
		t.Errorf("after a cancelled proposal %v, fresh %v", want, got)
	}
	// In the middle of a prompt: the cache holds what was computed, and that is right.
	p.model.ids, p.model.best = nil, nil
	if _, err := s.Propose(&expiring{Context: context.Background(), left: 1}, tokens, 4); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	if n := len(p.model.ids); n == 0 || n >= len(tokens)/2 {
		t.Errorf("%d tokens were computed before a cancelled prompt ended", n)
	}
	if got := propose(t, s, tokens, 4); !slices.Equal(got, want) {
		t.Errorf("after a cancelled prompt %v, fresh %v", got, want)
	}
}

// expiring is cancelled when it has been asked often enough.
type expiring struct {
	context.Context
	left int
}

func (e *expiring) Err() error {
	if e.left--; e.left < 0 {
		return context.Canceled
	}
	return nil
}

func TestTextThatK3WouldEncodeOtherwiseIsNotContinued(t *testing.T) {
	tok, p := k3Tokens(t), open(t, modelDir, Options{})
	s := p.Start()
	tokens := tok.Encode("The capital of France is")
	if g := propose(t, s, tokens, 4); len(g) == 0 {
		t.Fatal("no guess for what comes next")
	}
	for _, b := range []string{" ", "P", "a", "r"} { // which K3 has a token for
		tokens = append(tokens, tok.Encode(b)...)
	}
	if g := propose(t, s, tokens, 4); len(g) > 0 {
		t.Errorf("guesses %v", g)
	}
	if n := len(p.model.ids); n > 20 {
		t.Errorf("%d tokens were computed to find that out", n)
	}
}

// copyModel copies the model into a directory of its own.
func copyModel(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(modelDir)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func oneLine(t *testing.T, err error, want ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than a line: %v", err)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}

func TestDamageIsOneLine(t *testing.T) {
	tok := k3Tokens(t)
	weights := func(dir string) string { return filepath.Join(dir, "model.safetensors") }
	for name, c := range map[string]struct {
		damage func(dir string) error
		opens  bool // the fault shows when the weights are read
		want   []string
	}{
		"cut":           {func(dir string) error { return os.Truncate(weights(dir), 1e6) }, false, []string{"model.safetensors", "truncated"}},
		"no weights":    {func(dir string) error { return os.Remove(weights(dir)) }, false, []string{"model.safetensors", "fetch"}},
		"no tokenizer":  {func(dir string) error { return os.Remove(filepath.Join(dir, "tokenizer.json")) }, false, []string{"tokenizer.json"}},
		"no config":     {func(dir string) error { return os.Remove(filepath.Join(dir, "config.json")) }, false, []string{"config.json"}},
		"not a number":  {func(dir string) error { return patch(weights(dir), -2, 0xc0, 0x7f) }, true, []string{"model.norm.weight", "not a finite number"}},
		"huge":          {func(dir string) error { return patch(weights(dir), -2, 0x7f, 0x7f) }, true, []string{"not finite"}},
		"other file":    {func(dir string) error { return os.WriteFile(filepath.Join(dir, "tokenizer.json"), []byte("{}"), 0o666) }, false, []string{"tokenizer.json", "BPE"}},
		"cut when used": {nil, true, []string{"model.safetensors"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := copyModel(t)
			if c.damage != nil {
				if err := c.damage(dir); err != nil {
					t.Fatal(err)
				}
			}
			pool := kernel.NewPool(1)
			defer pool.Close()
			p, err := Open(dir, draft.Target{Pool: pool}, tok, Options{})
			if !c.opens {
				oneLine(t, err, append(c.want, dir)...)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			if c.damage == nil {
				if err := os.Truncate(weights(dir), 1e6); err != nil {
					t.Fatal(err)
				}
			}
			_, err = p.Start().Propose(context.Background(), tok.Encode("The capital of France is"), 4)
			oneLine(t, err, c.want...)
		})
	}
}

// patch overwrites bytes of a file, counted from its end where at is negative.
func patch(path string, at int, b ...byte) error {
	all, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	copy(all[len(all)+at:], b)
	return os.WriteFile(path, all, 0o666)
}

func TestShardsAndALeftOverHeadAreTheSameModel(t *testing.T) {
	// see checkpoint: what is read is decided there; here that it is read from the right file.
	dir := copyModel(t)
	if err := os.Rename(filepath.Join(dir, "model.safetensors"), filepath.Join(dir, "model-00001-of-00001.safetensors")); err != nil {
		t.Fatal(err)
	}
	p := open(t, modelDir, Options{})
	index := map[string]any{"metadata": map[string]any{"total_size": 1}, "weight_map": map[string]string{}}
	for name := range p.text.Tensor {
		index["weight_map"].(map[string]string)[name] = "model-00001-of-00001.safetensors"
	}
	b, err := json.Marshal(index)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "model.safetensors.index.json"), b, 0o666)
	}
	if err != nil {
		t.Fatal(err)
	}
	tokens := k3Tokens(t).Encode("The capital of France is")
	if got, want := propose(t, open(t, dir, Options{}).Start(), tokens, 4), propose(t, p.Start(), tokens, 4); !slices.Equal(got, want) {
		t.Errorf("%v, from one file %v", got, want)
	}
}

func TestMemoryIsAsBytesSays(t *testing.T) {
	before := drive.Allocated()
	p := open(t, modelDir, Options{Window: 256})
	loaded, sequence := p.Bytes(4096)
	if drive.Allocated() != before {
		t.Error("Open read weights")
	}
	propose(t, p.Start(), k3Tokens(t).Encode(strings.Repeat("A cow eats grass. ", 80)), 4)
	n := drive.Allocated() - before
	for _, l := range p.model.layers {
		n += int64(len(l.keys) + len(l.values))
	}
	for _, b := range p.model.work {
		n += int64(4 * len(b))
	}
	if n > loaded || n < loaded*7/10 || sequence != 0 {
		t.Errorf("%d bytes are in use, Bytes says %d and %d", n, loaded, sequence)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if drive.Allocated() != before {
		t.Errorf("%d bytes are left after Close", drive.Allocated()-before)
	}
}
