//go:build !linux

package hostfs

import (
	"errors"
	"io/fs"
	"time"
)

// OS has no file system to offer outside Linux: every call fails with
// errors.ErrUnsupported.
func OS() FS { return unsupported{} }

type unsupported struct{}

func no(op, name string) error {
	return &fs.PathError{Op: op, Path: name, Err: errors.ErrUnsupported}
}

func (unsupported) Lstat(name string) (Info, error)                 { return Info{}, no("lstat", name) }
func (unsupported) Readlink(name string) (string, error)            { return "", no("readlink", name) }
func (unsupported) ReadFile(name string, _ int64) ([]byte, error)   { return nil, no("read", name) }
func (unsupported) Access(name string) error                        { return no("access", name) }
func (unsupported) Xattrs(name string) ([]Xattr, error)             { return nil, no("listxattr", name) }
func (unsupported) Flags(name string) (uint32, error)               { return 0, no("getflags", name) }
func (unsupported) Create(name string, _ fs.FileMode) (File, error) { return nil, no("create", name) }
func (unsupported) OpenWrite(name string) (File, error)             { return nil, no("open", name) }
func (unsupported) Mkdir(name string, _ fs.FileMode) error          { return no("mkdir", name) }
func (unsupported) Symlink(_, name string) error                    { return no("symlink", name) }
func (unsupported) Link(_, name string) error                       { return no("link", name) }
func (unsupported) Rename(_, name string) error                     { return no("rename", name) }
func (unsupported) RenameNew(_, name string) error                  { return no("rename", name) }
func (unsupported) Exchange(_, name string) error                   { return no("exchange", name) }
func (unsupported) Remove(name string) error                        { return no("remove", name) }
func (unsupported) Chown(name string, _, _ uint32) error            { return no("chown", name) }
func (unsupported) SetTimes(name string, _, _ time.Time) error      { return no("utimens", name) }
func (unsupported) SetXattr(name string, _ Xattr) error             { return no("setxattr", name) }
func (unsupported) SetFlags(name string, _ uint32) error            { return no("setflags", name) }
func (unsupported) SyncDir(name string) error                       { return no("sync", name) }
