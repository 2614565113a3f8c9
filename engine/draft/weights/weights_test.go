package weights

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
)

// file writes values as bf16 and returns the tensors [rows][cols] that lie in it one after the other.
func file(t *testing.T, values []float32, shapes ...[]int) (string, []checkpoint.Tensor) {
	t.Helper()
	var b []byte
	for _, v := range values {
		b = binary.LittleEndian.AppendUint16(b, uint16(math.Float32bits(v)>>16))
	}
	path := filepath.Join(t.TempDir(), "w")
	if err := os.WriteFile(path, b, 0o666); err != nil {
		t.Fatal(err)
	}
	var list []checkpoint.Tensor
	at := int64(0)
	for i, shape := range shapes {
		n := int64(2)
		for _, d := range shape {
			n *= int64(d)
		}
		list = append(list, checkpoint.Tensor{Name: string(rune('a' + i)), Shape: shape, Offset: at, Bytes: n})
		at += n
	}
	return path, list
}

func ramp(n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(i%128) - 64
	}
	return v
}

func TestTensorsAreReadAsTheyAreStored(t *testing.T) {
	before := drive.Allocated()
	values := ramp(2*64 + 3*20 + 7 + 5)
	path, list := file(t, values, []int{2, 64}, []int{3, 20}, []int{7}, []int{1, 5})
	drives := drive.NewSet(drive.Options{})
	defer drives.Close()
	s, err := Read(context.Background(), drives, []string{path}, list)
	if err != nil {
		t.Fatal(err)
	}
	var got []float32
	for _, m := range []string{"a", "b"} {
		for r := range s.Matrix[m].Rows {
			row := make([]float32, s.Matrix[m].Cols)
			s.Matrix[m].Widen(row, r)
			got = append(got, row...)
		}
	}
	got = append(append(got, s.Vector["c"]...), s.Vector["d"]...)
	for i := range values {
		if got[i] != values[i] {
			t.Fatalf("value %d is %g, expected %g", i, got[i], values[i])
		}
	}
	if n := drive.Allocated() - before; n == 0 || n > Bytes(list[0]) {
		t.Errorf("%d bytes of buffers, expected those of one matrix, at most %d", n, Bytes(list[0]))
	}
	s.Free()
	if n := drive.Allocated() - before; n != 0 {
		t.Errorf("%d bytes are left", n)
	}
}

func TestWeightsThatAreNoNumbersAreFound(t *testing.T) {
	for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))} {
		for _, at := range []int{0, 3, 4, 9, 63, 64, 66} {
			values := ramp(67)
			values[at] = bad
			var b []byte
			for _, v := range values {
				b = binary.LittleEndian.AppendUint16(b, uint16(math.Float32bits(v)>>16))
			}
			if got := notFinite(b); got != at {
				t.Errorf("%g at %d is found at %d", bad, at, got)
			}
		}
	}
	var b []byte // all that are numbers
	for u := range 1 << 16 {
		if u&0x7f80 != 0x7f80 {
			b = binary.LittleEndian.AppendUint16(b, uint16(u))
		}
	}
	if got := notFinite(b); got >= 0 {
		t.Errorf("number %d is taken for none", got)
	}
}

func TestAFailedReadLeavesNothingBehind(t *testing.T) {
	before := drive.Allocated()
	values := ramp(128)
	values[100] = float32(math.Inf(1))
	path, list := file(t, values, []int{2, 32}, []int{2, 32})
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	for _, c := range []struct {
		ctx   context.Context
		paths []string
		want  string
	}{
		{context.Background(), []string{path}, path + ": tensor b: weight 36 is not a finite number"},
		{context.Background(), []string{path + "x"}, path + "x"},
		{cancelled, []string{path}, context.Canceled.Error()},
	} {
		drives := drive.NewSet(drive.Options{})
		_, err := Read(c.ctx, drives, c.paths, list)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") || c.ctx == cancelled && !errors.Is(err, context.Canceled) {
			t.Errorf("error is %v, expected %q", err, c.want)
		}
		drives.Close()
		if n := drive.Allocated() - before; n != 0 {
			t.Errorf("%d bytes are left", n)
		}
	}
}
