// Package openai hides how clients over HTTP use the engine: which fields of the
// public APIs are honoured and which refused, who gets the engine when, what a
// connection hears during the minutes before a first token, and what is kept so that
// nothing is computed twice.
//
// # Endpoints
//
//	POST /v1/chat/completions, /v1/completions   OpenAI's form
//	POST /v1/messages, /v1/messages/count_tokens Anthropic's form
//	GET  /v1/models, /v1/models/{id}
//	GET  /healthz, /readyz, /metrics, /events, /
//
// # Using it
//
// [Serve] listens, opens the model and serves until its context ends, then drains. A
// test serves a [New] server by itself.
//
// # What is where
//
// fields.go, chat_fields.go and messages_fields.go are the tables of all fields, from
// which requests are read and docs/server.md is checked. generate.go makes an answer as
// events, writers.go and messages.go put events into an API's form, respond.go carries
// them to the client. queue.go is the one queue; states.go and memo.go are what is kept.
package openai

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Options are the server's choices. The zero value of a field means its default, but
// where it says otherwise.
type Options struct {
	Host string // address to listen at; default 127.0.0.1. Any but a loopback address needs Key
	Port int    // default 8000; negative: any free one

	Key          string        // clients must show it; "" for none
	ModelID      string        // what the model is called; default "kimi-k3"
	Aliases      []string      // other names that clients may use
	Queue        int           // requests that may wait; default 16, negative none
	MaxTokens    int           // most tokens of an answer, and what it gets that names no number; default 4096
	MaxBytes     int64         // of a request's body; default 8 MiB
	MaxConns     int           // connections at a time; default 1024
	Sampling     bool          // honour temperature, top_p and seed instead of answering greedily
	StateDir     string        // where conversations outlive the process; "" for nowhere
	StateMemory  int64         // bytes of conversations in memory; default 2 GB
	StateDisk    int64         // bytes of conversations in StateDir; default 20 GB
	MemoMemory   int64         // bytes of finished answers in memory; default 64 MB
	KeepEvery    time.Duration // how often a long answer is kept so that it can be gone on with; default 1 min
	Tick         time.Duration // between signs of life on a silent connection; default 3 s
	WriteTimeout time.Duration // for a client that does not read; default 30 s
	ReadTimeout  time.Duration // for a whole request to come in; default 1 min
	Drain        time.Duration // how long requests may go on after the end was asked for; default 30 s
	EventEvery   time.Duration // between the snapshots of GET /events; default 500 ms

	Log    *slog.Logger   // default slog.Default()
	Listen func(net.Addr) // told the address once it is listened at
}

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	num := func(n *int64, v int64) {
		if *n <= 0 {
			*n = v
		}
	}
	if o.Host == "" {
		o.Host = "127.0.0.1"
	}
	switch {
	case o.Port == 0:
		o.Port = 8000
	case o.Port < 0:
		o.Port = 0
	}
	if o.ModelID == "" {
		o.ModelID = "kimi-k3"
	}
	switch {
	case o.Queue == 0:
		o.Queue = 16
	case o.Queue < 0:
		o.Queue = 0
	}
	if o.MaxTokens <= 0 {
		o.MaxTokens = 4096
	}
	if o.MaxConns <= 0 {
		o.MaxConns = 1024
	}
	num(&o.MaxBytes, 8<<20)
	num(&o.StateMemory, 2e9)
	num(&o.StateDisk, 20e9)
	num(&o.MemoMemory, 64e6)
	def(&o.KeepEvery, time.Minute)
	def(&o.Tick, 3*time.Second)
	def(&o.WriteTimeout, 30*time.Second)
	def(&o.ReadTimeout, time.Minute)
	def(&o.Drain, 30*time.Second)
	def(&o.EventEvery, 500*time.Millisecond)
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return o
}

