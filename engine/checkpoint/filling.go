package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sort"
)

// RangesSuffix ends the name of the file beside a shard that says which of its bytes
// are there. A shard without one is whole.
const RangesSuffix = ".ranges"

// Filler brings the bytes of shards that are not there yet. Shards have their names as
// in the index. Its methods may be called from several goroutines.
type Filler interface {
	// Has tells whether all of a range is there. It may be gone in the next moment,
	// unless it is held.
	Has(name string, off, n int64) bool

	// Hold keeps a range that is there from being dropped until release is called. ok is
	// false if it is not there.
	Hold(name string, off, n int64) (release func(), ok bool)

	// Ensure brings a range, and Read fills dst with one, which it keeps if it may.
	Ensure(ctx context.Context, name string, off, n int64) error
	Read(ctx context.Context, name string, off int64, dst []byte) error

	// Check makes check look at every range that arrives from now on. An error of it
	// refuses the range.
	Check(check func(name string, off int64, b []byte) error)
}

// OpenFilling is Open for a directory whose routed experts are not all there: f brings
// them, and its ranges are checked for scales that no weight may have. With f nil the
// structure can be looked at, and experts cannot be read. The dense tensors and all
// headers have to be there.
func OpenFilling(dir string, f Filler) (*Checkpoint, error) {
	c, err := open(dir, true, f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	if f != nil {
		f.Check(c.scaleCheck())
	}
	return c, nil
}

// Filling reports whether the experts need not be there, see [OpenFilling].
func (c *Checkpoint) Filling() bool { return c.filling }

// Filler brings experts that are not there; nil for a directory that is complete.
func (c *Checkpoint) Filler() Filler { return c.filler }

// Shard is the name of a shard in the index.
func (c *Checkpoint) Shard(file int) string { return c.r.files[file] }

// unfilled refuses a shard that is not whole.
func (c *Checkpoint) unfilled(i int) error {
	if _, err := os.Lstat(c.Path(i) + RangesSuffix); err != nil || c.filling {
		return nil
	}
	return errors.New("fills on demand and is not complete: run 'deltafin fetch --full' on the directory for the rest")
}

// scaleCheck returns a function that looks for scales that no weight may have in any
// range of any shard.
func (c *Checkpoint) scaleCheck() func(name string, off int64, b []byte) error {
	order := make([]int, len(c.r.experts)) // by file and place in it
	for i := range order {
		order[i] = i
	}
	at := func(i int) (int, int64) { return int(c.r.experts[i].file), c.r.experts[i].offset }
	slices.SortFunc(order, func(i, j int) int {
		f, a := at(i)
		g, b := at(j)
		return cmp.Or(cmp.Compare(f, g), cmp.Compare(a, b))
	})
	return func(name string, off int64, b []byte) error {
		file, end := slices.Index(c.r.files, name), off+int64(len(b))
		first := sort.Search(len(order), func(i int) bool {
			f, a := at(order[i])
			return f > file || f == file && a+c.r.layout.ExpertBytes > off
		})
		for _, i := range order[first:] {
			f, a := at(i)
			if f != file || a >= end {
				return nil
			}
			for _, part := range []int{W1Scale, W2Scale, W3Scale} {
				p := c.r.layout.Parts[part]
				lo, hi := max(off, a+p.Offset), min(end, a+p.Offset+p.Bytes)
				if lo >= hi {
					continue
				}
				if bad := CheckScales(b[lo-off : hi-off]); bad >= 0 {
					n := c.r.cfg.Experts
					return c.ScaleError(c.r.cfg.FirstDense+i/n, i%n, part, bad+int(lo-a-p.Offset))
				}
			}
		}
		return nil
	}
}
