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
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

// attach is the whole way up: check, load, listen, discover, attach, test, and the resolver last, so that no program
// is ever pointed at something that does not answer. ctx ends the attempt; running is the life of what it starts.
func (d *Daemon) attach(ctx, running context.Context, background *sync.WaitGroup) error {
	ctx, cancel := context.WithTimeout(ctx, d.config.Wait)
	defer cancel()

	snapshot, err := d.check(ctx, running, background)
	if err != nil {
		return err
	}
	if err := d.begin(); err != nil {
		return err
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
	if d.config.Resolver == config.ResolverTakeover {
		err := d.resolver.TakeOver(resolvconf.TakeOver{
			Nameservers:    []netip.Addr{loopback4},
			UpstreamsGiven: len(d.config.Upstreams) > 0,
		})
		if err != nil {
			return err
		}
	}
	d.started = time.Now()
	return nil
}

// check reads and judges everything, and binds the sockets, which nobody sees until they are asked. It changes nothing
// on the host.
func (d *Daemon) check(ctx, running context.Context, background *sync.WaitGroup) (discovery.Snapshot, error) {
	var none discovery.Snapshot
	if err := d.findZones(); err != nil {
		return none, err
	}
	if err := d.findListeners(); err != nil {
		return none, err
	}
	if d.config.BPF {
		if err := datapath.CheckPinDir(d.config.BPFFS); err != nil {
			return none, err
		}
	}
	if err := d.findUpstreams(); err != nil {
		return none, err
	}
	if err := d.findSource(); err != nil {
		return none, err
	}
	server, err := forwarder.New(forwarder.Options{Listen: d.listen, Logger: d.log.Named("forwarder")})
	if err != nil {
		return none, err
	}
	d.forwarder = server
	// Before the first snapshot: names outside the cluster are answered from the first packet on.
	if err := d.forwarder.SetRoutes(d.routes(nil)); err != nil {
		return none, err
	}
	if err := d.forwarder.Listen(ctx); err != nil {
		return none, err
	}
	background.Go(func() {
		if err := d.source.Run(running); err != nil {
			d.log.Error("discovery ended", zap.Error(err))
		}
	})
	return d.source.WaitForSync(ctx)
}

// findZones joins the configured zones and the reverse zones of the cluster's address ranges.
func (d *Daemon) findZones() error {
	reverse, err := discovery.ReverseZones(slices.Concat(d.config.ServiceCIDRs, d.config.PodCIDRs)...)
	if err != nil {
		return err
	}
	d.zones = slices.Concat(d.config.Zones, reverse)
	return nil
}

// findUpstreams looks at the resolver's state, and takes the host's servers from it unless the user named some.
func (d *Daemon) findUpstreams() error {
	own := make([]netip.Addr, 0, len(d.listen))
	for _, address := range d.listen {
		own = append(own, address.Addr())
	}
	manager, err := resolvconf.New(resolvconf.Options{
		Path: d.config.ResolvConf, StateDir: d.config.StateDir, Journal: d.journal,
		Logger: d.log.Named("resolver"), Listen: own, Version: d.version,
	})
	if err != nil {
		return err
	}
	d.resolver = manager
	d.inspection, err = manager.Inspect()
	if err != nil {
		return err
	}
	d.upstreams = d.config.Upstreams
	if len(d.upstreams) == 0 {
		for _, upstream := range d.inspection.Upstreams {
			d.upstreams = append(d.upstreams, netip.AddrPortFrom(upstream.Addr, config.DNSPort))
		}
	}
	var ignore []error
	if len(d.config.Upstreams) > 0 {
		ignore = append(ignore, resolvconf.ErrNoUpstream)
	}
	if d.config.Resolver == config.ResolverTakeover {
		return d.inspection.Refused(ignore...)
	}
	return nil
}

func (d *Daemon) findSource() error {
	if len(d.config.DNSEndpoints) > 0 {
		d.source = discovery.Static(d.config.DNSEndpoints)
		return nil
	}
	options := discovery.Options{Kubeconfig: d.config.Kubeconfig, Logger: d.log.Named("discovery")}
	path, why, err := discovery.FindKubeconfig(options)
	if err != nil {
		return err
	}
	d.kubeconfig = path
	d.log.Info("cluster", zap.String("path", path), zap.String("reason", why))
	watcher, err := discovery.New(options)
	if err != nil {
		return err
	}
	d.source = watcher
	return nil
}

// begin opens the journal's new page. From here on the host is changed, and every change is recorded before.
func (d *Daemon) begin() error {
	params, err := json.Marshal(d.config)
	if err != nil {
		return fmt.Errorf("encode settings for the journal: %w", err)
	}
	return d.journal.Begin(state.Header{Version: d.version, Params: params})
}

func (d *Daemon) load() error {
	if !d.config.BPF {
		return nil
	}
	ports, err := netdev.PortsOutsideEphemeral()
	if err != nil {
		return err
	}
	for _, name := range netdev.LoopbackSysctls() {
		if err := d.setSysctl(name, "1"); err != nil {
			return err
		}
	}
	if err := d.journal.Record(changePins, d.config.BPFFS, nil); err != nil {
		return err
	}
	d.datapath, err = datapath.Load(datapath.Options{
		PinDir:         d.config.BPFFS,
		NATPorts:       datapath.PortRange(ports),
		TrafficControl: filters{d.journal},
	})
	if err != nil {
		return err
	}
	return d.datapath.ReplaceListeners(d.kernelListeners())
}

func (d *Daemon) setSysctl(name, value string) error {
	old, err := netdev.Sysctl(name)
	if err != nil || old == value {
		return err
	}
	if err := d.journal.Record(changeSysctl, name, sysctlChange{Old: old, New: value}); err != nil {
		return err
	}
	return netdev.SetSysctl(name, value)
}

// publishKubeletFile gives a kubelet on this host a file to hand to pods that does not point at our loopback address.
// Without an upstream that a pod could reach there is nothing to publish, which is no reason not to attach.
func (d *Daemon) publishKubeletFile() error {
	upstreams := make([]netip.Addr, 0, len(d.upstreams))
	for _, upstream := range d.upstreams {
		if upstream.Port() == config.DNSPort {
			upstreams = append(upstreams, upstream.Addr())
		}
	}
	own := make([]netip.Addr, 0, len(d.listen))
	for _, address := range d.listen {
		own = append(own, address.Addr())
	}
	_, err := resolvconf.PublishKubelet(resolvconf.Publish{
		Path:      filepath.Join(d.config.StateDir, resolvconf.KubeletFile),
		Upstreams: upstreams, Own: own, Base: d.inspection.File,
	})
	if errors.Is(err, resolvconf.ErrNothingToPublish) {
		d.log.Warn("no resolver file for pods", zap.Error(err))
		return nil
	}
	return err
}
