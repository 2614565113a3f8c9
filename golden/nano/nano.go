// Package nano hides how the miniature model travels inside a binary: its
// checkpoint directory is embedded (14 MB), so only a program that can run without
// any file of its own should import it.
package nano

import (
	"embed"
	"io/fs"
)

//go:embed model
var files embed.FS

// FS holds the K3-nano checkpoint: config.json, the shards and their index, and the
// tokenizer files, at its root.
func FS() fs.FS {
	sub, err := fs.Sub(files, "model")
	if err != nil {
		panic(err) // the embed directive and the constant path disagree
	}
	return sub
}
