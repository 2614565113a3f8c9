package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"deltafin/engine"
	"deltafin/engine/checkpoint"
	"deltafin/engine/checkpoint/checkpointtest"
	"deltafin/engine/drive"
	"deltafin/engine/expert"
	"deltafin/engine/hub"
	"deltafin/engine/hub/hubtest"
	"deltafin/engine/kernel"
	"deltafin/engine/machine"
	"deltafin/engine/plan"
	"deltafin/engine/spine"
	"deltafin/golden"
)

// good is a machine about which there is nothing to say.
func good() host {
	return host{
		arch: "amd64", features: []string{"AVX2", "FMA"}, forms: []string{"portable", "avx2"}, active: "avx2",
		online: 8, threads: 8, files: 1024, kept: 896,
		memory: machine.Memory{Total: 64e9, Available: 60e9, SwapTotal: 4e9},
	}
}

func TestFindingsAboutTheMachine(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(h *host)
		find   func(h *host) Finding
		level  Level
		fault  Fault
		value  string // part of it
		do     string // likewise
	}{
		{"good", nil, (*host).processor, OK, "", "amd64 with AVX2, FMA; avx2 kernels in use, of portable, avx2", ""},
		{"no AVX2", func(h *host) { h.features, h.forms, h.active = nil, []string{"portable"}, "portable" }, (*host).processor, Warning, "", "portable kernels in use", "with AVX2 and FMA"},
		{"arm64", func(h *host) {
			h.arch, h.features, h.forms, h.active = "arm64", []string{"ASIMD"}, []string{"portable"}, "portable"
		}, (*host).processor, Note, "", "arm64 with ASIMD; portable", "no vector kernels for this architecture"},

		{"good", nil, (*host).kernels, OK, "", "portable, avx2 give the right bits", ""},
		{"wrong", func(h *host) { h.check = errors.New("the avx2 kernels do not compute") }, (*host).kernels, Error, Machine, "the avx2 kernels do not", "do not trust this machine"},

		{"good", nil, (*host).cores, OK, "", "8 processors, 8 threads", ""},
		{"a quota", func(h *host) { h.quota, h.threads = 3.5, 4 }, (*host).cores, Note, "", "8 processors, 3.5 of them by the cgroup's quota, 4 threads", "raise the CPU limit"},
		{"less than two by quota", func(h *host) { h.quota, h.threads = .5, 2 }, (*host).cores, Note, "", "0.5 of them", "raise the CPU limit"},
		{"a quota as large as the machine", func(h *host) { h.quota = 8 }, (*host).cores, OK, "", "8 of them", ""},
		{"more threads than the quota", func(h *host) { h.quota = 2 }, (*host).cores, Warning, "", "2 of them", "unset GOMAXPROCS, or set it to 2"},
		{"more threads than processors", func(h *host) { h.threads = 9 }, (*host).cores, Warning, "", "9 threads", "set it to 8"},
		{"fewer threads than processors", func(h *host) { h.threads = 3 }, (*host).cores, Note, "", "3 threads", "set it to 8"},

		{"good", nil, (*host).memoryFound, OK, "", "60.0 GB available of 64.0 GB, a run may use 45.0 GB", ""},
		{"a cgroup", func(h *host) { h.memory.Limit, h.memory.Available = 4e9, 3.6e9 }, (*host).memoryFound, Note, "", "3.6 GB available of the cgroup's 4.0 GB (the machine has 64.0 GB), a run may use 2.7 GB", "raise the memory limit"},
		{"more is asked than there is", func(h *host) { h.asked = 61e9 }, (*host).memoryFound, Warning, "", "may use 61.0 GB", "lower --memory"},
		{"less is asked than there is", func(h *host) { h.asked = 30e9 }, (*host).memoryFound, OK, "", "may use 30.0 GB", ""},

		{"unused", nil, (*host).swap, OK, "", "0 bytes of 4.0 GB used", ""},
		{"none", func(h *host) { h.memory.SwapTotal = 0 }, (*host).swap, OK, "", "none", ""},
		{"used", func(h *host) { h.memory.SwapUsed = 2e9 }, (*host).swap, Note, "", "2.0 GB of 4.0 GB used", "lower --memory"},

		{"no model", nil, all(0, 0), OK, "", "1024 files", ""},
		{"no model, few", func(h *host) { h.files, h.kept = 64, 32 }, all(0, 0), Note, "", "enough for the built-in model and too few for the full Kimi K3", "ulimit -n 208"},
		{"a small model, few", func(h *host) { h.files, h.kept = 64, 32 }, all(14, 0), OK, "", "64 files", ""},
		{"the full model, few", func(h *host) { h.files, h.kept = 64, 32 }, all(96, 0), Error, Resources, "too few for 96 shards and 0 copies", "ulimit -n 208"},
		{"the full model, as many as were said", func(h *host) { h.files, h.kept = 208, 104 }, all(96, 0), OK, "", "208 files", ""},
		{"the full model and copies", func(h *host) { h.files, h.kept = 256, 128 }, all(96, 92), OK, "", "256 files", ""},
		{"the full model and copies, few", func(h *host) { h.files, h.kept = 230, 115 }, all(96, 92), OK, "", "230 files", ""},
		{"the full model and copies, too few", func(h *host) { h.files, h.kept = 220, 110 }, all(96, 92), Error, Resources, "96 shards and 92 copies", "ulimit -n 300"},
	} {
		h := good()
		if c.change != nil {
			c.change(&h)
		}
		f := c.find(&h)
		want(t, c.name, f, f.ID, c.level, c.fault, c.value, c.do)
	}
}

