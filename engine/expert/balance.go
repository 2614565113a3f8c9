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

// choose returns which of several drives gets a read of n bytes: the one that is
// expected to end it first, the first among equals.
func choose(c drive.Class, n int64, drives []expecter) int {
	best, least := 0, time.Duration(math.MaxInt64)
	for i, d := range drives {
		if t := d.Expect(c, n); t < least {
			best, least = i, t
		}
	}
	return best
}

// A split must end earlier than a whole read by one part in splitGain: it costs a
// second call, and expectations are not exact.
const splitGain = 8

// split returns the drives for the first two thirds and for the last third of an
// expert of n bytes, if that ends sooner than a whole read anywhere. Cuts lie
// between weight matrices, which are a third each.
func split(c drive.Class, n int64, drives []expecter) (large, small int, ok bool) {
	whole := drives[choose(c, n, drives)].Expect(c, n)
	least := whole - whole/splitGain
	for i, a := range drives {
		ta := a.Expect(c, n-n/3)
		if ta >= least {
			continue
		}
		for j, b := range drives {
			if j == i || a == b {
				continue // two homes on one drive gain nothing
			}
			if t := max(ta, b.Expect(c, n/3)); t < least {
				large, small, ok, least = i, j, true, t
			}
		}
	}
	return large, small, ok
}
