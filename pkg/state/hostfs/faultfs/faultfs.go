// Package faultfs wraps a hostfs.FS so that tests can fail, cut short or
// "kill the process" at any one of its calls. For tests only.
package faultfs

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state/hostfs"
)

// Mode is what happens at the chosen call.
type Mode int

const (
	// None counts only.
	None Mode = iota
	// Once fails the one call; it has no effect.
	Once
	// After lets the call happen and reports a failure all the same, as an NFS
	// server does whose answer is lost, or an fsync.
	After
	// Forever fails the call and every one that would change something after
	// it, as a file system does that was remounted read-only.
	Forever
	// Short does half of a write and then fails; other calls as Once.
	Short
	// KillBefore panics with Killed instead of the call.
	KillBefore
	// KillAfter panics with Killed after the call.
	KillAfter
)

var modeNames = [...]string{"none", "once", "after", "forever", "short", "kill-before", "kill-after"}

func (m Mode) String() string { return modeNames[m] }

// Killed is the value of the panic that stands for SIGKILL: nothing may
// recover it but the test.
type Killed struct{ Call string }

// FS is safe for concurrent use if the file system under it is.
type FS struct {
	Under hostfs.FS
	Mode  Mode
	At    int   // the call to act at, from 1
	Err   error // what a failed call reports
	// Unsupported names operations that always fail with Err of that entry:
	// "exchange", "link", ... They are counted too.
	Unsupported map[string]error
	// NoSync skips the real fsync, which tests by the thousand can't afford;
	// what was not synced is still tracked.
	NoSync bool
	// Before is called before each counted call, for instance to copy the tree.
	Before func(call int, op, name string)

	mu    sync.Mutex
	calls []string
	dirty map[string]bool
}

// Calls returns the calls so far, as "op base-name".
func (f *FS) Calls() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.calls...)
}

// Dirty returns the files whose content was written and never synced: after a
// power loss they may be there by name and empty.
func (f *FS) Dirty() map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.dirty)
}

var changes = map[string]bool{
	"create": true, "write": true, "chmod": true, "sync": true, "mkdir": true, "symlink": true, "link": true,
	"rename": true, "renamenew": true, "exchange": true, "remove": true, "chown": true, "times": true,
	"setxattr": true, "setflags": true, "syncdir": true, "openwrite": true, "reserve": true, "truncate": true,
}

// do runs one call under the rules of the mode. half, if any, is the part of
// it that Short does.
func (f *FS) do(op, name string, call, half func() error) error {
	f.mu.Lock()
	f.calls = append(f.calls, op+" "+filepath.Base(name))
	n := len(f.calls)
	f.mu.Unlock()
	if f.Before != nil {
		f.Before(n, op, name)
	}
	fail := func() error { return &fs.PathError{Op: op, Path: name, Err: f.Err} }
	if err := f.Unsupported[op]; err != nil {
		return &os.LinkError{Op: op, Old: name, New: name, Err: err}
	}
	hit := n == f.At
	switch {
	case f.Mode == Once && hit, f.Mode == Forever && (hit || n > f.At && changes[op]):
		return fail()
	case f.Mode == Short && hit:
		if half != nil {
			if err := half(); err != nil {
				return err
			}
		}
		return fail()
	case f.Mode == After && hit:
		if err := call(); err != nil {
			return err
		}
		return fail()
	case f.Mode == KillBefore && hit:
		panic(Killed{fmt.Sprintf("%d %s %s", n, op, filepath.Base(name))})
	case f.Mode == KillAfter && hit:
		_ = call()
		panic(Killed{fmt.Sprintf("%d %s %s", n, op, filepath.Base(name))})
	}
	return call()
}

// soil marks or moves the mark that a file's content is not durable.
func (f *FS) soil(change func(dirty map[string]bool)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dirty == nil {
		f.dirty = map[string]bool{}
	}
	change(f.dirty)
}

// swap moves the marks of two names.
func swap(d map[string]bool, a, b string) {
	d[a], d[b] = d[b], d[a]
}

func read[T any](f *FS, op, name string, call func() (T, error)) (out T, err error) {
	err = f.do(op, name, func() (err error) { out, err = call(); return err }, nil)
	if err != nil {
		var zero T
		return zero, err
	}
	return out, nil
}

func (f *FS) Lstat(name string) (hostfs.Info, error) {
	return read(f, "lstat", name, func() (hostfs.Info, error) { return f.Under.Lstat(name) })
}

func (f *FS) Readlink(name string) (string, error) {
	return read(f, "readlink", name, func() (string, error) { return f.Under.Readlink(name) })
}

func (f *FS) ReadFile(name string, limit int64) ([]byte, error) {
	return read(f, "read", name, func() ([]byte, error) { return f.Under.ReadFile(name, limit) })
}

func (f *FS) Access(name string) error {
	return f.do("access", name, func() error { return f.Under.Access(name) }, nil)
}

