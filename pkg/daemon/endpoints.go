//go:build linux

package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
)

// endpoint is a discovered endpoint and how this host reaches it.
type endpoint struct {
	discovery.Endpoint
	route netdev.Route
	// note says why the kernel does not steer to it, if it does not.
	note string
}

func (e endpoint) steerable() bool { return e.note == "" }

// resolveRoutes finds the way to each endpoint. One that the kernel can't steer to stays with the forwarder.
func resolveRoutes(endpoints []discovery.Endpoint) []endpoint {
	resolved := make([]endpoint, 0, len(endpoints))
	for _, found := range endpoints {
		e := endpoint{Endpoint: found}
		route, err := netdev.RouteTo(found.Address.Addr())
		switch {
		case err != nil:
			e.note = err.Error()
		case route.Local:
			e.note = "on this host: asked by the forwarder, not steered to"
		case !route.Ethernet:
			e.note = route.Interface + " has no Ethernet header: asked by the forwarder, not steered to"
		}
		e.route = route
		resolved = append(resolved, e)
	}
	return resolved
}

// program brings forwarder and datapath to the endpoints of a snapshot. The caller holds d.mu or is alone.
func (d *Daemon) program(snapshot discovery.Snapshot) error {
	endpoints := resolveRoutes(snapshot.Endpoints)
	// The forwarder first: it takes what the kernel passes while the maps change.
	if err := d.forwarder.SetRoutes(d.routes(snapshot.Addresses())); err != nil {
		return err
	}
	if d.datapath != nil {
		if err := d.programDatapath(endpoints); err != nil {
			return err
		}
	}
	for _, e := range endpoints {
		if !slices.ContainsFunc(d.endpoints, func(old endpoint) bool { return old == e }) {
			d.log.Info("endpoint", zap.Stringer("backend", e.Address), zap.String("source", e.Source),
				zap.String("iface", e.route.Interface), zap.String("reason", e.note))
		}
	}
	d.snapshot, d.endpoints = snapshot, endpoints
	return nil
}

func (d *Daemon) routes(endpoints []netip.AddrPort) forwarder.Routes {
	zones := make(map[string][]netip.AddrPort, len(d.routing.zones))
	for _, zone := range d.routing.zones {
		zones[zone] = endpoints
	}
	return forwarder.Routes{Zones: zones, Upstreams: d.routing.upstreams}
}

// programDatapath attaches where replies come in before queries are steered there. Attachments that the old endpoints
// needed stay until the next change: replies may still be on their way.
func (d *Daemon) programDatapath(endpoints []endpoint) error {
	attachments := d.attachments(endpoints)
	if err := d.datapath.ReplaceAttachments(union(d.attachments(d.endpoints), attachments)); err != nil {
		return err
	}
	backends := make([]datapath.Backend, 0, len(endpoints))
	for _, e := range endpoints {
		if e.steerable() {
			backends = append(backends, datapath.Backend{
				Address: e.Address, NATAddress: e.route.Source, Ifindex: uint32(e.route.Ifindex),
			})
		}
	}
	return d.datapath.ReplaceZones(d.routing.zones, backends)
}

// attachments lists the hooks in the order in which they must be attached: replies, then queries.
func (d *Daemon) attachments(endpoints []endpoint) []datapath.Attachment {
	var attachments []datapath.Attachment
	for _, e := range endpoints {
		if e.steerable() {
			attachments = union(attachments, []datapath.Attachment{{
				Program: datapath.FromBackend, Interface: e.route.Interface, Ifindex: e.route.Ifindex,
			}})
		}
	}
	attachments = append(attachments, datapath.Attachment{
		Program: datapath.FromHost, Interface: "lo", Ifindex: loopbackIfindex, Egress: true,
	})
	if d.clients != nil {
		attachments = append(attachments, datapath.Attachment{
			Program: datapath.FromClient, Interface: d.clients.Name, Ifindex: d.clients.Index,
		})
	}
	return attachments
}

// loopbackIfindex is lo's in every network namespace: the kernel makes it first.
const loopbackIfindex = 1

func union(a, b []datapath.Attachment) []datapath.Attachment {
	result := slices.Clone(a)
	for _, attachment := range b {
		if !slices.Contains(result, attachment) {
			result = append(result, attachment)
		}
	}
	return result
}

// findListeners decides where queries are taken: the loopback addresses, and the KubeSwitch address.
func (d *Daemon) findListeners() error {
	d.listen = []netip.AddrPort{netip.AddrPortFrom(loopback4, config.DNSPort)}
	if _, err := netdev.InterfaceOf(loopback6); err == nil {
		d.listen = append(d.listen, netip.AddrPortFrom(loopback6, config.DNSPort))
	} else if !errors.Is(err, netdev.ErrNoInterface) {
		return err
	}

	address := d.config.KubeSwitchAddress
	wanted := address.IsValid()
	if !wanted {
		address = config.DefaultKubeSwitchAddress
	}
	clients, err := netdev.InterfaceOf(address)
	switch {
	case err == nil:
		d.clients = &clients
		d.listen = append(d.listen, netip.AddrPortFrom(address, config.DNSPort))
	case wanted || !errors.Is(err, netdev.ErrNoInterface):
		return fmt.Errorf("KubeSwitch address %s: %w: set the address up, or name another with --kubeswitch-address", address, err)
	}
	return nil
}

// kernelListeners gives each listener its scope.
func (d *Daemon) kernelListeners() []datapath.Listener {
	listeners := make([]datapath.Listener, 0, len(d.listen))
	for _, address := range d.listen {
		scope := datapath.ScopeKubeSwitch
		if address.Addr().IsLoopback() {
			scope = datapath.ScopeHost
		}
		listeners = append(listeners, datapath.Listener{Address: address, Scope: scope})
	}
	return listeners
}
