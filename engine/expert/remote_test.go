package expert

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/hub"
	"deltafin/engine/hub/hubtest"
	"deltafin/engine/k3"
)

// serveDir serves a directory and returns its address.
func serveDir(t testing.TB, dir string) (*hubtest.Hub, string) {
	h := hubtest.New(t, dir)
	return h, strings.TrimSuffix(h.PlainURL, "/{path}")
}

// shardReads counts the requests for experts.
func shardReads(h *hubtest.Hub) (n, bytes int64) {
	for _, r := range h.Requests() {
		if r.Range && r.End-r.Off > siteHeader || r.Range && r.Off > siteHeader && r.End-r.Off > printedBytes {
			n, bytes = n+1, bytes+r.End-r.Off
		}
	}
	return n, bytes
}

// A web server is a home like any other: of shards or of packed files, whole or in
// part, and the result is the frozen one.
func TestOneHashForEveryWebServer(t *testing.T) {
	w := openWorld(t, "tiny-a")
	for name, c := range map[string]struct {
		dir  string
		kind string
	}{
		"shards":      {mirror(t, w.ck, 1), shardsOverHTTP},
		"some shards": {mirror(t, w.ck, 3), shardsOverHTTP},
		"packed":      {stageHalf(t, w.ck), "packed over HTTP"},
	} {
		h, url := serveDir(t, c.dir)
		var lines []string
		s := w.newSource(t, drive.Options{}, Options{Dirs: []string{url}, Warn: func(l string) { lines = append(lines, l) }})
		home := s.Stats().Homes[1]
		if home.Kind != c.kind || home.Experts == 0 {
			t.Errorf("%s: %+v", name, home)
		}
		if warned := len(lines) == 1 && strings.Contains(lines[0], "without digests"); warned != (c.kind == shardsOverHTTP) {
			t.Errorf("%s: said %q", name, lines)
		}
		h.Forget()
		// Only the server has them now, as far as it does.
		s.drives.Devices()[0].Fail(errors.New("unplugged"))
		s.homes.avoid |= 1
		if home.Experts == s.cat.total() {
			sameAsFrozen(t, w, s, "len17", 5, nil)
			n, bytes := shardReads(h)
			if want := s.Counters().Read; bytes != want || n != want/s.n {
				t.Errorf("%s: %d requests for %d bytes, %d were read", name, n, bytes, want)
			}
		}
	}
	h, url := serveDir(t, mirror(t, w.ck, 1))
	s := w.newSource(t, drive.Options{}, Options{Dirs: []string{url}, Warn: func(string) {}})
	sameAsFrozen(t, w, s, "len17", 5, nil)
	if n, _ := shardReads(h); n == 0 {
		t.Error("the server gave nothing")
	}
}

// Another implementation than our own test server's.
func TestNginxIsAHome(t *testing.T) {
	w := openWorld(t, "tiny-a")
	s := w.newSource(t, drive.Options{}, Options{Dirs: []string{
		hubtest.Nginx(t, mirror(t, w.ck, 1)), hubtest.Nginx(t, stageHalf(t, w.ck)) + "/",
	}, Warn: func(string) {}})
	s.drives.Devices()[0].Fail(errors.New("unplugged"))
	s.homes.avoid |= 1
	sameAsFrozen(t, w, s, "len17", 5, nil)
	for _, d := range s.Stats().Devices[1:] {
		if d.DemandBytes == 0 || d.Failed != "" {
			t.Errorf("%+v", d)
		}
	}
}

