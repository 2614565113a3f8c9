// Command deltafin runs the complete Kimi K3 model on the machine it is started on.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/alecthomas/kong"

	"deltafin/engine"
	"deltafin/engine/draft"
	"deltafin/engine/hub"
	"deltafin/engine/kernel"
	"deltafin/engine/synth"
)

// streams are the process's standard streams, apart so that tests of a command can
// see that data and remarks never mix.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

type cli struct {
	Run      runCmd           `cmd:"" help:"Generate text from a prompt."`
	Serve    serveCmd         `cmd:"" help:"Answer OpenAI and Anthropic clients over HTTP."`
	Tokens   tokensCmd        `cmd:"" help:"Encode text to token ids, or decode ids to text."`
	Fetch    fetchCmd         `cmd:"" help:"Download the model, resumable and verified."`
	Warm     warmCmd          `cmd:"" help:"Fetch likely experts of a model that is streamed, before they are needed."`
	Verify   verifyCmd        `cmd:"" help:"Check a downloaded model, and repair it."`
	Doctor   doctorCmd        `cmd:"" help:"Examine the machine, the drives and the model, and say what to do."`
	Pack     packCmd          `cmd:"" help:"Pack weights for faster streaming."`
	Place    placeCmd         `cmd:"" help:"Put copies of experts on further drives."`
	Plan     planCmd          `cmd:"" help:"Say what a model would do on this machine."`
	Simulate simulateCmd      `cmd:"" help:"Say what more memory or drives would change, from a trace of routes."`
	Synth    synthCmd         `cmd:"" help:"Write a checkpoint with random weights, for measurements."`
	Version  kong.VersionFlag `help:"Print the version, the processor's kernels, and exit."`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	go func() {
		<-ctx.Done()
		stop() // a second signal ends the process at once
	}()
	err := run(ctx, os.Args[1:], streams{os.Stdin, os.Stdout, os.Stderr})
	if err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintf(os.Stderr, "deltafin: %v\n", err)
	}
	os.Exit(exitCode(err))
}

func run(ctx context.Context, args []string, std streams) error {
	var c cli
	exited := false
	parser, err := kong.New(&c,
		kong.Name("deltafin"),
		kong.Description("Runs the complete Kimi K3 model, the same bits everywhere."+exitCodes),
		kong.Vars{"version": version(), "rows": strconv.Itoa(engine.DefaultPassRows), "guesses": strconv.Itoa(draft.MaxGuesses), "presets": strings.Join(synth.Presets(), ","), "hub": hub.DefaultHub, "repo": hub.DefaultRepo},
		kong.Writers(std.out, std.err),
		kong.Exit(func(int) { exited = true }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(std),
	)
	if err != nil {
		return err
	}
	for i, a := range args {
		// The parser would put U+FFFD into the prompt and say nothing.
		if !utf8.ValidString(a) {
			return usage("argument %d (%.60q) is not valid UTF-8: convert it first", i+1, a)
		}
	}
	k, err := parser.Parse(args)
	switch {
	case exited: // --help or --version has printed
		return nil
	case err != nil:
		return usage("%w: see deltafin --help", err)
	}
	return k.Run()
}

func version() string {
	v := "devel"
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		v = info.Main.Version
	}
	return fmt.Sprintf("deltafin %s %s/%s %s, %s kernels", v, runtime.GOOS, runtime.GOARCH, runtime.Version(), kernel.Active())
}
