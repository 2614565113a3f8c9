package hub

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"deltafin/engine/hub/hubtest"
)

func TestInspectTellsWhatAStoreLacksAndWritesNothing(t *testing.T) {
	if in, err := Inspect(t.TempDir()); in != nil || err != nil {
		t.Errorf("a directory without a record: %+v, %v", in, err)
	}
	const uninstalled = "its dense weights are not all here"
	h := hubtest.New(t, small(t))
	for _, c := range []struct {
		name               string
		change             func(dir string) error
		bad                string
		missing            int64
		onDemand, unproven int
	}{
		{"sound", func(string) error { return nil }, "", 0, 0, 0},
		{"a file is gone", func(d string) error { return os.Remove(filepath.Join(d, "big.safetensors")) }, "big.safetensors: is missing", 300_001, 0, 0},
		{"a file was written to", func(d string) error {
			return os.WriteFile(filepath.Join(d, "big.safetensors"), make([]byte, 300_001), 0o644)
		}, "", 0, 0, 1},
		{"a file fills on demand", func(d string) error {
			return errors.Join(os.WriteFile(filepath.Join(d, "big.safetensors"+rangesSuffix), nil, 0o644), os.WriteFile(filepath.Join(d, streamName), []byte(`{"format":1,"installed":true,"dense":{"big.safetensors":[]}}`), 0o644))
		}, "", 0, 1, 0},
		{uninstalled, func(d string) error {
			return os.WriteFile(filepath.Join(d, streamName), []byte(`{"format":1}`), 0o644)
		}, "", 0, 0, 0},
	} {
		o := quick(h, t.TempDir())
		must(t, Fetch(t.Context(), o))
		must(t, errors.Join(c.change(o.Dir), os.Remove(filepath.Join(o.Dir, lockName))))
		in, err := Inspect(o.Dir)
		if err != nil || in.Missing != c.missing || in.OnDemand != c.onDemand || in.Unproven != c.unproven || in.Files != 4 || in.Uninstalled != (c.name == uninstalled) || in.Revision == "" {
			t.Fatalf("%s: %+v, %v", c.name, in, err)
		}
		if got := strings.Trim(fmt.Sprint(in.Bad), "[]"); got != c.bad {
			t.Errorf("%s: %v, want %q", c.name, in.Bad, c.bad)
		}
		if exists(filepath.Join(o.Dir, lockName)) {
			t.Errorf("%s: a lock was left", c.name)
		}
	}
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, recordName), []byte(`{"format":99,"repo":"a/b","revision":"c","files":[]}`), 0o644))
	if _, err := Inspect(dir); err == nil || !strings.HasPrefix(err.Error(), dir+": "+recordName) {
		t.Errorf("a store of another version: %v", err)
	}
}
