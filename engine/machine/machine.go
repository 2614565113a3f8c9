// Package machine hides where an operating system says what it gives this process:
// memory, processors, and what kind of file system a directory is on. It measures
// nothing and changes nothing.
package machine

// Memory is what there is for this process, in bytes; 0 means not known, or none.
type Memory struct {
	Total     int64 // of the machine
	Available int64 // can be allocated without pushing anything out, see [AvailableMemory]
	Limit     int64 // the least limit of the memory cgroups around this process
	SwapTotal int64
	SwapUsed  int64
}

// AvailableMemory is what can be allocated without pushing anything out: the least
// of the kernel's estimate and the room in each memory cgroup around this process.
func AvailableMemory() int64 { return ReadMemory().Available }

// unlimited is reported where the system does not say how much memory there is.
const unlimited = int64(1) << 62

// FileSystem is what is known of the file system that holds a directory.
type FileSystem struct {
	Name     string // as the system calls it, such as "ext4"
	Kind     Kind
	ReadOnly bool
}

// Kind is what a file system means for reading weights.
type Kind string

// The kinds.
const (
	Local   Kind = "local"
	Network Kind = "network"
	Overlay Kind = "overlay" // of a container's image
	InRAM   Kind = "memory"
)
