package engine

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"deltafin/engine/checkpoint"
	"deltafin/engine/expert"
	"deltafin/engine/k3"
)

// Bytes is the memory that the session occupies.
func (s *Session) Bytes() int64 {
	n := s.state.Bytes() + 8*int64(cap(s.tokens))
	for _, d := range s.drafts {
		n += d.Bytes()
	}
	return n
}

// Save writes the session's state, with the tokens that were fed and, unless nil,
// the logits [vocab] of the last of them. digest is [Engine.Digest].
func (s *Session) Save(w io.Writer, digest [32]byte, ids []int, logits []float32) error {
	if s.broken != nil {
		return s.broken
	}
	return k3.Saved{State: s.state, IDs: ids, Logits: logits}.Save(w, digest)
}

// LoadSession reads what [Session.Save] wrote, exactly size bytes of r. Errors wrap
// [k3.ErrState] when the state is damaged or another model's.
func (e *Engine) LoadSession(r io.Reader, size int64, digest [32]byte) (s *Session, ids []int, logits []float32, err error) {
	saved, err := k3.LoadState(r, size, e.Config(), digest)
	if err != nil {
		return nil, nil, nil, err
	}
	return e.session(saved.State, slices.Clone(saved.IDs)), saved.IDs, saved.Logits, nil
}

// ReadSessionIDs reads only the tokens of what [Session.Save] wrote.
func (e *Engine) ReadSessionIDs(r io.Reader, size int64, digest [32]byte) ([]int, error) {
	return k3.ReadStateIDs(r, size, e.Config(), digest)
}

// Digest identifies the checkpoint, for states that outlive the process: its
// configuration, its index, and of each shard the size and samples of the bytes. It
// reads a few MB.
func (e *Engine) Digest() ([32]byte, error) {
	h := sha256.New()
	for _, name := range []string{"config.json", "model.safetensors.index.json"} {
		b, err := os.ReadFile(filepath.Join(e.ck.Dir(), name))
		if err != nil {
			return [32]byte{}, err
		}
		fmt.Fprintf(h, "%s %d\n", name, len(b))
		h.Write(b)
	}
	if e.ck.Filling() { // its files change where nothing was yet
		print, err := expert.Fingerprint(e.ck)
		if err != nil {
			return [32]byte{}, err
		}
		h.Write(print[:])
		return [32]byte(h.Sum(nil)), nil
	}
	for i := range e.ck.Files() {
		if err := sample(h, e.ck, i); err != nil {
			return [32]byte{}, err
		}
	}
	return [32]byte(h.Sum(nil)), nil
}

// sample adds a file's beginning, middle and end.
func sample(w io.Writer, ck *checkpoint.Checkpoint, i int) error {
	const n = 64 << 10
	f := ck.File(i)
	if f == nil {
		return nil // it holds nothing that the text model reads
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%s %d\n", filepath.Base(ck.Path(i)), info.Size())
	for _, at := range []int64{0, info.Size() / 2, max(0, info.Size()-n)} {
		if _, err := io.Copy(w, io.NewSectionReader(f, at, n)); err != nil {
			return err
		}
	}
	return nil
}
