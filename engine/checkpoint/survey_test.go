package checkpoint_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/checkpoint/checkpointtest"
	"deltafin/golden"
)

func TestExamineNamesEveryFileThatIsAtFault(t *testing.T) {
	const third, fifth, ninth = "model-00003-of-000014.safetensors", "model-00005-of-000014.safetensors", "model-00009-of-000014.safetensors"
	for _, c := range []struct {
		name   string
		damage func(d *checkpointtest.Dir)
		shards int
		want   []string // what each fault begins with
	}{
		{"sound", func(*checkpointtest.Dir) {}, 14, nil},
		{"three shards", func(d *checkpointtest.Dir) {
			d.Remove(ninth)
			d.Truncate(fifth, 100)
			d.Remove(third)
			if err := os.Mkdir(filepath.Join(d.Path, third), 0o755); err != nil {
				t.Fatal(err)
			}
		}, 14, []string{third + ": is not a regular file", fifth + ": is 446084 bytes long, 100 short", ninth + ": is not there: fetch it"}},
		{"a link to a drive that is away", func(d *checkpointtest.Dir) {
			d.Remove(ninth)
			if err := os.Symlink("/nowhere/"+ninth, filepath.Join(d.Path, ninth)); err != nil {
				t.Skip("NOT RUN: no symbolic links: ", err)
			}
		}, 14, []string{ninth + ": is a link to /nowhere/"}},
		{"config and a shard", func(d *checkpointtest.Dir) {
			d.DropConfig("text_config.rms_norm_eps")
			d.Truncate(fifth, 100)
		}, 14, []string{"config.json: text_config.rms_norm_eps is missing", fifth + ": is 446084 bytes long, 100 short"}},
		{"index and a shard", func(d *checkpointtest.Dir) {
			d.Remove("model.safetensors.index.json")
			d.Remove(third)
			d.Truncate(fifth, 100)
		}, 13, []string{"model.safetensors.index.json: is not there", fifth + ": is 446084 bytes long, 100 short"}},
		{
			"a tensor is missing from a shard", func(d *checkpointtest.Dir) { d.DropFromShard("language_model.model.norm.weight") },
			14,
			[]string{"model-000"},
		},
		{"nothing", func(d *checkpointtest.Dir) { os.RemoveAll(d.Path) }, 0, []string{"config.json: is not there", ""}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := checkpointtest.Copy(t, golden.ModelDir("tiny-a"))
			c.damage(d)
			s := checkpoint.Examine(d.Path, false)
			if s.Shards != c.shards || len(s.Faults) != len(c.want) {
				t.Fatalf("%d shards, faults %v; want %d and %q", s.Shards, s.Faults, c.shards, c.want)
			}
			for i, want := range c.want {
				if !strings.HasPrefix(s.Faults[i].Error(), want) {
					t.Errorf("fault %d is %q, want %q...", i, s.Faults[i], want)
				}
			}
			if _, err := checkpoint.Open(d.Path); (err == nil) != (len(c.want) == 0) {
				t.Errorf("Open says %v", err)
			}
		})
	}
}
