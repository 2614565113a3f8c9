package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"deltafin/engine"
	"deltafin/engine/opt"
	"deltafin/engine/tokenizer"
	"deltafin/golden/nano"
)

// modelFlags are shared by the commands that open a model.
type modelFlags struct {
	Model   string   `placeholder:"DIR" type:"path" help:"Checkpoint directory in the released layout. Default: K3-nano, the built-in miniature."`
	Threads int      `placeholder:"N" help:"Worker threads. Default: one per processor. Changes speed only."`
	Rows    int      `placeholder:"N" help:"Most rows of a pass. Default: ${rows}. Changes speed and memory only."`
	Opt     []string `placeholder:"NAME=on|off" help:"Turn an optimisation on or off; may be repeated. Changes speed and memory only."`
}

// dir is the checkpoint directory; for the built-in model it is unpacked first.
func (f *modelFlags) dir(std streams) (string, error) {
	if f.Model != "" {
		return f.Model, nil
	}
	dir, err := unpackNano()
	if err != nil {
		return "", failure{exitFailed, fmt.Errorf("the built-in model cannot be unpacked: %w: set XDG_CACHE_HOME to a writable directory or give --model", err)}
	}
	fmt.Fprintln(std.err, "deltafin: running K3-nano, the built-in miniature, which knows little; for the full Kimi K3 download moonshotai/Kimi-K3 and give --model DIR")
	return dir, nil
}

func (f *modelFlags) open(ctx context.Context, dir string) (*engine.Engine, error) {
	for _, o := range f.Opt {
		if err := opt.Parse(o); err != nil {
			return nil, usage("%w", err)
		}
	}
	if f.Threads < 0 || f.Rows < 0 {
		return nil, usage("--threads and --rows must not be negative")
	}
	e, err := engine.Open(ctx, dir, engine.Options{Threads: f.Threads, PassRows: f.Rows})
	switch {
	case errors.Is(err, context.Canceled):
		return nil, err
	case errors.Is(err, engine.ErrMemory):
		return nil, failure{exitResources, err}
	case err != nil:
		return nil, failure{exitModel, err}
	}
	return e, nil
}

// openTokenizer returns nil without an error when dir has no tokenizer and it is
// not needed.
func openTokenizer(dir string, needed bool) (*tokenizer.Tokenizer, error) {
	tok, err := tokenizer.Open(dir)
	switch {
	case err == nil:
		return tok, nil
	case errors.Is(err, fs.ErrNotExist) && !needed:
		return nil, nil
	case errors.Is(err, fs.ErrNotExist):
		return nil, failure{exitModel, fmt.Errorf("%w: copy the model's tokenizer files there, or give --ids", err)}
	default:
		return nil, failure{exitModel, err}
	}
}

// unpackNano writes the embedded checkpoint to the user's cache, unless the same
// bytes are there already, and returns its directory. Every file appears whole or
// not at all, so that two first starts at once are harmless.
func unpackNano() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	dir := filepath.Join(cache, "deltafin", "k3-nano")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	files := nano.FS()
	return dir, fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		want, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		path := filepath.Join(dir, name)
		if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, want) {
			return nil
		}
		return writeFile(path, want)
	})
}

// writeFile publishes data at path in one step.
func writeFile(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone already when all went well
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
