package hub

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"deltafin/engine/checkpoint"
	"deltafin/engine/disk"
)

// What lies in a store beside the model's own files. A file of the model has its
// name only once it is whole and its digest was right, or, in a store that fills
// on demand, while a ranges file beside it says what of it is there.
const (
	recordName    = "deltafin-inventory.json" // what should be here, what is, and its digests
	verifyName    = "deltafin-verify.json"    // how far an interrupted verification came
	streamName    = "deltafin-stream.json"    // the store fills on demand, and how
	lockName      = ".deltafin.lock"
	partSuffix    = ".part"
	journalSuffix = ".journal"
	rangesSuffix  = checkpoint.RangesSuffix
	tempSuffix    = ".deltafin-tmp"
)

// storeRecord is the inventory of a store: the files of a revision and what this
// store knows of its own copy of each.
type storeRecord struct {
	Format   int         `json:"format"`
	Repo     string      `json:"repo"`
	Revision string      `json:"revision"`
	Files    []storeFile `json:"files"`
}

type storeFile struct {
	File
	Dir      string `json:"dir,omitempty"`      // the drive it was put on, if not the store's own
	Verified int64  `json:"verified,omitempty"` // modification time in ns since 1970 of the copy whose digest was right
	Chain    chain  `json:"chain,omitempty"`    // states of SHA-256 every ChunkBytes
	Chunk    int64  `json:"chunk,omitempty"`
}

func (r *storeRecord) inventory() *Inventory {
	inv := &Inventory{Format: r.Format, Repo: r.Repo, Revision: r.Revision}
	for _, f := range r.Files {
		inv.Files = append(inv.Files, f.File)
	}
	return inv
}

// parseRecord reads a store's record. It is no less hostile than a hub's list: it
// may have come with a copied drive.
func parseRecord(b []byte) (*storeRecord, error) {
	if len(b) > inventoryLimit {
		return nil, fmt.Errorf("%s: is %d bytes long, more than the %d allowed", recordName, len(b), inventoryLimit)
	}
	var r storeRecord
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("%s: %w: remove it; what is there is checked again by the next fetch", recordName, err)
	}
	if err := r.inventory().check(); err != nil {
		return nil, fmt.Errorf("%s: %w", recordName, err)
	}
	for i := range r.Files {
		f := &r.Files[i]
		if f.Chunk != chunkBytes || !f.Chain.fits(f.Size) {
			f.Chain, f.Chunk = nil, 0
		}
		if f.Dir != "" && !filepath.IsAbs(f.Dir) {
			return nil, fmt.Errorf("%s: the directory of %s is not absolute", recordName, f.Name)
		}
	}
	return &r, nil
}

// store is a directory that holds, or will hold, a model.
type store struct {
	dir   string // absolute
	hooks *hooks
	rec   *storeRecord
}

// hooks are where tests reach in.
type hooks struct {
	step  func(what string)                         // before each change that a crash may fall behind
	write func(path string, off int64, n int) error // in front of each write of content
	free  func(dir string) (int64, error)           // in place of the file system's answer
	drive func(dir string) (id string)              // likewise: which drive a directory is on
	fixed func() error                              // why no hole can be punched
}

func (h *hooks) stepped(what string) {
	if h != nil && h.step != nil {
		h.step(what)
	}
}

func (h *hooks) writing(path string, off int64, n int) error {
	if h != nil && h.write != nil {
		return h.write(path, off, n)
	}
	return nil
}

func (h *hooks) freeSpace(dir string) (int64, error) {
	if h != nil && h.free != nil {
		return h.free(dir)
	}
	return disk.Free(dir)
}

// punch finds out whether files in dir can have holes punched.
func (h *hooks) punch(dir string) error {
	if h != nil && h.fixed != nil {
		return h.fixed()
	}
	f, err := os.CreateTemp(dir, "*"+tempSuffix)
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(make([]byte, 64<<10)); err != nil {
		return err
	}
	return punchHole(f, span{0, 64 << 10})
}

func (h *hooks) driveOf(dir string) string {
	if h != nil && h.drive != nil {
		return h.drive(dir)
	}
	return driveOf(dir)
}

// openStore reads what is known of dir. A directory without a record has rec nil.
func openStore(dir string, h *hooks) (*store, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	s := &store{dir: abs, hooks: h}
	f, err := os.Open(filepath.Join(abs, recordName))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", recordName, plain(err))
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, inventoryLimit+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", recordName, plain(err))
	}
	s.rec, err = parseRecord(b)
	return s, err
}

// save replaces the record.
func (s *store) save() error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", " ")
	e.SetEscapeHTML(false)
	if err := e.Encode(s.rec); err != nil {
		return err
	}
	return s.replace(recordName, b.Bytes())
}

// replace writes a small file of the store's own so that a crash leaves the old one
// or the new one.
func (s *store) replace(name string, b []byte) error {
	path := filepath.Join(s.dir, name)
	s.hooks.stepped("write " + name)
	if err := s.hooks.writing(path, 0, len(b)); err != nil {
		return fmt.Errorf("%s: %w", name, plain(err))
	}
	f, err := os.OpenFile(path+tempSuffix, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("%s: %w", name, plain(err))
	}
	if _, err = f.Write(b); err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		s.hooks.stepped("rename " + name)
		err = os.Rename(path+tempSuffix, path)
	}
	if err == nil {
		err = disk.SyncDir(s.dir)
	}
	if err != nil {
		os.Remove(path + tempSuffix)
		return fmt.Errorf("%s: %w", name, plain(err))
	}
	return nil
}

