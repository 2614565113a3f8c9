package machine

import (
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// group is a cgroup around this process: a directory of either version's files.
type group struct {
	dir     string
	version int
}

// groups lists the cgroups around this process that may limit what a controller
// controls. A container often sees its own group as the root of the mount, under a path
// that does not exist there: groups without the wanted files are to be skipped.
func groups(root fs.FS, controller string) (gs []group) {
	text, _ := fs.ReadFile(root, "proc/self/cgroup")
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		mounts, version := []string{"sys/fs/cgroup", "sys/fs/cgroup/unified"}, 2
		if f[1] != "" {
			if !slices.Contains(strings.Split(f[1], ","), controller) {
				continue
			}
			mounts, version = []string{"sys/fs/cgroup/" + controller}, 1
		}
		for _, m := range mounts {
			for dir := path.Clean("/" + f[2]); ; dir = path.Dir(dir) {
				gs = append(gs, group{path.Join(m, dir), version})
				if dir == "/" {
					break
				}
			}
		}
	}
	return gs
}

// number reads a file that holds one number.
func number(root fs.FS, name string) (int64, bool) {
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	v, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return v, err == nil
}

// field reads the number after a key at the beginning of a line.
func field(root fs.FS, name, key string) (int64, bool) {
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == key {
			v, err := strconv.ParseInt(f[1], 10, 64)
			return v, err == nil
		}
	}
	return 0, false
}

func readMemory(root fs.FS) Memory {
	m := Memory{Available: unlimited}
	info := func(key string) int64 {
		kb, _ := field(root, "proc/meminfo", key)
		return kb << 10
	}
	m.Total, m.SwapTotal = info("MemTotal:"), info("SwapTotal:")
	m.SwapUsed = m.SwapTotal - info("SwapFree:")
	if free := info("MemAvailable:"); free > 0 {
		m.Available = free
	}
	for _, g := range groups(root, "memory") {
		limit, usage, cache := "memory.max", "memory.current", "inactive_file"
		if g.version == 1 {
			limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
		}
		l, ok := number(root, path.Join(g.dir, limit))
		if !ok || l < 0 || l >= 1<<60 { // version 1 writes a huge number for none
			continue
		}
		if m.Limit == 0 || l < m.Limit {
			m.Limit = l
		}
		used, _ := number(root, path.Join(g.dir, usage))
		idle, _ := field(root, path.Join(g.dir, "memory.stat"), cache) // goes when it has to
		m.Available = min(m.Available, max(l-max(used-idle, 0), 0))
	}
	return m
}

func readQuota(root fs.FS) (quota float64) {
	for _, g := range groups(root, "cpu") {
		var q, period float64
		if g.version == 1 {
			a, _ := number(root, path.Join(g.dir, "cpu.cfs_quota_us"))
			b, _ := number(root, path.Join(g.dir, "cpu.cfs_period_us"))
			q, period = float64(a), float64(b)
		} else if b, err := fs.ReadFile(root, path.Join(g.dir, "cpu.max")); err == nil {
			if f := strings.Fields(string(b)); len(f) == 2 {
				q, _ = strconv.ParseFloat(f[0], 64) // "max" is 0
				period, _ = strconv.ParseFloat(f[1], 64)
			}
		}
		if q > 0 && period > 0 && (quota == 0 || q/period < quota) {
			quota = q / period
		}
	}
	return quota
}
