// Package docs holds the documents to what is there.
package docs

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	root   = ".."
	module = "deltafin/"
)

// files calls f with every file of the repository with one of the endings, by its
// path from the root.
func files(t *testing.T, f func(path string), endings ...string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "node_modules" || name == "testdata") {
			return filepath.SkipDir
		}
		if !d.IsDir() && slices.Contains(endings, filepath.Ext(name)) {
			rel, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			f(filepath.ToSlash(rel))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestRoomsImportWhatTheTableAllows compares ARCHITECTURE.md's table with the imports of
// all packages, on whatever system they are built. What lies below a room and is not in the
// table belongs to it.
func TestRoomsImportWhatTheTableAllows(t *testing.T) {
	text, err := os.ReadFile("ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	allowed := map[string][]string{}
	_, table, _ := strings.Cut(string(text), "| room | decides | may import |\n|---|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	for line := range strings.SplitSeq(table, "\n") {
		cells := strings.Split(strings.Trim(line, "| "), " | ")
		if len(cells) != 3 {
			t.Fatalf("the table has a row %q", line)
		}
		var may []string
		for name := range strings.SplitSeq(cells[2], ", ") {
			name, _, _ = strings.Cut(name, " (")
			may = append(may, name)
		}
		allowed[cells[0]] = may
	}
	seen := map[string]bool{}
	files(t, func(path string) {
		dir := filepath.ToSlash(filepath.Dir(path))
		room := dir
		for allowed[room] == nil && strings.Contains(room, "/") && filepath.Dir(room) != "engine" {
			room = filepath.ToSlash(filepath.Dir(room))
		}
		if dir == "." || strings.HasSuffix(path, "_test.go") || strings.HasPrefix(dir, "engine/openai/sdktest") {
			return
		}
		may := allowed[room]
		if may == nil {
			t.Errorf("%s is in no row of ARCHITECTURE.md's table of rooms", dir)
			return
		}
		seen[room] = true
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, path), nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range f.Imports {
			name, _ := strconv.Unquote(i.Path.Value)
			name, ours := strings.CutPrefix(name, module)
			if !ours || name == room {
				continue
			}
			if short := strings.TrimPrefix(name, "engine/"); !slices.Contains(may, short) && !slices.Contains(may, "anything") {
				t.Errorf("%s imports %s: ARCHITECTURE.md's table lets %s import %s", path, short, room, strings.Join(may, ", "))
			}
		}
	}, ".go")
	for room := range allowed {
		if !seen[room] {
			t.Errorf("ARCHITECTURE.md's table has a room %s without Go files", room)
		}
	}
}

// place is how a document names a file or a directory of the repository.
var place = regexp.MustCompile(`(^|[^\w./-])(?:\./)?((?:cmd|docs|engine|golden|notebooks|prefill|reference|testscripts)/[\w./-]*\w)`)

// link is a link to a file, and code what looks like one and is none.
var (
	link = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	code = regexp.MustCompile("`[^`]*`")
)

// TestPlacesThatDocumentsNameExist looks for paths in all documents, and follows links.
func TestPlacesThatDocumentsNameExist(t *testing.T) {
	checked := 0
	files(t, func(path string) {
		text, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		exists := func(name string) {
			checked++
			if _, err := os.Stat(name); err != nil {
				t.Errorf("%s names %s: %v", path, name, err)
			}
		}
		for line := range strings.SplitSeq(string(text), "\n") {
			for _, m := range place.FindAllStringSubmatch(line, -1) {
				exists(filepath.Join(root, m[2]))
			}
			for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(line, ""), -1) {
				exists(filepath.Join(root, filepath.Dir(path), m[1]))
			}
		}
	}, ".md")
	if checked < 100 {
		t.Errorf("only %d names were found: the patterns are wrong", checked)
	}
}
