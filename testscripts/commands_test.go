package testscripts

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	_ "deltafin/engine" // registers the optimisations
	"deltafin/engine/checkpoint/checkpointtest"
	"deltafin/engine/opt"
	"deltafin/golden"
)

type script = testscript.TestScript

// commands are what scripts have beside testscript's own.
var commands = map[string]func(ts *script, neg bool, args []string){
	"code": code, "refuses": refuses, "interrupt": interrupt, "optparity": optParity,
	"json": jsonField, "field": field, "accounts": accounts, "samelogits": sameLogits, "goldenlogits": goldenLogits,
	"golden": goldenCase, "copymodel": copyModel, "damaged": damaged, "newhome": newHome, "hub": hub, "stamp": stamp, "repeat": repeat, "ranks": ranks,
}

func need(ts *script, neg, ok bool, usage string) {
	if neg || !ok {
		ts.Fatalf("usage: %s", usage)
	}
}

// runCode runs a command and returns its exit code, -1 if a signal ended it.
func runCode(ts *script, args []string) int {
	err := ts.Exec(args[0], args[1:]...)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		ts.Fatalf("%v", err)
	}
	if exit == nil {
		return 0
	}
	return exit.ExitCode()
}

// code N command...: the command ends with exit code N.
func code(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) > 1, "code N command...")
	if got := strconv.Itoa(runCode(ts, args[1:])); got != args[0] {
		ts.Fatalf("exit code %s, want %s", got, args[0])
	}
}

// refuses N command...: the command ends with exit code N, prints nothing on
// standard output, and says why in one line, which is no stack trace.
func refuses(ts *script, neg bool, args []string) {
	code(ts, neg, args)
	if out := ts.ReadFile("stdout"); out != "" {
		ts.Fatalf("printed %q", out)
	}
	text := ts.ReadFile("stderr")
	if !strings.HasPrefix(text, "deltafin: ") || strings.Count(text, "\n") != 1 || !strings.HasSuffix(text, "\n") || strings.Contains(text, "goroutine") {
		ts.Fatalf("standard error is not one line of deltafin:\n%s", text)
	}
}

// interrupt WHEN N command...: an interrupt ends the command with exit code N. It is
// sent when the first byte arrives on stdout or stderr, whichever WHEN names; or
// after a while, if WHEN is waiting, to a command whose input stays open and empty.
func interrupt(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) > 2, "interrupt stdout|stderr|waiting N command...")
	got := 0
	for pause := 300 * time.Millisecond; pause < 5*time.Second; pause *= 4 {
		// A process that was too slow to handle signals is killed by one.
		if got = interruptOnce(ts, args[0], pause, args[2:]); got != -1 || args[0] != "waiting" {
			break
		}
	}
	if strconv.Itoa(got) != args[1] {
		ts.Fatalf("exit code %d, want %s", got, args[1])
	}
}

func interruptOnce(ts *script, when string, pause time.Duration, args []string) int {
	name, err := exec.LookPath(filepath.Join(shared, args[0]))
	ts.Check(err)
	c := exec.Command(name, args[1:]...)
	c.Dir = ts.MkAbs(".")
	c.Env = append(os.Environ(), "HOME="+ts.Getenv("HOME"), "XDG_CACHE_HOME="+ts.Getenv("XDG_CACHE_HOME"))
	began := make(chan struct{}, 2)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	switch when {
	case "stdout":
		c.Stdout = signalling{&out, began}
	case "stderr":
		c.Stderr = signalling{&errs, began}
	}
	in, err := c.StdinPipe()
	ts.Check(err)
	defer in.Close()
	ts.Check(c.Start())
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	patience := time.After(time.Minute)
	if when == "waiting" {
		time.Sleep(pause)
	} else {
		select {
		case <-began:
		case <-patience:
		}
	}
	_ = c.Process.Signal(os.Interrupt)
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		_ = c.Process.Kill()
		<-ended
		ts.Fatalf("goes on after an interrupt")
	}
	fmt.Fprint(ts.Stdout(), out.String())
	fmt.Fprint(ts.Stderr(), errs.String())
	return c.ProcessState.ExitCode()
}

// signalling is a buffer that tells when something was written to it.
type signalling struct {
	io.Writer
	began chan<- struct{}
}

func (s signalling) Write(b []byte) (int, error) {
	n, err := s.Writer.Write(b)
	select {
	case s.began <- struct{}{}:
	default:
	}
	return n, err
}

