package reference

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// A reference that fast code leans on can no longer contradict it.
func TestNothingImportsTheReferenceOutsideItsTests(t *testing.T) {
	out, err := exec.Command("go", "list", "-e", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "deltafin/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	seen := false
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		seen = seen || f[0] == "deltafin/reference"
		if slices.Contains(f[1:], "deltafin/reference") {
			t.Errorf("%s imports deltafin/reference: compare in a test instead", f[0])
		}
	}
	if !seen {
		t.Errorf("go list did not name deltafin/reference:\n%s", out)
	}
}
