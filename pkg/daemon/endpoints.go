//go:build linux

package daemon

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
)

// program brings forwarder and datapath to a snapshot and the present network. The caller holds d.mu or is alone.
func (d *Daemon) program(snapshot discovery.Snapshot) error {
	n, err := d.lookAround(snapshot)
	if err != nil {
		return err
	}
	// The forwarder first: it takes what the kernel passes while the maps change.
	if err := d.forwarder.SetRoutes(d.routes(n.zones, n.addresses(endpoint.lives), snapshot)); err != nil {
		return err
	}
	if n.clients.Index != 0 {
		d.forwarder.SetPermitted(map[netip.Addr][]forwarder.Permit{d.kubeSwitch: n.permits()})
	}
	if d.datapath != nil {
		if err := d.programDatapath(n); err != nil {
			return err
		}
	}
	for _, e := range n.endpoints {
		if !slices.ContainsFunc(d.network.endpoints, func(old endpoint) bool { return old == e }) {
			d.log.Info("endpoint", zap.Stringer("backend", e.Address), zap.String("source", e.Source),
				zap.String("iface", e.route.Interface), zap.Bool("dead", e.dead), zap.Bool("severed", e.severed), zap.String("reason", e.note))
		}
	}
	if !slices.Equal(d.network.zones, n.zones) {
		d.log.Info("zones", zap.Strings("zones", zoneNames(n.zones)))
	}
	d.snapshot, d.network = snapshot, n
	return nil
}

// reroute looks at the network again, and does something only if what matters has changed: a busy host changes its
// routes often, those to the endpoints seldom.
func (d *Daemon) reroute() {
	d.mu.Lock()
	n, err := d.lookAround(d.snapshot)
	same := err == nil && reflect.DeepEqual(n, d.network)
	snapshot := d.snapshot
	d.mu.Unlock()
	if !same {
		d.apply(snapshot)
	}
}

// routes sends names of the zones to the endpoints that live.
func (d *Daemon) routes(zones []discovery.Zone, living []netip.AddrPort, snapshot discovery.Snapshot) forwarder.Routes {
	routes := forwarder.Routes{Zones: routesTo(zones, living), TCP: snapshot.TCP(), Upstreams: d.upstreams(), Unserved: snapshot.Reason}
	switch n := len(snapshot.Endpoints); n {
	case 0:
	case 1:
		routes.Unserved = "the only one does not answer"
	default:
		routes.Unserved = fmt.Sprintf("none of %d answers", n)
	}
	routes.Timeout, routes.Attempts, routes.Rotate = d.inspection.File.Retries()
	return routes
}

// programDatapath attaches where replies come in before queries are steered there. Where the old network got replies from
// stays attached until the next change: some may still be on their way.
func (d *Daemon) programDatapath(n network) error {
	// Old ones stay for now: what old attachments still steer, a dead daemon's too, needs its way back.
	if err := d.datapath.AddReplyVia(n.replyVia()); err != nil {
		return err
	}
	if err := d.datapath.ReplaceSources(n.sources); err != nil {
		return err
	}
	if err := d.datapath.ReplaceListeners(d.kernelListeners(n)); err != nil {
		return err
	}
	old := slices.DeleteFunc(d.network.attachments(), func(a datapath.Attachment) bool {
		return a.Program != datapath.FromBackend || !netdev.Exists(a.Ifindex)
	})
	attachments := union(n.attachments(), old)
	delete(d.problems, "guard")
	if n.clients.Index != 0 && !d.sharesKubeSwitch() {
		guard, err := d.datapath.TryGuard(n.clients.Name, n.clients.Index)
		if err != nil {
			d.log.Warn("no source check in the kernel, the forwarder checks what reaches it", zap.Error(err))
			d.problems["guard"] = err.Error()
		} else {
			attachments = append(attachments, guard)
		}
	}
	if err := d.datapath.ReplaceAttachments(attachments); err != nil {
		return err
	}
	if err := d.host.KeepFilters(attachments); err != nil {
		return err
	}
	if err := d.datapath.ReplaceReplyVia(n.replyVia()); err != nil {
		return err
	}
	return d.steerZones(n)
}

// steerZones puts the zones and their endpoints into the kernel. Those that it has no room for stay with the forwarder.
func (d *Daemon) steerZones(n network) error {
	trials := make(map[string]datapath.Backend)
	for zone, e := range n.trials() {
		trials[zone] = e.backend()
	}
	steered, left, err := datapath.FitZones(slices.Concat(slices.Collect(maps.Keys(trials)), zoneNames(n.zones)))
	if err != nil {
		return err
	}
	delete(d.problems, "zones")
	if len(left) > 0 {
		d.problems["zones"] = fmt.Sprintf("%d of %d zones are served by the forwarder only, from %s on: too many for the kernel programs: name fewer with --zone, --service-cidr and --pod-cidr",
			len(left), len(n.zones), left[0])
	}
	return d.datapath.ReplaceZones(steered[len(trials):], backends(n.endpoints), backends(n.fallback), trials)
}

// findListeners decides where queries are taken: the loopback addresses, unless they are another resolver's, and the
// KubeSwitch address.
func (d *Daemon) findListeners() error {
	if !d.isTransparent() {
		d.listen = append(d.listen, netip.AddrPortFrom(loopback4, config.DNSPort))
		if _, err := netdev.InterfaceOf(loopback6); err == nil {
			d.listen = append(d.listen, netip.AddrPortFrom(loopback6, config.DNSPort))
		} else if !errors.Is(err, netdev.ErrNoInterface) {
			return err
		}
	}

	if d.config.NoKubeSwitch {
		return nil
	}
	wanted := d.config.KubeSwitchAddress.IsValid()
	if d.kubeSwitch = config.DefaultKubeSwitchAddress; wanted {
		d.kubeSwitch = d.config.KubeSwitchAddress
	}
	_, err := netdev.InterfaceOf(d.kubeSwitch)
	switch {
	case err == nil:
		d.listen = append(d.listen, netip.AddrPortFrom(d.kubeSwitch, config.DNSPort))
	case wanted || !errors.Is(err, netdev.ErrNoInterface):
		return fmt.Errorf("KubeSwitch address %s: %w: set the address up, or name another with --kubeswitch-address, or none", d.kubeSwitch, err)
	}
	return nil
}
