package engine

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// AvailableMemory is what can be allocated without pushing anything out: the least
// of the kernel's estimate and the room in each memory cgroup around this process.
func AvailableMemory() int64 {
	free := int64(1) << 62
	if v, ok := meminfo("MemAvailable:"); ok {
		free = v
	}
	cg, _ := os.ReadFile("/proc/self/cgroup")
	for line := range strings.Lines(string(cg)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		root, limit, usage := "/sys/fs/cgroup", "memory.max", "memory.current"
		switch f[1] {
		case "":
		case "memory":
			root, limit, usage = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
		default:
			continue
		}
		for dir := f[2]; ; dir = filepath.Dir(dir) {
			at := filepath.Join(root, dir)
			if l, ok := number(filepath.Join(at, limit)); ok {
				u, _ := number(filepath.Join(at, usage))
				free = min(free, max(l-u, 0))
			}
			if dir == "/" || dir == "." {
				break
			}
		}
	}
	return free
}

// meminfo returns a line of /proc/meminfo in bytes.
func meminfo(key string) (int64, bool) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	_, rest, ok := bytes.Cut(b, []byte(key))
	if !ok {
		return 0, false
	}
	f := bytes.Fields(rest)
	if len(f) == 0 {
		return 0, false
	}
	kb, err := strconv.ParseInt(string(f[0]), 10, 64)
	return kb << 10, err == nil
}

func number(path string) (int64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	v, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return v, err == nil
}
