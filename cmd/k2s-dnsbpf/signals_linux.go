package main

import (
	"os"
	"os/signal"
	"slices"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// changing are the commands that change the host. They must not be interrupted because nobody reads their output any more.
var changing = []string{"attach", "detach", "restore"}

// prepareSignals sets up signal handling for a command, except for the signals that end every command.
func prepareSignals(cmd *cobra.Command, _ []string) {
	if slices.Contains(changing, cmd.Name()) {
		outliveReaders()
	}
	if !reloads(cmd) {
		ctx, _ := signal.NotifyContext(cmd.Context(), unix.SIGHUP)
		cmd.SetContext(ctx)
	}
}

// outliveReaders makes writes fail that would otherwise end the process: to a pipe or socket whose reader is gone (SIGPIPE, after which systemd
// considers a service to have ended well), and beyond a file size limit (SIGXFSZ). The signals are caught, not ignored, because child processes would
// inherit that. Only SIGTTOU, by which a terminal stops background writers, has to be ignored.
func outliveReaders() {
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE, unix.SIGXFSZ)
	signal.Ignore(unix.SIGTTOU)
}

// reloads reports whether a hangup makes the command read its settings again. It does for a daemon, unless that is in the foreground of a terminal,
// whose end would leave nobody responsible for the host's resolver file. A daemon started by nohup ignores its terminal.
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

// unblockStderr keeps a crash from waiting for a reader: the runtime's output to a pipe that nobody reads would keep the process
// and its sockets alive. The pipe or terminal is reopened, since its flags are shared with whoever passed it on. A socket can't be reopened.
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
