package hub

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/hub/hubtest"
)

const (
	serveEnv = "HUBTEST_SERVE"
	loadEnv  = "HUBTEST_LOAD"

	benchBytes       = 2 << 30
	benchConnections = 8
)

// serve is the process that serves a benchmark's directory until it is killed.
func serve(dir string) {
	testing.Init()
	testing.Benchmark(func(b *testing.B) {
		h := hubtest.New(b, dir)
		fmt.Println(h.URL, h.PlainURL)
		select {}
	})
}

// load is the process whose time and memory are measured.
func load(spec string) {
	f := strings.Split(spec, "|")
	o := Options{Dir: f[0], Repo: f[1], Revision: f[2], Sources: []string{f[3]}, Connections: benchConnections}
	if err := Fetch(context.Background(), o); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// BenchmarkAgainstCurl fetches 2 GB over loopback, proved and flushed, and has curl
// fetch the same from the same server with as many connections and flush it. It
// reports the ratio of the rates and the most memory that a fetch took. It needs 6 GB
// below TMPDIR.
func BenchmarkAgainstCurl(b *testing.B) {
	if _, err := exec.LookPath("curl"); err != nil {
		b.Skip("NOT RUN: no curl")
	}
	served := b.TempDir()
	out, err := os.Create(filepath.Join(served, "x.safetensors"))
	must(b, err)
	block := make([]byte, 16<<20)
	rand.NewChaCha8([32]byte{}).Read(block)
	for n := 0; n < benchBytes; n += len(block) {
		_, err := out.Write(block)
		must(b, err)
	}
	must(b, out.Close())

	server := exec.Command(os.Args[0])
	server.Env = append(os.Environ(), serveEnv+"="+served)
	pipe, err := server.StdoutPipe()
	must(b, err)
	must(b, server.Start())
	defer server.Wait()
	defer server.Process.Kill()
	line, err := bufio.NewReader(pipe).ReadString('\n')
	must(b, err)
	hub, plain, _ := strings.Cut(strings.TrimSpace(line), " ")
	flush := func(path string) {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		must(b, err)
		must(b, f.Sync())
		f.Close()
	}
	var ours, curls time.Duration
	var rss int64
	for range b.N {
		dir := b.TempDir()
		began := time.Now()
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), loadEnv+"="+strings.Join([]string{dir, hubtest.Repo, hubtest.Revision, hub}, "|"))
		if text, err := c.CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, text)
		}
		ours += time.Since(began)
		rss = max(rss, peakMemory(c.ProcessState))
		must(b, os.RemoveAll(dir))

		dir = b.TempDir()
		began = time.Now()
		var g errgroup.Group
		for i := range benchConnections {
			g.Go(func() error {
				from, to := i*benchBytes/benchConnections, (i+1)*benchBytes/benchConnections-1
				path := filepath.Join(dir, fmt.Sprint(i))
				err := exec.Command("curl", "-sf", "-r", fmt.Sprintf("%d-%d", from, to), "-o", path, strings.ReplaceAll(plain, placeholder, "x.safetensors")).Run()
				if err == nil {
					flush(path)
				}
				return err
			})
		}
		must(b, g.Wait())
		curls += time.Since(began)
		must(b, os.RemoveAll(dir))
	}
	gbs := func(d time.Duration) float64 { return float64(b.N) * benchBytes / 1e9 / d.Seconds() }
	b.ReportMetric(gbs(ours), "GB/s")
	b.ReportMetric(gbs(curls), "curl-GB/s")
	b.ReportMetric(gbs(ours)/gbs(curls), "of-curl")
	b.ReportMetric(float64(rss)/1e6, "MB-peak")
	b.ReportMetric(0, "ns/op")
}
