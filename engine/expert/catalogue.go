package expert

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/hub"
)

// A set of homes travels as a bit mask.
const maxHomes = 64

// catalogue knows the homes of every expert. The checkpoint is home 0. What a home
// costs in memory per expert: copies of shards nothing, packed files two bytes,
// one file per expert nine bytes until it is read and a file's record from then on.
type catalogue struct {
	ck     *checkpoint.Checkpoint
	layout checkpoint.ExpertLayout
	first  int // the first MoE layer
	per    int // experts of a layer
	homes  []*home
}

// home is one kind of copies in one directory.
type home struct {
	dir  string
	kind string
	find func(layer, id int) (*drive.File, int64, error) // nil without an error: not here
	held int                                             // experts

	// hold, of a home that fills on demand, returns the file to read an expert from, and
	// what is to be called once it was read; release may be nil.
	hold func(layer, id int) (f *drive.File, release func())

	// sum, if not nil, knows the SHA-256 that the bytes of an expert have to have.
	sum func(layer, id int) *[sha256.Size]byte
}

func (h *home) String() string { return fmt.Sprintf("%s (%s)", h.dir, h.kind) }

// place is where a home has an expert.
type place struct {
	home   int
	file   *drive.File
	offset int64
	err    error // the home cannot be asked
}

func newCatalogue(ck *checkpoint.Checkpoint) *catalogue {
	c := ck.Config()
	return &catalogue{ck: ck, layout: ck.ExpertLayout(), first: c.FirstDense, per: c.Experts}
}

// openCatalogue finds what the checkpoint and dirs hold. A directory that holds
// nothing usable, or anything that contradicts the checkpoint, is an error.
func openCatalogue(ck *checkpoint.Checkpoint, drives *drive.Set, dirs []string) (*catalogue, error) {
	c := newCatalogue(ck)
	own := make([]*drive.File, ck.Files())
	for i := range own {
		if ck.File(i) == nil {
			continue
		}
		f, err := drives.Open(ck.Path(i))
		if err != nil {
			return nil, err
		}
		own[i] = f
	}
	c.addShards(ck.Dir(), "checkpoint", own)
	if ck.Filler() != nil {
		if err := c.fill(drives, own); err != nil {
			return nil, err
		}
	}
	seen := []string{ck.Dir()}
	for _, dir := range dirs {
		for _, other := range seen {
			if sameDir(dir, other) {
				return nil, fmt.Errorf("%s: is %s again: name each directory once, and the checkpoint not at all", dir, other)
			}
		}
		seen = append(seen, dir)
		add := c.addDir
		if hub.IsSite(dir) {
			add = c.addSite
		}
		if err := add(drives, dir); err != nil {
			return nil, err
		}
	}
	if len(c.homes) > maxHomes {
		return nil, fmt.Errorf("%s: %d homes of experts are more than the %d allowed: use fewer directories", dirs[len(dirs)-1], len(c.homes), maxHomes)
	}
	return c, nil
}

// Held is how many experts of ck a directory of copies holds, or why a run would not take
// it. It reads headers and directories only.
func Held(ck *checkpoint.Checkpoint, drives *drive.Set, dir string) (int, error) {
	c, err := openCatalogue(ck, drives, []string{dir})
	if err != nil {
		return 0, err
	}
	n := 0
	for _, h := range c.homes[1:] {
		n += h.held
	}
	return n, nil
}