// home is the directory that a file's bytes are put into.
func (s *store) home(f *storeFile) string {
	if f.Dir != "" {
		return f.Dir
	}
	return s.dir
}

// path is where a file's bytes are: on the drive that it was put on.
func (s *store) path(f *storeFile) string {
	return filepath.Join(s.home(f), filepath.FromSlash(f.Name))
}

// link is where readers look for a file.
func (s *store) link(f *storeFile) string { return filepath.Join(s.dir, filepath.FromSlash(f.Name)) }

// whole tells whether the copy of a file is the one whose digest was right.
func (s *store) whole(f *storeFile) bool {
	info, err := os.Stat(s.link(f))
	return err == nil && info.Mode().IsRegular() && f.Verified != 0 && info.Size() == f.Size && info.ModTime().UnixNano() == f.Verified && !exists(s.path(f)+rangesSuffix)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// adopt makes the record that of inv, and keeps what is known of files that are the
// same in both.
func (s *store) adopt(inv *Inventory) {
	old := map[string]storeFile{}
	if s.rec != nil {
		for _, f := range s.rec.Files {
			old[f.Name] = f
		}
	}
	rec := &storeRecord{Format: inventoryFormat, Repo: inv.Repo, Revision: inv.Revision}
	for _, f := range inv.Files {
		was := old[f.Name]
		if was.Size == f.Size && (f.SHA256 != "" && was.SHA256 == f.SHA256 || f.SHA256 == "" && was.Git == f.Git) {
			was.SHA256, was.Git = cmpOr(f.SHA256, was.SHA256), cmpOr(f.Git, was.Git)
			rec.Files = append(rec.Files, was)
		} else {
			rec.Files = append(rec.Files, storeFile{File: f, Dir: was.Dir})
		}
	}
	s.rec = rec
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// Target is a directory, usually on a drive of its own, that takes a share of the
// files. Weight is its share relative to the others; 0 means 1.
type Target struct {
	Dir    string
	Weight float64
}

// place decides which drive each file goes to. A file that has a place keeps it;
// the others go, in the order of their names, to where the least is for its weight,
// so that consecutive layers are on different drives.
func (s *store) place(targets []Target, room map[string]int64, keepFree int64) error {
	if len(targets) == 0 {
		return nil
	}
	type drive struct {
		dir    string
		id     string
		weight float64
		load   float64
	}
	var drives []*drive
	for _, t := range targets {
		dir, err := filepath.Abs(t.Dir)
		if err != nil {
			return err
		}
		if t.Weight < 0 {
			return fmt.Errorf("%s: its weight is negative: give a number above 0", t.Dir)
		}
		d := &drive{dir: dir, id: s.hooks.driveOf(dir), weight: t.Weight}
		if d.weight == 0 {
			d.weight = 1
		}
		if slices.ContainsFunc(drives, func(o *drive) bool { return o.dir == dir }) {
			return fmt.Errorf("%s: is given twice", t.Dir)
		}
		drives = append(drives, d)
	}
	for i := range s.rec.Files {
		f := &s.rec.Files[i]
		for _, d := range drives {
			if s.home(f) == d.dir {
				d.load += float64(f.Size) / d.weight
			}
		}
	}
	for i := range s.rec.Files {
		f := &s.rec.Files[i]
		if f.Dir != "" || s.begun(f) || !strings.HasSuffix(f.Name, ".safetensors") {
			continue
		}
		var best *drive
		for _, d := range drives {
			if room[d.id]-keepFree < f.Size {
				continue
			}
			// What is compared is the load after the file was put there.
			if best == nil || d.load+float64(f.Size)/d.weight < best.load+float64(f.Size)/best.weight {
				best = d
			}
		}
		if best == nil {
			return fmt.Errorf("%w: %s (%s) fits on none of the %d drives: make room, or name another directory", disk.ErrFull, f.Name, gb(f.Size), len(drives))
		}
		best.load += float64(f.Size) / best.weight
		room[best.id] -= f.Size
		if best.dir != s.dir {
			f.Dir = best.dir
		}
	}
	return nil
}

// begun tells whether a file has bytes in the store's own directory already.
func (s *store) begun(f *storeFile) bool {
	return exists(s.link(f)) || exists(s.link(f)+partSuffix)
}

func gb(n int64) string {
	switch {
	case n >= 1e9:
		return fmt.Sprintf("%.2f GB", float64(n)/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.2f MB", float64(n)/1e6)
	}
	return fmt.Sprintf("%d bytes", n)
}

// plain drops the path from an error whose text will name the file anyway, and says
// what can be done about the causes that users meet.
func plain(err error) error {
	if err == nil {
		return nil
	}
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		err = p.Err
	}
	if l, ok := errors.AsType[*os.LinkError](err); ok {
		err = l.Err
	}
	switch {
	case disk.Full(err):
		return fmt.Errorf("%w: make room and run the same command again; it goes on from here", err)
	case errors.Is(err, fs.ErrPermission), isReadOnly(err):
		return fmt.Errorf("%w: give a directory that can be written to", err)
	}
	return err
}
