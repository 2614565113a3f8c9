package hub

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// DefaultHub is asked when no source is named.
const DefaultHub = "https://huggingface.co"

const (
	userAgent     = "deltafin"
	redirectLimit = 10
	pageLimit     = 32 << 20 // bytes of one page of a hub's list
	backoffFirst  = 500 * time.Millisecond
	backoffSteps  = 7         // doublings
	waitLimit     = time.Hour // the longest Retry-After that is obeyed as it stands
	placeholder   = "{path}"
)

// source is one place to get the files of a revision from.
type source struct {
	base   string // of a hub; or with {path} in it, of a plain web server
	origin string // scheme and host, the only place that sees the token

	mu       sync.Mutex
	notUntil time.Time         // told to wait, or resting after a failure
	direct   map[string]string // where the hub last sent us for a file
	failures int               // in a row
}

func newSource(base string) (*source, error) {
	u, err := url.Parse(strings.ReplaceAll(base, placeholder, "path"))
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("source %q is not an http or https address: give a hub such as %s, or a server's address with {path} where the file's name goes", redact(base), DefaultHub)
	}
	if u.User != nil {
		return nil, fmt.Errorf("source %s has a name or password in its address: give a token in HF_TOKEN, or use a server without", redact(base))
	}
	return &source{base: strings.TrimSuffix(base, "/"), origin: u.Scheme + "://" + u.Host, direct: map[string]string{}}, nil
}

func (s *source) plain() bool { return strings.Contains(s.base, placeholder) }

// String names the source in messages.
func (s *source) String() string { return strings.TrimSuffix(redact(s.base), "/"+placeholder) }

// redact drops what may be secret from an address: a password, or the signature of
// a link to a content server. Of what is no address it leaves what follows the last @, for
// nobody knows where a password in it ends.
func redact(address string) string {
	if u, err := url.Parse(address); err != nil || u.Host == "" {
		address = address[strings.LastIndexByte(address, '@')+1:]
	}
	if i := strings.IndexAny(address, "?#"); i >= 0 {
		address = address[:i]
	}
	if scheme, rest, ok := strings.Cut(address, "://"); ok {
		host, path, found := strings.Cut(rest, "/")
		if i := strings.LastIndexByte(host, '@'); i >= 0 {
			host = host[i+1:]
		}
		if address = scheme + "://" + host; found {
			address += "/" + path
		}
	}
	return address
}

func escapePath(p string) string { return (&url.URL{Path: p}).EscapedPath() }

// url is where a file of a revision is asked for.
func (s *source) url(repo, revision, name string) string {
	if s.plain() {
		return strings.ReplaceAll(s.base, placeholder, escapePath(name))
	}
	return s.base + "/" + escapePath(repo) + "/resolve/" + url.PathEscape(revision) + "/" + escapePath(name)
}

// refusal is an answer, or the lack of one, that did not bring what was asked for.
type refusal struct {
	source string
	what   string        // in words, with the remedy
	wait   time.Duration // the server asks to wait that long
	final  bool          // asking this source again is pointless
	code   int           // the status, if it was one
	silent bool          // for as long as anybody waits
	err    error
}

func (r *refusal) Error() string {
	if r.err != nil {
		return fmt.Sprintf("%s: %s: %v", r.source, r.what, r.err)
	}
	return r.source + ": " + r.what
}

func (r *refusal) Unwrap() error { return r.err }

func (r *refusal) Is(target error) bool { return target == ErrSource }

// exhausted is why each of the sources is of no use.
type exhausted []string

func (e exhausted) Error() string        { return strings.Join(e, "; ") }
func (e exhausted) Is(target error) bool { return target == ErrSource }

// client speaks HTTP to the sources.
type client struct {
	http     *http.Client
	token    string
	hub      string // origin that the token belongs to
	sources  []*source
	repo     string
	revision string // resolved
	stall    time.Duration
	now      func() time.Time
}