func all(shards, copies int) func(*host) Finding {
	return func(h *host) Finding { return h.descriptors(shards, copies) }
}

// want holds a finding to what it should say, and to what every finding must be.
func want(t *testing.T, name string, f Finding, id string, level Level, fault Fault, value, do string) {
	t.Helper()
	if f.ID != id || f.Level != level || f.Fault != fault || !strings.Contains(f.Value, value) || !strings.Contains(f.Do, do) {
		t.Errorf("%s: %s: got %+v, want %s, fault %q, value %q, do %q", id, name, f, level, fault, value, do)
	}
	sound(t, f)
}

// sound is what every finding must be.
func sound(t *testing.T, f Finding) {
	t.Helper()
	if (f.Do == "") != (f.Level == OK) || (f.Fault != "") != (f.Level == Error) || !slices.Contains(levels, f.Level) || f.Value == "" || strings.Contains(f.Value+f.Do+f.What, "\n") {
		t.Errorf("%+v: one line; what to do unless all is well; a fault if and only if it is an error", f)
	}
}

func TestFindingsAboutADrive(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(p *place)
		find   func(p *place) Finding
		level  Level
		fault  Fault
		value  string
		do     string
	}{
		{"good", nil, (*place).fileSystem, OK, "", "ext4", ""},
		{"read-only", func(p *place) { p.fs.ReadOnly = true }, (*place).fileSystem, OK, "", "ext4, mounted read-only", ""},
		{"network", func(p *place) { p.fs = machine.FileSystem{Name: "nfs", Kind: machine.Network} }, (*place).fileSystem, Warning, "", "nfs, a network file system", "on a drive of this machine"},
		{"overlay", func(p *place) { p.fs = machine.FileSystem{Name: "overlay", Kind: machine.Overlay} }, (*place).fileSystem, Warning, "", "overlay", "mount a directory"},
		{"memory", func(p *place) { p.fs = machine.FileSystem{Name: "tmpfs", Kind: machine.InRAM} }, (*place).fileSystem, Note, "", "tmpfs", "memory"},

		{"good", nil, (*place).reads, OK, "", "2.50 GB/s in reads of 17.5 MB as a run makes them, 0.12 ms for a read of 4 KiB; direct, in blocks", ""},
		{"not measured on purpose", func(p *place) { p.quick, p.rate = true, 0 }, (*place).reads, OK, "", "direct, in blocks", ""},
		{"buffered", func(p *place) { p.direct, p.mode = false, "buffered: the file system says that it has none" }, (*place).reads, Warning, "", "buffered: the file system says", "local file system"},
		{"buffered in memory", func(p *place) { p.direct, p.mode, p.fs.Kind = false, "buffered: in memory", machine.InRAM }, (*place).reads, OK, "", "buffered", ""},
		{"nothing there", func(p *place) { p.err = errNothing }, (*place).reads, Note, "", "not measured: holds no file", "a directory that holds a whole model"},
		{"broken", func(p *place) { p.err, p.failed = syscall.EIO, true }, (*place).reads, Error, Machine, "reads fail: input/output error", "smartctl"},

		{"good", nil, (*place).space, OK, "", "100.0 GB free", ""},
		{"room for the rest", func(p *place) { p.need = 90e9 }, (*place).space, OK, "", "90.0 GB of the model are still to come", ""},
		{"no room for the rest", func(p *place) { p.need = 101e9 }, (*place).space, Error, Resources, "101.0 GB of the model are still to come", "--spread"},
	} {
		if c.name == "broken" && runtime.GOOS == "windows" {
			c.value = "reads fail"
		}
		p := &place{
			dirs: []string{"/models/k3"}, free: 100e9, fs: machine.FileSystem{Name: "ext4", Kind: machine.Local},
			mode: "direct, in blocks of 4096 bytes", direct: true, rate: 2.5e9, size: 17547264, latency: 120 * time.Microsecond,
		}
		if c.change != nil {
			c.change(p)
		}
		f := c.find(p)
		want(t, c.name, f, f.ID, c.level, c.fault, c.value, c.do)
		if f.What != "/models/k3" {
			t.Errorf("%s: about %q", c.name, f.What)
		}
	}
}

