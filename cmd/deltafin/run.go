package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"

	"deltafin/engine"
	"deltafin/engine/chat"
	"deltafin/engine/opt"
	"deltafin/engine/tokenizer"
)

type runCmd struct {
	Prompt     *string `xor:"prompt" help:"The prompt."`
	PromptFile string  `xor:"prompt" placeholder:"FILE" help:"File with the prompt, or - for standard input."`
	IDs        *string `name:"ids" xor:"prompt" placeholder:"N,N,..." help:"The prompt as token ids."`

	Chat     bool   `help:"Treat the prompt as a user's message and answer it."`
	System   string `placeholder:"TEXT" help:"System message of the chat."`
	Effort   string `default:"max" enum:"low,high,max,off" help:"How much to think in a chat: low, high, max, or off for no thinking."`
	Thinking string `default:"auto" enum:"auto,show,hide" help:"Whether to print the thinking of a chat: show, hide, or auto: shown (dimmed) on a terminal only."`
	MaxNew   int    `default:"512" placeholder:"N" help:"Most tokens to generate."`

	Stats bool `help:"Print measurements on standard error afterwards."`
	JSON  bool `name:"json" help:"Print one JSON object instead of text: prompt_ids, ids, text, finish_reason, logits_sha256, stats."`
	modelFlags
}

// Help is shown below the flags.
func (*runCmd) Help() string {
	s := "Text goes to standard output as it is generated, everything else to standard error. Generation is greedy: the same model and prompt give the same text everywhere." +
		"\n\nOptimisations (--opt NAME=off), all on by default:\n"
	for _, o := range opt.All() {
		s += fmt.Sprintf("  %-18s %s\n", o.Name, o.Summary)
	}
	return s + exitCodes
}

// output is the object that --json prints.
type output struct {
	PromptIDs []int  `json:"prompt_ids"`
	IDs       []int  `json:"ids"`
	Text      string `json:"text"`
	// Reasoning and ToolCalls are a chat's; Text is then its response.
	Reasoning    string              `json:"reasoning,omitempty"`
	ToolCalls    []chat.ToolCall     `json:"tool_calls,omitempty"`
	FinishReason engine.FinishReason `json:"finish_reason"`
	LogitsSHA256 string              `json:"logits_sha256"`
	Stats        engine.Stats        `json:"stats"`
}

// Run generates.
func (c *runCmd) Run(ctx context.Context, std streams) error {
	if c.MaxNew < 1 {
		return usage("--max-new %d: ask for at least one token", c.MaxNew)
	}
	if !c.Chat && c.System != "" {
		return usage("--system is part of a chat: add --chat")
	}
	text, ids, err := c.prompt(std)
	if err != nil {
		return err
	}
	dir, err := c.dir(std)
	if err != nil {
		return err
	}
	tok, err := openTokenizer(dir, c.IDs == nil || c.Chat)
	if err != nil {
		return err
	}
	if c.IDs == nil {
		if ids, err = c.encode(tok, text); err != nil {
			return err
		}
	}
	e, err := c.open(ctx, dir)
	if err != nil {
		return err
	}
	defer e.Close()
	if err := admit(ids, e); err != nil {
		return err
	}

	w, err := newPrinter(std, tok, c)
	if err != nil {
		return err
	}
	bar := newProgress(std.err)
	result, err := e.NewSession().Generate(ctx, engine.Request{
		Prompt: ids, MaxNew: c.MaxNew, Stop: []int{e.Config().EOS},
		Token:    func(id int) error { bar.done(); return w.push(id) },
		Progress: bar.update,
	})
	bar.done()
	if err != nil {
		return err
	}
	if err := w.finish(); err != nil {
		return err
	}
	if c.JSON {
		w.out.PromptIDs, w.out.IDs, w.out.FinishReason = ids, append([]int{}, result.IDs...), result.Finish
		w.out.LogitsSHA256, w.out.Stats = result.LogitsSHA256, result.Stats
		enc := json.NewEncoder(std.out)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(w.out); err != nil {
			return err
		}
	}
	if c.Stats {
		printStats(std.err, result.Stats)
	}
	if result.Finish == engine.FinishCancelled {
		return context.Canceled
	}
	return nil
}

