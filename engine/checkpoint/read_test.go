package checkpoint

import (
	"bytes"
	"errors"
	"io"
	"syscall"
	"testing"
)

// hiccup is a file whose reads are short, interrupted and refused above a size.
type hiccup struct {
	data  []byte
	most  int
	calls int
}

var errTooBig = errors.New("EINVAL, as from a read of 2 GiB")

func (h *hiccup) ReadAt(b []byte, off int64) (int, error) {
	h.calls++
	if len(b) > h.most {
		return 0, errTooBig
	}
	switch h.calls % 4 {
	case 0:
		return 0, syscall.EINTR
	case 1:
		b = b[:(len(b)+1)/2] // short, without an error
	case 2:
		n := copy(b[:(len(b)+1)/2], h.data[min(int(off), len(h.data)):])
		return n, syscall.EINTR // short, with one
	}
	n := copy(b, h.data[min(int(off), len(h.data)):])
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

func TestReadsAreCappedContinuedAndRepeated(t *testing.T) {
	data := make([]byte, 1000)
	for i := range data {
		data[i] = byte(i * 7)
	}
	for _, most := range []int{1, 2, 7, 64, 1000} {
		for _, n := range []int{0, 1, 63, 64, 65, 500, 990} {
			got := make([]byte, n)
			if err := readFull(&hiccup{data: data, most: most}, got, 10, most); err != nil {
				t.Errorf("%d bytes, %d a call: %v", n, most, err)
			} else if !bytes.Equal(got, data[10:10+n]) {
				t.Errorf("%d bytes, %d a call: wrong bytes", n, most)
			}
		}
	}
	if readCap >= 0x7ffff000 {
		t.Errorf("one call may ask for %d bytes, more than Linux returns", readCap)
	}
}

func TestReadsThatCannotEndSayWhy(t *testing.T) {
	err := readFull(&hiccup{data: make([]byte, 100), most: 64}, make([]byte, 64), 50, 64)
	wantError(t, err, "the file ends at byte 100, 14 bytes short")
	err = readFull(&hiccup{data: make([]byte, 100), most: 8}, make([]byte, 64), 0, 64)
	if !errors.Is(err, errTooBig) {
		t.Errorf("got %v, want the cause %v", err, errTooBig)
	}
	err = readFull(stuck{}, make([]byte, 8), 0, 8)
	if !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("got %v, want %v", err, io.ErrNoProgress)
	}
}

type stuck struct{}

func (stuck) ReadAt([]byte, int64) (int, error) { return 0, nil }