func TestFindingsAboutAStore(t *testing.T) {
	in := func(change func(in *hub.Inspection)) *hub.Inspection {
		in := &hub.Inspection{Repo: "moonshotai/Kimi-K3", Revision: "0123456789abcdef", Files: 109, Bytes: 1560e9}
		change(in)
		return in
	}
	for _, c := range []struct {
		name  string
		in    *hub.Inspection
		err   error
		level Level
		value string
		do    string
	}{
		{"good", in(func(*hub.Inspection) {}), nil, OK, "moonshotai/Kimi-K3 at 0123456789ab: 109 files, 1560.0 GB", ""},
		{"not ours", nil, nil, Note, "was not fetched by deltafin", "fetch --full"},
		{"unfinished", in(func(in *hub.Inspection) { in.Bad, in.Missing = make([]hub.Damage, 3), 5e9 }), nil, Note, "3 of 109 files are not whole, 5.0 GB", "goes on where it stopped"},
		{"on demand", in(func(in *hub.Inspection) { in.OnDemand = 96 }), nil, Note, "96 of 109 files fill on demand", "fetch --full"},
		{"changed", in(func(in *hub.Inspection) { in.Unproven = 2 }), nil, Note, "2 of 109 files were changed", "verify --deep"},
		{"another version", nil, errors.New("/k3: deltafin-inventory.json: format 9, this program reads 1"), Warning, "deltafin-inventory.json: format 9", "the version of deltafin that wrote it"},
	} {
		want(t, c.name, store("/k3", c.in, c.err), "model.store", c.level, "", c.value, c.do)
	}
}

func TestFindingsOfTheCanary(t *testing.T) {
	for _, c := range []struct {
		name  string
		s     song
		level Level
		fault Fault
		value string
	}{
		{"good", song{23, canaryHash, .2, nil}, OK, "", "23 tokens of the built-in model in 0.2 s"},
		{"wrong", song{23, strings.Repeat("0", 64), .2, nil}, Error, Machine, "hash 0000000000000000, expected 37a4"},
		{"an error", song{err: errors.New("NaN")}, Error, Machine, "does not run: NaN"},
		{"too little memory", song{err: fmt.Errorf("x: %w", engine.ErrMemory)}, Error, Resources, "does not run"},
		{"too few files", song{err: fmt.Errorf("x: %w", syscall.EMFILE)}, Error, Resources, "does not run"},
	} {
		want(t, c.name, c.s.judge(), "canary", c.level, c.fault, c.value, "")
	}
}

