//go:build unix

package hostfs

import (
	"errors"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// retry repeats a call that a signal interrupted, as the os package does.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (osFS) Access(name string) error {
	return pathErr("access", name, retry(func() error {
		return unix.Faccessat(unix.AT_FDCWD, name, unix.W_OK, unix.AT_EACCESS)
	}))
}

func openWrite(name string, flags int, mode fs.FileMode) (File, error) {
	f, err := os.OpenFile(name, os.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|flags, mode)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Rename(oldname, newname string) error { return os.Rename(oldname, newname) }

func (osFS) SetTimes(name string, atime, mtime time.Time) error {
	var ts [2]unix.Timespec
	for i, t := range [...]time.Time{atime, mtime} {
		spec, err := unix.TimeToTimespec(t)
		if err != nil {
			return pathErr("utimens", name, err)
		}
		ts[i] = spec
	}
	return pathErr("utimens", name, retry(func() error {
		return unix.UtimesNanoAt(unix.AT_FDCWD, name, ts[:], unix.AT_SYMLINK_NOFOLLOW)
	}))
}

func (osFS) SyncDir(name string) error {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	err = f.Sync()
	if errors.Is(err, unix.EINVAL) {
		err = nil // The file system has nothing to sync for a directory.
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}
