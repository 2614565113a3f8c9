package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"deltafin/engine/chat"
)

type tokensCmd struct {
	Encode tokensEncodeCmd `cmd:"" help:"Print the ids of a text."`
	Decode tokensDecodeCmd `cmd:"" help:"Print the text of ids; control tokens are spelled out."`
}

const vocabulary = "The vocabulary is the model's own: tiktoken.model and tokenizer_config.json in its directory."

// Help is shown below the flags.
func (*tokensCmd) Help() string { return vocabulary + exitCodes }

type tokensEncodeCmd struct {
	Text    string `arg:"" help:"The text, or - for standard input."`
	Chat    bool   `xor:"form" help:"Encode the text as the user's message of a chat, as 'run --chat' does."`
	Special bool   `xor:"form" help:"Let the names of control tokens in the text become control tokens; otherwise text never does."`
	Split   bool   `xor:"print" help:"Print one token a line: id, tab, its text in quotes."`
	JSON    bool   `xor:"print" name:"json" help:"Print one JSON array of ids."`
	modelFlag
}

// Help is shown below the flags.
func (*tokensEncodeCmd) Help() string {
	return vocabulary + " A text that begins with a dash goes behind two dashes: deltafin tokens encode -- -5" + exitCodes
}

// Run prints ids.
func (c *tokensEncodeCmd) Run(ctx context.Context, std streams) (err error) {
	text := c.Text
	if text == "-" {
		if text, err = readText(ctx, std, "-"); err != nil {
			return err
		}
	}
	tok, err := c.tokenizer()
	if err != nil {
		return err
	}
	var ids []int
	switch {
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
		var b strings.Builder
		for _, id := range ids {
			token, _ := tok.Token(id)
			fmt.Fprintf(&b, "%d\t%q\n", id, token)
		}
		_, err = io.WriteString(std.out, b.String())
	default:
		_, err = fmt.Fprintln(std.out, joinIDs(ids))
	}
	return err
}

type tokensDecodeCmd struct {
	IDs []string `arg:"" name:"ids" help:"The ids, separated by spaces or commas, or - for standard input."`
	modelFlag
}

// Help is shown below the flags.
func (*tokensDecodeCmd) Help() string {
	return vocabulary + " Exactly the bytes of the ids are printed, without a line break of their own." + exitCodes
}

// Run prints text.
func (c *tokensDecodeCmd) Run(ctx context.Context, std streams) (err error) {
	text := strings.Join(c.IDs, " ")
	if text == "-" {
		if text, err = readText(ctx, std, "-"); err != nil {
			return err
		}
	}
	ids, err := parseIDs(text)
	if err != nil {
		return err
	}
	tok, err := c.tokenizer()
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