// prompt is the prompt's text, or its ids if it was given so.
func (c *runCmd) prompt(std streams) (text string, ids []int, err error) {
	switch {
	case c.IDs != nil && c.Chat:
		return "", nil, usage("--ids is a whole prompt already: leave --chat out")
	case c.IDs != nil:
		ids, err = parseIDs(*c.IDs)
		return "", ids, err
	case c.Prompt != nil:
		text = *c.Prompt
	case c.PromptFile == "-":
		b, err := readBounded(std.in, "standard input")
		if err != nil {
			return "", nil, err
		}
		text = string(b)
	case c.PromptFile != "":
		f, err := os.Open(c.PromptFile)
		if err != nil {
			return "", nil, usage("--prompt-file: %w", err)
		}
		defer f.Close()
		b, err := readBounded(f, c.PromptFile)
		if err != nil {
			return "", nil, err
		}
		text = string(b)
	default:
		return "", nil, usage("no prompt: give --prompt TEXT, --prompt-file FILE or --ids N,N,...")
	}
	for what, s := range map[string]string{"the prompt": text, "--system": c.System} {
		if i := invalidUTF8(s); i >= 0 {
			return "", nil, usage("%s is not valid UTF-8 at byte %d: convert it first", what, i)
		}
	}
	if text == "" {
		return "", nil, usage("the prompt is empty: give at least one character")
	}
	return text, nil, nil
}

func (c *runCmd) encode(tok *tokenizer.Tokenizer, text string) ([]int, error) {
	if !c.Chat {
		return tok.Encode(text), nil
	}
	var msgs []chat.Message
	if c.System != "" {
		msgs = append(msgs, chat.Message{Role: "system", Content: c.System})
	}
	msgs = append(msgs, chat.Message{Role: "user", Content: text})
	opt := chat.Options{Thinking: c.Effort != "off"}
	if opt.Thinking {
		opt.Effort = c.Effort
	}
	ids, err := chat.Render(tok, msgs, opt)
	if err != nil {
		return nil, failure{exitModel, err}
	}
	return ids, nil
}

// admit refuses a prompt that the model cannot take, before work starts.
func admit(ids []int, e *engine.Engine) error {
	if len(ids) == 0 {
		return usage("the prompt is empty: give at least one token")
	}
	if most := e.Config().MaxPositions; len(ids) > most {
		return usage("the prompt has %d tokens, the context of this model %d: shorten it", len(ids), most)
	}
	for i, id := range ids {
		if id >= e.Config().Vocab {
			return usage("token id %d (number %d of the prompt) is not in the vocabulary: ids are 0 to %d", id, i+1, e.Config().Vocab-1)
		}
	}
	return nil
}

// printer writes what is generated: streamed text, or the fields of --json.
type printer struct {
	std       streams
	out       output
	json      bool
	tokenizer *tokenizer.Tokenizer
	stream    *tokenizer.Stream // of a raw completion
	parser    *chat.Parser      // of a chat
	thinking  bool              // print it
	dim       bool
	dimmed    bool
	newline   bool // the last character printed was one
	answered  bool // some response was printed
}

func newPrinter(std streams, tok *tokenizer.Tokenizer, c *runCmd) (*printer, error) {
	f, ok := std.out.(*os.File)
	terminal := ok && term.IsTerminal(int(f.Fd()))
	w := &printer{
		std: std, json: c.JSON, tokenizer: tok, dim: terminal && os.Getenv("NO_COLOR") == "",
		thinking: c.Thinking == "show" || c.Thinking == "auto" && terminal, newline: true,
	}
	var err error
	switch {
	case c.Chat:
		if w.parser, err = chat.NewParser(tok, c.Effort != "off"); err != nil {
			return nil, failure{exitModel, err}
		}
	case tok != nil:
		w.stream = tok.Stream()
	}
	return w, nil
}

