package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"

	"deltafin/engine"
	"deltafin/engine/chat"
	"deltafin/engine/tokenizer"
)

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

const (
	dimOn  = "\x1b[2m"
	dimOff = "\x1b[0m"
)

// printer writes what is generated as it comes, and collects it for --json, which
// prints nothing but its object.
type printer struct {
	std  io.Writer
	text io.Writer // where text goes: nowhere with --json
	out  output

	stream *tokenizer.Stream // of a raw completion; nil without a tokenizer
	parser *chat.Parser      // of a chat; else nil

	thinking bool   // print it
	dim      bool   // and dim it
	dimmed   bool   // dim is on now
	answered bool   // some response was printed
	last     string // what was printed last
}

func newPrinter(std streams, tok *tokenizer.Tokenizer, c *runCmd) (*printer, error) {
	f, ok := std.out.(*os.File)
	terminal := ok && term.IsTerminal(int(f.Fd()))
	w := &printer{
		std: std.out, text: std.out, dim: terminal && os.Getenv("NO_COLOR") == "",
		thinking: c.Thinking == "show" || c.Thinking == "auto" && terminal,
	}
	if c.JSON {
		w.text = io.Discard
	}
	var err error
	switch {
	case c.Chat:
		if w.parser, err = chat.NewParser(tok, c.thinks()); err != nil {
			return nil, failure{exitModel, err}
		}
	case tok != nil:
		w.stream = tok.Stream()
	}
	return w, nil
}

// push prints what a generated token completes.
func (w *printer) push(id int) error {
	switch {
	case w.parser != nil:
		return w.events(w.parser.Push(id))
	case w.stream != nil:
		return w.raw(w.stream.Push(id))
	case w.last == "":
		return w.print(fmt.Sprint(id))
	default:
		return w.print(fmt.Sprint(" ", id))
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
	end := ""
	if w.last != "" && !strings.HasSuffix(w.last, "\n") {
		end = "\n"
	}
	if w.dimmed {
		w.dimmed = false
		end = dimOff + end
	}
	return errors.Join(err, w.print(end))
}

func (w *printer) raw(text string) error {
	w.out.Text += text
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
	if !w.thinking {
		return nil
	}
	if w.dim && !w.dimmed {
		w.dimmed = true
		text = dimOn + text
	}
	return w.print(text)
}

// answer ends the thinking, if some was printed, with an empty line.
func (w *printer) answer(text string) error {
	if !w.answered {
		w.answered = true
		if w.last != "" {
			text = "\n\n" + text
		}
		if w.dimmed {
			w.dimmed = false
			text = dimOff + text
		}
	}
	return w.print(text)
}

func (w *printer) print(text string) error {
	if text == "" {
		return nil
	}
	w.last = text
	if _, err := io.WriteString(w.text, text); err != nil {
		return fmt.Errorf("the text cannot be written: %w", err)
	}
	return nil
}

// printObject prints the object of --json.
func (w *printer) printObject(prompt []int, r engine.Result) error {
	w.out.PromptIDs, w.out.IDs, w.out.FinishReason = prompt, append([]int{}, r.IDs...), r.Finish
	w.out.LogitsSHA256, w.out.Stats = r.LogitsSHA256, r.Stats
	enc := json.NewEncoder(w.std)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(w.out); err != nil {
		return fmt.Errorf("the JSON object cannot be written: %w", err)
	}
	return nil
}

func printStats(w io.Writer, s engine.Stats) {
	gb := func(n int64) float64 { return float64(n) / 1e9 }
	fmt.Fprintf(w, "\nprompt   %6d tokens  %8.3f s  %9.1f tokens/s  %d layer passes\n", s.PromptTokens, s.PrefillSeconds, s.PrefillRate(), s.LayerPasses)
	fmt.Fprintf(w, "decode   %6d tokens  %8.3f s  %9.1f tokens/s (the first token is the prompt's)\n", s.NewTokens, s.DecodeSeconds, s.DecodeRate())
	fmt.Fprintf(w, "experts  %.4f GB used = %.4f read + %.4f from memory - %.4f read for nothing; %.4f read ahead; peak memory %.3f GB\n",
		gb(s.ExpertUnion), gb(s.ExpertRead), gb(s.ExpertResident), gb(s.ExpertWasted), gb(s.ExpertAhead), gb(s.PeakRSS))
	if d := s.Draft; d != nil && d.Passes > 0 {
		gain := "no pass of one row to compare with"
		if g := d.Gain(); g > 0 {
			gain = fmt.Sprintf("%.2f times the rate of passes of one row", g)
		}
		fmt.Fprintf(w, "guessing %6d passes, %d of one row; %s; %.4f GB of experts per token\n", d.Passes, d.Plain, gain, gb(s.ExpertUnion)/float64(max(s.NewTokens, 1)))
		for _, p := range d.Proposers {
			fmt.Fprintf(w, "  %-6s %6d passes, %d of %d guesses right; asked %d times in %.3f s; right by place:", p.Name, p.Passes, p.Accepted, p.Checked, p.Asked, p.Seconds)
			for _, at := range p.At {
				if at.All > 0 {
					fmt.Fprintf(w, " %d/%d", at.Right, at.All)
				}
			}
			fmt.Fprintln(w)
		}
	}
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

// printStorage prints where the memory went and what each drive did.
func printStorage(w io.Writer, e *engine.Engine) {
	fmt.Fprintf(w, "\nmemory   %s\n", e.Ledger())
	st := e.Storage()
	for _, d := range st.Experts.Devices {
		fmt.Fprintf(w, "drive    %s (%s): experts %.3f GB on demand, %.3f ahead, %.3f for nothing in %d reads; busy %.2f s, queued %.2f s, served %.2f s, slowest of %d layers\n",
			d.Name, d.Mode, float64(d.DemandBytes)/1e9, float64(d.AheadBytes)/1e9, float64(d.WastedBytes)/1e9, d.Reads, d.BusySeconds, d.QueueSeconds, d.ServiceSeconds, d.Slowest)
	}
	fmt.Fprintf(w, "dense    %.3f GB read when asked for, %.3f ahead, %.3f for nothing; waited %.2f s\n",
		float64(st.Spine.Demand)/1e9, float64(st.Spine.Ahead)/1e9, float64(st.Spine.Wasted)/1e9, st.Spine.Wait.Seconds())
}

// remark prints lines that are not what was asked for.
func remark(std streams) func(string) {
	return func(line string) { fmt.Fprintln(std.err, "deltafin:", line) }
}
