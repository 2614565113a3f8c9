// Package opt decides which optimisations exist and whether each is on.
//
// An optimisation changes speed or memory, never a bit of the result, so it can
// be turned off by name at any time: `deltafin run --opt NAME=off`. The parity
// gate runs the golden set with each one on and off. Every switch has a section
// of its name in OPTIMIZATIONS.md, and every section there that is marked kept has a switch; a
// test holds the two together.
//
// A switch is process-wide. It is read when work starts, so turning one while a
// forward pass runs gives no defined mix of fast and slow parts, but still the
// same bits.
package opt

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
)

// Switch is one optimisation.
type Switch struct {
	Name    string
	Summary string // one line
	on      atomic.Bool
	apply   func(on bool)
}

// registry holds the switches in order of name.
var registry []*Switch

// New registers an optimisation that is on by default. apply, if not nil, is
// called when it is turned; others are asked with On.
func New(name, summary string, apply func(on bool)) *Switch {
	s := &Switch{Name: name, Summary: summary, apply: apply}
	s.on.Store(true)
	i, found := slices.BinarySearchFunc(registry, name, func(s *Switch, n string) int { return strings.Compare(s.Name, n) })
	if found {
		panic("optimisation registered twice: " + name)
	}
	registry = slices.Insert(registry, i, s)
	return s
}

// On reports whether the optimisation is in use.
func (s *Switch) On() bool { return s.on.Load() }

// Set turns it.
func (s *Switch) Set(on bool) {
	s.on.Store(on)
	if s.apply != nil {
		s.apply(on)
	}
}

// All lists the switches in order of name.
func All() []*Switch { return slices.Clone(registry) }

// Parse applies "NAME=on" or "NAME=off". The error of an unknown name lists those
// that exist.
func Parse(arg string) error {
	name, value, ok := strings.Cut(arg, "=")
	if !ok || value != "on" && value != "off" {
		return fmt.Errorf("optimisation %q: write NAME=on or NAME=off", arg)
	}
	var names []string
	for _, s := range registry {
		if s.Name == name {
			s.Set(value == "on")
			return nil
		}
		names = append(names, s.Name)
	}
	return fmt.Errorf("optimisation %q does not exist: there are %s", name, strings.Join(names, ", "))
}
