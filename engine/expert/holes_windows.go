package expert

import "os"

// holes finds none: NTFS does not tell them from zeros without being asked per range.
func holes(*os.File, int64, func(from, to int64) error) error { return nil }
