// Package draft decides which tokens the model should try next: proposers guess how a
// text goes on, and the model checks all guesses in one pass. A guess can change when a
// token comes, never which.
package draft

import (
	"context"

	"deltafin/engine/kernel"
)

// Guess is a proposed token.
type Guess struct {
	ID int
	P  float32 // the proposer's own estimate, in (0, 1), that it is right if all before it are
}

// Proposer is a source of guesses. It serves one call at a time.
type Proposer interface {
	// Name is a word for switches, statistics and errors.
	Name() string
	// Bytes is the memory that it takes once loaded, and for each sequence of context
	// tokens besides. It is known before anything is loaded.
	Bytes(context int) (loaded, sequence int64)
	// Start begins an empty sequence. It loads nothing.
	Start() Sequence
	Close() error
}

// Sequence is what a proposer keeps of one sequence of tokens.
type Sequence interface {
	// Propose guesses up to k tokens that follow tokens, all that is decided: the last of
	// them is the newest, which the model has not seen yet. The first call loads
	// what the proposer needs. No guess and no error means that it has no idea. After an error the
	// proposer is not asked again.
	Propose(ctx context.Context, tokens []int, k int) ([]Guess, error)
	// Fork returns an independent copy.
	Fork() Sequence
	// Bytes is the memory that the sequence occupies.
	Bytes() int64
}

// Watcher is a [Sequence] that looks at the model's streams. For each pass of the
// model it is shown, layer by layer, the rows of the layers that it asks for; then Kept says
// which of them are part of the sequence.
type Watcher interface {
	Sequence
	// Layers are the layers whose output is wanted, ascending.
	Layers() []int
	// Watch is shown the stream [rows][hidden] after layer; row r is that of position first+r.
	// The view is valid during the call.
	Watch(layer, first int, stream kernel.Mat)
	// Kept is told that the positions below end are decided; what was watched of others is
	// to be forgotten.
	Kept(end int)
}

// Target is what a proposer may use of the model that it guesses for.
type Target struct {
	Hidden, Vocab, Layers int
	Pool                  *kernel.Pool
	// Embed writes the embedding row of each id to dst [len(ids)][hidden].
	Embed func(ctx context.Context, dst kernel.Mat, ids []int) error
	// Head calls use for consecutive slices of the output matrix [vocab][hidden], whose first
	// row is token lo. A slice is valid during the call.
	Head func(ctx context.Context, use func(lo int, w *kernel.Matrix) error) error
}
