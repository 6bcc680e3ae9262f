package rundir

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
)

// Name is a daemon's name in lists of processes, whatever its program file is called.
const Name = "k2s-dnsbpf"

// SetName gives this process a name in lists of processes. Failures, as in a container, are harmless.
func SetName(name string) { _ = os.WriteFile("/proc/self/comm", []byte(name), 0o644) }

// NameOf returns a process's name in lists of processes; "" if it is gone.
func NameOf(pid int) string {
	name, err := safefile.ReadFile(context.Background(), fmt.Sprintf("/proc/%d/comm", pid), 64)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(name))
}

// Terminate asks a process to end. One that is stopped is continued, or it would never see the signal.
func Terminate(pid int) error {
	return errors.Join(Signal(pid, unix.SIGTERM), Signal(pid, unix.SIGCONT))
}

// Signal sends a signal. It is not an error if the process has ended.
func Signal(pid int, signal unix.Signal) error {
	if pid <= 0 { // kill(2) would take that for a group
		return errors.New("the process can't be seen from here: run this where it was started, such as in its container")
	}
	if err := unix.Kill(pid, signal); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to process %d: %w", unix.SignalName(signal), pid, err)
	}
	return nil
}

// AwaitEnd waits until a process has ended, and with it all that it had open, and reports whether it has.
func AwaitEnd(pid int, limit time.Duration) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	for end := time.Now().Add(limit); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, max(0, int(time.Until(end).Milliseconds())))
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n > 0
		}
	}
}

// GuardianName is Name for a guardian.
const GuardianName = "k2s-guardian"

// IsOurs reports whether a process has the name of one of ours. It proves nothing, and is for messages and for how long to wait
// for a port: who owns something is known by what it holds.
func IsOurs(pid int) bool {
	name := NameOf(pid)
	return name == Name || name == GuardianName
}
