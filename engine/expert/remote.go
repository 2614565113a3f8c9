package expert

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sync/errgroup"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/hub"
)

// filling is a checkpoint's filler as a drive: it gives what is not here.
type filling struct {
	checkpoint.Filler
	name string
}

func (f filling) Name() string { return f.name }

func (f filling) ReadAt(ctx context.Context, file string, p []byte, off int64) error {
	return f.Read(ctx, file, off, p)
}

// fill makes the checkpoint's own home, own being its files, one that fills on demand.
func (c *catalogue) fill(drives *drive.Set, own []*drive.File) error {
	f := filling{c.ck.Filler(), c.ck.Dir() + " (on demand)"}
	afar := make([]*drive.File, len(own))
	for i, o := range own {
		if o != nil {
			var err error
			if afar[i], err = drives.OpenRemote(f, c.ck.Shard(i), o.Size()); err != nil {
				return err
			}
		}
	}
	h := c.homes[0]
	h.find = func(layer, id int) (*drive.File, int64, error) {
		x := c.ck.Expert(layer, id)
		if f.Has(c.ck.Shard(x.File), x.Offset, x.Bytes) {
			return own[x.File], x.Offset, nil
		}
		return afar[x.File], x.Offset, nil
	}
	h.hold = func(layer, id int) (*drive.File, func()) {
		x := c.ck.Expert(layer, id)
		if release, ok := f.Hold(c.ck.Shard(x.File), x.Offset, x.Bytes); ok {
			return own[x.File], release
		}
		return afar[x.File], nil
	}
	return nil
}

// away tells whether an expert would have to be fetched on demand.
func (c *catalogue) away(layer, id int) bool {
	if c.homes[0].hold == nil {
		return false
	}
	for _, p := range c.places(layer, id, 0) {
		if p.err == nil && (p.home > 0 || !p.file.Device().Remote()) {
			return false
		}
	}
	return true
}

const (
	shardsOverHTTP = "shards over HTTP"

	// A web server that takes longer to say what it has is none to read from.
	siteOpen = 2 * time.Minute
	// Requests at a time while it is asked.
	siteAsks = 8
	// siteHeader bytes of a shard are compared with the checkpoint's.
	siteHeader = 64 << 10
)

// siteOptions are the default but for tests.
var siteOptions hub.SiteOptions

// siteFile is a file of a web server as an io.ReaderAt.
type siteFile struct {
	ctx  context.Context
	site *hub.Site
	name string
}

func (f siteFile) ReadAt(p []byte, off int64) (int, error) {
	if err := f.site.ReadAt(f.ctx, f.name, p, off); err != nil {
		return 0, err
	}
	return len(p), nil
}

