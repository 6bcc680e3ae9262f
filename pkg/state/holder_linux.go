package state

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// holderOf returns the process that has a file locked for itself, by the kernel's list (proc_locks(5)), and not one that only
// asks who has; 0 if it is in another PID
// namespace, or can't be told.
func holderOf(f *os.File) int {
	var mine unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &mine); err != nil {
		return 0
	}
	list, err := os.Open("/proc/locks")
	if err != nil {
		return 0
	}
	defer list.Close()
	// 1: FLOCK  ADVISORY  WRITE 1234 00:1a:5678 0 EOF
	wanted := fmt.Sprintf("%02x:%02x:%d", unix.Major(uint64(mine.Dev)), unix.Minor(uint64(mine.Dev)), mine.Ino)
	lines := bufio.NewScanner(list)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || fields[1] != "FLOCK" || fields[3] != "WRITE" || fields[5] != wanted {
			continue
		}
		if pid, err := strconv.Atoi(fields[4]); err == nil && pid > 0 {
			return pid
		}
	}
	return 0
}

// HoldsRemoved returns the process that has a lock on path whose file was removed since, or whose directory was; 0 for none.
// It looks through all processes that it may see, for what they hold: their names tell nothing.
func HoldsRemoved(path string) (pid int) {
	there, ok := deviceOf(filepath.Dir(path))
	if !ok {
		return 0
	}
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return 0
	}
	for _, link := range links {
		target, err := os.Readlink(link)
		if err != nil || target != path+" (deleted)" {
			continue
		}
		// The same path may be another file in a container.
		var file unix.Stat_t
		if err := unix.Stat(link, &file); err != nil || uint64(file.Dev) != there {
			continue
		}
		pid, _ := strconv.Atoi(strings.Split(link, "/")[2])
		if pid != os.Getpid() && isLocked(link) {
			return pid
		}
	}
	return 0
}

// isLocked reports whether the file behind a link of /proc is locked by another.
func isLocked(link string) bool {
	f, err := os.OpenFile(link, os.O_RDONLY, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return lockFile(f, false) != nil
}

// deviceOf returns the device of a directory, or of the nearest one above that exists.
func deviceOf(dir string) (device uint64, ok bool) {
	for {
		var stat unix.Stat_t
		if err := unix.Stat(dir, &stat); err == nil {
			return uint64(stat.Dev), true
		}
		if dir == filepath.Dir(dir) {
			return 0, false
		}
		dir = filepath.Dir(dir)
	}
}

// holds reports whether a process has a file open.
func holds(pid int, f *os.File) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, link := range links {
		if theirs, err := os.Stat(link); err == nil && os.SameFile(mine, theirs) {
			return true
		}
	}
	return false
}
