package k3

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"

	"deltafin/engine/checkpoint"
	"deltafin/engine/kernel"
)

// A saved state is one stream of little-endian values:
//
//	magic [8]byte, version uint32, logits uint32, positions uint64, key [32]byte
//	ids [positions]uint32
//	CRC-32C of all of the above, so that a directory of states can be listed cheaply
//	logits [0 or vocab]float32
//	per layer, MLA: latent and key [positions][stride]float32
//	           KDA: matrices [heads][dim][stride]float32, then the tails of q, k and v
//	SHA-256 of all of the above
//
// The configuration and the number of positions give its exact length, which is
// checked before memory is taken.
const (
	stateMagic   = "K3STATE\n"
	stateVersion = 1 // of this layout and of the arithmetic behind the values
	stateHead    = 8 + 4 + 4 + 8 + 32
)

// ErrState is wrapped by the errors of a saved state that cannot be used: damaged,
// cut off, or of another model or version. It is then worth nothing: delete it.
var ErrState = errors.New("the saved state is of no use")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Saved is a state with what it takes to go on from it.
type Saved struct {
	State  *State
	IDs    []int     // the tokens that led to it, one per position
	Logits []float32 // [vocab] of the last token, or nil
}

// Save writes s. key identifies the model: [LoadState] wants the same. It panics
// where [State.Fork] does.
func (s Saved) Save(w io.Writer, key [32]byte) error {
	st := s.State
	st.whole()
	if st.held > 0 {
		panic("k3: a state with rows that are not committed cannot be saved: fork it")
	}
	if len(s.IDs) != st.pos || len(s.Logits) != 0 && len(s.Logits) != st.config.Vocab {
		return fmt.Errorf("a state of %d positions cannot be saved with %d ids and %d logits", st.pos, len(s.IDs), len(s.Logits))
	}
	digest := sha256.New()
	b := bufio.NewWriterSize(io.MultiWriter(w, digest), 1<<20)
	head := append(make([]byte, 0, stateHead+4*len(s.IDs)+4), stateMagic...)
	head = binary.LittleEndian.AppendUint32(head, stateVersion)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(s.Logits)))
	head = binary.LittleEndian.AppendUint64(head, uint64(st.pos))
	head = append(head, key[:]...)
	for _, id := range s.IDs {
		head = binary.LittleEndian.AppendUint32(head, uint32(id))
	}
	b.Write(binary.LittleEndian.AppendUint32(head, crc32.Checksum(head, castagnoli)))
	b.Write(kernel.AsBytes(s.Logits))
	st.parts(func(part []float32) error {
		b.Write(kernel.AsBytes(part))
		return nil
	})
	if err := b.Flush(); err != nil { // it keeps the first error of all writes
		return err
	}
	_, err := w.Write(digest.Sum(nil))
	return err
}

// LoadState reads what [Saved.Save] wrote: exactly size bytes of r. Errors wrap
// [ErrState] unless reading itself failed.
func LoadState(r io.Reader, size int64, c *checkpoint.Config, key [32]byte) (Saved, error) {
	digest := sha256.New()
	b := bufio.NewReaderSize(r, 1<<20)
	ids, logits, err := readHead(b, size, c, key, digest)
	if err != nil {
		return Saved{}, err
	}
	s := Saved{State: NewState(c), IDs: ids}
	read := func(part []float32) error {
		if _, err := io.ReadFull(b, kernel.AsBytes(part)); err != nil {
			return cutOff(err)
		}
		digest.Write(kernel.AsBytes(part))
		return nil
	}
	if logits > 0 {
		s.Logits = kernel.Floats(logits)
		if err := read(s.Logits); err != nil {
			return Saved{}, err
		}
	}
	s.State.pos = len(ids)
	for l := range s.State.mla {
		if c.MLA[l] {
			s.State.mla[l].grow(len(ids))
		}
	}
	if err := s.State.parts(read); err != nil {
		return Saved{}, err
	}
	var sum [sha256.Size]byte
	if _, err := io.ReadFull(b, sum[:]); err != nil {
		return Saved{}, cutOff(err)
	}
	if !bytes.Equal(sum[:], digest.Sum(nil)) {
		return Saved{}, fmt.Errorf("%w: its digest is wrong", ErrState)
	}
	return s, nil
}

