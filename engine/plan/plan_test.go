package plan

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"deltafin/engine"
	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/golden"
)

// TestShapeOfK3 holds the sizes to those of the released files (spec B.4, C.12).
func TestShapeOfK3(t *testing.T) {
	s := ShapeOf(checkpoint.K3())
	if s.ExpertBytes != 17547264 {
		t.Errorf("an expert has %d bytes", s.ExpertBytes)
	}
	if s.MoELayers != 92 || s.HeadBytes != 2348810240 {
		t.Errorf("%d MoE layers, head of %d bytes", s.MoELayers, s.HeadBytes)
	}
	// 108811877376 with norms, convolutions, biases and A_log, which are not projections.
	if d := 108811877376 - s.SpineBytes; d < 0 || d > 60e6 {
		t.Errorf("dense weights of %d bytes, %d less than the files have", s.SpineBytes, d)
	}
}

var machine = Machine{Drives: []float64{1e9}, DenseRow: 1e10, ExpertRow: 1e10, DenseRows: 1e10, ExpertRows: 1e10}

// TestDecodeBytesAreThoseOfThePublishedFloor: 92 layers of 16 experts.
func TestDecodeBytesAreThoseOfThePublishedFloor(t *testing.T) {
	s, ck := ShapeOf(checkpoint.K3()), checkpoint.Sketch("K3", checkpoint.K3())
	l, err := engine.Account(ck, engine.Options{Memory: 130e9})
	if err != nil || l.Streamed != 0 || l.Resident == 0 {
		t.Fatalf("%+v: %v", l, err)
	}
	p := s.PassOf(1, 0, l, machine)
	if want := 25829572608 * (1 - float64(l.Resident)/float64(l.Experts)); math.Abs(p.Bytes-want) > 1 {
		t.Errorf("a token reads %.0f bytes, want %.0f", p.Bytes, want)
	}
	if full := s.Union(1 << 20); math.Abs(full-896) > 1e-6 {
		t.Errorf("a long prompt routes to %g experts", full)
	}
	// Dense weights that do not stay are read by every pass.
	l, err = engine.Account(ck, engine.Options{Memory: 4e9})
	if err != nil {
		t.Fatal(err)
	}
	if p := s.PassOf(1, 0, l, machine); l.Streamed < 105e9 || math.Abs(p.Bytes-25829572608-float64(l.Streamed)) > 1 {
		t.Errorf("a token reads %.0f bytes, %d of them dense weights", p.Bytes, l.Streamed)
	}
}

// TestAPromptTakesAsManyPassesAsTheMemoryAllows: a prompt that does not fit into one
// reads again what does not stay.
func TestAPromptTakesAsManyPassesAsTheMemoryAllows(t *testing.T) {
	s := ShapeOf(checkpoint.K3())
	l := engine.Ledger{PassRows: 100, Streamed: 7e9, Experts: 1446e9}
	one, three := s.PassOf(100, 1000, l, machine), s.PromptOf(300, 3000, l, machine)
	if three.Bytes != 3*one.Bytes || three.Seconds != 3*one.Seconds || one.Bytes != 1000*float64(s.ExpertBytes)+7e9 {
		t.Errorf("%+v, three times %+v", three, one)
	}
	if p := s.PromptOf(101, 0, l, machine); p.Bytes < 2*7e9 {
		t.Errorf("two passes read %.0f bytes", p.Bytes)
	}
}

// TestWriteSaysWhatOpenWouldDo: the same account, and the same refusal.
func TestWriteSaysWhatOpenWouldDo(t *testing.T) {
	dir := golden.ModelDir("nano")
	ck, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	o := engine.Options{Memory: 170e6, Context: 1000, PassRows: 80}
	e, err := engine.Open(context.Background(), dir, o)
	if err != nil {
		t.Fatal(err)
	}
	ledger := e.Ledger().String()
	e.Close()
	var out strings.Builder
	if err := Write(&out, ck, o, machine); err != nil || !strings.Contains(out.String(), ledger) {
		t.Errorf("the engine says %q, plan %q, %v", ledger, out.String(), err)
	}
	o.Memory = 100e6
	_, refused := engine.Open(context.Background(), dir, o)
	if err := Write(&out, ck, o, machine); !errors.Is(err, engine.ErrMemory) || refused == nil || !strings.Contains(refused.Error(), err.Error()) {
		t.Errorf("the engine says %v, plan %v", refused, err)
	}
}

// TestMeasureDriveReadsFiles: some rate of what is there, an error where there is nothing, and
// an end when it is cancelled.
func TestMeasureDriveReadsFiles(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	set := drive.NewSet(drive.Options{})
	defer set.Close()
	if _, err := MeasureDrive(ctx, set, dir, 4096, time.Millisecond); err == nil || !strings.Contains(err.Error(), "no file of") {
		t.Errorf("of an empty directory: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a"), make([]byte, 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	if rate, err := MeasureDrive(ctx, set, dir, 4096, 10*time.Millisecond); err != nil || rate <= 0 {
		t.Errorf("%g bytes per second, %v", rate, err)
	}
	cancel()
	if _, err := MeasureDrive(ctx, set, dir, 4096, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
