package resolvconf

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// writerEvents are the events of which the process is noted.
const writerEvents = unix.FAN_CREATE | unix.FAN_MODIFY | unix.FAN_ATTRIB | unix.FAN_DELETE | unix.FAN_MOVED_TO | unix.FAN_EVENT_ON_CHILD

// writers notes by fanotify(7) which process changed a name last: inotify does
// not say. It needs CAP_SYS_ADMIN, and a file system that can name a directory
// by a handle; without one of them nobody is known. A nil one knows nobody.
type writers struct {
	fd int

	mu    sync.Mutex        // guards what follows
	dirs  map[string]string // by handle
	names map[string]bool   // that matter
	known map[string]string // by name
}

func newWriters() *writers {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_REPORT_DFID_NAME|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	return &writers{fd: fd, dirs: map[string]string{}, known: map[string]string{}}
}

func (w *writers) close() {
	if w != nil {
		_ = unix.Close(w.fd)
	}
}

// descriptor is for poll(2), which passes over a negative one.
func (w *writers) descriptor() int32 {
	if w == nil {
		return -1
	}
	return int32(w.fd)
}

func (w *writers) follow(dir string) {
	if w == nil {
		return
	}
	key, err := handleOf(dir)
	if err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dirs[key] == dir {
		return
	}
	if unix.FanotifyMark(w.fd, unix.FAN_MARK_ADD|unix.FAN_MARK_ONLYDIR, writerEvents, unix.AT_FDCWD, dir) == nil {
		w.dirs[key] = dir
	}
}

func (w *writers) leave(dir string) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = unix.FanotifyMark(w.fd, unix.FAN_MARK_REMOVE|unix.FAN_MARK_ONLYDIR, writerEvents, unix.AT_FDCWD, dir)
	for key, name := range w.dirs {
		if name == dir {
			delete(w.dirs, key)
		}
	}
}

// atHandleFID is AT_HANDLE_FID of linux/fcntl.h.
const atHandleFID = 0x200

// handleOf names a directory as an event does: also where the handle can only
// be compared and not opened, as on an overlay (Linux 6.6).
func handleOf(dir string) (string, error) {
	handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, dir, atHandleFID|unix.AT_SYMLINK_FOLLOW)
	if errors.Is(err, unix.EINVAL) {
		handle, _, err = unix.NameToHandleAt(unix.AT_FDCWD, dir, unix.AT_SYMLINK_FOLLOW)
	}
	if err != nil {
		return "", err
	}
	return handleKey(handle.Type(), handle.Bytes()), nil
}

func handleKey(kind int32, data []byte) string { return fmt.Sprintf("%d %x", kind, data) }

// only says which names matter.
func (w *writers) only(names map[string]bool) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names = maps.Clone(names)
}

// last names who changed a name since last asked.
func (w *writers) last(name string) string {
	if w == nil {
		return ""
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	who := w.known[name]
	delete(w.known, name)
	return who
}

// read takes what fanotify has. Our own changes are not noted.
func (w *writers) read() {
	var buf [16 << 10]byte
	n, err := unix.Read(w.fd, buf[:])
	if err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for data := buf[:n]; len(data) >= unix.FAN_EVENT_METADATA_LEN; {
		size := int(binary.NativeEndian.Uint32(data))
		if size < unix.FAN_EVENT_METADATA_LEN || size > len(data) {
			return
		}
		event := data[:size]
		data = data[size:]
		pid := int(int32(binary.NativeEndian.Uint32(event[20:])))
		if pid == os.Getpid() {
			continue
		}
		info := event[binary.NativeEndian.Uint16(event[6:]):]
		key, name, ok := parseDirInfo(info)
		if path := filepath.Join(w.dirs[key], name); ok && w.names[path] {
			w.known[path] = describeProcess(pid)
		}
	}
}

// parseDirInfo reads struct fanotify_event_info_fid of type DFID_NAME: type,
// pad and length; file system; size, type and bytes of the handle; name, NUL.
func parseDirInfo(info []byte) (key, name string, ok bool) {
	const header, fsid, handle = 4, 8, 8
	if len(info) < header+fsid+handle || info[0] != unix.FAN_EVENT_INFO_TYPE_DFID_NAME {
		return "", "", false
	}
	rest := info[header+fsid:]
	size := int(binary.NativeEndian.Uint32(rest))
	kind := int32(binary.NativeEndian.Uint32(rest[4:]))
	if size < 0 || size > len(rest)-handle {
		return "", "", false
	}
	text, _, ok := bytes.Cut(rest[handle+size:], []byte{0})
	return handleKey(kind, rest[handle:handle+size]), string(text), ok
}

// describeProcess names a process, which may have ended by now.
func describeProcess(pid int) string {
	if pid <= 0 {
		return "a process of another PID namespace"
	}
	comm, err := safefile.ReadFile(context.Background(), fmt.Sprintf("/proc/%d/comm", pid), 64)
	if err != nil {
		return fmt.Sprintf("process %d, which has ended", pid)
	}
	return fmt.Sprintf("process %d (%s)", pid, strings.TrimSpace(string(comm)))
}
