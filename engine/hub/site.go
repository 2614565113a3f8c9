package hub

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strings"
	"sync"
	"time"
)

// ErrSource is wrapped by errors that are a server's or the network's fault.
var ErrSource = errors.New("a source does not serve")

// Site is a directory of a web server, whose files are read by ranges. It sends no
// token, and no one else gets what an address has in it. A file has to stay the one
// that was seen first, by its length and its ETag. It implements drive.Remote.
type Site struct {
	c       *client
	s       *source
	retries int
	backoff time.Duration

	mu    sync.Mutex
	files map[string]siteFile
}

type siteFile struct {
	size int64
	tag  string
}

// SiteOptions of a [Site]. The zero value is what a run uses.
type SiteOptions struct {
	Connections int           // kept open; 0 means 8
	Stall       time.Duration // a connection that brings nothing for so long is cut; 0 means 10 s
	Retries     int           // of a request that brought nothing; 0 means 2
	Backoff     time.Duration // before the first of them, then doubled; 0 means 0.2 s
}

// IsSite tells whether what stands in a directory's place is an address. One that is
// not a web server's is refused by [OpenSite], which shows no password in it.
func IsSite(dir string) bool { return strings.Contains(dir, "://") }

// Redact is an address without what may be secret in it, to be shown.
func Redact(address string) string { return redact(address) }

// OpenSite takes an address below which files lie. It asks the server nothing.
func OpenSite(base string, o SiteOptions) (*Site, error) {
	h := Options{Connections: o.Connections, Stall: o.Stall, Sources: []string{strings.TrimSuffix(base, "/") + "/" + placeholder}}
	if _, err := newSource(base); err != nil {
		return nil, err
	}
	if strings.ContainsAny(base, "?#{") {
		return nil, fmt.Errorf("%s: has more than a path in it: give the address of a directory, such as http://nas:8080/k3", redact(base))
	}
	if h.Connections <= 0 {
		h.Connections = 8
	}
	if h.Stall <= 0 {
		h.Stall = 10 * time.Second
	}
	if o.Retries <= 0 {
		o.Retries = 2
	}
	if o.Backoff <= 0 {
		o.Backoff = 200 * time.Millisecond
	}
	c, err := newClient(&h)
	if err != nil {
		return nil, err
	}
	return &Site{c: c, s: c.sources[0], retries: o.Retries, backoff: o.Backoff, files: map[string]siteFile{}}, nil
}

// Name is the address.
func (s *Site) Name() string { return s.s.String() }

// Close closes the connections.
func (s *Site) Close() { s.c.close() }

// Size asks how long a file is. One that is not there is fs.ErrNotExist; so is one that
// the server forbids, for some forbid what they do not have.
func (s *Site) Size(ctx context.Context, name string) (int64, error) {
	var size int64
	err := s.patiently(ctx, func() (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, 2*s.c.stall)
		defer cancel()
		resp, err := s.c.get(ctx, s.s, s.s.url("", "", name), "bytes=0-0")
		if r, ok := errors.AsType[*refusal](err); ok && (r.code == http.StatusNotFound || r.code == http.StatusGone || r.code == http.StatusForbidden) {
			return false, fmt.Errorf("%w: %w", fs.ErrNotExist, r)
		}
		if err != nil {
			return false, err
		}
		defer resp.Body.Close()
		_, _, total, ok := contentRange(resp.Header.Get("Content-Range"))
		if resp.StatusCode != http.StatusPartialContent || !ok || total < 0 {
			return false, s.rangeless()
		}
		size = total
		s.mu.Lock()
		defer s.mu.Unlock()
		s.files[name] = siteFile{total, resp.Header.Get("Etag")}
		return true, nil
	})
	return size, err
}

func (s *Site) rangeless() error {
	return &refusal{source: s.Name(), what: "knows no ranges, so that experts cannot be had from it one by one: use another server", final: true}
}

// ReadAt fills p with the bytes of a file from off on. Size has to have been asked.
func (s *Site) ReadAt(ctx context.Context, name string, p []byte, off int64) error {
	s.mu.Lock()
	f, ok := s.files[name]
	s.mu.Unlock()
	x := span{off, off + int64(len(p))}
	if !ok || off < 0 || x.end > f.size {
		return fmt.Errorf("%s/%s: %w: has no bytes %d to %d", s.Name(), name, fs.ErrNotExist, x.off, x.end)
	}
	return s.patiently(ctx, func() (bool, error) {
		n, err := s.c.read(ctx, s.s, &File{Name: name, Size: f.size}, f.tag, x, p, nil)
		p, x.off = p[n:], x.off+n
		if err == nil && len(p) > 0 {
			return n > 0, errShort
		}
		return n > 0, err
	})
}

// errShort says that a server gave less than it was asked for, as it may.
var errShort = errors.New("the server gave less than it was asked for")

// patiently calls f until it succeeds, is refused for good, or has failed too often in a
// row without getting anywhere.
func (s *Site) patiently(ctx context.Context, f func() (moved bool, err error)) error {
	for tries := 0; ; {
		moved, err := f()
		if moved {
			tries = 0
		}
		r, refused := errors.AsType[*refusal](err)
		short := errors.Is(err, errShort)
		if err == nil || !refused && !short || refused && r.final || ctx.Err() != nil {
			return err
		}
		if short && moved {
			continue
		}
		if tries++; tries > s.retries || refused && r.silent {
			return fmt.Errorf("%w: %d attempts", err, tries)
		}
		wait := s.backoff << (tries - 1)
		if refused {
			wait = max(wait, min(r.wait, s.c.stall)) // nobody waits for an hour here
		}
		if err := sleepUntil(ctx, time.Now().Add(wait)); err != nil {
			return err
		}
	}
}