func newClient(o *Options) (*client, error) {
	token := strings.TrimSpace(o.Token) // files that hold one tend to end with a newline
	if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("the token in HF_TOKEN has blanks or other characters in it that no token has: copy it again")
	}
	c := &client{token: token, repo: o.Repo, revision: o.Revision, stall: o.Stall, now: time.Now}
	for _, base := range o.Sources {
		s, err := newSource(base)
		if err != nil {
			return nil, err
		}
		if c.hub == "" && !s.plain() {
			c.hub = s.origin
		}
		c.sources = append(c.sources, s)
	}
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: o.Stall, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout:   o.Stall,
		ResponseHeaderTimeout: o.Stall,
		MaxIdleConnsPerHost:   o.Connections,
		IdleConnTimeout:       90 * time.Second,
		DisableCompression:    true, // a range of compressed bytes would be no range of the file
		ReadBufferSize:        64 << 10,
		TLSNextProto:          map[string]func(string, *tls.Conn) http.RoundTripper{}, // HTTP/2 would put all parts on one connection
	}
	c.http = &http.Client{Transport: &authorizer{c, t}, CheckRedirect: c.redirected}
	return c, nil
}

func (c *client) close() { c.http.CloseIdleConnections() }

// authorizer adds the token to requests to the hub itself and to nothing else.
type authorizer struct {
	c    *client
	next *http.Transport
}

func (a *authorizer) RoundTrip(r *http.Request) (*http.Response, error) {
	if a.c.token != "" && r.URL.Scheme+"://"+r.URL.Host == a.c.hub {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+a.c.token)
	}
	return a.next.RoundTrip(r)
}

func (a *authorizer) CloseIdleConnections() { a.next.CloseIdleConnections() }

var (
	errLoop      = errors.New("redirects without end")
	errDowngrade = errors.New("redirects from https to http")
)

func (c *client) redirected(r *http.Request, via []*http.Request) error {
	if len(via) >= redirectLimit {
		return errLoop
	}
	if r.URL.Scheme != "https" && via[len(via)-1].URL.Scheme == "https" {
		return errDowngrade
	}
	r.Header.Del("Referer") // Go's client would tell the next server where it was sent from
	return nil
}

// get makes one request. The answer's status is one that was asked for.
func (c *client) get(ctx context.Context, s *source, address, rang string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, &refusal{source: s.String(), what: "its address is malformed", final: true, err: err}
	}
	r.Header.Set("User-Agent", userAgent)
	r.Header.Set("Accept-Encoding", "identity")
	if rang != "" {
		r.Header.Set("Range", rang)
	}
	resp, err := c.http.Do(r)
	if err != nil {
		return nil, s.netError(ctx, err)
	}
	if resp.StatusCode == http.StatusOK || rang != "" && resp.StatusCode == http.StatusPartialContent {
		if e := resp.Header.Get("Content-Encoding"); e != "" && e != "identity" {
			resp.Body.Close()
			return nil, &refusal{source: s.String(), what: fmt.Sprintf("compresses its answer (%.20q) though it was asked not to: use another source", e), final: true}
		}
		return resp, nil
	}
	// A short body is read so that the connection can serve again.
	io.CopyN(io.Discard, resp.Body, 16<<10)
	resp.Body.Close()
	return nil, c.status(s, resp)
}

// netError says why no answer came. Go's own text would show the whole address,
// signature included.
func (s *source) netError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errStalled) {
		return cause
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	r := &refusal{source: s.String(), what: "no answer", err: err}
	if t, ok := errors.AsType[net.Error](err); ok {
		r.silent = t.Timeout()
	}
	switch _, badCert := errors.AsType[*tls.CertificateVerificationError](err); {
	case errors.Is(err, errLoop), errors.Is(err, errDowngrade):
		r.what, r.final = "cannot be used, use another source", true
	case badCert:
		r.what, r.final = "its certificate is not trusted: check the system's clock and certificates, or use another source", true
	}
	return r
}

