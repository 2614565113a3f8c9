package openai

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"deltafin/engine/chat"
)

// readAll plays text through a reader with log-probabilities for every token.
func readAll(t *testing.T, r *request, text string) (thinking, response, logs string, d *reader) {
	t.Helper()
	tok := nanoTokenizer()
	d, err := newReader(r, tok, "id")
	if err != nil {
		t.Fatal(err)
	}
	take := func(events []event) {
		for _, e := range events {
			switch e.kind {
			case chat.Thinking:
				thinking += e.text
			case chat.Response:
				response += e.text
				for _, l := range e.logs {
					for _, b := range l.Bytes {
						logs += string([]byte{byte(b)})
					}
				}
			}
		}
	}
	row := make([]float32, tok.Size())
	for _, id := range tok.EncodeSpecial(text) {
		events, ended := d.push(step{id, logprobsOf(tok, row, id, 0)})
		take(events)
		if ended {
			return thinking, response, logs, d
		}
	}
	take(d.flush())
	return thinking, response, logs, d
}

func TestTokensOfTheResponseAreThoseWithLogprobs(t *testing.T) {
	thinks := &request{api: chatAPI, options: chat.Options{Thinking: true}}
	plain := &request{api: chatAPI}
	raw := &request{api: completionsAPI}
	for _, tt := range []struct {
		r                        *request
		text, thinking, response string
	}{
		{plain, "Hello there.<|close|>response<|sep|><|end_of_msg|>", "", "Hello there."},
		{plain, "🦊 und 漢字 é<|close|>response<|sep|>", "", "🦊 und 漢字 é"},
		{thinks, "Hm 🤔.<|close|>think<|sep|><|open|>response<|sep|>Yes 🦊.<|close|>response<|sep|>", "Hm 🤔.", "Yes 🦊."},
		{plain, "a <|open|>b<|sep|> c", "", "a <|open|>b<|sep|> c"}, // no tag of the format: text
		{raw, "one <|open|>two 🦊", "", "one <|open|>two 🦊"},
	} {
		thinking, response, logs, _ := readAll(t, tt.r, tt.text)
		if thinking != tt.thinking || response != tt.response || logs != tt.response {
			t.Errorf("%q: thinking %q, response %q, tokens %q", tt.text, thinking, response, logs)
		}
	}
	_, _, _, d := readAll(t, thinks, "Hm hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.")
	if want := len(nanoTokenizer().Encode("Hm hm.")); d.reasoning != want {
		t.Errorf("%d tokens of thinking, want %d", d.reasoning, want)
	}
}

// Wherever a stop string begins and ends, the text ends before it, and so do the
// log-probabilities: they are of the tokens that begin in it.
func TestStopStringsAcrossTokens(t *testing.T) {
	const text = "alpha beta 🦊 gamma 漢字 delta"
	r := rand.New(rand.NewPCG(1, 2))
	runes := []rune(text)
	for range 300 {
		lo := r.IntN(len(runes))
		hi := lo + 1 + r.IntN(min(8, len(runes)-lo))
		stop := string(runes[lo:hi])
		want := text[:strings.Index(text, stop)]
		_, response, logs, d := readAll(t, &request{api: chatAPI, stops: []string{"never", stop}}, text+"<|close|>response<|sep|>")
		if response != want || d.stopped != stop {
			t.Fatalf("stop %q: %q, stopped by %q", stop, response, d.stopped)
		}
		if !strings.HasPrefix(logs, want) || !strings.HasPrefix(text, logs) {
			t.Fatalf("stop %q: tokens %q of the text %q", stop, logs, want)
		}
	}
}

func TestTheLikeliestTokensInOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		row := make([]float32, 50)
		for i := range row {
			row[i] = float32(r.IntN(12)) // many equals
		}
		ids := make([]int, len(row))
		for i := range ids {
			ids[i] = i
		}
		slices.SortStableFunc(ids, func(a, b int) int { return int(row[b] - row[a]) })
		for _, n := range []int{0, 1, 5, 20} {
			if got := likeliest(row, n); !slices.Equal(got, ids[:n]) {
				t.Fatalf("the likeliest %d of %v are %v, want %v", n, row, got, ids[:n])
			}
		}
	}
	row := []float32{1000, 999, -1000}
	l := logprobsOf(nanoTokenizer(), row, 2, 3)
	if math.IsInf(l.Logprob, 0) || math.Abs(l.Top[0].Logprob+0.313261687) > 1e-6 || l.Top[2].Logprob != l.Logprob {
		t.Errorf("%+v", l)
	}
}

func TestDrawingFollowsTheSeedAndTheProbabilities(t *testing.T) {
	row := []float32{1, 3, 2, -5}
	hot, seed, p := 1.0, int64(7), 0.7
	r := &request{temperature: &hot, seed: &seed}
	counts := make([]int, 4)
	for i := range 20000 {
		id := r.choose(row, i)
		counts[id]++
		if id != r.choose(row, i) {
			t.Fatal("the same seed and place give another token")
		}
	}
	sum := math.Exp(1) + math.Exp(3) + math.Exp(2) + math.Exp(-5)
	for id, v := range row {
		want := math.Exp(float64(v)) / sum
		if got := float64(counts[id]) / 20000; math.Abs(got-want) > 0.015 {
			t.Errorf("token %d: %g of the draws, want %g", id, got, want)
		}
	}
	r.topP = &p // the first two tokens, 1 and 2, reach it
	for i := range 2000 {
		if id := r.choose(row, i); id != 1 && id != 2 {
			t.Fatalf("token %d is beyond top_p", id)
		}
	}
	cold := 0.0
	if id := (&request{temperature: &cold}).choose(row, 0); id != 1 {
		t.Errorf("without temperature token %d, want the likeliest", id)
	}
}

func TestSamplingIsOnlyDoneWhereItWasAllowed(t *testing.T) {
	m := nano(t)
	body := `{"messages":[{"role":"user","content":"Tell me a story."}],"reasoning_effort":"none","max_tokens":12,"temperature":1.5,"seed":5}`
	_, greedy := serve(t, m, Options{})
	_, drawn := serve(t, m, Options{Sampling: true, MemoMemory: 1})
	cold, _ := wholeChat(t, greedy, strings.Replace(body, "1.5", "0", 1))
	if got, _ := wholeChat(t, greedy, body); got.Text != cold.Text {
		t.Errorf("greedy %q, with a temperature %q", cold.Text, got.Text)
	}
	a, _ := wholeChat(t, drawn, body)
	if b := streamedChat(t, drawn, body); b.Text != a.Text {
		t.Errorf("the same seed gives %q and %q", a.Text, b.Text)
	}
	if zero, _ := wholeChat(t, drawn, strings.Replace(body, "1.5", "0", 1)); zero.Text != cold.Text {
		t.Errorf("temperature 0 gives %q, greedy is %q", zero.Text, cold.Text)
	}
	other, _ := wholeChat(t, drawn, strings.Replace(body, `"seed":5`, `"seed":6`, 1))
	if other.Text == a.Text {
		t.Error("another seed gives the same text")
	}
}
