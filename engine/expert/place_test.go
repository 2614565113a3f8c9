package expert

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/disk"
	"deltafin/engine/drive"
	"deltafin/golden"
)

// everyOther plans every second expert of every layer.
func everyOther(ck *checkpoint.Checkpoint, dir string) PlacedDir {
	c := ck.Config()
	p := PlacedDir{Dir: dir, Experts: make([][]int32, c.Layers-c.FirstDense)}
	for l := range p.Experts {
		for id := l % 2; id < c.Experts; id += 2 {
			p.Experts[l] = append(p.Experts[l], int32(id))
		}
	}
	return p
}

// only plans some experts of some layers.
func only(ck *checkpoint.Checkpoint, dir string, layers map[int][]int32) PlacedDir {
	c := ck.Config()
	p := PlacedDir{Dir: dir, Experts: make([][]int32, c.Layers-c.FirstDense)}
	for l, ids := range layers {
		p.Experts[l-c.FirstDense] = ids
	}
	return p
}

func mustStage(t testing.TB, ck *checkpoint.Checkpoint, p PlacedDir) {
	t.Helper()
	if err := stageOnce(t.Context(), ck, p, StageOptions{Reserve: -1}); err != nil {
		t.Fatal(err)
	}
}

func stageOnce(ctx context.Context, ck *checkpoint.Checkpoint, p PlacedDir, o StageOptions) error {
	drives := drive.NewSet(drive.Options{Buffered: true})
	defer drives.Close()
	return PlaceStage(ctx, ck, drives, p, o)
}

// stageHalf stages every second expert in a new directory.
func stageHalf(t testing.TB, ck *checkpoint.Checkpoint) string {
	t.Helper()
	dir := t.TempDir()
	mustStage(t, ck, everyOther(ck, dir))
	return dir
}

