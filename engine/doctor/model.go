package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"syscall"

	"deltafin/engine"
	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/expert"
	"deltafin/engine/hub"
	"deltafin/engine/k3"
	"deltafin/engine/plan"
	"deltafin/engine/spine"
	"deltafin/engine/tokenizer"
)

// examination is one call of Examine.
type examination struct {
	o    Options
	r    *Report
	host host

	ck      *checkpoint.Checkpoint // nil if it cannot be opened
	config  *checkpoint.Config     // nil if it cannot be read
	filling bool                   // its experts come when they are used
	dirs    []string               // where the model's files really are
	missing int64                  // bytes of the model that a fetch has still to bring
	places  []*place
	pack    string         // the packed dense weights, if a run can use them
	ledger  *engine.Ledger // nil if the memory is too little
}

func (e *examination) close() {
	if e.ck != nil {
		e.ck.Close()
	}
}

// expertBytes is the size of the reads that a run of the model makes.
func (e *examination) expertBytes() int64 {
	if e.ck != nil {
		return e.ck.ExpertLayout().ExpertBytes
	}
	return plan.ShapeOf(checkpoint.K3()).ExpertBytes
}

const (
	fetchAgain = "run 'deltafin fetch --full' on the directory, which fetches what is missing or wrong, or copy the file again"
	mostFaults = 20 // that are told one by one
)

func (e *examination) model(context.Context) {
	if e.o.Model == "" {
		e.memory()
		return
	}
	if info, err := os.Stat(e.o.Model); err != nil || !info.IsDir() {
		why := "is not a directory"
		if err != nil {
			why = cause(err).Error()
		}
		e.tell(Finding{ID: "model.files", Level: Error, Fault: Model, What: e.o.Model, Value: why, Do: "give the directory of a checkpoint, or make one with 'deltafin fetch --full DIR'"})
		return
	}
	e.dirs = []string{e.o.Model}
	in, storeErr := hub.Inspect(e.o.Model)
	e.tell(store(e.o.Model, in, storeErr))
	if in != nil {
		e.missing = in.Missing
	}
	e.filling = hub.IsStream(e.o.Model)
	var err error
	if e.filling {
		e.ck, err = checkpoint.OpenFilling(e.o.Model, nil)
	} else {
		e.ck, err = checkpoint.Open(e.o.Model)
	}
	shards := e.files(in, err)
	e.tell(e.tokenizer())
	e.spine()
	copies := e.experts()
	e.tell(e.host.descriptors(shards, copies))
	e.memory()
}

// store judges what the record of a fetch says.
func store(dir string, in *hub.Inspection, err error) Finding {
	f := Finding{ID: "model.store", Level: OK, What: dir}
	switch {
	case err != nil:
		f.Level, f.Value, f.Do = Warning, strings.TrimPrefix(err.Error(), dir+": "), "use the version of deltafin that wrote it, or fetch into a new directory; a run does not need it"
	case in == nil:
		f.Level, f.Value, f.Do = Note, "was not fetched by deltafin: nothing here knows the files' digests", "'deltafin fetch --full' on the directory reads what is here, compares it, and fetches only what is missing or wrong"
	case len(in.Bad) > 0:
		f.Level, f.Value, f.Do = Note, fmt.Sprintf("%s at %.12s: %d of %d files are not whole, %s are still to come", in.Repo, in.Revision, len(in.Bad), in.Files, gb(in.Missing)),
			"the same 'deltafin fetch --full' goes on where it stopped"
	case in.Uninstalled:
		f.Level, f.Fault, f.Value, f.Do = Error, Model, fmt.Sprintf("%s at %.12s: fills on demand, and is not completely installed", in.Repo, in.Revision), "run 'deltafin fetch --stream' on the directory, which goes on where it stopped"
	case in.OnDemand > 0:
		f.Level, f.Value, f.Do = Note, fmt.Sprintf("%s at %.12s: %d of %d files fill on demand", in.Repo, in.Revision, in.OnDemand, in.Files), "'deltafin fetch --full' on the directory fetches the rest"
	case in.Unproven > 0:
		f.Level, f.Value, f.Do = Note, fmt.Sprintf("%s at %.12s: %d of %d files were changed since their digests were compared", in.Repo, in.Revision, in.Unproven, in.Files), "run 'deltafin verify --deep' on the directory"
	default:
		f.Value = fmt.Sprintf("%s at %.12s: %d files, %s, each was proved when it came", in.Repo, in.Revision, in.Files, gb(in.Bytes))
	}
	return f
}