// addSite adds the homes that a web server has below an address: copies of shards, and
// packed files. It cannot be asked for a list, so it is asked for each name.
func (c *catalogue) addSite(drives *drive.Set, base string) error {
	site, err := hub.OpenSite(base, siteOptions)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), siteOpen)
	defer cancel()
	print, err := Fingerprint(c.ck)
	if err != nil {
		return err
	}
	shards, packs := make([]*drive.File, c.ck.Files()), make([]*packed, c.layers())
	files := make([]*drive.File, c.layers())
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(siteAsks)
	ask := func(name string, found func(size int64) error) {
		g.Go(func() error {
			size, err := site.Size(ctx, name)
			if err == nil {
				err = found(size)
			} else if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				err = fmt.Errorf("%s/%s: %w", site.Name(), name, err)
			}
			return err
		})
	}
	for i := range shards {
		if c.ck.File(i) == nil {
			continue
		}
		name := c.ck.Shard(i)
		ask(name, func(size int64) (err error) {
			if err := c.sameRemoteShard(siteFile{ctx, site, name}, size, i); err != nil {
				return err
			}
			shards[i], err = drives.OpenRemote(site, name, size)
			return err
		})
	}
	for l := range packs {
		name := packedName(c.first + l)
		ask(name, func(size int64) error {
			p, err := readPackedOf(siteFile{ctx, site, name}, size, c, print)
			if err == nil && p.layer != c.first+l {
				err = fmt.Errorf("holds layer %d: give it its own name back", p.layer)
			}
			if err != nil {
				return err
			}
			packs[l] = p
			files[l], err = drives.OpenRemote(site, name, size)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	before := len(c.homes)
	c.addShards(base, shardsOverHTTP, shards)
	if c.homes[before].held == 0 {
		c.homes = c.homes[:before]
	}
	t := make(tables, c.layers())
	h := t.home(c, base)
	h.kind = "packed over HTTP"
	h.sum = func(layer, id int) *[sha256.Size]byte { return packs[layer-c.first].sum(id) }
	for l, p := range packs {
		if p != nil {
			h.held += t.enter(c, p, files[l])
		}
	}
	if h.held > 0 {
		c.homes = append(c.homes, h)
	}
	if len(c.homes) == before {
		return fmt.Errorf("%s: serves no experts of this model: give the address below which copies of its shards or experts-LAYER.bin files lie", base)
	}
	return nil
}

// sameRemoteShard demands that a file can be a copy of shard i: as long, with the
// same beginning, and with the same bytes where [Fingerprint] looks.
func (c *catalogue) sameRemoteShard(r siteFile, size int64, i int) error {
	info, err := c.ck.File(i).Stat()
	if err != nil {
		return err
	}
	if size != info.Size() {
		return fmt.Errorf("has %d bytes, the checkpoint's has %d: copy it again", size, info.Size())
	}
	same := func(off, n int64, read func(b []byte) error) error {
		a, b := make([]byte, n), make([]byte, n)
		if err := read(a); err != nil {
			return err
		}
		if _, err := r.ReadAt(b, off); err != nil {
			return err
		}
		if !bytes.Equal(a, b) {
			return fmt.Errorf("has other bytes than the checkpoint's file of that name at byte %d: it belongs to another model or download: copy it again", off)
		}
		return nil
	}
	if err := same(0, min(size, siteHeader), func(b []byte) error { _, err := c.ck.File(i).ReadAt(b, 0); return err }); err != nil {
		return err
	}
	for l := range c.layers() {
		x := printed(c.ck, c.first+l)
		if x.File != i {
			continue
		}
		if err := same(x.Offset, x.Bytes, func(b []byte) error { return c.ck.ReadExtent(x, b) }); err != nil {
			return err
		}
	}
	return nil
}

// verifySite is PlaceVerify for a web server.
func verifySite(ctx context.Context, ck *checkpoint.Checkpoint, base string, progress func(done, total int)) (sound int, faults []PlaceFault, err error) {
	drives := drive.NewSet(drive.Options{})
	defer drives.Close()
	c := newCatalogue(ck)
	if err := c.addSite(drives, base); err != nil {
		return 0, nil, err
	}
	h := c.homes[len(c.homes)-1] // packed files come last
	if h.sum == nil {
		return 0, nil, fmt.Errorf("%s: serves no packed experts: nothing else there has digests", base)
	}
	buf, err := drive.NewBuffer(c.layout.ExpertBytes)
	if err != nil {
		return 0, nil, err
	}
	defer buf.Free()
	for l := range c.layers() {
		layer := c.first + l
		var bad []int32
		for id := range c.per {
			f, off, _ := h.find(layer, id)
			if f == nil {
				continue
			}
			if err := drives.Read(ctx, drive.Read{File: f, Offset: off, Bytes: c.layout.ExpertBytes, Into: buf}); err != nil {
				return sound, faults, err
			}
			if sha256.Sum256(buf.Bytes()) == *h.sum(layer, id) {
				sound++
			} else {
				bad = append(bad, int32(id))
			}
		}
		if len(bad) > 0 {
			faults = append(faults, PlaceFault{File: base + "/" + packedName(layer), IDs: bad})
		}
		if progress != nil {
			progress(l+1, c.layers())
		}
	}
	return sound, faults, nil
}
