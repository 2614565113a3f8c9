package synth

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"deltafin/engine/checkpoint"
)

// small is a model of a few files and about 100 kB.
func small() Params {
	p, _ := Preset("tiny")
	p.Hidden, p.Layers, p.Vocab, p.Intermediate = 64, 3, 256, 64
	p.Experts, p.MoEInter, p.Latent = 4, 32, 32
	return p
}

// written writes p into a new directory.
func written(t *testing.T, p Params) string {
	t.Helper()
	dir := t.TempDir()
	must(t, Write(context.Background(), dir, p, nil))
	return dir
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("got the error %v, want one with %q", err, part)
		}
	}
	if err != nil && strings.ContainsAny(err.Error(), "\n") {
		t.Errorf("the error has more than one line: %v", err)
	}
}

// digest is the SHA-256 of the names and contents of all files of a directory, and
// their bytes.
func digest(t *testing.T, dir string) (string, int64) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	h := sha256.New()
	var size int64
	for _, e := range entries {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		must(t, err)
		fmt.Fprintf(h, "%s\n", e.Name())
		n, err := io.Copy(h, f)
		must(t, err)
		size += n
		f.Close()
	}
	return hex.EncodeToString(h.Sum(nil)), size
}

func opens(t *testing.T, dir string) {
	t.Helper()
	c, err := checkpoint.Open(dir)
	must(t, err)
	must(t, c.Close())
}

func TestTheSmallPresetsOpenHaveTheSizeForetoldAndTheSameBytesEverywhere(t *testing.T) {
	for name, want := range map[string]string{
		"tiny":       "b7ab09af37f961798959ff6c12c5cb89919c4772abbf30a0eebe886a021d04db",
		"nano-shape": "47fcd03dcff917e979d42a9d4e605fd790acda6886f75b64a73d7d981a324647",
	} {
		p, err := Preset(name)
		must(t, err)
		size, err := Size(p)
		must(t, err)
		dir := written(t, p)
		opens(t, dir)
		got, bytes := digest(t, dir)
		if bytes != size {
			t.Errorf("%s: %d bytes were written and %d foretold", name, bytes, size)
		}
		if got != want {
			t.Errorf("%s: digest %s, want %s: if the weights changed on purpose, raise generator", name, got, want)
		}
	}
}

func TestBytesDoNotDependOnWorkersAndDependOnSeed(t *testing.T) {
	p := small()
	p.Hidden = 800 // tensors that begin and end in the middle of a job
	p.Vocab = 8000
	want, _ := digest(t, written(t, p))
	for _, workers := range []int{1, 2, 5} {
		w := writer{dir: t.TempDir(), workers: workers}
		must(t, w.write(context.Background(), p))
		if got, _ := digest(t, w.dir); got != want {
			t.Errorf("%d workers: digest %s, want %s", workers, got, want)
		}
	}
	p.Seed = 1
	if got, _ := digest(t, written(t, p)); got == want {
		t.Error("another seed gave the same bytes")
	}
}

func TestLayersOfTwoCheckpointsWithTheSameDimensionsAreTheSame(t *testing.T) {
	p := small()
	q := p
	q.Layers, q.Attention = 2, "KK" // as the first two of p
	a, b := written(t, p), written(t, q)
	for l := range 2 {
		x, err := os.ReadFile(filepath.Join(a, p.shardName(l)))
		must(t, err)
		y, err := os.ReadFile(filepath.Join(b, q.shardName(l)))
		must(t, err)
		if !bytes.Equal(x, y) {
			t.Errorf("layer %d differs", l)
		}
	}
}

func TestProgressRisesToTheForetoldSize(t *testing.T) {
	p := small()
	size, err := Size(p)
	must(t, err)
	dir := t.TempDir()
	last, calls := int64(-1), 0
	progress := func(done, total int64) {
		if done < last || done > total || total != size {
			t.Errorf("progress %d of %d after %d, size %d", done, total, last, size)
		}
		last = done
		calls++
	}
	must(t, Write(context.Background(), dir, p, progress))
	if last != size || calls < p.shards() {
		t.Errorf("progress ended at %d of %d after %d calls", last, size, calls)
	}
	last, calls = -1, 0
	must(t, Write(context.Background(), dir, p, progress))
	if last != size || calls != 1 {
		t.Errorf("a complete directory reports %d of %d in %d calls", last, size, calls)
	}
}

