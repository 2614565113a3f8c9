// Package hub hides how a model comes from a server onto a disk, and how a copy is
// known to be right.
//
// # Fetching
//
// [Fetch] brings a revision of a repository into a directory: from a hub that speaks
// Hugging Face's interface, from mirrors of it, or from any web server that serves
// ranges of files. Parts arrive over several connections. A file has its name only
// when it is whole, its SHA-256 is the one that was pinned, and it is on the drive;
// until then it is NAME.part, with NAME.journal saying which bytes of it have
// arrived. Killing the process at any point loses at most the last few megabytes of
// each connection; the next Fetch goes on from there. [Preview] says what a Fetch
// would do.
//
// # Verifying
//
// [Verify] looks at what is there: sizes and structure in seconds, or every byte.
// While a file is proved against its digest, the state of SHA-256 is kept every 16
// MiB. These states make each such chunk checkable alone, so that damage is named
// by its range and only that range is fetched again.
//
// # Filling on demand
//
// A [Depot] is a store whose files fill while they are used: a range that is not
// there is fetched, checked, written and then entered as present, once.
package hub

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"deltafin/engine/disk"
)

// Options of a fetch. The zero value of every field but Dir is what users want.
type Options struct {
	Dir      string   // of the store; made if it is not there
	Spread   []Target // drives that share the shards; Dir then holds links to them
	Repo     string   // "" means DefaultRepo
	Revision string   // a commit, or a name that is resolved once; "" means the one that Dir holds, else the pinned one

	// Sources are tried in order; the next serves while one fails. Each is the
	// address of a hub, or an address with {path} in it where the name of a file goes.
	// None means DefaultHub, or those that a store remembers which fills on demand.
	Sources []string

	// Token is sent to the first hub and nowhere else, not even where that hub
	// redirects to. It is never printed.
	Token string

	// Inventory is what is known of the model beforehand; nil means Pinned. It only
	// counts for the repository and revisions that it names.
	Inventory *Inventory

	Connections    int           // 0 means 8
	PartBytes      int64         // bytes of one request; 0 means 64 MiB
	BytesPerSecond float64       // of all connections together; 0 means unlimited
	Stall          time.Duration // a connection that brings nothing for so long is cut; 0 means 30 s
	Retries        int           // failures in a row, without one byte, before a part is given up; 0 means 20
	Backoff        time.Duration // rest after the first of them, then doubled up to 128 times that; 0 means 0.5 s
	KeepFree       int64         // bytes to leave free on each drive; 0 means a hundredth of what is written to it

	// Confirm is asked before the first byte of the model is fetched. An error ends the
	// fetch and is returned as it is. Nil means yes.
	Confirm func(*Plan) error

	Progress func(Progress) // called a few times a second, from one goroutine at a time
	Log      func(line string)

	hooks *hooks
}

// remember takes the sources of a store that fills on demand, where none are given.
func (o *Options) remember() error {
	if len(o.Sources) > 0 || o.Dir == "" {
		return nil
	}
	r, err := (&store{dir: o.Dir}).stream()
	if err == nil {
		o.Sources = r.Sources
	}
	return err
}

func (o *Options) defaults() error {
	if o.Dir == "" {
		return errors.New("no directory was given")
	}
	set := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	set(&o.Connections, 8)
	set(&o.Retries, 20)
	if o.PartBytes <= 0 {
		o.PartBytes = 64 << 20
	}
	if o.Stall <= 0 {
		o.Stall = 30 * time.Second
	}
	if o.Backoff <= 0 {
		o.Backoff = backoffFirst
	}
	if o.Repo == "" {
		o.Repo = DefaultRepo
	}
	if len(o.Sources) == 0 {
		o.Sources = []string{DefaultHub}
	}
	if o.Inventory == nil {
		o.Inventory = Pinned()
	}
	if o.Log == nil {
		o.Log = func(string) {}
	}
	if len(o.Spread) > 0 && !canSpread {
		return errors.New("spreading a model over drives needs symbolic links, which this system does not give to ordinary users: fetch into one directory, or join the drives to one volume")
	}
	return nil
}

// Plan is what a fetch would do.
type Plan struct {
	Repo, Revision string

	Files int   // of the revision
	Bytes int64 // of the revision

	Have    int64 // bytes of files that are here and were proved right
	Check   int64 // bytes of files that are here and not known to be right; they are read
	Arrived int64 // bytes of unfinished files that are here
	Need    int64 // bytes to be transferred

	Extra  []string    // files of the hub that the pinned inventory does not know; they are fetched too
	Drives []DrivePlan // where the bytes go
}

