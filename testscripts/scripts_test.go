// Package testscripts drives the built command: each .txtar file here is one
// behaviour, told as commands and what they print.
package testscripts

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"deltafin/engine/hub/hubtest"
	"deltafin/golden"
)

// shared is the directory of the built command and of a home that the scripts
// share, so that the built-in model is unpacked once.
var shared string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if shared, err = os.MkdirTemp("", "deltafin-scripts-"); err != nil {
			panic(err)
		}
		defer os.RemoveAll(shared)
		exe := filepath.Join(shared, "deltafin")
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

// tb is the key of a script's testing.TB.
type tb struct{}

func TestScenarios(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: ".",
		Setup: func(env *testscript.Env) error {
			env.Values[tb{}] = env.T()
			env.Values[hubKey{}] = new(*hubtest.Hub)
			env.Setenv("PATH", shared+string(filepath.ListSeparator)+env.Getenv("PATH"))
			env.Setenv("GOLDEN", golden.Dir())
			setHome(env.Setenv, shared)
			return nil
		},
		Cmds:                commands,
		Condition:           condition,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
	})
}

// setHome makes dir the place of the user's cache, and NANO that of the built-in
// model in it.
func setHome(setenv func(key, value string), dir string) {
	cache := filepath.Join(dir, "cache")
	setenv("HOME", dir)
	setenv("XDG_CACHE_HOME", cache)
	setenv("LocalAppData", cache)
	if runtime.GOOS == "darwin" {
		cache = filepath.Join(dir, "Library", "Caches")
	}
	setenv("CACHE", cache)
	setenv("NANO", filepath.Join(cache, "deltafin", "k3-nano"))
}

func condition(name string) (bool, error) {
	switch name {
	case "root": // to whom no file is closed
		return os.Geteuid() == 0, nil
	case "full": // the device that takes nothing
		_, err := os.Stat("/dev/full")
		return err == nil, nil
	}
	return false, fmt.Errorf("unknown condition %s", name)
}
