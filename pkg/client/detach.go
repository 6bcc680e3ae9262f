//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/control"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/guardian"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/handover"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// stopTimeout limits a complete stop: what is not undone by then stays in the journal for the next one.
const stopTimeout = 10 * time.Second

// Detach ends the attachment of this host: it asks a running daemon to detach and waits, and undoes what a dead daemon
// left behind. The daemon lingers for as long as the configuration says. It returns a line for each thing that was done, and
// one for a daemon that lingers; no lines mean that nothing was attached.
func Detach(ctx context.Context, c config.Config, log *zap.Logger) (done []string, err error) {
	if err := rundir.CheckPrivilege("detach"); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	pid, err := owner(c)
	if err != nil {
		return nil, err
	}
	if pid != 0 {
		if done, err = end(ctx, pid, c); err != nil {
			return nil, err
		}
	}
	owned, err := awaitLocks(ctx, c, pid)
	if err != nil {
		return nil, fmt.Errorf("detach: the daemon does not end: %w: see %s", err, filepath.Join(c.RunDir, rundir.LogFile))
	}
	defer func() { err = errors.Join(err, owned.Release()) }()
	journal, err := host.OpenJournal(c, log)
	if err != nil {
		return done, err
	}
	switch {
	case pid == 0:
	case host.HasRemains(c, journal):
		log.Warn("the daemon ended before it had restored everything: undoing the rest", zap.Int("pid", pid))
	default:
		done = append(done, fmt.Sprintf("daemon %d detached", pid))
	}
	left, err := host.Undo(c, journal, log)
	for _, line := range left {
		if !slices.Contains(done, line) { // both report a file that is left alone
			done = append(done, line)
		}
	}
	said, lingerErr := handover.End(c)
	if said != "" {
		done = append(done, said)
	}
	return done, errors.Join(err, lingerErr)
}

// owner returns the daemon that has to be ended, 0 for none. A guardian is not one: it finishes in a moment.
func owner(c config.Config) (pid int, err error) {
	pid, held := state.Holder(rundir.Lock(c))
	switch {
	case held && pid == 0:
		return 0, fmt.Errorf("detach: %s is held by a process that can't be seen from here: run this where it was started, such as in its container", rundir.Lock(c))
	case held && guardian.Is(c, pid):
		return 0, nil
	case held:
		return pid, nil
	}
	return rundir.Orphan(c), nil
}

// end asks a daemon to detach. One that accepts no orders, because it is still starting or can't be reached, gets a signal,
// and does not linger. If it dies meanwhile there is nothing to ask. It returns what the daemon did to the resolver file.
func end(ctx context.Context, pid int, c config.Config) (done []string, err error) {
	// A stopped process would neither answer nor handle a signal.
	if err := rundir.Signal(pid, unix.SIGCONT); err != nil {
		return nil, err
	}
	if now, _ := state.Holder(rundir.Lock(c)); now != pid {
		return nil, rundir.Terminate(pid) // an orphan
	}
	done, err = control.Detach(ctx, c)
	switch {
	case err == nil, errors.Is(err, control.ErrNoDaemon):
		return done, nil
	case errors.Is(err, control.ErrStays):
		return nil, fmt.Errorf("detach: %w", err)
	}
	if now, held := state.Holder(rundir.Lock(c)); !held || now != pid {
		return nil, nil
	}
	return nil, rundir.Terminate(pid)
}

// awaitLocks waits for the locks of a process that is about to end, 0 for none. If it is stopped meanwhile it is continued.
func awaitLocks(ctx context.Context, c config.Config, pid int) (*rundir.Owned, error) {
	for {
		trying, cancel := context.WithTimeout(ctx, control.Timeout)
		owned, err := rundir.Await(trying, c)
		cancel()
		if err == nil && pid != 0 && rundir.Orphan(c) == pid && !rundir.AwaitEnd(pid, control.Timeout) {
			err = errors.Join(fmt.Errorf("process %d: %w", pid, state.ErrLocked), owned.Release())
		}
		if !errors.Is(err, state.ErrLocked) || ctx.Err() != nil {
			return owned, err
		}
		if pid != 0 {
			if err := rundir.Signal(pid, unix.SIGCONT); err != nil {
				return nil, err
			}
		}
	}
}

// PlanBeside says what an attach would do beside an attached daemon; attached is false if there is none.
func PlanBeside(c config.Config) (line string, attached bool) {
	pid, held := state.Holder(rundir.Lock(c))
	if !held {
		return "", false
	}
	if journal, err := state.Open(c.StateDir); err == nil {
		if now, err := config.FromJournal(journal.Header().Params); err == nil && !now.Same(c) {
			return fmt.Sprintf("already attached by process %d: switch to these settings without interruption", pid), true
		}
	}
	return fmt.Sprintf("nothing: already attached by process %d", pid), true
}

// PlanDetach describes what a detach would do. It changes nothing.
func PlanDetach(c config.Config) (lines []string, err error) {
	journal, err := state.Open(c.StateDir)
	if err != nil {
		return nil, err
	}
	if pid, held := state.Holder(rundir.Lock(c)); held {
		lines = append(lines, fmt.Sprintf("end the daemon, process %d", pid))
	}
	lines = append(lines, host.DescribeUndo(journal)...)
	var lingers status.Report
	handover.Report(&lingers, c)
	if l := lingers.Lingering; l != nil {
		what := "leave"
		if c.Linger == 0 {
			what = "end"
		}
		lines = append(lines, fmt.Sprintf("%s process %d, which lingers", what, l.PID))
	}
	if len(lines) == 0 {
		lines = []string{"nothing: not attached"}
	}
	return lines, nil
}
