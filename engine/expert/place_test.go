package expert

import (
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
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

// stageHalf stages every second expert in a new directory.
func stageHalf(t testing.TB, ck *checkpoint.Checkpoint) string {
	t.Helper()
	dir := t.TempDir()
	drives := drive.NewSet(drive.Options{Buffered: true})
	defer drives.Close()
	if err := PlaceStage(t.Context(), ck, drives, everyOther(ck, dir), StageOptions{Reserve: -1}); err != nil {
		t.Fatal(err)
	}
	return dir
}
