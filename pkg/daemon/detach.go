//go:build linux

package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
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
	d.guard.pause()
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

// dismissGuard ends the guardian, but for the case that our file is still in place: then it goes on trying when we are
// gone.
func (d *Daemon) dismissGuard() {
	if d.guard == nil {
		return
	}
	if d.ours() {
		d.log.Error("the resolver file is left to the guardian")
		return
	}
	d.guard.dismiss()
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

// MakeRunDir makes the run directory, in which every user may ask for the status.
func MakeRunDir(c config.Config) error { return state.MkdirAll(c.RunDir) }

// removeRunDir removes the files of a run and gives the lock back. The directory goes if it was ours alone.
func removeRunDir(c config.Config, lock *state.Locked) error {
	var errs []error
	for _, path := range []string{filepath.Join(c.RunDir, controlFile), filepath.Join(c.RunDir, LogFile), guardianFile(c)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, removeLock(c.RunDir, lock))...)
}

// removeLock gives the lock back and removes the run directory if nothing else is in it: what a dead daemon left there
// stays for the next attach or detach.
func removeLock(runDir string, lock *state.Locked) error {
	return errors.Join(lock.Remove(), host.RemoveIfEmpty(runDir))
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
	path := filepath.Join(c.RunDir, lockFile)
	ended := 0
	if pid, held := state.Holder(path); held && !isGuardian(pid) { // a guardian is done in a moment
		if !isDaemon(pid) {
			return nil, fmt.Errorf("detach: %s is held by process %d, which is not k2s-dnsbpf: run this where that process was started, such as in its container",
				path, pid)
		}
		ended = pid
		if done, err = end(ctx, pid, c); err != nil {
			return nil, err
		}
	}
	lock, err := awaitLock(ctx, path, ended)
	if err != nil {
		return nil, fmt.Errorf("detach: the daemon does not end: %w: see %s", err, filepath.Join(c.RunDir, LogFile))
	}
	defer func() { err = errors.Join(err, removeRunDir(c, lock)) }()
	journal, err := host.OpenJournal(c, log)
	if err != nil {
		return done, err
	}
	switch {
	case ended == 0:
	case host.HasRemains(c, journal):
		log.Warn("the daemon ended before it had put everything back: undoing the rest", zap.Int("pid", ended))
	default:
		done = append(done, fmt.Sprintf("daemon %d detached", ended))
	}
	left, err := host.Undo(c, journal, log)
	for _, line := range left {
		if !slices.Contains(done, line) { // a file that is left is told of by both
			done = append(done, line)
		}
	}
	said, lingerErr := endLingering(c)
	if said != "" {
		done = append(done, said)
	}
	return done, errors.Join(err, lingerErr)
}

// end asks a daemon to detach. One that takes no orders, since it is still on its way up, gets a signal, and does not
// linger. There is nothing to ask of one that dies meanwhile. What the daemon did to the resolver file is returned.
func end(ctx context.Context, pid int, c config.Config) (done []string, err error) {
	// One that is stopped would neither answer nor see a signal.
	if err := sendSignal(pid, unix.SIGCONT); err != nil {
		return nil, err
	}
	done, err = requestDetach(ctx, c)
	switch {
	case err == nil, errors.Is(err, errNoDaemon):
		return done, nil
	case errors.Is(err, errStays):
		return nil, fmt.Errorf("detach: %w", err)
	}
	if now, held := state.Holder(filepath.Join(c.RunDir, lockFile)); !held || now != pid {
		return nil, nil
	}
	return nil, terminate(pid)
}

// awaitLock waits for the lock of a process that is to end. One that is stopped meanwhile is continued.
func awaitLock(ctx context.Context, path string, pid int) (*state.Locked, error) {
	for {
		trying, cancel := context.WithTimeout(ctx, controlTimeout)
		lock, err := state.Lock(trying, path)
		cancel()
		if !errors.Is(err, state.ErrLocked) || ctx.Err() != nil {
			return lock, err
		}
		if now, held := state.Holder(path); held && now == pid {
			if err := sendSignal(pid, unix.SIGCONT); err != nil {
				return nil, err
			}
		}
	}
}

// isDaemon guards against a process number from another PID namespace.
func isDaemon(pid int) bool {
	return strings.HasPrefix(processName(pid), "k2s-dnsbpf")
}

// processName is what lists of processes have for one; "" if it is gone.
func processName(pid int) string {
	name, err := safefile.ReadFile(context.Background(), fmt.Sprintf("/proc/%d/comm", pid), 64)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(name))
}

// terminate asks a process to end. One that is stopped is continued, or it would never see the signal.
func terminate(pid int) error {
	if err := sendSignal(pid, unix.SIGTERM); err != nil {
		return err
	}
	return sendSignal(pid, unix.SIGCONT)
}

func sendSignal(pid int, signal unix.Signal) error {
	if err := unix.Kill(pid, signal); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("detach: send %s to the daemon, process %d: %w", unix.SignalName(signal), pid, err)
	}
	return nil
}
