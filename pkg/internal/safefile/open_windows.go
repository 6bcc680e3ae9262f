package safefile

import (
	"errors"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/windows"
)

// Others, such as a virus scanner, have a file to themselves for an instant, and so has who replaces it.
const (
	busyTries = 50
	busyWait  = 10 * time.Millisecond
)

// WhileBusy does it again, up to half a second long, while somebody else is in the way.
func WhileBusy(do func() error) error {
	for try := 1; ; try++ {
		err := do()
		busy := errors.Is(err, windows.ERROR_SHARING_VIOLATION) || errors.Is(err, windows.ERROR_ACCESS_DENIED)
		if !busy || try == busyTries {
			return err
		}
		time.Sleep(busyWait)
	}
}

// Open opens a regular file for reading, through symbolic links. It is in nobody's way: the file can be replaced or removed meanwhile.
func Open(path string) (*os.File, error) {
	name, err := windows.UTF16PtrFromString(path)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	var handle windows.Handle
	err = WhileBusy(func() (err error) {
		handle, err = windows.CreateFile(name, windows.GENERIC_READ, windows.FILE_SHARE_READ|windows.FILE_SHARE_WRITE|windows.FILE_SHARE_DELETE, nil,
			windows.OPEN_EXISTING, windows.FILE_ATTRIBUTE_NORMAL|windows.FILE_FLAG_BACKUP_SEMANTICS, 0)
		return err
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	file := os.NewFile(uintptr(handle), path)
	info, err := file.Stat()
	if err == nil {
		err = checkRegular(path, info)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}
