package hub

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/disk"
	"deltafin/engine/hub/hubtest"
)

const (
	serveEnv = "HUBTEST_SERVE"
	loadEnv  = "HUBTEST_LOAD"

	// bytesEnv is how many bytes BenchmarkAgainstCurl fetches at a time.
	bytesEnv         = "DELTAFIN_FETCH_BYTES"
	benchBytes       = 4e9
	benchShard       = 2 << 30
	benchConnections = 8
)

// serve is the process that serves a benchmark's directory until it is killed.
func serve(dir string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Printf("http://%s\n", l.Addr())
	panic(http.Serve(l, http.FileServer(http.Dir(dir))))
}

// load is the process whose time and memory are measured.
func load(spec string) {
	f := strings.Split(spec, "|")
	o := Options{Dir: f[0], Repo: hubtest.Repo, Revision: hubtest.Revision, Sources: []string{f[1] + "/" + placeholder}, Connections: benchConnections}
	if err := Fetch(context.Background(), o); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// benchModel makes shards of n bytes together that take little room: of every 64 MiB,
// one is random and the rest a hole.
func benchModel(b *testing.B, n int64) string {
	dir := b.TempDir()
	s := &store{dir: dir, rec: &storeRecord{Format: inventoryFormat, Repo: hubtest.Repo, Revision: hubtest.Revision}}
	random, block := rand.NewChaCha8([32]byte{}), make([]byte, 1<<20)
	for i := 0; n > 0; i++ {
		f := File{Name: fmt.Sprintf("model-%05d.safetensors", i), Size: min(n, benchShard)}
		out, err := os.Create(filepath.Join(dir, f.Name))
		must(b, err)
		must(b, out.Truncate(f.Size))
		for at := int64(0); at+int64(len(block)) <= f.Size; at += 64 << 20 {
			random.Read(block)
			_, err := out.WriteAt(block, at)
			must(b, err)
		}
		h := newHasher(&f)
		for h.n < h.size {
			n, err := out.ReadAt(block[:min(int64(len(block)), h.room())], h.n)
			if err != io.EOF {
				must(b, err)
			}
			h.write(block[:n])
		}
		f.SHA256 = h.sum().sha256
		must(b, out.Close())
		s.rec.Files = append(s.rec.Files, storeFile{File: f})
		n -= f.Size
	}
	must(b, s.save())
	return dir
}

// BenchmarkAgainstCurl fetches shards over loopback, proved and flushed, and has curl
// fetch the same from the same server with as many connections and flush it: in turn,
// from a server in Go and from nginx. It reports the ratio of the rates and the most
// memory that a fetch took. It needs DELTAFIN_FETCH_BYTES (4 GB) below TMPDIR, and a
// little.
func BenchmarkAgainstCurl(b *testing.B) {
	if _, err := exec.LookPath("curl"); err != nil {
		b.Skip("NOT RUN: no curl")
	}
	size := int64(benchBytes)
	if v := os.Getenv(bytesEnv); v != "" {
		x, err := strconv.ParseFloat(v, 64)
		must(b, err)
		size = int64(x)
	}
	if free, err := disk.Free(b.TempDir()); err == nil && free < size+size/16 {
		b.Skipf("NOT RUN: %s are needed, %s are free", gb(size+size/16), gb(free))
	}
	served := benchModel(b, size)
	b.Run("go", func(b *testing.B) {
		server := exec.Command(os.Args[0])
		server.Env = append(os.Environ(), serveEnv+"="+served)
		pipe, err := server.StdoutPipe()
		must(b, err)
		must(b, server.Start())
		defer server.Wait()
		defer server.Process.Kill()
		line, err := bufio.NewReader(pipe).ReadString('\n')
		must(b, err)
		againstCurl(b, strings.TrimSpace(line), size)
	})
	b.Run("nginx", func(b *testing.B) { againstCurl(b, hubtest.Nginx(b, served), size) })
}

func againstCurl(b *testing.B, base string, size int64) {
	var ours, curls time.Duration
	var rss int64
	for range b.N {
		dir := b.TempDir()
		began := time.Now()
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), loadEnv+"="+dir+"|"+base)
		if text, err := c.CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, text)
		}
		ours += time.Since(began)
		rss = max(rss, peakMemory(c.ProcessState))
		must(b, os.RemoveAll(dir))

		dir = b.TempDir()
		began = time.Now()
		must(b, curl(base, dir, size))
		curls += time.Since(began)
		must(b, os.RemoveAll(dir))
	}
	gbs := func(d time.Duration) float64 { return float64(b.N) * float64(size) / 1e9 / d.Seconds() }
	b.ReportMetric(gbs(ours), "GB/s")
	b.ReportMetric(gbs(curls), "curl-GB/s")
	b.ReportMetric(gbs(ours)/gbs(curls), "of-curl")
	b.ReportMetric(float64(rss)/1e6, "MB-peak")
	b.ReportMetric(0, "ns/op")
}

// curl fetches the shards in parts, several at a time, and flushes each.
func curl(base, dir string, size int64) error {
	var g errgroup.Group
	g.SetLimit(benchConnections)
	for i := int64(0); i*benchShard < size; i++ {
		n := min(size-i*benchShard, benchShard)
		for j := range int64(benchConnections) {
			g.Go(func() error {
				path := filepath.Join(dir, fmt.Sprint(i, "-", j))
				part := fmt.Sprintf("%d-%d", n*j/benchConnections, n*(j+1)/benchConnections-1)
				if err := exec.Command("curl", "-sf", "-r", part, "-o", path, fmt.Sprintf("%s/model-%05d.safetensors", base, i)).Run(); err != nil {
					return fmt.Errorf("curl: %w", err)
				}
				f, err := os.OpenFile(path, os.O_RDWR, 0)
				if err != nil {
					return err
				}
				defer f.Close()
				return f.Sync()
			})
		}
	}
	return g.Wait()
}
