package k3

import "deltafin/engine/opt"

var expertBatch = opt.New("expert-batch", "compute all rows of an expert as one matrix product", nil)