// DrivePlan is one directory's part of a plan.
type DrivePlan struct {
	Dir   string
	Files int
	Need  int64 // bytes to be written
	Keep  int64 // bytes to be left free
	Free  int64 // bytes free now; negative if the file system does not say
}

// Preview says what Fetch would do with the same options. It writes nothing.
func Preview(ctx context.Context, o Options) (*Plan, error) {
	p, err := preview(ctx, &o)
	return p, inDir(o.Dir, err)
}

func preview(ctx context.Context, o *Options) (*Plan, error) {
	if err := o.remember(); err != nil {
		return nil, err
	}
	if err := o.defaults(); err != nil {
		return nil, err
	}
	c, err := newClient(o)
	if err != nil {
		return nil, err
	}
	defer c.close()
	s, err := openStore(o.Dir, o.hooks)
	if err != nil {
		return nil, err
	}
	return prepare(ctx, o, c, s)
}

// Fetch brings what is missing of a revision into o.Dir. It can be called again
// after whatever ended it, and goes on. Every error begins with o.Dir.
func Fetch(ctx context.Context, o Options) error { return inDir(o.Dir, fetch(ctx, &o)) }

func inDir(dir string, err error) error {
	if err == nil || dir == "" {
		return err
	}
	return fmt.Errorf("%s: %w", dir, err)
}

func fetch(ctx context.Context, o *Options) error {
	if err := o.remember(); err != nil {
		return err
	}
	if err := o.defaults(); err != nil {
		return err
	}
	c, err := newClient(o)
	if err != nil {
		return err
	}
	defer c.close()
	unlock, err := lockAll(o)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := openStore(o.Dir, o.hooks)
	if err != nil {
		return err
	}
	p, err := prepare(ctx, o, c, s)
	if err != nil {
		return err
	}
	if err := p.fits(); err != nil {
		return err
	}
	if o.Confirm != nil {
		if err := o.Confirm(p); err != nil {
			return err
		}
	}
	if err := s.save(); err != nil {
		return err
	}
	filling := exists(filepath.Join(s.dir, streamName))
	if filling {
		if err := s.uninstall(); err != nil {
			return err
		}
	}
	if err := newFetcher(o, c, s, func(*storeFile) bool { return true }).run(ctx); err != nil || !filling {
		return err
	}
	return plain(os.Remove(filepath.Join(s.dir, streamName)))
}

// lockAll keeps other fetches out of all directories until it is undone or the
// process ends.
func lockAll(o *Options) (unlock func(), err error) {
	var held []*dirLock
	unlock = func() {
		for _, l := range held {
			l.release()
		}
	}
	dirs := map[string]bool{}
	for _, d := range append([]Target{{Dir: o.Dir}}, o.Spread...) {
		abs, err := filepath.Abs(d.Dir)
		if err != nil {
			unlock()
			return nil, err
		}
		dirs[abs] = true
	}
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		l, err := lockDir(dir)
		if err != nil {
			unlock()
			if abs, _ := filepath.Abs(o.Dir); abs != dir {
				err = fmt.Errorf("%s: %w", dir, err)
			}
			return nil, err
		}
		held = append(held, l)
	}
	return unlock, nil
}

// dirLock is the right to change a directory.
type dirLock struct{ f *os.File }

func lockDir(dir string) (*dirLock, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, plain(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, plain(err)
	}
	if err := disk.Lock(f); err != nil {
		b := make([]byte, 32)
		n, _ := f.ReadAt(b, 0)
		f.Close()
		return nil, busy(bytes.TrimSpace(b[:n]))
	}
	// Who holds it is a help to the next one's message, no more.
	f.Truncate(0)
	f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return &dirLock{f}, nil
}

// busy is who else writes into a directory.
type busy string

func (b busy) Error() string {
	return fmt.Sprintf("is being written by another deltafin (process %s): wait until it ends, or stop it", string(b))
}

func (busy) Is(target error) bool { return target == disk.ErrBusy }

func (l *dirLock) release() {
	if l.f != nil {
		disk.Unlock(l.f)
		l.f.Close()
		l.f = nil
	}
}

