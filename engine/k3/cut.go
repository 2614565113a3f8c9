package k3

import (
	"context"
	"errors"
)

// cut is a pass under way, which a cancelled context may end between two half-layers:
// a half-layer that is not done has changed neither the stream nor the state. The
// pass's intermediate values stay in the model's arena until another pass takes it.
type cut struct {
	ids  []int
	d    depth
	mark [2]int // of the arena, behind d
	done int    // half-layers: layer l's attention is number 2l, its feed-forward part 2l+1
}

// Suspended returns the tokens of the pass that a cancelled context ended inside and
// that [Model.Forward] can go on with, and how many whole layers of it are done. It
// returns nil when st stands between passes, and when another pass has run on the model
// since: st is then unusable.
func (m *Model) Suspended(st *State) (ids []int, layers int) {
	if st.cut == nil || st.cut != m.cut {
		return nil, 0
	}
	return st.cut.ids, st.cut.done / 2
}

// Cancelled tells whether err is ctx's own end and no other failure.
func Cancelled(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, ctx.Err())
}
