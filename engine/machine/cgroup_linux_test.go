package machine

import (
	"math"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"
)

const meminfo = "MemTotal:  24000000 kB\nMemFree: 1 kB\nMemAvailable:  16000000 kB\nSwapTotal: 2000 kB\nSwapFree: 500 kB\n"

// tree makes a file system of names and contents.
func tree(list ...string) fstest.MapFS {
	m := fstest.MapFS{}
	for i := 0; i < len(list); i += 2 {
		m[list[i]] = &fstest.MapFile{Data: []byte(list[i+1])}
	}
	return m
}

func TestMemoryIsTheLeastOfTheKernelsAndOfEachCgroups(t *testing.T) {
	const kernel = 16000000 << 10
	for _, c := range []struct {
		name             string
		files            []string
		limit, available int64
	}{
		{"no cgroups", nil, 0, kernel},
		{"version 2", []string{
			"proc/self/cgroup", "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max", "4000000000\n",
			"sys/fs/cgroup/a/b/memory.current", "1000000000\n",
		}, 4e9, 3e9},
		{"version 2, cache that nobody uses is not used", []string{
			"proc/self/cgroup", "0::/a\n",
			"sys/fs/cgroup/a/memory.max", "4000000000\n",
			"sys/fs/cgroup/a/memory.current", "3900000000\n",
			"sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 3000000000\nactive_file 9\n",
		}, 4e9, 3.1e9},
		{"version 2, the outer limit is lower", []string{
			"proc/self/cgroup", "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max", "max\n",
			"sys/fs/cgroup/a/memory.max", "2000000000\n",
			"sys/fs/cgroup/a/memory.current", "500000000\n",
		}, 2e9, 1.5e9},
		{"version 1", []string{
			"proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/xyz\n0::/\n",
			"sys/fs/cgroup/memory/docker/xyz/memory.limit_in_bytes", "4000000000\n",
			"sys/fs/cgroup/memory/docker/xyz/memory.usage_in_bytes", "3000000000\n",
			"sys/fs/cgroup/memory/docker/xyz/memory.stat", "inactive_file 7\ntotal_inactive_file 1000000000\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n",
		}, 4e9, 2e9},
		{"version 1 in a container that sees its group as the root", []string{
			"proc/self/cgroup", "4:memory:/docker/xyz\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000000\n",
			"sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000000\n",
		}, 4e9, 3e9},
		{"version 1, no limit", []string{
			"proc/self/cgroup", "4:memory:/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n",
			"sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000000\n",
		}, 0, kernel},
		{"both versions, the second elsewhere", []string{
			"proc/self/cgroup", "1:cpu:/\n0::/x\n",
			"sys/fs/cgroup/unified/x/memory.max", "4000000000\n",
		}, 4e9, 4e9},
		{"used up", []string{
			"proc/self/cgroup", "0::/\n",
			"sys/fs/cgroup/memory.max", "1000\n", "sys/fs/cgroup/memory.current", "2000\n",
		}, 1000, 0},
		{"a path out of the mount, and nonsense", []string{
			"proc/self/cgroup", "nonsense\n::\n0::/../a\n",
			"sys/fs/cgroup/a/memory.max", "many\n",
		}, 0, kernel},
	} {
		m := readMemory(tree(append(c.files, "proc/meminfo", meminfo)...))
		if m.Limit != c.limit || m.Available != c.available {
			t.Errorf("%s: limit %d and %d available, want %d and %d", c.name, m.Limit, m.Available, c.limit, c.available)
		}
		if m.Total != 24000000<<10 || m.SwapTotal != 2000<<10 || m.SwapUsed != 1500<<10 {
			t.Errorf("%s: %+v", c.name, m)
		}
	}
	if m := readMemory(tree()); m.Available != unlimited || m.Total != 0 {
		t.Errorf("without /proc: %+v", m)
	}
}

func TestQuotaIsTheLeastOfEachCgroups(t *testing.T) {
	for _, c := range []struct {
		name  string
		files []string
		want  float64
	}{
		{"none", nil, 0},
		{"version 2", []string{"proc/self/cgroup", "0::/a\n", "sys/fs/cgroup/a/cpu.max", "150000 100000\n", "sys/fs/cgroup/cpu.max", "max 100000\n"}, 1.5},
		{"version 2, outer", []string{"proc/self/cgroup", "0::/a\n", "sys/fs/cgroup/a/cpu.max", "400000 100000\n", "sys/fs/cgroup/cpu.max", "200000 100000\n"}, 2},
		{"version 1", []string{"proc/self/cgroup", "3:cpu,cpuacct:/a\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "50000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"}, .5},
		{"version 1, none", []string{"proc/self/cgroup", "3:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}, 0},
	} {
		if got := readQuota(tree(c.files...)); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: %g, want %g", c.name, got, c.want)
		}
	}
}

func FuzzCgroups(f *testing.F) {
	f.Add("0::/a/b\n4:memory:/x\n", "4000\n", "inactive_file 3\n", "100 50\n")
	f.Add("1:cpu,cpuacct:/../..\n", "max", "inactive_file", "max 1")
	f.Fuzz(func(t *testing.T, groups, value, stat, quota string) {
		files := tree("proc/self/cgroup", groups, "proc/meminfo", meminfo,
			"sys/fs/cgroup/memory.max", value, "sys/fs/cgroup/memory.current", value, "sys/fs/cgroup/memory.stat", stat, "sys/fs/cgroup/cpu.max", quota,
			"sys/fs/cgroup/memory/memory.limit_in_bytes", value, "sys/fs/cgroup/memory/memory.usage_in_bytes", value)
		if m := readMemory(files); m.Available < 0 || m.Available > 16000000<<10 {
			t.Errorf("%+v", m)
		}
		if q := readQuota(files); q < 0 || math.IsNaN(q) {
			t.Errorf("a quota of %g", q)
		}
	})
}

func TestThisMachineHasMemoryAndAFileSystem(t *testing.T) {
	if m := ReadMemory(); m.Total <= 0 || m.Available <= 0 || m.Available > m.Total {
		t.Errorf("%+v", m)
	}
	if PeakRSS() < 1<<20 {
		t.Errorf("a peak of %d bytes", PeakRSS())
	}
	f, err := ReadFileSystem(t.TempDir())
	if err != nil || f.Name == "" || f.ReadOnly {
		t.Errorf("%+v, %v", f, err)
	}
	if shm, err := ReadFileSystem("/dev/shm"); err == nil && (shm.Kind != InRAM || shm.Name != "tmpfs") {
		t.Errorf("/dev/shm: %+v", shm)
	}
	if _, err := ReadFileSystem(filepath.Join(t.TempDir(), "nowhere")); !os.IsNotExist(err) {
		t.Errorf("a directory that is not there: %v", err)
	}
}
