// Package hubtest hides how a hub and its content server misbehave on demand.
//
// A [Hub] serves a directory as one revision of a repository, the way Hugging Face
// does: lists of files in pages, small files from the hub itself, large ones by a
// redirect to a signed address on another host. It also serves the directory as
// plain files. A function of the test decides for each request what goes wrong.
package hubtest

import (
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Kind is what part of a hub a request goes to.
type Kind uint8

const (
	API     Kind = iota // the list of files, or the name of a revision
	Resolve             // a file, at the hub
	Content             // a file, at the content server
	Plain               // a file, of the plain server
)

// Request is one request that was received.
type Request struct {
	Kind  Kind
	N     int    // how many of this kind came before
	File  string // "" for the API
	Off   int64  // first byte asked for, 0 without a range
	End   int64  // behind the last, the file's size without a range
	Range bool
	Token string // the Authorization header
}

// Fault is what goes wrong with an answer. Fields that are zero do not.
type Fault struct {
	Status     int    // in place of the right one, with a short body
	RetryAfter string // header
	Cut        int64  // bytes of the body, counted from 1, after which the connection ends
	Reset      bool   // it ends by a reset, not in an orderly way
	Flip       int64  // 1 + the offset in the file of a byte that is sent inverted
	Stall      bool   // nothing is sent any more from Cut on, until the client goes
	Loop       bool   // a redirect to the address itself
	NoRange    bool   // the range is ignored
	Shift      bool   // another range is sent than was asked for
	Gzip       bool   // claims to be compressed
	Digest     string // the hub claims this SHA-256 or git digest
	Commit     string // the hub claims this commit
	Size       int64  // the total that the content server claims
}

// Hub is a test server. It is closed when its test ends.
type Hub struct {
	URL      string // of the hub
	PlainURL string // with {path} in it
	Repo     string
	Revision string
	Dir      string // that is served

	PageSize int // of the list; 0 is everything at once

	mu     sync.Mutex
	fault  func(Request) *Fault
	files  map[string]*file
	names  []string
	log    []Request
	counts [4]int
	hub    *httptest.Server
	cdn    *httptest.Server
	expiry int
}

type file struct {
	path        string
	size        int64
	sha256, git string
	lfs         bool
}

// What every Hub calls its one repository and its one revision.
const (
	Repo     = "test/model"
	Revision = "0123456789012345678901234567890123456789"
)

// New serves a directory.
func New(t testing.TB, dir string) *Hub {
	t.Helper()
	h := &Hub{Repo: Repo, Revision: Revision, Dir: dir, files: map[string]*file{}}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		return h.Put(filepath.ToSlash(rel), path)
	})
	if err != nil {
		t.Fatalf("hubtest: %v", err)
	}
	// All is set before the first of them can be asked.
	h.cdn = httptest.NewUnstartedServer(http.HandlerFunc(h.serveContent))
	h.hub = httptest.NewUnstartedServer(http.HandlerFunc(h.serveHub))
	h.URL = "http://" + h.hub.Listener.Addr().String()
	h.PlainURL = "http://" + h.cdn.Listener.Addr().String() + "/plain/{path}"
	h.cdn.Start()
	h.hub.Start()
	t.Cleanup(func() {
		h.hub.CloseClientConnections()
		h.cdn.CloseClientConnections()
		h.hub.Close()
		h.cdn.Close()
	})
	return h
}

// Put makes the content of path a file of the revision, or replaces one.
func (h *Hub) Put(name, path string) error {
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	s256, git := sha256.New(), sha1.New()
	fmt.Fprintf(git, "blob %d\x00", info.Size())
	if _, err := io.Copy(io.MultiWriter(s256, git), in); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.files[name] = &file{
		path: path, size: info.Size(), lfs: info.Size() > 16<<10,
		sha256: hex.EncodeToString(s256.Sum(nil)), git: hex.EncodeToString(git.Sum(nil)),
	}
	if !slices.Contains(h.names, name) {
		h.names = append(h.names, name)
		slices.Sort(h.names)
	}
	return nil
}

