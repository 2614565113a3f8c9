package hub

import (
	"bytes"
	"crypto/sha256"
	"encoding"
	"encoding/binary"
	"encoding/hex"
	"hash"
)

// A chain holds the internal state of SHA-256 after each chunk of a file but the
// last, 32 bytes each. A chunk is right if hashing it turns the state before it into
// the state after it. So the one pass that proves a file against its digest also
// yields a digest for every part of it, as strong and at no further cost; a chunk
// can be checked alone, in any order, and a damaged one found and fetched alone.
type chain []byte

// chunkBytes is a multiple of SHA-256's block of 64 bytes.
const chunkBytes = 16 << 20

const (
	stateBytes    = 32
	encodedBytes  = 4 + stateBytes + 64 + 8
	encodedPrefix = "sha\x03"
)

func chunks(size int64) int {
	return int((size + chunkBytes - 1) / chunkBytes)
}

func chunkSpan(size int64, i int) span {
	return span{int64(i) * chunkBytes, min(size, int64(i+1)*chunkBytes)}
}

// fits tells whether a chain read from a file can be one of a file of size bytes.
func (c chain) fits(size int64) bool {
	return len(c) == stateBytes*max(0, chunks(size)-1)
}

// hashState takes the state out of a hash that has seen whole blocks only.
func hashState(h hash.Hash) []byte {
	b, err := h.(encoding.BinaryMarshaler).MarshalBinary()
	if err != nil || len(b) != encodedBytes || !bytes.HasPrefix(b, []byte(encodedPrefix)) {
		panic("hub: crypto/sha256 encodes its state in a new way") // a test would have told
	}
	return b[4 : 4+stateBytes]
}

// hashFrom makes a hash that goes on from a state after n bytes.
func hashFrom(state []byte, n int64) hash.Hash {
	h := sha256.New()
	if n == 0 {
		return h
	}
	b := append([]byte(encodedPrefix), state...)
	b = append(b, make([]byte, 64)...)
	b = binary.BigEndian.AppendUint64(b, uint64(n))
	if err := h.(encoding.BinaryUnmarshaler).UnmarshalBinary(b); err != nil {
		panic("hub: crypto/sha256 reads its state in a new way: " + err.Error())
	}
	return h
}

// begin returns the hash that chunk i is to be fed into.
func (c chain) begin(i int) hash.Hash {
	if i == 0 {
		return sha256.New()
	}
	return hashFrom(c[stateBytes*(i-1):stateBytes*i], int64(i)*chunkBytes)
}

// holds tells whether h, from begin, has seen the right chunk i.
func (c chain) holds(i int, h hash.Hash, sum string) bool {
	if stateBytes*i == len(c) { // the last one
		return hex.EncodeToString(h.Sum(nil)) == sum
	}
	return bytes.Equal(hashState(h), c[stateBytes*i:stateBytes*(i+1)])
}
