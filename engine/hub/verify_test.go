package hub

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"deltafin/engine/hub/hubtest"
)

// invert changes bytes of a file and leaves its size, and the time of its last
// change, as they were: what a failing drive does.
func invert(t *testing.T, path string, at ...int64) {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	for _, off := range at {
		b := []byte{0}
		_, err := f.ReadAt(b, off)
		must(t, err)
		b[0] ^= 0xff
		_, err = f.WriteAt(b, off)
		must(t, err)
	}
	must(t, f.Close())
	must(t, os.Chtimes(path, info.ModTime(), info.ModTime()))
}

// large is a repository with one file of several chunks.
func large(t *testing.T) (dir string, size int64) {
	dir = small(t)
	b := make([]byte, 3*chunkBytes+777)
	rand.NewChaCha8([32]byte{9}).Read(b)
	must(t, os.WriteFile(filepath.Join(dir, "large.bin"), b, 0o644))
	return dir, int64(len(b))
}

func TestVerifyNamesTheBadRangeAndRepairFetchesOnlyThat(t *testing.T) {
	served, size := large(t)
	h := hubtest.New(t, served)
	o := quick(h, t.TempDir())
	o.PartBytes = chunkBytes
	must(t, Fetch(t.Context(), o))
	path := filepath.Join(o.Dir, "large.bin")

	r, err := Verify(t.Context(), o.Dir, VerifyOptions{Deep: true})
	must(t, err)
	if !r.OK() || r.Read != r.Bytes || r.Files != 5 || len(r.Extra) > 0 {
		t.Errorf("a sound store: %+v", r)
	}

	invert(t, path, chunkBytes+5, chunkBytes+99, size-1)
	r, err = Verify(t.Context(), o.Dir, VerifyOptions{})
	must(t, err)
	if !r.OK() || r.Read != 0 {
		t.Errorf("names and sizes are right, and nothing was to be read: %+v", r)
	}
	r, err = Verify(t.Context(), o.Dir, VerifyOptions{Sample: 1})
	must(t, err)
	want := []Damage{
		{"large.bin", chunkBytes, 2 * chunkBytes, "its digest is wrong"},
		{"large.bin", 3 * chunkBytes, size, "its digest is wrong"},
	}
	if d := cmp.Diff(want, r.Bad); d != "" {
		t.Error(d)
	}

	h.Forget()
	r, err = Verify(t.Context(), o.Dir, VerifyOptions{Deep: true, Repair: &o})
	must(t, err)
	if d := cmp.Diff(want, r.Repaired); d != "" || !r.OK() {
		t.Errorf("%s%+v", d, r)
	}
	var asked int64
	for _, q := range h.Requests() {
		if q.Kind == hubtest.Content {
			asked += q.End - q.Off
		}
	}
	if asked != chunkBytes+777 {
		t.Errorf("%d bytes were fetched for two bad chunks of %d", asked, chunkBytes+777)
	}
	complete(t, served, o.Dir)
}

func TestVerifyFindsEachKindOfDamage(t *testing.T) {
	served := small(t)
	h := hubtest.New(t, served)
	for _, c := range []struct {
		name   string
		damage func(dir string) error
		want   string
	}{
		{"missing", func(d string) error { return os.Remove(filepath.Join(d, "small.json")) }, "small.json: is missing"},
		{"short", func(d string) error { return os.Truncate(filepath.Join(d, "sub", "mid.bin"), 69_999) }, "sub/mid.bin: is 69999 bytes long, expected 70000"},
		{"a directory", func(d string) error {
			return errors.Join(os.Remove(filepath.Join(d, "empty")), os.Mkdir(filepath.Join(d, "empty"), 0o755))
		}, "empty: is not a regular file"},
		{"a dangling link", func(d string) error {
			return errors.Join(os.Remove(filepath.Join(d, "small.json")), os.Symlink("/nowhere/small.json", filepath.Join(d, "small.json")))
		}, "small.json: is a link to"},
		{"wrong bytes", func(d string) error { invert(t, filepath.Join(d, "big.safetensors"), 0); return nil }, "big.safetensors: bytes 0 to 300001: its digest is wrong"},
	} {
		o := quick(h, t.TempDir())
		must(t, Fetch(t.Context(), o))
		must(t, c.damage(o.Dir))
		r, err := Verify(t.Context(), o.Dir, VerifyOptions{Deep: true})
		must(t, err)
		if len(r.Bad) != 1 || !strings.HasPrefix(r.Bad[0].String(), c.want) {
			t.Errorf("%s: %v, want %s", c.name, r.Bad, c.want)
			continue
		}
		if c.name == "a directory" {
			must(t, os.Remove(filepath.Join(o.Dir, "empty")))
		}
		r, err = Verify(t.Context(), o.Dir, VerifyOptions{Deep: true, Repair: &o})
		must(t, err)
		if !r.OK() || len(r.Repaired) != 1 {
			t.Errorf("%s: after the repair %+v", c.name, r)
		}
		complete(t, served, o.Dir)
	}
}