// status turns an unwanted status into a refusal.
func (c *client) status(s *source, resp *http.Response) error {
	r := &refusal{source: s.String(), wait: retryAfter(resp.Header.Get("Retry-After"), c.now())}
	code := resp.StatusCode
	r.code = code
	r.what = fmt.Sprintf("answers %d %s", code, http.StatusText(code))
	switch {
	case s.plain() && (code == http.StatusUnauthorized || code == http.StatusForbidden):
		r.final = true
		r.what += ": no token is sent there: let this machine read from it without one, or use another server"
	case code == http.StatusUnauthorized && c.token == "", code == http.StatusForbidden && c.token == "":
		r.final = true
		r.what += ": access needs a token: accept the model's licence at the hub and put a token into the environment variable HF_TOKEN"
	case code == http.StatusUnauthorized, code == http.StatusForbidden:
		r.final = true
		r.what += ": the token in HF_TOKEN gives no access: check that it is valid and that the model's licence was accepted at the hub"
	case code == http.StatusNotFound, code == http.StatusGone:
		r.final = true
		r.what += ": check the names of the repository and the revision"
	case code == http.StatusRequestedRangeNotSatisfiable:
		r.final = true
		r.what += ": its file is shorter than the one that was pinned: use another source"
	case code == http.StatusRequestTimeout, code == http.StatusTooEarly, code == http.StatusTooManyRequests, code >= 500:
	default:
		r.final = true
	}
	return r
}

// retryAfter reads the header's two forms: seconds, or a date.
func retryAfter(h string, now time.Time) time.Duration {
	var d time.Duration
	if n, err := strconv.ParseUint(h, 10, 31); err == nil {
		d = time.Duration(n) * time.Second
	} else if at, err := http.ParseTime(h); err == nil {
		d = at.Sub(now)
	}
	return max(0, min(d, waitLimit))
}

// answer is a body that carries a file's bytes from off on.
type answer struct {
	io.ReadCloser
	off int64
	end int64  // the server promises to send up to here
	tag string // its ETag
}

// open asks a source for bytes [x.off, x.end) of a file. The answer begins at x.off,
// or at 0 if the server knows no ranges.
func (c *client) open(ctx context.Context, s *source, f *File, x span) (*answer, error) {
	s.mu.Lock()
	address, direct := s.direct[f.Name]
	s.mu.Unlock()
	if !direct {
		address = s.url(c.repo, c.revision, f.Name)
	}
	resp, err := c.get(ctx, s, address, fmt.Sprintf("bytes=%d-%d", x.off, x.end-1))
	if r, ok := errors.AsType[*refusal](err); ok && direct && r.wait == 0 {
		// The link that the hub gave us is used up, or its server is in trouble: ask the hub.
		s.mu.Lock()
		delete(s.direct, f.Name)
		s.mu.Unlock()
		return c.open(ctx, s, f, x)
	}
	if err != nil {
		return nil, err
	}
	a, err := c.accept(s, f, x, resp)
	if err != nil {
		resp.Body.Close()
		return nil, err
	}
	if final := resp.Request.URL; resp.Request.Response != nil && final.Scheme+"://"+final.Host != s.origin {
		s.mu.Lock()
		s.direct[f.Name] = final.String()
		s.mu.Unlock()
	}
	return a, nil
}

