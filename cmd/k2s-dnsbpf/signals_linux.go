package main

import (
	"os"
	"os/signal"
	"slices"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// changing are the commands that change the host. What they are in the middle of is not cut short by who no longer reads what they say.
var changing = []string{"attach", "detach", "restore"}

// prepareSignals says what the signals mean to a command, but for those that end any.
func prepareSignals(cmd *cobra.Command, _ []string) {
	if slices.Contains(changing, cmd.Name()) {
		outliveReaders()
	}
	if !reloads(cmd) {
		ctx, _ := signal.NotifyContext(cmd.Context(), unix.SIGHUP)
		cmd.SetContext(ctx)
	}
}

// outliveReaders has a write fail where it would end the process: to a pipe or socket whose reader is gone (SIGPIPE, after which systemd
// takes a service for ended well), and past a limit of file sizes (SIGXFSZ). They are caught, not ignored: programs that we start would
// inherit that. Only for SIGTTOU, by which a terminal stops who writes from the background, to catch it is not enough.
func outliveReaders() {
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE, unix.SIGXFSZ)
	signal.Ignore(unix.SIGTTOU)
}

// reloads reports whether a hangup has the command read its settings again: a daemon's does, unless it is in the foreground of a terminal,
// whose end would leave the host's resolver file to nobody. A daemon that nohup started has no terminal that it minds.
func reloads(cmd *cobra.Command) bool {
	foreground, err := cmd.Flags().GetBool("foreground")
	return err == nil && foreground && (signal.Ignored(unix.SIGHUP) || !hasTerminal())
}

// hasTerminal reports whether this process has a controlling terminal (tty(4)).
func hasTerminal() bool {
	terminal, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NOCTTY|unix.O_NONBLOCK, 0) //nolint:forbidigo // the device is what is meant
	if err != nil {
		return false
	}
	_ = terminal.Close()
	return true
}

// unblockStderr has a crash not wait for a reader either: what the runtime writes of it to a pipe that nobody empties would keep the process
// from ending, with its sockets. The pipe or terminal is opened anew, for its flags are also those of who gave it to us. A socket can't be.
func unblockStderr() {
	info, err := os.Stderr.Stat()
	if err != nil || info.Mode()&(os.ModeNamedPipe|os.ModeCharDevice) == 0 {
		return
	}
	fd, err := unix.Open("/proc/self/fd/2", unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	if err := unix.Dup3(fd, unix.Stderr, 0); err != nil {
		_ = unix.Close(fd)
		return
	}
	stderr.use(os.NewFile(uintptr(fd), "stderr"))
}
