package hostfs

import (
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func (osFS) Lstat(name string) (Info, error) {
	found, err := os.Lstat(name)
	if err != nil {
		return Info{}, err
	}
	info := Info{Mode: found.Mode(), Size: found.Size(), Mtime: found.ModTime(), Links: 1}
	if st, ok := found.Sys().(*syscall.Stat_t); ok {
		info.UID, info.GID, info.Links = st.Uid, st.Gid, uint32(st.Nlink)
		info.Dev, info.Ino = uint64(st.Dev), st.Ino
		info.Atime, info.Btime = time.Unix(st.Atimespec.Unix()), time.Unix(st.Birthtimespec.Unix())
		info.Immutable = st.Flags&(unix.UF_IMMUTABLE|unix.SF_IMMUTABLE) != 0
		info.Append = st.Flags&(unix.UF_APPEND|unix.SF_APPEND) != 0
	}
	return info, nil
}

func (osFS) RenameNew(oldname, newname string) error {
	return linkErr("rename", oldname, newname, retry(func() error { return unix.RenamexNp(oldname, newname, unix.RENAME_EXCL) }))
}

func (osFS) Exchange(a, b string) error {
	return linkErr("exchange", a, b, retry(func() error { return unix.RenamexNp(a, b, unix.RENAME_SWAP) }))
}
