package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
)

// readShards reads the headers of the used shards, several at a time (K3 has 75 MB
// of them), and returns the bytes of their data sections. Source opens a shard and
// returns its size. Of several faults the first shard's is reported, whatever the
// order in which they were found.
func (r *roster) readShards(used []bool, source func(file int) (io.Reader, int64, error)) (data int64, err error) {
	sums := make([]int64, len(used))
	errs := make([]error, len(used))
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, use := range used {
		if !use {
			continue
		}
		g.Go(func() error {
			rd, size, err := source(i)
			if err == nil {
				sums[i], err = r.readShard(i, size, rd)
			}
			errs[i] = err
			return nil
		})
	}
	g.Wait()
	for i, err := range errs {
		if err != nil {
			return 0, fmt.Errorf("%s: %w", r.files[i], err)
		}
		if sums[i] > math.MaxInt64-data {
			return 0, errors.New("the shards together are longer than any disk")
		}
		data += sums[i]
	}
	return data, r.allFound(used)
}

// readShard reads the header of shard number file, size bytes long, and enters the
// place of each of its tensors. It returns the bytes of the data section. Calls for
// different shards may run at once: the index gives each tensor to one shard, and a
// shard touches no tensor of another.
func (r *roster) readShard(file int, size int64, rd io.Reader) (data int64, err error) {
	err = parseHeader(rd, size, func(e entry) error {
		data += e.end - e.begin
		return r.enter(file, e)
	})
	return data, err
}

func (r *roster) enter(file int, e entry) error {
	elsewhere := func(at int) error {
		return fmt.Errorf("holds tensor %s, which the index puts into %s: index and shards are from different downloads, fetch them again", quoted(e.name), r.files[at])
	}
	unlisted := func() error {
		return fmt.Errorf("holds tensor %s, which is not in the index: index and shards are from different downloads, fetch them again", quoted(e.name))
	}
	if !strings.HasPrefix(e.name, Prefix) {
		r.ignoredMu.Lock()
		defer r.ignoredMu.Unlock()
		at, ok := r.ignored[e.name]
		switch {
		case !ok:
			return unlisted()
		case max(at, ^at) != file:
			return elsewhere(max(at, ^at))
		}
		r.ignored[e.name] = ^at
		return nil
	}
	p, ok := r.find(e.name)
	if !ok {
		return r.unknown(e.name)
	}
	if p.dense != unset {
		d := &r.dense[p.dense]
		if d.File != file {
			return elsewhere(d.File)
		}
		if strings.HasSuffix(d.Name, ".A_log") {
			if e.dtype != F32 || len(e.shape) != 1 || e.shape[0] < r.cfg.KDAHeads || e.shape[0] > aLogLimit {
				return mismatch(e, fmt.Sprintf("F32 [n] with n from %d, the heads, to %d", r.cfg.KDAHeads, aLogLimit))
			}
			d.Shape, d.Bytes = e.shape, e.end-e.begin
		} else if e.dtype != d.DType || !slices.Equal(e.shape, d.Shape) {
			return mismatch(e, fmt.Sprintf("%s %v", d.DType, d.Shape))
		}
		d.Offset = e.begin
		return nil
	}
	x := &r.experts[p.expert]
	part := r.layout.Parts[p.part]
	if int(x.file) != file {
		return elsewhere(int(x.file))
	}
	if e.dtype != U8 || len(e.shape) != 2 || e.shape[0] != part.Rows || e.shape[1] != part.Cols {
		return mismatch(e, fmt.Sprintf("U8 [%d %d]", part.Rows, part.Cols))
	}
	offset := e.begin - part.Offset
	if x.found != 0 && x.offset != offset {
		return fmt.Errorf("tensor %s starts at byte %d, expected %d: the six tensors of an expert must follow one another, as in the released layout", quoted(e.name), e.begin, x.offset+part.Offset)
	}
	x.offset = offset
	x.found |= 1 << p.part
	return nil
}

func mismatch(e entry, want string) error {
	return fmt.Errorf("tensor %s is %s %v, expected %s: use the config.json that belongs to the weights", quoted(e.name), e.dtype, e.shape, want)
}

// allFound demands that every shard that was opened held what the index says.
func (r *roster) allFound(opened []bool) error {
	missing, first, where := 0, "", 0
	note := func(name string, file int) {
		if missing++; missing == 1 {
			first, where = name, file
		}
	}
	for i := range r.dense {
		if d := &r.dense[i]; d.Offset == unset {
			note(Prefix+d.Name, d.File)
		}
	}
	for i := range r.experts {
		if r.experts[i].found == allParts {
			continue
		}
		for p := range ExpertParts {
			if r.experts[i].found&(1<<p) == 0 {
				note(r.expertName(i, p), int(r.experts[i].file))
			}
		}
	}
	for name, file := range r.ignored {
		if file >= 0 && opened[file] {
			note(name, file)
		}
	}
	if missing > 0 {
		return fmt.Errorf("%s: does not hold tensor %s, which the index puts there (%d tensors are missing like this): index and shards are from different downloads, fetch them again", r.files[where], quoted(first), missing)
	}
	return nil
}

// checkTotal compares the bytes of the opened shards with the index. Shards that
// were not opened, because they hold none of the text model, may add to them.
func checkTotal(total, data int64, allOpened bool) error {
	if data == total || data < total && !allOpened {
		return nil
	}
	return fmt.Errorf("%s: metadata.total_size is %d, but the shards hold %d bytes: index and shards are from different downloads, fetch them again", indexName, total, data)
}
