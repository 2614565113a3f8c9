//go:build mage

// The project's tasks: `go tool mage -l` lists them. Each is one command that
// works on a clean clone.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/magefile/mage/mg"
)

// Default is what plain `go tool mage` does.
var Default = Verify

// sh runs a command with its output shown.
func sh(env []string, name string, args ...string) error {
	c := exec.Command(name, args...)
	c.Env, c.Stdout, c.Stderr = append(os.Environ(), env...), os.Stdout, os.Stderr
	return c.Run()
}

// Build builds the command into ./deltafin.
func Build() error { return sh(nil, "go", "build", "-trimpath", "-o", "deltafin", "./cmd/deltafin") }

// Test runs every Go test.
func Test() error { return sh(nil, "go", "test", "./...") }

// Noasm runs the tests of the arithmetic and the golden prompts with the portable
// definition alone, as processors without assembly run it.
func Noasm() error {
	if err := sh(nil, "go", "test", "-tags", "noasm", "-short", "./engine/kernel/...", "./engine/k3/..."); err != nil {
		return err
	}
	return sh(nil, "go", "test", "-tags", "noasm", "-run", "^TestGreedy", "./engine")
}

// Scenarios runs the command's scenarios in testscripts.
func Scenarios() error { return sh(nil, "go", "test", "./testscripts") }

// Parity runs the golden prompts in every way that must not matter and demands
// one hash for each.
func Parity() error {
	return sh(nil, "go", "test", "-count=1", "-timeout=30m", "-run", "^TestParity$", "./engine", "-full", "-v")
}

// Golden prints, per golden prompt, how far the logits are from the float64 oracle.
func Golden() error {
	return sh(nil, "go", "test", "-count=1", "-v", "-run", "Oracle|Reference", "./engine", "./golden/...")
}

// Lint runs vet, staticcheck and gofumpt.
func Lint() error {
	if err := sh(nil, "go", "vet", "./..."); err != nil {
		return err
	}
	if err := sh(nil, "go", "vet", "-tags", "noasm", "./..."); err != nil {
		return err
	}
	if err := sh(nil, "go", "tool", "staticcheck", "./..."); err != nil {
		return err
	}
	out, err := exec.Command("go", "tool", "gofumpt", "-l", ".").Output()
	if err != nil {
		return err
	}
	if len(out) > 0 {
		return fmt.Errorf("not formatted, run 'go tool gofumpt -w .':\n%s", out)
	}
	return nil
}

// Generate regenerates the assembly and fails if that changes a file.
func Generate() error {
	before, err := generated()
	if err != nil {
		return err
	}
	if err := sh(nil, "go", "generate", "./engine/..."); err != nil {
		return err
	}
	after, err := generated()
	if err != nil {
		return err
	}
	for name, text := range after {
		if !bytes.Equal(before[name], text) {
			return fmt.Errorf("%s was not what its generator makes: commit the regenerated file", name)
		}
	}
	return nil
}

func generated() (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, glob := range []string{"engine/*/*_amd64.s", "engine/*/stubs_amd64.go", "engine/*/*/*_amd64.s", "engine/*/*/stubs_amd64.go"} {
		names, err := filepath.Glob(glob)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if files[name], err = os.ReadFile(name); err != nil {
				return nil, err
			}
		}
	}
	if len(files) == 0 {
		return nil, errors.New("no generated files found: run in the root of the project")
	}
	return files, nil
}

