package spine

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
)

const (
	embedCache   = 8 << 20  // bytes of rows that are kept
	embedRun     = 64 << 10 // rows this close together are one read
	embedReaders = 16
)

func embedMemory(c *checkpoint.Config) int64 {
	return embedCache + embedReaders*footprint(max(embedRun, 2*int64(c.Hidden)))
}

// rows reads rows of the embedding table and keeps the latest. One fetch at a time.
type rows struct {
	drives *drive.Set
	file   *drive.File
	table  extent
	n      int64 // bytes of a row

	cache map[int][]byte
	order []int // of the cache, the oldest first

	mu   sync.Mutex
	bufs []*drive.Buffer // free
}

func newRows(drives *drive.Set, file *drive.File, table extent, c *checkpoint.Config) *rows {
	return &rows{drives: drives, file: file, table: table, n: 2 * int64(c.Hidden), cache: map[int][]byte{}}
}

// fetch writes the row of each id to dst, and returns the bytes that it read.
func (r *rows) fetch(ctx context.Context, dst kernel.Mat, ids []int) (read int64, err error) {
	users := map[int][]int{} // rows of dst per id
	var missing []int
	for i, id := range ids {
		if id < 0 || int64(id) >= r.table.n/r.n {
			return 0, fmt.Errorf("token %d has no embedding: ids are 0 to %d", id, r.table.n/r.n-1)
		}
		if b, ok := r.cache[id]; ok {
			widen(dst.Row(i)[:dst.Cols], b, checkpoint.BF16)
			continue
		}
		if users[id] == nil {
			missing = append(missing, id)
		}
		users[id] = append(users[id], i)
	}
	if len(missing) == 0 {
		return 0, ctx.Err()
	}
	runs := r.runs(missing)
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range min(embedReaders, len(runs)) {
		g.Go(func() error {
			b, err := r.buffer()
			if err != nil {
				return err
			}
			defer r.free(b)
			for i := next.Add(1) - 1; i < int64(len(runs)); i = next.Add(1) - 1 {
				run := runs[i]
				first, last := int64(run[0]), int64(run[len(run)-1])
				n := (last - first + 1) * r.n
				err := r.drives.Read(ctx, drive.Read{File: r.file, Offset: r.table.off + first*r.n, Bytes: n, Into: b})
				if err != nil {
					return fmt.Errorf("the embedding of token %d: %w", first, err)
				}
				r.mu.Lock()
				read += n
				r.mu.Unlock()
				for _, id := range run {
					row := b.Bytes()[(int64(id)-first)*r.n:][:r.n]
					r.mu.Lock()
					r.keep(id, row)
					r.mu.Unlock()
					for _, u := range users[id] {
						widen(dst.Row(u)[:dst.Cols], row, checkpoint.BF16)
					}
				}
			}
			return nil
		})
	}
	err = g.Wait()
	return read, err
}

// runs sorts ids and cuts them where the rows from the first to the last would be more
// than one read should fetch.
func (r *rows) runs(ids []int) (runs [][]int) {
	slices.Sort(ids)
	for lo := 0; lo < len(ids); {
		hi := lo + 1
		for hi < len(ids) && int64(ids[hi]-ids[lo]+1)*r.n <= embedRun {
			hi++
		}
		runs = append(runs, ids[lo:hi])
		lo = hi
	}
	return runs
}

// keep puts a row into the cache, in the place of the oldest if it is full.
func (r *rows) keep(id int, b []byte) {
	if int64(len(r.order)+1)*r.n > embedCache {
		if len(r.order) == 0 {
			return
		}
		old := r.order[0]
		r.order = append(r.order[:0], r.order[1:]...)
		row := r.cache[old]
		delete(r.cache, old)
		r.cache[id] = append(row[:0], b...)
	} else {
		r.cache[id] = append([]byte(nil), b...)
	}
	r.order = append(r.order, id)
}

func (r *rows) buffer() (*drive.Buffer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.bufs); n > 0 {
		b := r.bufs[n-1]
		r.bufs = r.bufs[:n-1]
		return b, nil
	}
	return drive.NewBuffer(max(embedRun, r.n))
}

func (r *rows) free(b *drive.Buffer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !b.Poisoned() {
		r.bufs = append(r.bufs, b)
	}
}

func (r *rows) close() {
	for _, b := range r.bufs {
		b.Free()
	}
	r.bufs = nil
}
