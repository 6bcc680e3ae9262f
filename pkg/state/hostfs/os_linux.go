package hostfs

import (
	"errors"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

func (osFS) Lstat(name string) (Info, error) {
	var st unix.Statx_t
	err := retry(func() error {
		return unix.Statx(unix.AT_FDCWD, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT,
			unix.STATX_BASIC_STATS|unix.STATX_BTIME|unix.STATX_MNT_ID, &st)
	})
	if err != nil {
		return Info{}, pathErr("lstat", name, err)
	}
	info := Info{
		Mode:      fileMode(uint32(st.Mode)),
		UID:       st.Uid,
		GID:       st.Gid,
		Size:      int64(st.Size),
		Dev:       unix.Mkdev(st.Dev_major, st.Dev_minor),
		Ino:       st.Ino,
		Links:     st.Nlink,
		Atime:     time.Unix(st.Atime.Sec, int64(st.Atime.Nsec)),
		Mtime:     time.Unix(st.Mtime.Sec, int64(st.Mtime.Nsec)),
		MountRoot: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		Immutable: st.Attributes&unix.STATX_ATTR_IMMUTABLE != 0,
		Append:    st.Attributes&unix.STATX_ATTR_APPEND != 0,
	}
	if st.Mask&unix.STATX_BTIME != 0 {
		info.Btime = time.Unix(st.Btime.Sec, int64(st.Btime.Nsec))
	}
	if st.Mask&unix.STATX_MNT_ID != 0 {
		info.MountID = st.Mnt_id
	}
	return info, nil
}

func fileMode(m uint32) fs.FileMode {
	mode := fs.FileMode(m & 0o777)
	switch m & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		mode |= fs.ModeDir
	case unix.S_IFLNK:
		mode |= fs.ModeSymlink
	case unix.S_IFIFO:
		mode |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		mode |= fs.ModeSocket
	case unix.S_IFBLK:
		mode |= fs.ModeDevice
	case unix.S_IFCHR:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	default:
		mode |= fs.ModeIrregular
	}
	if m&unix.S_ISUID != 0 {
		mode |= fs.ModeSetuid
	}
	if m&unix.S_ISGID != 0 {
		mode |= fs.ModeSetgid
	}
	if m&unix.S_ISVTX != 0 {
		mode |= fs.ModeSticky
	}
	return mode
}

func noXattrs(err error) bool { return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) }

func (osFS) Xattrs(name string) ([]Xattr, error) {
	names, err := growing(func(b []byte) (int, error) { return unix.Llistxattr(name, b) })
	if err != nil {
		if noXattrs(err) {
			return nil, nil
		}
		return nil, pathErr("listxattr", name, err)
	}
	var out []Xattr
	for start, i := 0, 0; i < len(names); i++ {
		if names[i] != 0 {
			continue
		}
		key := string(names[start:i])
		start = i + 1
		value, err := growing(func(b []byte) (int, error) { return unix.Lgetxattr(name, key, b) })
		if errors.Is(err, unix.ENODATA) || noXattrs(err) {
			continue // Removed meanwhile, or only listed by the file system.
		}
		if err != nil {
			return nil, pathErr("getxattr "+key, name, err)
		}
		out = append(out, Xattr{Name: key, Value: value})
	}
	return out, nil
}

// growing calls read until its buffer is large enough; the size asked for
// first may be stale by the second call.
func growing(read func([]byte) (int, error)) ([]byte, error) {
	for {
		n, err := read(nil)
		if err != nil || n == 0 {
			return nil, err
		}
		buf := make([]byte, n)
		n, err = read(buf)
		if errors.Is(err, unix.ERANGE) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return buf[:n], nil
	}
}

func noFlags(err error) bool {
	return errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS)
}

func (osFS) Flags(name string) (uint32, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if noFlags(err) {
		return 0, nil
	}
	return flags, pathErr("getflags", name, err)
}

func (osFS) SetFlags(name string, flags uint32) error {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return pathErr("setflags", name, unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(flags)))
}

func (f osFile) Reserve(size int64) error {
	if size == 0 {
		return nil
	}
	err := retry(func() error { return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, size) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return nil
	}
	return pathErr("fallocate", f.Name(), err)
}

func (osFS) RenameNew(oldname, newname string) error {
	return linkErr("rename", oldname, newname, retry(func() error {
		return unix.Renameat2(unix.AT_FDCWD, oldname, unix.AT_FDCWD, newname, unix.RENAME_NOREPLACE)
	}))
}

func (osFS) Exchange(a, b string) error {
	return linkErr("exchange", a, b, retry(func() error {
		return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
	}))
}

func (osFS) SetXattr(name string, x Xattr) error {
	return pathErr("setxattr "+x.Name, name, retry(func() error {
		return unix.Lsetxattr(name, x.Name, x.Value, 0)
	}))
}
