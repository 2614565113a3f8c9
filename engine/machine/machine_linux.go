package machine

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ReadMemory asks the kernel and the cgroups.
func ReadMemory() Memory { return readMemory(os.DirFS("/")) }

// Quota is how many processors' worth of time the cgroups allow; 0 means all.
func Quota() float64 { return readQuota(os.DirFS("/")) }

// fileSystems are the magic numbers of statfs(2) that one meets.
var fileSystems = map[uint32]struct {
	name string
	kind Kind
}{
	unix.EXT4_SUPER_MAGIC:      {"ext4", Local},
	unix.XFS_SUPER_MAGIC:       {"xfs", Local},
	unix.BTRFS_SUPER_MAGIC:     {"btrfs", Local},
	unix.F2FS_SUPER_MAGIC:      {"f2fs", Local},
	0x2fc12fc1:                 {"zfs", Local},
	0xca451a4e:                 {"bcachefs", Local},
	unix.MSDOS_SUPER_MAGIC:     {"vfat", Local},
	unix.EXFAT_SUPER_MAGIC:     {"exfat", Local},
	0x7366746e:                 {"ntfs3", Local},
	unix.SQUASHFS_MAGIC:        {"squashfs", Local},
	unix.ISOFS_SUPER_MAGIC:     {"iso9660", Local},
	unix.OVERLAYFS_SUPER_MAGIC: {"overlay", Overlay},
	unix.TMPFS_MAGIC:           {"tmpfs", InRAM},
	unix.RAMFS_MAGIC:           {"ramfs", InRAM},
	unix.NFS_SUPER_MAGIC:       {"nfs", Network},
	unix.SMB_SUPER_MAGIC:       {"smb", Network},
	unix.SMB2_SUPER_MAGIC:      {"smb", Network},
	unix.CIFS_SUPER_MAGIC:      {"cifs", Network},
	unix.V9FS_MAGIC:            {"9p", Network},
	unix.CEPH_SUPER_MAGIC:      {"ceph", Network},
	unix.AFS_SUPER_MAGIC:       {"afs", Network},
	unix.CODA_SUPER_MAGIC:      {"coda", Network},
	0x0bd00bd0:                 {"lustre", Network},
	0x47504653:                 {"gpfs", Network},
	// Most that come this way are on another machine or in an archive (sshfs, rclone,
	// gcsfuse); ntfs-3g is the exception, and no faster for it.
	unix.FUSE_SUPER_MAGIC: {"fuse", Network},
}

// ReadFileSystem asks about the file system that dir is on.
func ReadFileSystem(dir string) (FileSystem, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return FileSystem{}, err
	}
	f := FileSystem{Name: fmt.Sprintf("type %#x", uint32(s.Type)), Kind: Local}
	if k, ok := fileSystems[uint32(s.Type)]; ok {
		f.Name, f.Kind = k.name, k.kind
	}
	f.ReadOnly = s.Flags&unix.ST_RDONLY != 0
	return f, nil
}
