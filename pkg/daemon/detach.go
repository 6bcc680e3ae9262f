//go:build linux

package daemon

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
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

const (
	// drainTimeout is how long replies of steered queries, and answers of the forwarder, are waited for.
	drainTimeout = 250 * time.Millisecond

	// restoreRetry is how often a resolver that could not be restored is tried again.
	restoreRetry = time.Second
)

// detach is the whole way down: the resolver first, then the programs, then the forwarder, then what is left. It is
// called whether or not attach succeeded and undoes what there is.
func (d *Daemon) detach(ctx context.Context) error {
	var errs []error
	d.guardian.Pause()
	if !d.journal.Empty() {
		if err := d.restoreOrServe(ctx); err != nil {
			errs = append(errs, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if d.datapath != nil {
		errs = append(errs, d.host.Drain(ctx), d.datapath.Close())
	}
	if d.forwarder != nil {
		d.leaveForwarder(ctx)
	}
	if d.journal.Empty() {
		// Nothing was changed: there is nothing to undo, and perhaps no way to write that down.
		return errors.Join(append(errs, host.ClearJournal(d.now.config, d.journal, d.log))...)
	}
	if _, err := host.Undo(d.now.config, d.journal, d.log); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// restoreOrServe restores the resolver, and goes on serving for as long as that fails with our file in place: to end now
// would leave the host with a resolv.conf that points at nobody.
func (d *Daemon) restoreOrServe(ctx context.Context) error {
	tick := time.NewTicker(restoreRetry)
	defer tick.Stop()
	for {
		done, err := host.RestoreResolver(d.now.config, d.journal, d.log)
		if err == nil {
			for _, line := range done {
				d.log.Info(line)
			}
			return nil
		}
		if !d.ours() {
			return err
		}
		d.log.Error("resolver not restored, serving on", zap.Error(err))
		d.note(plan.ProblemResolver, err.Error())
		select {
		case <-ctx.Done():
			return err
		case <-tick.C:
		}
	}
}

// ours reports whether our file is, or may be, in place.
func (d *Daemon) ours() bool {
	if d.resolver == nil {
		return false
	}
	now, err := d.resolver.State()
	return err != nil || now == resolvconf.StateOurs
}

// dismissGuardian ends the guardian, but for the case that our file is still in place: then it goes on trying when we are
// gone.
func (d *Daemon) dismissGuardian() {
	if d.guardian == nil {
		return
	}
	if d.ours() {
		d.log.Error("the resolver file is left to the guardian")
		return
	}
	d.guardian.Dismiss()
}

// retake takes the resolver file over again after this daemon hung for so long that the guardian has put it back.
func (d *Daemon) retake() {
	now, err := d.resolver.State()
	switch {
	case err == nil && now == resolvconf.StateOriginal:
		err = d.resolver.TakeOver(takeOver(d.now.config))
	case err == nil:
		// Ours: somebody was faster. Foreign or missing: it is for its owner to say, see fillResolver.
		return
	}
	if err != nil {
		d.log.Error("resolver file not taken over again", zap.Error(err))
		d.note(plan.ProblemResolver, err.Error())
		return
	}
	d.note(plan.ProblemResolver, "")
	d.log.Warn("this daemon hung, and the guardian put the resolver file back: taken over again")
}

// Detach ends the attachment of this host: it asks a running daemon to detach and waits, and undoes what a dead one
// left. The daemon lingers for as long as the configuration says. It returns a line for each thing that was done, and
// for a daemon that lingers; none means that nothing was attached.
func Detach(ctx context.Context, c config.Config, log *zap.Logger) (done []string, err error) {
	if err := CheckPrivilege("detach"); err != nil {
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
		log.Warn("the daemon ended before it had put everything back: undoing the rest", zap.Int("pid", pid))
	default:
		done = append(done, fmt.Sprintf("daemon %d detached", pid))
	}
	left, err := host.Undo(c, journal, log)
	for _, line := range left {
		if !slices.Contains(done, line) { // a file that is left is told of by both
			done = append(done, line)
		}
	}
	said, lingerErr := handover.End(c)
	if said != "" {
		done = append(done, said)
	}
	return done, errors.Join(err, lingerErr)
}

// owner returns the daemon that is to be ended, 0 for none. A guardian is none: it is done in a moment.
func owner(c config.Config) (pid int, err error) {
	pid, held := state.Holder(rundir.Lock(c))
	switch {
	case held && pid == 0:
		return 0, fmt.Errorf("detach: %s is held by a process that can't be seen from here: run this where it was started, such as in its container", rundir.Lock(c))
	case held && guardian.Is(pid):
		return 0, nil
	case held:
		return pid, nil
	}
	return rundir.Orphan(c), nil
}

// end asks a daemon to detach. One that takes no orders, since it is still on its way up or can't be reached, gets a signal,
// and does not linger. There is nothing to ask of one that dies meanwhile. What the daemon did to the resolver file is returned.
func end(ctx context.Context, pid int, c config.Config) (done []string, err error) {
	// One that is stopped would neither answer nor see a signal.
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

// awaitLocks waits for the locks of a process that is to end, 0 for none. One that is stopped meanwhile is continued.
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
