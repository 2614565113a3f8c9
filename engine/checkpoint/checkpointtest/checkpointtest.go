// Package checkpointtest hides how a sound checkpoint is damaged on purpose.
//
// Tests of readers and commands copy a small checkpoint, break exactly one thing in
// it, and look at what is said about it. The package reads and writes the layout
// with code of its own, so that it is no mirror of the reader under test. Tensor
// names are those of the files, "language_model." included.
package checkpointtest

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const indexName = "model.safetensors.index.json"

// Dir is a private copy of a checkpoint directory, removed when its test ends. Its
// methods fail the test when they cannot do what they say.
type Dir struct {
	Path string
	t    testing.TB
}

// Tensor is a stored tensor with its bytes.
type Tensor struct {
	Name  string
	DType string // as safetensors names it
	Shape []int
	Data  []byte
}

var sizes = map[string]int{"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}

// Copy copies the files of a checkpoint directory.
func Copy(t testing.TB, dir string) *Dir {
	t.Helper()
	d := &Dir{Path: t.TempDir(), t: t}
	entries, err := os.ReadDir(dir)
	d.must(err)
	for _, e := range entries {
		if e.Type().IsRegular() {
			b, err := os.ReadFile(filepath.Join(dir, e.Name()))
			d.must(err)
			d.write(e.Name(), b)
		}
	}
	return d
}

func (d *Dir) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatalf("checkpointtest: %v", err)
	}
}

func (d *Dir) write(file string, b []byte) {
	d.t.Helper()
	d.must(os.WriteFile(filepath.Join(d.Path, file), b, 0o644))
}

func (d *Dir) read(file string) []byte {
	d.t.Helper()
	b, err := os.ReadFile(filepath.Join(d.Path, file))
	d.must(err)
	return b
}

// Edit replaces the content of a file by what f makes of it.
func (d *Dir) Edit(file string, f func([]byte) []byte) {
	d.t.Helper()
	d.write(file, f(d.read(file)))
}

// Remove removes a file.
func (d *Dir) Remove(file string) {
	d.t.Helper()
	d.must(os.Remove(filepath.Join(d.Path, file)))
}

// SetConfig sets a field of config.json; the field is a path such as
// "text_config.linear_attn_config.num_heads".
func (d *Dir) SetConfig(field string, value any) {
	d.t.Helper()
	d.config(field, func(m map[string]any, name string) { m[name] = value })
}

// DropConfig removes a field of config.json.
func (d *Dir) DropConfig(field string) {
	d.t.Helper()
	d.config(field, func(m map[string]any, name string) { delete(m, name) })
}

func (d *Dir) config(field string, change func(map[string]any, string)) {
	d.t.Helper()
	d.Edit("config.json", func(b []byte) []byte {
		b, ok := EditJSON(b, field, change)
		if !ok {
			d.t.Fatalf("checkpointtest: config.json has no %s", field)
		}
		return b
	})
}

// EditJSON applies change to the object of a document that holds the last name of
// a dotted path, and that name; false if the path leads nowhere.
func EditJSON(b []byte, field string, change func(map[string]any, string)) ([]byte, bool) {
	dec := json.NewDecoder(strings.NewReader(string(b)))
	dec.UseNumber()
	var top map[string]any
	if dec.Decode(&top) != nil {
		return nil, false
	}
	m, names := top, strings.Split(field, ".")
	for _, name := range names[:len(names)-1] {
		var ok bool
		if m, ok = m[name].(map[string]any); !ok {
			return nil, false
		}
	}
	change(m, names[len(names)-1])
	b, err := json.Marshal(top)
	return b, err == nil
}

type index struct {
	Metadata map[string]any    `json:"metadata"`
	Map      map[string]string `json:"weight_map"`
}

func (d *Dir) editIndex(f func(*index)) {
	d.t.Helper()
	d.Edit(indexName, func(b []byte) []byte {
		var x index
		d.must(json.Unmarshal(b, &x))
		f(&x)
		b, err := json.Marshal(x)
		d.must(err)
		return b
	})
}

// Shard returns the file that holds a tensor, as the index has it.
func (d *Dir) Shard(tensor string) string {
	d.t.Helper()
	var x index
	d.must(json.Unmarshal(d.read(indexName), &x))
	file, ok := x.Map[tensor]
	if !ok {
		d.t.Fatalf("checkpointtest: no tensor %s", tensor)
	}
	return file
}

// Tensors returns the tensors of a shard in the order of their bytes.
func (d *Dir) Tensors(file string) []Tensor {
	d.t.Helper()
	b := d.read(file)
	n := 8 + int(binary.LittleEndian.Uint64(b))
	var header map[string]struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	d.must(json.Unmarshal(b[8:n], &header))
	delete(header, "__metadata__")
	var list []Tensor
	for name, h := range header {
		list = append(list, Tensor{name, h.DType, h.Shape, b[n+h.Offsets[0] : n+h.Offsets[1]]})
	}
	slices.SortFunc(list, func(a, b Tensor) int {
		return header[a.Name].Offsets[0] - header[b.Name].Offsets[0]
	})
	return list
}

