//go:build linux

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// attach is the whole way up: check, load, listen, discover, attach, test, and the resolver last, so that no program
// is ever pointed at something that does not answer.
func (d *Daemon) attach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.config.Wait)
	defer cancel()

	snapshot, err := d.check(ctx)
	if err != nil {
		return err
	}
	if err := d.begin(); err != nil {
		return err
	}
	if d.config.Resolver == config.ResolverTakeover {
		d.guard = startGuard(d.config, d.log)
	}
	if err := d.load(); err != nil {
		return err
	}
	if err := d.program(snapshot); err != nil {
		return err
	}
	if err := d.selfTest(ctx); err != nil {
		return err
	}
	if err := d.publishKubeletFile(); err != nil {
		return err
	}
	if d.guard != nil {
		if err := d.guard.await(ctx); err != nil {
			return err
		}
		if err := d.resolver.TakeOver(d.takeOver()); err != nil {
			return err
		}
	}
	d.started = time.Now()
	return nil
}

// check reads and judges everything, and binds the sockets, which nobody sees until they are asked, or takes them over
// from a daemon that lingers. It changes nothing on the host.
func (d *Daemon) check(ctx context.Context) (discovery.Snapshot, error) {
	var none discovery.Snapshot
	if err := d.findListeners(); err != nil {
		return none, err
	}
	if d.config.BPF {
		if err := datapath.CheckPinDir(d.config.BPFFS); err != nil {
			return none, err
		}
	}
	if err := d.openForwarder(ctx); err != nil {
		return none, err
	}
	if err := d.inspectResolver(); err != nil {
		return none, err
	}
	var err error
	if d.routing, err = d.newRouting(d.config); err != nil {
		return none, err
	}
	if d.predecessor == nil {
		// Before the first snapshot: names outside the cluster are answered from the first packet on.
		if err := d.listenWith(ctx, discovery.Snapshot{}); err != nil {
			return none, err
		}
	}
	d.routing.start(d.log)
	snapshot, err := d.routing.source.WaitForSync(ctx)
	if err == nil && d.predecessor != nil {
		// Not before: until now its sockets are served by one who knows endpoints.
		err = d.listenWith(ctx, snapshot)
	}
	return snapshot, err
}

// openForwarder makes the forwarder for those addresses that it can have, with the sockets of a daemon that lingers.
func (d *Daemon) openForwarder(ctx context.Context) error {
	sockets, addresses, err := d.inherit()
	if err != nil {
		return err
	}
	if err = d.avoidTaken(ctx, addresses); err == nil {
		d.forwarder, err = forwarder.New(forwarder.Options{Listen: d.listen, MaxSockets: socketLimit(), Logger: d.log.Named("forwarder")})
	}
	if err != nil {
		return errors.Join(err, closeAll(sockets))
	}
	d.forwarder.Adopt(sockets)
	return nil
}

// listenWith begins to forward, cluster names to the endpoints of a snapshot.
func (d *Daemon) listenWith(ctx context.Context, snapshot discovery.Snapshot) error {
	n, err := d.lookAround(snapshot)
	if err != nil {
		return err
	}
	if err := d.forwarder.SetRoutes(d.routes(n.zones, n.addresses(endpoint.lives), snapshot)); err != nil {
		return err
	}
	return d.forwarder.Listen(ctx)
}

// inspectResolver looks at the resolver's state and judges whether it is fit for what is to be done with it.
func (d *Daemon) inspectResolver() error {
	own := d.ownAddresses()
	if d.holder.name != "" && d.config.Resolver == config.ResolverTakeover {
		// Who has the port there asks the servers of the resolver file, and so us.
		own = append(own, d.kubeSwitch)
	}
	manager, err := resolvconf.New(resolvconf.Options{
		Path: d.config.ResolvConf, StateDir: d.config.StateDir, Journal: d.journal,
		Logger: d.log.Named("resolver"), Listen: own, Version: d.version,
	})
	if err != nil {
		return err
	}
	d.resolver = manager
	if d.inspection, err = manager.Inspect(); err != nil {
		return err
	}
	if d.isTransparent() {
		return d.findResolvers()
	}
	if d.config.Resolver != config.ResolverTakeover {
		return nil
	}
	return d.takeOver().Refused(d.inspection)
}

// takeOver is what the resolver file is to be taken over with.
func (d *Daemon) takeOver() resolvconf.TakeOver {
	return resolvconf.TakeOver{
		Nameservers:    []netip.Addr{loopback4},
		UpstreamsGiven: len(d.config.Upstreams) > 0,
		InPlace:        d.config.InPlace, OverrideImmutable: d.config.OverrideImmutable,
	}
}

func (d *Daemon) ownAddresses() []netip.Addr {
	own := make([]netip.Addr, 0, len(d.listen))
	for _, address := range d.listen {
		own = append(own, address.Addr())
	}
	return own
}

// begin opens the journal's new page. From here on the host is changed, and every change is recorded before.
func (d *Daemon) begin() error {
	if err := d.recordSettings(state.Header{}); err != nil {
		return fmt.Errorf("%w: make room there, or name another directory with --state-dir", err)
	}
	return nil
}

// recordSettings begins a page of the journal with this daemon's settings and, of an attachment that goes on, its header.
func (d *Daemon) recordSettings(header state.Header) error {
	params, err := json.Marshal(d.config)
	if err != nil {
		return fmt.Errorf("encode settings for the journal: %w", err)
	}
	header.Version, header.Params = d.version, params
	return d.journal.Begin(header)
}

// publishKubeletFile gives a kubelet on this host a file to hand to pods that does not point at our loopback address.
// Without an upstream that a pod could reach there is nothing to publish, which is no reason not to attach.
func (d *Daemon) publishKubeletFile() error {
	upstreams := make([]netip.Addr, 0, len(d.routing.upstreams))
	for _, upstream := range d.routing.upstreams {
		if upstream.Port() == config.DNSPort {
			upstreams = append(upstreams, upstream.Addr())
		}
	}
	_, err := resolvconf.PublishKubelet(resolvconf.Publish{
		Path:      filepath.Join(d.config.StateDir, resolvconf.KubeletFile),
		Upstreams: upstreams, Own: d.ownAddresses(), Base: d.inspection.File,
	})
	if errors.Is(err, resolvconf.ErrNothingToPublish) {
		d.log.Warn("no resolver file for pods", zap.Error(err))
		return nil
	}
	return err
}

// load loads the kernel programs, which steer nothing yet.
func (d *Daemon) load() error {
	d.host = host.New(d.config, d.journal, d.log)
	err := d.host.Load()
	d.datapath = d.host.Datapath()
	return err
}
