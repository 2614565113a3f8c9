package hub

import (
	"testing"

	"deltafin/engine/hub/hubtest"
)

// Another implementation of ranges than our own test server's: nginx serves a store
// as plain files, and both a fetch and a depot come out right.
func TestNginxIsASource(t *testing.T) {
	model := shardRepo(t)
	h := hubtest.New(t, model)
	o := quick(h, t.TempDir())
	must(t, Fetch(t.Context(), o))
	served := o.Dir
	base := hubtest.Nginx(t, served)
	o.Sources = []string{base + "/{path}"}
	o.Dir = t.TempDir()
	must(t, Fetch(t.Context(), o))
	complete(t, model, o.Dir)

	o.Dir = t.TempDir()
	d, err := OpenDepot(t.Context(), DepotOptions{Options: o, TrustHTTP: true})
	must(t, err)
	for _, x := range shardExperts {
		must(t, d.Ensure(t.Context(), "big.safetensors", x.off, x.bytes()))
	}
	d.Close()
	o.Sources = []string{"http://127.0.0.1:1/{path}"} // nothing is left to be fetched
	must(t, Fetch(t.Context(), o))
	complete(t, model, o.Dir)
}
