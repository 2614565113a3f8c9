// Package doctor decides what is worth telling a user about a machine, its drives and a
// model before a run: each check becomes one [Finding] that says what was found and what to
// do about it. It reads, measures for a few seconds, and changes nothing; it uses no network.
// A check that cannot be made never keeps the others from being made.
//
// docs/doctor.md lists the findings.
package doctor

import (
	"context"
	"slices"

	"deltafin/engine/kernel"
	"deltafin/engine/plan"
)

// Version is that of the JSON form of a [Report]. It changes when a field changes its
// meaning or goes; fields and ids of findings may be added.
const Version = 1

// Level says how much a finding matters.
type Level string

// The levels, from good to bad.
const (
	OK      Level = "ok"
	Note    Level = "note"    // worth knowing
	Warning Level = "warning" // works, but slower or less safely than it could
	Error   Level = "error"   // a run would fail, or give wrong results
)

var levels = []Level{OK, Note, Warning, Error}

// Fault says whose an error is.
type Fault string

// The faults, the gravest first: where the machine computes wrongly nothing else matters.
const (
	Machine   Fault = "machine"   // it computes or reads wrongly
	Model     Fault = "model"     // it is incomplete or damaged
	Resources Fault = "resources" // too little memory, disk, or files
)

var faults = []Fault{Machine, Model, Resources}

// Finding is the result of one check.
type Finding struct {
	ID      string             `json:"id"` // of the check; several findings may have one
	Level   Level              `json:"level"`
	Fault   Fault              `json:"fault,omitempty"`   // of errors only
	What    string             `json:"what,omitempty"`    // what was looked at, if there may be several: a path
	Value   string             `json:"value"`             // what was found
	Do      string             `json:"do,omitempty"`      // what to do; findings that are not ok have it
	Numbers map[string]float64 `json:"numbers,omitempty"` // of the value, in bytes and seconds
}

// Report is all findings, in the order in which they were made.
type Report struct {
	Version  int       `json:"version"`
	Worst    Level     `json:"worst"`
	Fault    Fault     `json:"fault,omitempty"` // the gravest of the errors
	Findings []Finding `json:"findings"`
}

// Count is how many findings have a level.
func (r *Report) Count(l Level) (n int) {
	for _, f := range r.Findings {
		if f.Level == l {
			n++
		}
	}
	return n
}

func (r *Report) add(f Finding) {
	r.Findings = append(r.Findings, f)
	if slices.Index(levels, f.Level) > slices.Index(levels, r.Worst) {
		r.Worst = f.Level
	}
	if f.Fault != "" && (r.Fault == "" || slices.Index(faults, f.Fault) < slices.Index(faults, r.Fault)) {
		r.Fault = f.Fault
	}
}

// Options say what to look at.
type Options struct {
	Model   string   // checkpoint directory; "" for the machine and the built-in model only
	Experts []string // directories with copies of experts
	Spine   string   // packed dense weights; "" for none
	Memory  int64    // bytes that a run may use; 0 means three quarters of what is available
	Context int      // tokens that a session is to hold; 0 means the engine's default
	Quick   bool     // measure nothing and generate nothing

	Cache    string // where runs unpack the built-in model to
	Unpacked bool   // it is there, whole
	// Miniature brings the built-in model to a directory for the canary, if it is not Unpacked;
	// remove takes it away again.
	Miniature func() (dir string, remove func(), err error)

	Found func(Finding) // is told each finding when it is made; nil is fine

	measureKernels func(*kernel.Pool, *plan.Machine) error // in place of plan's, which takes seconds
}

// Examine looks at everything. Its error is that of ctx; the report then holds what was
// found until it ended.
func Examine(ctx context.Context, o Options) (*Report, error) {
	if o.measureKernels == nil {
		o.measureKernels = plan.MeasureKernels
	}
	e := &examination{o: o, r: &Report{Version: Version, Worst: OK, Findings: []Finding{}}}
	for _, check := range []func(context.Context){e.machine, e.model, e.drives, e.speed, e.canary} {
		if check(ctx); ctx.Err() != nil {
			break
		}
	}
	e.close()
	return e.r, ctx.Err()
}

// tell adds findings to the report.
func (e *examination) tell(fs ...Finding) {
	for _, f := range fs {
		e.r.add(f)
		if e.o.Found != nil {
			e.o.Found(f)
		}
	}
}
