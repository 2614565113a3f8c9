//go:build unix

package hub

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

const canSpread = true

// driveOf tells file systems apart.
func driveOf(dir string) string {
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return dir
	}
	return fmt.Sprint(s.Dev)
}

func isReadOnly(err error) bool { return errors.Is(err, unix.EROFS) }
