package hub

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"deltafin/engine/hub/hubtest"
)

func openTestSite(t testing.TB, base string) *Site {
	t.Helper()
	s, err := OpenSite(base, SiteOptions{Stall: 300 * time.Millisecond, Backoff: time.Millisecond})
	must(t, err)
	t.Cleanup(s.Close)
	return s
}

// What a web server does wrong is found out, or got over; never are other bytes taken
// for those that were asked for.
func TestSiteReadsRanges(t *testing.T) {
	data := shard()
	always := func(x hubtest.Fault) func(hubtest.Request) *hubtest.Fault {
		return func(hubtest.Request) *hubtest.Fault { return &x }
	}
	first := func(n int, x hubtest.Fault) func(hubtest.Request) *hubtest.Fault {
		return func(r hubtest.Request) *hubtest.Fault {
			if r.N <= n { // the first is for the size
				return &x
			}
			return nil
		}
	}
	for name, c := range map[string]struct {
		fault func(hubtest.Request) *hubtest.Fault
		want  string
	}{
		"as it should":             {nil, ""},
		"cut twice":                {first(2, hubtest.Fault{Cut: 1000}), ""},
		"always cut":               {always(hubtest.Fault{Cut: 5000, Reset: true}), ""}, // it gets on
		"cut without a byte":       {always(hubtest.Fault{Cut: 1}), "broke off"},
		"503 twice":                {first(2, hubtest.Fault{Status: 503}), ""},
		"429 once":                 {first(1, hubtest.Fault{Status: 429, RetryAfter: "0"}), ""},
		"always 500":               {always(hubtest.Fault{Status: 500}), "answers 500"},
		"404":                      {always(hubtest.Fault{Status: 404}), "answers 404"},
		"403":                      {always(hubtest.Fault{Status: 403}), "answers 403"},
		"416":                      {always(hubtest.Fault{Status: 416}), "answers 416"},
		"stalls":                   {always(hubtest.Fault{Stall: true, Cut: 1}), "no bytes for"},
		"redirects without end":    {always(hubtest.Fault{Loop: true}), "redirects without end"},
		"no ranges":                {always(hubtest.Fault{NoRange: true}), "knows no ranges"},
		"another range":            {always(hubtest.Fault{Shift: true}), "another range"},
		"another size":             {always(hubtest.Fault{Size: 5}), "serves another"},
		"compressed":               {always(hubtest.Fault{Gzip: true}), "compresses"},
		"gives up after its tries": {first(3, hubtest.Fault{Status: 503}), "3 attempts"},
	} {
		h := hubtest.New(t, shardRepo(t))
		s := openTestSite(t, strings.TrimSuffix(h.PlainURL, "/{path}"))
		size, err := s.Size(t.Context(), "big.safetensors")
		must(t, err)
		if size != int64(len(data)) {
			t.Errorf("size %d", size)
		}
		h.SetFault(c.fault)
		x := shardExperts[1]
		b := make([]byte, x.bytes())
		err = s.ReadAt(t.Context(), "big.safetensors", b, x.off)
		switch {
		case c.want == "" && (err != nil || !bytes.Equal(b, data[x.off:x.end])):
			t.Errorf("%s: %v", name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || !errors.Is(err, ErrSource) || strings.Contains(err.Error(), "\n")):
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
}

func TestSiteKnowsWhatIsNotThere(t *testing.T) {
	h := hubtest.New(t, shardRepo(t))
	s := openTestSite(t, strings.TrimSuffix(h.PlainURL, "{path}"))
	if _, err := s.Size(t.Context(), "nothing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("404: %v", err)
	}
	if err := s.ReadAt(t.Context(), "big.safetensors", make([]byte, 1), 0); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before its size is known: %v", err)
	}
	for status, want := range map[int]bool{403: true, 410: true, 500: false, 401: false} {
		h.SetFault(func(hubtest.Request) *hubtest.Fault { return &hubtest.Fault{Status: status} })
		if _, err := s.Size(t.Context(), "big.safetensors"); err == nil || errors.Is(err, fs.ErrNotExist) != want || strings.Contains(err.Error(), "HF_TOKEN") {
			t.Errorf("%d: %v", status, err)
		}
	}
	for _, bad := range []string{"ftp://x/y", "http://", "http://u:p@x/y", "HTTP://u:p@x/y", "s3://u:p@x/y", "http://u:p/q@x/y", "http://u:p?q@x/y", "http://x/y?sig=1", "http://x/{path}", "nas"} {
		if _, err := OpenSite(bad, SiteOptions{}); err == nil || !IsSite(bad) && bad != "nas" || strings.Contains(err.Error(), "u:p") || strings.Contains(err.Error(), "sig=1") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// A file that is replaced on the server while it is read from is not mixed with the
// old one, though it is as long.
func TestSiteRefusesAChangedFile(t *testing.T) {
	dir := shardRepo(t)
	h := hubtest.New(t, dir)
	s := openTestSite(t, strings.TrimSuffix(h.PlainURL, "/{path}"))
	_, err := s.Size(t.Context(), "big.safetensors")
	must(t, err)
	other := shard()
	other[len(other)-1] ^= 1
	path := filepath.Join(t.TempDir(), "x")
	must(t, os.WriteFile(path, other, 0o644))
	must(t, h.Put("big.safetensors", path))
	if err := s.ReadAt(t.Context(), "big.safetensors", make([]byte, 10), 5); err == nil || !strings.Contains(err.Error(), "was changed") {
		t.Errorf("%v", err)
	}
}

// A redirect to another host is followed, and that host is told nothing but the range.
func TestSiteTellsOtherHostsNothing(t *testing.T) {
	var seen atomic.Pointer[http.Header]
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := r.Header.Clone()
		seen.Store(&h)
		http.ServeContent(w, r, "x", time.Time{}, strings.NewReader("0123456789"))
	}))
	defer other.Close()
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.SetCookie(w, &http.Cookie{Name: "c", Value: "secret"})
		http.Redirect(w, r, strings.Replace(other.URL, "127.0.0.1", "localhost", 1)+r.URL.Path, http.StatusFound)
	}))
	defer front.Close()
	t.Setenv("HF_TOKEN", "secret")
	s := openTestSite(t, front.URL)
	size, err := s.Size(t.Context(), "x")
	must(t, err)
	b := make([]byte, 3)
	must(t, s.ReadAt(t.Context(), "x", b, 4))
	if size != 10 || string(b) != "456" {
		t.Errorf("%d bytes long, %q", size, b)
	}
	for key, values := range *seen.Load() {
		if key == "Cookie" || key == "Authorization" || key == "Referer" || strings.Contains(strings.Join(values, " "), "secret") {
			t.Errorf("it was told %s: %s", key, values)
		}
	}
}

func TestSiteReadsEndWithTheirContext(t *testing.T) {
	h := hubtest.New(t, shardRepo(t))
	s, err := OpenSite(strings.TrimSuffix(h.PlainURL, "/{path}"), SiteOptions{Stall: time.Hour})
	must(t, err)
	defer s.Close()
	_, err = s.Size(t.Context(), "big.safetensors")
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	h.SetFault(func(hubtest.Request) *hubtest.Fault {
		cancel()
		return &hubtest.Fault{Stall: true, Cut: 100}
	})
	if err := s.ReadAt(ctx, "big.safetensors", make([]byte, 1000), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