// Whatever goes wrong with a server in the middle of a run: the frozen result, and one
// line that says from where experts come now.
func TestAWebServerThatFailsMidRunIsLeft(t *testing.T) {
	siteOptions = hub.SiteOptions{Stall: time.Second, Backoff: time.Millisecond}
	defer func() { siteOptions = hub.SiteOptions{} }()
	w := openWorld(t, "tiny-a")
	dirs := map[string]string{"shards": mirror(t, w.ck, 1), "packed": stageHalf(t, w.ck)}
	scale := func(r hubtest.Request) *hubtest.Fault { // hits a byte of whatever is asked for
		return &hubtest.Fault{Flip: r.Off + (r.End-r.Off)/2 + 1}
	}
	for name, c := range map[string]struct {
		of    string
		fault func(hubtest.Request) *hubtest.Fault
	}{
		"500":        {"shards", func(hubtest.Request) *hubtest.Fault { return &hubtest.Fault{Status: 500} }},
		"404":        {"packed", func(hubtest.Request) *hubtest.Fault { return &hubtest.Fault{Status: 404} }},
		"truncates":  {"shards", func(hubtest.Request) *hubtest.Fault { return &hubtest.Fault{Cut: 1, Reset: true} }},
		"stalls":     {"packed", func(hubtest.Request) *hubtest.Fault { return &hubtest.Fault{Cut: 1, Stall: true} }},
		"redirects":  {"shards", func(hubtest.Request) *hubtest.Fault { return &hubtest.Fault{Loop: true} }},
		"lies":       {"packed", scale},
		"other size": {"shards", func(hubtest.Request) *hubtest.Fault { return &hubtest.Fault{Size: 77} }},
	} {
		t.Run(name, func(t *testing.T) {
			h, url := serveDir(t, dirs[c.of])
			var mu sync.Mutex
			var lines []string
			s := w.newSource(t, drive.Options{}, Options{Dirs: []string{url}, Slots: 8, Warn: func(l string) {
				mu.Lock()
				defer mu.Unlock()
				if !strings.Contains(l, "without digests") {
					lines = append(lines, l)
				}
			}})
			passes := 0
			sameAsFrozen(t, w, s, "len17", 3, func(m *k3.Model) {
				m.ObserveRoutes = func(l int, _ []int32, _ []float32) {
					if l == 5 {
						if passes++; passes == 2 {
							h.SetFault(c.fault)
						}
					}
				}
			})
			mu.Lock()
			defer mu.Unlock()
			if len(lines) != 1 || !strings.Contains(lines[0], url) || strings.Contains(lines[0], "\n") {
				t.Errorf("said %q", lines)
			}
		})
	}
}

// A server that failed is asked again after a while.
func TestARemoteThatFailedRests(t *testing.T) {
	var h homeState
	d := new(drive.Device)
	now := time.Now()
	for i := range 3 {
		h.avoid |= 1 << 2
		h.rest(2, d, now)
		h.rest(2, d, now) // a second read that met the same
		rest := restFirst << i
		if h.forgive(now.Add(rest)); !h.devices[d] || h.avoid != 1<<2 {
			t.Errorf("failure %d: forgiven too early", i)
		}
		if h.forgive(now.Add(rest + 1)); h.devices[d] || h.avoid != 0 {
			t.Errorf("failure %d: not forgiven", i)
		}
	}
}

// A slow server gets less.
func TestASlowWebServerGetsLess(t *testing.T) {
	w := openWorld(t, "tiny-a")
	h, url := serveDir(t, mirror(t, w.ck, 1))
	s := w.newSource(t, drive.Options{}, Options{Dirs: []string{url}, Warn: func(string) {}})
	h.SetFault(func(hubtest.Request) *hubtest.Fault { time.Sleep(200 * time.Millisecond); return nil })
	h.Forget()
	sameAsFrozen(t, w, s, "len17", 1, nil)
	if n, _ := shardReads(h); n > s.Counters().Read/s.n/2 {
		t.Errorf("%d of %d reads went to it", n, s.Counters().Read/s.n)
	}
}

// sparse is a filler: it brings experts from a directory into another, and drops what
// is not held whenever it is asked for something.
type sparse struct {
	from, to string
	mu       sync.Mutex
	have     map[string]map[int64]int64
	held     map[string]map[int64]int
	reads    atomic.Int64
	fail     atomic.Bool
}

