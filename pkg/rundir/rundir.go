package rundir

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/errno"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// LogFile is the name, in the run directory, of what a daemon in the background logs to.
const LogFile = "daemon.log"

// lockPoll is how often Await tries again.
const lockPoll = 20 * time.Millisecond

// Errors of Acquire.
var (
	// ErrAttached: a daemon has this run directory.
	ErrAttached = errors.New("already attached")
	// ErrElsewhere: a daemon has what we need, and can't be asked here to go over to other settings.
	ErrElsewhere = errors.New("another daemon is attached")
)

// Lock returns the path of the host's lock, which a daemon has, or a command in progress.
func Lock(c config.Config) string { return filepath.Join(c.RunDir, "lock") }

// stateLock is the lock of the state directory, which a daemon has as well: two with different run directories must not
// share a journal.
func stateLock(c config.Config) string { return filepath.Join(c.StateDir, "lock") }

// Control returns the path of the daemon's control socket.
func Control(c config.Config) string { return filepath.Join(c.RunDir, "control.sock") }

// Guardian returns the path of the guardian's record.
func Guardian(c config.Config) string { return filepath.Join(c.RunDir, "guardian.json") }

// Sysctls returns the path of what the sysctls were before, for an undo that finds no journal. They do not outlive a boot, and
// neither does the run directory.
func Sysctls(c config.Config) string { return filepath.Join(c.RunDir, "sysctls.json") }

// Make makes the run directory, in which every user may ask for the status.
func Make(c config.Config) error { return state.MkdirAll(c.RunDir) }

// Owned are the locks of a daemon, or of a command that undoes what one left.
type Owned struct {
	config     config.Config
	run, state *state.Locked
}

// Acquire takes both locks, for a daemon. It fails with ErrAttached or ErrElsewhere while another one lives, wherever its
// directories are gone to.
func Acquire(c config.Config) (*Owned, error) {
	run, err := state.TryLock(Lock(c))
	if errors.Is(err, state.ErrLocked) {
		if pid, _ := state.Holder(Lock(c)); pid != 0 && !sameNetwork(pid) {
			return nil, fmt.Errorf("%w, process %d, in another network namespace: give this one directories of its own with --run-dir, --state-dir and --bpffs", ErrElsewhere, pid)
		}
		return nil, fmt.Errorf("%w: %w", ErrAttached, err)
	}
	if err != nil {
		return nil, err
	}
	o := &Owned{config: c, run: run}
	if pid := Orphan(c); pid != 0 {
		return nil, errors.Join(fmt.Errorf("%w, process %d, whose run or state directory is another one or was removed: end it with k2s-dnsbpf detach", ErrElsewhere, pid), o.Release())
	}
	o.state, err = state.TryLock(stateLock(c))
	switch {
	case errors.Is(err, state.ErrLocked): // by one that came at the same moment
		return nil, errors.Join(fmt.Errorf("%w, with another run directory: %w", ErrElsewhere, err), o.Release())
	case err != nil:
		err = fmt.Errorf("%w: make room there, or name another directory with --state-dir", err)
		return nil, errors.Join(err, o.Release())
	}
	return o, nil
}

// Try takes the locks for whoever undoes, or fails with state.ErrLocked if another process has one of them. Any other error
// says why a lock could not be made, as on a read-only file system; what could be locked is then. Without a state directory there
// is no journal to lock.
func Try(c config.Config) (*Owned, error) {
	o := &Owned{config: c}
	var runErr, stateErr error
	if o.run, runErr = state.TryLock(Lock(c)); errors.Is(runErr, state.ErrLocked) {
		return nil, runErr
	}
	if _, err := os.Lstat(c.StateDir); err == nil {
		o.state, stateErr = state.TryLock(stateLock(c))
	}
	if errors.Is(stateErr, state.ErrLocked) {
		return nil, errors.Join(stateErr, o.Unlock())
	}
	return o, errors.Join(runErr, stateErr)
}

// Await is Try, as soon as nobody else has a lock. Where the state directory can't be written to, the run directory's lock has
// to do.
func Await(ctx context.Context, c config.Config) (*Owned, error) {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		o, err := Try(c)
		switch {
		case o != nil && o.run != nil:
			return o, nil
		case !errors.Is(err, state.ErrLocked):
			return nil, errors.Join(err, o.Unlock())
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (%w)", err, ctx.Err())
		case <-tick.C:
		}
	}
}

// Release removes the files of a run and gives the locks back. The directories go if nothing else is in them.
func (o *Owned) Release() error {
	if o == nil || o.run == nil && o.state == nil { // given back already: the files are a successor's
		return nil
	}
	var errs []error
	for _, path := range []string{Control(o.config), filepath.Join(o.config.RunDir, LogFile), Guardian(o.config), Sysctls(o.config)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, o.Unlock())...)
}

// Unlock gives the locks back, and leaves the files of a run.
func (o *Owned) Unlock() error {
	if o == nil {
		return nil
	}
	err := errors.Join(o.state.Remove(), RemoveIfEmpty(o.config.StateDir), RemoveLock(o.config, o.run))
	o.run, o.state = nil, nil
	return err
}

// RemoveLock gives the run directory's lock back and removes the directory if nothing else is in it: what a dead daemon left
// there stays for the next attach or detach.
func RemoveLock(c config.Config, lock *state.Locked) error {
	return errors.Join(lock.Remove(), RemoveIfEmpty(c.RunDir))
}

// RemoveIfEmpty removes a directory of ours, unless something is in it, or it is a mount, as in a container.
func RemoveIfEmpty(dir string) error {
	err := syscall.Rmdir(dir) // os.Remove would take a file as well
	if err == nil || errors.Is(err, os.ErrNotExist) || errno.Is(err, syscall.ENOTEMPTY, syscall.EBUSY, syscall.EROFS, syscall.ENOTDIR) {
		return nil
	}
	return &os.PathError{Op: "rmdir", Path: dir, Err: err}
}

// Orphan returns a daemon that has the state directory, or had one of the directories before it was removed, and not the
// run directory that is there now; 0 for none.
func Orphan(c config.Config) (pid int) {
	if pid, held := state.Holder(stateLock(c)); held && pid != os.Getpid() {
		if now, _ := state.Holder(Lock(c)); now != pid {
			return pid
		}
		return 0
	}
	if pid := state.HoldsRemoved(Lock(c)); pid != 0 {
		return pid
	}
	return state.HoldsRemoved(stateLock(c))
}

func sameNetwork(pid int) bool {
	mine, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return true
	}
	theirs, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", pid))
	return err != nil || os.SameFile(mine, theirs)
}

// CheckPrivilege fails if this process can't change the host. The verb is the command that wants to.
func CheckPrivilege(verb string) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%s: %w: run it as root: sudo k2s-dnsbpf %s", verb, os.ErrPermission, verb)
	}
	return nil
}
