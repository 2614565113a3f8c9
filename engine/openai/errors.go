package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"
)

// apiError is an error as a client sees it. Its message never holds a path, a key or
// anything else of the machine.
type apiError struct {
	status  int
	code    string // machine-readable, of OpenAI's kind
	param   string // the field at fault, such as messages[2].content
	message string
	retry   time.Duration // if positive: when to try again
}

func (e *apiError) Error() string { return e.message }

// kind is OpenAI's error.type.
func (e *apiError) kind() string {
	switch {
	case e.status == http.StatusUnauthorized:
		return "authentication_error"
	case e.status == http.StatusForbidden:
		return "permission_error"
	case e.status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case e.status >= 500:
		return "server_error"
	}
	return "invalid_request_error"
}

// anthropicKind is Anthropic's error.type.
func (e *apiError) anthropicKind() string {
	switch e.status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	}
	if e.status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

// body is the error object of an API.
func (e *apiError) body(a api) []byte {
	if a == messagesAPI {
		return encode(map[string]any{
			"type":  "error",
			"error": map[string]any{"type": e.anthropicKind(), "message": e.text()},
		})
	}
	return encode(map[string]any{"error": map[string]any{
		"message": e.text(), "type": e.kind(), "param": orNull(e.param), "code": orNull(e.code),
	}})
}

// text names the field, since a client may show nothing but the message.
func (e *apiError) text() string {
	if e.param == "" {
		return e.message
	}
	return e.param + ": " + e.message
}

func (e *apiError) write(w http.ResponseWriter, a api) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	if e.retry > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.retry.Seconds()))))
	}
	if e.status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	w.WriteHeader(e.status)
	w.Write(append(e.body(a), '\n'))
}

func orNull(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// encode is JSON without HTML escapes. The values are the server's own, so an error
// is a mistake in it.
func encode(v any) []byte {
	b, err := marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// invalid is a value of the wrong form.
func invalid(param, format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, code: "invalid_value", param: param, message: fmt.Sprintf(format, args...)}
}

// unsupported is a value of the right form that this server does not do.
func unsupported(param, format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, code: "unsupported_value", param: param, message: fmt.Sprintf(format, args...)}
}

// Reasons to end a generation from outside, as causes of its context.
var (
	errClientGone = errors.New("the client has closed the connection")
	errShutdown   = errors.New("the server stops")
)

func badJSON(err error) *apiError {
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return &apiError{
			status: http.StatusBadRequest, code: "invalid_json",
			message: fmt.Sprintf("the body is not valid JSON at byte %d: %s", syntax.Offset, syntax.Error()),
		}
	}
	return &apiError{status: http.StatusBadRequest, code: "invalid_json", message: "the body is not valid JSON: send one JSON object"}
}
