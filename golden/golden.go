// Package golden hides where the frozen truth lies and how it is packed: prompts,
// the oracle's greedy tokens, logits, routes and per-layer tensors for the three
// small checkpoints, and the hashes that the engine's own bits must keep.
//
// The data were computed by the numpy oracle in reference/oracle, not by any engine;
// README.md says which command makes which file. Checkpoint directories lie beside
// the data: golden/tiny-a/model, golden/tiny-b/model, golden/nano/model.
package golden

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// Sets names the golden checkpoints: two random ones in the exact released layout
// (tiny-b with sizes that are no multiple of 32) and the trained miniature.
var Sets = []string{"tiny-a", "tiny-b", "nano"}

// Case is one prompt with everything the oracle says about it. All slices over
// layers or positions are in ascending order. A generated row is the logits row that
// chose a token: row 0 is the prompt's last position, row j the position of token j-1.
type Case struct {
	Set  string // "tiny-a", "tiny-b" or "nano"
	Name string // unique in its set, for instance "len17" or "france"

	Model     string      // checkpoint directory, absolute
	Prompt    string      // raw text that PromptIDs encode; empty for tiny sets and chats
	Chat      *ChatPrompt // the chat that PromptIDs render; nil for raw prompts
	PromptIDs []int

	Greedy []int  // tokens the oracle generates, the stop token included
	Text   string // Greedy decoded, control tokens spelled out; nano only
	Stop   bool   // the last greedy token is the stop token (else the length ran out)

	Margin   []float64   // [len(Greedy)] float64 logit distance of best to second best
	Rows64   [][]float64 // [len(Greedy)][vocab] float64 oracle logits, absolute accuracy 7e-12
	Err32    []float64   // [len(Greedy)] max abs error of the float32 oracle in each row
	Logits64 []float64   // [vocab] Rows64[0]: the prompt's last position
	Logits32 []float64   // [vocab] the same row by the float32 oracle

	StreamL2 []float64 // [layers] Euclidean norm of the stream at the prompt's last position
	Routes   []Route   // one per MoE layer
	Streams  *Streams  // whole per-layer tensors; only tiny len17 and nano france, else nil

	// LogitsSHA256 is the engine's own frozen hash (see HashRows); empty when
	// hashes.json has no entry yet.
	LogitsSHA256 string
}

// Key is the case's key in hashes.json, for instance "nano/france".
func (c *Case) Key() string { return c.Set + "/" + c.Name }

// Route is the router's choice in one MoE layer for every position that was fed:
// the prompt, then all greedy tokens but the last (spec C.11 steps 1 and 2).
type Route struct {
	Layer    int       `json:"layer"`
	IDs      [][]int   `json:"ids"`      // [positions][top-k] float64 oracle, best biased score first
	Margin   []float64 `json:"margin"`   // [positions] biased score of the last chosen minus the first left out
	IDs32    [][]int   `json:"ids32"`    // the float32 oracle's choice
	Margin32 []float64 `json:"margin32"` // and its margins
}

// Streams holds the float64 tensors of every layer at every prompt position.
type Streams struct {
	Layers      []Layer
	OutResProbs [][]float64 // [positions][sources] weights of the output mix (spec C.6)
	Final       [][]float64 // [positions][hidden] after model.norm, the head's input
}

// Layer holds one layer's tensors, each [positions][...]; names follow spec C.5.
type Layer struct {
	AttnResProbs  [][]float64 // weights of the mix before attention; nil in layer 0
	AttnIn        [][]float64 // normalised input of attention
	AttnOut       [][]float64
	MLPResProbs   [][]float64 // weights of the mix before the feed-forward part
	MLPIn         [][]float64 // normalised input of the feed-forward part
	MLPOut        [][]float64
	Stream        [][]float64 // the running stream after the layer
	RouterIDs     [][]int     // nil in dense layers
	RouterWeights [][]float64 // in the order of RouterIDs; nil in dense layers
}

// ChatPrompt is a conversation as the renderer receives it (spec D.5).
type ChatPrompt struct {
	Messages []Message         `json:"messages"`
	Thinking bool              `json:"thinking"`
	Effort   string            `json:"effort"` // empty: the default
	Tools    []json.RawMessage `json:"tools"`
}

// Message is one turn of a ChatPrompt.
type Message struct {
	Role      string          `json:"role"`
	Content   string          `json:"content"`
	Reasoning string          `json:"reasoning"`
	Name      string          `json:"name"`
	Tool      string          `json:"tool"`
	ToolCalls json.RawMessage `json:"tool_calls"`
}

// Dir is the golden directory of this source tree. It panics when the data are
// not there: the package serves tests and tools that run inside the tree.
func Dir() string { return dir() }

var dir = sync.OnceValue(func() string {
	if _, file, _, ok := runtime.Caller(0); ok {
		d := filepath.Dir(file)
		if _, err := os.Stat(filepath.Join(d, "hashes.json")); err == nil {
			return d
		}
	}
	// Built with -trimpath: the source path is not on this disk, the working directory is.
	wd, err := os.Getwd()
	for ; err == nil; wd = filepath.Dir(wd) {
		d := filepath.Join(wd, "golden")
		if _, err := os.Stat(filepath.Join(d, "hashes.json")); err == nil {
			return d
		}
		if wd == filepath.Dir(wd) {
			break
		}
	}
	panic("golden: no golden/hashes.json above the working directory: run inside the source tree")
})