// Server answers requests with one model.
type Server struct {
	o        Options
	model    Model
	queue    queue
	states   *states
	cut      *cutOff // by a client that left; whoever has the turn owns it
	memo     *memo
	activity activity
	metrics  metrics
	key      [32]byte // digest of o.Key
	print    string   // system_fingerprint
	opened   time.Time
	handler  http.Handler

	base     context.Context // of all generations
	stop     context.CancelCauseFunc
	draining atomic.Bool
	entering sync.Mutex     // between draining and running
	running  sync.WaitGroup // generations
	watchers atomic.Int64   // of GET /events
	reading  chan struct{}  // has room for the bodies that are read at a time
	parsing  sync.Mutex     // of a body, which may take 40 times its bytes
}

// maxReading bounds the bodies in memory: a request that waits for the engine is its
// tokens alone.
const maxReading = 64

// New makes a server that uses m. Close ends it. The error is about Options.StateDir.
func New(m Model, o Options) (*Server, error) {
	o = o.withDefaults()
	st, err := openStates(m, o.StateDir, o.StateMemory, o.StateDisk, o.Log)
	if err != nil {
		return nil, err
	}
	digest := m.Info().Digest
	s := &Server{
		o: o, model: m, queue: queue{limit: o.Queue}, states: st, memo: newMemo(o.MemoMemory),
		key: sha256.Sum256([]byte(o.Key)), print: "deltafin-" + hex.EncodeToString(digest[:6]), opened: time.Now(),
		reading: make(chan struct{}, maxReading),
	}
	s.base, s.stop = context.WithCancelCause(context.Background())
	s.handler = s.routes()
	if one := m.NewSession().Bytes(); one > o.StateMemory {
		o.Log.Warn("no conversation fits the memory for them, so none is reused", "bytes", o.StateMemory, "one needs", one)
	}
	return s, nil
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// enter counts a generation in; false if none may begin any more.
func (s *Server) enter() bool {
	s.entering.Lock()
	defer s.entering.Unlock()
	if s.draining.Load() {
		return false
	}
	s.running.Add(1)
	return true
}

func (s *Server) refuse() {
	s.entering.Lock()
	defer s.entering.Unlock()
	s.draining.Store(true)
}

// Drain refuses new generations and waits for the others, until ctx ends; then they are
// cancelled. What they have finished is kept.
func (s *Server) Drain(ctx context.Context) {
	s.refuse()
	idle := make(chan struct{})
	go func() {
		s.running.Wait()
		close(idle)
	}()
	select {
	case <-idle:
	case <-ctx.Done():
	}
	s.stop(errShutdown) // ends what is still under way, watchers of events too
	<-idle
}

// Close ends all generations and writes what is kept to the state directory.
func (s *Server) Close() {
	s.refuse()
	s.stop(errShutdown)
	s.running.Wait()
	s.states.close()
}

// Serve listens, opens the model, and serves until ctx ends; then it drains and
// returns nil. While the model opens, which takes minutes for a large one, /healthz
// says that the process lives, the page waits, and everything else says to come again.
//
// Errors of opening are returned as they are; others are about the options
// ([ErrOptions]) or the network.
func Serve(ctx context.Context, o Options, open func(context.Context) (Model, error)) error {
	if err := checkBind(o); err != nil {
		return err
	}
	o = o.withDefaults()
	l, err := net.Listen("tcp", net.JoinHostPort(o.Host, strconv.Itoa(o.Port)))
	if err != nil {
		return fmt.Errorf("cannot listen: %w: choose another --host or --port", err)
	}
	if o.Listen != nil {
		o.Listen(l.Addr())
	}
	var current atomic.Pointer[http.Handler]
	opening := notReady()
	current.Store(&opening)
	hs := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.ContentLength != 0 {
				// net/http waits for the body before it answers, even for one that nobody reads.
				http.NewResponseController(w).SetReadDeadline(time.Now().Add(o.ReadTimeout))
			}
			(*current.Load()).ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: 10 * time.Second,
		// Counted from the headers on: a body waits for its turn to be read, and then may take
		// its time. Answers of the engine have limits of their own.
		WriteTimeout:   2*o.ReadTimeout + o.WriteTimeout,
		IdleTimeout:    2 * time.Minute,
		MaxHeaderBytes: 64 << 10,
		ErrorLog:       slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- hs.Serve(limitListener(l, o.MaxConns)) }()
	defer hs.Close()

	m, err := open(ctx)
	if err != nil {
		return err
	}
	s, err := New(m, o)
	if err != nil {
		return err
	}
	defer s.Close()
	var ready http.Handler = s
	current.Store(&ready)
	o.Log.Info("ready", "model", o.ModelID, "context", m.Info().Context, "max_tokens", o.MaxTokens)

	select {
	case err := <-served:
		return fmt.Errorf("the server stopped: %w", err)
	case <-ctx.Done():
	}
	o.Log.Info("stopping", "deadline", o.Drain)
	deadline, cancel := context.WithTimeout(context.Background(), o.Drain)
	defer cancel()
	s.Drain(deadline)
	// The last answers are on their way to the clients; this waits for that.
	last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := hs.Shutdown(last); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// ErrOptions is wrapped by errors about options that contradict each other.
var ErrOptions = errors.New("wrong options")

// checkBind refuses to serve others than this machine without a key.
func checkBind(o Options) error {
	if o.Port > 65535 {
		return fmt.Errorf("%w: --port %d: ports go up to 65535", ErrOptions, o.Port)
	}
	if o.Key != "" || isLoopback(o.Host) || o.Host == "" {
		return nil
	}
	return fmt.Errorf("%w: --host %s is reachable from other machines: give --api-key-file, or listen at 127.0.0.1", ErrOptions, o.Host)
}

func isLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	a, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && a.IsLoopback()
}

