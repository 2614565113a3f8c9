package dspark_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/draft"
	"deltafin/engine/draft/dspark"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
)

func copyDraft(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(draftDir)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// patch returns what sets one weight of the draft in dir.
func patch(tensor string, index int64, bits uint16) func(t *testing.T, dir string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		d, err := checkpoint.OpenDraft(dir)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(d.Path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt(binary.LittleEndian.AppendUint16(nil, bits), d.Tensor[tensor].Offset+2*index); err != nil {
			t.Fatal(err)
		}
	}
}

func wantLine(t *testing.T, err error, want ...string) {
	t.Helper()
	if err == nil || strings.Contains(err.Error(), "\n") {
		t.Fatalf("error %v, expected one line", err)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q, expected it to say %q", err, w)
		}
	}
}

func TestADraftOfAnotherModelIsRefused(t *testing.T) {
	for _, c := range []struct {
		target draft.Target
		want   string
	}{
		{draft.Target{Hidden: 191, Vocab: 3072, Layers: 9}, "hidden_size is 192, but the model has 191"},
		{draft.Target{Hidden: 192, Vocab: 3073, Layers: 9}, "vocab_size is 3072, but the model has 3073"},
		{draft.Target{Hidden: 192, Vocab: 3072, Layers: 8}, "target_num_hidden_layers is 9, but the model has 8"},
	} {
		_, err := dspark.Open(draftDir, c.target, dspark.Options{})
		wantLine(t, err, draftDir+": config.json: ", c.want)
	}
	_, err := dspark.Open(t.TempDir(), draft.Target{}, dspark.Options{})
	wantLine(t, err, "config.json: is not there")
}

// TestWeightsThatCannotBeReadAreOneLine damages the file after it was opened, which is when nobody
// has read a weight yet.
func TestWeightsThatCannotBeReadAreOneLine(t *testing.T) {
	e := openEngine(t)
	prompt := goldenRuns(t)[0].Prompt
	for _, c := range []struct {
		name   string
		before bool // the damage is done before Open, which cannot see it
		damage func(t *testing.T, dir string)
		want   []string
	}{
		{"cut", false, func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, "model.safetensors"), 1e6); err != nil {
				t.Fatal(err)
			}
		}, []string{"dspark: reading the draft: ", "model.safetensors"}},
		{"gone", false, func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, "model.safetensors")); err != nil {
				t.Fatal(err)
			}
		}, []string{"dspark: reading the draft: ", "model.safetensors"}},
		{"NaN", true, patch("layers.1.mlp.up_proj.weight", 70001, 0x7fc0), []string{"tensor layers.1.mlp.up_proj.weight: ", "weight 70001 is not a finite number"}},
		{"last value infinite", true, patch("markov_head.markov_w2.weight", 3072*32-1, 0xff80), []string{"weight 98303 is not a finite number"}},
		{"first value infinite", true, patch("layers.0.input_layernorm.weight", 0, 0x7f80), []string{"weight 0 is not a finite number"}},
		{"the one bias", true, patch("confidence_head.proj.bias", 0, 0xffff), []string{"tensor confidence_head.proj.bias: ", "weight 0 is not"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := copyDraft(t)
			if c.before {
				c.damage(t, dir)
			}
			p, err := dspark.Open(dir, target(e), dspark.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			if !c.before {
				c.damage(t, dir)
			}
			x := begin(t, e, p, prompt, 100, 0)
			before := drive.Allocated()
			_, err = x.seq.Propose(context.Background(), x.tokens, 7)
			wantLine(t, err, c.want...)
			if now := drive.Allocated(); now > before {
				t.Errorf("%d bytes are left behind", now-before)
			}
		})
	}
}

// TestNoEstimateIsCertain gives the confidence head a bias without measure.
func TestNoEstimateIsCertain(t *testing.T) {
	e := openEngine(t)
	for _, bits := range []uint16{0x4f80, 0xcf80} { // 2^32 and -2^32
		dir := copyDraft(t)
		patch("confidence_head.proj.bias", 0, bits)(t, dir)
		p, err := dspark.Open(dir, target(e), dspark.Options{})
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range begin(t, e, p, goldenRuns(t)[0].Prompt, 100, 0).propose(7) {
			if !(g.P > 0 && g.P < 1) {
				t.Errorf("token %d with P = %g", g.ID, g.P)
			}
		}
		p.Close()
	}
}

// TestCancelledProposalsLoseNothing cancels before loading and before projecting.
func TestCancelledProposalsLoseNothing(t *testing.T) {
	e := openEngine(t)
	p := openDraft(t, e, dspark.Options{})
	run := goldenRuns(t)[0]
	done, cancel := context.WithCancel(context.Background())
	cancel()
	for range 2 { // the second time with weights in memory
		x := begin(t, e, p, run.Prompt, 100, 0)
		if _, err := x.seq.Propose(done, x.tokens, 7); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, expected that of the context", err)
		}
		if g := ids(x.propose(7)); !slices.Equal(g, run.Blocks[0].Proposal) {
			t.Errorf("proposed %v, golden %v", g, run.Blocks[0].Proposal)
		}
	}
}

