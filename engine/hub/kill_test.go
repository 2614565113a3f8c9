package hub

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/hub/hubtest"
)

const killEnv = "HUBTEST_KILL"

func TestMain(m *testing.M) {
	for env, role := range map[string]func(string){killEnv: fetchAndDie, serveEnv: serve, loadEnv: load} {
		if spec := os.Getenv(env); spec != "" {
			role(spec)
			return
		}
	}
	os.Exit(m.Run())
}

// fetchAndDie is the process that is killed: it runs one fetch and kills itself in
// front of the n-th change of the directory.
func fetchAndDie(spec string) {
	f := strings.Split(spec, "|")
	at, _ := strconv.Atoi(f[0])
	var n atomic.Int32
	o := Options{
		Dir: f[1], Repo: f[2], Revision: f[3], Sources: []string{f[4]},
		Connections: 1, PartBytes: 100 << 10, Stall: 10 * time.Second, Retries: 3, Backoff: time.Millisecond,
		hooks: &hooks{step: func(string) {
			if int(n.Add(1)) == at {
				p, _ := os.FindProcess(os.Getpid())
				p.Kill()
				select {}
			}
		}},
	}
	if err := fetchOrFill(context.Background(), o, f[5]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("steps:", n.Load())
}

// fetchOrFill fetches; or with how "fill" opens a depot and brings everything into
// it, with "keep" within a bound; else how is a drive that takes all shards.
func fetchOrFill(ctx context.Context, o Options, how string) error {
	switch {
	case how == "fill", how == "keep":
		keep := int64(-1)
		if how == "keep" { // two experts of three
			keep = 45_000
		}
		d, err := OpenDepot(ctx, DepotOptions{Options: o, TrustHTTP: true, Keep: keep})
		if err != nil {
			return err
		}
		defer d.Close()
		for _, x := range shardExperts {
			b := make([]byte, x.bytes())
			if err := d.Read(ctx, "big.safetensors", x.off, b); err != nil {
				return err
			}
			if !bytes.Equal(b, shard()[x.off:x.end]) {
				return errors.New("an expert is wrong")
			}
		}
		d.Prove()
		return nil
	case how != "":
		o.Spread = []Target{{Dir: how}}
	}
	return Fetch(ctx, o)
}

// A fetch that is killed between any two of its steps leaves no file with its name
// and wrong bytes, and the next one completes the store.
func TestKilledBetweenAnyTwoSteps(t *testing.T) {
	served := small(t)
	must(t, os.Remove(filepath.Join(served, "sub", "mid.bin")))
	must(t, os.WriteFile(filepath.Join(served, "big.safetensors"), shard(), 0o644))
	h := hubtest.New(t, served)
	run := func(at int, dir, drive string) (string, error) {
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), fmt.Sprintf("%s=%d|%s|%s|%s|%s|%s", killEnv, at, dir, h.Repo, h.Revision, h.URL, drive))
		b, err := c.CombinedOutput()
		return string(b), err
	}
	for _, how := range []string{"", "fill", "keep", "spread"} {
		var steps int
		drive := func() string {
			if how == "spread" && canSpread {
				return t.TempDir()
			}
			return strings.TrimSuffix(how, "spread")
		}
		out, err := run(0, t.TempDir(), drive())
		if _, scan := fmt.Sscanf(out, "steps: %d", &steps); err != nil || scan != nil || steps < 20 {
			t.Fatalf("%v: %s", err, out)
		}
		var g errgroup.Group
		g.SetLimit(4)
		for at := 1; at <= steps; at++ {
			g.Go(func() error {
				dir, drive := t.TempDir(), drive()
				if out, err := run(at, dir, drive); err == nil || strings.TrimSpace(out) != "" {
					return fmt.Errorf("killed at step %d of %d: %v: %s", at, steps, err, out)
				}
				if how != "fill" && how != "keep" { // there a file has its name before it is whole
					sound(t, served, dir)
				}
				o := quick(h, dir)
				if err := fetchOrFill(t.Context(), o, drive); err != nil {
					return fmt.Errorf("after a kill at step %d: %w", at, err)
				}
				if err := Fetch(t.Context(), o); err != nil {
					return fmt.Errorf("after a kill at step %d: %w", at, err)
				}
				complete(t, served, dir)
				return nil
			})
		}
		must(t, g.Wait())
	}
}