// Fuzz runs every fuzz target for some hundred inputs: a number and not a time, so that
// a busy machine decides how long it takes and nothing else.
func Fuzz() error {
	const each = "300x"
	target := regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)
	return filepath.WalkDir(".", func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range target.FindAllSubmatch(text, -1) {
			if err := sh(nil, "go", "test", "-run=^$", "-fuzz=^"+string(m[1])+"$", "-fuzztime="+each, "-fuzzminimizetime=1x", "./"+filepath.Dir(path)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Sdk runs the official OpenAI and Anthropic SDKs against the server: a module of its
// own, slow to build. The npm packages are installed if npm is there.
func Sdk() error {
	if _, err := exec.LookPath("npm"); err == nil {
		if err := sh(nil, "npm", "ci", "--silent", "--prefix", "engine/openai/sdktest/js"); err != nil {
			return err
		}
	}
	return sh(nil, "go", "test", "-C", "engine/openai/sdktest", "-count=1", "-v", "./...") // -v, to show what was NOT RUN
}

// Cross builds and vets for every supported system and processor.
func Cross() error {
	for _, system := range []string{"linux", "darwin", "windows"} {
		for _, processor := range []string{"amd64", "arm64"} {
			env := []string{"GOOS=" + system, "GOARCH=" + processor, "CGO_ENABLED=0"}
			for _, args := range [][]string{{"build", "-o", os.DevNull, "./cmd/deltafin"}, {"vet", "./..."}} {
				if err := sh(env, "go", args...); err != nil {
					return fmt.Errorf("%s/%s: %w", system, processor, err)
				}
			}
		}
	}
	return nil
}

// Bench holds the benchmarks.
type Bench mg.Namespace

// Kernels measures the kernels as shares of this machine's memory bandwidth and FMA
// peak, prints the table and writes bench-kernels.json.
func (Bench) Kernels() error {
	return sh(nil, "go", "run", "./engine/kernel/kernelbench", "-json", "bench-kernels.json")
}

// Decode measures seconds per token on a checkpoint of true dimensions against what
// the drive and the memory allow, and writes bench-decode.json. DELTAFIN_SLICE may name a
// directory with such a checkpoint; else one of 36 GB is written and removed.
func (Bench) Decode() error {
	return sh(nil, "go", "run", "./engine/slicebench", "decode", "-runs", "3", "-dir", os.Getenv("DELTAFIN_SLICE"), "-json", "bench-decode.json")
}

// Draft measures what guessing tokens is worth: each proposer on K3-nano, and known odds on
// a checkpoint of true dimensions and a paced drive. It writes bench-draft-nano.json and
// bench-draft-slice.json. DELTAFIN_SLICE is as for bench:decode.
func (Bench) Draft() error {
	if err := sh(nil, "go", "run", "./engine/draft/draftbench", "-draft", "ngram,golden/nano/model-dspark,golden/nano/model-text", "-json", "bench-draft-nano.json"); err != nil {
		return err
	}
	return sh(nil, "go", "run", "./engine/slicebench", "draft", "-tokens", "32", "-dir", os.Getenv("DELTAFIN_SLICE"), "-json", "bench-draft-slice.json")
}

// Switches measures what each optimisation is worth on K3-nano and writes
// bench-switches.json.
func (Bench) Switches() error {
	return sh(nil, "go", "run", "./engine/switchbench", "-json", "bench-switches.json")
}

// Fetch fetches shards over loopback and has curl do the same, from a server in Go and from
// nginx, and prints the ratio and the memory. DELTAFIN_FETCH_BYTES says how many, 4e9 by
// default; as much room is needed below TMPDIR.
func (Bench) Fetch() error {
	return sh(nil, "go", "test", "-run", "^$", "-bench", "AgainstCurl", "-benchtime", "3x", "-timeout", "6h", "-v", "./engine/hub")
}

// Fetch holds what brings things here.
type Fetch mg.Namespace

// Aliases are short names.
var Aliases = map[string]any{"fetch": Fetch.Development}

// Development brings all that work on the project needs: the modules, and the built-in
// miniature, unpacked and run. It says which optional programs are absent, what is not run
// without them, and how to get them. No weights are needed but those in the repository.
func (Fetch) Development() error {
	for _, args := range [][]string{
		{"mod", "download"},
		{"-C", "engine/openai/sdktest", "mod", "download"},
		{"run", "./cmd/deltafin", "run", "--prompt", "The capital of France is", "--max-new", "8"},
	} {
		if err := sh(nil, "go", args...); err != nil {
			return err
		}
	}
	fmt.Println()
	for _, p := range []struct {
		what, missed, get string
		check             []string // any of them, split at spaces
	}{
		{"python3 with numpy", "the numpy oracle", "apt-get install python3-numpy", []string{"python3 -c import#numpy", "/usr/bin/python3 -c import#numpy"}},
		{"nginx", "the tests against a second web server", "apt-get install nginx-light", []string{"nginx -v"}},
		{"curl", "bench:fetch", "apt-get install curl", []string{"curl --version"}},
		{"Chromium", "the test of the server's page", "apt-get install chromium", []string{"chromium --version", "chromium-browser --version", "google-chrome --version"}},
		{"npm", "the JavaScript clients of sdk", "apt-get install npm", []string{"npm --version"}},
		{"Jupyter, matplotlib and pandas", "notebooks", "apt-get install python3-nbconvert python3-ipykernel python3-matplotlib python3-pandas", []string{"python3 -c import#nbconvert,ipykernel,matplotlib,pandas", "/usr/bin/python3 -c import#nbconvert,ipykernel,matplotlib,pandas"}},
	} {
		here := slices.ContainsFunc(p.check, func(c string) bool {
			args := strings.Fields(c)
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "#", " ")
			}
			return exec.Command(args[0], args[1:]...).Run() == nil
		})
		if here {
			fmt.Printf("here    %s\n", p.what)
		} else {
			fmt.Printf("absent  %s: not run without it: %s; on Debian: %s\n", p.what, p.missed, p.get)
		}
	}
	return nil
}

// Full fetches the real Kimi K3 into a directory: 1.56 TB, which it asks about first.
func (Fetch) Full(dir string) error {
	c := exec.Command("go", "run", "./cmd/deltafin", "fetch", "--full", dir)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	return c.Run()
}

// Prefill holds the benchmark of whole prompts.
type Prefill mg.Namespace

// Bench measures the time to the first token of prompts on a checkpoint of true dimensions,
// expert-major against passes of 64 rows, and writes bench-prefill.json. DELTAFIN_SLICE
// is as for bench:decode.
func (Prefill) Bench() error {
	return sh(nil, "go", "run", "./engine/slicebench", "prefill", "-dir", os.Getenv("DELTAFIN_SLICE"), "-json", "bench-prefill.json")
}

// Verify runs all gates, one line each, and fails if one fails. The output of a
// gate is kept in a file that its line names when it fails.
func Verify(ctx context.Context) error {
	gates := []struct {
		name string
		args []string
	}{
		{"lint", []string{"go", "tool", "mage", "lint"}},
		{"generate", []string{"go", "tool", "mage", "generate"}},
		{"test", []string{"go", "test", "-v", "./..."}}, // -v, to count what was NOT RUN
		{"noasm", []string{"go", "tool", "mage", "noasm"}},
		{"golden", []string{"go", "tool", "mage", "golden"}},
		{"parity", []string{"go", "tool", "mage", "parity"}},
		{"scenarios", []string{"go", "tool", "mage", "scenarios"}},
		{"cross", []string{"go", "tool", "mage", "cross"}},
		{"fuzz", []string{"go", "tool", "mage", "fuzz"}},
	}
	logs, err := os.MkdirTemp("", "deltafin-verify-")
	if err != nil {
		return err
	}
	var failed []string
	for _, g := range gates {
		began := time.Now()
		var out bytes.Buffer
		c := exec.CommandContext(ctx, g.args[0], g.args[1:]...)
		c.Stdout, c.Stderr = &out, &out
		err := c.Run()
		verdict, remark := "ok", notRun(out.String())
		if err != nil {
			verdict, remark = "FAILED", filepath.Join(logs, g.name+".txt")
			failed = append(failed, g.name)
			if err := os.WriteFile(remark, out.Bytes(), 0o644); err != nil {
				return err
			}
		}
		fmt.Printf("%-10s %-7s %6.1f s  %s\n", g.name, verdict, time.Since(began).Seconds(), remark)
	}
	if len(failed) > 0 {
		return fmt.Errorf("gates failed: %s", strings.Join(failed, ", "))
	}
	return os.RemoveAll(logs)
}

// notRun counts what a gate did not run, by reason.
func notRun(out string) string {
	count := map[string]int{}
	for _, m := range regexp.MustCompile(`NOT RUN: ([^\n]*)`).FindAllStringSubmatch(out, -1) {
		count[m[1]]++
	}
	var lines []string
	for reason, n := range count {
		lines = append(lines, fmt.Sprintf("%d NOT RUN (%s)", n, reason))
	}
	slices.Sort(lines)
	return strings.Join(lines, "; ")
}

// Notebooks executes the notebooks on the recorded runs, in place, draws their plots in
// docs, and fails on an error. Without Jupyter it says so and succeeds.
func Notebooks() error {
	pythons := []string{"python3", "/usr/bin/python3", "python"} // the second is the system's, where another comes first
	i := slices.IndexFunc(pythons, func(python string) bool {
		return exec.Command(python, "-c", "import nbconvert, ipykernel, matplotlib, pandas").Run() == nil
	})
	if i < 0 {
		fmt.Println("NOT RUN: no python3 with nbconvert, ipykernel, matplotlib and pandas")
		return nil
	}
	books, err := filepath.Glob("notebooks/*.ipynb")
	if err != nil {
		return err
	}
	if len(books) == 0 {
		return errors.New("no notebooks found: run in the root of the project")
	}
	// Times of execution would make every run another file.
	args := []string{"-m", "nbconvert", "--log-level=WARN", "--to=notebook", "--execute", "--inplace", "--ExecutePreprocessor.record_timing=False"}
	return sh([]string{"PYDEVD_DISABLE_FILE_VALIDATION=1"}, pythons[i], append(args, books...)...)
}
