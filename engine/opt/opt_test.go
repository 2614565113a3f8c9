package opt_test

import (
	"os"
	"regexp"
	"slices"
	"testing"

	_ "deltafin/engine" // registers every switch
	"deltafin/engine/opt"
)

// TestEverySwitchHasItsSection holds the registry and OPTIMIZATIONS.md together.
func TestEverySwitchHasItsSection(t *testing.T) {
	text, err := os.ReadFile("../../OPTIMIZATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	var kept, all []string
	for _, m := range regexp.MustCompile(`(?m)^## (\S+)\n\n(Kept|Rejected)\.`).FindAllStringSubmatch(string(text), -1) {
		all = append(all, m[1])
		if m[2] == "Kept" {
			kept = append(kept, m[1])
		}
	}
	if headings := regexp.MustCompile(`(?m)^## `).FindAllString(string(text), -1); len(headings) != len(all) {
		t.Errorf("%d sections, %d of them begin with Kept. or Rejected.", len(headings), len(all))
	}
	for _, s := range opt.All() {
		if !slices.Contains(kept, s.Name) {
			t.Errorf("switch %s has no section in OPTIMIZATIONS.md that begins with Kept.", s.Name)
		}
		kept = slices.DeleteFunc(kept, func(n string) bool { return n == s.Name })
	}
	if len(kept) > 0 {
		t.Errorf("OPTIMIZATIONS.md keeps %v, which have no switch", kept)
	}
}

func TestParseTurnsSwitches(t *testing.T) {
	s := opt.All()[0]
	defer s.Set(true)
	if err := opt.Parse(s.Name + "=off"); err != nil || s.On() {
		t.Errorf("after =off: on %v, error %v", s.On(), err)
	}
	if err := opt.Parse(s.Name + "=on"); err != nil || !s.On() {
		t.Errorf("after =on: on %v, error %v", s.On(), err)
	}
	for _, bad := range []string{"", s.Name, s.Name + "=", s.Name + "=yes", "no-such-thing=on", "=off"} {
		if err := opt.Parse(bad); err == nil {
			t.Errorf("Parse(%q) did not fail", bad)
		}
	}
}
