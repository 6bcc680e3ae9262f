//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/control"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// OtherVersion returns the version of the daemon that is attached, if it is another one than this program's; empty if not, or
// if none answers.
func OtherVersion(ctx context.Context, c config.Config, version string) string {
	report, err := control.Status(ctx, c)
	if err != nil || report.Version == version {
		return ""
	}
	return report.Version
}

// Replace has the daemon that is attached make way for one of this program's version, if the kernel takes that one's
// programs. An attach has to follow at once: without, the old one attaches again.
func Replace(ctx context.Context, c config.Config) error {
	if _, err := state.Open(c.StateDir); errors.Is(err, state.ErrNewer) {
		return fmt.Errorf("the daemon of another version stays: %w, or k2s-dnsbpf detach first", err)
	}
	if c.BPF {
		if err := datapath.CheckLoad(); err != nil {
			return fmt.Errorf("the daemon of another version stays: %w", err)
		}
	}
	if err := control.Replace(ctx, c); err != nil {
		return fmt.Errorf("have the daemon of another version make way: %w: or run k2s-dnsbpf detach, and attach again", err)
	}
	return nil
}
