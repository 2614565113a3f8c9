package expert

import (
	"slices"

	"deltafin/engine/drive"
	"deltafin/engine/opt"
)

var readAhead = opt.New("read-ahead", "read the experts that a coming layer is likely to route before its route is known", nil)

const (
	// A layer is read ahead while at least this part of its hints comes true: a
	// wrong expert costs the drive as much time as a right one saves.
	breakEven = 0.5
	// The weight of a pass in a layer's precision: a layer that is never right is
	// found out after three.
	precisionWeight = 0.25
)

// ahead is the read-ahead of a source. All of it is guarded by Source.mu.
type ahead struct {
	s         *Source
	loads     map[int32]*load
	held      int // slots of loads that were not adopted, the dropped ones in flight included
	layer     int // of wanted
	wanted    []int32
	hinted    map[int][]int32 // what was said of a layer since its last stream
	precision []float64
}

func (a *ahead) init(s *Source) {
	a.s, a.loads, a.hinted = s, map[int32]*load{}, map[int][]int32{}
	a.precision = make([]float64, s.cat.layers())
	for i := range a.precision {
		a.precision[i] = 1 // try, and see
	}
}

// Hint says which experts of a coming layer are likely to be routed, the likeliest
// first. They are read behind demand, into slots that demand does not need, as far as
// hints for the layer have been worth it. A hint for another layer replaces what is
// not begun of this one, and the layer's stream ends it. Give it while the layer before
// streams, or after: given before, it takes slots that that layer could use.
func (s *Source) Hint(layer int, ids []int32) {
	if !readAhead.On() || s.o.AheadSlots == 0 || len(ids) == 0 {
		return
	}
	s.mu.Lock()
	if s.closed || !s.ck.Config().IsMoE(layer) || s.stream != nil && s.stream.layer == layer {
		s.mu.Unlock()
		return
	}
	a := &s.ahead
	a.hinted[layer] = slices.Clone(ids)
	for _, l := range a.loads {
		if l.layer > layer { // of a pass that ended early; those of earlier layers meet their own stream
			a.drop(l)
		}
	}
	a.layer, a.wanted = layer, nil
	if a.precision[layer-s.cat.first] >= breakEven {
		// What would come over the network for nothing costs more than time.
		a.wanted = slices.DeleteFunc(slices.Clone(ids), func(id int32) bool { return s.cat.away(layer, int(id)) })
	}
	more := s.next()
	s.mu.Unlock()
	s.issueAll(more)
}

// fill starts what is wanted while there are slots that demand will not ask for.
func (a *ahead) fill() []*load {
	s := a.s
	var start []*load
	for len(a.wanted) > 0 && !s.closed {
		spare := s.room()
		if s.stream != nil {
			spare -= s.stream.unborn
		}
		if a.held >= s.o.AheadSlots || spare <= 0 {
			break
		}
		id := a.wanted[0]
		a.wanted = a.wanted[1:]
		if id < 0 || int(id) >= s.cat.per {
			continue
		}
		key := s.cat.index(a.layer, int(id))
		if s.resident[key] != nil && keep.On() || a.loads[key] != nil {
			continue
		}
		sl, err := s.takeSlot()
		if sl == nil || err != nil {
			break
		}
		l := &load{layer: a.layer, id: int(id), key: key, class: drive.Ahead, ahead: true, slot: sl}
		a.loads[key] = l
		a.held++
		s.flying++
		start = append(start, l)
	}
	return start
}

// meet is called when a layer's route is known: it learns how good the hints were
// and drops what was wrong.
func (a *ahead) meet(layer int, ids []int32) []*load {
	s := a.s
	if hint := a.hinted[layer]; hint != nil {
		hint = hint[:min(len(hint), s.o.AheadSlots)] // no more than these could have been read
		right := 0
		for _, id := range hint {
			if _, ok := slices.BinarySearch(ids, id); ok {
				right++
			}
		}
		p := &a.precision[layer-s.cat.first]
		*p += precisionWeight * (float64(right)/float64(len(hint)) - *p)
		delete(a.hinted, layer)
	}
	if a.layer <= layer {
		a.wanted = nil
	}
	for _, l := range a.loads {
		_, ok := slices.BinarySearch(ids, int32(l.id))
		if l.layer < layer || l.layer == layer && !ok {
			a.drop(l)
		}
	}
	return s.next()
}

// adopt returns the load of an expert that is now demanded, or nil.
func (a *ahead) adopt(key int32) *load {
	l := a.loads[key]
	if l != nil {
		delete(a.loads, key)
		a.held--
	}
	return l
}

// drop ends a load that nobody wants.
func (a *ahead) drop(l *load) {
	delete(a.loads, l.key)
	l.dropped = true
	if l.there {
		a.s.waste(l.parts...)
		a.held--
		a.s.shelve(l.slot)
		l.slot = nil
		return
	}
	for _, t := range l.tickets {
		t.Cancel()
	}
}

// abandon keeps a load that failed from being adopted.
func (a *ahead) abandon(l *load) {
	if a.loads[l.key] == l {
		delete(a.loads, l.key)
	}
	l.dropped = true
}

// forget is told of a load that ended without being there.
func (a *ahead) forget(l *load) {
	if l.ahead && l.done == nil {
		a.abandon(l)
		a.held--
	}
}

// dropAll drops all loads of a layer, or with -1 of all layers.
func (a *ahead) dropAll(layer int) {
	for _, l := range a.loads {
		if layer < 0 || l.layer == layer {
			a.drop(l)
		}
	}
	if layer < 0 || a.layer == layer {
		a.wanted = nil
	}
}