// holding is what a staged directory holds, as the catalogue and the digests see it.
func holding(t testing.TB, ck *checkpoint.Checkpoint, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	n := 0
	for _, e := range entries {
		layer, ok := packedLayer(e.Name())
		if !ok {
			if !strings.HasSuffix(e.Name(), stageSuffix) {
				t.Errorf("%s lies in the directory", e.Name())
			}
			continue
		}
		cat := newCatalogue(ck)
		print, err := Fingerprint(ck)
		if err != nil {
			t.Fatal(err)
		}
		p, err := openPacked(filepath.Join(dir, e.Name()), cat, print)
		if err != nil {
			t.Fatal(err)
		}
		n += len(p.ids)
		out = append(out, fmt.Sprint(layer, p.ids))
	}
	if n > 0 {
		sound, faults, err := PlaceVerify(t.Context(), ck, dir, nil)
		if sound != n || len(faults) > 0 || err != nil {
			t.Errorf("%d of %d are sound, %v, %v", sound, n, faults, err)
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func TestAStagedDirectoryHoldsThePlan(t *testing.T) {
	w := openWorld(t, "tiny-a")
	dir := filepath.Join(t.TempDir(), "new", "dir")
	var last int64
	o := StageOptions{Reserve: -1, Progress: func(done, total int64) {
		if done < last || done > total {
			t.Errorf("progress went from %d to %d of %d", last, done, total)
		}
		last = done
	}}
	plan := only(w.ck, dir, map[int][]int32{1: {0, 5, 15}, 7: {3}})
	if err := stageOnce(t.Context(), w.ck, plan, o); err != nil {
		t.Fatal(err)
	}
	if got, want := holding(t, w.ck, dir), "1 [0 5 15] 7 [3]"; got != want {
		t.Errorf("holds %s", got)
	}
	if want := packedBytes(3, w.ck.ExpertLayout().ExpertBytes) + packedBytes(1, w.ck.ExpertLayout().ExpertBytes); last != want {
		t.Errorf("progress ended at %d of %d", last, want)
	}
	// Staging again writes nothing; another plan replaces and removes.
	before, _ := os.Stat(filepath.Join(dir, packedName(7)))
	mustStage(t, w.ck, plan)
	after, _ := os.Stat(filepath.Join(dir, packedName(7)))
	if !os.SameFile(before, after) || !before.ModTime().Equal(after.ModTime()) {
		t.Error("a file that was right was written again")
	}
	mustStage(t, w.ck, only(w.ck, dir, map[int][]int32{1: {1, 2}, 3: {4}}))
	if got, want := holding(t, w.ck, dir), "1 [1 2] 3 [4]"; got != want {
		t.Errorf("holds %s", got)
	}
}

// The child of TestKilledAtAnyStep: it stages until its n-th step and dies there.
func TestStageUntilKilled(t *testing.T) {
	dir, at := os.Getenv("DELTAFIN_STAGE_DIR"), os.Getenv("DELTAFIN_STAGE_STEP")
	if dir == "" {
		t.Skip("NOT RUN: a child process of TestKilledAtAnyStepNothingWrongIsPublished")
	}
	n, _ := strconv.Atoi(at)
	failpoint = func(string) error {
		if n--; n == 0 {
			p, _ := os.FindProcess(os.Getpid())
			_ = p.Kill()
			select {}
		}
		return nil
	}
	ck, err := checkpoint.Open(golden.ModelDir("tiny-a"))
	if err != nil {
		t.Fatal(err)
	}
	if err := stageOnce(t.Context(), ck, only(ck, dir, killPlan), StageOptions{Reserve: -1}); err != nil {
		t.Fatal(err)
	}
}

var killPlan = map[int][]int32{1: {0, 5}, 2: {3, 4}}

func TestKilledAtAnyStepNothingWrongIsPublished(t *testing.T) {
	if testing.Short() {
		t.Skip("NOT RUN: starts many processes")
	}
	w := openWorld(t, "tiny-a")
	for step := 1; ; step++ {
		dir := t.TempDir()
		mustStage(t, w.ck, only(w.ck, dir, map[int][]int32{1: {7}, 9: {9}})) // an earlier plan
		child := exec.Command(os.Args[0], "-test.run=^TestStageUntilKilled$")
		child.Env = append(os.Environ(), "DELTAFIN_STAGE_DIR="+dir, "DELTAFIN_STAGE_STEP="+strconv.Itoa(step))
		out, err := child.CombinedOutput()
		if err == nil {
			if step < 14 {
				t.Errorf("only %d steps: %s", step, out)
			}
			t.Logf("killed at each of %d steps", step-1)
			break
		}
		if x := (*exec.ExitError)(nil); !errors.As(err, &x) || x.Exited() {
			t.Fatalf("the child ended by itself: %v\n%s", err, out)
		}
		// What is there is sound, and either plan's.
		for f := range strings.SplitSeq(strings.ReplaceAll(holding(t, w.ck, dir), "] ", "]\n"), "\n") {
			if f != "" && f != "1 [7]" && f != "9 [9]" && f != "1 [0 5]" && f != "2 [3 4]" {
				t.Errorf("step %d: holds %s", step, f)
			}
		}
		mustStage(t, w.ck, only(w.ck, dir, killPlan))
		if got, want := holding(t, w.ck, dir), "1 [0 5] 2 [3 4]"; got != want {
			t.Errorf("step %d: then holds %s", step, got)
		}
		if left, _ := filepath.Glob(dir + "/*" + stageSuffix); len(left) > 0 {
			t.Errorf("step %d: %v is left", step, left)
		}
	}
}

func TestAFullDriveLeavesWhatWasFinished(t *testing.T) {
	w := openWorld(t, "tiny-a")
	defer func() { failpoint = func(string) error { return nil } }()
	for _, at := range []string{"create", "write", "header", "sync", "rename"} {
		dir := t.TempDir()
		n := 0
		failpoint = func(step string) error {
			if step == at {
				if n++; n > 1 && at != "write" || n > 3 {
					return &os.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC}
				}
			}
			return nil
		}
		err := stageOnce(t.Context(), w.ck, only(w.ck, dir, killPlan), StageOptions{Reserve: -1})
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "make room") || !strings.Contains(err.Error(), packedName(2)) {
			t.Errorf("%s: %v", at, err)
		}
		if got := holding(t, w.ck, dir); got != "1 [0 5]" {
			t.Errorf("%s: holds %s", at, got)
		}
		if left, _ := filepath.Glob(dir + "/*" + stageSuffix); len(left) > 0 {
			t.Errorf("%s: %v is left", at, left)
		}
	}
}

// What was written is read back before it gets its name.
func TestADriveThatForgetsIsNoticed(t *testing.T) {
	w := openWorld(t, "tiny-a")
	defer func() { failpoint = func(string) error { return nil } }()
	dir := t.TempDir()
	failpoint = func(step string) error {
		if step != "sync" {
			return nil
		}
		f, err := os.OpenFile(filepath.Join(dir, packedName(1)+stageSuffix), os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.WriteAt([]byte{1, 2, 3}, headerBytes(2)+1000)
		return err
	}
	err := stageOnce(t.Context(), w.ck, only(w.ck, dir, killPlan), StageOptions{Reserve: -1})
	if err == nil || !strings.Contains(err.Error(), "reads back differently") {
		t.Errorf("error %v", err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) > 0 {
		t.Errorf("%v is published", entries)
	}
}

func TestStageAsksForSpaceFirst(t *testing.T) {
	w := openWorld(t, "tiny-a")
	dir := t.TempDir()
	err := stageOnce(t.Context(), w.ck, only(w.ck, dir, killPlan), StageOptions{Reserve: 1 << 60})
	if err == nil || !strings.Contains(err.Error(), "make room") || !strings.HasPrefix(err.Error(), dir) {
		t.Errorf("error %v", err)
	}
	if err := stageOnce(t.Context(), w.ck, only(w.ck, w.ck.Dir(), killPlan), StageOptions{Reserve: -1}); err == nil || !strings.Contains(err.Error(), "another drive") {
		t.Errorf("staged into the checkpoint: %v", err)
	}
	if lock, err := disk.LockDir(dir); err != nil {
		t.Fatal(err)
	} else {
		err := stageOnce(t.Context(), w.ck, only(w.ck, dir, killPlan), StageOptions{Reserve: -1})
		if !errors.Is(err, disk.ErrBusy) && runtime.GOOS != "windows" {
			t.Errorf("staged beside another: %v", err)
		}
		lock.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := stageOnce(ctx, w.ck, only(w.ck, dir, killPlan), StageOptions{Reserve: -1}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) > 0 {
		t.Errorf("%v is left", entries)
	}
}

func TestVerifyFindsDamage(t *testing.T) {
	w := openWorld(t, "tiny-a")
	dir := t.TempDir()
	mustStage(t, w.ck, only(w.ck, dir, map[int][]int32{1: {0, 5, 15}, 2: {3, 4}, 3: {1}}))
	f, err := os.OpenFile(filepath.Join(dir, packedName(1)), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{0xAA, 0xBB, 0xCC}, headerBytes(3)+roundUp(w.ck.ExpertLayout().ExpertBytes)+77); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := os.Truncate(filepath.Join(dir, packedName(2)), 9999); err != nil {
		t.Fatal(err)
	}
	sound, faults, err := PlaceVerify(t.Context(), w.ck, dir, nil)
	if err != nil || sound != 3 || len(faults) != 2 || !slices.Equal(faults[0].IDs, []int32{5}) || faults[1].Err == nil {
		t.Errorf("%d sound, %v, %v", sound, faults, err)
	}
	if _, _, err := PlaceVerify(t.Context(), w.ck, t.TempDir(), nil); err == nil {
		t.Error("an empty directory was verified")
	}
}

func TestPlanFollowsHeatAndRates(t *testing.T) {
	w := openWorld(t, "tiny-a")
	c := w.ck.Config()
	heat := NewHeat(c, [32]byte{})
	for l := c.FirstDense; l < c.Layers; l++ {
		for id := range int32(c.Experts) {
			for range (id + 1) * 10 { // the last are the hottest
				heat.Observe(l, []int32{id})
			}
		}
	}
	n := w.ck.ExpertLayout().ExpertBytes
	room := func(experts int64) int64 {
		return experts*roundUp(n) + int64(c.Layers-c.FirstDense)*packedBlock
	}
	plan := func(targets ...PlaceTarget) *Placement {
		t.Helper()
		p, err := PlacePlan(w.ck, heat, 100, targets)
		if err != nil {
			t.Fatal(err)
		}
		for i, d := range p.Dirs {
			var bytes int64
			count := 0
			for _, ids := range d.Experts {
				if !slices.IsSorted(ids) {
					t.Errorf("ids %v", ids)
				}
				if count += len(ids); len(ids) > 0 {
					bytes += packedBytes(len(ids), n)
				}
			}
			if bytes != d.Bytes || bytes > targets[i].Bytes || count != d.Count {
				t.Errorf("%d experts in %d bytes, said %d in %d, allowed %d", count, bytes, d.Count, d.Bytes, targets[i].Bytes)
			}
		}
		return p
	}
	total := int64(c.Experts * (c.Layers - c.FirstDense))
	// Room for a quarter: the hottest of each layer.
	p := plan(PlaceTarget{"a", room(total / 4), 100})
	for _, ids := range p.Dirs[0].Experts {
		if !slices.Equal(ids, []int32{12, 13, 14, 15}) {
			t.Errorf("a quarter of the room has %v", ids)
		}
	}
	// Room for all: all.
	if p := plan(PlaceTarget{"a", 1 << 40, 100}, PlaceTarget{"b", 1 << 40, 1}); p.Dirs[0].Count != int(total) || p.Dirs[1].Count != int(total) || p.Dirs[1].Heat < 0.999 {
		t.Errorf("room for all holds %d and %d", p.Dirs[0].Count, p.Dirs[1].Count)
	}
	// Little room: no expert twice while others have no copy.
	p = plan(PlaceTarget{"a", room(total / 8), 100}, PlaceTarget{"b", room(total / 8), 50})
	for l := range p.Dirs[0].Experts {
		for _, id := range p.Dirs[0].Experts[l] {
			if slices.Contains(p.Dirs[1].Experts[l], id) {
				t.Errorf("layer %d expert %d is copied twice", l, id)
			}
		}
	}
	// Shares are as the rates where the room allows.
	p = plan(PlaceTarget{"a", room(total / 2), 200}, PlaceTarget{"b", room(total / 2), 100})
	if a := p.Dirs[0].Heat; a < 0.5 {
		t.Errorf("a drive with half of all rate has %.2f of the heat", a)
	}
	if plan(PlaceTarget{"a", 0, 100}).Dirs[0].Count != 0 {
		t.Error("no room holds experts")
	}
	for _, bad := range []PlaceTarget{{"a", -1, 100}, {"a", 5, 0}} {
		if _, err := PlacePlan(w.ck, heat, 100, []PlaceTarget{bad}); err == nil {
			t.Errorf("%+v was planned", bad)
		}
	}
}
