//go:build linux

package daemon

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
)

// evidence is what the keeper asks of a watcher. It exists before the watcher, and works without one.
type evidence struct{ watcher *resolvconf.Watcher }

func (e *evidence) Follow(names []string) {
	if e.watcher != nil {
		e.watcher.Follow(names)
	}
}

func (e *evidence) Renamed(name string) bool { return e.watcher != nil && e.watcher.Renamed(name) }

func (e *evidence) Writer(name string) string {
	if e.watcher == nil {
		return ""
	}
	return e.watcher.Writer(name)
}

// keepResolver creates the keeper, before anybody can ask for the status.
func (d *Daemon) keepResolver() {
	d.evidence = new(evidence)
	d.keeper = resolvconf.NewKeeper(resolvconf.KeeperOptions{
		Manager: d.resolver, TakeOver: host.TakeOver(d.now.config), Evidence: d.evidence,
		Servers: d.followServers, Logger: d.log.Named("resolver"),
	}, d.now.inspection)
}

// resolverWatch maintains the resolver file from serve's loop.
type resolverWatch struct {
	d    *Daemon
	wake <-chan struct{}
	due  *time.Timer
}

// watchResolver starts to watch the resolver file. Without a watcher, a change is noticed at the next heartbeat.
func (d *Daemon) watchResolver() *resolverWatch {
	w := &resolverWatch{d: d, due: time.NewTimer(0)}
	watcher, err := resolvconf.NewWatcher()
	if err != nil {
		d.log.Warn("changes of the resolver file are noticed late", zap.Error(err))
		return w
	}
	d.evidence.watcher, w.wake = watcher, watcher.Wake()
	return w
}

func (w *resolverWatch) close() {
	w.due.Stop()
	if watcher := w.d.evidence.watcher; watcher != nil {
		watcher.Close()
		w.d.evidence.watcher = nil
	}
}

func (w *resolverWatch) check() {
	if again := w.d.keeper.Check(changePolicy(w.d.now.config)); again > 0 {
		w.due.Reset(again)
	}
}

func changePolicy(c config.Config) resolvconf.Policy {
	switch {
	case c.Resolver != config.ResolverTakeover:
		return resolvconf.PolicyObserve
	case c.OnForeignChange == config.ChangeYield:
		return resolvconf.PolicyYield
	}
	return resolvconf.PolicyRetake
}

// followServers switches to the host's current servers. After a failure the old ones stay in use.
func (d *Daemon) followServers(now resolvconf.Inspection) error {
	next := d.now.clone()
	next.inspection = now
	if err := d.enter(next); err != nil {
		return fmt.Errorf("go over to the servers of %s: %w", now.Target, err)
	}
	if err := d.publishKubeletFile(); err != nil {
		d.log.Error("resolver file for pods not renewed", zap.Error(err))
	}
	d.log.Info("servers", zap.Stringers("upstreams", d.now.desired.Forward.Upstreams), zap.String("path", now.Target))
	return nil
}
