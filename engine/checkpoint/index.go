package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

const (
	indexName  = "model.safetensors.index.json"
	indexLimit = 256 << 20 // bytes; the released file has about 60 million
)

// readIndex reads model.safetensors.index.json as a stream into the roster: which
// shard holds which tensor. It demands exactly the tensors that the config implies,
// each once, and returns metadata.total_size in bytes. Names without Prefix belong
// to the vision part and are only remembered.
func (r *roster) readIndex(rd io.Reader) (totalSize int64, err error) {
	t := newTokens(io.LimitReader(rd, indexLimit))
	shards := map[string]int{}
	totalSize = unset
	var haveMap, haveMeta bool
	if err := t.open('{'); err != nil {
		return 0, err
	}
	for t.dec.More() {
		key, err := t.text()
		if err != nil {
			return 0, err
		}
		switch {
		case key == "metadata" && !haveMeta:
			haveMeta = true
			if totalSize, err = parseTotal(t); err != nil {
				return 0, fmt.Errorf("metadata: %w", err)
			}
		case key == "weight_map" && !haveMap:
			haveMap = true
			if err := r.readWeightMap(t, shards); err != nil {
				return 0, err
			}
		case key == "metadata", key == "weight_map":
			return 0, fmt.Errorf("%s is given twice", key)
		default:
			return 0, fmt.Errorf("has the unknown field %s", quoted(key))
		}
	}
	if err := t.close(); err != nil {
		return 0, err
	}
	if err := t.end(); err != nil {
		return 0, err
	}
	if !haveMeta {
		return 0, errors.New("metadata is missing: fetch the index again")
	}
	if !haveMap {
		return 0, errors.New("weight_map is missing: fetch the index again")
	}
	if err := r.allListed(); err != nil {
		return 0, err
	}
	r.sortFiles(shards)
	return totalSize, nil
}

// parseTotal reads {"total_size": n, ...}.
func parseTotal(t *tokens) (int64, error) {
	total := int64(unset)
	if err := t.open('{'); err != nil {
		return 0, err
	}
	for t.dec.More() {
		key, err := t.text()
		if err != nil {
			return 0, err
		}
		if key != "total_size" {
			if _, err := t.value(4); err != nil {
				return 0, err
			}
			continue
		}
		if total != unset {
			return 0, errors.New("total_size is given twice")
		}
		if total, err = t.count(); err != nil {
			return 0, fmt.Errorf("total_size: %w", err)
		}
	}
	if total == unset {
		return 0, errors.New("total_size is missing")
	}
	return total, t.close()
}

func (r *roster) readWeightMap(t *tokens, shards map[string]int) error {
	if err := t.open('{'); err != nil {
		return fmt.Errorf("weight_map: %w", err)
	}
	for t.dec.More() {
		name, err := t.text()
		if err != nil {
			return fmt.Errorf("weight_map: %w", err)
		}
		shard, err := t.text()
		if err != nil {
			return fmt.Errorf("weight_map: tensor %s: %w", quoted(name), err)
		}
		file, ok := shards[shard]
		if !ok {
			if err := checkShardName(shard); err != nil {
				return fmt.Errorf("weight_map: tensor %s: %w", quoted(name), err)
			}
			if len(shards) == fileLimit {
				return fmt.Errorf("weight_map names more than %d shards", fileLimit)
			}
			file = len(shards)
			shards[shard] = file
		}
		if err := r.list(name, file); err != nil {
			return fmt.Errorf("weight_map: %w", err)
		}
	}
	return t.close()
}

// list notes that the index puts a tensor into a shard.
func (r *roster) list(name string, file int) error {
	twice := func() error { return fmt.Errorf("tensor %s is given twice", quoted(name)) }
	if !strings.HasPrefix(name, Prefix) {
		if len(name) > nameLimit {
			return fmt.Errorf("tensor name %s is longer than %d bytes", quoted(name), nameLimit)
		}
		if _, dup := r.ignored[name]; dup {
			return twice()
		}
		if len(r.ignored) == ignoredLimit {
			return fmt.Errorf("more than %d tensors have no %q in front of their name (one is %s): not a Kimi K3 checkpoint", ignoredLimit, Prefix, quoted(name))
		}
		r.ignored[name] = file
		return nil
	}
	p, ok := r.find(name)
	if !ok {
		return r.unknown(name)
	}
	if p.dense != unset {
		d := &r.dense[p.dense]
		if d.File != unset {
			return twice()
		}
		d.File = file
		return nil
	}
	e := &r.experts[p.expert]
	if e.listed&(1<<p.part) != 0 {
		return twice()
	}
	if e.listed != 0 && int(e.file) != file {
		return fmt.Errorf("tensor %s is in another shard than the rest of its expert: the six tensors of an expert must lie together, as in the released layout", quoted(name))
	}
	e.listed |= 1 << p.part
	e.file = int16(file)
	return nil
}

// allListed demands that the index left nothing of the roster out.
func (r *roster) allListed() error {
	missing, first := 0, ""
	for i := range r.dense {
		if r.dense[i].File == unset {
			if missing++; missing == 1 {
				first = Prefix + r.dense[i].Name
			}
		}
	}
	for i := range r.experts {
		for p := range ExpertParts {
			if r.experts[i].listed&(1<<p) == 0 {
				if missing++; missing == 1 {
					first = r.expertName(i, p)
				}
			}
		}
	}
	if missing > 0 {
		return fmt.Errorf("weight_map: tensor %s is missing (%d of %d tensors are): fetch the index that belongs to config.json", first, missing, r.tensors())
	}
	return nil
}

// sortFiles numbers the shards in the order of their names.
func (r *roster) sortFiles(shards map[string]int) {
	r.files = make([]string, 0, len(shards))
	for name := range shards {
		r.files = append(r.files, name)
	}
	slices.Sort(r.files)
	number := make([]int, len(shards))
	for i, name := range r.files {
		number[shards[name]] = i
	}
	for i := range r.dense {
		r.dense[i].File = number[r.dense[i].File]
	}
	for i := range r.experts {
		r.experts[i].file = int16(number[r.experts[i].file])
	}
	for name, file := range r.ignored {
		r.ignored[name] = number[file]
	}
}

// checkShardName accepts a plain file name only: the index comes from outside and
// must not reach beyond the checkpoint's directory.
func checkShardName(s string) error {
	const suffix = ".safetensors"
	bad := len(s) > 255 || !strings.HasSuffix(s, suffix) || s == suffix || strings.HasPrefix(s, ".")
	for _, c := range []byte(s) {
		if c < ' ' || c > '~' || strings.IndexByte(`/\:*?"<>|`, c) >= 0 {
			bad = true
		}
	}
	if bad {
		return fmt.Errorf("shard name %s is not allowed: expected a plain file name that ends in %s", quoted(s), suffix)
	}
	return nil
}
