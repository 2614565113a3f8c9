// Package testscripts drives the built command: each .txtar file here is one
// behaviour, told as commands and what they print.
package testscripts

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"deltafin/golden"
)

// bin is the directory of the built command.
var bin string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if bin, err = os.MkdirTemp("", "deltafin-bin-"); err != nil {
			panic(err)
		}
		defer os.RemoveAll(bin)
		exe := filepath.Join(bin, "deltafin")
		if runtime.GOOS == "windows" {
			exe += ".exe"
		}
		if out, err := exec.Command("go", "build", "-o", exe, "deltafin/cmd/deltafin").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

func TestScenarios(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: ".",
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", bin+string(filepath.ListSeparator)+env.Getenv("PATH"))
			env.Setenv("XDG_CACHE_HOME", filepath.Join(env.WorkDir, "cache"))
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("GOLDEN", golden.Dir())
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"code": code, "json": jsonField, "copymodel": copyModel, "oneline": oneLine,
		},
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
	})
}

// code N command args...: runs a command and demands its exit code. Its output is
// kept in the files stdout and stderr of the work directory.
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N command args...")
	}
	c := exec.Command(filepath.Join(bin, args[1]), args[2:]...)
	c.Dir, c.Env = ts.MkAbs("."), append(os.Environ(), "XDG_CACHE_HOME="+ts.Getenv("XDG_CACHE_HOME"), "HOME="+ts.Getenv("HOME"))
	var out, err strings.Builder
	c.Stdout, c.Stderr = &out, &err
	_ = c.Run() // its exit code is what counts
	ts.Check(os.WriteFile(ts.MkAbs("stdout"), []byte(out.String()), 0o644))
	ts.Check(os.WriteFile(ts.MkAbs("stderr"), []byte(err.String()), 0o644))
	if got := fmt.Sprint(c.ProcessState.ExitCode()); got != args[0] {
		ts.Fatalf("exit code %s, want %s\n%s", got, args[0], err.String())
	}
}

// oneline FILE: the file has exactly one line, and it is no stack trace.
func oneLine(ts *testscript.TestScript, neg bool, args []string) {
	text := ts.ReadFile(args[0])
	if strings.Count(text, "\n") != 1 || strings.Contains(text, "goroutine") {
		ts.Fatalf("%s is not one line:\n%s", args[0], text)
	}
}

// json FILE FIELD WANT: field FIELD (a path with dots) of the JSON object in FILE is
// WANT, as compact JSON.
func jsonField(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 3 {
		ts.Fatalf("usage: json FILE FIELD WANT")
	}
	var v any
	ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &v))
	for _, f := range strings.Split(args[1], ".") {
		m, ok := v.(map[string]any)
		if _, has := m[f]; !ok || !has {
			ts.Fatalf("no field %s in %s", args[1], args[0])
		}
		v = m[f]
	}
	got, err := json.Marshal(v)
	ts.Check(err)
	if (string(got) == args[2]) == neg {
		ts.Fatalf("%s is %s, want %s", args[1], got, args[2])
	}
}

// copymodel SET DIR: a writable copy of a golden checkpoint.
func copyModel(ts *testscript.TestScript, neg bool, args []string) {
	ts.Check(os.CopyFS(ts.MkAbs(args[1]), os.DirFS(golden.ModelDir(args[0]))))
}
