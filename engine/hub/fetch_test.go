package hub

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/hub/hubtest"
)

const nano = "../../golden/nano/model"

// small makes a directory of a few files, one of them large enough for many parts.
func small(t testing.TB) string {
	dir := t.TempDir()
	rng := rand.NewChaCha8([32]byte{7})
	for name, n := range map[string]int{"big.safetensors": 300_001, "sub/mid.bin": 70_000, "small.json": 2_000, "empty": 0} {
		b := make([]byte, n)
		rng.Read(b)
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// quick are options for a test server: little patience, small parts.
func quick(h *hubtest.Hub, dir string) Options {
	return Options{
		Dir: dir, Repo: h.Repo, Revision: h.Revision, Sources: []string{h.URL},
		Connections: 3, PartBytes: 32 << 10, Stall: 5 * time.Second, Retries: 3, Backoff: time.Millisecond,
	}
}

func files(t testing.TB, dir string) map[string][]byte {
	t.Helper()
	m := map[string][]byte{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		m[filepath.ToSlash(rel)], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// complete demands that a store is the served directory to the byte, and nothing else.
func complete(t testing.TB, served, dir string) {
	t.Helper()
	want, got := files(t, served), files(t, dir)
	for name := range want {
		if !bytes.Equal(want[name], got[name]) {
			t.Errorf("%s is not what was served", name)
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok && name != recordName && name != lockName {
			t.Errorf("%s was left behind", name)
		}
	}
	s, err := openStore(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range s.rec.Files {
		if !s.whole(&s.rec.Files[i]) {
			t.Errorf("the record does not say that %s is whole", s.rec.Files[i].Name)
		}
	}
}

// sound demands that no file of an unfinished store has its name and wrong bytes.
func sound(t testing.TB, served, dir string) {
	t.Helper()
	want := files(t, served)
	for name, b := range files(t, dir) {
		if w, ok := want[name]; ok && !bytes.Equal(w, b) {
			t.Errorf("%s has its name and is not what was served", name)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestFetchedModelIsTheServedOne(t *testing.T) {
	h := hubtest.New(t, nano)
	h.PageSize = 5
	dir := filepath.Join(t.TempDir(), "new")
	o := quick(h, dir)
	o.PartBytes = 300 << 10
	o.Revision = "main"
	var last Progress
	o.Progress = func(p Progress) { last = p }
	var plan *Plan
	o.Confirm = func(p *Plan) error {
		plan = p
		for _, r := range h.Requests() {
			if r.Kind != hubtest.API {
				t.Errorf("%s was fetched before the plan was confirmed", r.File)
			}
		}
		return nil
	}
	must(t, Fetch(t.Context(), o))
	complete(t, nano, dir)
	if plan.Need != plan.Bytes || plan.Revision != h.Revision || len(plan.Drives) != 1 {
		t.Errorf("plan %+v", plan)
	}
	if last.Done != plan.Bytes || last.Total != plan.Bytes || last.FilesDone != plan.Files || len(last.Files) != 0 {
		t.Errorf("progress ends with %+v", last)
	}
	ck, err := checkpoint.Open(dir)
	must(t, err)
	ck.Close()

	// What is there is not fetched again; not even the list is.
	h.Forget()
	o.Revision = ""
	must(t, Fetch(t.Context(), o))
	if n := len(h.Requests()); n != 0 {
		t.Errorf("a complete store makes %d requests", n)
	}
	p, err := Preview(t.Context(), o)
	must(t, err)
	if p.Have != p.Bytes || p.Need != 0 {
		t.Errorf("plan of a complete store is %+v", p)
	}
}

func TestRefusedPlanFetchesNothing(t *testing.T) {
	h := hubtest.New(t, small(t))
	o := quick(h, t.TempDir())
	no := errors.New("no")
	o.Confirm = func(*Plan) error { return no }
	if err := Fetch(t.Context(), o); !errors.Is(err, no) {
		t.Errorf("error %v", err)
	}
	o.Confirm = nil
	o.hooks = &hooks{free: func(string) (int64, error) { return 300_000, nil }}
	if err := Fetch(t.Context(), o); err == nil || !strings.Contains(err.Error(), "make room") {
		t.Errorf("error %v", err)
	}
	for _, r := range h.Requests() {
		if r.Kind != hubtest.API {
			t.Errorf("%s was fetched", r.File)
		}
	}
}

// Each fault ends in a right store or in one clear line; and after a line, the same
// command without the fault completes the store.
func TestFaults(t *testing.T) {
	const big = "big.safetensors"
	// first applies a fault to the first n requests of a kind, always to all.
	first := func(kind hubtest.Kind, n int, x hubtest.Fault) func(hubtest.Request) *hubtest.Fault {
		return func(r hubtest.Request) *hubtest.Fault {
			if r.Kind == kind && r.N < n {
				return &x
			}
			return nil
		}
	}
	always := func(kind hubtest.Kind, x hubtest.Fault) func(hubtest.Request) *hubtest.Fault {
		return first(kind, 1<<30, x)
	}
	at := func(kind hubtest.Kind, off int64, x hubtest.Fault) func(hubtest.Request) *hubtest.Fault {
		return func(r hubtest.Request) *hubtest.Fault {
			if r.Kind == kind && r.File == big && r.Off <= off && off < r.End {
				return &x
			}
			return nil
		}
	}
	for _, c := range []struct {
		name   string
		fault  func(hubtest.Request) *hubtest.Fault
		mirror bool   // the plain server is a second source
		want   string // in the error; "" means that all is well
	}{
		{"list 500 once", first(hubtest.API, 1, hubtest.Fault{Status: 500}), false, ""},
		{"list 500 always", always(hubtest.API, hubtest.Fault{Status: 500}), false, "answers 500"},
		{"list 404", always(hubtest.API, hubtest.Fault{Status: 404}), false, "check the names of the repository"},
		{"list 401", always(hubtest.API, hubtest.Fault{Status: 401}), false, "HF_TOKEN"},
		{"list loops", always(hubtest.API, hubtest.Fault{Loop: true}), false, "redirects without end"},
		{"hub 401", always(hubtest.Resolve, hubtest.Fault{Status: 401}), false, "HF_TOKEN"},
		{"hub 403", always(hubtest.Resolve, hubtest.Fault{Status: 403}), false, "licence"},
		{"hub 404", always(hubtest.Resolve, hubtest.Fault{Status: 404}), false, "answers 404"},
		{"hub 404, mirror", always(hubtest.Resolve, hubtest.Fault{Status: 404}), true, ""},
		{"hub loops", always(hubtest.Resolve, hubtest.Fault{Loop: true}), false, "redirects without end"},
		{"hub loops, mirror", always(hubtest.Resolve, hubtest.Fault{Loop: true}), true, ""},
		{"content loops", always(hubtest.Content, hubtest.Fault{Loop: true}), false, "redirects without end"},
		{"content 403 once, a link that was used up", first(hubtest.Content, 2, hubtest.Fault{Status: 403}), true, ""},
		{"content 416", always(hubtest.Content, hubtest.Fault{Status: 416}), false, "shorter than the one that was pinned"},
		{"content 416, mirror", always(hubtest.Content, hubtest.Fault{Status: 416}), true, ""},
		{"content 429", first(hubtest.Content, 3, hubtest.Fault{Status: 429, RetryAfter: "0"}), false, ""},
		{"content 429 always", always(hubtest.Content, hubtest.Fault{Status: 429, RetryAfter: "0"}), false, "answers 429"},
		{"content 500", first(hubtest.Content, 3, hubtest.Fault{Status: 500}), false, ""},
		{"content 503", first(hubtest.Content, 3, hubtest.Fault{Status: 503}), false, ""},
		{"content 503 always, mirror", always(hubtest.Content, hubtest.Fault{Status: 503}), true, ""},
		{"nothing, then cut", always(hubtest.Content, hubtest.Fault{Cut: 1}), false, "without a byte"},
		{"truncated bodies", always(hubtest.Content, hubtest.Fault{Cut: 20_001}), false, ""},
		{"reset bodies", always(hubtest.Content, hubtest.Fault{Cut: 20_001, Reset: true}), false, ""},
		{"a flipped byte once", first(hubtest.Content, 8, hubtest.Fault{Flip: 100_001}), false, ""},
		{"a flipped byte always", at(hubtest.Content, 100_000, hubtest.Fault{Flip: 100_001}), false, "wrong digest"},
		{"a flipped byte always, mirror", at(hubtest.Content, 100_000, hubtest.Fault{Flip: 100_001}), true, ""},
		{"no ranges", always(hubtest.Content, hubtest.Fault{NoRange: true}), false, ""},
		{"no ranges and cuts", first(hubtest.Content, 6, hubtest.Fault{NoRange: true, Cut: 150_000}), false, ""},
		{"no ranges for some", func(r hubtest.Request) *hubtest.Fault { return &hubtest.Fault{NoRange: r.N%3 == 1} }, false, ""},
		{"another range", always(hubtest.Content, hubtest.Fault{Shift: true}), false, "another range"},
		{"another range, mirror", always(hubtest.Content, hubtest.Fault{Shift: true}), true, ""},
		{"compressed", always(hubtest.Content, hubtest.Fault{Gzip: true}), false, "compresses"},
		{"another size", always(hubtest.Content, hubtest.Fault{Size: 400_000}), false, "it was changed"},
		{"another digest", always(hubtest.Resolve, hubtest.Fault{Digest: strings.Repeat("ab", 32)}), false, "it was changed"},
		{"another git blob", always(hubtest.Resolve, hubtest.Fault{Digest: strings.Repeat("ab", 20)}), false, "it was changed"},
		{"another commit", always(hubtest.Resolve, hubtest.Fault{Commit: strings.Repeat("ab", 20)}), false, "it was changed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			served := small(t)
			h := hubtest.New(t, served)
			h.SetFault(c.fault)
			o := quick(h, t.TempDir())
			if c.mirror {
				o.Sources = append(o.Sources, h.PlainURL)
			}
			err := Fetch(t.Context(), o)
			switch {
			case c.want == "" && err != nil:
				t.Fatal(err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Fatalf("error %v, want one with %q", err, c.want)
			}
			if err != nil && (strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "Signature") || len(err.Error()) > 600) {
				t.Errorf("not one clear line: %v", err)
			}
			sound(t, served, o.Dir)
			h.SetFault(nil)
			must(t, Fetch(t.Context(), o))
			complete(t, served, o.Dir)
		})
	}
}

func TestStalledConnectionIsGivenUp(t *testing.T) {
	served := small(t)
	h := hubtest.New(t, served)
	h.SetFault(func(r hubtest.Request) *hubtest.Fault {
		if r.Kind == hubtest.Content && r.N < 3 {
			return &hubtest.Fault{Stall: true, Cut: 1000}
		}
		return nil
	})
	o := quick(h, t.TempDir())
	o.Stall = 150 * time.Millisecond
	var lines atomic.Int32
	o.Log = func(line string) {
		if strings.Contains(line, "no bytes for 150ms") {
			lines.Add(1)
		}
	}
	must(t, Fetch(t.Context(), o))
	complete(t, served, o.Dir)
	if lines.Load() != 3 {
		t.Errorf("%d stalls were noticed, want 3", lines.Load())
	}
}

// 200 connections break off at random points; no byte is asked for twice but for
// those of a broken request that had not arrived.
func TestTwoHundredCuts(t *testing.T) {
	served := t.TempDir()
	b := make([]byte, 4_000_000)
	rand.NewChaCha8([32]byte{3}).Read(b)
	must(t, os.WriteFile(filepath.Join(served, "x.safetensors"), b, 0o644))
	h := hubtest.New(t, served)
	var mu sync.Mutex
	r := rand.New(rand.NewPCG(5, 6))
	cuts := 0
	h.SetFault(func(q hubtest.Request) *hubtest.Fault {
		mu.Lock()
		defer mu.Unlock()
		if q.Kind != hubtest.Content || cuts == 200 {
			return nil
		}
		cuts++
		return &hubtest.Fault{Cut: 1 + r.Int64N(q.End-q.Off+1), Reset: cuts%4 == 0}
	})
	o := quick(h, t.TempDir())
	o.PartBytes, o.Retries = 64<<10, 30
	must(t, Fetch(t.Context(), o))
	complete(t, served, o.Dir)
	if cuts != 200 {
		t.Errorf("only %d cuts", cuts)
	}
}

func TestTokenStaysAtTheHub(t *testing.T) {
	h := hubtest.New(t, small(t))
	o := quick(h, t.TempDir())
	const token = "hf_very_secret"
	o.Token = token + "\n" // as files have it
	o.Sources = append(o.Sources, h.PlainURL)
	var said strings.Builder
	var mu sync.Mutex
	o.Log = func(line string) {
		mu.Lock()
		defer mu.Unlock()
		said.WriteString(line)
	}
	h.SetFault(func(r hubtest.Request) *hubtest.Fault {
		if r.Kind == hubtest.Resolve && r.File != "big.safetensors" {
			return &hubtest.Fault{Status: 403}
		}
		return nil
	})
	must(t, Fetch(t.Context(), o))
	seen := map[hubtest.Kind]int{}
	for _, r := range h.Requests() {
		seen[r.Kind]++
		want := ""
		if r.Kind == hubtest.API || r.Kind == hubtest.Resolve {
			want = "Bearer " + token
		}
		if r.Token != want {
			t.Errorf("a request of kind %d carries %q", r.Kind, r.Token)
		}
	}
	if seen[hubtest.Content] == 0 || seen[hubtest.Plain] == 0 || seen[hubtest.Resolve] == 0 {
		t.Errorf("requests by kind: %v", seen)
	}
	for name, b := range files(t, o.Dir) {
		if bytes.Contains(b, []byte(token)) {
			t.Errorf("%s has the token in it", name)
		}
	}
	if strings.Contains(said.String(), token) {
		t.Error("the token was printed")
	}
	o.Token = "hf_very secret"
	if err := Fetch(t.Context(), o); err == nil || !strings.Contains(err.Error(), "HF_TOKEN") || strings.Contains(err.Error(), "secret") {
		t.Errorf("a token that is none: %v", err)
	}
}

func TestLinkOfTheContentServerIsReusedAndRenewed(t *testing.T) {
	served := small(t)
	h := hubtest.New(t, served)
	o := quick(h, t.TempDir())
	o.Connections = 1
	h.SetFault(func(r hubtest.Request) *hubtest.Fault {
		if r.Kind == hubtest.Content && r.N == 4 {
			h.ExpireLinks()
		}
		return nil
	})
	must(t, Fetch(t.Context(), o))
	complete(t, served, o.Dir)
	n := 0
	for _, r := range h.Requests() {
		if r.Kind == hubtest.Resolve && r.File == "big.safetensors" {
			n++
		}
	}
	if n != 2 {
		t.Errorf("the hub was asked for the file %d times, want 2: at first and when the link had expired", n)
	}
}

func TestResumeFetchesOnlyTheRest(t *testing.T) {
	served := small(t)
	h := hubtest.New(t, served)
	o := quick(h, t.TempDir())
	o.Connections = 1
	o.Retries = 1
	h.SetFault(func(r hubtest.Request) *hubtest.Fault {
		if r.File == "big.safetensors" && r.Off >= 200_000 {
			return &hubtest.Fault{Status: 500}
		}
		return nil
	})
	if err := Fetch(t.Context(), o); err == nil {
		t.Fatal("no error")
	}
	h.SetFault(nil)
	h.Forget()
	p, err := Preview(t.Context(), o)
	must(t, err)
	if p.Arrived < 190_000 || p.Need != p.Bytes-p.Have-p.Arrived {
		t.Errorf("plan %+v", p)
	}
	must(t, Fetch(t.Context(), o))
	complete(t, served, o.Dir)
	var asked int64
	for _, r := range h.Requests() {
		if r.Kind == hubtest.Content || r.Kind == hubtest.Resolve && r.File == "small.json" {
			asked += r.End - r.Off
		}
	}
	if asked != p.Need {
		t.Errorf("%d bytes were asked for, %d were missing", asked, p.Need)
	}
}

// Power failed: the journal speaks of bytes that never reached the drive.
func TestLostBytesAreFoundAndFetchedAlone(t *testing.T) {
	served := small(t)
	h := hubtest.New(t, served)
	o := quick(h, t.TempDir())
	h.SetFault(func(r hubtest.Request) *hubtest.Fault {
		if r.File != "big.safetensors" {
			return &hubtest.Fault{Status: 404}
		}
		return nil
	})
	if err := Fetch(t.Context(), o); err == nil {
		t.Fatal("no error")
	}
	h.SetFault(nil)
	whole := files(t, served)["big.safetensors"]
	sf := fileOf(t, h, "big.safetensors")
	path := filepath.Join(o.Dir, sf.Name)
	os.Remove(path)
	must(t, os.WriteFile(path+partSuffix, make([]byte, 290_000), 0o644))
	os.Remove(path + journalSuffix)
	j, err := openJournal(path+journalSuffix, sf, sf.Size)
	must(t, err)
	part, err := os.OpenFile(path+partSuffix, os.O_RDWR, 0)
	must(t, err)
	for off := int64(0); off < sf.Size; off += 32 << 10 {
		x := span{off, min(sf.Size, off+32<<10)}
		must(t, j.add(record{span: x, crc: crc32.Checksum(whole[x.off:x.end], castagnoli), sum: true}))
		if off != 96<<10 && x.end < 290_000 {
			_, err := part.WriteAt(whole[x.off:x.end], x.off)
			must(t, err)
		}
	}
	j.close()
	part.Close()
	h.Forget()
	must(t, Fetch(t.Context(), o))
	complete(t, served, o.Dir)
	var asked int64
	for _, r := range h.Requests() {
		if r.Kind == hubtest.Content && r.File == "big.safetensors" {
			asked += r.End - r.Off
		}
	}
	if asked == 0 || asked > 3*32<<10 {
		t.Errorf("%d bytes were fetched for a kilobyte and an end that were lost", asked)
	}
}

// fileOf is what the hub lists of a file.
func fileOf(t *testing.T, h *hubtest.Hub, name string) *File {
	t.Helper()
	o := quick(h, t.TempDir())
	c, err := newClient(&o)
	must(t, err)
	inv, err := c.list(t.Context(), 1, time.Millisecond, nil)
	must(t, err)
	for i := range inv.Files {
		if inv.Files[i].Name == name {
			return &inv.Files[i]
		}
	}
	t.Fatalf("the hub has no %s", name)
	return nil
}

func TestWrongFileIsReplacedAndRightOneAdopted(t *testing.T) {
	served := small(t)
	h := hubtest.New(t, served)
	o := quick(h, t.TempDir())
	want := files(t, served)
	must(t, os.WriteFile(filepath.Join(o.Dir, "small.json"), want["small.json"], 0o644))
	wrong := bytes.Clone(want["big.safetensors"])
	wrong[9] ^= 1
	must(t, os.WriteFile(filepath.Join(o.Dir, "big.safetensors"), wrong, 0o644))
	must(t, Fetch(t.Context(), o))
	complete(t, served, o.Dir)
	for _, r := range h.Requests() {
		if r.File == "small.json" {
			t.Error("a right file was fetched again")
		}
	}

	// A file that was touched is read again before it is believed.
	path := filepath.Join(o.Dir, "big.safetensors")
	must(t, os.WriteFile(path, wrong, 0o644))
	must(t, Fetch(t.Context(), o))
	complete(t, served, o.Dir)
}

func TestDiskFullIsSaidAndResumed(t *testing.T) {
	for _, where := range []int64{0, 50_000, 200_000} {
		served := small(t)
		h := hubtest.New(t, served)
		o := quick(h, t.TempDir())
		var written atomic.Int64
		o.hooks = &hooks{write: func(path string, off int64, n int) error {
			if written.Add(int64(n)) > where {
				return &fs.PathError{Op: "write", Path: path, Err: syscall.ENOSPC}
			}
			return nil
		}}
		err := Fetch(t.Context(), o)
		if err == nil || !strings.Contains(err.Error(), "make room and run the same command again") {
			t.Fatalf("error %v", err)
		}
		sound(t, served, o.Dir)
		o.hooks = nil
		must(t, Fetch(t.Context(), o))
		complete(t, served, o.Dir)
	}
}

func TestDirectoryThatCannotBeWrittenTo(t *testing.T) {
	h := hubtest.New(t, small(t))
	dir := t.TempDir()
	if os.Geteuid() == 0 {
		dir = "/sys/kernel" // even root cannot
	} else {
		must(t, os.Chmod(dir, 0o555))
	}
	o := quick(h, filepath.Join(dir, "model"))
	if runtime.GOOS != "linux" && os.Geteuid() == 0 {
		t.Skip("NOT RUN: root can write everywhere")
	}
	if err := Fetch(t.Context(), o); err == nil || !strings.Contains(err.Error(), "can be written to") {
		t.Errorf("error %v", err)
	}
	if n := len(h.Requests()); n != 0 {
		t.Errorf("%d requests were made for nothing", n)
	}
}

func TestSecondFetchIsRefused(t *testing.T) {
	h := hubtest.New(t, small(t))
	o := quick(h, t.TempDir())
	o.Confirm = func(*Plan) error {
		p := o
		p.Confirm = nil
		err := Fetch(t.Context(), p)
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("(process %d)", os.Getpid())) {
			t.Errorf("error %v", err)
		}
		return nil
	}
	must(t, Fetch(t.Context(), o))
}

func TestSpreadModelOpensAndIsShared(t *testing.T) {
	if !canSpread {
		t.Skip("NOT RUN: no symbolic links here")
	}
	h := hubtest.New(t, nano)
	root := t.TempDir()
	o := quick(h, filepath.Join(root, "main"))
	a, b := filepath.Join(root, "a"), filepath.Join(root, "b")
	o.Spread = []Target{{Dir: a, Weight: 2}, {Dir: b, Weight: 1}}
	o.PartBytes = 1 << 20
	o.hooks = &hooks{drive: func(dir string) string { return dir }}
	must(t, Fetch(t.Context(), o))
	size := func(dir string) (n int64) {
		for name, b := range files(t, dir) {
			if strings.HasSuffix(name, ".safetensors") {
				n += int64(len(b))
			}
		}
		return n
	}
	if r := float64(size(a)) / float64(size(b)); r < 1.5 || r > 2.6 {
		t.Errorf("%d and %d bytes, want 2 to 1", size(a), size(b))
	}
	for name, b := range files(t, nano) { // through the links
		if got, err := os.ReadFile(filepath.Join(o.Dir, name)); err != nil || !bytes.Equal(got, b) {
			t.Errorf("%s: %v or other bytes", name, err)
		}
	}
	ck, err := checkpoint.Open(o.Dir)
	must(t, err)
	ck.Close()

	// One drive loses a file: only that is fetched, to where it was.
	name := slices.Sorted(func(yield func(string) bool) {
		for n := range files(t, b) {
			if strings.HasSuffix(n, ".safetensors") && !yield(n) {
				return
			}
		}
	})[0]
	must(t, os.Remove(filepath.Join(b, name)))
	h.Forget()
	o.Spread = nil // the store remembers
	must(t, Fetch(t.Context(), o))
	for _, r := range h.Requests() {
		if r.File != name {
			t.Errorf("%s was fetched too", r.File)
		}
	}
	if _, err := os.Stat(filepath.Join(b, name)); err != nil {
		t.Error(err)
	}
}

func TestBandwidthLimitHolds(t *testing.T) {
	h := hubtest.New(t, small(t))
	o := quick(h, t.TempDir())
	o.BytesPerSecond = 1_000_000
	began := time.Now()
	must(t, Fetch(t.Context(), o))
	if d := time.Since(began); d < 350*time.Millisecond {
		t.Errorf("372 kB at 1 MB/s took %v", d)
	}
}

// A store made by this program can be served as plain files and is then a complete
// source, list and all.
func TestStoreServesAsASource(t *testing.T) {
	served := small(t)
	h := hubtest.New(t, served)
	first := quick(h, t.TempDir())
	must(t, Fetch(t.Context(), first))
	second := hubtest.New(t, first.Dir)
	o := quick(second, t.TempDir())
	o.Repo, o.Revision = h.Repo, h.Revision
	o.Sources = []string{second.PlainURL}
	must(t, Fetch(t.Context(), o))
	complete(t, served, o.Dir)
	o.Repo = "other/model"
	o.Dir = t.TempDir()
	if err := Fetch(t.Context(), o); err == nil || !strings.Contains(err.Error(), "holds "+h.Repo) {
		t.Errorf("error %v", err)
	}
}

func TestCancelledFetchEndsAndResumes(t *testing.T) {
	served := small(t)
	h := hubtest.New(t, served)
	o := quick(h, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	h.SetFault(func(r hubtest.Request) *hubtest.Fault {
		if r.Kind == hubtest.Content && r.N == 4 {
			cancel()
			return &hubtest.Fault{Stall: true}
		}
		return nil
	})
	if err := Fetch(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	sound(t, served, o.Dir)
	must(t, Fetch(t.Context(), o))
	complete(t, served, o.Dir)
}

func TestHubThatServesAnotherModelIsRefused(t *testing.T) {
	h := hubtest.New(t, small(t))
	o := quick(h, t.TempDir())
	o.Inventory = &Inventory{Repo: h.Repo, Revision: h.Revision, Files: []File{{Name: "big.safetensors", Size: 300_001}, {Name: "empty"}}}
	p, err := Preview(t.Context(), o)
	must(t, err)
	if want := []string{"small.json", "sub/mid.bin"}; !slices.Equal(p.Extra, want) {
		t.Errorf("extra files are %v, want %v", p.Extra, want)
	}
	o.Inventory.Files[0].Size++
	if err := Fetch(t.Context(), o); err == nil || !strings.Contains(err.Error(), "serves another model under this name") {
		t.Errorf("error %v", err)
	}
	if exists(filepath.Join(o.Dir, recordName)) {
		t.Error("a refused model was entered")
	}
}