func (f *FS) Xattrs(name string) ([]hostfs.Xattr, error) {
	return read(f, "xattrs", name, func() ([]hostfs.Xattr, error) { return f.Under.Xattrs(name) })
}

func (f *FS) Flags(name string) (uint32, error) {
	return read(f, "flags", name, func() (uint32, error) { return f.Under.Flags(name) })
}

func (f *FS) Create(name string, mode fs.FileMode) (hostfs.File, error) {
	var file hostfs.File
	err := f.do("create", name, func() (err error) {
		file, err = f.Under.Create(name, mode)
		if err == nil {
			f.soil(func(d map[string]bool) { d[name] = true })
		}
		return err
	}, nil)
	if err != nil {
		if file != nil {
			_ = file.Close()
		}
		return nil, err
	}
	return &openFile{f, file, name}, nil
}

func (f *FS) OpenWrite(name string) (hostfs.File, error) {
	var file hostfs.File
	err := f.do("openwrite", name, func() (err error) {
		file, err = f.Under.OpenWrite(name)
		return err
	}, nil)
	if err != nil {
		if file != nil {
			_ = file.Close()
		}
		return nil, err
	}
	return &openFile{f, file, name}, nil
}

func (f *FS) Mkdir(name string, mode fs.FileMode) error {
	return f.do("mkdir", name, func() error { return f.Under.Mkdir(name, mode) }, nil)
}

func (f *FS) Symlink(text, name string) error {
	return f.do("symlink", name, func() error { return f.Under.Symlink(text, name) }, nil)
}

func (f *FS) Link(oldname, newname string) error {
	return f.do("link", newname, func() error { return f.Under.Link(oldname, newname) }, nil)
}

func (f *FS) renamed(oldname, newname string, err error) error {
	if err == nil {
		f.soil(func(d map[string]bool) { d[newname] = d[oldname]; delete(d, oldname) })
	}
	return err
}

func (f *FS) Rename(oldname, newname string) error {
	return f.do("rename", newname, func() error {
		return f.renamed(oldname, newname, f.Under.Rename(oldname, newname))
	}, nil)
}

func (f *FS) RenameNew(oldname, newname string) error {
	return f.do("renamenew", newname, func() error {
		return f.renamed(oldname, newname, f.Under.RenameNew(oldname, newname))
	}, nil)
}

func (f *FS) Exchange(a, b string) error {
	return f.do("exchange", b, func() error {
		err := f.Under.Exchange(a, b)
		if err == nil {
			f.soil(func(d map[string]bool) { swap(d, a, b) })
		}
		return err
	}, nil)
}

func (f *FS) Remove(name string) error {
	return f.do("remove", name, func() error {
		err := f.Under.Remove(name)
		if err == nil {
			f.soil(func(d map[string]bool) { delete(d, name) })
		}
		return err
	}, nil)
}

func (f *FS) Chown(name string, uid, gid uint32) error {
	return f.do("chown", name, func() error { return f.Under.Chown(name, uid, gid) }, nil)
}

func (f *FS) SetTimes(name string, atime, mtime time.Time) error {
	return f.do("times", name, func() error { return f.Under.SetTimes(name, atime, mtime) }, nil)
}

func (f *FS) SetXattr(name string, x hostfs.Xattr) error {
	return f.do("setxattr", name, func() error { return f.Under.SetXattr(name, x) }, nil)
}

func (f *FS) SetFlags(name string, flags uint32) error {
	return f.do("setflags", name, func() error { return f.Under.SetFlags(name, flags) }, nil)
}

func (f *FS) SyncDir(name string) error {
	return f.do("syncdir", name, func() error {
		if f.NoSync {
			return nil
		}
		return f.Under.SyncDir(name)
	}, nil)
}

type openFile struct {
	fs    *FS
	under hostfs.File
	name  string
}

func (o *openFile) Write(p []byte) (int, error) {
	n := 0
	write := func(p []byte) func() error {
		return func() (err error) { n, err = o.under.Write(p); return err }
	}
	err := o.fs.do("write", o.name, write(p), write(p[:len(p)/2]))
	return n, err
}

func (o *openFile) Reserve(size int64) error {
	return o.fs.do("reserve", o.name, func() error { return o.under.Reserve(size) }, nil)
}

func (o *openFile) Truncate(size int64) error {
	return o.fs.do("truncate", o.name, func() error { return o.under.Truncate(size) }, nil)
}

func (o *openFile) Chmod(mode fs.FileMode) error {
	return o.fs.do("chmod", o.name, func() error { return o.under.Chmod(mode) }, nil)
}

func (o *openFile) Sync() error {
	return o.fs.do("sync", o.name, func() error {
		o.fs.soil(func(d map[string]bool) { delete(d, o.name) })
		if o.fs.NoSync {
			return nil
		}
		return o.under.Sync()
	}, nil)
}

// Close really closes, whatever it reports, so that tests leak no descriptor.
func (o *openFile) Close() error {
	err := o.under.Close()
	return o.fs.do("close", o.name, func() error { return err }, nil)
}