// files tells what is wrong with the model's files, each by its name, and returns how
// many shards there should be. Only headers are read.
func (e *examination) files(in *hub.Inspection, openErr error) (shards int) {
	var lines []string
	remedy := map[string]string{} // of lines that need another than fetchAgain
	if in != nil {
		for _, d := range in.Bad {
			lines = append(lines, d.String())
		}
	}
	if e.ck != nil {
		e.config = e.ck.Config()
		var dirs []string
		for i := range e.ck.Files() {
			if e.ck.File(i) == nil {
				continue
			}
			shards++
			if path, err := filepath.EvalSymlinks(e.ck.Path(i)); err == nil && !slices.Contains(dirs, filepath.Dir(path)) {
				dirs = append(dirs, filepath.Dir(path))
			}
		}
		if len(dirs) > 0 {
			e.dirs = dirs
		}
	} else {
		s := checkpoint.Examine(e.o.Model, e.filling)
		e.config, shards = s.Config, s.Shards
		for _, err := range s.Faults {
			name, _, _ := strings.Cut(err.Error(), ": ")
			if !slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, name+": ") }) {
				lines = append(lines, err.Error())
			}
			if errors.Is(err, fs.ErrPermission) {
				remedy[err.Error()] = "let this user read it"
			}
		}
		if len(s.Faults) == 0 && !errors.Is(openErr, syscall.EMFILE) {
			lines = append(lines, strings.TrimPrefix(openErr.Error(), e.o.Model+": "))
		}
	}
	for i, l := range lines {
		f := Finding{ID: "model.files", Level: Error, Fault: Model, What: e.o.Model, Value: l, Do: cmp.Or(remedy[l], fetchAgain)}
		if i == mostFaults {
			f.Value = fmt.Sprintf("and %d more files", len(lines)-i)
			e.tell(f)
			break
		}
		e.tell(f)
	}
	if len(lines) == 0 {
		e.tell(Finding{ID: "model.files", Level: OK, What: e.o.Model, Value: fmt.Sprintf("%d shards, as the index and their headers say; the weights themselves were not read", shards)})
	}
	return shards
}

func (e *examination) tokenizer() Finding {
	f := Finding{ID: "model.tokenizer", Level: OK, What: e.o.Model}
	tok, err := tokenizer.Open(e.o.Model)
	switch {
	case err != nil:
		f.Level, f.Fault, f.Value, f.Do = Error, Model, strings.TrimPrefix(reason(err).Error(), e.o.Model+": "), "copy tiktoken.model and tokenizer_config.json of the model there; only 'run --ids' works without them"
	case e.config != nil && tok.Size() != e.config.Vocab:
		f.Level, f.Fault, f.Do = Error, Model, "use the tokenizer files that belong to the weights"
		f.Value = fmt.Sprintf("has %d ids, the model %d", tok.Size(), e.config.Vocab)
	default:
		f.Value = fmt.Sprintf("%d ids", tok.Size())
	}
	return f
}

const unread = "not looked at: the model has to be sound first"

func (e *examination) spine() {
	if e.o.Spine == "" {
		return
	}
	f := Finding{ID: "model.spine", Level: OK, What: e.o.Spine, Value: "the dense weights of this model, by its table; digests are compared when a run first reads them"}
	if e.ck == nil {
		f.Level, f.Value, f.Do = Note, unread, "see model.files and descriptors"
	} else if exact, err := spine.CheckPack(e.ck, e.o.Spine); err != nil {
		f.Level, f.Fault, f.Value, f.Do = Error, Model, strings.TrimPrefix(err.Error(), e.o.Spine+": "), "write it again with 'deltafin pack spine', or leave --spine out"
	} else if !exact {
		e.pack = e.o.Spine
		f.Level, f.Value, f.Do = Note, "holds dense weights in eight bits: the model is not the released one", "pack without --int8 for the released weights"
	} else {
		e.pack = e.o.Spine
	}
	e.tell(f)
}

