package hub

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"time"
)

// unit is a run of bytes that came on demand: it is dropped as a whole.
type unit struct {
	record
	df   *depotFile
	used int64 // of the depot's clock; 0 is before it was opened, then the hour counts
	held int
}

// dropLeast: less than this gives a drive hardly any room back.
const dropLeast = 4 << 10

// dropShare of the bound is dropped at a time, so that flushing is rare.
const dropShare = 32

func (df *depotFile) insert(u *unit) {
	i := sort.Search(len(df.units), func(i int) bool { return df.units[i].off >= u.off })
	df.units = slices.Insert(df.units, i, u)
}

// within returns the units that have to do with x.
func (df *depotFile) within(x span) []*unit {
	i := sort.Search(len(df.units), func(i int) bool { return df.units[i].end > x.off })
	j := i
	for j < len(df.units) && df.units[j].off < x.end {
		j++
	}
	return df.units[i:j]
}

// Keep is the bound of what came on demand, in bytes; 0 is none.
func (d *Depot) Keep() int64 { return d.o.Keep }

// Hold keeps a range that is in the store from being dropped until release is called,
// and counts as a use of it. ok is false if it is not there.
func (d *Depot) Hold(name string, off, n int64) (release func(), ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	df, x := d.files[name], span{off, off + n}
	switch {
	case df == nil || off < 0 || n < 0 || off > df.f.Size-n:
		return nil, false
	case df.whole:
		return func() {}, true
	case !df.have.has(x):
		return nil, false
	}
	d.clock++
	held := slices.Clone(df.within(x))
	for _, u := range held {
		u.held++
		u.used = d.clock
	}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, u := range held {
			u.held--
		}
	}, true
}

// makeRoom sees to it that n more bytes may be kept. Moved says that it had to give the
// lock away, so that the caller has to look again.
func (d *Depot) makeRoom(n int64) (moved, ok bool) {
	switch over := d.kept + n - d.o.Keep; {
	case d.o.Keep == 0 && !d.noRoom, d.o.Keep > 0 && over <= 0:
		return false, true
	case d.o.Keep == 0: // the drive was full: is it still?
		free, err := d.s.hooks.freeSpace(d.s.dir)
		d.noRoom = err != nil || free < 2*n
		return false, !d.noRoom
	case d.fixed != nil || n > d.o.Keep:
		return false, false
	default:
		victims := d.victims(over, d.o.Keep/dropShare)
		if victims == nil {
			return false, false
		}
		d.mu.Unlock()
		err := d.drop(victims)
		d.mu.Lock()
		for df, units := range victims {
			for _, u := range units {
				df.flying = df.flying.without(u.span)
			}
		}
		d.cond.Broadcast()
		if err != nil {
			d.fixed = err
			d.o.Log(fmt.Sprintf("%s: nothing can be dropped any more (%v): what is beyond %s is fetched each time", d.s.dir, plain(err), gb(d.o.Keep)))
		}
		return true, false
	}
}

// victims takes what was not used for the longest time out of the store's account:
// at least need bytes, and up to more besides. Nil if there is not that much.
func (d *Depot) victims(need, more int64) map[*depotFile][]*unit {
	var all []*unit
	for _, df := range d.files {
		for _, u := range df.units {
			if u.held == 0 && u.bytes() >= dropLeast && !df.flying.overlaps(u.span) {
				all = append(all, u)
			}
		}
	}
	slices.SortFunc(all, func(a, b *unit) int {
		return cmp.Or(cmp.Compare(a.used, b.used), cmp.Compare(a.hour, b.hour), cmp.Compare(a.df.f.Name, b.df.f.Name), cmp.Compare(a.off, b.off))
	})
	sum := int64(0)
	for i, u := range all {
		if sum += u.bytes(); sum >= need+more {
			all = all[:i+1]
			break
		}
	}
	if sum < need {
		return nil
	}
	out := map[*depotFile][]*unit{}
	for _, u := range all {
		df := u.df
		df.have, df.flying = df.have.without(u.span), df.flying.add(u.span)
		df.units = slices.DeleteFunc(df.units, func(v *unit) bool { return v == u })
		d.kept -= u.bytes()
		d.stats.Dropped += u.bytes()
		out[df] = append(out[df], u)
	}
	return out
}

