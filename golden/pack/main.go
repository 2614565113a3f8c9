// Command pack compresses the oracle's raw output into the golden directory.
//
//	go run ./golden/pack RAW_DIR GOLDEN_DIR
//
// Each file RAW_DIR/path becomes GOLDEN_DIR/path.zst. The oracle itself stays free of
// a compression library this way.
package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: go run ./golden/pack RAW_DIR GOLDEN_DIR")
		os.Exit(2)
	}
	if err := pack(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "pack:", err)
		os.Exit(1)
	}
}

func pack(raw, golden string) error {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBestCompression))
	if err != nil {
		return err
	}
	return filepath.WalkDir(raw, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(raw, path)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		out := filepath.Join(golden, rel+".zst")
		if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
			return err
		}
		return os.WriteFile(out, enc.EncodeAll(b, nil), 0o644)
	})
}
