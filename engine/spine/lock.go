package spine

import (
	"fmt"
	"os"
)

// lockFile opens the file at path for writing, and keeps others from it until the
// file is closed or the process ends, however it ends.
func lockFile(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
		if err != nil {
			return nil, err
		}
		ok, err := tryLock(f)
		if err != nil || !ok {
			f.Close()
			if err == nil {
				err = fmt.Errorf("%s is being written by somebody else: wait for that to end", path)
			}
			return nil, err
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
