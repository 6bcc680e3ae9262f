//go:build linux

package daemon

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
)

// endpoint is a server and how this host reaches it.
type endpoint struct {
	discovery.Endpoint
	route netdev.Route
	// note says why the kernel does not steer to it, if it does not.
	note string
	// dead is set while it does not answer.
	dead bool
}

func (e endpoint) steerable() bool { return e.note == "" }

// network is what the datapath is made from: the endpoints, and the interfaces and routes of this host as far as they
// matter. Two that are equal need the same programs and maps.
type network struct {
	zones      []discovery.Zone   // that the endpoints answer, the cluster's domain first
	endpoints  []endpoint         // of the zones
	fallback   []endpoint         // the host's own servers, for the time that the daemon is dead
	clients    netdev.Interface   // with the KubeSwitch address; index 0 without
	allowed    []netip.Prefix     // that may ask at the KubeSwitch address
	pods       []netdev.Interface // whose queries are steered
	clusterDNS []netip.Addr       // that pods ask
	resolvers  []netip.Addr       // the host's own, in transparent mode
}

// lookAround builds the network of a snapshot from the host's present state. The caller holds d.mu or is alone.
func (d *Daemon) lookAround(snapshot discovery.Snapshot) (n network, err error) {
	n.zones = d.routing.zonesOf(snapshot)
	n.endpoints = resolveRoutes(snapshot.Endpoints)
	for i, e := range n.endpoints {
		n.endpoints[i].dead = d.health.isDead(e.Address)
	}
	for _, upstream := range d.routing.upstreams {
		n.fallback = append(n.fallback, resolveRoutes([]discovery.Endpoint{{Address: upstream, Source: "upstream"}})...)
	}
	n.resolvers = d.resolvers
	if n.pods, err = netdev.MatchInterfaces(d.config.Pods); err != nil {
		return n, err
	}
	if len(n.pods) > 0 {
		n.clusterDNS = d.config.ClusterDNS
		if len(n.clusterDNS) == 0 {
			n.clusterDNS = snapshot.ServiceIPs
		}
	}
	address, ok := d.kubeSwitchAddress()
	if !ok {
		return n, nil
	}
	n.clients, err = netdev.InterfaceOf(address)
	if errors.Is(err, netdev.ErrNoInterface) {
		// Gone for now; the address is looked for again with every change of interfaces.
		return n, nil
	}
	if err != nil {
		return n, err
	}
	if n.allowed = d.config.Allowed; len(n.allowed) == 0 {
		n.allowed, err = subnetsOf(n.clients.Name)
	}
	return n, err
}

// subnetsOf returns the subnets of an interface. The host's own addresses are among them.
func subnetsOf(name string) ([]netip.Prefix, error) {
	prefixes, err := netdev.PrefixesOf(name)
	if err != nil {
		return nil, err
	}
	for i, prefix := range prefixes {
		prefixes[i] = prefix.Masked()
	}
	return prefixes, nil
}

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

// backends are the endpoints that queries are steered to: the living ones, or all if none lives, since an endpoint that
// is silent may still be better than none. It is not better than a living one that only the forwarder can ask.
func backends(endpoints []endpoint) []datapath.Backend {
	someLives := slices.ContainsFunc(endpoints, func(e endpoint) bool { return !e.dead })
	result := make([]datapath.Backend, 0, len(endpoints))
	for _, e := range endpoints {
		if e.steerable() && (!e.dead || !someLives) {
			result = append(result, datapath.Backend{
				Address: e.Address, NATAddress: e.route.Source, Ifindex: uint32(e.route.Ifindex),
			})
		}
	}
	return result
}

// loopbackIfindex is lo's in every network namespace: the kernel makes it first.
const loopbackIfindex = 1

// attachments lists the hooks in the order in which they must be attached: replies, then queries.
func (n network) attachments() []datapath.Attachment {
	var attachments []datapath.Attachment
	for _, e := range slices.Concat(n.endpoints, n.fallback) {
		if e.steerable() {
			attachments = union(attachments, []datapath.Attachment{{
				Program: datapath.FromBackend, Interface: e.route.Interface, Ifindex: e.route.Ifindex,
			}})
		}
	}
	attachments = append(attachments, datapath.Attachment{
		Program: datapath.FromHost, Interface: "lo", Ifindex: loopbackIfindex, Egress: true,
	})
	clients := n.pods
	if n.clients.Index != 0 {
		clients = append([]netdev.Interface{n.clients}, clients...)
	}
	for _, i := range clients {
		attachments = union(attachments, []datapath.Attachment{{
			Program: datapath.FromClient, Interface: i.Name, Ifindex: i.Index,
		}})
	}
	return attachments
}

func union(a, b []datapath.Attachment) []datapath.Attachment {
	result := slices.Clone(a)
	for _, attachment := range b {
		if !slices.Contains(result, attachment) {
			result = append(result, attachment)
		}
	}
	return result
}

// replyVia names the bridge for each interface of a pod that is a port of one.
func (n network) replyVia() map[uint32]uint32 {
	via := make(map[uint32]uint32)
	for _, i := range n.pods {
		if i.Bridge != 0 {
			via[uint32(i.Index)] = uint32(i.Bridge)
		}
	}
	return via
}

// kubeSwitchAddress is the one address among the listeners that is not a loopback address.
func (d *Daemon) kubeSwitchAddress() (netip.Addr, bool) {
	for _, address := range d.listen {
		if !address.Addr().IsLoopback() {
			return address.Addr(), true
		}
	}
	return netip.Addr{}, false
}

// kernelListeners gives each intercepted address its scope.
func (d *Daemon) kernelListeners(n network) []datapath.Listener {
	listeners := make([]datapath.Listener, 0, len(d.listen)+len(n.clusterDNS)+len(n.resolvers))
	for _, address := range d.listen {
		scope := datapath.ScopeKubeSwitch
		if address.Addr().IsLoopback() {
			scope = datapath.ScopeHost
		}
		listeners = append(listeners, datapath.Listener{Address: address, Scope: scope})
	}
	for _, address := range n.clusterDNS {
		listeners = append(listeners, datapath.Listener{
			Address: netip.AddrPortFrom(address, config.DNSPort), Scope: datapath.ScopePod,
		})
	}
	for _, address := range onDNSPort(n.resolvers) {
		listeners = append(listeners, datapath.Listener{Address: address, Scope: datapath.ScopeTransparent})
	}
	return listeners
}
