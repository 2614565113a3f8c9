package hub

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"deltafin/engine/hub/hubtest"
)

// Another implementation of ranges than our own test server's: nginx serves a store
// as plain files, and both a fetch and a depot come out right.
func TestNginxIsASource(t *testing.T) {
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		t.Skip("NOT RUN: no nginx")
	}
	model := shardRepo(t)
	h := hubtest.New(t, model)
	o := quick(h, t.TempDir())
	must(t, Fetch(t.Context(), o))
	served := o.Dir
	must(t, os.Chmod(served, 0o755))

	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	address := l.Addr().String()
	l.Close()
	prefix := t.TempDir()
	conf := filepath.Join(prefix, "nginx.conf")
	must(t, os.WriteFile(conf, fmt.Appendf(nil, `
daemon off;
master_process off;
pid %[1]s/pid;
error_log %[1]s/log;
events {}
http {
	access_log off;
	client_body_temp_path %[1]s/a; proxy_temp_path %[1]s/b; fastcgi_temp_path %[1]s/c; uwsgi_temp_path %[1]s/d; scgi_temp_path %[1]s/e;
	server { listen %[2]s; root %[3]s; }
}
`, prefix, address, served), 0o644))
	server := exec.Command(nginx, "-c", conf, "-p", prefix, "-e", filepath.Join(prefix, "log"))
	must(t, server.Start())
	defer server.Wait()
	defer server.Process.Kill()
	for range 100 {
		if c, err := net.Dial("tcp", address); err == nil {
			c.Close()
			break
		}
		time.Sleep(20 * time.Millisecond)
	}

	o.Sources = []string{"http://" + address + "/{path}"}
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