func (f *sparse) Check(func(string, int64, []byte) error) {}

func (f *sparse) Ensure(context.Context, string, int64, int64) error { panic("unused") }

func (f *sparse) Has(name string, off, n int64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.have[name][off] == n
}

func (f *sparse) Hold(name string, off, n int64) (func(), bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.have[name][off] != n {
		return nil, false
	}
	f.held[name][off]++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.held[name][off]--
	}, true
}

func (f *sparse) Read(_ context.Context, name string, off int64, dst []byte) error {
	if f.fail.Load() {
		return errors.New("the network is down")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	in, err := os.Open(filepath.Join(f.from, name))
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err := in.ReadAt(dst, off); err != nil {
		return err
	}
	f.reads.Add(1)
	out, err := os.OpenFile(filepath.Join(f.to, name), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer out.Close()
	if f.have[name] == nil {
		f.have[name], f.held[name] = map[int64]int64{}, map[int64]int{}
	}
	if len(f.have[name])%5 == 4 {
		for at, n := range f.have[name] {
			if f.held[name][at] == 0 {
				delete(f.have[name], at)
				if _, err := out.WriteAt(make([]byte, n), at); err != nil {
					return err
				}
			}
		}
	}
	f.have[name][off] = int64(len(dst))
	_, err = out.WriteAt(dst, off)
	return err
}

// A checkpoint that fills on demand gives the frozen result, whatever is here at the
// moment and whatever is dropped meanwhile.
func TestOneHashWhileACheckpointFills(t *testing.T) {
	whole := openWorld(t, "tiny-a")
	dir := t.TempDir()
	for _, path := range filesBelow(whole.ck.Dir()) {
		copyFile(t, path, filepath.Join(dir, filepath.Base(path)))
	}
	b := make([]byte, whole.ck.ExpertLayout().ExpertBytes)
	for l := whole.ck.Config().FirstDense; l < whole.ck.Config().Layers; l++ {
		for id := range whole.ck.Config().Experts {
			x := whole.ck.Expert(l, id)
			f, err := os.OpenFile(filepath.Join(dir, whole.ck.Shard(x.File)), os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt(b, x.Offset); err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
	}
	f := &sparse{from: whole.ck.Dir(), to: dir, have: map[string]map[int64]int64{}, held: map[string]map[int64]int{}}
	ck, err := checkpoint.OpenFilling(dir, f)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	w := &world{ck: ck, spine: whole.spine, cases: whole.cases}
	s := w.newSource(t, drive.Options{Filling: dir, MaxFiles: 2}, Options{Warn: func(string) {}})
	for range 3 {
		sameAsFrozen(t, w, s, "len17", 5, nil)
	}
	total := s.Counters().Read / s.n
	if n := f.reads.Load(); n == 0 || n == total {
		t.Errorf("%d of %d reads were on demand", n, total)
	}
	f.mu.Lock()
	for name, held := range f.held {
		for off, n := range held {
			if n != 0 {
				t.Errorf("%s: byte %d is held %d times", name, off, n)
			}
		}
	}
	f.mu.Unlock()
	// Hints bring nothing over the network.
	clear(f.have)
	before := f.reads.Load()
	s.Hint(2, []int32{1, 2, 3})
	if f.reads.Load() != before || len(s.ahead.loads) != 0 {
		t.Error("a hint was fetched")
	}
	f.fail.Store(true)
	err = s.Stream(t.Context(), 2, []int32{3, 7}, func(int, *k3.Expert) error { t.Error("used"); return nil }, nil)
	if err == nil || !strings.Contains(err.Error(), "the network is down") || !strings.Contains(err.Error(), "layer 2 expert ") || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v", err)
	}
	f.fail.Store(false)
	sameAsFrozen(t, w, s, "len5", 5, nil)
}

var _ checkpoint.Filler = (*hub.Depot)(nil)