// object reads a file, or stdout, that must be one JSON object and nothing else.
func object(ts *script, file string) map[string]any {
	var v map[string]any
	if err := json.Unmarshal([]byte(ts.ReadFile(file)), &v); err != nil {
		ts.Fatalf("%s is not one JSON object: %v\n%s", file, err, ts.ReadFile(file))
	}
	return v
}

// lookUp finds a field by a path with dots.
func lookUp(ts *script, file, path string) any {
	var v any = object(ts, file)
	for f := range strings.SplitSeq(path, ".") {
		m, ok := v.(map[string]any)
		if _, has := m[f]; !ok || !has {
			ts.Fatalf("no field %s in %s", path, file)
		}
		v = m[f]
	}
	return v
}

// [!] json FILE FIELD WANT: the field of the JSON object in FILE is WANT, as compact
// JSON.
func jsonField(ts *script, neg bool, args []string) {
	need(ts, false, len(args) == 3, "[!] json FILE FIELD WANT")
	got, err := json.Marshal(lookUp(ts, args[0], args[1]))
	ts.Check(err)
	if (string(got) == args[2]) == neg {
		ts.Fatalf("%s is %s, want %s", args[1], got, args[2])
	}
}

// field FILE FIELD: prints a field of the JSON object in FILE; a string as it is,
// with a line break if it has none, anything else as JSON.
func field(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 2, "field FILE FIELD")
	v := lookUp(ts, args[0], args[1])
	text, ok := v.(string)
	if !ok {
		b, err := json.Marshal(v)
		ts.Check(err)
		text = string(b)
	}
	fmt.Fprint(ts.Stdout(), strings.TrimSuffix(text, "\n")+"\n")
}

// accounts FILE: the bytes in the stats of FILE add up, and what always happens was
// measured.
func accounts(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 1, "accounts FILE")
	num := func(name string) float64 {
		x, ok := lookUp(ts, args[0], "stats."+name).(float64)
		if !ok || x < 0 {
			ts.Fatalf("stats.%s is not a number from 0", name)
		}
		return x
	}
	union, read, resident := num("expert_bytes_union"), num("expert_bytes_read"), num("expert_bytes_resident")
	if wasted := num("expert_bytes_wasted"); read+resident-wasted != union || num("expert_bytes_ahead") > read {
		ts.Fatalf("read %.0f + resident %.0f - wasted %.0f is not union %.0f", read, resident, wasted, union)
	}
	for _, name := range []string{"expert_bytes_union", "expert_bytes_read", "prefill_seconds", "layer_passes", "peak_rss_bytes"} {
		if num(name) == 0 {
			ts.Fatalf("stats.%s is 0", name)
		}
	}
	num("decode_seconds")
}

// sameLogits: the logits_sha256 on standard output is that of the script's first
// samelogits.
func sameLogits(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 0, "samelogits")
	got := fmt.Sprint(lookUp(ts, "stdout", "logits_sha256"))
	if b, err := hex.DecodeString(got); err != nil || len(b) != 32 {
		ts.Fatalf("logits_sha256 %q is no SHA-256", got)
	}
	if first := ts.Getenv("FIRST_LOGITS"); first != "" && first != got {
		ts.Fatalf("logits_sha256 is %s, first %s", got, first)
	}
	ts.Setenv("FIRST_LOGITS", got)
}

// goldenLogits SET/CASE: the logits_sha256 on standard output is the frozen one.
func goldenLogits(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 1, "goldenlogits SET/CASE")
	h, err := golden.LoadHashes()
	ts.Check(err)
	ts.Check(h.Check(args[0], fmt.Sprint(lookUp(ts, "stdout", "logits_sha256"))))
}

// optParity command...: the command, which prints a JSON object, gives the same
// logits with each optimisation off, and with all.
func optParity(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) > 0, "optparity command...")
	all := slices.Clone(args)
	for _, s := range opt.All() {
		off := "--opt=" + s.Name + "=off"
		code(ts, false, append([]string{"0"}, append(slices.Clone(args), off)...))
		sameLogits(ts, false, nil)
		all = append(all, off)
	}
	code(ts, false, append([]string{"0"}, all...))
	sameLogits(ts, false, nil)
}