func TestACompleteDirectoryIsLeftAlone(t *testing.T) {
	p := small()
	dir := written(t, p)
	before := stamps(t, dir)
	must(t, os.WriteFile(filepath.Join(dir, "notes.txt"), []byte("mine"), 0o644))
	w := writer{dir: dir, free: func(string) (int64, error) { return 0, nil }} // and needs no room
	must(t, w.write(context.Background(), p))
	must(t, os.Remove(filepath.Join(dir, "notes.txt")))
	if after := stamps(t, dir); !slices.Equal(before, after) {
		t.Errorf("files changed from %v to %v", before, after)
	}
	p.Attention = "KKM" // what it is by default
	must(t, Write(context.Background(), dir, p, nil))
}

func stamps(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var list []string
	for _, e := range entries {
		info, err := e.Info()
		must(t, err)
		list = append(list, fmt.Sprint(e.Name(), info.ModTime().UnixNano(), info.Size()))
	}
	return list
}

func TestDamagedAndAbsentFilesAreMadeAgain(t *testing.T) {
	p := small()
	dir := written(t, p)
	want, _ := digest(t, dir)
	must(t, os.Truncate(filepath.Join(dir, p.shardName(1)), 100))
	must(t, os.Remove(filepath.Join(dir, p.shardName(2))))
	must(t, os.Remove(filepath.Join(dir, indexName)))
	must(t, Write(context.Background(), dir, p, nil))
	if got, _ := digest(t, dir); got != want {
		t.Errorf("digest %s, want %s", got, want)
	}
}

func TestOtherContentIsRefusedAndKept(t *testing.T) {
	p := small()
	for _, c := range []struct {
		name string
		do   func(dir string) error
		want string
	}{
		{"a stranger's file", func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "thesis.tex"), []byte("x"), 0o644)
		}, "is not empty (it holds thesis.tex) and has no synth.json"},
		{"a released checkpoint", func(dir string) error {
			return os.CopyFS(dir, os.DirFS("../../golden/tiny-b/model"))
		}, "is not empty (it holds config.json)"},
		{"another seed", func(dir string) error {
			q := p
			q.Seed = 9
			return Write(context.Background(), dir, q, nil)
		}, "another Seed (9): remove it"},
		{"other experts", func(dir string) error {
			q := p
			q.Experts = 5
			return Write(context.Background(), dir, q, nil)
		}, "another Experts (5): remove it"},
		{"another generator", func(dir string) error {
			b, err := json.Marshal(record{generator + 1, p})
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, recordName), b, 0o644)
		}, fmt.Sprintf("of generator %d", generator+1)},
		{"a synth.json that is none", func(dir string) error {
			return os.WriteFile(filepath.Join(dir, recordName), []byte("{}"), 0o644)
		}, "generator is missing"},
		{"a directory in place of a shard", func(dir string) error {
			if err := Write(context.Background(), dir, p, nil); err != nil {
				return err
			}
			path := filepath.Join(dir, p.shardName(0))
			return errors.Join(os.Remove(path), os.Mkdir(path, 0o755))
		}, "model-00001-of-000004.safetensors is not a regular file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			must(t, c.do(dir))
			before := stamps(t, dir)
			wantError(t, Write(context.Background(), dir, p, nil), dir+": ", c.want)
			if after := stamps(t, dir); !slices.Equal(before, after) {
				t.Errorf("files changed from %v to %v", before, after)
			}
		})
	}
}

func TestAFullDriveIsSeenBeforehand(t *testing.T) {
	p := small()
	size, err := Size(p)
	must(t, err)
	w := writer{dir: t.TempDir(), free: func(string) (int64, error) { return size, nil }}
	wantError(t, w.write(context.Background(), p), "0.00 GB are needed and the file system has 0.00 GB free")
	if left := stamps(t, w.dir); len(left) > 0 {
		t.Errorf("files were written: %v", left)
	}
	big, err := Preset("k3-slice")
	must(t, err)
	w.free = func(string) (int64, error) { return 20e9, nil }
	wantError(t, w.write(context.Background(), big), "36.38 GB are needed and the file system has 20.00 GB free: make room")
}

