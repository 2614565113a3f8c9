package testscripts

import (
	"strconv"
	"strings"
	"testing"

	"deltafin/engine/hub/hubtest"
)

// hubKey is the key of where a script's hub is kept.
type hubKey struct{}

// hub DIR: serves a directory as a model on a hub from now on, and as plain files.
// SOURCE is what fetch needs to find it, FILES the address of the plain files.
//
// hub status N: every request for a shard is answered with this status; 0 ends that.
//
// hub asked N: the content server was asked for parts of shards so often since the last
// time that this was said; - is any number.
func hub(ts *script, neg bool, args []string) {
	need(ts, neg, len(args) > 0, "hub DIR | status N | asked N|-")
	held := ts.Value(hubKey{}).(**hubtest.Hub)
	h := *held
	switch {
	case args[0] == "status":
		n, err := strconv.Atoi(args[1])
		ts.Check(err)
		h.SetFault(func(r hubtest.Request) *hubtest.Fault {
			if !strings.HasSuffix(r.File, ".safetensors") {
				return nil
			}
			return &hubtest.Fault{Status: n}
		})
	case args[0] == "asked":
		n := 0
		for _, r := range h.Requests() {
			if r.Kind != hubtest.API && r.Kind != hubtest.Resolve && strings.HasSuffix(r.File, ".safetensors") {
				n++
			}
		}
		h.Forget()
		if args[1] != "-" && args[1] != strconv.Itoa(n) {
			ts.Fatalf("%d requests, want %s", n, args[1])
		}
	default:
		h = hubtest.New(ts.Value(tb{}).(testing.TB), ts.MkAbs(args[0]))
		*held = h
		ts.Setenv("SOURCE", "--source="+h.URL)
		ts.Setenv("REPO", "--repo="+h.Repo)
		ts.Setenv("REVISION", "--revision="+h.Revision)
		ts.Setenv("FILES", strings.TrimSuffix(h.PlainURL, "/{path}"))
	}
}