// ModelDir is the checkpoint directory of a set.
func ModelDir(set string) string { return filepath.Join(Dir(), set, "model") }

// Cases loads every case of a set ("tiny-a", "tiny-b", "nano") in the order they were
// frozen. Error: unknown set, or a file that is missing or does not decode.
func Cases(set string) ([]Case, error) {
	var names []string
	if err := readJSON(set, "cases.json", &names); err != nil {
		return nil, err
	}
	hashes, err := LoadHashes()
	if err != nil {
		return nil, err
	}
	cases := make([]Case, len(names))
	for i, name := range names {
		c, err := load(set, name)
		if err != nil {
			return nil, err
		}
		c.LogitsSHA256 = hashes[c.Key()]
		cases[i] = *c
	}
	return cases, nil
}

// Find loads one case of a set.
func Find(set, name string) (*Case, error) {
	c, err := load(set, name)
	if err != nil {
		return nil, err
	}
	hashes, err := LoadHashes()
	if err != nil {
		return nil, err
	}
	c.LogitsSHA256 = hashes[c.Key()]
	return c, nil
}

// frozen mirrors the JSON that reference/oracle/freeze.py writes.
type frozen struct {
	Name      string      `json:"name"`
	PromptIDs []int       `json:"prompt_ids"`
	Prompt    string      `json:"prompt"`
	Chat      *ChatPrompt `json:"chat"`
	Text      string      `json:"text"`
	Stop      bool        `json:"stop"`
	Greedy    []int       `json:"greedy"`
	Margin    []float64   `json:"margin"`
	Err32     []float64   `json:"err32"`
	StreamL2  []float64   `json:"stream_l2"`
	Routes    []Route     `json:"routes"`
	Tensors   []struct {
		Name  string `json:"name"`
		Shape [2]int `json:"shape"`
	} `json:"tensors"`
}

func load(set, name string) (*Case, error) {
	var f frozen
	if err := readJSON(set, name+".json", &f); err != nil {
		return nil, err
	}
	packed, err := readFile(set, name+".fix")
	if err != nil {
		return nil, err
	}
	t := map[string][][]float64{}
	for _, d := range f.Tensors {
		if t[d.Name], packed, err = unpack(packed, d.Shape[0], d.Shape[1]); err != nil {
			return nil, fmt.Errorf("golden %s/%s: tensor %s: %w: pack it again (golden/README.md)", set, name, d.Name, err)
		}
	}
	if len(packed) != 0 || len(t["logits64"]) != len(f.Greedy) || len(t["logits32"]) != 1 {
		return nil, fmt.Errorf("golden %s/%s: tensors and description disagree: pack them again (golden/README.md)", set, name)
	}
	c := &Case{
		Set: set, Name: name, Model: ModelDir(set), Prompt: f.Prompt, Chat: f.Chat, PromptIDs: f.PromptIDs,
		Greedy: f.Greedy, Text: f.Text, Stop: f.Stop, Margin: f.Margin, Rows64: t["logits64"], Err32: f.Err32,
		Logits64: t["logits64"][0], Logits32: t["logits32"][0], StreamL2: f.StreamL2, Routes: f.Routes,
	}
	if t["final"] != nil {
		c.Streams = streams(f, t)
	}
	return c, nil
}

func streams(f frozen, t map[string][][]float64) *Streams {
	s := &Streams{OutResProbs: t["out_res_probs"], Final: t["final"], Layers: make([]Layer, len(f.StreamL2))}
	for i := range s.Layers {
		of := func(name string) [][]float64 { return t[fmt.Sprintf("%d.%s", i, name)] }
		s.Layers[i] = Layer{
			AttnResProbs: of("attn_res_probs"), AttnIn: of("attn_in"), AttnOut: of("attn_out"), MLPResProbs: of("mlp_res_probs"),
			MLPIn: of("mlp_in"), MLPOut: of("mlp_out"), Stream: of("stream"), RouterWeights: of("router_weights"),
		}
	}
	for _, r := range f.Routes {
		s.Layers[r.Layer].RouterIDs = r.IDs[:len(f.PromptIDs)]
	}
	return s
}

func readJSON(set, name string, v any) error {
	b, err := readFile(set, name)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("golden %s/%s: %w", set, name, err)
	}
	return nil
}

// ReadFile returns a file of a set's directory, path relative to it; a name that
// lies there only with the suffix .zst is decompressed.
func ReadFile(set, path string) ([]byte, error) {
	full := filepath.Join(Dir(), set, filepath.FromSlash(path))
	b, err := os.ReadFile(full)
	if err == nil || !os.IsNotExist(err) {
		return b, err
	}
	b, err = os.ReadFile(full + ".zst")
	if err != nil {
		return nil, fmt.Errorf("golden data: %w: sets are %v", err, Sets)
	}
	dec, err := zstd.NewReader(bytes.NewReader(b), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(64<<20))
	if err != nil {
		return nil, err
	}
	defer dec.Close()
	var out bytes.Buffer
	if _, err := dec.WriteTo(&out); err != nil {
		return nil, fmt.Errorf("golden %s/%s.zst: %w", set, path, err)
	}
	return out.Bytes(), nil
}

func readFile(set, name string) ([]byte, error) { return ReadFile(set, "frozen/"+name) }