func TestCancellingLeavesNoUnfinishedFileAndWriteGoesOn(t *testing.T) {
	p := small()
	want, size := digest(t, written(t, p))
	for _, share := range []int64{0, 10, 50, 90} {
		ctx, cancel := context.WithCancel(context.Background())
		dir := t.TempDir()
		err := Write(ctx, dir, p, func(done, total int64) {
			if done >= total*share/100 {
				cancel()
			}
		})
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("at %d%%: %v", share, err)
		}
		if left, err := filepath.Glob(filepath.Join(dir, "*"+tempSuffix)); err != nil || len(left) > 0 {
			t.Errorf("at %d%%: %v is left, %v", share, left, err)
		}
		if _, err := checkpoint.Open(dir); err == nil {
			t.Errorf("at %d%%: half a checkpoint opens", share)
		}
		must(t, Write(context.Background(), dir, p, nil))
		if got, n := digest(t, dir); got != want || n != size {
			t.Errorf("at %d%%: digest %s, want %s", share, got, want)
		}
	}
}

// A process that is killed leaves the directory as it was between two steps.
func TestKilledBetweenAnyTwoStepsNothingHalfOpensAndWriteGoesOn(t *testing.T) {
	p := small()
	var snapshots []string
	w := writer{dir: t.TempDir(), workers: 2}
	w.step = func() {
		s := t.TempDir()
		must(t, os.CopyFS(s, os.DirFS(w.dir)))
		snapshots = append(snapshots, s)
	}
	must(t, w.write(context.Background(), p))
	want, _ := digest(t, w.dir)
	if least := 3 * (p.shards() + 3); len(snapshots) < least {
		t.Fatalf("%d steps, expected at least %d", len(snapshots), least)
	}
	complete := 0
	for i, dir := range snapshots {
		if c, err := checkpoint.Open(dir); err == nil {
			c.Close()
			complete++
			if got, _ := digest(t, dir); got != want {
				t.Errorf("step %d: a directory opens that is not complete", i)
			}
		}
		must(t, Write(context.Background(), dir, p, nil))
		if got, _ := digest(t, dir); got != want {
			t.Errorf("step %d: digest %s after going on, want %s", i, got, want)
		}
	}
	if complete != 1 {
		t.Errorf("%d snapshots open, expected the last alone", complete)
	}
}

func TestTwoWritersDoNotMeet(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("NOT RUN: Windows has no directory locks; open files cannot be replaced there")
	}
	p := small()
	dir := t.TempDir()
	w := writer{dir: dir, workers: 1}
	met := 0
	w.step = func() {
		if met == 0 {
			wantError(t, Write(context.Background(), dir, p, nil), "is being written by somebody else")
			wantError(t, Remove(dir), "is being written by somebody else")
		}
		met++
	}
	must(t, w.write(context.Background(), p))
	if met == 0 {
		t.Error("no second writer was tried")
	}
	opens(t, dir)
}

func TestRemoveTakesWhatWasWrittenAndNothingElse(t *testing.T) {
	p := small()
	dir := written(t, p)
	must(t, os.WriteFile(filepath.Join(dir, p.shardName(0)+tempSuffix), nil, 0o644))
	mine := filepath.Join(dir, "notes.txt")
	must(t, os.WriteFile(mine, []byte("mine"), 0o644))
	must(t, Remove(dir))
	if left := stamps(t, dir); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	wantError(t, Remove(dir), "has no synth.json")
	must(t, os.Remove(mine))

	must(t, Write(context.Background(), dir, p, nil))
	must(t, Remove(dir))
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an empty directory is left: %v", err)
	}
}

func FuzzRecord(f *testing.F) {
	for _, p := range presets {
		b, err := json.Marshal(record{generator, p.params})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"generator": 1, "params": {"layers": 1000000000, "attention": "KKM"}}`))
	f.Add([]byte(`{"generator": 0}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := parseRecord(b)
		if err != nil {
			return
		}
		p, err := rec.Params.resolve()
		if err != nil {
			return
		}
		if q, err := p.resolve(); err != nil || q != p {
			t.Errorf("resolved twice: %+v, %v", q, err)
		}
		if len(p.Attention) != p.Layers {
			t.Errorf("%d layers and attention %q", p.Layers, p.Attention)
		}
	})
}
