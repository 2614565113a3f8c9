package openai

import (
	cryptorand "crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"math"
	"math/rand/v2"
	"slices"

	"deltafin/engine/kernel"
)

// choose gives the next token after position tokens. Drawing depends on the seed and
// the position alone, so that an answer that was cut off goes on as it would have.
func (r *request) choose(row []float32, position int) int {
	if !r.sampled() {
		return kernel.ArgMax(row)
	}
	most := float64(slices.Max(row))
	weights := make([]float64, len(row))
	sum := 0.0
	for id, v := range row {
		weights[id] = math.Exp((float64(v) - most) / *r.temperature)
		sum += weights[id]
	}
	ids := make([]int, len(row))
	for id := range ids {
		ids[id] = id
	}
	if r.topP != nil && *r.topP < 1 {
		// The fewest likeliest tokens that reach top_p together, at least one.
		slices.SortFunc(ids, func(a, b int) int {
			switch {
			case weights[a] != weights[b] && weights[a] > weights[b]:
				return -1
			case weights[a] != weights[b]:
				return 1
			}
			return a - b
		})
		kept := 0.0
		for i, id := range ids {
			kept += weights[id]
			if kept >= *r.topP*sum {
				ids, sum = ids[:i+1], kept
				break
			}
		}
	}
	x := rand.New(rand.NewPCG(uint64(*r.seed), uint64(position))).Float64() * sum
	for _, id := range ids {
		if x -= weights[id]; x < 0 {
			return id
		}
	}
	return ids[len(ids)-1]
}

func randomSeed() uint64 {
	var b [8]byte
	cryptorand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])
}

// newID gives a response its name.
func (a api) newID() string {
	var b [12]byte
	cryptorand.Read(b[:])
	return [...]string{"chatcmpl-", "cmpl-", "msg_"}[a] + hex.EncodeToString(b[:])
}
