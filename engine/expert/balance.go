package expert

import (
	"math"
	"time"

	"deltafin/engine/drive"
	"deltafin/engine/opt"
)

var (
	balanceHomes = opt.New("balance-homes", "read each expert from the home that is expected to deliver it first, instead of the first home", nil)
	splitReads   = opt.New("split-reads", "read the last experts of a layer from two drives at once when that ends earlier", nil)
)

// expecter is a drive as far as the choice goes: when it would deliver n more bytes.
type expecter interface {
	Expect(c drive.Class, n int64) time.Duration
}

// candidate is a drive that has an expert.
type candidate struct {
	drive expecter
	// must is what only this drive can give of the experts that are still to come in
	// this layer: bytes that it will have to read whatever is chosen now.
	must int64
}

func (x candidate) expect(c drive.Class, n int64) time.Duration { return x.drive.Expect(c, x.must+n) }

// choose returns which of several drives gets a read of n bytes: the one that is
// expected to end it first, the first among equals.
func choose(c drive.Class, n int64, cs []candidate) int {
	best, least := 0, time.Duration(math.MaxInt64)
	for i, x := range cs {
		if t := x.expect(c, n); t < least {
			best, least = i, t
		}
	}
	return best
}

// A split must shorten the wait by one part in splitGain: it costs a second call.
const splitGain = 40

// split returns the drives for the first two thirds and for the last third of an
// expert of n bytes, if that ends sooner than a whole read anywhere. Cuts lie
// between weight matrices, which are a third each.
func split(c drive.Class, n int64, cs []candidate) (large, small int, ok bool) {
	whole := cs[choose(c, n, cs)].expect(c, n)
	least := whole - whole/splitGain
	for i, a := range cs {
		ta := a.expect(c, n-n/3)
		if ta >= least {
			continue
		}
		for j, b := range cs {
			if j == i || a.drive == b.drive {
				continue // two homes on one drive gain nothing
			}
			if t := max(ta, b.expect(c, n/3)); t < least {
				large, small, ok, least = i, j, true, t
			}
		}
	}
	return large, small, ok
}

// musts finds out what only one drive can give of the experts of a stream. The lock
// must not be held.
func (s *Source) musts(layer int, ids []int32) (only []*drive.Device, must map[*drive.Device]int64) {
	only, must = make([]*drive.Device, len(ids)), map[*drive.Device]int64{}
	if len(s.cat.homes) == 1 || !balanceHomes.On() {
		return only, must
	}
	for i, id := range ids {
		key := s.cat.index(layer, int(id))
		s.mu.Lock()
		here := s.resident[key] != nil && keep.On() || s.ahead.loads[key] != nil
		s.mu.Unlock()
		if here {
			continue
		}
		var d *drive.Device
		several := false
		s.homes.mu.Lock()
		for _, p := range s.cat.places(layer, int(id), s.homes.avoid) {
			if p.err == nil && !s.homes.devices[p.file.Device()] {
				several = several || d != nil && d != p.file.Device()
				d = p.file.Device()
			}
		}
		s.homes.mu.Unlock()
		if d != nil && !several {
			only[i] = d
			must[d] += s.n
		}
	}
	return only, must
}