// ReadStateIDs reads only the tokens of a saved state of size bytes.
func ReadStateIDs(r io.Reader, size int64, c *checkpoint.Config, key [32]byte) ([]int, error) {
	ids, _, err := readHead(r, size, c, key, sha256.New())
	return ids, err
}

func readHead(r io.Reader, size int64, c *checkpoint.Config, key [32]byte, digest hash.Hash) (ids []int, logits int, err error) {
	head := make([]byte, stateHead)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, 0, cutOff(err)
	}
	le := binary.LittleEndian
	version, nLogits, positions := le.Uint32(head[8:]), le.Uint32(head[12:]), le.Uint64(head[16:])
	switch {
	case string(head[:8]) != stateMagic:
		return nil, 0, fmt.Errorf("%w: it is none", ErrState)
	case version != stateVersion:
		return nil, 0, fmt.Errorf("%w: it has version %d, this program writes %d", ErrState, version, stateVersion)
	case !bytes.Equal(head[24:56], key[:]):
		return nil, 0, fmt.Errorf("%w: it belongs to another model", ErrState)
	case nLogits != 0 && uint64(nLogits) != uint64(c.Vocab):
		return nil, 0, fmt.Errorf("%w: it has %d logits, the model %d", ErrState, nLogits, c.Vocab)
	case positions == 0 || positions > uint64(c.MaxPositions):
		return nil, 0, fmt.Errorf("%w: it has %d positions, the context %d", ErrState, positions, c.MaxPositions)
	}
	if want := savedSize(c, int(positions), int(nLogits)); size != want {
		return nil, 0, fmt.Errorf("%w: it is %d bytes long and should be %d", ErrState, size, want)
	}
	rest := make([]byte, 4*positions+4)
	if _, err := io.ReadFull(r, rest); err != nil {
		return nil, 0, cutOff(err)
	}
	digest.Write(head)
	digest.Write(rest)
	sum := crc32.Update(crc32.Checksum(head, castagnoli), castagnoli, rest[:4*positions])
	if sum != le.Uint32(rest[4*positions:]) {
		return nil, 0, fmt.Errorf("%w: the check of its tokens is wrong", ErrState)
	}
	ids = make([]int, positions)
	for i := range ids {
		id := le.Uint32(rest[4*i:])
		if uint64(id) >= uint64(c.Vocab) {
			return nil, 0, fmt.Errorf("%w: token %d is not in the vocabulary", ErrState, id)
		}
		ids[i] = int(id)
	}
	return ids, int(nLogits), nil
}

// savedSize is the length of a saved state in bytes. checkpoint's bounds of the
// configuration keep it far from overflow.
func savedSize(c *checkpoint.Config, positions, logits int) int64 {
	return stateHead + 4*int64(positions) + 4 + StateBytes(c, positions) + 4*int64(logits) + sha256.Size
}

// parts calls f with every stretch of values that makes up the state, in the order
// in which they are saved.
func (st *State) parts(f func(part []float32) error) error {
	for l := range st.kda {
		parts := [][]float32{st.kda[l].s}
		if st.config.MLA[l] {
			m := &st.mla[l]
			parts = [][]float32{m.latent.Data[:st.pos*m.latent.Stride], m.key.Data[:st.pos*m.key.Stride]}
		} else {
			for _, tail := range st.kda[l].tail {
				parts = append(parts, tail...)
			}
		}
		for _, p := range parts {
			if err := f(p); err != nil {
				return err
			}
		}
	}
	return nil
}

func cutOff(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: it is cut off", ErrState)
	}
	return err
}
