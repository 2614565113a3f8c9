// Package disk hides what it takes on each system for a file to appear whole or not at all:
// temporary names, locks, and syncs of files and directories. It knows when a drive is full, and
// nothing of what files hold.
package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

var (
	// ErrFull is wrapped by errors that refuse to write more than there is room for.
	// [Full] knows it and what systems say.
	ErrFull = errors.New("not enough space")
	// ErrBusy is what locks return that somebody else holds.
	ErrBusy = errors.New("is being written by somebody else: wait for that to end")
)

// Full reports whether err comes from want of space or of quota on a drive.
func Full(err error) bool { return errors.Is(err, ErrFull) || full(err) }

// Publish writes the file at path, which appears under this name whole or not at all, also if
// the power fails, and returns its size in bytes. Several may publish at one path at once; the
// last one wins.
func Publish(path string, perm os.FileMode, write func(*os.File) error) (size int64, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return 0, err
	}
	defer os.Remove(f.Name()) // gone already when all went well
	err = write(f)
	if err == nil {
		err = errors.Join(f.Chmod(perm), f.Sync())
	}
	if info, e := f.Stat(); e == nil {
		size = info.Size()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return 0, err
	}
	return size, Rename(f.Name(), path)
}

// WriteFile is [Publish] of data.
func WriteFile(path string, data []byte, perm os.FileMode) error {
	_, err := Publish(path, perm, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
	return err
}

// Rename gives a file, whose content was synced, another name in its directory, and makes
// that last.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(to))
}

// LockFile opens the file at path for writing, and keeps others from it until it is
// closed or the process ends, however it ends.
func LockFile(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
		if err != nil {
			return nil, err
		}
		if err := Lock(f); err != nil {
			f.Close()
			return nil, fmt.Errorf("%s %w", path, err)
		}
		// Its owner may have published or removed it between the two calls.
		mine, err := f.Stat()
		if err == nil {
			if now, err := os.Stat(path); err == nil && os.SameFile(mine, now) {
				return f, nil
			}
		}
		f.Close()
		if err != nil {
			return nil, err
		}
	}
}