// experts looks at each directory of copies and returns how many files they have.
func (e *examination) experts() (files int) {
	drives := drive.NewSet(drive.Options{Warn: func(string) {}})
	defer drives.Close()
	for _, dir := range e.o.Experts {
		f := Finding{ID: "model.experts", Level: OK, What: dir}
		if entries, err := os.ReadDir(dir); err == nil {
			files += len(entries)
		}
		switch {
		case hub.IsSite(dir):
			f.What, f.Level, f.Value, f.Do = hub.Redact(dir), Note, "not looked at: this examination uses no network", "see what 'deltafin run --stats' says about it"
		case e.ck == nil:
			f.Level, f.Value, f.Do = Note, unread, "see model.files and descriptors"
		default:
			n, err := expert.Held(e.ck, drives, dir)
			if err != nil {
				f.Level, f.Fault, f.Value, f.Do = Error, Model, strings.TrimPrefix(err.Error(), dir+": "), "stage it again with 'deltafin place', or leave this --experts out"
			} else {
				f.Value = fmt.Sprintf("copies of %d experts of this model, by their headers; 'deltafin place verify' reads them", n)
			}
		}
		e.tell(f)
	}
	return files
}

// memory asks the engine how it would share the memory out, and how long a context it
// could hold: for the full Kimi K3 where no model was given.
func (e *examination) memory() {
	ck, id := e.ck, "model.memory"
	switch {
	case e.o.Model == "":
		ck, id = checkpoint.Sketch("the full Kimi K3", checkpoint.K3()), "model"
	case ck == nil && e.config != nil:
		ck = checkpoint.Sketch(e.o.Model, e.config)
	case ck == nil:
		e.tell(Finding{ID: id, Level: Note, What: e.o.Model, Value: "not looked at: config.json has to be sound first", Do: "see model.files"})
		return
	}
	l, err := engine.Account(ck, engine.Options{Memory: e.host.budget(), Context: e.o.Context, SpinePack: e.pack, ExpertDirs: e.o.Experts, Draft: []string{"ngram"}})
	if e.o.Model == "" {
		e.tell(noModel(l.Floor, e.host.budget(), err))
		return
	}
	tokens := mostTokens(ck.Config(), l)
	if err != nil {
		remedy := "free memory, or give more with --memory"
		if tokens > 0 {
			remedy += fmt.Sprintf(", or lower --context to %d", tokens)
		}
		e.tell(Finding{ID: id, Level: Error, Fault: Resources, What: e.o.Model, Value: strings.TrimPrefix(err.Error(), e.o.Model+": "), Do: remedy})
		return
	}
	e.ledger = &l
	e.tell(Finding{ID: id, Level: OK, What: e.o.Model, Value: l.String(), Numbers: map[string]float64{"floor_bytes": float64(l.Floor)}})
	e.tell(longest(tokens, ck.Config().MaxPositions, e.host.budget()))
}

// mostTokens is the longest context that a ledger's limit has room for, 0 if none:
// beyond the floor the state is what grows.
func mostTokens(c *checkpoint.Config, l engine.Ledger) int {
	spare := l.Limit - l.Floor + k3.StateBytes(c, l.Context)
	return sort.Search(c.MaxPositions, func(i int) bool { return k3.StateBytes(c, i+1) > spare })
}

// noModel says what the machine is good for, where no model was given.
func noModel(floor, budget int64, err error) Finding {
	f := Finding{
		ID: "model", Level: Note, Value: fmt.Sprintf("none was given; the full Kimi K3 would run: it needs %s of memory, and more makes it faster", gb(floor)),
		Do: "give --model DIR to have one examined, after 'deltafin fetch --full DIR'", Numbers: map[string]float64{"k3_floor_bytes": float64(floor)},
	}
	if err != nil {
		f.Level, f.Value, f.Do = Warning, fmt.Sprintf("none was given; the full Kimi K3 needs %s of memory, and %s may be used", gb(floor), gb(budget)), "free some, or use a machine with more"
	}
	return f
}

func longest(tokens, model int, budget int64) Finding {
	f := Finding{
		ID: "model.context", Level: OK, Value: fmt.Sprintf("up to %d tokens, all that the model can", tokens),
		Numbers: map[string]float64{"tokens": float64(tokens), "model_tokens": float64(model)},
	}
	if tokens < model {
		f.Level, f.Do = Note, "give more memory for longer ones; ask for less than the most, as it leaves no memory for weights"
		f.Value = fmt.Sprintf("up to %d tokens in %s; the model can %d", tokens, gb(budget), model)
	}
	return f
}
