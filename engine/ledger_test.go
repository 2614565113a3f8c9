package engine

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/spine"
	"deltafin/golden"
)

// accounted is a model whose memory is shared out in tests.
type accounted struct {
	name  string
	ck    *checkpoint.Checkpoint
	steps int // limits between the floor and everything
}

// models are the golden ones and, as sketches, K3 with 3 layers and whole.
func models(t *testing.T) (all []accounted) {
	t.Helper()
	for _, set := range golden.Sets {
		ck, err := checkpoint.Open(golden.ModelDir(set))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ck.Close() })
		all = append(all, accounted{set, ck, 20})
	}
	slice := checkpoint.K3()
	slice.Layers, slice.Vocab, slice.MLA = 3, 4096, []bool{false, false, true}
	return append(all,
		accounted{"k3-slice", checkpoint.Sketch("k3-slice", slice), 20},
		accounted{"k3", checkpoint.Sketch("k3", checkpoint.K3()), 4})
}

func (l Ledger) sum() int64 {
	return l.Runtime + l.State + l.Pass + l.Slots + l.Spine + l.Resident + l.Reserved + l.Draft
}

// TestTheLedgerKeepsItsPromises: whatever the model and the options, the parts are never more
// than the limit, the floor works and a byte less does not, the refusal names an amount that
// works, and nothing shrinks when there is more memory.
func TestTheLedgerKeepsItsPromises(t *testing.T) {
	packs := t.TempDir()
	for _, m := range models(t) {
		c := m.ck.Config()
		variants := map[string]Options{
			"plain": {},
			"all":   {Draft: []string{"ngram"}, Context: 100_000, PassRows: 300, Reserve: 50e6, ExpertDirs: []string{"a", "b", "c"}, Slots: 5},
		}
		if m.name != "k3" {
			variants["one token"] = Options{Context: 1, PassRows: 1}
			variants["no expert stays"] = Options{ExpertMemory: -1, PassRows: 1 << 30}
			variants["some experts stay"] = Options{ExpertMemory: 3 << 20, Context: 77, ExpertDirs: []string{"a"}}
		}
		if m.ck.File(0) != nil {
			for _, narrow := range []bool{false, true} {
				path := filepath.Join(packs, fmt.Sprint(m.name, narrow))
				if err := spine.Pack(context.Background(), m.ck, path, narrow, nil); err != nil {
					t.Fatal(err)
				}
				variants[fmt.Sprintf("packed, narrow %v", narrow)] = Options{SpinePack: path}
			}
		}
		for name, o := range variants {
			t.Run(m.name+"/"+name, func(t *testing.T) {
				routers := false // that the last layout keeps beside the pieces
				at := func(limit int64) Ledger {
					o.Memory = limit
					e := &Engine{ck: m.ck}
					e.openProposers(o)
					l, s, x, err := layout(m.ck, o, e.proposerBytes)
					if err != nil {
						t.Fatal(err)
					}
					if l.sum() > limit || l.Limit != limit {
						t.Fatalf("of %d bytes, the parts take %d: %+v", limit, l.sum(), l)
					}
					if s.Resident+s.Ring > l.Spine || x.Resident != l.Resident || l.PassRows > l.Context || o.PassRows > 0 && l.PassRows > o.PassRows {
						t.Fatalf("%+v became %+v and %+v", l, s, x)
					}
					if o.ExpertMemory < 0 && l.Resident > 0 || o.ExpertMemory > 0 && l.Resident > o.ExpertMemory {
						t.Fatalf("%d bytes of experts stay where %d may", l.Resident, o.ExpertMemory)
					}
					routers = s.KeepRouters
					return l
				}
				most := at(1 << 60)
				if most.Streamed != 0 || o.ExpertMemory == 0 && most.Resident != most.Experts || (len(o.Draft) > 0) != (most.Draft > 0) || o.Context == 0 && most.Context != min(4096, c.MaxPositions) {
					t.Errorf("with memory for everything: %+v", most)
				}
				o.Memory = most.Floor - 1
				_, err := Account(m.ck, o)
				var needs float64
				if !errors.Is(err, ErrMemory) {
					t.Fatalf("a byte less than the floor: %v", err)
				}
				_, said, _ := strings.Cut(err.Error(), "it needs ")
				if _, err := fmt.Sscanf(said, "%f GB", &needs); err != nil || int64(needs*1e9) < most.Floor || int64(needs*1e9) > most.Floor+1e7 {
					t.Errorf("the floor is %d bytes, the error says %q", most.Floor, said)
				}
				last := at(most.Floor)
				piece := last.Spine // no less than any
				if last.Floor != most.Floor {
					t.Errorf("the floor is %d bytes at the floor and %d above", last.Floor, most.Floor)
				}
				room := float64(most.sum() - most.Floor)
				for i := range m.steps {
					// Half of the limits are near the floor, where every byte counts.
					share := float64(i+1) / float64(m.steps)
					before := routers
					l := at(most.Floor + int64(room*share*share*share))
					if l.Draft == last.Draft && (l.PassRows < last.PassRows || l.Pass < last.Pass || l.Slots < last.Slots || l.Spine < last.Spine || l.Resident < last.Resident) {
						t.Errorf("more memory made less of it:\n%+v\n%+v", last, l)
					}
					// Where routers begin to be kept, a piece may have to make room for them.
					if l.Draft == last.Draft && l.Streamed > last.Streamed && (routers == before || l.Streamed > last.Streamed+piece) {
						t.Errorf("more memory made more reads:\n%+v\n%+v", last, l)
					}
					last = l
				}
				if last.Streamed != 0 || last.Resident != most.Resident {
					t.Errorf("with %d bytes, which everything takes: %+v", most.sum(), last)
				}
			})
		}
	}
}

