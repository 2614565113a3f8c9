package openai

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"fmt"
	"net/http"
	"time"
)

//go:embed page
var pageFiles embed.FS

// pageAssets are all that the page is made of, by the mux's pattern.
var pageAssets = []struct{ path, file, kind string }{
	{"/{$}", "index.html", "text/html; charset=utf-8"},
	{"/page.css", "page.css", "text/css; charset=utf-8"},
	{"/page.js", "page.js", "text/javascript; charset=utf-8"},
	{"/page.svg", "page.svg", "image/svg+xml"},
}

// pageRoutes serve the page. They need no key: the page asks for it.
func pageRoutes() []route {
	var routes []route
	for _, a := range pageAssets {
		body, err := pageFiles.ReadFile("page/" + a.file)
		if err != nil {
			panic(err) // it is in the binary
		}
		tag := fmt.Sprintf(`"%x"`, sha256.Sum256(body))
		routes = append(routes, route{"GET", a.path, true, chatAPI, func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h.Set("Content-Type", a.kind)
			h.Set("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
			h.Set("X-Content-Type-Options", "nosniff")
			h.Set("Referrer-Policy", "no-referrer")
			h.Set("Cache-Control", "no-cache") // another version of the binary may listen here next
			h.Set("ETag", tag)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
		}})
	}
	return routes
}
