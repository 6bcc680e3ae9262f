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

// restoreRetry is how often a resolver that could not be restored is tried again.
const restoreRetry = time.Second

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
	if d.guardian == nil || d.replaced {
		return // see Run
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
		err = d.resolver.TakeOver(host.TakeOver(d.now.config))
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