func (w *printer) push(id int) error {
	switch {
	case w.parser != nil:
		return w.events(w.parser.Push(id))
	case w.stream != nil:
		return w.raw(w.stream.Push(id))
	case w.json:
		return nil
	default: // no tokenizer: the ids themselves
		return w.print(fmt.Sprintf("%d ", id))
	}
}

// finish prints what was held back and ends the last line.
func (w *printer) finish() error {
	var err error
	switch {
	case w.parser != nil:
		err = w.events(w.parser.Finish())
	case w.stream != nil:
		err = w.raw(w.stream.Flush())
	}
	if w.dimmed {
		err = errors.Join(err, w.print("\x1b[0m"))
	}
	if !w.json && !w.newline {
		err = errors.Join(err, w.print("\n"))
	}
	return err
}

func (w *printer) raw(text string) error {
	w.out.Text += text
	if w.json {
		return nil
	}
	return w.print(text)
}

func (w *printer) events(events []chat.Event) error {
	for _, e := range events {
		var err error
		switch e.Kind {
		case chat.Thinking:
			w.out.Reasoning += e.Text
			err = w.think(e.Text)
		case chat.Response:
			w.out.Text += e.Text
			err = w.answer(e.Text)
		case chat.Call:
			w.out.ToolCalls = append(w.out.ToolCalls, e.Call)
			err = w.answer(fmt.Sprintf("[%s %s]\n", e.Call.Name, e.Call.Arguments))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *printer) think(text string) error {
	if w.json || !w.thinking {
		return nil
	}
	if w.dim && !w.dimmed {
		w.dimmed = true
		text = "\x1b[2m" + text
	}
	return w.print(text)
}

// answer ends the thinking, if some was printed, with an empty line.
func (w *printer) answer(text string) error {
	if w.json {
		return nil
	}
	if !w.answered {
		w.answered = true
		gap := ""
		if w.out.Reasoning != "" && w.thinking {
			gap = "\n\n"
		}
		if w.dimmed {
			w.dimmed = false
			gap = "\x1b[0m" + gap
		}
		text = gap + text
	}
	return w.print(text)
}

func (w *printer) print(text string) error {
	if text == "" {
		return nil
	}
	w.newline = strings.HasSuffix(text, "\n")
	_, err := io.WriteString(w.std.out, text)
	return err
}

func printStats(w io.Writer, s engine.Stats) {
	gb := func(n int64) float64 { return float64(n) / 1e9 }
	fmt.Fprintf(w, "\nprompt   %6d tokens  %8.3f s  %9.1f tokens/s  %d layer passes\n", s.PromptTokens, s.PrefillSeconds, s.PrefillRate(), s.LayerPasses)
	fmt.Fprintf(w, "decode   %6d tokens  %8.3f s  %9.1f tokens/s (the first token is the prompt's)\n", s.NewTokens, s.DecodeSeconds, s.DecodeRate())
	fmt.Fprintf(w, "experts  %.4f GB used = %.4f read + %.4f from memory - %.4f read for nothing; %.4f read ahead; peak memory %.3f GB\n",
		gb(s.ExpertUnion), gb(s.ExpertRead), gb(s.ExpertResident), gb(s.ExpertWasted), gb(s.ExpertAhead), gb(s.PeakRSS))
	fmt.Fprintf(w, "\n%-22s %10s %10s\n", "seconds in", "prompt", "decode")
	p, d := s.PrefillParts, s.DecodeParts
	for _, r := range []struct {
		name string
		p, d float64
	}{
		{"embedding", p.Embed, d.Embed},
		{"mix over depth", p.Mix, d.Mix},
		{"KDA", p.KDA, d.KDA},
		{"MLA", p.MLA, d.MLA},
		{"dense MLP", p.Dense, d.Dense},
		{"router", p.Router, d.Router},
		{"routed experts", p.Experts, d.Experts},
		{"latent up and shared", p.Shared, d.Shared},
		{"head", p.Head, d.Head},
	} {
		fmt.Fprintf(w, "%-22s %10.4f %10.4f\n", r.name, r.p, r.d)
	}
}
