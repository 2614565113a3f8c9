package checkpoint

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"deltafin/golden"
)

// TestK3IsTheReleasedConfig: what is written down in code is what config.json says.
func TestK3IsTheReleasedConfig(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(golden.Dir(), "real", "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := ParseConfig(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(c, K3()); d != "" {
		t.Errorf("released against K3():\n%s", d)
	}
}

// TestASketchHasTheTensorsOfTheCheckpoint: names, types, shapes and sizes, but no bytes.
func TestASketchHasTheTensorsOfTheCheckpoint(t *testing.T) {
	for _, set := range golden.Sets {
		ck, err := Open(golden.ModelDir(set))
		if err != nil {
			t.Fatal(err)
		}
		defer ck.Close()
		s := Sketch("a sketch", ck.Config())
		have, want := s.Tensors(), ck.Tensors()
		for i := range want {
			have[i].File, have[i].Offset = want[i].File, want[i].Offset
			if strings.HasSuffix(want[i].Name, ".A_log") {
				have[i].Shape, have[i].Bytes = want[i].Shape, want[i].Bytes
			}
			if d := cmp.Diff(want[i], have[i]); d != "" {
				t.Errorf("%s: %s", set, d)
			}
		}
		layer := ck.Config().FirstDense
		if have, want := s.Expert(layer, 1), ck.Expert(layer, 1); have.Bytes != want.Bytes || have.Offset != s.Expert(layer, 0).Offset+want.Bytes {
			t.Errorf("%s: an expert is %+v, in the checkpoint %+v", set, have, want)
		}
		if err := s.Read(s.Tensors()[0], make([]byte, s.Tensors()[0].Bytes)); err == nil {
			t.Errorf("%s: a sketch was read", set)
		}
		if s.Dir() != "a sketch" || s.Path(0) == "" || s.File(0) != nil {
			t.Errorf("%s: %q, %q, %v", set, s.Dir(), s.Path(0), s.File(0))
		}
	}
}