func sameDir(a, b string) bool {
	if a == b {
		return true
	}
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// index numbers the experts of all layers.
func (c *catalogue) index(layer, id int) int32 { return int32((layer-c.first)*c.per + id) }

func (c *catalogue) layers() int { return c.ck.Config().Layers - c.first }

func (c *catalogue) total() int { return c.layers() * c.per }

// places lists where an expert is, in the order of the homes, without those of the
// mask.
func (c *catalogue) places(layer, id int, without uint64) []place {
	var ps []place
	for i, h := range c.homes {
		if without&(1<<i) != 0 {
			continue
		}
		if f, off, err := h.find(layer, id); f != nil || err != nil {
			ps = append(ps, place{i, f, off, err})
		}
	}
	return ps
}

func (c *catalogue) addDir(drives *drive.Set, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("%s: %w: give a directory that holds experts", dir, reason(err))
	}
	shard := map[string]int{}
	for i := range c.ck.Files() {
		if c.ck.File(i) != nil {
			shard[filepath.Base(c.ck.Path(i))] = i
		}
	}
	var shards, packed, loose []string
	for _, e := range entries {
		name := e.Name()
		if _, ok := shard[name]; ok {
			shards = append(shards, name)
		} else if _, ok := packedLayer(name); ok {
			packed = append(packed, name)
		} else if _, _, ok := looseExpert(name); ok {
			loose = append(loose, name)
		}
	}
	before := len(c.homes)
	if len(shards) > 0 {
		files := make([]*drive.File, c.ck.Files())
		for _, name := range shards {
			path := filepath.Join(dir, name)
			if err := c.sameShard(path, shard[name]); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			if files[shard[name]], err = drives.Open(path); err != nil {
				return err
			}
		}
		c.addShards(dir, "shards", files)
	}
	if len(packed) > 0 {
		if err := c.addPacked(drives, dir, packed); err != nil {
			return err
		}
	}
	if len(loose) > 0 {
		if err := c.addLoose(drives, dir, loose); err != nil {
			return err
		}
	}
	if sub := filepath.Join(dir, looseDir); filepath.Base(dir) != looseDir {
		list, err := os.ReadDir(sub)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: %w: make it readable, or remove it", sub, reason(err))
		}
		var names []string
		for _, e := range list {
			if _, _, ok := looseExpert(e.Name()); ok {
				names = append(names, e.Name())
			}
		}
		if len(names) > 0 {
			if err := c.addLoose(drives, sub, names); err != nil {
				return err
			}
		}
	}
	if len(c.homes) == before {
		return fmt.Errorf("%s: holds no experts of this model: give a directory with copies of its shards, with experts-LAYER.bin files or with L<layer>-E<expert>.bin files", dir)
	}
	return nil
}

// addShards adds a home that has experts where the checkpoint has them, in the
// files that are not nil.
func (c *catalogue) addShards(dir, kind string, files []*drive.File) {
	h := &home{dir: dir, kind: kind, find: func(layer, id int) (*drive.File, int64, error) {
		x := c.ck.Expert(layer, id)
		return files[x.File], x.Offset, nil
	}}
	for l := range c.layers() {
		for id := range c.per {
			if files[c.ck.Expert(c.first+l, id).File] != nil {
				h.held++
			}
		}
	}
	c.homes = append(c.homes, h)
}

// openRegular opens a file for reading. It refuses anything else before it is opened, such as
// a pipe, on which that would wait for ever.
func openRegular(path string) (*os.File, os.FileInfo, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, reason(err)
	}
	if !info.Mode().IsRegular() {
		return nil, nil, errors.New("is not a regular file: remove it from the directory")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, reason(err)
	}
	if info, err = f.Stat(); err != nil {
		f.Close()
		return nil, nil, reason(err)
	}
	return f, info, nil
}

