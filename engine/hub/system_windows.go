package hub

import (
	"errors"
	"path/filepath"

	"golang.org/x/sys/windows"
)

// Symbolic links need a privilege that ordinary users do not have.
const canSpread = false

func driveOf(dir string) string { return filepath.VolumeName(dir) }

func isReadOnly(err error) bool { return errors.Is(err, windows.ERROR_WRITE_PROTECT) }
