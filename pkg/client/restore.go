//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/control"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
)

// ErrInUse is returned by Restore beside a working daemon, which would take over the file again.
var ErrInUse = errors.New("the daemon is attached and needs its resolver file")

// Restore restores the resolver configuration and touches nothing else. It needs no daemon, only the journal or what
// is parked beside the file. Beside a daemon that hangs it does the same as the guardian; beside a working one it
// changes nothing and fails with ErrInUse.
func Restore(ctx context.Context, c config.Config, log *zap.Logger) (done []string, err error) {
	if err := rundir.CheckPrivilege("restore"); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	patience := time.After(control.Timeout)
	for {
		locks, err := rundir.Try(c)
		if locks != nil {
			if err != nil {
				// A read-only or missing file system. A holder of the lock would have had to write there too.
				log.Warn("not all locks: restoring without them", zap.Error(err))
			}
			done, err := restoreUnless(rundir.Orphan(c), c, log)
			return done, errors.Join(err, locks.Unlock())
		}
		if decided, done, err := restoreBeside(ctx, c, log); decided {
			return done, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("restore: %w", control.ErrNotServing)
		case <-patience:
			// A command or a guardian would have finished by now.
			if pid := rundir.Orphan(c); pid != 0 {
				return restoreUnless(pid, c, log)
			}
		case <-time.After(control.LookAgain):
		}
	}
}

// restoreUnless restores, unless there is a living daemon without the lock, which the caller has.
func restoreUnless(orphan int, c config.Config, log *zap.Logger) ([]string, error) {
	if orphan != 0 {
		return nil, fmt.Errorf("restore: %w (process %d, whose directories differ or are gone): run k2s-dnsbpf detach, which restores it first", ErrInUse, orphan)
	}
	return host.RestoreLocked(c, log)
}

// restoreBeside decides what to do while another process has the lock. It decides nothing if that is an attach, a
// detach, a restore or a guardian in progress.
func restoreBeside(ctx context.Context, c config.Config, log *zap.Logger) (decided bool, done []string, err error) {
	report, err := control.Status(ctx, c)
	switch {
	case err == nil && report.Resolver.State == string(resolvconf.StateOriginal):
		return true, nil, nil
	case err == nil:
		return true, nil, fmt.Errorf("restore: %w (process %d): run k2s-dnsbpf detach, which restores it first", ErrInUse, report.PID)
	case errors.Is(err, control.ErrNoDaemon), errors.Is(err, control.ErrNotServing):
		return false, nil, nil
	case ctx.Err() != nil:
		return true, nil, fmt.Errorf("restore: %w", err)
	}
	log.Warn("the daemon does not answer: restoring beside it", zap.Error(err))
	done, err = host.SuspendResolver(c, log)
	return true, done, err
}