// sameShard demands that the file at path can be a copy of shard i: as long, with
// the same header, and written wherever the shard has anything but zeros. It does
// not compare contents.
func (c *catalogue) sameShard(path string, i int) error {
	orig := c.ck.File(i)
	info, err := orig.Stat()
	if err != nil {
		return err
	}
	f, now, err := openRegular(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if now.Size() != info.Size() {
		return fmt.Errorf("has %d bytes, the checkpoint's has %d: copy it again", now.Size(), info.Size())
	}
	// The header ends before the first byte of data, that is, before any expert.
	head := make([]byte, 8)
	if _, err := orig.ReadAt(head, 0); err != nil {
		return err
	}
	end := int64(8)
	for j := range 8 {
		end += int64(head[j]) << (8 * j)
	}
	a, b := make([]byte, 64<<10), make([]byte, 64<<10)
	for at := int64(0); at < end; at += int64(len(a)) {
		n := min(end-at, int64(len(a)))
		if _, err := orig.ReadAt(a[:n], at); err != nil {
			return err
		}
		if _, err := f.ReadAt(b[:n], at); err != nil {
			return reason(err)
		}
		if !bytes.Equal(a[:n], b[:n]) {
			return errors.New("has another header than the checkpoint's file of that name: it belongs to another model or download: copy it again")
		}
	}
	return holes(f, now.Size(), func(from, to int64) error {
		for _, at := range []int64{from, (from + to) / 2, max(from, to-int64(len(a)))} {
			n, err := orig.ReadAt(a[:min(to-at, int64(len(a)))], at)
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			if !zero(a[:n]) {
				return fmt.Errorf("bytes %d to %d were never written: the copy is incomplete, copy it again", from, to)
			}
		}
		return nil
	})
}

func zero(b []byte) bool {
	return !slices.ContainsFunc(b, func(x byte) bool { return x != 0 })
}

// packedLayer is the layer of the name experts-LAYER.bin.
func packedLayer(name string) (int, bool) {
	s, ok := strings.CutPrefix(name, "experts-")
	if !ok {
		return 0, false
	}
	if s, ok = strings.CutSuffix(s, ".bin"); !ok {
		return 0, false
	}
	return number(s)
}

func packedName(layer int) string { return fmt.Sprintf("experts-%d.bin", layer) }

// addPacked adds a home of files that [PlaceStage] wrote.
func (c *catalogue) addPacked(drives *drive.Set, dir string, names []string) error {
	print, err := Fingerprint(c.ck)
	if err != nil {
		return err
	}
	t := make(tables, c.layers())
	h := t.home(c, dir)
	for _, name := range names {
		path := filepath.Join(dir, name)
		p, err := openPacked(path, c, print)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if layer, _ := packedLayer(name); layer != p.layer {
			return fmt.Errorf("%s: holds layer %d: give it its own name back", path, p.layer)
		}
		f, err := drives.Open(path)
		if err != nil {
			return err
		}
		h.held += t.enter(c, p, f)
	}
	c.homes = append(c.homes, h)
	return nil
}

// tables say where packed files have their experts, by layer.
type tables []struct {
	file         *drive.File
	ids          []uint16
	base, stride int64
}

// enter adds a file and returns how many experts it holds.
func (t tables) enter(c *catalogue, p *packed, f *drive.File) int {
	e := &t[p.layer-c.first]
	e.file, e.base, e.stride = f, p.base, p.stride
	for _, id := range p.ids {
		e.ids = append(e.ids, uint16(id))
	}
	return len(e.ids)
}

func (t tables) home(c *catalogue, dir string) *home {
	return &home{dir: dir, kind: "packed", find: func(layer, id int) (*drive.File, int64, error) {
		e := &t[layer-c.first]
		i, ok := slices.BinarySearch(e.ids, uint16(id))
		if !ok {
			return nil, 0, nil
		}
		return e.file, e.base + int64(i)*e.stride, nil
	}}
}

// looseDir is where a store of one file per expert lies below its root.
const looseDir = "k3-experts"

// looseExpert reads the name L<layer>-E<expert>.bin; the file has the six tensors in
// the checkpoint's order and nothing else.
func looseExpert(name string) (layer, id int, ok bool) {
	s, ok := strings.CutPrefix(name, "L")
	if !ok {
		return 0, 0, false
	}
	if s, ok = strings.CutSuffix(s, ".bin"); !ok {
		return 0, 0, false
	}
	l, e, ok := strings.Cut(s, "-E")
	if !ok {
		return 0, 0, false
	}
	layer, ok = number(l)
	id, ok2 := number(e)
	return layer, id, ok && ok2
}

// number reads digits in the one usual way, so that no two names mean one thing.
func number(s string) (int, bool) {
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0 && strconv.Itoa(n) == s
}

// addLoose adds a home of one file per expert. They are opened when they are first
// read: K3 has 82432 of them.
func (c *catalogue) addLoose(drives *drive.Set, dir string, names []string) error {
	var mu sync.Mutex
	present, files := make([]bool, c.total()), make([]*drive.File, c.total())
	h := &home{dir: dir, kind: "raw-v1", held: len(names)}
	h.find = func(layer, id int) (*drive.File, int64, error) {
		i := c.index(layer, id)
		if !present[i] {
			return nil, 0, nil
		}
		mu.Lock()
		defer mu.Unlock()
		if files[i] != nil {
			return files[i], 0, nil
		}
		path := filepath.Join(dir, fmt.Sprintf("L%d-E%d.bin", layer, id))
		f, err := drives.Open(path)
		if err != nil {
			return nil, 0, err
		}
		if f.Size() != c.layout.ExpertBytes {
			return nil, 0, fmt.Errorf("%s: %w: it has %d bytes, an expert has %d", path, drive.ErrChanged, f.Size(), c.layout.ExpertBytes)
		}
		files[i] = f
		return f, 0, nil
	}
	for _, name := range names {
		layer, id, _ := looseExpert(name)
		path := filepath.Join(dir, name)
		if !c.ck.Config().IsMoE(layer) || id >= c.per {
			return fmt.Errorf("%s: the model has no expert %d in layer %d: the files belong to another model", path, id, layer)
		}
		info, err := os.Stat(path)
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w: make it readable, or remove it", path, reason(err))
		case !info.Mode().IsRegular():
			return fmt.Errorf("%s: is not a regular file: remove it from the directory", path)
		case info.Size() != c.layout.ExpertBytes:
			return fmt.Errorf("%s: has %d bytes, an expert has %d: copy it again, or remove it", path, info.Size(), c.layout.ExpertBytes)
		}
		present[c.index(layer, id)] = true
	}
	c.homes = append(c.homes, h)
	return nil
}

// reason drops the path from an error whose text names the file anyway.
func reason(err error) error {
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		return pe.Err
	}
	return err
}
