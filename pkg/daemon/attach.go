//go:build linux

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/guardian"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/handover"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// attach is the complete start: check, load, listen, discover, attach, test, and the resolver last, so that no program
// is ever pointed at something that does not answer.
func (d *Daemon) attach(ctx context.Context) error {
	c := d.now.config
	ctx, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()

	if err := d.check(ctx); err != nil {
		return err
	}
	if err := d.begin(); err != nil {
		return err
	}
	if c.Resolver == config.ResolverTakeover {
		d.guardian = guardian.Start(c, d.log)
	}
	if err := d.host.Load(); err != nil {
		return err
	}
	d.datapath = d.host.Datapath()
	if err := d.enter(d.now.clone()); err != nil {
		return err
	}
	if err := d.selfTest(ctx); err != nil {
		return err
	}
	if err := d.publishKubeletFile(); err != nil {
		return err
	}
	if d.guardian != nil {
		if err := d.guardian.Await(ctx); err != nil {
			return err
		}
		if err := d.resolver.TakeOver(host.TakeOver(c)); err != nil {
			return err
		}
	}
	d.now.started = time.Now()
	d.publish()
	return nil
}

// check reads and judges everything, and binds the sockets, which has no effect until queries arrive, or takes them over
// from a daemon that lingers. It changes nothing on the host.
func (d *Daemon) check(ctx context.Context) (err error) {
	s := &d.now
	d.host = host.New(s.config, d.journal, d.log)
	if err := d.openForwarder(ctx); err != nil {
		return err
	}
	if err := d.inspectResolver(); err != nil {
		return err
	}
	if d.predecessor == nil {
		// Before the first snapshot, so that names outside the cluster are answered from the first packet on.
		if err := d.listen(ctx); err != nil {
			return err
		}
	}
	if s.source, err = newSource(s.config, d.answers, d.log); err != nil {
		return err
	}
	if s.snapshot, err = s.source.WaitForSync(ctx); err == nil && d.predecessor != nil {
		// Not earlier: until now its sockets are served by a process that knows endpoints.
		err = d.listen(ctx)
	}
	return err
}

// openForwarder creates the forwarder for the addresses that are available, with the sockets of a daemon that lingers.
func (d *Daemon) openForwarder(ctx context.Context) error {
	facts, err := host.LookAtListeners(d.now.config)
	if err != nil {
		return err
	}
	predecessor, sockets, inherited, err := handover.Inherit(d.now.config.RunDir)
	if err != nil {
		return err
	}
	d.predecessor = predecessor
	var listen []netip.AddrPort
	if listen, err = d.freeAddresses(ctx, facts, inherited); err == nil {
		d.forwarder, err = forwarder.New(forwarder.Options{Listen: listen, MaxSockets: socketLimit(), Kept: d.kept, Logger: d.log.Named("forwarder")})
	}
	if err != nil {
		return errors.Join(err, handover.CloseAll(sockets))
	}
	d.forwarder.Adopt(sockets)
	d.now.desired.Listen = listen
	return nil
}

// listen starts to forward, cluster names to the endpoints known so far.
func (d *Daemon) listen(ctx context.Context) error {
	desired, err := d.plan(d.now)
	if err != nil {
		return err
	}
	if err := d.forwarder.SetRoutes(forwarder.Routes(desired.Forward)); err != nil {
		return err
	}
	return d.forwarder.Listen(ctx)
}

// listenAtMore serves addresses that have appeared since the attach.
func (d *Daemon) listenAtMore(listen []netip.AddrPort) error {
	served := d.forwarder.Addrs()
	for _, address := range listen {
		if slices.Contains(served, address) {
			continue
		}
		if err := d.forwarder.Add(context.Background(), address); err != nil {
			return err
		}
		d.log.Info("listening", zap.Stringer("address", address))
	}
	return nil
}

// inspectResolver inspects the resolver configuration and judges whether the configured mode is possible.
func (d *Daemon) inspectResolver() error {
	s := &d.now
	own := addresses(s.desired.Listen)
	if s.holder.name != "" && s.config.Resolver == config.ResolverTakeover {
		// The server that has the port there asks the servers of the resolver file, and so us.
		own = append(own, plan.KubeSwitchAddress(s.config))
	}
	manager, err := resolvconf.New(resolvconf.Options{
		Path: s.config.ResolvConf, StateDir: s.config.StateDir, Journal: d.journal,
		Logger: d.log.Named("resolver"), Listen: own, Version: d.version,
	})
	if err != nil {
		return err
	}
	d.resolver = manager
	if s.inspection, err = manager.Inspect(); err != nil {
		return err
	}
	if plan.IsTransparent(s.config) {
		return d.findResolvers()
	}
	if s.config.Resolver != config.ResolverTakeover {
		return nil
	}
	return host.TakeOver(s.config).Refused(s.inspection)
}

func addresses(servers []netip.AddrPort) []netip.Addr {
	list := make([]netip.Addr, 0, len(servers))
	for _, server := range servers {
		list = append(list, server.Addr())
	}
	return list
}

// begin opens a new page in the journal. From here on the host is changed, and every change is recorded before it is made.
func (d *Daemon) begin() error {
	if err := d.recordSettings(state.Header{}); err != nil {
		return fmt.Errorf("%w: make room there, or name another directory with --state-dir", err)
	}
	return nil
}

// recordSettings begins a page of the journal with this daemon's settings and, if an attachment continues, its header.
func (d *Daemon) recordSettings(header state.Header) error {
	params, err := json.Marshal(d.now.config)
	if err != nil {
		return fmt.Errorf("encode settings for the journal: %w", err)
	}
	header.Version, header.Params, header.Network = d.version, params, netdev.Namespace()
	return d.journal.Begin(header)
}

// publishKubeletFile provides a file that a kubelet on this host can hand out to Pods, without our loopback address in it.
// Without an upstream that a Pod could reach there is nothing to publish, which does not prevent the attach.
func (d *Daemon) publishKubeletFile() error {
	var upstreams []netip.Addr
	for _, upstream := range d.now.desired.Fallback {
		if upstream.Address.Port() == config.DNSPort {
			upstreams = append(upstreams, upstream.Address.Addr())
		}
	}
	_, err := resolvconf.PublishKubelet(resolvconf.Publish{
		Path:      filepath.Join(d.now.config.StateDir, resolvconf.KubeletFile),
		Upstreams: upstreams, Own: addresses(d.now.desired.Listen), Base: d.now.inspection.File,
	})
	if errors.Is(err, resolvconf.ErrNothingToPublish) {
		d.log.Warn("no resolver file for pods", zap.Error(err))
		return nil
	}
	return err
}

// greet queries new endpoints while the old ones are still in use: their neighbour entries exist then, and an endpoint that has just
// become ready can warm up. It waits only briefly and judges nothing.
func (d *Daemon) greet(ctx context.Context, snapshot cluster.Snapshot) {
	next := d.now.clone()
	next.snapshot = snapshot
	desired, err := d.plan(next)
	if err != nil {
		return // the update reports it
	}
	known := d.now.desired.Addresses(plan.Endpoint.Asked)
	d.health.greet(ctx, slices.DeleteFunc(desired.Addresses(plan.Endpoint.Asked), func(address netip.AddrPort) bool {
		return slices.Contains(known, address)
	}), desired.Zones[0].Name)
}
