package k3

import (
	"slices"

	"deltafin/engine/checkpoint"
	"deltafin/engine/kernel"
)

// StateBytes is the memory of a session's state at a number of positions (spec C.12).
func StateBytes(c *checkpoint.Config, positions int) int64 {
	var floats int64
	for _, mla := range c.MLA {
		if mla {
			floats += int64(positions) * int64(kernel.Pad(c.KVLora)+kernel.Pad(c.Rope))
		} else {
			p := int64(c.KDAHeads) * int64(c.KDADim)
			floats += p*int64(stateStride(c.KDADim)) + 3*p*int64(c.ConvKernel-1)
		}
	}
	return 4 * floats
}

// HeldBytes is what a held pass of rows rows takes besides: the inputs of the recurrences
// until it is committed, and logits for all rows instead of one.
func HeldBytes(c *checkpoint.Config, rows int) int64 {
	floats := int64(rows-1) * int64(kernel.Pad(c.Vocab))
	for _, mla := range c.MLA {
		if !mla {
			floats += int64(rows) * int64(6*kernel.Pad(c.KDAHeads*c.KDADim)+kernel.Pad(c.KDAHeads))
		}
	}
	return 4 * floats
}

// PassBytes is the memory that the intermediate values of a pass of rows rows take,
// the results of reorder experts that wait for a lower id included.
func PassBytes(c *checkpoint.Config, rows, reorder int) int64 {
	pad := func(n int) int64 { return int64(kernel.Pad(n)) }
	n, tile := int64(rows), int64(min(rows, DefaultTileRows))
	slots := int64((c.Layers+c.ResBlock-1)/c.ResBlock + 1)
	hidden, latent, inter := pad(c.Hidden), pad(c.Latent), pad(c.MoEInter)
	kda := pad(c.KDAHeads * c.KDADim)
	qk, v := pad(c.Heads*(c.Nope+c.Rope)), pad(c.Heads*c.VDim)
	attending := int64(min(rows, attendRows)) * int64(c.Heads) * (2*pad(c.KVLora) + pad(c.Rope))
	shared := int64(min(rows, sharedRows)) * (2*pad(c.SharedExperts*c.MoEInter) + hidden)

	depth := n * slots * hidden
	attention := tile * (2*hidden + max(9*kda+pad(c.KDADim)+pad(c.KDAHeads), pad(c.QLora)+pad(c.KVLora+c.Rope)+qk+2*v))
	if slices.Contains(c.MLA, true) {
		attention += attending
	}
	dense := tile * (2*hidden + 2*pad(c.Intermediate))
	expertTile := int64(min(rows, expertRows)) * (2*inter + latent)
	pack := int64(min(rows, expertRows)) * max(latent, inter)
	moe := n*(hidden+2*latent+2*int64(c.TopK)) + max(tile*(pad(c.Experts)+hidden), expertTile+pack+shared)
	waiting := int64(max(reorder-1, 0)) * n * latent
	logits := pad(c.Vocab) + hidden
	return 4 * (depth + max(attention, dense, moe+waiting, logits))
}
