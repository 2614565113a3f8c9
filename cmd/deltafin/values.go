package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"

	"deltafin/engine/hub"
)

// parseSize reads a number of bytes such as 12GB, 500MB or 6GiB; empty is 0.
func parseSize(flag, text string) (int64, error) {
	if text == "" {
		return 0, nil
	}
	unit := int64(1)
	number := text
	for _, u := range []struct {
		suffix string
		bytes  int64
	}{{"TIB", 1 << 40}, {"GIB", 1 << 30}, {"MIB", 1 << 20}, {"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"T", 1e12}, {"G", 1e9}, {"M", 1e6}, {"B", 1}} {
		if n, ok := strings.CutSuffix(strings.ToUpper(text), u.suffix); ok {
			number, unit = strings.TrimSpace(n), u.bytes
			break
		}
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || !(v*float64(unit) >= 1) || v*float64(unit) > 1<<60 {
		return 0, usage("%s %q is not a size: write a number of bytes such as 12GB", flag, text)
	}
	return int64(v * float64(unit)), nil
}

// sensible reports whether x can be a rate of a drive in GB/s.
func sensible(x float64) bool { return x > 0 && x < 1e6 }

// homes makes paths of what are not addresses.
func homes(dirs []string) []string {
	var out []string
	for _, d := range dirs {
		if !hub.IsSite(d) {
			d = kong.ExpandPath(d)
		}
		out = append(out, d)
	}
	return out
}

// checkOutput refuses a file to write that would destroy something else: what is not a
// regular file, and anything inside the model's directory. An empty path is no output.
func checkOutput(what, path, model string) error {
	if path == "" {
		return nil
	}
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		return usage("%s: %s is not a regular file: give another name", what, path)
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return usage("%s: %w: give a file in a directory that exists", what, err)
	}
	if model == "" {
		return nil
	}
	if in, err := filepath.EvalSymlinks(model); err == nil {
		if rel, err := filepath.Rel(in, dir); err == nil && rel != ".." && !strings.HasPrefix(rel, ".."+string(filepath.Separator)) {
			return usage("%s: %s is inside the model's directory: give a file elsewhere", what, path)
		}
	}
	return nil
}
