//go:build linux

package drive

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const expertBytes = 17547264

// BenchmarkShareOfTheDrive compares experts read by a Set with the same reads made
// by four goroutines that do nothing but pread with O_DIRECT, both at offsets that
// such calls accept and at those of the released shards, which are on no block. The
// two take turns of half a second on a file of 1.4 GB, because a drive's rate can
// change within a minute.
//
//	go test ./engine/drive -run '^$' -bench Share -benchtime 8x
func BenchmarkShareOfTheDrive(b *testing.B) {
	dir := disk(b)
	path := filepath.Join(dir, "experts")
	const experts = 80
	file, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	chunk := make([]byte, expertBytes)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := 0; i < len(chunk); i += 8 {
		chunk[i] = byte(rng.Uint32())
	}
	for range experts {
		if _, err := file.Write(chunk); err != nil {
			b.Fatal(err)
		}
	}
	if err := file.Sync(); err != nil {
		b.Fatal(err)
	}
	file.Close()

	s := newSet(b, Options{})
	f := openFile(b, s, path)
	var buffers [4]*Buffer
	for i := range buffers {
		buffers[i] = newBuffer(b, expertBytes)
	}
	const turn = 500 * time.Millisecond

	raw := func() float64 {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT, 0)
		if err != nil {
			b.Fatal(err)
		}
		defer unix.Close(fd)
		var total atomic.Int64
		var wg sync.WaitGroup
		begin := time.Now()
		for _, buf := range buffers {
			wg.Go(func() {
				for time.Since(begin) < turn {
					off := rand.Int64N(experts) * expertBytes
					for have := 0; have < expertBytes; {
						n, err := unix.Pread(fd, buf.mem[have:expertBytes], off+int64(have))
						if err != nil || n == 0 {
							b.Errorf("%d bytes, %v", n, err)
							return
						}
						have += n
					}
					total.Add(expertBytes)
				}
			})
		}
		wg.Wait()
		return float64(total.Load()) / time.Since(begin).Seconds()
	}
	set := func(shift int64) float64 {
		var total atomic.Int64
		var wg sync.WaitGroup
		begin := time.Now()
		for _, buf := range buffers {
			wg.Add(1)
			var next func(error)
			next = func(err error) {
				if err != nil {
					b.Error(err)
				}
				total.Add(int64(len(buf.Bytes())))
				if err != nil || time.Since(begin) >= turn {
					wg.Done()
					return
				}
				off := rand.Int64N(experts-1)*expertBytes + shift
				s.Submit(context.Background(), Read{File: f, Offset: off, Bytes: expertBytes, Into: buf, Done: next})
			}
			off := rand.Int64N(experts-1)*expertBytes + shift
			s.Submit(context.Background(), Read{File: f, Offset: off, Bytes: expertBytes, Into: buf, Done: next})
		}
		wg.Wait()
		return float64(total.Load()) / time.Since(begin).Seconds()
	}
	set(0) // first touch of the buffers
	var sums [3]float64
	ways := []func() float64{raw, func() float64 { return set(0) }, func() float64 { return set(1234) }}
	for b.Loop() {
		for _, i := range rand.Perm(len(ways)) {
			sums[i] += ways[i]()
		}
	}
	n := float64(b.N)
	b.ReportMetric(sums[0]/n/1e9, "raw-GB/s")
	b.ReportMetric(sums[1]/sums[0], "share")
	b.ReportMetric(sums[2]/sums[0], "share-unaligned")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkOverhead is what a read costs beside its bytes.
func BenchmarkOverhead(b *testing.B) {
	path := filepath.Join(b.TempDir(), "f")
	write(b, path, block)
	s := newSet(b, Options{Buffered: true})
	f, buf := openFile(b, s, path), newBuffer(b, block)
	for b.Loop() {
		if err := s.Read(context.Background(), Read{File: f, Bytes: block, Into: buf}); err != nil {
			b.Fatal(err)
		}
	}
}
