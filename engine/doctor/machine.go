package doctor

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/cpu"

	"deltafin/engine/disk"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
	"deltafin/engine/machine"
)

// host is what is known of the machine.
type host struct {
	arch     string   // as Go calls it
	features []string // of the processor, of those that kernels are written for
	forms    []string // of the kernels that can run, best last
	active   string   // the form in use
	check    error    // of the kernels

	online  int     // processors
	quota   float64 // of them by the cgroup; 0 means all
	threads int     // that the Go runtime runs

	memory machine.Memory
	asked  int64 // bytes that a run is to use; 0 means no wish

	files, kept int // descriptors, and those that drives may keep
}

// thisHost asks the system. The kernels are asked from inside this binary, so that
// what is reported is what runs.
func thisHost(asked int64) host {
	h := host{
		arch: runtime.GOARCH, forms: kernel.Implementations(), active: kernel.Active(), check: kernel.Check(),
		online: runtime.NumCPU(), quota: machine.Quota(), threads: runtime.GOMAXPROCS(0),
		memory: machine.ReadMemory(), asked: asked,
	}
	h.files, h.kept = drive.Descriptors()
	for _, f := range []struct {
		name string
		has  bool
	}{
		{"AVX2", cpu.X86.HasAVX2},
		{"FMA", cpu.X86.HasFMA},
		{"AVX-512 F", cpu.X86.HasAVX512F},
		{"BW", cpu.X86.HasAVX512BW},
		{"VL", cpu.X86.HasAVX512VL},
		{"DQ", cpu.X86.HasAVX512DQ},
		{"ASIMD", cpu.ARM64.HasASIMD},
	} {
		if f.has {
			h.features = append(h.features, f.name)
		}
	}
	return h
}

// budget is the memory that a run would use.
func (h *host) budget() int64 {
	if h.asked > 0 {
		return h.asked
	}
	return h.memory.Available / 4 * 3
}

// usable is how many threads are worth having.
func (h *host) usable() int {
	if h.quota > 0 {
		// Go's runtime takes two at least, so that its own work does not hold up the program's.
		return min(h.online, max(int(math.Ceil(h.quota)), 2))
	}
	return h.online
}

func (e *examination) machine(context.Context) {
	e.host = thisHost(e.o.Memory)
	e.tell(e.host.processor(), e.host.kernels(), e.host.cores(), e.host.memoryFound(), e.host.swap())
	e.tell(cache(e.o.Cache, e.o.Unpacked))
	if e.o.Model == "" {
		e.tell(e.host.descriptors(0, 0))
	}
}

func (h *host) processor() Finding {
	f := Finding{ID: "processor", Level: OK, Value: fmt.Sprintf("%s with %s; %s kernels in use, of %s",
		h.arch, strings.Join(h.features, ", "), h.active, strings.Join(h.forms, ", "))}
	if len(h.features) == 0 {
		f.Value = fmt.Sprintf("%s; %s kernels in use", h.arch, h.active)
	}
	if h.active == h.forms[0] {
		f.Level, f.Do = Warning, "expect about a twentieth of the speed: use a processor with AVX2 and FMA, and a build without the tag noasm"
		if h.arch != "amd64" {
			f.Level, f.Do = Note, "there are no vector kernels for this architecture yet: expect about a twentieth of the speed of amd64"
		}
	}
	return f
}

func (h *host) kernels() Finding {
	if h.check != nil {
		return Finding{
			ID: "kernels", Level: Error, Fault: Machine, Value: h.check.Error(),
			Do: "do not trust this machine: test its memory and processor; if they are sound, report the processor and this line",
		}
	}
	return Finding{ID: "kernels", Level: OK, Value: fmt.Sprintf("%s give the right bits on a sample", strings.Join(h.forms, ", "))}
}

func (h *host) cores() Finding {
	f := Finding{
		ID: "cores", Level: OK, Value: fmt.Sprintf("%d processors, %d threads", h.online, h.threads),
		Numbers: map[string]float64{"processors": float64(h.online), "threads": float64(h.threads)},
	}
	if h.quota > 0 {
		f.Value = fmt.Sprintf("%d processors, %.3g of them by the cgroup's quota, %d threads", h.online, h.quota, h.threads)
		f.Numbers["quota"] = h.quota
	}
	switch {
	case h.threads > h.usable():
		f.Level, f.Do = Warning, fmt.Sprintf("more threads than processors wait for each other: unset GOMAXPROCS, or set it to %d", h.usable())
	case h.threads < h.usable():
		f.Level, f.Do = Note, fmt.Sprintf("unset GOMAXPROCS, or set it to %d, to use them all", h.usable())
	case h.quota > 0 && h.quota < float64(h.online):
		f.Level, f.Do = Note, "raise the CPU limit of the container to use them all"
	}
	return f
}

