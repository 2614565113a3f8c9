package openai

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"time"
)

// firstSign is when a whole answer's headers go out at the latest: before that, an
// error can still have a status of its own.
const firstSign = 700 * time.Millisecond

// read takes a request's body by the API's table and renders its prompt.
func (s *Server) read(a api, w http.ResponseWriter, r *http.Request) (*request, *apiError) {
	// A page of another origin cannot send this type without asking first, and nobody
	// answers it.
	if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != "application/json" {
		return nil, &apiError{status: http.StatusUnsupportedMediaType, code: "unsupported_media_type", message: "the body's Content-Type is not application/json: send JSON and say so"}
	}
	if e := r.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		return nil, &apiError{status: http.StatusUnsupportedMediaType, code: "unsupported_media_type", message: "a Content-Encoding is not supported: send the body as it is"}
	}
	tooLarge := &apiError{status: http.StatusRequestEntityTooLarge, code: "request_too_large", message: fmt.Sprintf("the body is larger than %d bytes: shorten it", s.o.MaxBytes)}
	if r.ContentLength > s.o.MaxBytes {
		w.Header().Set("Connection", "close") // it is not read, and "100 Continue" does not ask for it
		return nil, tooLarge
	}
	select {
	case s.reading <- struct{}{}:
		defer func() { <-s.reading }()
	case <-time.After(s.o.ReadTimeout):
		return nil, &apiError{status: http.StatusServiceUnavailable, code: "busy", message: "too many requests come in at once: try again soon", retry: time.Second}
	case <-r.Context().Done():
		return nil, &apiError{status: http.StatusBadRequest, code: "incomplete_body", message: "the body did not come in whole and in time: send it again"}
	}
	deadline := http.NewResponseController(w)
	deadline.SetReadDeadline(time.Now().Add(s.o.ReadTimeout))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.o.MaxBytes))
	if err == nil {
		deadline.SetReadDeadline(time.Time{})
	}
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, tooLarge
	case err != nil:
		return nil, &apiError{status: http.StatusBadRequest, code: "incomplete_body", message: "the body did not come in whole and in time: send it again"}
	}
	s.parsing.Lock()
	defer s.parsing.Unlock()
	req, bad := decode(a, body, &s.o)
	if bad == nil {
		bad = req.render(s.model)
	}
	return req, bad
}

// answer handles a generation of an API.
func (s *Server) answer(a api) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		req, err := s.read(a, w, r)
		if err == nil && a == messagesAPI && req.maxTokens == nil {
			err = missing("max_tokens")
		}
		if err == nil {
			err = req.admit(s.model.Info())
		}
		if err != nil {
			err.write(w, a)
			return
		}
		if !s.enter() {
			s.stopping().write(w, a)
			return
		}
		defer s.running.Done()
		g, bad := s.newGeneration(req)
		if bad != nil {
			invalid("messages", "%s", bad).write(w, a)
			return
		}
		if g.known() {
			s.metrics.memo()
			g.begin(0)
			g.replay()
			g.end(nil)
			s.respond(r.Context(), w, g, nil)
			return
		}
		t, ok := s.queue.enter()
		if !ok {
			wait := min(max(s.activity.mean(), time.Second), time.Hour)
			(&apiError{
				status: http.StatusTooManyRequests, code: "queue_full", retry: wait,
				message: fmt.Sprintf("one request is answered and %d wait, which is all that may: try again in about %s", s.o.Queue, wait.Round(time.Second)),
			}).write(w, a)
			return
		}
		// The cause has to say which of the two it was, so it is not inherited.
		ctx, cancel := context.WithCancelCause(context.WithoutCancel(r.Context()))
		defer cancel(nil)
		defer context.AfterFunc(s.base, func() { cancel(errShutdown) })()
		defer context.AfterFunc(r.Context(), func() { cancel(errClientGone) })()
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.run(ctx, g, t)
		}()
		began := time.Now()
		answered := s.respond(ctx, w, g, t)
		if answered != nil {
			cancel(errClientGone) // it does not read, or is gone without a word
		}
		<-done
		s.metrics.ended(a, g)
		s.o.Log.Info("answered", "api", a.String(), "id", g.rec.id, "tokens", g.usage().String(), "finish", string(g.rec.finish), "seconds", time.Since(began).Seconds())
		if answered != nil {
			// Whoever still reads, after closing its own half, must not take this for a whole answer.
			panic(http.ErrAbortHandler)
		}
	}
}

