package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"deltafin/engine"
	"deltafin/engine/chat"
	"deltafin/engine/opt"
	"deltafin/engine/tokenizer"
)

type runCmd struct {
	Prompt     *string `xor:"prompt" placeholder:"TEXT" help:"The prompt."`
	PromptFile string  `xor:"prompt" placeholder:"FILE" help:"File with the prompt, taken exactly, its last line break included; - is standard input."`
	IDs        *string `name:"ids" xor:"prompt" placeholder:"N,N,..." help:"The prompt as token ids."`

	Chat     bool   `help:"Treat the prompt as a user's message and answer it. Without this flag the prompt is continued."`
	System   string `placeholder:"TEXT" help:"System message of the chat."`
	Effort   string `default:"max" enum:"low,high,max,off" help:"How much to think in a chat: low, high, max, or off for no thinking."`
	Thinking string `default:"auto" enum:"auto,show,hide" help:"Whether to print the thinking of a chat: show, hide, or auto: shown (dimmed) on a terminal only."`
	MaxNew   int    `default:"512" placeholder:"N" help:"Most tokens to generate, thinking included. Default: 512."`

	Stats bool `help:"Print measurements on standard error afterwards."`
	JSON  bool `name:"json" help:"Print one JSON object instead of text: prompt_ids, ids (without the token that ends the text), text, finish_reason (stop, length, cancelled), logits_sha256, stats; of a chat also reasoning and tool_calls."`
	engineFlags
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

// Run generates. What can be refused without a model is refused first, and what can
// be without its weights next.
func (c *runCmd) Run(ctx context.Context, std streams) (err error) {
	if err := c.check(); err != nil {
		return err
	}
	text, ids, err := c.prompt(ctx, std)
	if err != nil {
		return err
	}
	dir, err := c.dir()
	if err != nil {
		return err
	}
	tok, err := openTokenizer(dir)
	switch {
	case c.IDs != nil && errors.Is(err, fs.ErrNotExist):
		tok = nil // ids go in, ids come out
	case err != nil:
		return err
	case c.IDs == nil:
		if ids, err = c.encode(tok, text); err != nil {
			return err
		}
	}
	e, closeEngine, err := c.open(ctx, std, dir, len(ids)+c.MaxNew, 0)
	if err != nil {
		return err
	}
	defer func() {
		if end := closeEngine(); err == nil {
			err = end
		}
	}()
	if err := admit(e, tok, ids); err != nil {
		return err
	}
	if c.miniature() {
		fmt.Fprintln(std.err, miniatureRemark)
	}

	w, err := newPrinter(std, tok, c)
	if err != nil {
		return err
	}
	bar := newProgress(std.err, "prompt: layer", false)
	result, err := e.NewSession().Generate(ctx, engine.Request{
		Prompt: ids, MaxNew: c.MaxNew, Stop: []int{e.Config().EOS},
		Token:    func(id int) error { bar.done(); return w.push(id) },
		Progress: func(done, of int) { bar.update(int64(done), int64(of)) },
	})
	bar.done()
	if end := w.finish(); err == nil {
		err = end
	}
	if err != nil {
		return generateError(err)
	}
	if c.JSON {
		if err := w.printObject(ids, result); err != nil {
			return err
		}
	}
	if c.Stats {
		printStats(std.err, result.Stats)
		printStorage(std.err, e)
	}
	if result.Finish == engine.FinishCancelled {
		return context.Canceled
	}
	return nil
}

// check refuses flags that contradict each other or cannot be met.
func (c *runCmd) check() error {
	switch {
	case c.MaxNew < 1:
		return usage("--max-new %d: ask for at least one token", c.MaxNew)
	case c.Chat && c.IDs != nil:
		return usage("--ids is a whole prompt already: leave --chat out")
	case !c.Chat && c.System != "":
		return usage("--system is part of a chat: add --chat")
	}
	return c.apply()
}

// prompt is the prompt's text, or its ids if it was given so.
func (c *runCmd) prompt(ctx context.Context, std streams) (text string, ids []int, err error) {
	switch {
	case c.IDs != nil:
		ids, err = parseIDs(*c.IDs)
		if err == nil && len(ids) == 0 {
			err = usage("--ids is empty: give at least one token id")
		}
		return "", ids, err
	case c.Prompt != nil:
		text = *c.Prompt
	case c.PromptFile != "":
		if text, err = readText(ctx, std, c.PromptFile); err != nil {
			return "", nil, err
		}
	default:
		return "", nil, usage("no prompt: give --prompt TEXT, --prompt-file FILE or --ids N,N,...")
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
	o := chat.Options{Thinking: c.thinks()}
	if o.Thinking {
		o.Effort = c.Effort
	}
	ids, err := chat.Render(tok, msgs, o)
	if err != nil {
		return nil, failure{exitModel, err}
	}
	return ids, nil
}

// thinks tells whether the chat has a thinking channel.
func (c *runCmd) thinks() bool { return c.Effort != "off" }

// admit refuses what the model cannot take, before work starts. tok may be nil.
func admit(e *engine.Engine, tok *tokenizer.Tokenizer, ids []int) error {
	m := e.Config()
	if tok != nil && tok.Size() != m.Vocab {
		return failure{exitModel, fmt.Errorf("the tokenizer has %d ids and the model %d: use the tokenizer files that belong to the weights", tok.Size(), m.Vocab)}
	}
	if len(ids) > m.MaxPositions {
		return usage("the prompt has %d tokens, the context of this model %d: shorten it", len(ids), m.MaxPositions)
	}
	if most := e.Ledger().Context; len(ids) > most {
		return usage("the prompt has %d tokens, and --context allows %d: raise it", len(ids), most)
	}
	for i, id := range ids {
		if id >= m.Vocab {
			return usage("token id %d (number %d of the prompt) is not in the vocabulary: ids are 0 to %d", id, i+1, m.Vocab-1)
		}
	}
	return nil
}
