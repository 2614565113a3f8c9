package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxInput bounds a text before it is read: 1 Mi tokens of context at 16 bytes each.
const maxInput = 16 << 20

// readText reads a text from a file, or from standard input if name is "-". Whoever
// writes to the other end of a pipe may never do so, hence an interrupt ends the wait.
func readText(ctx context.Context, std streams, name string) (string, error) {
	type result struct {
		text string
		err  error
	}
	read := make(chan result, 1)
	go func() {
		text, err := readNow(std, name)
		read <- result{text, err}
	}()
	select {
	case r := <-read:
		return r.text, r.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func readNow(std streams, name string) (string, error) {
	if name == "-" {
		return readBounded(std.in, "standard input")
	}
	f, err := os.Open(name)
	if err != nil {
		return "", unreadable(name, err)
	}
	defer f.Close()
	return readBounded(f, name)
}

func readBounded(r io.Reader, name string) (string, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxInput+1))
	switch {
	case err != nil:
		return "", unreadable(name, err)
	case len(b) > maxInput:
		return "", usage("%s is longer than %d MiB, which is more than the context can hold: shorten it", name, maxInput>>20)
	}
	if i := invalidUTF8(b); i >= 0 {
		return "", usage("%s is not valid UTF-8 at byte %d: convert it first", name, i)
	}
	return string(b), nil
}

func unreadable(name string, err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err // it is about name, which the line has already
	}
	return usage("%s cannot be read: %w: give a text file, or - for standard input", name, err)
}

// invalidUTF8 is the offset of the first byte that is not valid UTF-8, or -1.
func invalidUTF8(b []byte) int {
	for i := 0; i < len(b); {
		r, n := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return -1
}

// parseIDs reads ids separated by white space, commas, or as a JSON array.
func parseIDs(text string) ([]int, error) {
	fields := strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\r\n,[]", r) })
	ids := make([]int, len(fields))
	for i, f := range fields {
		id, err := strconv.Atoi(f)
		if err != nil || id < 0 {
			return nil, usage("%.60q is not a token id: give numbers separated by commas", f)
		}
		ids[i] = id
	}
	return ids, nil
}

// joinIDs writes ids as parseIDs reads them.
func joinIDs(ids []int) string {
	return strings.Trim(fmt.Sprint(ids), "[]")
}
