package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"deltafin/engine"
	"deltafin/golden"
)

// pieces keeps apart what is written with one call.
type pieces []string

func (p *pieces) Write(b []byte) (int, error) {
	*p = append(*p, string(b))
	return len(b), nil
}

func TestTextIsPrintedTokenByTokenInWholeCharacters(t *testing.T) {
	for _, args := range [][]string{
		{"--prompt", "😀 😀 😀 😀 😀", "--max-new", "12"},
		{"--prompt", "中国的首都是"},
		{"--chat", "--effort", "off", "--system", "你是一个有用的助手。", "--prompt", "法国的首都是哪里？"},
	} {
		var out pieces
		err := run(t.Context(), append([]string{"run", "--model", golden.ModelDir("nano")}, args...), streams{strings.NewReader(""), &out, &bytes.Buffer{}})
		if err != nil {
			t.Fatal(err)
		}
		if len(out) < 4 {
			t.Errorf("%q: printed as %q, want a piece for each character or token", args, out)
		}
		for _, p := range out {
			if !utf8.ValidString(p) {
				t.Errorf("%q: %q is not whole", args, p)
			}
		}
	}
}

// A reader that stops the run in the middle must find what came until then.
func TestACancelledRunEndsItsLineAndSaysSo(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out pieces
	err := run(ctx, []string{"run", "--model", golden.ModelDir("nano"), "--prompt", "Once upon a time,"},
		streams{strings.NewReader(""), cancelling{&out, cancel}, &bytes.Buffer{}})
	if exitCode(err) != exitCancelled || strings.Join(out, "") != " there\n" {
		t.Errorf("%q, %v, want the first token, a line break, and exit code %d", out, err, exitCancelled)
	}
}

type cancelling struct {
	*pieces
	cancel func()
}

func (c cancelling) Write(b []byte) (int, error) {
	defer c.cancel()
	return c.pieces.Write(b)
}

func TestNotEnoughMemoryHasItsExitCode(t *testing.T) {
	err := openError(errors.Join(errors.New("the model needs more"), engine.ErrMemory))
	if exitCode(err) != exitResources {
		t.Errorf("exit code %d, want %d", exitCode(err), exitResources)
	}
}

func TestAStoreThatCannotBeWrittenIsNoFaultOfTheModel(t *testing.T) {
	for _, refused := range []error{syscall.EROFS, syscall.EACCES} {
		if err := streamError(fmt.Errorf("x: %w", refused)); exitCode(err) != exitFailed {
			t.Errorf("%v: exit code %d, want %d", refused, exitCode(err), exitFailed)
		}
	}
	if err := streamError(errors.New("is not completely installed")); exitCode(err) != exitModel {
		t.Errorf("exit code %d, want %d", exitCode(err), exitModel)
	}
}
