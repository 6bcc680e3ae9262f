// Package hostfs is the seam between the program and the host's file system:
// one method per system call that matters when a host's own files are changed
// and put back, so that a test can let any one of them fail. It is a leaf and
// holds no state.
//
// Every method reports failures as *fs.PathError or *os.LinkError, so that
// errors.Is works with both fs.ErrNotExist and a syscall.Errno.
package hostfs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"
)

// Inode flags as ioctl_iflags(2) numbers them, the two that refuse a rename.
const (
	FlagAppend    = 0x20
	FlagImmutable = 0x10
)

// Info is what is known of one name, never of what a symbolic link points at.
type Info struct {
	Mode     fs.FileMode // type, permission and set-id bits
	UID, GID uint32
	Size     int64 // bytes
	Dev, Ino uint64
	Links    uint32
	Atime    time.Time
	Mtime    time.Time
	Btime    time.Time // of creation; zero where the file system has none
	// MountID is the mount the name is on, as in the first column of
	// proc_pid_mountinfo(5); 0 where the kernel doesn't tell (before 5.8).
	MountID uint64
	// MountRoot: the name is the root of a mount, such as a bind-mounted file,
	// and can't be renamed. Always false where the kernel doesn't tell.
	MountRoot bool
	// Immutable and Append are the attributes of chattr(1) +i and +a.
	Immutable, Append bool
}

// SameFile reports whether both are the same object and not merely equal. The
// time of creation tells an inode number that was used again.
func (i Info) SameFile(o Info) bool {
	return i.Dev == o.Dev && i.Ino == o.Ino && i.Btime.Equal(o.Btime)
}

// Xattr is one extended attribute: label, ACL, capability or user data.
type Xattr struct {
	Name  string `json:"name"`
	Value []byte `json:"value"`
}

// File is a file open for writing.
type File interface {
	Write(p []byte) (int, error)
	// Reserve makes sure that writes up to size bytes from the start find
	// room; the file does not get longer by it. A file system that can't
	// reserve is not a failure.
	Reserve(size int64) error
	Truncate(size int64) error
	Chmod(mode fs.FileMode) error
	Sync() error
	Close() error
}

// FS is the file system. Names are paths as the process sees them. No method
// follows a symbolic link in the last component, but for ReadFile and Access.
type FS interface {
	Lstat(name string) (Info, error)
	Readlink(name string) (string, error)
	// ReadFile reads a regular file, through symbolic links, as package
	// safefile does.
	ReadFile(name string, limit int64) ([]byte, error)
	// Access fails if the process may not write there: EROFS, EACCES, EPERM.
	Access(name string) error
	// Xattrs lists all attributes in the order of the kernel. A file system
	// without attributes has none.
	Xattrs(name string) ([]Xattr, error)
	// Flags reads the inode flags of a regular file; 0 if there are none.
	Flags(name string) (uint32, error)

	// Create opens a new file for writing and fails if the name exists.
	Create(name string, mode fs.FileMode) (File, error)
	// OpenWrite opens a regular file that exists, for writing from its start;
	// its content stays until it is overwritten.
	OpenWrite(name string) (File, error)
	// Mkdir makes a directory of exactly this mode.
	Mkdir(name string, mode fs.FileMode) error
	Symlink(text, name string) error
	// Link makes newname a second name of oldname, of a symbolic link itself
	// if it is one.
	Link(oldname, newname string) error
	Rename(oldname, newname string) error
	// RenameNew fails with EEXIST instead of replacing newname.
	RenameNew(oldname, newname string) error
	// Exchange swaps two names in one step: renameat2(2) RENAME_EXCHANGE.
	// EINVAL or ENOSYS where file system or kernel can't.
	Exchange(a, b string) error
	Remove(name string) error
	Chown(name string, uid, gid uint32) error
	SetTimes(name string, atime, mtime time.Time) error
	SetXattr(name string, x Xattr) error
	SetFlags(name string, flags uint32) error
	// SyncDir makes the names in a directory durable.
	SyncDir(name string) error
}

// MkdirAll makes dir and its missing parents with mode 0755 whatever the
// umask. The new names are synced, or a crash could lose a whole directory of
// synced files.
func MkdirAll(fsys FS, dir string) error {
	info, err := fsys.Lstat(dir)
	if err == nil && (info.Mode.IsDir() || info.Mode&fs.ModeSymlink != 0) {
		return nil // A link is left to the first use of it to judge.
	}
	if err == nil {
		return fmt.Errorf("%s is not a directory; move it away", dir)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if err := MkdirAll(fsys, parent); err != nil {
			return err
		}
	}
	if err := fsys.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return fsys.SyncDir(parent)
}

// WriteNew creates name with exactly this mode and content, synced. The mode
// is set explicitly because a umask would lessen it. On failure the name is
// gone again, unless even the removal fails.
func WriteNew(fsys FS, name string, data []byte, mode fs.FileMode) error {
	f, err := fsys.Create(name, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return errors.Join(err, RemoveIfExists(fsys, name))
	}
	return nil
}

// Overwrite gives the file under name, which stays the same object, exactly
// this content, synced. Room for it is made sure of before the first octet is
// changed. Over the rest of a longer old content line feeds are written before
// it is cut off, so that a reader who comes in between finds whole lines of the
// new text and blank ones.
func Overwrite(fsys FS, name string, data []byte) error {
	old, err := fsys.Lstat(name)
	if err != nil {
		return err
	}
	f, err := fsys.OpenWrite(name)
	if err != nil {
		return err
	}
	err = f.Reserve(int64(len(data)))
	if err == nil {
		_, err = f.Write(Padded(data, int(old.Size)))
	}
	if err == nil && old.Size > int64(len(data)) {
		err = f.Truncate(int64(len(data)))
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// Padded is data with as many line feeds as make it size octets long.
func Padded(data []byte, size int) []byte {
	if len(data) >= size {
		return data
	}
	return append(slices.Clip(data), bytes.Repeat([]byte{'\n'}, size-len(data))...)
}

// RemoveIfExists removes name; it is not a failure if it does not exist.
func RemoveIfExists(fsys FS, name string) error {
	if err := fsys.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// WriteFile puts data at path in one step: a reader sees the old content or
// the new one, also after a crash. The temporary name is fixed, so that a
// crash leaves at most one and the next write removes it; there must be one
// writer of a path at a time.
func WriteFile(fsys FS, path string, data []byte, mode fs.FileMode) error {
	tmp := TempName(path)
	if err := RemoveIfExists(fsys, tmp); err != nil {
		return err
	}
	if err := WriteNew(fsys, tmp, data, mode); err != nil {
		return err
	}
	if err := fsys.Rename(tmp, path); err != nil {
		return errors.Join(err, RemoveIfExists(fsys, tmp))
	}
	return fsys.SyncDir(filepath.Dir(path))
}

// TempName is the name WriteFile uses on the way to path.
func TempName(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".k2s-dnsbpf-tmp")
}
