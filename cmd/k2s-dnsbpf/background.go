//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
)

// readyFDVariable names the file descriptor through which a daemon in the background reports the outcome to its starter.
const readyFDVariable = "K2S_DNSBPF_READY_FD"

// outcome is what a daemon reports to its starter, once.
type outcome struct {
	Ready    bool   `json:"ready"`
	Says     string `json:"says,omitempty"`     // for the user
	Attached bool   `json:"attached,omitempty"` // another one is
	Error    string `json:"error,omitempty"`
}

// readyNotifier returns the function that reports to the starter. Only its first call counts; it does nothing if nobody
// waits.
func readyNotifier() func(says string, err error) {
	fd, err := strconv.Atoi(os.Getenv(readyFDVariable))
	if err != nil {
		return func(string, error) {}
	}
	pipe := os.NewFile(uintptr(fd), "ready")
	var once sync.Once
	return func(says string, err error) {
		once.Do(func() {
			result := outcome{Ready: err == nil, Says: says, Attached: errors.Is(err, rundir.ErrAttached)}
			if err != nil {
				result.Error = err.Error()
			}
			// The starter may have exited; nobody reads it then.
			_ = json.NewEncoder(pipe).Encode(result)
			_ = pipe.Close()
		})
	}
}

// attachInBackground starts this program again, in foreground mode and in a new session, and waits until it is
// ready or has failed. It returns the daemon's message.
func attachInBackground(ctx context.Context, c config.Config) (said string, err error) {
	if err := rundir.CheckPrivilege("attach"); err != nil {
		return "", err
	}
	if err := host.CheckFiles(); err != nil { // the daemon does not come so far as to say so
		return "", err
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this program: %w", err)
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		return "", fmt.Errorf("make a pipe to the daemon: %w", err)
	}
	defer reader.Close()
	defer writer.Close()
	log, err := openLog(c)
	if err != nil {
		return "", err
	}
	defer log.Close()

	child := exec.Command(self, foregroundArgs(os.Args[1:])...)
	child.Stdout, child.Stderr = log, log
	child.ExtraFiles = []*os.File{writer}
	child.Env = append(os.Environ(), readyFDVariable+"=3")
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := child.Start(); err != nil {
		return "", fmt.Errorf("start the daemon: %w", err)
	}
	if err := writer.Close(); err != nil {
		return "", fmt.Errorf("close the pipe to the daemon: %w", err)
	}
	// Ctrl-C ends the attempt: the daemon undoes its changes and reports that.
	stop := context.AfterFunc(ctx, func() { _ = child.Process.Signal(syscall.SIGTERM) })
	defer stop()

	var result outcome
	err = json.NewDecoder(reader).Decode(&result)
	if err == nil && result.Ready {
		return result.Says, child.Process.Release()
	}
	waited := child.Wait()
	switch {
	case result.Attached:
		return "", rundir.ErrAttached
	case result.Error != "":
		return "", errors.New(result.Error)
	case errors.Is(err, io.EOF):
		return "", fmt.Errorf("the daemon died without a word: %w: its log is %s", waited, log.Name())
	}
	return "", fmt.Errorf("hear from the daemon: %w", err)
}

// foregroundArgs adds --foreground right after the command, where a "--" can't hide it.
func foregroundArgs(args []string) []string {
	at := slices.Index(args, "attach") + 1
	return slices.Insert(slices.Clone(args), at, "--foreground")
}

// absolutePaths makes paths absolute that are relative to the current directory, because the daemon changes its directory.
func absolutePaths(c *config.Config, from string) error {
	if c.Kubeconfig != "" {
		c.Kubeconfig = below(from, c.Kubeconfig)
	}
	if list := os.Getenv("KUBECONFIG"); list != "" {
		paths := filepath.SplitList(list)
		for i, path := range paths {
			paths[i] = below(from, path)
		}
		if err := os.Setenv("KUBECONFIG", strings.Join(paths, string(filepath.ListSeparator))); err != nil {
			return fmt.Errorf("set $KUBECONFIG: %w", err)
		}
	}
	return nil
}

// below resolves a path relative to a directory.
func below(directory, path string) string {
	if filepath.IsAbs(path) {
		return filepath.Clean(path)
	}
	return filepath.Join(directory, path)
}

// openLogTries limits the attempts to open the daemon's log while others exit and remove its directory.
const openLogTries = 5

// openLog opens the daemon's log. It does not truncate the log of another attachment: an attach beside it fails and says so.
func openLog(c config.Config) (log *os.File, err error) {
	for range openLogTries {
		if err := rundir.Make(c); err != nil {
			return nil, fmt.Errorf("create run directory: %w", err)
		}
		log, err = openLogFile(c, os.O_CREATE)
		if !errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the daemon's log: %w", err)
	}
	return log, nil
}

func openLogFile(c config.Config, flags int) (*os.File, error) {
	return os.OpenFile(filepath.Join(c.RunDir, rundir.LogFile), flags|os.O_WRONLY|os.O_APPEND|syscall.O_NOFOLLOW, 0o640)
}
