package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Survey is everything that keeps a directory from being a checkpoint, as far as each
// fault can be told without the others.
type Survey struct {
	Config *Config // nil if config.json is unusable
	Shards int     // of the text model, as the index has them; of those there without config or index
	Faults []error // each begins with the name of a file
}

// Examine looks at a checkpoint directory that [Open] refuses. It goes on behind a
// fault, and holds one file open at a time. filling is for what [OpenFilling] opens.
func Examine(dir string, filling bool) Survey {
	var s Survey
	fault := func(name string, err error) {
		if err != nil {
			s.Faults = append(s.Faults, fmt.Errorf("%s: %w", name, err))
		}
	}
	cfg, err := readK3Config(dir)
	if err != nil {
		s.Faults = append(s.Faults, err)
	}
	c := &Checkpoint{dir: dir, filling: filling}
	if cfg != nil {
		s.Config, c.r = cfg, newRoster(cfg)
		total, err := c.openIndex()
		if err == nil {
			used := c.r.used()
			c.files = make([]*os.File, len(used))
			var data int64
			for i, use := range used {
				if use {
					s.Shards++
					n, err := c.examineShard(i)
					data += n
					fault(c.r.files[i], err)
				}
			}
			if s.Faults == nil {
				err := c.r.allFound(used)
				if err == nil {
					err = checkTotal(total, data, !slices.Contains(used, false))
				}
				if err != nil {
					s.Faults = append(s.Faults, err)
				}
			}
			return s
		}
		fault(indexName, err)
	}
	// Nobody knows what should be here: what is must be sound by itself.
	entries, err := os.ReadDir(dir)
	fault(filepath.Base(dir), reason(err))
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".safetensors") && s.Shards < fileLimit {
			s.Shards++
			alone := &Checkpoint{dir: dir, filling: filling, r: &roster{files: []string{e.Name()}}, files: make([]*os.File, 1)}
			_, err := alone.examineShard(0)
			fault(e.Name(), err)
		}
	}
	return s
}

// examineShard opens shard i, reads its header and closes it. It returns the bytes of
// the data section.
func (c *Checkpoint) examineShard(i int) (data int64, err error) {
	info, err := os.Stat(c.Path(i))
	if errors.Is(err, fs.ErrNotExist) {
		if to, err := os.Readlink(c.Path(i)); err == nil {
			return 0, fmt.Errorf("is a link to %s, which is not there: connect that drive, or fetch the file again", to)
		}
		return 0, errors.New("is not there: fetch it")
	}
	if err != nil {
		return 0, reason(err)
	}
	defer func() {
		if c.files[i] != nil {
			c.files[i].Close()
			c.files[i] = nil
		}
	}()
	rd, size, err := c.openShard(i, info.Size())
	if err != nil {
		return 0, err
	}
	if c.r.cfg != nil {
		return c.r.readShard(i, size, rd)
	}
	return 0, parseHeader(rd, size, func(entry) error { return nil })
}