// respond carries an answer to the client, the only goroutine that writes to it. The
// error is the client's absence.
func (s *Server) respond(ctx context.Context, w http.ResponseWriter, g *generation, t *ticket) error {
	req := g.req
	var out bytes.Buffer
	b := base{out: &out, api: req.api, id: g.rec.id, created: g.rec.created, model: s.o.ModelID, print: s.print}
	var form writer
	switch {
	case !req.stream:
		form = &whole{base: b, thinks: req.options.Thinking, wantLogs: req.logprobs}
	case req.api == messagesAPI:
		form = &messageStream{base: b}
	case req.api == chatAPI:
		form = &openAIStream{base: b, usage: req.usage, object: "chat.completion.chunk"}
	default:
		form = &openAIStream{base: b, usage: req.usage, object: "text_completion"}
	}
	c := &connection{w: w, rc: http.NewResponseController(w), timeout: s.o.WriteTimeout, stream: req.stream}
	first := min(firstSign, s.o.Tick)
	if req.stream {
		form.idle(s.status(t))
		if err := c.send(&out); err != nil {
			return err
		}
		first = s.o.Tick
	}
	tick := time.NewTimer(first)
	defer tick.Stop()
	begun := false
	for {
		events, b, ended, err := g.take()
		if b && !begun {
			begun = true
			form.begin(usage{prompt: len(req.prompt), cached: g.rec.cached}) // all that stands still by now
		}
		for _, e := range events {
			form.event(e)
		}
		if ended {
			return s.finish(c, form, g, err, &out)
		}
		if out.Len() > 0 {
			if err := c.send(&out); err != nil {
				return err
			}
			tick.Reset(s.o.Tick)
		}
		select {
		case <-g.wake:
		case <-tick.C:
			form.idle(s.status(t))
			if err := c.send(&out); err != nil {
				return err
			}
			tick.Reset(s.o.Tick)
		case <-ctx.Done():
			if !errors.Is(context.Cause(ctx), errShutdown) {
				return context.Cause(ctx)
			}
			<-g.wake // the engine stops and says so
		}
	}
}

// errBrokenOff is that of a whole answer whose status said 200 long ago. The connection
// is cut, so that nobody takes the error for an answer.
var errBrokenOff = errors.New("the answer is broken off")

// finish sends the end of an answer, or why there is none.
func (s *Server) finish(c *connection, form writer, g *generation, err error, out *bytes.Buffer) error {
	if err == nil {
		if g.req.stream {
			fmt.Fprintf(out, ": %s\n", g.usage())
		}
		form.end(g.rec.finish, g.usage(), g.reader.stopped)
		return c.send(out)
	}
	if errors.Is(err, errClientGone) {
		return err
	}
	e := &apiError{status: http.StatusInternalServerError, code: "engine_failed", message: "the engine could not go on: the server's log says why"}
	if errors.Is(err, errShutdown) {
		e = s.stopping()
	} else {
		s.o.Log.Error("a generation failed", "id", g.rec.id, "why", err)
	}
	if !c.begun {
		e.write(c.w, g.req.api)
		return nil
	}
	form.fail(e)
	if err := c.send(out); err != nil {
		return err
	}
	if !g.req.stream {
		return errBrokenOff
	}
	return nil
}

// status is what a waiting client is told.
func (s *Server) status(t *ticket) string {
	if t == nil {
		return "answered before"
	}
	now := s.activity.snapshot(0)
	if n := t.place(); n > 0 {
		return fmt.Sprintf("place %d in the queue; now: %s", n, now)
	}
	return now.String()
}

// connection writes what it is given at once, and headers before the first.
type connection struct {
	w       http.ResponseWriter
	rc      *http.ResponseController
	timeout time.Duration
	stream  bool
	begun   bool
}

func (c *connection) send(out *bytes.Buffer) error {
	if !c.begun {
		c.begun = true
		h := c.w.Header()
		h.Set("Content-Type", "application/json")
		if c.stream {
			h.Set("Content-Type", "text/event-stream; charset=utf-8")
		}
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no") // proxies that collect would make it silent
		c.w.WriteHeader(http.StatusOK)
	}
	c.rc.SetWriteDeadline(time.Now().Add(c.timeout))
	_, err := c.w.Write(out.Bytes())
	out.Reset()
	if err == nil {
		err = c.rc.Flush()
	}
	c.rc.SetWriteDeadline(time.Time{})
	return err
}

func (s *Server) countTokens(w http.ResponseWriter, r *http.Request) {
	req, err := s.read(messagesAPI, w, r)
	if err != nil {
		err.write(w, messagesAPI)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(append(encode(map[string]int{"input_tokens": len(req.prompt)}), '\n'))
}

// events sends a snapshot whenever something has changed, and a sign of life otherwise.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	const most = 32
	if s.watchers.Add(1) > most {
		s.watchers.Add(-1)
		(&apiError{status: http.StatusTooManyRequests, code: "too_many_watchers", message: fmt.Sprintf("%d watch already: try again later", most), retry: time.Minute}).write(w, chatAPI)
		return
	}
	defer s.watchers.Add(-1)
	c := &connection{w: w, rc: http.NewResponseController(w), timeout: s.o.WriteTimeout, stream: true}
	every := time.NewTicker(s.o.EventEvery)
	defer every.Stop()
	v := newWatch(s)
	for silent := time.Duration(0); ; {
		var out bytes.Buffer
		v.news(&out)
		if silent += s.o.EventEvery; out.Len() == 0 && silent >= s.o.Tick {
			out.WriteString(": nothing new\n")
		}
		if out.Len() > 0 {
			silent = 0
			if c.send(&out) != nil {
				return
			}
		}
		select {
		case <-every.C:
		case <-r.Context().Done():
			return
		case <-s.base.Done():
			return
		}
	}
}
