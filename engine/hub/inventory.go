package hub

import (
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"slices"
	"strings"
)

// DefaultRepo is the model that is fetched when none is named.
const DefaultRepo = "moonshotai/Kimi-K3"

// File is one file of a revision.
type File struct {
	Name string `json:"name"`           // with forward slashes
	Size int64  `json:"size,omitempty"` // bytes

	// SHA256 and Git are hex digests of the content, "" if unknown: its SHA-256, and
	// its SHA-1 as git computes it for a blob, which is all that a hub states of
	// small files. A file without either is never published.
	SHA256 string `json:"sha256,omitempty"`
	Git    string `json:"git,omitempty"`
}

// Inventory lists the files of a revision. In a pinned inventory a size of 0 and an
// empty digest mean that they are not known beforehand; the hub has to state them.
type Inventory struct {
	Format   int      `json:"format"`
	Repo     string   `json:"repo"`
	Revision string   `json:"revision"`
	Same     []string `json:"same,omitempty"` // other revisions with the same files
	Note     string   `json:"note,omitempty"`
	Files    []File   `json:"files"`
}

const (
	inventoryFormat = 1
	inventoryLimit  = 64 << 20 // bytes of JSON
	fileLimit       = 100_000
	nameLimit       = 512
)

//go:embed k3.json
var pinnedK3 []byte

// Pinned returns what is known of the released Kimi K3: names and sizes of all
// shards, and the digests of the small files.
func Pinned() *Inventory {
	inv, err := ParseInventory(pinnedK3)
	if err != nil {
		panic(err) // the file is part of the binary
	}
	return inv
}

// ParseInventory reads an inventory from JSON and checks it.
func ParseInventory(b []byte) (*Inventory, error) {
	if len(b) > inventoryLimit {
		return nil, fmt.Errorf("inventory is %d bytes long, more than the %d allowed", len(b), inventoryLimit)
	}
	var inv Inventory
	if err := json.Unmarshal(b, &inv); err != nil {
		return nil, fmt.Errorf("inventory: %w", err)
	}
	return &inv, inv.check()
}

func (inv *Inventory) check() error {
	if inv.Format != inventoryFormat {
		return fmt.Errorf("inventory has format %d, this program reads %d: use the version that wrote it, or fetch into a new directory", inv.Format, inventoryFormat)
	}
	if len(inv.Files) > fileLimit {
		return fmt.Errorf("inventory lists %d files, more than the %d allowed", len(inv.Files), fileLimit)
	}
	seen := make(map[string]bool, len(inv.Files))
	var total int64
	for _, f := range inv.Files {
		if err := checkName(f.Name); err != nil {
			return err
		}
		// Two names that differ in case only are one file on many systems.
		key := strings.ToLower(f.Name)
		if seen[key] {
			return fmt.Errorf("inventory lists %q twice", f.Name)
		}
		seen[key] = true
		if f.Size < 0 || f.Size > math.MaxInt64-total {
			return fmt.Errorf("inventory: %q has an impossible size of %d bytes", f.Name, f.Size)
		}
		total += f.Size
		if !isHex(f.SHA256, 64) || !isHex(f.Git, 40) {
			return fmt.Errorf("inventory: the digest of %q is malformed", f.Name)
		}
	}
	return nil
}

// isHex accepts n lower-case hex digits, or nothing.
func isHex(s string, n int) bool {
	if s == "" {
		return true
	}
	_, err := hex.DecodeString(s)
	return err == nil && len(s) == n && s == strings.ToLower(s)
}

// checkName refuses names that would leave the directory or collide with the files
// that fetching itself keeps beside the model's.
func checkName(name string) error {
	bad := len(name) > nameLimit || !fs.ValidPath(name) || name == "." || strings.ContainsAny(name, `\:*?"<>|`)
	for _, r := range name {
		bad = bad || r < ' ' || r == 0x7f
	}
	for part := range strings.SplitSeq(name, "/") {
		bad = bad || strings.HasSuffix(part, ".") || strings.HasSuffix(part, " ")
	}
	base := strings.ToLower(path.Base(name))
	for _, suffix := range []string{partSuffix, journalSuffix, rangesSuffix, tempSuffix} {
		bad = bad || strings.HasSuffix(base, suffix)
	}
	if bad || base == recordName || base == verifyName || base == streamName || base == lockName {
		return fmt.Errorf("the hub lists a file named %.80q, which cannot be stored safely: report it to the owner of the repository", name)
	}
	return nil
}

// holds tells whether a pinned inventory speaks of a revision.
func (inv *Inventory) holds(repo, revision string) bool {
	return inv.Repo == repo && (inv.Revision == revision || slices.Contains(inv.Same, revision))
}

// pin checks a hub's list against what is known beforehand and adds the digests
// that the hub did not state. It returns the names that only the hub has.
func (inv *Inventory) pin(known *Inventory) (extra []string, err error) {
	at := map[string]int{}
	for i, f := range inv.Files {
		at[f.Name] = i
	}
	var missing []string
	pinned := map[string]bool{}
	for _, k := range known.Files {
		pinned[k.Name] = true
		i, ok := at[k.Name]
		if !ok {
			missing = append(missing, k.Name)
			continue
		}
		f := &inv.Files[i]
		switch {
		case k.Size > 0 && f.Size != k.Size:
			return nil, fmt.Errorf("%s: the hub lists %d bytes, the release has %d: it serves another model under this name; use another hub", f.Name, f.Size, k.Size)
		case k.SHA256 != "" && f.SHA256 != "" && f.SHA256 != k.SHA256, k.Git != "" && f.Git != "" && f.Git != k.Git:
			return nil, fmt.Errorf("%s: the hub lists another digest than the release has: it serves another model under this name; use another hub", f.Name)
		}
		if f.SHA256 == "" {
			f.SHA256 = k.SHA256
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("the hub lacks %s (%d files of the release are missing there): use another hub or mirror", missing[0], len(missing))
	}
	for _, f := range inv.Files {
		if !pinned[f.Name] {
			extra = append(extra, f.Name)
		}
	}
	return extra, nil
}

// provable demands a digest for every file.
func (inv *Inventory) provable() error {
	for _, f := range inv.Files {
		if f.SHA256 == "" && f.Git == "" {
			return fmt.Errorf("%s: nobody states its digest, so that what arrives could not be checked: use a hub that does, or give an inventory", f.Name)
		}
	}
	if len(inv.Files) == 0 {
		return errors.New("the hub lists no files: check the names of the repository and the revision")
	}
	return nil
}
