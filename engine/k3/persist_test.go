package k3

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/golden"
)

func savedConfig(t testing.TB, set string) *checkpoint.Config {
	b, err := os.ReadFile(filepath.Join(golden.ModelDir(set), "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := checkpoint.ParseConfig(b)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// savedExample is a state with a different value everywhere, as it lies in a file.
func savedExample(t testing.TB, c *checkpoint.Config, positions int, logits bool) (Saved, []byte) {
	r := rand.New(rand.NewPCG(1, uint64(positions)))
	s := Saved{State: NewState(c)}
	for range positions {
		s.IDs = append(s.IDs, r.IntN(c.Vocab))
	}
	for l := range s.State.mla {
		if c.MLA[l] {
			s.State.mla[l].grow(positions)
		}
	}
	s.State.pos = positions
	fill := func(p []float32) error {
		for i := range p {
			p[i] = r.Float32() - 0.5
		}
		return nil
	}
	if err := s.State.parts(fill); err != nil {
		t.Fatal(err)
	}
	if logits {
		s.Logits = make([]float32, c.Vocab)
		fill(s.Logits)
	}
	var b bytes.Buffer
	if err := s.Save(&b, savedKey); err != nil {
		t.Fatal(err)
	}
	return s, b.Bytes()
}

var savedKey = [32]byte{1, 2, 3}

func TestASavedStateComesBackToTheBit(t *testing.T) {
	for _, set := range golden.Sets {
		c := savedConfig(t, set)
		for _, logits := range []bool{false, true} {
			_, want := savedExample(t, c, 70, logits)
			got, err := LoadState(bytes.NewReader(want), int64(len(want)), c, savedKey)
			if err != nil {
				t.Fatal(err)
			}
			var again bytes.Buffer
			if err := got.Save(&again, savedKey); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(again.Bytes(), want) {
				t.Errorf("%s: a state is another after saving and loading", set)
			}
			if got.State.Position() != 70 {
				t.Errorf("%s: %d positions, want 70", set, got.State.Position())
			}
			ids, err := ReadStateIDs(bytes.NewReader(want), int64(len(want)), c, savedKey)
			if err != nil || len(ids) != 70 || ids[69] != got.IDs[69] {
				t.Errorf("%s: the tokens alone are %v, %v", set, ids, err)
			}
		}
	}
}

func TestADamagedStateIsRefused(t *testing.T) {
	c := savedConfig(t, "tiny-a")
	_, good := savedExample(t, c, 5, true)
	refused := func(what string, b []byte, key [32]byte) {
		t.Helper()
		if _, err := LoadState(bytes.NewReader(b), int64(len(b)), c, key); !errors.Is(err, ErrState) {
			t.Errorf("%s: error %v, want one that wraps ErrState", what, err)
		}
	}
	step := max(1, len(good)/400)
	for i := 0; i < len(good); i += step {
		bad := bytes.Clone(good)
		bad[i] ^= 0x10
		refused("one bit changed", bad, savedKey)
		refused("cut off", good[:i], savedKey)
	}
	refused("longer", append(bytes.Clone(good), 0), savedKey)
	refused("other model", good, [32]byte{9})
	// A file that is shorter than its own size says.
	if _, err := LoadState(bytes.NewReader(good[:len(good)-1]), int64(len(good)), c, savedKey); !errors.Is(err, ErrState) {
		t.Errorf("shrunk while it was read: %v", err)
	}
}

// seal makes both checks of a state right, so that a fuzzer gets past them.
func seal(b []byte) []byte {
	if len(b) < stateHead+4+sha256.Size {
		return b
	}
	if n := binary.LittleEndian.Uint64(b[16:]); n < uint64(len(b)) {
		if at := stateHead + 4*int(n); at+4 <= len(b) {
			binary.LittleEndian.PutUint32(b[at:], crc32.Checksum(b[:at], castagnoli))
		}
	}
	sum := sha256.Sum256(b[:len(b)-sha256.Size])
	copy(b[len(b)-sha256.Size:], sum[:])
	return b
}

func FuzzLoadState(f *testing.F) {
	c := savedConfig(f, "tiny-a")
	_, good := savedExample(f, c, 1, false)
	f.Add(good[:200], true)
	f.Add(good[:stateHead], false)
	f.Fuzz(func(t *testing.T, start []byte, sealed bool) {
		b := append(bytes.Clone(start), good[min(len(start), len(good)):]...)
		if sealed {
			b = seal(b)
		}
		s, err := LoadState(bytes.NewReader(b), int64(len(b)), c, savedKey)
		if err != nil {
			if !errors.Is(err, ErrState) {
				t.Fatalf("error %v does not wrap ErrState", err)
			}
			return
		}
		var again bytes.Buffer
		if err := s.Save(&again, savedKey); err != nil || !bytes.Equal(again.Bytes(), b) {
			t.Fatalf("what was loaded is not what is saved again: %v", err)
		}
	})
}

// What it costs to keep a state of K3's size: BenchmarkState/fork is done after every
// pass of a prompt.
func BenchmarkState(b *testing.B) {
	text, err := os.ReadFile(filepath.Join(golden.Dir(), "real", "config.json"))
	if err != nil {
		b.Skip("NOT RUN: ", err)
	}
	c, err := checkpoint.ParseConfig(text)
	if err != nil {
		b.Fatal(err)
	}
	s := Saved{State: NewState(c), IDs: make([]int, 1000)}
	for l := range s.State.mla {
		if c.MLA[l] {
			s.State.mla[l].grow(len(s.IDs))
		}
	}
	s.State.pos = len(s.IDs)
	b.Run("fork", func(b *testing.B) {
		b.SetBytes(s.State.Bytes())
		for b.Loop() {
			s.State.Fork()
		}
	})
	b.Run("save", func(b *testing.B) {
		b.SetBytes(s.State.Bytes())
		for b.Loop() {
			if err := s.Save(io.Discard, savedKey); err != nil {
				b.Fatal(err)
			}
		}
	})
}