func TestStreamsThatAreNotFiniteAreAnError(t *testing.T) {
	p, _ := synthetic(t, dspark.Options{})
	for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		s := p.Start().(draft.Watcher)
		show(s, 0, 3, 0, 1, 3, 5, 7)
		m := kernel.NewMat(3, 192)
		m.Row(1)[7] = float32(v)
		s.Watch(8, 0, m)
		s.Kept(3)
		_, err := s.Propose(context.Background(), make([]int, 4), 7)
		wantLine(t, err, "not finite", "model.safetensors")
		before := s.Bytes() // nothing is gathered for a proposer that is not asked any more
		show(s, 3, 100, 0, 1, 3, 5, 7, 8)
		s.Kept(103)
		if n := s.Bytes(); n > before {
			t.Errorf("after an error the sequence grows from %d to %d bytes", before, n)
		}
	}
}

// live is the bytes of the Go heap and of all buffers. A worker of the pool remembers the last thing
// that it did until it does another.
func live(pool *kernel.Pool) int64 {
	pool.Run(2, func(*kernel.Scratch, int) {})
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if buffersInHeap() {
		return int64(m.HeapAlloc)
	}
	return int64(m.HeapAlloc) + drive.Allocated()
}

// buffersInHeap reports whether buffers lie in the Go heap, as in race builds.
var buffersInHeap = sync.OnceValue(func() bool {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	b, err := drive.NewBuffer(8 << 20)
	if err != nil {
		panic(err)
	}
	defer b.Free()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc-before.TotalAlloc >= 8<<20
})

// TestMemoryIsWhatBytesSays measures what opening, watching and the first proposal take.
func TestMemoryIsWhatBytesSays(t *testing.T) {
	const window, slack = 600, 100 << 10 // bytes that are nobody's
	all := []int{1, 3, 5, 7, 8}
	p, pool := synthetic(t, dspark.Options{Window: window})
	start := live(pool)
	again, err := dspark.Open(draftDir, draft.Target{Hidden: 192, Vocab: 3072, Layers: 9}, dspark.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if n := live(pool) - start; n > slack {
		t.Errorf("opening takes %d bytes", n)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
	// The pool's own memory, which the model's passes need too.
	w := kernel.FloatMatrix(960, 32, 32, kernel.Floats(960*32))
	for range 10 {
		pool.MatMul(kernel.Job{Y: kernel.NewMat(128, 960), X: kernel.NewMat(128, 32), W: &w})
	}
	s := p.Start().(draft.Watcher)
	loaded, most := p.Bytes(1 << 20)
	check := func(what string, base, bound, least int64) {
		t.Helper()
		n := live(pool) - base
		t.Logf("%s: %d bytes, at most %d", what, n, bound)
		if n > bound+slack || n < least-slack {
			t.Errorf("%s takes %d bytes, expected at most %d and at least %d", what, n, bound, least)
		}
	}
	tokens := make([]int, 6001)
	base := live(pool)
	show(s, 0, 3000, 0, all...) // a prompt of many windows
	s.Kept(3000)
	show(s, 3000, 3000, 0, all...)
	s.Kept(6000)
	check("a long prompt", base, most, s.Bytes())
	if n := s.Bytes(); n > most {
		t.Errorf("a sequence of %d bytes, at most %d", n, most)
	}
	if _, err := s.Propose(context.Background(), tokens, 7); err != nil {
		t.Fatal(err)
	}
	check("the first proposal and the sequence", base, loaded+s.Bytes(), loaded*9/10+s.Bytes())
	after := live(pool)
	f := s.Fork()
	check("a fork", after, s.Bytes(), s.Bytes())
	for at := 6000; at < 6400; at += 8 {
		show(s, at, 8, 0, all...)
		s.Kept(at + 5)
		if _, err := s.Propose(context.Background(), tokens[:at-399], 7); err != nil {
			t.Fatal(err)
		}
	}
	if _, bound := p.Bytes(0); s.Bytes() > f.Bytes()+bound {
		t.Errorf("decoding took the sequence from %d to %d bytes", f.Bytes(), s.Bytes())
	}
	check("a fork and decoding", after, s.Bytes(), f.Bytes())
	runtime.KeepAlive([]any{s, f, tokens})
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	for n, length := range []int{0, 1, 10, 100, 599, 600, 601, 5000} { // a text of that many positions
		p, _ := synthetic(t, dspark.Options{Window: window})
		s := p.Start().(draft.Watcher)
		_, bound := p.Bytes(length)
		for at := 0; at < length; at += 100 {
			show(s, at, min(100, length-at), 0, all...)
			s.Kept(min(at+100, length))
			if s.Bytes() > bound {
				t.Errorf("%d positions take %d bytes, at most %d of %d", at, s.Bytes(), bound, length)
			}
			if n%2 == 0 {
				if _, err := s.Propose(context.Background(), make([]int, at+100), 1); err != nil {
					t.Fatal(err)
				}
			}
		}
		if s.Bytes() > bound {
			t.Errorf("%d positions take %d bytes, at most %d", length, s.Bytes(), bound)
		}
	}
}