// SetFault makes f decide what goes wrong from now on; nil means nothing.
func (h *Hub) SetFault(f func(Request) *Fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fault = f
}

// Requests returns what was received so far.
func (h *Hub) Requests() []Request {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.log)
}

// Forget empties the list of requests.
func (h *Hub) Forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.log, h.counts = nil, [4]int{}
}

// ExpireLinks makes the addresses that the hub has redirected to so far useless.
func (h *Hub) ExpireLinks() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.expiry++
}

func (h *Hub) receive(kind Kind, name string, f *file, r *http.Request) (Request, *Fault) {
	req := Request{Kind: kind, File: name, Token: r.Header.Get("Authorization")}
	if f != nil {
		req.End = f.size
		req.Off, req.End, req.Range = byteRange(r.Header.Get("Range"), f.size)
	}
	h.mu.Lock()
	req.N = h.counts[kind]
	h.counts[kind]++
	h.log = append(h.log, req)
	fault := h.fault
	h.mu.Unlock()
	if fault != nil {
		if x := fault(req); x != nil {
			return req, x
		}
	}
	return req, &Fault{}
}

func byteRange(h string, size int64) (off, end int64, ok bool) {
	a, b, ok := strings.Cut(strings.TrimPrefix(h, "bytes="), "-")
	first, err1 := strconv.ParseInt(a, 10, 64)
	last, err2 := strconv.ParseInt(b, 10, 64)
	if !ok || err1 != nil || err2 != nil || first > last {
		return 0, size, false
	}
	return first, min(last+1, size), true
}

func refuse(w http.ResponseWriter, x *Fault) {
	if x.RetryAfter != "" {
		w.Header().Set("Retry-After", x.RetryAfter)
	}
	http.Error(w, "no", x.Status)
}

func (h *Hub) file(name string) *file {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.files[name]
}

func (h *Hub) serveHub(w http.ResponseWriter, r *http.Request) {
	if rest, ok := strings.CutPrefix(r.URL.Path, "/api/models/"+h.Repo+"/"); ok {
		_, x := h.receive(API, "", nil, r)
		switch {
		case x.Status != 0:
			refuse(w, x)
		case x.Loop:
			http.Redirect(w, r, r.URL.String(), http.StatusFound)
		case rest == "revision/main":
			json.NewEncoder(w).Encode(map[string]any{"id": h.Repo, "sha": h.Revision})
		case rest == "tree/"+h.Revision:
			h.list(w, r)
		default:
			http.NotFound(w, r)
		}
		return
	}
	name, ok := strings.CutPrefix(r.URL.Path, "/"+h.Repo+"/resolve/"+h.Revision+"/")
	f := h.file(name)
	if !ok || f == nil {
		http.NotFound(w, r)
		return
	}
	req, x := h.receive(Resolve, name, f, r)
	if x.Status != 0 {
		refuse(w, x)
		return
	}
	if x.Loop {
		http.Redirect(w, r, r.URL.String(), http.StatusFound)
		return
	}
	set := func(key, v, other string) {
		if other != "" {
			v = other
		}
		w.Header().Set(key, v)
	}
	set("X-Repo-Commit", h.Revision, x.Commit)
	if !f.lfs {
		set("Etag", `"`+f.git+`"`, x.Digest)
		h.send(w, r, req, f, x)
		return
	}
	set("X-Linked-Etag", `"`+f.sha256+`"`, x.Digest)
	w.Header().Set("X-Linked-Size", strconv.FormatInt(f.size, 10))
	h.mu.Lock()
	expiry := h.expiry
	h.mu.Unlock()
	http.Redirect(w, r, fmt.Sprintf("http://%s/content/%s?Signature=secret&Expires=%d", h.cdn.Listener.Addr(), name, expiry), http.StatusFound)
}