func TestVerifySaysWhatIsUnfinishedTouchedOrForeign(t *testing.T) {
	served := small(t)
	h := hubtest.New(t, served)
	o := quick(h, t.TempDir())
	h.SetFault(func(r hubtest.Request) *hubtest.Fault {
		if r.File == "big.safetensors" && r.Off > 150_000 {
			return &hubtest.Fault{Status: 404}
		}
		return nil
	})
	if Fetch(t.Context(), o) == nil {
		t.Fatal("no error")
	}
	r, err := Verify(t.Context(), o.Dir, VerifyOptions{})
	must(t, err)
	if len(r.Bad) == 0 || !strings.Contains(r.Bad[0].String(), "of 300001 bytes have arrived") {
		t.Errorf("%v", r.Bad)
	}
	h.SetFault(nil)
	must(t, Fetch(t.Context(), o))
	path := filepath.Join(o.Dir, "sub", "mid.bin")
	b, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, b, 0o644))
	must(t, os.WriteFile(filepath.Join(o.Dir, "notes.txt"), nil, 0o644))
	r, err = Verify(t.Context(), o.Dir, VerifyOptions{})
	must(t, err)
	if cmp.Diff(r.Touched, []string{"sub/mid.bin"}) != "" || cmp.Diff(r.Extra, []string{"notes.txt"}) != "" || !r.OK() {
		t.Errorf("%+v", r)
	}
	if _, err := Verify(t.Context(), t.TempDir(), VerifyOptions{}); err == nil || !strings.Contains(err.Error(), "deltafin fetch --full") {
		t.Errorf("a directory without a record: %v", err)
	}
}

func TestVerifyOpensTheCheckpoint(t *testing.T) {
	h := hubtest.New(t, nano)
	o := quick(h, t.TempDir())
	o.PartBytes = 1 << 20
	must(t, Fetch(t.Context(), o))
	r, err := Verify(t.Context(), o.Dir, VerifyOptions{})
	must(t, err)
	if !r.OK() {
		t.Errorf("%v", r.Bad)
	}
	// A config of another model, entered as if it had been published like that.
	s, err := openStore(o.Dir, nil)
	must(t, err)
	path := filepath.Join(o.Dir, "config.json")
	b, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, []byte(strings.Replace(string(b), `"hidden_size": `, `"hidden_size": 1`, 1)), 0o644))
	for i := range s.rec.Files {
		if s.rec.Files[i].Name == "config.json" {
			s.rec.Files[i].Size++
		}
	}
	must(t, s.save())
	r, err = Verify(t.Context(), o.Dir, VerifyOptions{})
	must(t, err)
	if len(r.Bad) != 1 || r.Bad[0].File != "" {
		t.Errorf("%v", r.Bad)
	}
}

func TestInterruptedVerificationGoesOn(t *testing.T) {
	served, _ := large(t)
	h := hubtest.New(t, served)
	o := quick(h, t.TempDir())
	o.PartBytes = chunkBytes
	must(t, Fetch(t.Context(), o))
	path := filepath.Join(o.Dir, "large.bin")
	ctx, cancel := context.WithCancel(t.Context())
	invert(t, path, 2*chunkBytes+1)
	_, err := Verify(ctx, o.Dir, VerifyOptions{Deep: true, Workers: 1, Log: func(string) { cancel() }})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v", err)
	}
	r, err := Verify(t.Context(), o.Dir, VerifyOptions{Deep: true})
	must(t, err)
	if r.Resumed < 2*chunkBytes || r.Resumed+r.Read != r.Bytes || len(r.Bad) != 1 {
		t.Errorf("%+v", r)
	}
	if exists(filepath.Join(o.Dir, verifyName)) {
		t.Error("a finished verification left its state")
	}
}
