package golden

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
)

// Hashes maps a case's key ("nano/france") to the SHA-256 of the engine's logits
// (see HashRows). Unlike everything else here they are the engine's own statement:
// they hold its bits still, the oracle's logits hold its numbers right.
type Hashes map[string]string

func hashesPath() string { return filepath.Join(Dir(), "hashes.json") }

// LoadHashes reads golden/hashes.json.
func LoadHashes() (Hashes, error) {
	b, err := os.ReadFile(hashesPath())
	if err != nil {
		return nil, err
	}
	h := Hashes{}
	if err := json.Unmarshal(b, &h); err != nil {
		return nil, fmt.Errorf("%s: %w", hashesPath(), err)
	}
	return h, nil
}

// Save writes golden/hashes.json, keys sorted. A test does this under its -update flag.
func (h Hashes) Save() error {
	b, err := json.MarshalIndent(h, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(hashesPath(), append(b, '\n'), 0o644)
}

// Check compares got with the frozen hash of key. A missing entry is an error too.
func (h Hashes) Check(key, got string) error {
	switch want, ok := h[key]; {
	case !ok:
		return fmt.Errorf("golden/hashes.json has no entry for %s (this run: %s): after checking the logits against the oracle, run the test with -update", key, got)
	case want != got:
		return fmt.Errorf("%s: logits hash %s, frozen %s: the engine's bits have changed; find out why before running the test with -update", key, got, want)
	}
	return nil
}

// HashRows is the SHA-256, in hex, of the little-endian binary32 bits of the logits
// rows that chose each token: the prompt's last row, then the row of every generated
// token but the last. rows is [len(Greedy)][vocab].
func HashRows(rows [][]float32) string {
	h := sha256.New()
	for _, r := range rows {
		b := make([]byte, 0, 4*len(r))
		for _, v := range r {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
		}
		h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil))
}