// TestASketchHasTheAccountOfItsCheckpoint: up to the ends of the reads, which depend on where
// the files have the tensors.
func TestASketchHasTheAccountOfItsCheckpoint(t *testing.T) {
	for _, m := range models(t) {
		if m.ck.File(0) == nil {
			continue
		}
		sketch := checkpoint.Sketch(m.name, m.ck.Config())
		for _, memory := range []int64{180e6, 1e9} {
			want, err := Account(m.ck, Options{Memory: memory})
			if err != nil {
				t.Fatal(err)
			}
			got, err := Account(sketch, Options{Memory: memory})
			if err != nil {
				t.Fatal(err)
			}
			if d := got.Floor - want.Floor; d < -want.Floor/200 || d > want.Floor/200 || got.State != want.State || got.Experts != want.Experts {
				t.Errorf("%s: %+v\nsketch %+v", m.name, want, got)
			}
		}
	}
}

// TestOpenWorksAtTheFloor runs a prompt in the least memory: the same bits.
func TestOpenWorksAtTheFloor(t *testing.T) {
	for _, m := range models(t) {
		if m.ck.File(0) == nil {
			continue
		}
		l, err := Account(m.ck, Options{Memory: 1 << 40})
		if err != nil {
			t.Fatal(err)
		}
		e := openSet(t, m.name, Options{Memory: l.Floor})
		if got := e.Ledger(); got.Limit != l.Floor || got.Streamed == 0 {
			t.Errorf("%s: %+v", m.name, got)
		}
		cases, err := golden.Cases(m.name)
		if err != nil {
			t.Fatal(err)
		}
		c := cases[len(cases)-1]
		ids := append(slices.Clone(c.PromptIDs), c.Greedy[:len(c.Greedy)-1]...)
		if got := golden.HashRows(replay(t, e, ids, []int{len(ids)}, len(c.PromptIDs)-1)); got != c.LogitsSHA256 {
			t.Errorf("%s: logits hash %s, frozen %s", c.Key(), got, c.LogitsSHA256)
		}
		if _, err := Open(context.Background(), golden.ModelDir(m.name), Options{Memory: l.Floor - 1}); !errors.Is(err, ErrMemory) {
			t.Errorf("%s, a byte less than the floor: %v", m.name, err)
		}
	}
}
