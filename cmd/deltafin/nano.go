package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"deltafin/engine/disk"
	"deltafin/golden/nano"
)

// unpackNano brings the embedded checkpoint to the user's cache and returns its
// directory there.
func unpackNano() (string, error) {
	dir := nanoDir()
	err := unpack(nano.FS(), dir)
	switch {
	case disk.Full(err):
		return "", failure{exitResources, fmt.Errorf("the built-in model cannot be unpacked: %w: make room, or give --model", err)}
	case err != nil:
		return "", failure{exitFailed, fmt.Errorf("the built-in model cannot be unpacked: %w: make the user's cache directory writable, or give --model", err)}
	}
	return dir, nil
}

// nanoDir is where the built-in model is unpacked to.
func nanoDir() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	return filepath.Join(cache, "deltafin", "k3-nano")
}

// isUnpacked tells whether all of files is in dir, byte for byte.
func isUnpacked(files fs.FS, dir string) bool {
	return fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if same, err := equalFiles(files, name, filepath.Join(dir, name)); !same {
			return cmp.Or(err, fs.ErrNotExist)
		}
		return nil
	}) == nil
}

// unpack writes files to dir, but for those that are there already, byte for byte.
// Every file appears whole or not at all, so that two first starts at once are
// harmless.
func unpack(files fs.FS, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		path := filepath.Join(dir, name)
		if same, err := equalFiles(files, name, path); same || err != nil {
			return err
		}
		data, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		return disk.WriteFile(path, data, 0o644)
	})
}

// equalFiles tells whether the file at path is that of files byte for byte; one that
// cannot be read is not. Every start asks, so it takes little memory.
func equalFiles(files fs.FS, name, path string) (bool, error) {
	f, err := files.Open(name)
	if err != nil {
		return false, err
	}
	defer f.Close()
	g, err := os.Open(path)
	if err != nil {
		return false, nil
	}
	defer g.Close()
	a, b := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, errF := io.ReadFull(f, a)
		m, errG := io.ReadFull(g, b)
		if !bytes.Equal(a[:n], b[:m]) {
			return false, nil
		}
		if errF != nil || errG != nil {
			return errF == errG, nil // both at their end, or not
		}
	}
}

// temporaryNano unpacks the built-in model to a directory that remove takes away.
func temporaryNano() (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp("", "deltafin-doctor-")
	if err != nil {
		return "", nil, err
	}
	remove = func() { os.RemoveAll(dir) }
	if err := os.CopyFS(filepath.Join(dir, "k3-nano"), nano.FS()); err != nil {
		remove()
		return "", nil, err
	}
	return filepath.Join(dir, "k3-nano"), remove, nil
}
