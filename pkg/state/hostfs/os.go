package hostfs

import (
	"context"
	"io/fs"
	"os"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// OS is the real file system. Safe for concurrent use.
func OS() FS { return osFS{} }

type osFS struct{}

func pathErr(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}

func linkErr(op, oldname, newname string, err error) error {
	if err == nil {
		return nil
	}
	return &os.LinkError{Op: op, Old: oldname, New: newname, Err: err}
}

func (osFS) Readlink(name string) (string, error) { return os.Readlink(name) }

func (osFS) ReadFile(name string, limit int64) ([]byte, error) {
	return safefile.ReadFile(context.Background(), name, limit)
}

func (osFS) Create(name string, mode fs.FileMode) (File, error) {
	return openWrite(name, os.O_CREATE|os.O_EXCL, mode)
}

func (osFS) OpenWrite(name string) (File, error) {
	return openWrite(name, 0, 0)
}

type osFile struct{ *os.File }

func (osFS) Mkdir(name string, mode fs.FileMode) error {
	if err := os.Mkdir(name, mode); err != nil {
		return err
	}
	return os.Chmod(name, mode)
}

func (osFS) Symlink(text, name string) error    { return os.Symlink(text, name) }
func (osFS) Link(oldname, newname string) error { return os.Link(oldname, newname) }
func (osFS) Remove(name string) error           { return os.Remove(name) }

func (osFS) Chown(name string, uid, gid uint32) error {
	return os.Lchown(name, int(uid), int(gid))
}
