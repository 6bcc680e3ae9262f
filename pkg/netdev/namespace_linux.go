package netdev

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Namespace names the network namespace of this thread, such as "net:[4026531840] 1": its link (namespaces(7)), whose number can
// be given to another one later, and its cookie (SO_NETNS_COOKIE), which is never given twice until the next boot. A kernel
// before 5.14 has no cookies. It is empty where the namespace can't be told.
func Namespace() string {
	link, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return ""
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return link
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return link
	}
	return fmt.Sprintf("%s %d", link, cookie)
}

// FindNamespace returns a file by which the namespace of that name can be entered: one that it is mounted on, as "ip netns" and
// container runtimes do, or that of a process. It is empty if there is none that this process sees, as after the namespace's end.
func FindNamespace(name string) string {
	link, _, _ := strings.Cut(name, " ")
	// 66 24 0:4 net:[4026532008] /run/netns/blue rw shared:27 - nsfs nsfs rw (proc_pid_mountinfo(5))
	mounts, _ := os.ReadFile("/proc/thread-self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 4 && fields[3] == link {
			return fields[4]
		}
	}
	processes, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*/ns/net")
	for _, path := range processes {
		if now, err := os.Readlink(path); err == nil && now == link {
			return path
		}
	}
	return ""
}
