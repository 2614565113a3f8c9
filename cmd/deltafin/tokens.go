package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"deltafin/engine/chat"
	"deltafin/engine/tokenizer"
)

type tokensCmd struct {
	Encode tokensEncodeCmd `cmd:"" help:"Print the ids of a text."`
	Decode tokensDecodeCmd `cmd:"" help:"Print the text of ids; control tokens are spelled out."`
}

// Help is shown below the flags.
func (*tokensCmd) Help() string {
	return "The model's own vocabulary is used (tiktoken.model and tokenizer_config.json in its directory)." + exitCodes
}

type tokensEncodeCmd struct {
	Text    string `arg:"" help:"The text, or - for standard input."`
	Special bool   `help:"Let the names of control tokens in the text become control tokens."`
	Chat    bool   `help:"Encode the text as the user's message of a chat, as 'run --chat' does."`
	Split   bool   `help:"Print one token a line: id, tab, text as a quoted string."`
	JSON    bool   `name:"json" help:"Print one JSON array of ids."`
	Model   string `placeholder:"DIR" type:"path" help:"Checkpoint directory. Default: K3-nano, the built-in miniature."`
}

// Run prints ids.
func (c *tokensEncodeCmd) Run(std streams) error {
	text := c.Text
	if text == "-" {
		b, err := readBounded(std.in, "standard input")
		if err != nil {
			return err
		}
		text = string(b)
	}
	if i := invalidUTF8(text); i >= 0 {
		return usage("the text is not valid UTF-8 at byte %d: convert it first", i)
	}
	tok, err := tokenizerOf(c.Model, std)
	if err != nil {
		return err
	}
	var ids []int
	switch {
	case c.Chat && c.Special:
		return usage("--chat and --special exclude each other: text of a user never becomes a control token")
	case c.Chat:
		if ids, err = chat.Render(tok, []chat.Message{{Role: "user", Content: text}}, chat.Defaults()); err != nil {
			return failure{exitModel, err}
		}
	case c.Special:
		ids = tok.EncodeSpecial(text)
	default:
		ids = tok.Encode(text)
	}
	switch {
	case c.JSON:
		return json.NewEncoder(std.out).Encode(append([]int{}, ids...))
	case c.Split:
		for _, id := range ids {
			token, _ := tok.Token(id)
			fmt.Fprintf(std.out, "%d\t%q\n", id, token)
		}
	default:
		for i, id := range ids {
			if i > 0 {
				fmt.Fprint(std.out, " ")
			}
			fmt.Fprint(std.out, id)
		}
		fmt.Fprintln(std.out)
	}
	return nil
}

type tokensDecodeCmd struct {
	IDs   []string `arg:"" name:"ids" help:"The ids, separated by spaces or commas, or - for standard input."`
	Model string   `placeholder:"DIR" type:"path" help:"Checkpoint directory. Default: K3-nano, the built-in miniature."`
}

// Run prints text, exactly the bytes of the ids.
func (c *tokensDecodeCmd) Run(std streams) error {
	text := strings.Join(c.IDs, " ")
	if text == "-" {
		b, err := readBounded(std.in, "standard input")
		if err != nil {
			return err
		}
		text = string(b)
	}
	ids, err := parseIDs(text)
	if err != nil {
		return err
	}
	tok, err := tokenizerOf(c.Model, std)
	if err != nil {
		return err
	}
	b, err := tok.Decode(ids)
	if err != nil {
		return usage("%w", err)
	}
	_, err = std.out.Write(b)
	return err
}

func tokenizerOf(model string, std streams) (*tokenizer.Tokenizer, error) {
	f := modelFlags{Model: model}
	if model == "" {
		std.err = io.Discard // which model it is matters little here
	}
	dir, err := f.dir(std)
	if err != nil {
		return nil, err
	}
	return openTokenizer(dir, true)
}

// parseIDs reads ids separated by white space, commas, or as a JSON array.
func parseIDs(text string) ([]int, error) {
	fields := strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\r\n,[]", r) })
	ids := make([]int, len(fields))
	for i, f := range fields {
		id, err := strconv.Atoi(f)
		if err != nil || id < 0 {
			return nil, usage("%q is not a token id: give numbers separated by commas", f)
		}
		ids[i] = id
	}
	return ids, nil
}

// maxPrompt bounds a prompt before it is read: 1 Mi tokens of context at 16 bytes each.
const maxPrompt = 16 << 20

func readBounded(r io.Reader, what string) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxPrompt+1))
	switch {
	case err != nil:
		return nil, failure{exitFailed, fmt.Errorf("%s: %w", what, err)}
	case len(b) > maxPrompt:
		return nil, usage("%s is longer than %d MB, which is more than the context can hold", what, maxPrompt>>20)
	}
	return b, nil
}

// invalidUTF8 is the offset of the first byte that is not valid UTF-8, or -1.
func invalidUTF8(s string) int {
	for i, r := range s {
		if r == utf8.RuneError {
			if _, n := utf8.DecodeRuneInString(s[i:]); n == 1 {
				return i
			}
		}
	}
	return -1
}
