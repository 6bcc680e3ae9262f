package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/daemon"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// service runs a daemon in this process and handles its starter, its service manager and signals.
type service struct {
	settings *settings
	config   config.Config // of file and command line, as last read
	from     string        // the directory that relative paths refer to
	log      *zap.Logger
	file     *logFile
}

func (s *service) run(cmd *cobra.Command) error {
	notify := readyNotifier()
	unblockStderr()
	s.file = openedLog(s.config)
	s.settings.file = below(s.from, s.settings.file)
	// So as not to keep the file system busy that it was started from.
	if err := os.Chdir("/"); err != nil {
		return fmt.Errorf("leave the working directory: %w", err)
	}
	hangups := make(chan os.Signal, 1)
	if reloads(cmd) {
		signal.Notify(hangups, unix.SIGHUP)
	}
	d := daemon.New(s.config, version, s.log)
	if os.Getenv("NOTIFY_SOCKET") != "" {
		d.Manager = s
	}
	err := d.Run(cmd.Context(), func(report status.Report) {
		notify(report.Summary(), nil)
		s.tell("READY=1")
		go s.follow(cmd.Context(), d, hangups)
	})
	// Has no effect after ready.
	notify("", err)
	return err
}

// StartSuccessor implements daemon.Manager.
func (s *service) StartSuccessor() (pid int, err error) {
	// By the name that the manager used: a package may have replaced the file, or what that name is a link to.
	program := os.Args[0]
	if strings.ContainsRune(program, filepath.Separator) {
		program = below(s.from, program)
	} else {
		program, err = exec.LookPath(program)
	}
	if err != nil {
		return 0, fmt.Errorf("start the successor: %w", err)
	}
	child := exec.Command(program, os.Args[1:]...)
	child.Dir, child.Stdout, child.Stderr = s.from, os.Stdout, os.Stderr
	if err := child.Start(); err != nil {
		return 0, fmt.Errorf("start the successor: %w", err)
	}
	go func() { _ = child.Wait() }()
	return child.Process.Pid, nil
}

// Succeeded implements daemon.Manager.
func (s *service) Succeeded(pid int) { s.tell(fmt.Sprintf("MAINPID=%d", pid)) }

// follow handles hangups. One that arrived before the daemon was ready has been queued.
func (s *service) follow(ctx context.Context, d *daemon.Daemon, hangups <-chan os.Signal) {
	for range hangups {
		s.tell(fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", monotonic().Microseconds()))
		s.file.reopen(os.O_CREATE)
		state := "READY=1\nSTATUS="
		if err := s.reload(ctx, d); err != nil {
			s.log.Error("hangup: settings not read again", zap.Error(err))
			state += "settings not read again: " + status.Printable(err.Error(), "")
		}
		s.tell(state)
	}
}

// reload reads file and command line again. If they have not changed, the settings of a later attach stay in effect.
func (s *service) reload(ctx context.Context, d *daemon.Daemon) error {
	fresh, err := s.settings.config(ctx)
	if err != nil {
		return err
	}
	if err := absolutePaths(&fresh, s.from); err != nil {
		return err
	}
	if reflect.DeepEqual(fresh, s.config) {
		s.log.Info("hangup: settings unchanged")
		return nil
	}
	if _, err := d.Reload(ctx, fresh); err != nil {
		return err
	}
	s.config = fresh
	return nil
}

func (s *service) tell(state string) {
	if err := notifySystemd(state); err != nil {
		s.log.Warn("systemd not notified", zap.Error(err))
	}
}

// monotonic is the time by which systemd distinguishes old messages from new ones (sd_notify(3)).
func monotonic() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}

// logFile is the log of a daemon in the background, on standard output and standard error; nil if those are something else.
type logFile struct{ config config.Config }

func openedLog(c config.Config) *logFile {
	mine, err := os.Stderr.Stat()
	if err != nil {
		return nil
	}
	there, err := os.Stat(filepath.Join(c.RunDir, rundir.LogFile))
	if err != nil || !os.SameFile(mine, there) {
		return nil
	}
	return &logFile{c}
}

// reopen switches to the file of that name, after the old one has been moved away. With O_CREATE it is created if it does not exist. If it can't
// be opened, the old one stays in use.
func (l *logFile) reopen(flags int) {
	if l == nil {
		return
	}
	file, err := openLogFile(l.config, flags)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		fmt.Fprintf(stderr, "k2s-dnsbpf: switch to another log: %s\n", err)
		return
	}
	defer file.Close()
	for _, fd := range []int{unix.Stdout, unix.Stderr} {
		if err := unix.Dup3(int(file.Fd()), fd, 0); err != nil {
			fmt.Fprintf(stderr, "k2s-dnsbpf: switch to %s: %s\n", file.Name(), err)
		}
	}
}
