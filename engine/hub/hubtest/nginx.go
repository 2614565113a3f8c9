package hubtest

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// Nginx serves a directory by another implementation of ranges than our own, until the
// test ends, and returns its address. Without nginx the test is skipped, and says so.
func Nginx(t testing.TB, dir string) (base string) {
	t.Helper()
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		t.Skip("NOT RUN: no nginx")
	}
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatalf("hubtest: nginx: %v", err)
		}
	}
	must(os.Chmod(dir, 0o755))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	address := l.Addr().String()
	l.Close()
	prefix := t.TempDir()
	conf := filepath.Join(prefix, "nginx.conf")
	must(os.WriteFile(conf, fmt.Appendf(nil, `
daemon off;
master_process off;
pid %[1]s/pid;
error_log %[1]s/log;
events {}
http {
	access_log off;
	client_body_temp_path %[1]s/a; proxy_temp_path %[1]s/b; fastcgi_temp_path %[1]s/c; uwsgi_temp_path %[1]s/d; scgi_temp_path %[1]s/e;
	sendfile on;
	server { listen %[2]s; root %[3]s; }
}
`, prefix, address, dir), 0o644))
	server := exec.Command(nginx, "-c", conf, "-p", prefix, "-e", filepath.Join(prefix, "log"))
	must(server.Start())
	t.Cleanup(func() {
		server.Process.Kill()
		server.Wait()
	})
	for range 250 {
		if c, err := net.Dial("tcp", address); err == nil {
			c.Close()
			return "http://" + address
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("hubtest: nginx does not answer")
	return ""
}