func TestTheCanaryIsAGoldenCase(t *testing.T) {
	c, err := golden.Find("nano", "france")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(c.PromptIDs, canaryPrompt); d != "" || c.LogitsSHA256 != canaryHash || len(c.Greedy) != canaryTokens+1 || !c.Stop {
		t.Errorf("%s hash %s, %d tokens", d, c.LogitsSHA256, len(c.Greedy))
	}
}

func TestFindingsAboutTheCache(t *testing.T) {
	dir := t.TempDir()
	want(t, "there", cache(dir, true), "cache", OK, "", "holds the built-in model", "")
	want(t, "can be made", cache(filepath.Join(dir, "a", "b"), false), "cache", OK, "", "has room", "")
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	want(t, "a file", cache(filepath.Join(file, "a"), false), "cache", Warning, "", "cannot be written to: "+file+" is not a directory", "XDG_CACHE_HOME")
	if runtime.GOOS == "windows" || os.Geteuid() == 0 {
		t.Log("NOT RUN: no directory is closed to this user")
	} else {
		closed := filepath.Join(dir, "closed")
		if err := os.Mkdir(closed, 0o555); err != nil {
			t.Fatal(err)
		}
		want(t, "closed", cache(filepath.Join(closed, "a"), false), "cache", Warning, "", "cannot be written to: permission denied", "XDG_CACHE_HOME")
	}
	if runtime.GOOS == "linux" { // nobody can write there
		want(t, "read-only", cache("/proc/sys/a", false), "cache", Warning, "", "", "XDG_CACHE_HOME")
	}
}

func TestFindingsAboutSpeedAndContext(t *testing.T) {
	m := plan.Machine{Drives: []float64{2e9}, DenseRow: 30e9, ExpertRow: 10e9, DenseRows: 1e11, ExpertRows: 1e11}
	l, err := engine.Account(checkpoint.Sketch("/k3", checkpoint.K3()), engine.Options{Memory: 24e9})
	if err != nil {
		t.Fatal(err)
	}
	f := predict(plan.ShapeOf(checkpoint.K3()), l, m, "/k3")
	want(t, "speed", f, "model.speed", OK, "", "s per token", "")
	if n := f.Numbers; n["token_bytes"] <= 0 || n["token_seconds"] < n["token_read_seconds"] || n["first_token_of_512_seconds"] <= n["token_seconds"] {
		t.Errorf("%v", n)
	}
	want(t, "no model", noModel(3.2e9, 8e9, nil), "model", Note, "", "the full Kimi K3 would run: it needs 3.2 GB", "--model DIR")
	want(t, "no model, too little", noModel(3.2e9, 2e9, engine.ErrMemory), "model", Warning, "", "needs 3.2 GB of memory, and 2.0 GB may be used", "free some")
	want(t, "all", longest(4096, 4096, 1e9), "model.context", OK, "", "up to 4096 tokens, all", "")
	want(t, "bounded", longest(5000, 1<<20, 4e9), "model.context", Note, "", "up to 5000 tokens in 4.0 GB; the model can 1048576", "give more memory")
}

func TestTheLongestContextIsTheLastThatIsAdmitted(t *testing.T) {
	ck := checkpoint.Sketch("k3", checkpoint.K3())
	for _, c := range []struct {
		memory  int64
		context int // that is asked for
		all     bool
	}{{8e9, 0, false}, {8e9, 1 << 20, false}, {200e9, 0, true}} {
		account := func(context int) (engine.Ledger, error) {
			return engine.Account(ck, engine.Options{Memory: c.memory, Context: context})
		}
		l, _ := account(c.context)
		n := mostTokens(ck.Config(), l)
		if _, err := account(n); err != nil || n < 4096 {
			t.Errorf("%+v: %d tokens: %v", c, n, err)
		}
		if most := ck.Config().MaxPositions; c.all != (n == most) {
			t.Errorf("%+v: %d tokens of %d", c, n, most)
		} else if _, err := account(n + 1); n < most && err == nil {
			t.Errorf("%+v: %d tokens are admitted too", c, n+1)
		}
	}
	l, err := engine.Account(ck, engine.Options{Memory: 1e9})
	if n := mostTokens(ck.Config(), l); err == nil || n != 0 {
		t.Errorf("too little for one token: %d tokens, %v", n, err)
	}
}

