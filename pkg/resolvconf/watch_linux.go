package resolvconf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// watchPause is how long a Watcher sleeps after each wake. A program that
// writes in a loop then wakes us 50 times a second and not as often as it can.
const watchPause = 20 * time.Millisecond

// dirEvents are all by which a name in a directory becomes another.
const dirEvents = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_ATTRIB | unix.IN_DELETE |
	unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// Watcher wakes its owner when followed names change, and when anything is
// mounted or unmounted, since a mount over a name is not an event in its directory.
// It is an [Evidence]. It watches directories by inotify(7) itself and not by a
// library: whether a file was renamed or written to its name, which decides
// how soon it can be trusted, is what portable libraries do not tell.
type Watcher struct {
	wake    chan struct{}
	stop    int // eventfd(2)
	inotify int
	mounts  int
	writers *writers // nil where the kernel does not say who it was
	ended   chan struct{}

	mu      sync.Mutex // guards what follows
	dirs    map[int32]string
	watched map[string]int32
	names   map[string]bool // that matter, and directories that are not there yet
	renamed map[string]bool
}

// NewWatcher starts a Watcher that follows nothing yet. Close it.
func NewWatcher() (*Watcher, error) {
	w := &Watcher{
		wake: make(chan struct{}, 1), ended: make(chan struct{}), stop: -1, inotify: -1, mounts: -1,
		dirs: map[int32]string{}, watched: map[string]int32{}, names: map[string]bool{}, renamed: map[string]bool{},
	}
	err := w.open()
	if err != nil {
		w.release()
		return nil, fmt.Errorf("watch the resolver file: %w", err)
	}
	w.writers = newWriters()
	go w.run()
	return w, nil
}

func (w *Watcher) open() (err error) {
	if w.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return os.NewSyscallError("eventfd", err)
	}
	if w.inotify, err = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK); err != nil {
		return os.NewSyscallError("inotify_init1", err)
	}
	const mountinfo = "/proc/self/mountinfo"
	if w.mounts, err = unix.Open(mountinfo, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return &fs.PathError{Op: "open", Path: mountinfo, Err: err}
	}
	return nil
}

func (w *Watcher) release() {
	for _, fd := range []int{w.stop, w.inotify, w.mounts} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	w.writers.close()
}

// Wake delivers a value after changes; many are one.
func (w *Watcher) Wake() <-chan struct{} { return w.wake }

// Close ends the watch.
func (w *Watcher) Close() {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(w.stop, one[:])
	<-w.ended
	w.release()
}

// Follow implements Evidence. A directory that is not there is waited for, in
// the nearest one above it that is. It is cheap to call again: the kernel knows
// a directory that it watches, and a recreated directory is a different one.
func (w *Watcher) Follow(names []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names = make(map[string]bool, len(names))
	wanted := make(map[string]int32, len(names))
	for _, name := range names {
		for {
			w.names[name] = true
			dir := filepath.Dir(name)
			wd, err := unix.InotifyAddWatch(w.inotify, dir, dirEvents)
			if err == nil {
				wanted[dir] = int32(wd)
				w.dirs[int32(wd)] = dir
				w.writers.follow(dir)
				break
			}
			if dir == name {
				break
			}
			name = dir
		}
	}
	for dir, wd := range w.watched {
		if now, ok := wanted[dir]; ok && now == wd {
			continue
		}
		delete(w.dirs, wd)
		if _, ok := wanted[dir]; !ok {
			_, _ = unix.InotifyRmWatch(w.inotify, uint32(wd))
			w.writers.leave(dir)
		}
	}
	w.watched = wanted
	w.writers.only(w.names)
	maps.DeleteFunc(w.renamed, func(name string, _ bool) bool { return !w.names[name] })
}

// Renamed implements Evidence.
func (w *Watcher) Renamed(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.renamed[name]
}

// Writer implements Evidence.
func (w *Watcher) Writer(name string) string { return w.writers.last(name) }

func (w *Watcher) run() {
	defer close(w.ended)
	fds := []unix.PollFd{
		{Fd: int32(w.stop), Events: unix.POLLIN},
		{Fd: int32(w.inotify), Events: unix.POLLIN},
		{Fd: int32(w.mounts), Events: unix.POLLPRI}, // proc_pid_mountinfo(5)
		{Fd: w.writers.descriptor(), Events: unix.POLLIN},
	}
	for {
		_, err := unix.Poll(fds, -1)
		if err != nil && !errors.Is(err, unix.EINTR) || fds[0].Revents != 0 {
			return
		}
		// Who it was first: a process may end at any moment.
		if fds[3].Revents != 0 {
			w.writers.read()
		}
		changed := fds[2].Revents != 0
		if fds[1].Revents != 0 && w.read() {
			changed = true
		}
		if changed {
			select {
			case w.wake <- struct{}{}:
			default:
			}
		}
		if n, _ := unix.Poll(fds[:1], int(watchPause.Milliseconds())); n > 0 {
			return
		}
	}
}

// read takes what inotify has and reports whether a followed name is in it.
func (w *Watcher) read() (changed bool) {
	var buf [16 << 10]byte
	n, err := unix.Read(w.inotify, buf[:])
	if err != nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for data := buf[:n]; len(data) >= unix.SizeofInotifyEvent; {
		event := (*unix.InotifyEvent)(unsafe.Pointer(&data[0]))
		end := unix.SizeofInotifyEvent + int(event.Len)
		name := strings.TrimRight(string(data[unix.SizeofInotifyEvent:end]), "\x00")
		data = data[end:]
		dir, known := w.dirs[event.Wd]
		switch {
		case event.Mask&unix.IN_Q_OVERFLOW != 0:
			clear(w.renamed)
			changed = true
		case !known:
		case name == "": // of the directory itself
			changed = true
		case w.names[filepath.Join(dir, name)]:
			changed = true
			switch path := filepath.Join(dir, name); {
			case event.Mask&unix.IN_MOVED_TO != 0:
				w.renamed[path] = true
			case event.Mask&(unix.IN_CREATE|unix.IN_MODIFY|unix.IN_CLOSE_WRITE|unix.IN_DELETE|unix.IN_MOVED_FROM) != 0:
				delete(w.renamed, path)
			}
		}
	}
	return changed
}
