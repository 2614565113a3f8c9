package plan

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/drive"
	"deltafin/engine/kernel"
)

// MeasureKernels fills in the rates of this machine's kernels with all of the pool's
// workers, by products at K3's sizes over weights far larger than a cache. It takes
// about two seconds.
func MeasureKernels(p *kernel.Pool, m *Machine) error {
	const cols, rows, many = 3584, 3072, 64
	bf16, err := kernel.NewMatrix(kernel.BF16, 16*rows, cols, kernel.Bytes(2*16*rows*cols), nil)
	if err != nil {
		return err
	}
	scale := kernel.Bytes(32 * rows * cols / kernel.Lane32)
	for i := range scale {
		scale[i] = 120
	}
	mx, err := kernel.NewMatrix(kernel.MXFP4, 32*rows, cols, kernel.Bytes(32*rows*cols/2), scale)
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for i := 0; i < len(mx.Data); i += 8 {
		binary.NativeEndian.PutUint64(mx.Data[i:], rng.Uint64())
	}
	x := kernel.NewMat(many, cols)
	for i := range x.Data {
		x.Data[i] = rng.Float32() - .5
	}
	// best is the shortest time of a product with r rows of x and w's first n rows.
	best := func(w *kernel.Matrix, n, r int) float64 {
		part, y := w.Sub(0, n), kernel.NewMat(r, n)
		var t []float64
		for range 5 {
			began := time.Now()
			p.MatMul(kernel.Job{Y: y, X: x.Slice(0, r), W: part})
			t = append(t, time.Since(began).Seconds())
		}
		return slices.Min(t)
	}
	m.DenseRow = float64(bf16.Bytes()) / best(bf16, bf16.Rows, 1)
	m.ExpertRow = float64(mx.Bytes()) / best(mx, mx.Rows, 1)
	m.DenseRows = float64(many*rows*cols) / best(bf16, rows, many)
	m.ExpertRows = float64(many*rows*cols) / best(mx, rows, many)
	return nil
}

// tokenShare of a layer's experts is used by a token (spec A.3).
const tokenShare = 16. / 896

// MeasureDrive returns the rate in bytes per second at which the files of a directory
// are read as the engine reads experts, for about the given time: a file is a layer, ranges of
// the given size are its experts, and as many of them as a token would use are read in
// ascending order, several at a time, through set.
func MeasureDrive(ctx context.Context, set *drive.Set, dir string, size int64, d time.Duration) (float64, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		return 0, err
	}
	var files []*drive.File
	for _, n := range names {
		if info, err := os.Stat(n); err == nil && info.Mode().IsRegular() && info.Size() > 4*size {
			f, err := set.Open(n)
			if err != nil {
				return 0, err
			}
			files = append(files, f)
		}
	}
	if len(files) == 0 {
		return 0, fmt.Errorf("%s: no file of %.2f GB or more to measure the drive with: give a directory with a checkpoint, or --rate", dir, float64(4*size)/1e9)
	}
	const inFlight = 6
	began := time.Now()
	reads := make(chan drive.Read)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(reads)
		rng := rand.New(rand.NewPCG(uint64(began.UnixNano()), 0))
		// Another file is the first each time, so that two measurements in a row do not read the same.
		for i := rng.IntN(len(files)); time.Since(began) < d && ctx.Err() == nil; i++ {
			f := files[i%len(files)]
			places := int(f.Size() / size)
			some := rng.Perm(places)[:max(1, int(tokenShare*float64(places)))]
			slices.Sort(some)
			for _, at := range some {
				select {
				case reads <- drive.Read{File: f, Offset: int64(at) * size, Bytes: size}:
				case <-ctx.Done():
					return ctx.Err()
				}
				if time.Since(began) > d {
					return nil
				}
			}
		}
		return ctx.Err()
	})
	var bytes atomic.Int64
	for range inFlight {
		g.Go(func() error {
			buf, err := drive.NewBuffer(size)
			if err != nil {
				return err
			}
			defer buf.Free()
			for r := range reads {
				r.Into = buf
				if err := set.Read(ctx, r); err != nil {
					return err
				}
				bytes.Add(size)
			}
			return nil
		})
	}
	err = g.Wait()
	return float64(bytes.Load()) / time.Since(began).Seconds(), err
}