// examine is Examine without measurements, as a map from ids to the findings.
func examine(t *testing.T, o Options) (*Report, map[string][]Finding) {
	t.Helper()
	o.Quick = true
	o.Cache, o.Unpacked = t.TempDir(), true
	var found []Finding
	o.Found = func(f Finding) { found = append(found, f) }
	r, err := Examine(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(found, r.Findings); d != "" {
		t.Errorf("what was told is not what was reported: %s", d)
	}
	byID := map[string][]Finding{}
	for _, f := range r.Findings {
		sound(t, f)
		byID[f.ID] = append(byID[f.ID], f)
	}
	return r, byID
}

func TestAModelIsExaminedBehindItsFirstFault(t *testing.T) {
	const third, fifth = "model-00003-of-000014.safetensors", "model-00005-of-000014.safetensors"
	for _, c := range []struct {
		name   string
		damage func(d *checkpointtest.Dir)
		o      Options
		errors map[string]string // what the errors of an id say, together; beside that of the tokenizer, which tiny-a has not
		unread string            // id that could not be looked at
	}{
		{name: "sound", errors: map[string]string{"model.tokenizer": "tiktoken.model: "}},
		{
			name: "truncated and missing", damage: func(d *checkpointtest.Dir) { d.Truncate(fifth, 100); d.Remove(third) },
			errors: map[string]string{"model.files": third + ": is not there: fetch it|" + fifth + ": is 446084 bytes long, 100 short of the 446184 its header describes: the file is truncated, fetch it again"},
		},
		{
			name: "a directory in a shard's place", damage: func(d *checkpointtest.Dir) {
				d.Remove(third)
				if err := os.Mkdir(filepath.Join(d.Path, third), 0o755); err != nil {
					t.Fatal(err)
				}
			},
			errors: map[string]string{"model.files": third + ": is not a regular file"},
		},
		{
			name: "the config and a shard", damage: func(d *checkpointtest.Dir) { d.DropConfig("text_config.rms_norm_eps"); d.Truncate(fifth, 100) },
			errors: map[string]string{"model.files": "config.json: text_config.rms_norm_eps is missing, expected a number above 0 and below 1: use the config.json that belongs to the weights|" + fifth},
			unread: "model.memory",
		},
		{
			name: "what Open alone sees", damage: func(d *checkpointtest.Dir) {
				d.Put("language_model.model.layers.4.self_attn.A_log", 4*31, []byte{0, 0, 0x80, 0x3f})
			},
			errors: map[string]string{"model.files": "model.layers.4.self_attn.A_log"},
		},
		{name: "too little memory", o: Options{Memory: 50e6}, errors: map[string]string{"model.memory": "not enough memory: it needs 0."}},
		{
			name: "copies that are not there, and on a network", o: Options{Spine: "/nowhere/spine", Experts: []string{"/nowhere/experts", "http://host/x"}},
			errors: map[string]string{"model.spine": "is not there", "model.experts": "no such file"}, unread: "model.experts",
		},
	} {
		if _, ok := c.errors["model.tokenizer"]; !ok {
			c.errors["model.tokenizer"] = ""
		}
		t.Run(c.name, func(t *testing.T) {
			d := checkpointtest.Copy(t, golden.ModelDir("tiny-a"))
			if c.damage != nil {
				c.damage(d)
			}
			c.o.Model = d.Path
			r, byID := examine(t, c.o)
			if r.Worst != Error || r.Fault != Model {
				t.Errorf("worst is %s, about %s", r.Worst, r.Fault)
			}
			for id, fs := range byID {
				var values []string
				for _, f := range fs {
					if f.Level == Error {
						values = append(values, f.Value)
					}
				}
				want, ok := c.errors[id]
				if got := strings.Join(values, "|"); ok != (got != "") || !strings.Contains(got, want) {
					t.Errorf("%s: errors %q, want %q", id, got, want)
				}
			}
			for _, id := range slices.Concat(slices.Collect(maps.Keys(c.errors)), []string{"processor", "memory", "drive.reads", "descriptors", "model.store"}) {
				if len(byID[id]) == 0 {
					t.Errorf("%s was not told", id)
				}
			}
			if c.unread != "" && !slices.ContainsFunc(byID[c.unread], func(f Finding) bool { return f.Level == Note && strings.HasPrefix(f.Value, "not looked at") }) {
				t.Errorf("%s: %+v, want a note that it was not looked at", c.unread, byID[c.unread])
			}
		})
	}
}

func TestASoundModelWithCopiesAndPacks(t *testing.T) {
	model := golden.ModelDir("nano")
	ck, err := checkpoint.Open(model)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	dir := t.TempDir()
	for name, narrow := range map[string]bool{"spine.bin": false, "int8.bin": true} {
		if err := spine.Pack(t.Context(), ck, filepath.Join(dir, name), narrow, nil); err != nil {
			t.Fatal(err)
		}
	}
	copies := filepath.Join(dir, "copies")
	p, err := expert.PlacePlan(ck, nil, 1e9, []expert.PlaceTarget{{Dir: copies, Bytes: 2e6, Rate: 1e9}})
	if err != nil {
		t.Fatal(err)
	}
	drives := drive.NewSet(drive.Options{Warn: func(string) {}})
	defer drives.Close()
	if err := expert.PlaceStage(t.Context(), ck, drives, p.Dirs[0], expert.StageOptions{Reserve: -1}); err != nil {
		t.Fatal(err)
	}
	r, byID := examine(t, Options{Model: model, Experts: []string{copies}, Spine: filepath.Join(dir, "spine.bin")})
	if r.Fault != "" {
		t.Errorf("%+v", r)
	}
	for id, value := range map[string]string{
		"model.files": "10 shards", "model.tokenizer": "3072 ids", "model.spine": "the dense weights of this model",
		"model.experts": fmt.Sprintf("copies of %d experts", p.Dirs[0].Count), "model.memory": "dense weights", "model.context": "up to 4096 tokens",
	} {
		if f := byID[id]; len(f) != 1 || f[0].Level != OK || !strings.Contains(f[0].Value, value) {
			t.Errorf("%s: %+v, want %q", id, f, value)
		}
	}
	if n := len(byID["drive.reads"]); n != 1 {
		t.Errorf("%d drives, where all directories are on one", n)
	}
	_, byID = examine(t, Options{Model: model, Spine: filepath.Join(dir, "int8.bin")})
	if f := byID["model.spine"]; len(f) != 1 || f[0].Level != Note || !strings.Contains(f[0].Value, "eight bits") {
		t.Errorf("in eight bits: %+v", f)
	}
	_, byID = examine(t, Options{Model: golden.ModelDir("tiny-a"), Spine: filepath.Join(dir, "spine.bin"), Experts: []string{copies}})
	for _, id := range []string{"model.spine", "model.experts"} {
		if f := byID[id]; len(f) != 1 || f[0].Level != Error || f[0].Fault != Model {
			t.Errorf("of another model: %+v", f)
		}
	}
}

func TestAFetchedModelIsKnownByItsRecord(t *testing.T) {
	h := hubtest.New(t, golden.ModelDir("nano"))
	o := hub.Options{Repo: h.Repo, Revision: h.Revision, Sources: []string{h.URL}}
	const shard = "model-00003-of-000010.safetensors"

	o.Dir = t.TempDir()
	if err := hub.Fetch(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	r, byID := examine(t, Options{Model: o.Dir})
	if f := byID["model.store"]; r.Fault != "" || len(f) != 1 || f[0].Level != OK || !strings.Contains(f[0].Value, "each was proved when it came") {
		t.Errorf("whole: %+v", r)
	}
	if err := os.Rename(filepath.Join(o.Dir, shard), filepath.Join(o.Dir, shard+".part")); err != nil {
		t.Fatal(err)
	}
	r, byID = examine(t, Options{Model: o.Dir})
	if f := byID["model.files"]; r.Fault != Model || len(f) != 1 || f[0].Value != shard+": is missing" {
		t.Errorf("a shard is missing: %+v", f)
	}
	if f := byID["drive.space"]; len(f) != 1 || f[0].Numbers["needed_bytes"] < 1e6 {
		t.Errorf("a shard is missing: %+v", f)
	}

	o.Dir = t.TempDir()
	d, err := hub.OpenDepot(t.Context(), hub.DepotOptions{Options: o, TrustHTTP: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	r, byID = examine(t, Options{Model: o.Dir})
	for id, want := range map[string]Level{"model.store": Note, "model.files": OK, "model.memory": OK, "drive.reads": Note} {
		if f := byID[id]; r.Fault != "" || len(f) != 1 || f[0].Level != want {
			t.Errorf("filling on demand: %s: %+v, want %s", id, f, want)
		}
	}
}

func TestMeasuringAndSinging(t *testing.T) {
	removed := false
	r, err := Examine(t.Context(), Options{
		Model:     golden.ModelDir("nano"),
		Miniature: func() (string, func(), error) { return golden.ModelDir("nano"), func() { removed = true }, nil },
		measureKernels: func(_ *kernel.Pool, m *plan.Machine) error {
			m.DenseRow, m.ExpertRow, m.DenseRows, m.ExpertRows = 1e10, 1e10, 1e10, 1e10
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	levels := map[string]Level{}
	for _, f := range r.Findings {
		sound(t, f)
		levels[f.ID] = f.Level
		if f.ID == "drive.reads" && (f.Numbers["bytes_per_second"] <= 0 || f.Numbers["latency_seconds"] <= 0) {
			t.Errorf("%+v", f)
		}
	}
	if levels["canary"] != OK || levels["model.speed"] != OK || !removed {
		t.Errorf("%v, the built-in model removed: %v", levels, removed)
	}
	r, err = Examine(t.Context(), Options{Miniature: func() (string, func(), error) { return "", nil, errors.New("no room") }})
	if f := r.Findings[len(r.Findings)-1]; err != nil || f.ID != "canary" || f.Level != Warning {
		t.Errorf("%+v, %v", f, err)
	}
}

func TestACancelledExaminationEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r, err := Examine(ctx, Options{Model: golden.ModelDir("nano")}); !errors.Is(err, context.Canceled) || len(r.Findings) == 0 || r.Findings[len(r.Findings)-1].ID == "canary" {
		t.Errorf("%+v, %v", r, err)
	}
}

// The names are promised: programs read them.
func TestTheJSONFormIsStable(t *testing.T) {
	r := &Report{Version: Version, Worst: OK}
	r.add(Finding{ID: "a", Level: OK, Value: "v"})
	r.add(Finding{ID: "b", Level: Error, Fault: Resources, What: "w", Value: "v", Do: "d", Numbers: map[string]float64{"n": 1}})
	r.add(Finding{ID: "c", Level: Error, Fault: Model, Value: "v", Do: "d"})
	r.add(Finding{ID: "d", Level: Warning, Value: "v", Do: "d"})
	got, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(`{"version":1,"worst":"error","fault":"model","findings":[{"id":"a","level":"ok","value":"v"},`+
		`{"id":"b","level":"error","fault":"resources","what":"w","value":"v","do":"d","numbers":{"n":1}},`+
		`{"id":"c","level":"error","fault":"model","value":"v","do":"d"},{"id":"d","level":"warning","value":"v","do":"d"}]}`, string(got)); d != "" {
		t.Error(d)
	}
}
