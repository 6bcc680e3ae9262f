package safefile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLinks is how many symbolic links a path may have (MAXSYMLINKS, path_resolution(7)).
const maxLinks = 40

// OpenTrusted is [Open] that also judges whose the file is: suspect says, as part of a sentence, who beside root and the
// user of this process could have written it or put another in its place, empty if nobody. That is judged on what was opened:
// the owner and mode of the file, of each directory above it and of each link on the way.
func OpenTrusted(path string) (file *os.File, suspect string, err error) {
	path, err = filepath.Abs(path)
	if err != nil {
		return nil, "", err
	}
	w := walk{name: path, at: "/"}
	defer func() { unix.Close(w.dir) }()
	if w.dir, err = unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return nil, "", &fs.PathError{Op: "open", Path: path, Err: err}
	}
	handle, err := w.to(path)
	if err != nil {
		return nil, "", &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer handle.Close()
	file, err = Reopen(handle)
	return file, w.suspect, err
}

// walk follows a path by descriptors, so that nothing is exchanged behind it.
type walk struct {
	name    string
	dir     int    // the directory it has come to
	at      string // its path
	links   int
	suspect string
}

// to returns an O_PATH descriptor of the end of a path.
func (w *walk) to(path string) (*os.File, error) {
	rest := strings.Split(path, "/")
	for {
		name := rest[0]
		rest = rest[1:]
		if name == "" || name == "." {
			if len(rest) == 0 {
				return nil, unix.EISDIR
			}
			continue
		}
		fd := -1
		if err := retry(func() (err error) {
			fd, err = unix.Openat(w.dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
			return err
		}); err != nil {
			return nil, err
		}
		var entry unix.Stat_t
		if err := unix.Fstat(fd, &entry); err != nil {
			return nil, errors.Join(err, unix.Close(fd))
		}
		w.judge(filepath.Join(w.at, name), &entry)
		switch entry.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			target, err := w.readLink(fd)
			if err = errors.Join(err, unix.Close(fd)); err != nil {
				return nil, err
			}
			if strings.HasPrefix(target, "/") {
				root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
				if err != nil {
					return nil, err
				}
				w.enter(root, "/")
			}
			rest = append(strings.Split(target, "/"), rest...)
		case unix.S_IFDIR:
			w.enter(fd, filepath.Join(w.at, name))
			if len(rest) == 0 {
				return nil, unix.EISDIR
			}
		default:
			if len(rest) > 0 {
				return nil, errors.Join(unix.ENOTDIR, unix.Close(fd))
			}
			return os.NewFile(uintptr(fd), w.name), nil
		}
	}
}

func (w *walk) enter(fd int, at string) {
	unix.Close(w.dir)
	w.dir, w.at = fd, at
}

func (w *walk) readLink(fd int) (string, error) {
	if w.links++; w.links > maxLinks {
		return "", unix.ELOOP
	}
	buffer := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buffer)
	return string(buffer[:max(n, 0)]), err
}

// judge looks at an entry of a directory that has been judged before. Who owns a directory, or may write to it, can exchange
// its entries, but for those of others in one with the sticky bit. The mode of a link means nothing.
func (w *walk) judge(path string, entry *unix.Stat_t) {
	const writable = 0o022 // by group or others; a group's bit is also the mask of an ACL (acl(5))
	switch {
	case w.suspect != "":
	case !isOurs(entry.Uid):
		w.suspect = fmt.Sprintf("%q belongs to the user with the ID %d", path, entry.Uid)
	case entry.Mode&unix.S_IFMT == unix.S_IFLNK:
	case entry.Mode&writable != 0 && (entry.Mode&unix.S_IFMT != unix.S_IFDIR || entry.Mode&unix.S_ISVTX == 0):
		w.suspect = fmt.Sprintf("%q can be written to by others (its mode is %#o)", path, entry.Mode&0o7777)
	}
}

func isOurs(uid uint32) bool { return uid == 0 || int(uid) == os.Geteuid() }
