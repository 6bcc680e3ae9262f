//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/control"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// Replace asks the attached daemon to make way for one of this program's version, if the kernel accepts its
// programs. An attach has to follow at once; otherwise the old daemon attaches again. own reports whether the old daemon, run by a service
// manager, starts its successor itself, which then has to be awaited.
func Replace(ctx context.Context, c config.Config) (own bool, err error) {
	if _, err := state.Open(c.StateDir); errors.Is(err, state.ErrNewer) {
		return false, fmt.Errorf("the daemon of another version stays: %w, or run k2s-dnsbpf detach first", err)
	}
	if c.BPF {
		if err := datapath.CheckLoad(); err != nil {
			return false, fmt.Errorf("the daemon of another version stays: %w", err)
		}
	}
	if own, err = control.Replace(ctx, c); err != nil {
		return false, fmt.Errorf("replace the daemon of another version: %w: try again, or run k2s-dnsbpf detach and attach again", err)
	}
	return own, nil
}

// AwaitSuccessor waits until a daemon other than process pid has attached, and returns its version.
func AwaitSuccessor(ctx context.Context, c config.Config, pid int) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	for {
		report, err := control.Status(ctx, c)
		if err == nil && report.PID != pid {
			return report.Version, nil
		}
		select {
		case <-ctx.Done():
			return "", errors.New("the service's new daemon did not start: see the service's log, for example with journalctl -u k2s-dnsbpf")
		case <-time.After(control.LookAgain):
		}
	}
}
