package reference

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"deltafin/golden"
)

// The frozen numbers are only as good as the program that made them: run it again where
// Python and numpy are to be had.
func TestOracleStillSaysWhatIsFrozen(t *testing.T) {
	const python = "/usr/bin/python3"
	if _, err := os.Stat(python); err != nil {
		t.Skipf("NOT RUN: no %s", python)
	}
	if err := exec.Command(python, "-c", "import numpy").Run(); err != nil {
		t.Skipf("NOT RUN: %s has no numpy (Debian: python3-numpy)", python)
	}
	c, err := golden.Find("tiny-a", "len17")
	if err != nil {
		t.Fatal(err)
	}
	const n = 4
	for _, dtype := range []string{"--f64", "--f32"} {
		ids := strings.Trim(strings.ReplaceAll(fmt.Sprint(c.PromptIDs), " ", ","), "[]")
		args := []string{"-B", "oracle/oracle.py", c.Model, ids, "--n", fmt.Sprint(n), "--json"}
		if dtype == "--f64" {
			args = append(args, dtype)
		}
		out, err := exec.Command(python, args...).Output()
		if err != nil {
			t.Fatalf("%s %s: %v", python, strings.Join(args, " "), err)
		}
		var got struct {
			Greedy []int
			Logits [][]float64
		}
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got.Greedy, c.Greedy[:n]) {
			t.Errorf("%s: greedy %v, frozen %v", dtype, got.Greedy, c.Greedy[:n])
		}
		bound := 1e-9
		if dtype == "--f32" {
			bound = bound32["tiny-a"]
		}
		if e := maxAbsRows(got.Logits, c.Rows64[:n]); e > bound {
			t.Errorf("%s: logits are off by %.1e, bound %.0e", dtype, e, bound)
		}
	}
}
