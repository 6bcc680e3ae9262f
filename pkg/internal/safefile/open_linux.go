package safefile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// readFlags have O_NONBLOCK not to wait for the end of somebody's lease (fcntl(2)).
const readFlags = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC

// Open opens a regular file for reading, through symbolic links. It is looked at before: to open a device or a FIFO can
// already do something, or wait.
func Open(path string) (*os.File, error) {
	return open(path, unix.AT_FDCWD, path, unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC})
}

// OpenIn is Open of a path below root, as a process sees it whose root that is: no link leads out of it, nor through
// a link of /proc (openat2(2): RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS).
func OpenIn(root, path string) (*os.File, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: root, Err: err}
	}
	defer unix.Close(dir)
	return open(root+path, dir, path, unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
}

func open(name string, dir int, path string, how unix.OpenHow) (*os.File, error) {
	fd := -1
	err := retry(func() (err error) {
		if how.Resolve == 0 { // works on every kernel and in every sandbox
			fd, err = unix.Openat(dir, path, int(how.Flags), 0)
		} else {
			fd, err = unix.Openat2(dir, path, &how)
		}
		return err
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	handle := os.NewFile(uintptr(fd), name)
	defer handle.Close()
	file, err := Reopen(handle)
	if errors.Is(err, fs.ErrNotExist) && how.Resolve == 0 {
		return openWithoutProc(name)
	}
	return file, err
}

// openWithoutProc is for a rescue shell that has not mounted /proc. What replaces the file meanwhile may be opened, and is
// not read.
func openWithoutProc(name string) (*os.File, error) {
	file, err := os.OpenFile(name, readFlags, 0)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil {
		err = checkRegular(name, info)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Reopen opens for reading what an O_PATH descriptor stands for, if it is a regular file.
func Reopen(handle *os.File) (*os.File, error) {
	name := handle.Name()
	info, err := handle.Stat()
	if err != nil {
		return nil, err
	}
	if err := checkRegular(name, info); err != nil {
		return nil, err
	}
	fd := -1
	err = retry(func() (err error) {
		fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", handle.Fd()), readFlags, 0)
		return err
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// retry repeats a call that a signal interrupted, as the os package does.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