// accept checks that an answer is about the file that is wanted.
func (c *client) accept(s *source, f *File, x span, resp *http.Response) (*answer, error) {
	changed := func(format string, args ...any) error {
		return &refusal{source: s.String(), what: "serves another " + f.Name + " than was pinned (" + fmt.Sprintf(format, args...) + "): it was changed; use another source, or fetch the new revision", final: true}
	}
	for r := resp; r != nil; r = r.Request.Response {
		for _, key := range []string{"X-Linked-Etag", "Etag"} {
			if key == "Etag" && (s.plain() || r.Request.URL.Scheme+"://"+r.Request.URL.Host != s.origin) {
				continue // only a hub's own tag is a digest
			}
			tag := strings.Trim(strings.TrimPrefix(r.Header.Get(key), "W/"), `"`)
			if len(tag) == 64 && isHex(tag, 64) && f.SHA256 != "" && tag != f.SHA256 {
				return nil, changed("SHA-256 %s, not %s", tag, f.SHA256)
			}
			if len(tag) == 40 && isHex(tag, 40) && f.Git != "" && tag != f.Git {
				return nil, changed("git blob %s, not %s", tag, f.Git)
			}
		}
		if commit := r.Header.Get("X-Repo-Commit"); len(commit) == 40 && isHex(commit, 40) && len(c.revision) == 40 && commit != c.revision {
			return nil, changed("commit %s, not %s", commit, c.revision)
		}
	}
	if resp.StatusCode == http.StatusOK {
		if resp.ContentLength >= 0 && resp.ContentLength != f.Size {
			return nil, changed("%d bytes, not %d", resp.ContentLength, f.Size)
		}
		return &answer{resp.Body, 0, f.Size, resp.Header.Get("Etag")}, nil
	}
	first, last, total, ok := contentRange(resp.Header.Get("Content-Range"))
	switch {
	case !ok || first != x.off || last < first || last >= x.end:
		return nil, &refusal{source: s.String(), what: fmt.Sprintf("answers with another range (%.60q) than was asked for: use another source", resp.Header.Get("Content-Range")), final: true}
	case total >= 0 && total != f.Size:
		return nil, changed("%d bytes, not %d", total, f.Size)
	}
	return &answer{resp.Body, first, last + 1, resp.Header.Get("Etag")}, nil
}

// read makes one request for x and returns how many of its bytes came into dst, which
// is as long. With a tag, the file has to have that one. A rate, if not nil, is obeyed.
func (c *client) read(ctx context.Context, s *source, f *File, tag string, x span, dst []byte, rate *bucket) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a, err := c.open(ctx, s, f, x)
	if err != nil {
		return 0, err
	}
	defer a.Close()
	if a.off != x.off || a.end > x.end {
		return 0, &refusal{source: s.String(), what: "knows no ranges, so that experts cannot be had from it one by one: use another source, or fetch the whole model", final: true}
	}
	if tag != "" && a.tag != tag {
		return 0, &refusal{source: s.String(), what: fmt.Sprintf("serves another %s than before (ETag %.80q, not %.80q): it was changed, start again", f.Name, a.tag, tag), final: true}
	}
	body := &watched{body: a, cancel: cancel, limit: c.stall}
	got, want := int64(0), a.end-x.off
	for got < want {
		n, rerr := body.Read(dst[got:min(got+bufferBytes, want)])
		got += int64(n)
		if rate != nil {
			if err := rate.take(ctx, n); err != nil {
				return got, err
			}
		}
		if rerr != nil && got < want {
			return got, c.broke(ctx, s, x.off+got, rerr)
		}
	}
	return got, nil
}

// contentRange reads "bytes FIRST-LAST/TOTAL"; total is -1 if the server does not
// know it.
func contentRange(h string) (first, last, total int64, ok bool) {
	h, ok1 := strings.CutPrefix(h, "bytes ")
	h, size, ok2 := strings.Cut(h, "/")
	a, b, ok3 := strings.Cut(h, "-")
	f, err1 := strconv.ParseUint(a, 10, 63)
	l, err2 := strconv.ParseUint(b, 10, 63)
	t, err3 := strconv.ParseUint(size, 10, 63)
	if size == "*" {
		return int64(f), int64(l), -1, ok1 && ok2 && ok3 && err1 == nil && err2 == nil
	}
	return int64(f), int64(l), int64(t), ok1 && ok2 && ok3 && err1 == nil && err2 == nil && err3 == nil
}