func (h *Hub) list(w http.ResponseWriter, r *http.Request) {
	type lfs struct {
		OID  string `json:"oid"`
		Size int64  `json:"size"`
	}
	type entry struct {
		Type string `json:"type"`
		OID  string `json:"oid"`
		Size int64  `json:"size"`
		Path string `json:"path"`
		LFS  *lfs   `json:"lfs,omitempty"`
	}
	from, _ := strconv.Atoi(r.URL.Query().Get("cursor"))
	h.mu.Lock()
	defer h.mu.Unlock()
	to := len(h.names)
	if h.PageSize > 0 && from+h.PageSize < to {
		to = from + h.PageSize
		w.Header().Set("Link", fmt.Sprintf(`<%s%s?recursive=true&cursor=%d>; rel="next"`, h.URL, r.URL.Path, to))
	}
	page := []entry{}
	dirs := map[string]bool{}
	for _, name := range h.names[from:to] {
		if d, _, ok := strings.Cut(name, "/"); ok && !dirs[d] {
			dirs[d] = true
			page = append(page, entry{Type: "directory", OID: strings.Repeat("d", 40), Path: d})
		}
		f := h.files[name]
		e := entry{Type: "file", OID: f.git, Size: f.size, Path: name}
		if f.lfs {
			e.LFS, e.OID = &lfs{f.sha256, f.size}, strings.Repeat("e", 40)
		}
		page = append(page, e)
	}
	json.NewEncoder(w).Encode(page)
}

func (h *Hub) serveContent(w http.ResponseWriter, r *http.Request) {
	kind := Content
	name, ok := strings.CutPrefix(r.URL.Path, "/content/")
	if !ok {
		kind = Plain
		name, ok = strings.CutPrefix(r.URL.Path, "/plain/")
	}
	f := h.file(name)
	if !ok || f == nil {
		http.NotFound(w, r)
		return
	}
	req, x := h.receive(kind, name, f, r)
	h.mu.Lock()
	expired := kind == Content && r.URL.Query().Get("Expires") != strconv.Itoa(h.expiry)
	h.mu.Unlock()
	switch {
	case expired:
		http.Error(w, "expired", http.StatusForbidden)
	case x.Status != 0:
		refuse(w, x)
	case x.Loop:
		http.Redirect(w, r, r.URL.String(), http.StatusFound)
	default:
		w.Header().Set("Etag", fmt.Sprintf(`"%x-%s"`, f.size, f.git[:8]))
		h.send(w, r, req, f, x)
	}
}

func (h *Hub) send(w http.ResponseWriter, r *http.Request, req Request, f *file, x *Fault) {
	in, err := os.Open(f.path)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer in.Close()
	off, end, status := int64(0), f.size, http.StatusOK
	if req.Range && !x.NoRange {
		if req.Off >= f.size {
			http.Error(w, "no such range", http.StatusRequestedRangeNotSatisfiable)
			return
		}
		off, end, status = req.Off, req.End, http.StatusPartialContent
		if x.Shift && off > 0 {
			off--
		}
		total := f.size
		if x.Size != 0 {
			total = x.Size
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", off, end-1, total))
	}
	if x.Gzip {
		w.Header().Set("Content-Encoding", "gzip")
	}
	w.Header().Set("Content-Length", strconv.FormatInt(end-off, 10))
	w.WriteHeader(status)
	stop := end
	if x.Cut > 0 {
		stop = min(end, off+x.Cut-1)
	}
	if x.Flip == 0 {
		if _, err := in.Seek(off, io.SeekStart); err == nil {
			io.CopyN(w, in, stop-off)
		}
	} else {
		buf := make([]byte, 64<<10)
		for at := off; at < stop; {
			n, err := in.ReadAt(buf[:min(int64(len(buf)), stop-at)], at)
			if i := x.Flip - 1 - at; 0 <= i && i < int64(n) {
				buf[i] ^= 0xff
			}
			if _, werr := w.Write(buf[:n]); werr != nil || err != nil && err != io.EOF {
				return
			}
			at += int64(n)
		}
	}
	if stop == end && !x.Stall {
		return
	}
	http.NewResponseController(w).Flush()
	if x.Stall {
		select {
		case <-r.Context().Done():
		case <-time.After(time.Minute):
		}
		return
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	if c, ok := conn.(*net.TCPConn); ok && x.Reset {
		c.SetLinger(0)
	}
	conn.Close()
}
