package openai

import (
	"context"
	"io"

	"deltafin/engine"
	"deltafin/engine/tokenizer"
	"deltafin/prefill"
)

// Model is what the server needs of an engine. One goroutine at a time uses it and its
// sessions, but for Fork, Save and Bytes of a session that nothing feeds any more.
type Model interface {
	Info() Info
	Tokenizer() *tokenizer.Tokenizer
	NewSession() Session
	// LoadSession reads what Session.Save wrote, exactly size bytes of r.
	LoadSession(r io.Reader, size int64) (s Session, ids []int, logits []float32, err error)
	// ReadIDs reads only the tokens of a saved session.
	ReadIDs(r io.Reader, size int64) ([]int, error)
	// Counters accounts for all passes so far. It is called between passes and from
	// the callbacks of one.
	Counters() prefill.Counters
}

// Info describes a model.
type Info struct {
	EOS      int      // token that ends an answer
	Vocab    int      // number of token ids
	Context  int      // most tokens of a sequence
	Layers   int      // of one pass
	PassRows int      // most tokens of one pass
	Digest   [32]byte // identifies the weights
}

// Session is a sequence of tokens with the model's state of it; see [engine.Session].
// After an error of Feed or Generate it is not used again, but for what
// [engine.Session.Suspended] says.
type Session interface {
	Position() int
	Bytes() int64
	Fork() Session
	Suspended() (ids []int, layers int)
	Feed(ctx context.Context, ids []int, progress func(done, of int)) ([]float32, error)
	Generate(ctx context.Context, r engine.Request) (engine.Result, error)
	Save(w io.Writer, ids []int, logits []float32) error
}

// NewModel serves e with the tokenizer of its checkpoint.
func NewModel(e *engine.Engine, tok *tokenizer.Tokenizer) (Model, error) {
	digest, err := e.Digest()
	if err != nil {
		return nil, err
	}
	return &engineModel{e, tok, digest, e.CountRoutes()}, nil
}

type engineModel struct {
	e      *engine.Engine
	tok    *tokenizer.Tokenizer
	digest [32]byte
	counts *engine.Routes
}

func (m *engineModel) Info() Info {
	c := m.e.Config()
	return Info{
		EOS: c.EOS, Vocab: c.Vocab, Context: m.e.Ledger().Context, Layers: c.Layers,
		PassRows: m.e.Ledger().PassRows, Digest: m.digest,
	}
}
func (m *engineModel) Tokenizer() *tokenizer.Tokenizer { return m.tok }
func (m *engineModel) NewSession() Session             { return &engineSession{m.e.NewSession(), m} }
func (m *engineModel) Counters() prefill.Counters      { return m.e.Model().Counters() }

// Machine is for GET /events; see [Watched].
func (m *engineModel) Machine() Machine {
	c, st := m.e.Config(), m.e.Storage()
	now := Machine{
		Layer: m.counts.Layer(), Experts: (c.Layers - c.FirstDense) * c.Experts,
		ResidentExperts: st.Experts.ResidentExperts, ResidentBytes: st.Experts.ResidentBytes, Limit: m.e.Ledger().Limit,
	}
	for _, d := range m.e.Drives() {
		now.Drives = append(now.Drives, Drive{Name: d.Name, Bytes: d.Bytes, Failed: d.Failed})
	}
	for _, p := range st.Spine.Pieces {
		if p.Resident {
			now.DenseResident += p.Bytes
		} else {
			now.DenseStreamed += p.Bytes
		}
	}
	return now
}

// Heat is for GET /events; see [Watched].
func (m *engineModel) Heat() Heat { return newHeat(m.counts.Counts()) }

func (m *engineModel) LoadSession(r io.Reader, size int64) (Session, []int, []float32, error) {
	s, ids, logits, err := m.e.LoadSession(r, size, m.digest)
	if err != nil {
		return nil, nil, nil, err
	}
	return &engineSession{s, m}, ids, logits, nil
}

func (m *engineModel) ReadIDs(r io.Reader, size int64) ([]int, error) {
	return m.e.ReadSessionIDs(r, size, m.digest)
}

type engineSession struct {
	*engine.Session
	m *engineModel
}

func (s *engineSession) Fork() Session { return &engineSession{s.Session.Fork(), s.m} }

func (s *engineSession) Save(w io.Writer, ids []int, logits []float32) error {
	return s.Session.Save(w, s.m.digest, ids, logits)
}