// ReadKey reads a key from the first line of a file.
func ReadKey(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("%w: --api-key-file: %w", ErrOptions, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return "", fmt.Errorf("%w: --api-key-file: %w", ErrOptions, err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	key := strings.TrimSpace(line)
	if len(key) < 8 {
		return "", fmt.Errorf("%w: --api-key-file: the key on its first line has %d characters: use at least 8", ErrOptions, len(key))
	}
	return key, nil
}

// route is one endpoint.
type route struct {
	method, path string
	open         bool // without a key
	api          api  // whose errors it speaks
	handle       http.HandlerFunc
}

func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	table := append(pageRoutes(), []route{
		{"POST", "/v1/chat/completions", false, chatAPI, s.answer(chatAPI)},
		{"POST", "/v1/completions", false, completionsAPI, s.answer(completionsAPI)},
		{"POST", "/v1/messages", false, messagesAPI, s.answer(messagesAPI)},
		{"POST", "/v1/messages/count_tokens", false, messagesAPI, s.countTokens},
		{"GET", "/v1/models", false, chatAPI, s.models},
		{"GET", "/v1/models/{id...}", false, chatAPI, s.models},
		{"GET", "/events", false, chatAPI, s.events},
		{"GET", "/metrics", false, chatAPI, s.serveMetrics},
		{"GET", "/healthz", true, chatAPI, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }},
		{"GET", "/readyz", true, chatAPI, s.ready},
	}...)
	for _, rt := range table {
		mux.Handle(rt.method+" "+rt.path, s.guard(rt))
		mux.Handle(rt.path, s.count(rt.path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Allow", rt.method)
			(&apiError{status: http.StatusMethodNotAllowed, code: "method_not_allowed", message: fmt.Sprintf("%s is not possible here: use %s", clip(r.Method), rt.method)}).write(w, rt.api)
		}))
	}
	mux.Handle("/", s.count("other", func(w http.ResponseWriter, r *http.Request) {
		(&apiError{status: http.StatusNotFound, code: "not_found", message: fmt.Sprintf("there is no %s here: see docs/server.md for the endpoints", clip(r.URL.Path))}).write(w, chatAPI)
	}))
	return mux
}

// guard checks who asks.
func (s *Server) guard(rt route) http.Handler {
	return s.count(rt.path, func(w http.ResponseWriter, r *http.Request) {
		if err := s.mayUse(r, rt.open); err != nil {
			err.write(w, rt.api)
			return
		}
		rt.handle(w, r)
	})
}

