package checkpoint

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"deltafin/engine/checkpoint/checkpointtest"
)

// away brings shards from another directory and remembers what was asked for.
type away struct {
	dir   string
	check func(string, int64, []byte) error
	asked int64
}

func (a *away) Has(string, int64, int64) bool                            { return false }
func (a *away) Hold(string, int64, int64) (func(), bool)                 { return nil, false }
func (a *away) Ensure(context.Context, string, int64, int64) error       { return errors.New("unused") }
func (a *away) Check(check func(name string, off int64, b []byte) error) { a.check = check }

func (a *away) Read(_ context.Context, name string, off int64, dst []byte) error {
	f, err := os.Open(filepath.Join(a.dir, name))
	if err != nil {
		return err
	}
	defer f.Close()
	a.asked += int64(len(dst))
	_, err = f.ReadAt(dst, off)
	return err
}

func TestAFillingDirectoryIsOpenedOnlyWithSomebodyWhoBringsTheRest(t *testing.T) {
	whole, err := Open(tinyA)
	if err != nil {
		t.Fatal(err)
	}
	defer whole.Close()
	e := whole.Expert(2, 5)
	shard := filepath.Base(whole.Path(e.File))
	d := checkpointtest.Copy(t, tinyA)
	if err := os.WriteFile(filepath.Join(d.Path, shard+RangesSuffix), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	zeros := make([]byte, e.Bytes)
	f, err := os.OpenFile(filepath.Join(d.Path, shard), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(zeros, e.Offset); err != nil {
		t.Fatal(err)
	}
	f.Close()
	_, err = Open(d.Path)
	wantError(t, err, shard+": fills on demand", "fetch --full")

	looked, err := OpenFilling(d.Path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer looked.Close()
	wantError(t, looked.ReadExtent(e, zeros), "layer 2 expert 5", "nobody is asked")

	a := &away{dir: tinyA}
	c, err := OpenFilling(d.Path, a)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got, want := make([]byte, e.Bytes), make([]byte, e.Bytes)
	if err := errors.Join(c.ReadExtent(e, got), whole.ReadExtent(e, want)); err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) || a.asked != e.Bytes || !c.Filling() {
		t.Errorf("%d bytes were asked for, equal %v", a.asked, string(got) == string(want))
	}
}

// Every scale byte of every expert is looked at, in whatever range it arrives, and
// nothing else is.
func TestRangesThatArriveAreCheckedForScales(t *testing.T) {
	a := &away{dir: tinyA}
	c, err := OpenFilling(tinyA, a)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	l, m := c.ExpertLayout(), c.Config()
	for _, id := range []int{0, 1, m.Experts - 1} {
		e := c.Expert(m.FirstDense, id)
		name := c.Shard(e.File)
		b := make([]byte, e.Bytes)
		if err := c.ReadExtent(e, b); err != nil {
			t.Fatal(err)
		}
		if err := a.check(name, e.Offset, b); err != nil {
			t.Fatalf("as released: %v", err)
		}
		for part, p := range l.Parts {
			for _, at := range []int64{p.Offset, p.Offset + p.Bytes - 1} {
				was := b[at]
				b[at] = 255
				scale := part%2 == 1
				for what, err := range map[string]error{
					"whole": a.check(name, e.Offset, b),
					"byte":  a.check(name, e.Offset+at, b[at:at+1]),
					"tail":  a.check(name, e.Offset+at, b[at:]),
				} {
					if (err != nil) != scale || scale && !strings.Contains(err.Error(), partNames[part]) {
						t.Errorf("expert %d, %s, byte %d of a %s: %v", id, partNames[part], at, what, err)
					}
				}
				if err := a.check(name, e.Offset, b[:at]); err != nil {
					t.Errorf("in front of it: %v", err)
				}
				b[at] = was
			}
		}
	}
	if err := a.check("no such shard", 0, []byte{255}); err != nil {
		t.Error(err)
	}
}
