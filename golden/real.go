package golden

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Facts are published results of the released checkpoint, for people who own the
// weights. Their arithmetic path differs from this project's (Warning says how), so
// they show plausibility, never equality of bits.
type Facts struct {
	Source           string          `json:"source"`
	Warning          string          `json:"warning"`
	MLALatentNormEps float64         `json:"mla_latent_norm_eps"`
	ConfigSHA256     string          `json:"config_sha256"`
	IndexTensors     int             `json:"index_tensors"`
	IndexTotalSize   int64           `json:"index_total_size"` // bytes
	Prompts          []FactPrompt    `json:"prompts"`
	MaxAbsStream     map[int]float64 `json:"max_abs_stream"` // layer -> max |stream| over the positions of Prompts[0]
	RouterPositions  []int           `json:"-"`              // token ids at the positions of RouterIDs
	RouterIDs        map[int][][]int `json:"-"`              // layer -> [positions][16], best biased score first
}

// FactPrompt is one prompt with its published continuation.
type FactPrompt struct {
	Text      string    `json:"text"` // empty when only ids are known
	PromptIDs []int     `json:"prompt_ids"`
	Greedy    []int     `json:"greedy"`
	TopIDs    []int     `json:"top_ids"`    // of the last prompt position, best first; nil when not published
	TopLogits []float64 `json:"top_logits"` // in the order of TopIDs
	MeanLogit float64   `json:"mean_logit"` // over the vocabulary; meaningful when TopIDs is not nil
}

// RealFacts reads golden/real.
func RealFacts() (*Facts, error) {
	f := &Facts{}
	if err := readReal("facts.json", f); err != nil {
		return nil, err
	}
	var routes struct {
		PositionIDs []int           `json:"position_ids"`
		Layers      map[int][][]int `json:"layers"`
	}
	if err := readReal("router_ids_12_positions.json", &routes); err != nil {
		return nil, err
	}
	f.RouterPositions, f.RouterIDs = routes.PositionIDs, routes.Layers
	return f, nil
}

// RealConfig is the released config.json, byte for byte.
func RealConfig() ([]byte, error) { return os.ReadFile(filepath.Join(Dir(), "real", "config.json")) }

func readReal(name string, v any) error {
	b, err := os.ReadFile(filepath.Join(Dir(), "real", name))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("golden/real/%s: %w", name, err)
	}
	return nil
}
