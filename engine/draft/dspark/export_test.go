package dspark

import (
	"deltafin/engine/draft"
	"deltafin/engine/kernel"
)

// Hidden is the rows [Rows][hidden] of the latest proposal after the last norm.
func Hidden(p draft.Proposer) kernel.Mat { return p.(*proposer).work.h }

// Trial is how many rows of a pass may be undone without a loss.
const Trial = trial