func (s *Server) mayUse(r *http.Request, open bool) *apiError {
	if s.o.Key == "" {
		// A page on the Internet may have its name point to this machine; its requests name
		// it as the host.
		host := r.Host
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		if !isLoopback(host) {
			return &apiError{status: http.StatusForbidden, code: "wrong_host", message: "this server answers only to the name of its own machine: use 127.0.0.1 or localhost"}
		}
		return nil
	}
	if open {
		return nil
	}
	shown := r.Header.Get("X-Api-Key")
	if shown == "" {
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if strings.EqualFold(scheme, "Bearer") {
			shown = strings.TrimSpace(token)
		}
	}
	// Digests of equal length keep the time of comparing from telling anything.
	digest := sha256.Sum256([]byte(shown))
	if subtle.ConstantTimeCompare(digest[:], s.key[:]) != 1 {
		return &apiError{status: http.StatusUnauthorized, code: "invalid_api_key", message: "the API key is missing or wrong: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"}
	}
	return nil
}

func (s *Server) ready(w http.ResponseWriter, _ *http.Request) {
	if s.draining.Load() {
		s.stopping().write(w, chatAPI)
		return
	}
	fmt.Fprintln(w, "ready")
}

func (s *Server) stopping() *apiError {
	return &apiError{status: http.StatusServiceUnavailable, code: "stopping", message: "the server is about to stop: try again later", retry: s.o.Drain}
}

// notReady answers while the model opens.
func notReady() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	for _, rt := range pageRoutes() { // it waits for the model by itself
		mux.HandleFunc(rt.method+" "+rt.path, rt.handle)
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		a := chatAPI
		if strings.HasPrefix(r.URL.Path, "/v1/messages") {
			a = messagesAPI
		}
		(&apiError{status: http.StatusServiceUnavailable, code: "opening", message: "the model is being opened: try again soon", retry: 5 * time.Second}).write(w, a)
	})
	return mux
}

// models lists the model under all its names, each with the context that is really
// admitted.
func (s *Server) models(w http.ResponseWriter, r *http.Request) {
	type model struct {
		ID        string `json:"id"`
		Object    string `json:"object"`
		Type      string `json:"type"`
		Name      string `json:"display_name"`
		Created   int64  `json:"created"`
		CreatedAt string `json:"created_at"`
		Owner     string `json:"owned_by"`
		Context   int    `json:"context_length"`
		MaxLen    int    `json:"max_model_len"`
		MaxTokens int    `json:"max_output_tokens"`
	}
	of := func(id string) model {
		return model{
			id, "model", "model", id, s.opened.Unix(), s.opened.UTC().Format(time.RFC3339), "deltafin",
			s.model.Info().Context, s.model.Info().Context, min(s.o.MaxTokens, s.model.Info().Context-1),
		}
	}
	names := append([]string{s.o.ModelID}, s.o.Aliases...)
	w.Header().Set("Content-Type", "application/json")
	if id := r.PathValue("id"); id != "" {
		if !slices.Contains(names, id) {
			(&apiError{status: http.StatusNotFound, code: "model_not_found", param: "model", message: fmt.Sprintf("%q is not served here: use %q", clip(id), s.o.ModelID)}).write(w, chatAPI)
			return
		}
		w.Write(append(encode(of(id)), '\n'))
		return
	}
	list := make([]model, len(names))
	for i, n := range names {
		list[i] = of(n)
	}
	w.Write(append(encode(map[string]any{
		"object": "list", "data": list, "has_more": false, "first_id": names[0], "last_id": names[len(names)-1],
	}), '\n'))
}

// limitListener accepts at most n connections at a time; more wait in the system's own
// queue.
func limitListener(l net.Listener, n int) net.Listener {
	return &limited{l, make(chan struct{}, n)}
}

type limited struct {
	net.Listener
	room chan struct{}
}

func (l *limited) Accept() (net.Conn, error) {
	l.room <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.room
		return nil, err
	}
	return &limitedConn{Conn: c, leave: sync.OnceFunc(func() { <-l.room })}, nil
}

type limitedConn struct {
	net.Conn
	leave func()
}

func (c *limitedConn) Close() error {
	c.leave()
	return c.Conn.Close()
}