// drop enters that units are gone, flushes that, and only then frees their room: a
// crash at any point leaves no record of bytes that are not there.
func (d *Depot) drop(victims map[*depotFile][]*unit) error {
	for df, units := range victims {
		records := make([]record, len(units))
		for i, u := range units {
			records[i] = record{span: u.span, dropped: true}
		}
		d.entries.Lock()
		d.s.hooks.stepped("enter what is dropped of " + df.f.Name)
		err := d.enter(df, records, true)
		if err == nil && df.log > 4*(len(df.base)+len(df.units))+4096 {
			err = d.compact(df)
		}
		d.entries.Unlock()
		if err != nil {
			return err
		}
		d.s.hooks.stepped("punch " + df.f.Name)
		f, err := os.OpenFile(d.s.path(df.f), os.O_RDWR, 0)
		if err != nil {
			return err
		}
		for _, u := range units {
			if err == nil {
				err = punchHole(f, u.span)
			}
		}
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// enter appends records to a ranges file. entries is locked.
func (d *Depot) enter(df *depotFile, records []record, flush bool) error {
	log, err := os.OpenFile(d.s.path(df.f)+rangesSuffix, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	var b []byte
	for _, r := range records {
		b = append(b, r.encode()...)
	}
	_, err = log.Write(b)
	if err == nil && flush {
		err = log.Sync()
	}
	if cerr := log.Close(); err == nil {
		err = cerr
	}
	df.log += len(records)
	return err
}

// compact replaces a ranges file by one that has only what is there, and when that was
// last used. entries is locked.
func (d *Depot) compact(df *depotFile) error {
	b := journalHeader(df.f.Size, df.f.identity())
	now := hourOf(time.Now())
	d.mu.Lock()
	df.log = len(df.base) + len(df.units)
	for _, r := range df.base {
		b = append(b, r.encode()...)
	}
	for _, u := range df.units {
		if u.used > 0 {
			u.hour = now
		}
		b = append(b, u.encode()...)
	}
	d.mu.Unlock()
	return d.s.replace(filepath.ToSlash(df.f.Name)+rangesSuffix, b)
}

// settle proves a shard right that has become complete, behind the caller's back. With
// a bound it has to stay what it is, so that it can be dropped from.
func (d *Depot) settle(df *depotFile) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if df.whole || df.proving || d.o.Keep > 0 || len(df.have) != 1 || df.have[0] != (span{0, df.f.Size}) {
		return
	}
	df.proving = true
	d.proofs.Go(func() {
		if err := d.prove(df); err != nil && d.ctx.Err() == nil {
			d.o.Log(fmt.Sprintf("%s: %s: %v", d.o.Dir, df.f.Name, err))
		}
	})
}

// prove compares the digest of a complete shard, and makes it a file like any other.
func (d *Depot) prove(df *depotFile) error {
	dig, modified, err := digest(d.ctx, &df.f.File, d.s.path(df.f))
	if err != nil {
		return err
	}
	if !dig.proves(&df.f.File) {
		return fmt.Errorf("is complete and its SHA-256 is %s, not %s: bytes that came on demand were not the model's, and what was computed with them is not to be relied on: run 'deltafin fetch --full', which finds and replaces them", dig.sha256, df.f.SHA256)
	}
	d.saving.Lock()
	defer d.saving.Unlock()
	f := df.f
	f.SHA256, f.Chain, f.Chunk, f.Verified = dig.sha256, dig.chain, chunkBytes, modified
	if err := d.s.save(); err != nil {
		return err
	}
	d.s.hooks.stepped("remove ranges of " + f.Name)
	if err := os.Remove(d.s.path(f) + rangesSuffix); err != nil {
		return plain(err)
	}
	d.mu.Lock()
	df.whole, df.units, df.base = true, nil, nil
	d.mu.Unlock()
	d.whole()
	return nil
}

// digest reads all of a file. Modified is when it was last written, in ns since 1970.
func digest(ctx context.Context, f *File, path string) (dig *digests, modified int64, err error) {
	in, err := os.Open(path)
	if err != nil {
		return nil, 0, plain(err)
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return nil, 0, plain(err)
	}
	h := newHasher(f)
	buf := make([]byte, bufferBytes)
	for h.n < h.size {
		if err := context.Cause(ctx); err != nil {
			return nil, 0, err
		}
		n, err := in.ReadAt(buf[:min(int64(len(buf)), h.room())], h.n)
		if n == 0 && err != nil {
			return nil, 0, plain(err)
		}
		h.write(buf[:n])
	}
	return h.sum(), info.ModTime().UnixNano(), nil
}

// whole ends the filling of a store all of whose shards are proved right. saving is
// locked.
func (d *Depot) whole() {
	for i := range d.s.rec.Files {
		if !d.s.whole(&d.s.rec.Files[i]) {
			return
		}
	}
	os.Remove(filepath.Join(d.s.dir, streamName))
}

// Prove waits until each shard that is complete has been compared with its digest.
func (d *Depot) Prove() { d.proofs.Wait() }

// Close gives the directory free for others. No call may be in progress.
func (d *Depot) Close() error {
	if d.ctx.Err() != nil {
		return nil
	}
	d.cancel()
	d.proofs.Wait()
	d.entries.Lock()
	for _, df := range d.files {
		if d.o.Keep > 0 && !df.whole && slices.ContainsFunc(df.units, func(u *unit) bool { return u.used > 0 }) {
			_ = d.compact(df) // what is lost is only when something was used
		}
	}
	d.entries.Unlock()
	if d.c != nil {
		d.c.close()
	}
	d.unlock()
	return nil
}
