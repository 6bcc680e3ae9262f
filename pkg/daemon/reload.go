//go:build linux

package daemon

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
)

// ErrNeedsDetach is returned by Reload for a setting that can't change while attached.
var ErrNeedsDetach = errors.New("can't change while attached")

// reload is a request to switch to new settings.
type reload struct {
	config   config.Config
	source   source
	snapshot cluster.Snapshot
	done     chan error
}

// Reload implements control.Handler. It may be called once Run has called ready.
func (d *Daemon) Reload(ctx context.Context, c config.Config) (changed bool, err error) {
	if d.leaving.Load() {
		<-ctx.Done() // the connection ends, and the client looks for the successor
		return false, ctx.Err()
	}
	seen := d.seen.Load()
	if c.Same(seen.config) && !seen.source.Outdated() {
		return false, nil
	}
	if err := d.reload(ctx, seen.config, c); err != nil {
		return false, fmt.Errorf("attach with new settings: %w (the old ones stay in effect)", err)
	}
	return true, nil
}

// reload prepares the new source of endpoints while the old one keeps working, and makes serve switch to it.
func (d *Daemon) reload(ctx context.Context, now, c config.Config) error {
	if keys := config.NeedDetach(now, c); len(keys) > 0 {
		return fmt.Errorf("%w: %s: detach first", ErrNeedsDetach, strings.Join(keys, ", "))
	}
	ctx, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	source, err := newSource(c, d.answers, d.log)
	if err != nil {
		return err
	}
	snapshot, err := source.WaitForSync(ctx)
	if err != nil {
		source.stop()
		return err
	}
	request := &reload{config: c, source: source, snapshot: snapshot, done: make(chan error, 1)}
	select {
	case d.reloads <- request:
		err = <-request.done
	case <-ctx.Done():
		err = fmt.Errorf("the daemon is stopping: %w", ctx.Err())
	}
	if err != nil {
		source.stop()
	}
	return err
}

// commit switches to new settings, or keeps the old ones.
func (d *Daemon) commit(request *reload) error {
	old, next := d.now, d.now.clone()
	next.config, next.source, next.snapshot = request.config, request.source, request.snapshot
	if err := d.enter(next); err != nil {
		return errors.Join(err, d.enter(old.clone()))
	}
	if err := d.recordSettings(d.journal.Header()); err != nil {
		d.log.Error("new settings could not be recorded in the journal", zap.Error(err))
	}
	old.source.stop()
	if err := d.publishKubeletFile(); err != nil {
		d.log.Error("resolver file for pods not renewed", zap.Error(err))
	}
	d.log.Info("new settings", zap.Strings("zones", plan.ZoneNames(d.now.desired.Zones)), zap.Stringers("upstreams", d.now.desired.Forward.Upstreams))
	return nil
}
