package hostfs

import (
	"errors"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/windows"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// Lstat knows no owner: Windows has lists of rights in its place.
func (osFS) Lstat(name string) (Info, error) {
	found, err := os.Lstat(name)
	if err != nil {
		return Info{}, err
	}
	info := Info{Mode: found.Mode(), Size: found.Size(), Mtime: found.ModTime()}
	return info, withHandle("lstat", name, 0, func(handle windows.Handle) error {
		var data windows.ByHandleFileInformation
		if err := windows.GetFileInformationByHandle(handle, &data); err != nil {
			return err
		}
		info.Dev, info.Ino = uint64(data.VolumeSerialNumber), uint64(data.FileIndexHigh)<<32|uint64(data.FileIndexLow)
		info.Links = data.NumberOfLinks
		info.Atime, info.Btime = fileTime(data.LastAccessTime), fileTime(data.CreationTime)
		return nil
	})
}

func fileTime(t windows.Filetime) time.Time { return time.Unix(0, t.Nanoseconds()) }

// withHandle opens what is there, a link itself if it is one, without being in the way of anybody.
func withHandle(op, name string, access uint32, do func(windows.Handle) error) error {
	path, err := windows.UTF16PtrFromString(name)
	if err != nil {
		return pathErr(op, name, err)
	}
	handle, err := windows.CreateFile(path, access, windows.FILE_SHARE_READ|windows.FILE_SHARE_WRITE|windows.FILE_SHARE_DELETE, nil,
		windows.OPEN_EXISTING, windows.FILE_FLAG_OPEN_REPARSE_POINT|windows.FILE_FLAG_BACKUP_SEMANTICS, 0)
	if err != nil {
		return pathErr(op, name, err)
	}
	return pathErr(op, name, errors.Join(do(handle), windows.CloseHandle(handle)))
}

// Access looks at the attribute that forbids to write, not at lists of rights.
func (osFS) Access(name string) error {
	info, err := os.Stat(name)
	if err == nil && info.Mode().IsRegular() && info.Mode()&0o200 == 0 {
		err = pathErr("access", name, windows.ERROR_ACCESS_DENIED)
	}
	return err
}

func openWrite(name string, flags int, mode fs.FileMode) (File, error) {
	if info, err := os.Lstat(name); err == nil && !info.Mode().IsRegular() {
		return nil, pathErr("open", name, windows.ERROR_CANT_ACCESS_FILE)
	}
	f, err := os.OpenFile(name, os.O_WRONLY|flags, mode)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

// Rename returns when the new name is on the disk.
func (osFS) Rename(oldname, newname string) error {
	return linkErr("rename", oldname, newname, move(oldname, newname, windows.MOVEFILE_REPLACE_EXISTING|windows.MOVEFILE_WRITE_THROUGH))
}

func (osFS) RenameNew(oldname, newname string) error {
	return linkErr("rename", oldname, newname, move(oldname, newname, windows.MOVEFILE_WRITE_THROUGH))
}

func move(oldname, newname string, flags uint32) error {
	from, err := windows.UTF16PtrFromString(oldname)
	if err != nil {
		return err
	}
	to, err := windows.UTF16PtrFromString(newname)
	if err != nil {
		return err
	}
	return safefile.WhileBusy(func() error { return windows.MoveFileEx(from, to, flags) })
}

// Exchange: Windows has nothing that swaps two names in one step.
func (osFS) Exchange(a, b string) error { return linkErr("exchange", a, b, errors.ErrUnsupported) }

func (osFS) SetTimes(name string, atime, mtime time.Time) error {
	accessed, written := windows.NsecToFiletime(atime.UnixNano()), windows.NsecToFiletime(mtime.UnixNano())
	return withHandle("settimes", name, windows.FILE_WRITE_ATTRIBUTES, func(handle windows.Handle) error {
		return windows.SetFileTime(handle, nil, &accessed, &written)
	})
}

// SyncDir has nothing to do: what Rename and a file's Sync return from is on the disk, with the name (MoveFileEx: MOVEFILE_WRITE_THROUGH;
// FlushFileBuffers).
func (osFS) SyncDir(name string) error {
	_, err := os.Stat(name)
	return err
}
