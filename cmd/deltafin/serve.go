package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"deltafin/engine/machine"
	"deltafin/engine/openai"
)

type serveCmd struct {
	Host            string        `default:"127.0.0.1" help:"Address to listen at. Any but a loopback address needs --api-key-file."`
	Port            int           `default:"8000" help:"Port to listen at; 0 takes any free one."`
	APIKeyFile      string        `name:"api-key-file" placeholder:"FILE" type:"path" help:"File whose first line is the key that clients must show."`
	Queue           int           `default:"16" placeholder:"N" help:"Requests that may wait; more are told to come again. Default: 16."`
	MaxTokens       int           `default:"4096" placeholder:"N" help:"Most tokens of an answer, and what a request gets that names no number. Default: 4096."`
	MaxRequestBytes int64         `default:"8388608" placeholder:"N" help:"Largest body of a request. Default: 8388608."`
	StateDir        string        `placeholder:"DIR" type:"path" help:"Keep conversations here, so that they outlive the process."`
	StateMemory     string        `placeholder:"SIZE" help:"Memory for conversations that may go on. Default: 2GB, or an eighth of --memory."`
	StateDisk       string        `default:"20GB" placeholder:"SIZE" help:"Space for conversations in --state-dir. Default: 20GB."`
	Drain           time.Duration `default:"30s" placeholder:"TIME" help:"How long running answers may go on after an interrupt. Default: 30s."`
	ModelID         string        `name:"model-id" placeholder:"NAME" help:"What the model is called. Default: kimi-k3, or k3-nano for the built-in miniature."`
	Sampling        bool          `help:"Honour temperature, top_p and seed of requests instead of answering greedily."`
	Alias           []string      `placeholder:"NAME" help:"Another name that clients may use for the model; may be repeated."`
	engineFlags
}

// memoMemory is for finished answers.
const memoMemory = 64 << 20

// Help is shown below the flags.
func (*serveCmd) Help() string {
	return "Answers OpenAI's /v1/chat/completions, /v1/completions and /v1/models and Anthropic's /v1/messages; see docs/server.md. One answer at a time, others queue; no connection is ever silent. An interrupt lets running answers end for half a minute." + exitCodes
}

// Run serves until it is interrupted.
func (c *serveCmd) Run(ctx context.Context, std streams) error {
	if err := c.apply(); err != nil {
		return err
	}
	if c.Port < 0 || c.Queue < 0 || c.MaxTokens < 1 || c.MaxRequestBytes < 1 || c.Drain < 0 {
		return usage("--port, --queue and --drain are not negative, --max-tokens and --max-request-bytes count from 1")
	}
	dir, err := c.dir()
	if err != nil {
		return err
	}
	tok, err := openTokenizer(dir)
	if err != nil {
		return err
	}
	key := ""
	if c.APIKeyFile != "" {
		if key, err = openai.ReadKey(c.APIKeyFile); err != nil {
			return usage("%w", err)
		}
	}
	memory, err := parseSize("--memory", c.Memory)
	if err != nil {
		return err
	}
	if memory == 0 {
		memory = machine.AvailableMemory() / 4 * 3
	}
	stateMemory, err := parseSize("--state-memory", c.StateMemory)
	if err != nil {
		return err
	}
	if stateMemory == 0 {
		stateMemory = min(2e9, memory/8)
	}
	stateDisk, err := parseSize("--state-disk", c.StateDisk)
	if err != nil {
		return err
	}
	if c.ModelID == "" {
		c.ModelID = "kimi-k3"
		if c.miniature() {
			c.ModelID = "k3-nano"
			c.Alias = append(c.Alias, "kimi-k3")
			fmt.Fprintln(std.err, miniatureRemark)
		}
	}
	closeEngine := func() error { return nil }
	o := openai.Options{
		Host: c.Host, Port: c.Port, Key: key, ModelID: c.ModelID, Aliases: c.Alias, Queue: c.Queue,
		MaxTokens: c.MaxTokens, MaxBytes: c.MaxRequestBytes, Sampling: c.Sampling, StateDir: c.StateDir,
		StateMemory: stateMemory, StateDisk: stateDisk, MemoMemory: memoMemory, Drain: c.Drain,
		Log: slog.New(slog.NewTextHandler(std.err, nil)),
		Listen: func(a net.Addr) {
			fmt.Fprintf(std.err, "deltafin: listening at http://%s\n", a)
		},
	}
	if c.Port == 0 {
		o.Port = -1
	}
	if c.Queue == 0 {
		o.Queue = -1
	}
	err = openai.Serve(ctx, o, func(ctx context.Context) (openai.Model, error) {
		e, end, err := c.open(ctx, std, dir, c.MaxTokens, stateMemory+memoMemory)
		if err != nil {
			return nil, err
		}
		closeEngine = end
		return openai.NewModel(e, tok)
	})
	if errors.Is(err, openai.ErrOptions) {
		err = usage("%w", err)
	}
	return errors.Join(err, closeEngine())
}