func (h *host) memoryFound() Finding {
	m := h.memory
	f := Finding{
		ID: "memory", Level: OK,
		Value:   fmt.Sprintf("%s available of %s, a run may use %s", gb(m.Available), gb(m.Total), gb(h.budget())),
		Numbers: map[string]float64{"total_bytes": float64(m.Total), "available_bytes": float64(m.Available), "budget_bytes": float64(h.budget())},
	}
	if m.Limit > 0 {
		f.Value = fmt.Sprintf("%s available of the cgroup's %s (the machine has %s), a run may use %s", gb(m.Available), gb(m.Limit), gb(m.Total), gb(h.budget()))
		f.Numbers["limit_bytes"] = float64(m.Limit)
	}
	switch {
	case h.asked > m.Available:
		f.Level, f.Do = Warning, "the system would swap, or end the run: free some, or lower --memory"
	case m.Limit > 0 && m.Limit < m.Total:
		f.Level, f.Do = Note, "raise the memory limit of the container if the run may have more: more memory is more speed"
	}
	return f
}

// swapped is how much swap may be in use without a word.
const swapped = 256 << 20

func (h *host) swap() Finding {
	m := h.memory
	f := Finding{ID: "swap", Level: OK, Value: "none"}
	if m.SwapTotal > 0 {
		f.Value = fmt.Sprintf("%s of %s used", gb(m.SwapUsed), gb(m.SwapTotal))
		f.Numbers = map[string]float64{"total_bytes": float64(m.SwapTotal), "used_bytes": float64(m.SwapUsed)}
	}
	if m.SwapUsed > swapped {
		f.Level, f.Do = Note, "if it grows during a run, lower --memory: weights that were swapped out come back slower than from their own file"
	}
	return f
}

const (
	k3Shards    = 96 // of the released model
	otherFiles  = 16 // standard streams, the poller, a lock, a trace, heat, sockets
	filesRemedy = "raise the limit of open files: ulimit -n %d"
)

// filesNeeded is how many descriptors a run has open at most when drives may keep kept of them.
// A checkpoint keeps its shards open, and the drives what they read from.
func filesNeeded(shards, copies, kept int) int {
	return shards + min(kept, shards+copies) + otherFiles
}

// descriptors judges the limit for a model of so many shards, with so many files that
// hold copies; without shards, for the built-in and the released model.
func (h *host) descriptors(shards, copies int) Finding {
	f := Finding{ID: "descriptors", Level: OK, Value: fmt.Sprintf("%d files may be open", h.files), Numbers: map[string]float64{"limit": float64(h.files)}}
	enough := func(shards int) bool { return filesNeeded(shards, copies, h.kept) <= h.files }
	// With this many no choice of the drives' can be too many.
	need := func(shards int) int { return filesNeeded(shards, copies, math.MaxInt) }
	switch {
	case shards > 0 && !enough(shards):
		f.Level, f.Fault, f.Do = Error, Resources, fmt.Sprintf(filesRemedy, need(shards))
		f.Value += fmt.Sprintf(", too few for %d shards and %d copies", shards, copies)
	case shards == 0 && !enough(k3Shards):
		f.Level, f.Do = Note, fmt.Sprintf(filesRemedy, need(k3Shards))
		f.Value += fmt.Sprintf(", enough for the built-in model and too few for the full Kimi K3 with its %d shards", k3Shards)
	}
	return f
}

// cacheRoom is what the built-in model takes, and a bit.
const cacheRoom = 20e6

// cache looks at the directory that runs unpack the built-in model to.
func cache(dir string, unpacked bool) Finding {
	f := Finding{ID: "cache", Level: OK, What: dir, Value: "holds the built-in model"}
	if unpacked {
		return f
	}
	f.Value = "has room for the built-in model"
	at := dir // what is not there yet is as writable as where it would be made
	info, err := os.Stat(at)
	for err != nil && at != filepath.Dir(at) {
		at = filepath.Dir(at)
		info, err = os.Stat(at)
	}
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a directory", at)
	}
	if err == nil {
		err = machine.Writable(at)
	}
	const remedy = "choose another with XDG_CACHE_HOME, or always give --model"
	if err != nil {
		f.Level, f.Value, f.Do = Warning, fmt.Sprintf("cannot be written to: %v", err), "make it writable, "+remedy
	} else if free, err := disk.Free(at); err == nil && free < cacheRoom {
		f.Level, f.Value, f.Do = Warning, fmt.Sprintf("has %s free, too little for the built-in model", gb(free)), "make room, "+remedy
	}
	return f
}

func gb(n int64) string {
	switch {
	case n >= 100e6:
		return fmt.Sprintf("%.1f GB", float64(n)/1e9)
	case n >= 100e3:
		return fmt.Sprintf("%.1f MB", float64(n)/1e6)
	}
	return fmt.Sprintf("%d bytes", n)
}