// Encode lays out a safetensors file.
func Encode(list []Tensor) []byte {
	header := map[string]any{}
	var data []byte
	for _, x := range list {
		begin := len(data)
		data = append(data, x.Data...)
		header[x.Name] = map[string]any{"dtype": x.DType, "shape": x.Shape, "data_offsets": []int{begin, len(data)}}
	}
	text, err := json.Marshal(header)
	if err != nil {
		panic(err) // strings and integers always encode
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(b, text...), data...)
}

// rewrite changes the tensors of a shard and keeps the file and the index's
// total_size sound.
func (d *Dir) rewrite(file string, f func([]Tensor) []Tensor) {
	d.t.Helper()
	var list []Tensor
	if _, err := os.Stat(filepath.Join(d.Path, file)); err == nil {
		list = d.Tensors(file)
	}
	grown := 0
	for _, x := range list {
		grown -= len(x.Data)
	}
	list = f(list)
	for _, x := range list {
		grown += len(x.Data)
	}
	d.write(file, Encode(list))
	d.editIndex(func(x *index) {
		x.Metadata["total_size"] = int64(x.Metadata["total_size"].(float64)) + int64(grown)
	})
}

func (d *Dir) change(tensor string, f func(*Tensor)) {
	d.t.Helper()
	d.rewrite(d.Shard(tensor), func(list []Tensor) []Tensor {
		i := slices.IndexFunc(list, func(x Tensor) bool { return x.Name == tensor })
		if i < 0 {
			d.t.Fatalf("checkpointtest: no tensor %s in its shard", tensor)
		}
		f(&list[i])
		n := sizes[list[i].DType]
		for _, dim := range list[i].Shape {
			n *= dim
		}
		data := make([]byte, n)
		copy(data, list[i].Data)
		list[i].Data = data
		return list
	})
}

// Drop removes a tensor from its shard and from the index.
func (d *Dir) Drop(tensor string) {
	d.t.Helper()
	d.DropFromShard(tensor)
	d.DropFromIndex(tensor)
}

// DropFromShard removes a tensor from its shard; the index still lists it.
func (d *Dir) DropFromShard(tensor string) {
	d.t.Helper()
	d.rewrite(d.Shard(tensor), func(list []Tensor) []Tensor {
		return slices.DeleteFunc(list, func(x Tensor) bool { return x.Name == tensor })
	})
}

// DropFromIndex removes a tensor from the index; its shard still holds it.
func (d *Dir) DropFromIndex(tensor string) {
	d.t.Helper()
	d.Shard(tensor)
	d.editIndex(func(x *index) { delete(x.Map, tensor) })
}

// Add puts a tensor of zeros at the end of a shard, which is made if it is not
// there, and into the index.
func (d *Dir) Add(file, tensor, dtype string, shape ...int) {
	d.t.Helper()
	d.editIndex(func(x *index) { x.Map[tensor] = file })
	d.rewrite(file, func(list []Tensor) []Tensor {
		return append(list, Tensor{Name: tensor, DType: dtype, Shape: shape})
	})
	d.change(tensor, func(*Tensor) {})
}

// SetIndex makes the index say that a tensor lies in another file.
func (d *Dir) SetIndex(tensor, file string) {
	d.t.Helper()
	d.editIndex(func(x *index) { x.Map[tensor] = file })
}

// SetShape gives a tensor another shape; its bytes are cut or filled with zeros.
func (d *Dir) SetShape(tensor string, shape ...int) {
	d.t.Helper()
	d.change(tensor, func(x *Tensor) { x.Shape = shape })
}

// SetDType gives a tensor another type; its bytes are cut or filled with zeros.
func (d *Dir) SetDType(tensor, dtype string) {
	d.t.Helper()
	d.change(tensor, func(x *Tensor) { x.DType = dtype })
}

// Put overwrites bytes of a tensor, from a byte offset in it.
func (d *Dir) Put(tensor string, offset int, b []byte) {
	d.t.Helper()
	d.change(tensor, func(x *Tensor) { copy(x.Data[offset:], b) })
}

// Swap exchanges the places of two tensors of one shard.
func (d *Dir) Swap(tensor, other string) {
	d.t.Helper()
	d.rewrite(d.Shard(tensor), func(list []Tensor) []Tensor {
		i := slices.IndexFunc(list, func(x Tensor) bool { return x.Name == tensor })
		j := slices.IndexFunc(list, func(x Tensor) bool { return x.Name == other })
		list[i], list[j] = list[j], list[i]
		return list
	})
}

// Truncate cuts n bytes off the end of a file.
func (d *Dir) Truncate(file string, n int64) {
	d.t.Helper()
	path := filepath.Join(d.Path, file)
	info, err := os.Stat(path)
	d.must(err)
	d.must(os.Truncate(path, info.Size()-n))
}

// Hollow leaves a shard with its size and its first keep bytes; the rest becomes a
// hole, as in a download that reserved its space and then stopped.
func (d *Dir) Hollow(file string, keep int64) {
	d.t.Helper()
	b := d.read(file)
	d.Remove(file) // blocks that were written once may stay allocated
	d.write(file, b[:keep])
	d.must(os.Truncate(filepath.Join(d.Path, file), int64(len(b))))
}
