package checkpoint

import "os"

// Sketch is a checkpoint that nobody has: all tensors that c implies, with their names,
// shapes and sizes, one after another in one file. What depends on sizes alone can be asked
// about it; it has no bytes, and reads fail. Errors call it name. Its A_log has an entry for
// each head; a checkpoint may pad it.
func Sketch(name string, c *Config) *Checkpoint {
	r := newRoster(c)
	r.files = []string{"no file"}
	at := int64(0)
	take := func(n int64) int64 {
		at += n
		return at - n
	}
	for i := range r.dense {
		r.dense[i].File, r.dense[i].Offset = 0, take(r.dense[i].Bytes)
	}
	for i := range r.experts {
		r.experts[i] = expert{offset: take(r.layout.ExpertBytes)}
	}
	return &Checkpoint{dir: name, r: r, files: make([]*os.File, 1)}
}

// K3 is the configuration of the released model (spec A.3).
func K3() *Config {
	c := &Config{
		Hidden: 7168, Layers: 93, Vocab: 163840, Intermediate: 33792, BOS: 163584, EOS: 163586, Pad: 163839,
		Eps: 1e-5, SituBeta: 4, SituLinearBeta: 25, ResBlock: 12, MaxPositions: 1 << 20,
		KDAHeads: 96, KDADim: 128, ConvKernel: 4, GateLowerBound: -5,
		Heads: 96, QLora: 1536, KVLora: 512, Nope: 128, Rope: 64, VDim: 128,
		Experts: 896, TopK: 16, SharedExperts: 2, MoEInter: 3072, Latent: 3584, FirstDense: 1,
		Renormalize: true, LatentNorm: true, RoutedScale: 1, MLA: make([]bool, 93),
	}
	for l := range c.MLA {
		c.MLA[l] = l%4 == 3 || l == c.Layers-1
	}
	return c
}
