package doctor

import (
	"context"
	"fmt"

	"deltafin/engine"
	"deltafin/engine/kernel"
	"deltafin/engine/machine"
	"deltafin/engine/plan"
)

// measureRoom is the memory that measuring the kernels takes, and as much again.
const measureRoom = 1200e6

// speed predicts what a run would do from the rates that were measured.
func (e *examination) speed(context.Context) {
	if e.o.Model == "" || e.o.Quick {
		return
	}
	f := Finding{ID: "model.speed", Level: Note, What: e.o.Model}
	skip := func(why, do string) {
		f.Value, f.Do = "not predicted: "+why, do
		e.tell(f)
	}
	var m plan.Machine
	for _, p := range e.places {
		if p.rate > 0 {
			m.Drives = append(m.Drives, p.rate)
		}
	}
	switch {
	case e.config == nil:
		skip("the model's config.json cannot be read", "see model.files")
		return
	case e.ledger == nil:
		skip("there is too little memory for a run", "see model.memory")
		return
	case len(m.Drives) == 0:
		skip("no drive could be measured", "see drive.reads")
		return
	case machine.AvailableMemory() < measureRoom:
		skip(fmt.Sprintf("measuring the kernels needs %s of memory", gb(measureRoom)), "free some, or ask 'deltafin plan'")
		return
	}
	pool := kernel.NewPool(e.host.threads)
	defer pool.Close()
	if err := e.o.measureKernels(pool, &m); err != nil {
		skip(err.Error(), "report this line")
		return
	}
	e.tell(predict(plan.ShapeOf(e.config), *e.ledger, m, e.o.Model))
}

// predict puts a plan into one line.
func predict(s plan.Shape, l engine.Ledger, m plan.Machine, what string) Finding {
	token, first := s.PassOf(1, 0, l, m), s.PromptOf(512, 0, l, m)
	return Finding{
		ID: "model.speed", Level: OK, What: what,
		Value: fmt.Sprintf("about %.3g s per token (%s read in %.3g s, %.3g s of computing), %.3g s to the first token of a prompt of 512; 'deltafin plan' says more",
			token.Seconds, gb(int64(token.Bytes)), token.ReadSeconds, token.ComputeSeconds, first.Seconds),
		Numbers: map[string]float64{
			"token_seconds": token.Seconds, "token_bytes": token.Bytes, "token_read_seconds": token.ReadSeconds, "token_compute_seconds": token.ComputeSeconds,
			"first_token_of_512_seconds": first.Seconds,
		},
	}
}