// golden SET/CASE: sets IDS, NEW and ANSWER (the prompt's ids, how many tokens the
// oracle generates, those but the stop token), and PROMPT if the case has a text; and
// LAYER and EXPERT, an expert that the prompt is routed to.
func goldenCase(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 1, "golden SET/CASE")
	set, name, _ := strings.Cut(args[0], "/")
	c, err := golden.Find(set, name)
	ts.Check(err)
	list := func(ids []int) string {
		b, err := json.Marshal(ids)
		ts.Check(err)
		return string(b)
	}
	ts.Setenv("IDS", list(c.PromptIDs))
	ts.Setenv("NEW", strconv.Itoa(len(c.Greedy)))
	if c.Stop {
		c.Greedy = c.Greedy[:len(c.Greedy)-1]
	}
	ts.Setenv("ANSWER", list(c.Greedy))
	ts.Setenv("PROMPT", c.Prompt)
	route := c.Routes[len(c.Routes)/2]
	ts.Setenv("LAYER", strconv.Itoa(route.Layer))
	ts.Setenv("EXPERT", strconv.Itoa(route.IDs[0][0]))
}

// copymodel SET DIR: a writable copy of a golden checkpoint.
func copyModel(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 2, "copymodel SET DIR")
	ts.Check(os.CopyFS(ts.MkAbs(args[1]), os.DirFS(golden.ModelDir(args[0]))))
}

// damaged SET VERB arg...: makes a damaged copy of a golden checkpoint and sets MODEL
// to its directory. Tensors are named without the prefix of the files.
func damaged(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) > 2, "damaged SET VERB arg...")
	d := checkpointtest.Copy(ts.Value(tb{}).(testing.TB), golden.ModelDir(args[0]))
	verb, args := args[1], args[2:]
	number := func(i int) int {
		n, err := strconv.Atoi(args[i])
		ts.Check(err)
		return n
	}
	tensor := "language_model." + args[0]
	switch verb {
	case "truncate": // FILE BYTES
		d.Truncate(args[0], int64(number(1)))
	case "remove": // FILE
		d.Remove(args[0])
	case "cut": // FILE: to no content
		d.Edit(args[0], func([]byte) []byte { return nil })
	case "drop": // TENSOR
		d.Drop(tensor)
	case "shape": // TENSOR DIM...
		var shape []int
		for i := range args[1:] {
			shape = append(shape, number(i+1))
		}
		d.SetShape(tensor, shape...)
	case "put": // TENSOR OFFSET BYTES: in hex
		b, err := hex.DecodeString(args[2])
		ts.Check(err)
		d.Put(tensor, number(1), b)
	case "unset": // FIELD
		d.DropConfig(args[0])
	case "set": // FIELD INTEGER [FIELD INTEGER...]
		for i := 0; i < len(args); i += 2 {
			d.SetConfig(args[i], number(i+1))
		}
	default:
		ts.Fatalf("unknown damage %s", verb)
	}
	ts.Setenv("MODEL", d.Path)
}

// newhome DIR: the commands that follow have a home of their own, with an empty cache.
func newHome(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 1, "newhome DIR")
	setHome(ts.Setenv, ts.MkAbs(args[0]))
}

// stamp DIR: prints name, size and time of change of each file in DIR.
func stamp(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 1, "stamp DIR")
	entries, err := os.ReadDir(ts.MkAbs(args[0]))
	ts.Check(err)
	for _, e := range entries {
		info, err := e.Info()
		ts.Check(err)
		fmt.Fprintln(ts.Stdout(), info.Name(), info.Size(), info.ModTime().UnixNano())
	}
}

// repeat N TEXT FILE: writes TEXT N times; \x.. escapes are bytes.
func repeat(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 3, "repeat N TEXT FILE")
	n, err := strconv.Atoi(args[0])
	ts.Check(err)
	text, err := strconv.Unquote(`"` + args[1] + `"`)
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs(args[2]), []byte(strings.Repeat(text, n)), 0o644))
}

// ranks FILE IDS BYTES: writes the ids of all ordinary tokens in a tiktoken.model to
// the file IDS, and their bytes to the file BYTES.
func ranks(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) == 3, "ranks FILE IDS BYTES")
	var ids, text bytes.Buffer
	for line := range strings.Lines(ts.ReadFile(args[0])) {
		coded, rank, ok := strings.Cut(strings.TrimSpace(line), " ")
		b, err := base64.StdEncoding.DecodeString(coded)
		if !ok || err != nil {
			ts.Fatalf("%s: line %q", args[0], line)
		}
		text.Write(b)
		fmt.Fprintln(&ids, rank)
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), ids.Bytes(), 0o644))
	ts.Check(os.WriteFile(ts.MkAbs(args[2]), text.Bytes(), 0o644))
}
