package checkpoint

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"testing"
)

// shardOf puts a header in front of so many bytes of data.
func shardOf(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, data)...)
}

func headerOf(b []byte, size int64) ([]string, error) {
	var list []string
	err := parseHeader(bytes.NewReader(b), size, func(e entry) error {
		list = append(list, fmt.Sprintf("%s %s %v %d-%d", e.name, e.dtype, e.shape, e.begin, e.end))
		return nil
	})
	return list, err
}

func TestHeadersInAnyOrderAreRead(t *testing.T) {
	header := `{"__metadata__":{"format":"pt"},` +
		`"b":{"data_offsets":[8,14],"shape":[3,1],"dtype":"BF16"},` +
		`"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},` +
		`"s":{"dtype":"I64","shape":[],"data_offsets":[14,22]},` +
		`"none":{"dtype":"U8","shape":[0],"data_offsets":[14,14]}}   `
	b := shardOf(header, 22)
	got, err := headerOf(b, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	at := 8 + len(header)
	want := []string{
		fmt.Sprintf("b BF16 [3 1] %d-%d", at+8, at+14),
		fmt.Sprintf("a F32 [2] %d-%d", at, at+8),
		fmt.Sprintf("s I64 [] %d-%d", at+14, at+22),
		fmt.Sprintf("none U8 [0] %d-%d", at+14, at+14),
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestMalformedHeadersAreRefused(t *testing.T) {
	const a = `"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}`
	for _, c := range []struct {
		header string
		data   int
		want   string
	}{
		{`{` + a + `}`, 7, "1 short of the"},
		{`{` + a + `}`, 9, "1 more than the"},
		{``, 0, "ends early"},
		{`[]`, 0, "expected '{'"},
		{`{` + a, 8, "ends early"},
		{`{` + a + `}}`, 8, "after the JSON document"},
		{`{` + a + `} {}`, 8, "after the end"},
		{`{` + a + `,}`, 8, "malformed"},
		{`{` + a + `,` + a + `}`, 8, "a is given twice"},
		{`{"__metadata__":{},"__metadata__":{},` + a + `}`, 8, "__metadata__ is given twice"},
		{`{"__metadata__":[[[[]]]],` + a + `}`, 8, "nested too deeply"},
		{`{` + a + `,"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}`, 8, "tensor b starts at byte"},
		{`{` + a + `,"b":{"dtype":"U8","shape":[4],"data_offsets":[9,13]}}`, 13, "leaving a gap"},
		{`{"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}`, 5, "leaving a gap"},
		{`{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}`, 8, "has 8 bytes, expected 12"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}`, 8, "before its start"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}}`, 8, "data_offsets"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}}`, 8, "more than two"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0.0,8]}}`, 8, "found 0.0, expected an integer"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8e0]}}`, 8, "found 8e0, expected an integer"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}`, 8, "found -0, expected an integer"},
		{`{"a":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}}`, 8, `found "2", expected an integer`},
		{`{"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}}`, 8, "found '[', expected an integer"},
		{`{"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}}`, 8, "shape: found 2"},
		{`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}}`, 8, "unknown field x"},
		{`{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}`, 8, "shape is given twice"},
		{`{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 8, "dtype is given twice"},
		{`{"a":{"shape":[2],"data_offsets":[0,8]}}`, 8, "tensor a: has no dtype"},
		{`{"a":{"dtype":"F32","data_offsets":[0,8]}}`, 8, "tensor a: has no shape"},
		{`{"a":{"dtype":"F32","shape":[2]}}`, 8, "tensor a: has no data_offsets"},
		{`{"a":{"dtype":"?","shape":[2],"data_offsets":[0,8]}}`, 8, "dtype ? is not known"},
		{`{"a":{"dtype":"f32","shape":[2],"data_offsets":[0,8]}}`, 8, "dtype f32 is not known"},
		{`{"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}}`, 8, "found 4, expected a string"},
		{`{"a":null}`, 8, "found null"},
		{`{"a":{"dtype":"F32","shape":[2147483647,2147483647,2147483647],"data_offsets":[0,8]}}`, 8, "larger than any file"},
		{`{"a":{"dtype":"F32","shape":[4294967296],"data_offsets":[0,8]}}`, 8, "not believable"},
		{`{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,8],"data_offsets":[0,8]}}`, 8, "more than 8 dimensions"},
		{`{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,99999999999999999999]}}`, 8, "expected an integer"},
		{`{"a":{"dtype":"U8","shape":[0],"data_offsets":[9223372036854775807,9223372036854775807]}}`, 8, "beyond any file"},
		{`{"` + strings.Repeat("n", 600) + `":{}}`, 8, "longer than 512"},
		{"{\"\\u001b[31m\":{}}", 8, `tensor "\x1b[31m": has no dtype`},
	} {
		b := shardOf(c.header, c.data)
		_, err := headerOf(b, int64(len(b)))
		if err == nil {
			t.Errorf("%s: no error, expected %q", c.header, c.want)
			continue
		}
		wantError(t, err, c.want)
	}
}

func TestHeaderLengthIsBoundedBeforeItIsBelieved(t *testing.T) {
	for _, c := range []struct {
		b    []byte
		size int64
		want string
	}{
		{nil, 0, "too short"},
		{make([]byte, 7), 7, "too short"},
		{binary.LittleEndian.AppendUint64(nil, 1<<63), 1 << 40, "claims a header of 9223372036854775808 bytes"},
		{binary.LittleEndian.AppendUint64(nil, headerLimit+1), 1 << 40, "more than the 100000000 allowed"},
		{shardOf("{}", 0), 9, "claims a header of 2 bytes but is 9 bytes long"},
		{shardOf("{}", 0)[:9], 10, "ends early"}, // shrank after its size was taken
		{shardOf("{}", 0)[:4], 10, "cannot be read"},
	} {
		_, err := headerOf(c.b, c.size)
		wantError(t, err, c.want)
	}
}

func TestTheHeaderReaderNeverReadsData(t *testing.T) {
	b := shardOf(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 0)
	beyond := func() io.Reader { panic("data was read") }
	r := io.MultiReader(bytes.NewReader(b), readerFunc(func([]byte) (int, error) { return beyond().Read(nil) }))
	if err := parseHeader(r, int64(len(b)+8), func(entry) error { return nil }); err != nil {
		t.Error(err)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

func FuzzHeader(f *testing.F) {
	f.Add(shardOf(`{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 8))
	f.Add(shardOf(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]},"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}  `, 8))
	f.Add(shardOf(`{"a":{"dtype":"U8","shape":[1073741824,1073741824,1073741824],"data_offsets":[0,18446744073709551615]}}`, 8))
	f.Add([]byte{255, 255, 255, 255, 255, 255, 255, 127, '{'})
	f.Fuzz(func(t *testing.T, b []byte) {
		names := map[string]bool{}
		var total int64
		err := parseHeader(bytes.NewReader(b), int64(len(b)), func(e entry) error {
			n, ok := byteLen(e.dtype, e.shape)
			if names[e.name] || !ok || n != e.end-e.begin || e.begin < 8 {
				t.Errorf("entry %+v", e)
			}
			names[e.name] = true
			total += n
			return nil
		})
		if err != nil {
			return
		}
		if header := int64(binary.LittleEndian.Uint64(b)); total != int64(len(b))-8-header {
			t.Errorf("%d bytes of tensors in a file of %d with a header of %d", total, len(b), header)
		}
	})
}
