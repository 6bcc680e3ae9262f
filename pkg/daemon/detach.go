//go:build linux

package daemon

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
)

// restoreRetry is the interval at which restoring the resolver is retried.
const restoreRetry = time.Second

// detach is the complete stop: the resolver first, then the programs, then the forwarder, then everything else. It is
// called whether or not attach succeeded, and undoes whatever there is.
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
		// Nothing was changed, so there is nothing to undo, and the journal may not be writable.
		return errors.Join(append(errs, host.ClearJournal(d.now.config, d.journal, d.log))...)
	}
	if _, err := host.Undo(d.now.config, d.journal, d.log); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// restoreOrServe restores the resolver, and keeps serving while that fails with our file in place: ending now
// would leave the host with a resolv.conf that points nowhere.
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
		d.log.Error("resolver not restored, continuing to serve", zap.Error(err))
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

// dismissGuardian ends the guardian unless our file is still in place: then it keeps trying after we
// have ended.
func (d *Daemon) dismissGuardian() {
	if d.guardian == nil || d.replaced {
		return // see Run
	}
	if d.ours() {
		d.log.Error("the resolver file is left to the guardian")
		return
	}
	d.guardian.Dismiss()
}

// retake takes over the resolver file again after this daemon hung for so long that the guardian restored it.
func (d *Daemon) retake() {
	now, err := d.resolver.State()
	switch {
	case err == nil && now == resolvconf.StateOriginal:
		err = d.resolver.TakeOver(host.TakeOver(d.now.config))
	case err == nil:
		// Ours: somebody was faster. Foreign or missing: that is its owner's decision.
		return
	}
	if err != nil {
		d.log.Error("resolver file could not be taken over again", zap.Error(err))
		d.note(plan.ProblemResolver, err.Error())
		return
	}
	d.note(plan.ProblemResolver, "")
	d.log.Warn("this daemon hung, and the guardian restored the resolver file: taken over again")
}
