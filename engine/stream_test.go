package engine

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"deltafin/engine/hub"
	"deltafin/engine/hub/hubtest"
	"deltafin/golden"
)

// A model that is streamed gives the frozen logits, in a small memory and in a large one,
// from our own server and from nginx. Each expert that is routed is fetched once and no
// other is, also over several runs; the rest makes a store of it that is, byte for byte,
// what was served.
func TestAStreamedModelFetchesWhatIsRoutedOnce(t *testing.T) {
	served := golden.ModelDir("nano")
	hashes, err := golden.LoadHashes()
	if err != nil {
		t.Fatal(err)
	}
	cases, err := golden.Cases("nano")
	if err != nil {
		t.Fatal(err)
	}
	for _, server := range []string{"hub", "nginx"} {
		t.Run(server, func(t *testing.T) {
			h := hubtest.New(t, served)
			o := hub.DepotOptions{Options: hub.Options{Dir: t.TempDir(), Repo: h.Repo, Revision: h.Revision, Sources: []string{h.URL}, Connections: 4}, TrustHTTP: true}
			if server == "nginx" {
				whole := o.Options
				whole.Dir = t.TempDir()
				if err := hub.Fetch(t.Context(), whole); err != nil {
					t.Fatal(err)
				}
				o.Sources = []string{hubtest.Nginx(t, whole.Dir) + "/{path}"}
			}
			d, err := hub.OpenDepot(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			d.Close()

			routed := map[string]bool{}
			var size int64
			var requests int64
			h.Forget()
			for _, memory := range []int64{0, 170e6} {
				d, err := hub.OpenStream(t.Context(), o)
				if err != nil {
					t.Fatal(err)
				}
				e, err := Open(t.Context(), o.Dir, Options{Memory: memory, Filler: d, Warn: func(string) {}})
				if err != nil {
					t.Fatal(err)
				}
				size = e.ck.ExpertLayout().ExpertBytes
				observe := e.model.ObserveRoutes
				var mu sync.Mutex
				e.model.ObserveRoutes = func(layer int, ids []int32, weights []float32) {
					observe(layer, ids, weights)
					mu.Lock()
					defer mu.Unlock()
					for _, id := range ids {
						x := e.ck.Expert(layer, int(id))
						routed[fmt.Sprint(e.ck.Shard(x.File), " ", x.Offset)] = true
					}
				}
				for _, c := range cases[:2] {
					if err := hashes.Check(c.Key(), golden.HashRows(greedy(t, e, &c))); err != nil {
						t.Errorf("memory %d: %v", memory, err)
					}
				}
				if err := e.Close(); err != nil {
					t.Error(err)
				}
				s := d.Stats()
				requests += s.Requests
				if s.Bytes != s.Requests*size || memory != 0 && s.Requests != 0 {
					t.Errorf("memory %d: %+v", memory, s)
				}
				d.Close()
			}
			if requests != int64(len(routed)) || requests == 0 {
				t.Errorf("%d requests for %d experts that were routed", requests, len(routed))
			}
			if server == "hub" {
				for _, r := range h.Requests() {
					if r.Kind != hubtest.Content {
						continue
					}
					key := fmt.Sprint(r.File, " ", r.Off)
					if !routed[key] || r.End-r.Off != size {
						t.Errorf("bytes %d to %d of %s were fetched, again or for nothing", r.Off, r.End, r.File)
					}
					delete(routed, key)
				}
			}
			if err := hub.Fetch(t.Context(), o.Options); err != nil {
				t.Fatal(err)
			}
			sameFiles(t, served, o.Dir)
		})
	}
}

// sameFiles demands that every file below served is the same below dir.
func sameFiles(t *testing.T, served, dir string) {
	t.Helper()
	err := filepath.WalkDir(served, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		want, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		got, err := os.ReadFile(filepath.Join(dir, strings.TrimPrefix(path, served)))
		if err == nil && !bytes.Equal(got, want) {
			err = fmt.Errorf("%s is not what was served", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