// broke says why a body ended before byte at.
func (c *client) broke(ctx context.Context, s *source, at int64, err error) error {
	r := &refusal{source: s.String(), what: fmt.Sprintf("the connection broke off at byte %d", at), err: err}
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errStalled):
		r.what, r.err, r.silent = fmt.Sprintf("no bytes for %v, at byte %d", c.stall, at), nil, true
	case cause != nil:
		return cause
	case errors.Is(err, io.EOF):
		r.err = nil
	}
	return r
}

// failed rests a source after an answer that may be better next time, and returns
// for how long.
func (s *source) failed(wait time.Duration, now time.Time, backoff time.Duration) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.After(s.notUntil) {
		s.failures++ // what several connections meet at once is one failure
	}
	if wait == 0 {
		// Jitter keeps the connections from coming back all at once.
		d := backoff << min(max(s.failures-1, 0), backoffSteps)
		wait = d/2 + rand.N(d/2+1)
	}
	if at := now.Add(wait); at.After(s.notUntil) {
		s.notUntil = at
	}
	return s.notUntil.Sub(now)
}

// again says which attempt failed and when the next is.
func again(tries, retries int, wait time.Duration) string {
	return fmt.Sprintf("attempt %d of %d, the next in %s", tries, retries+1, max(wait.Round(100*time.Millisecond), 100*time.Millisecond))
}

// worked lets the next failure be the first again. A rest that was asked for goes on.
func (s *source) worked() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures = 0
}

func (s *source) ready() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notUntil
}

// pick chooses a source: the first that is not dead and not resting. It waits for
// one if all rest. Later rounds begin with another one.
func (c *client) pick(ctx context.Context, dead map[*source]error, round int) (*source, error) {
	for {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		var first *source
		var at time.Time
		var why []string
		now, n := time.Now(), len(c.sources)
		for i := range n {
			s := c.sources[(i+round)%n]
			if err := dead[s]; err != nil {
				why = append(why, err.Error())
				continue
			}
			if t := s.ready(); first == nil || t.Before(at) && at.After(now) {
				first, at = s, t
			}
		}
		if first == nil {
			return nil, exhausted(why)
		}
		if !at.After(now) {
			return first, nil
		}
		if err := sleepUntil(ctx, at); err != nil {
			return nil, err
		}
	}
}

// json fetches a small JSON document. It returns the address of the next page, or "".
func (c *client) json(ctx context.Context, s *source, address string, v any) (next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 4*c.stall)
	defer cancel()
	resp, err := c.get(ctx, s, address, "")
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, pageLimit+1))
	if err != nil {
		return "", &refusal{source: s.String(), what: "its list of files breaks off", err: err}
	}
	if len(b) > pageLimit {
		return "", &refusal{source: s.String(), what: fmt.Sprintf("its list of files is longer than %d bytes", pageLimit), final: true}
	}
	if err := json.Unmarshal(b, v); err != nil {
		return "", &refusal{source: s.String(), what: "its list of files cannot be read: check that the address is that of a hub", final: true, err: err}
	}
	return nextPage(resp.Header.Values("Link"), resp.Request.URL), nil
}

// nextPage finds the target of rel="next" among Link headers.
func nextPage(links []string, at *url.URL) string {
	for _, h := range links {
		for link := range strings.SplitSeq(h, ",") {
			target, params, ok := strings.Cut(strings.TrimSpace(link), ">")
			if !ok || !strings.HasPrefix(target, "<") {
				continue
			}
			for p := range strings.SplitSeq(params, ";") {
				if p = strings.TrimSpace(p); p == `rel="next"` || p == "rel=next" {
					if u, err := at.Parse(target[1:]); err == nil {
						return u.String()
					}
				}
			}
		}
	}
	return ""
}
