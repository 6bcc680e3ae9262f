//go:build linux

package host

import (
	"errors"
	"slices"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// RestoreLocked puts the resolver file back and forgets its record. The caller has the lock, or knows that nobody else
// can.
func RestoreLocked(c config.Config, log *zap.Logger) ([]string, error) {
	journal, err := OpenJournal(c, log)
	if errors.Is(err, state.ErrNewer) {
		// What is parked beside the file is enough, and whoever wrote the journal finds the file as it was.
		log.Warn("restoring without the journal, which stays", zap.Error(err))
		journal, err = state.Unrecorded(), nil
	}
	if err != nil {
		return nil, err
	}
	done, err := RestoreResolver(c, journal, log)
	if err == nil && journal.Rebooted() {
		err = forgetKernel(journal)
	}
	if err == nil && journal.Empty() {
		err = journal.Clear()
	}
	if errors.Is(err, resolvconf.ErrRecordKept) || errors.Is(err, unix.EROFS) && !stillOurs(c, journal) {
		// DNS works again, which is all that matters here. The rest stays for whoever can write there.
		log.Warn("what is recorded of the resolver file stays in the journal", zap.Error(err))
		err = nil
	}
	return done, err
}

func stillOurs(c config.Config, journal *state.Journal) bool {
	manager, err := resolvconf.New(resolvconf.Options{Path: c.ResolvConf, StateDir: c.StateDir, Journal: journal})
	if err != nil {
		return true
	}
	now, err := manager.State()
	return err != nil || now == resolvconf.StateOurs
}

// forgetKernel forgets what a reboot has undone: programs, pins and sysctls do not outlive the kernel.
func forgetKernel(journal *state.Journal) error {
	var errs []error
	for _, change := range journal.Changes() {
		if slices.Contains(undoOrder, change.Kind) {
			errs = append(errs, journal.Forget(change.Kind, change.Name))
		}
	}
	return errors.Join(errs...)
}

// SuspendResolver puts the file back beside a daemon that hangs, which has the journal open.
func SuspendResolver(c config.Config, log *zap.Logger) ([]string, error) {
	journal, err := state.Open(c.StateDir)
	if err != nil {
		return nil, err
	}
	manager, err := resolvconf.New(resolvconf.Options{
		Path: c.ResolvConf, StateDir: c.StateDir, Journal: journal, Logger: log.Named("resolver"),
	})
	if err != nil {
		return nil, err
	}
	outcome, err := manager.Suspend()
	if err != nil {
		return nil, err
	}
	return OutcomeLines(c.ResolvConf, outcome), nil
}

// HasRemains is IsAttached without a manager at hand.
func HasRemains(c config.Config, journal *state.Journal) bool {
	manager, err := resolvconf.New(resolvconf.Options{Path: c.ResolvConf, StateDir: c.StateDir, Journal: journal})
	return err != nil || IsAttached(journal, manager)
}

// IsAttached tells an attachment whose daemon is dead from the remains of one: a resolver file that somebody else has
// replaced stays in the journal after a detach, so that its original is not lost.
func IsAttached(journal *state.Journal, manager *resolvconf.Manager) bool {
	for _, change := range journal.Changes() {
		if slices.Contains(undoOrder, change.Kind) {
			return true
		}
	}
	now, err := manager.State()
	return err == nil && now == resolvconf.StateOurs
}

// Restorer does for a guardian what this package can. Needed looks without a lock.
type Restorer struct {
	Config config.Config
	Log    *zap.Logger
}

// Needed reports whether there is anything to put back, as far as can be seen.
func (r Restorer) Needed() bool {
	journal, err := state.Open(r.Config.StateDir)
	if errors.Is(err, state.ErrNewer) { // see RestoreLocked
		journal, err = state.Unrecorded(), nil
	}
	if err != nil {
		return true
	}
	if len(resolvconf.RecordedPaths(journal)) > 0 {
		return true
	}
	manager, err := resolvconf.New(resolvconf.Options{Path: r.Config.ResolvConf, StateDir: r.Config.StateDir, Journal: journal})
	if err != nil {
		return true
	}
	now, err := manager.State()
	return err != nil || now == resolvconf.StateOurs
}

// Restore is RestoreLocked.
func (r Restorer) Restore() ([]string, error) { return RestoreLocked(r.Config, r.Log) }

// Suspend is SuspendResolver.
func (r Restorer) Suspend() ([]string, error) { return SuspendResolver(r.Config, r.Log) }