// prepare finds out which files the revision has, enters them into the store's
// record, and looks at what is here already.
func prepare(ctx context.Context, o *Options, c *client, s *store) (*Plan, error) {
	if s.rec != nil && s.rec.Repo != o.Repo {
		return nil, fmt.Errorf("holds %s, not %s: give another directory", s.rec.Repo, o.Repo)
	}
	if c.revision == "" {
		switch {
		case s.rec != nil:
			c.revision = s.rec.Revision
		case o.Inventory.Repo == o.Repo:
			c.revision = o.Inventory.Revision
		default:
			c.revision = "main"
		}
	}
	var inv *Inventory
	if s.rec != nil && s.rec.Revision == c.revision {
		inv = s.rec.inventory()
	} else {
		var err error
		if inv, err = c.list(ctx, o.Retries, o.Backoff, o.Log); err != nil {
			return nil, err
		}
	}
	c.revision = inv.Revision
	var extra []string
	if o.Inventory.holds(inv.Repo, inv.Revision) {
		var err error
		if extra, err = inv.pin(o.Inventory); err != nil {
			return nil, err
		}
	}
	if err := inv.provable(); err != nil {
		return nil, err
	}
	s.adopt(inv)

	room := map[string]int64{}
	for _, t := range o.Spread {
		abs, err := filepath.Abs(t.Dir)
		if err != nil {
			return nil, err
		}
		free, err := s.hooks.freeSpace(existing(abs))
		if err != nil {
			return nil, fmt.Errorf("%s: its free space is unknown: %w", t.Dir, plain(err))
		}
		room[s.hooks.driveOf(abs)] = free
	}
	if err := s.place(o.Spread, room, o.KeepFree); err != nil {
		return nil, err
	}
	return s.plan(o, extra)
}

// plan counts what is here and what is to come.
func (s *store) plan(o *Options, extra []string) (*Plan, error) {
	p := &Plan{Repo: s.rec.Repo, Revision: s.rec.Revision, Files: len(s.rec.Files), Extra: extra}
	drives := map[string]*DrivePlan{}
	for i := range s.rec.Files {
		f := &s.rec.Files[i]
		p.Bytes += f.Size
		if s.whole(f) {
			p.Have += f.Size
			continue
		}
		if s.adoptable(f) {
			p.Check += f.Size
			continue
		}
		arrived := s.arrived(f)
		p.Arrived += arrived
		p.Need += f.Size - arrived
		dir := s.home(f)
		d := drives[dir]
		if d == nil {
			d = &DrivePlan{Dir: dir, Free: -1, Keep: o.KeepFree}
			drives[dir] = d
		}
		d.Files++
		d.Need += f.Size - arrived
	}
	for _, dir := range slices.Sorted(maps.Keys(drives)) {
		d := drives[dir]
		if d.Keep == 0 {
			d.Keep = d.Need / 100
		}
		if free, err := s.hooks.freeSpace(existing(dir)); err == nil {
			d.Free = free
		}
		p.Drives = append(p.Drives, *d)
	}
	return p, nil
}

// existing is dir or the nearest directory above it that is there.
func existing(dir string) string {
	for {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			return dir
		}
		dir = up
	}
}

func (p *Plan) fits() error {
	for _, d := range p.Drives {
		if d.Free >= 0 && d.Free < d.Need+d.Keep {
			return fmt.Errorf("%w: %s are needed in %s (and %s are to stay free), and the drive has %s free: make room, spread the model over several drives, or give another directory", disk.ErrFull, gb(d.Need), d.Dir, gb(d.Keep), gb(d.Free))
		}
	}
	return nil
}

// adoptable tells whether a file is here under its name and only has to be read to
// know whether it is right.
func (s *store) adoptable(f *storeFile) bool {
	info, err := os.Stat(s.path(f))
	return err == nil && info.Mode().IsRegular() && info.Size() == f.Size && !exists(s.path(f)+rangesSuffix)
}

// arrived is how much of an unfinished file its journal claims.
func (s *store) arrived(f *storeFile) int64 {
	path := s.path(f)
	for _, at := range [][2]string{{path + partSuffix, path + journalSuffix}, {path, path + rangesSuffix}, {path + partSuffix, path + rangesSuffix}} {
		info, err := os.Stat(at[0])
		if err != nil {
			continue
		}
		b, err := readBounded(at[1], journalLimit)
		if err != nil {
			continue
		}
		_, have, _, _ := parseJournal(b, f.Size, f.identity())
		return have.bytes() - have.beyond(info.Size())
	}
	return 0
}

func readBounded(path string, limit int64) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, fmt.Errorf("%s is no file of this program", filepath.Base(path))
	}
	return os.ReadFile(path)
}
