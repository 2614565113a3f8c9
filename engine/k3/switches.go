package k3

import "deltafin/engine/opt"

var (
	expertBatch = opt.New("expert-batch", "compute all rows of an expert as one matrix product", nil)
	bankNorms   = opt.New("bank-norms", "keep the inverse norm of each banked vector instead of recomputing it per mix", nil)
)
