//go:build linux

package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/miekg/dns"

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
	// severed is set while queries that the kernel steers to it are lost, and onTrial while that is tried.
	severed, onTrial bool
}

// lives reports whether it is worth asking.
func (e endpoint) lives() bool { return !e.dead }

// steerable reports whether the kernel knows a way to it, which may be severed.
func (e endpoint) steerable() bool { return e.note == "" }

// network is what the datapath is made from: the endpoints, and the interfaces and routes of this host as far as they
// matter. Two that are equal need the same programs and maps.
type network struct {
	zones      []discovery.Zone   // that the endpoints answer, the cluster's domain first
	left       []string           // notes about zones that are not taken
	endpoints  []endpoint         // of the zones
	fallback   []endpoint         // the host's own servers, for the time that the daemon is dead
	clients    netdev.Interface   // with the KubeSwitch address; index 0 without
	allowed    []netip.Prefix     // that may ask at the KubeSwitch address
	unsteered  string             // why what they ask is not steered; empty if it is
	sources    []datapath.Source  // where the packets of a source come in
	notes      []string           // what of the cluster's data is not used, and why
	pods       []netdev.Interface // whose queries are steered
	clusterDNS []netip.Addr       // that pods ask
	resolvers  []netip.Addr       // the host's own, in transparent mode
}

// lookAround builds the network of a snapshot from the host's present state. The caller holds d.mu or is alone.
func (d *Daemon) lookAround(snapshot discovery.Snapshot) (n network, err error) {
	n.zones, n.left = d.routing.zonesOf(snapshot, d.inspection.File.Search)
	w, err := d.lookUpWays()
	if err != nil {
		return n, err
	}
	n.endpoints = slices.DeleteFunc(w.resolve(snapshot.Endpoints), func(e endpoint) bool {
		why := d.unfit(e)
		if why != "" {
			n.notes = append(n.notes, fmt.Sprintf("endpoint %s (%s) is left out: it is %s", e.Address, e.Source, why))
		}
		return why != ""
	})
	for i, e := range n.endpoints {
		n.endpoints[i].dead = d.health.isDead(e.Address)
		n.endpoints[i].severed, n.endpoints[i].onTrial = d.health.way(e.Address)
	}
	for _, upstream := range d.routing.upstreams {
		n.fallback = append(n.fallback, w.resolve([]discovery.Endpoint{{Address: upstream, Source: "upstream"}})...)
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
		n.clusterDNS = slices.DeleteFunc(slices.Clone(n.clusterDNS), func(address netip.Addr) bool {
			why := d.collides(address)
			if why != "" {
				n.notes = append(n.notes, fmt.Sprintf("queries of pods at the cluster's DNS address %s are left alone: it is %s", address, why))
			}
			return why != ""
		})
	}
	if err := d.lookAtKubeSwitch(&n, w); err != nil {
		return n, err
	}
	if n.clients.Index == 0 && len(n.pods) == 0 {
		return n, nil
	}
	own, err := netdev.Addresses()
	if err != nil {
		return n, err
	}
	networks, err := netdev.Networks()
	n.sources = sources(n.allowed, n.clients.Index, own, networks)
	return n, err
}

// lookAtKubeSwitch finds the interface with the KubeSwitch address, and who may ask there. An interface that is gone is
// looked for again with every change of interfaces.
func (d *Daemon) lookAtKubeSwitch(n *network, w ways) (err error) {
	if !d.kubeSwitch.IsValid() {
		return nil
	}
	n.clients, err = netdev.InterfaceOf(d.kubeSwitch)
	if errors.Is(err, netdev.ErrNoInterface) {
		return nil
	}
	if err != nil {
		return err
	}
	if n.allowed = d.config.Allowed; len(n.allowed) == 0 {
		n.allowed, err = subnetsOf(n.clients.Name)
	}
	n.unsteered = w.answers(d.kubeSwitch, n.clients.Index, n.allowed)
	return err
}

// unfit says why an endpoint that the cluster names is not asked from this host; empty if it is. What the user has named is.
func (d *Daemon) unfit(e endpoint) string {
	switch {
	case e.Source == discovery.SourceStatic:
	case slices.Contains(d.listen, e.Address) || e.Address == netip.AddrPortFrom(d.kubeSwitch, config.DNSPort):
		return "an address of this host's own DNS"
	case slices.Contains(d.routing.upstreams, e.Address):
		return "a server for external names"
	case e.route.Group:
		return "a broadcast address"
	}
	return ""
}

// collides says why queries of pods are not intercepted at an address; empty if they are. They have no check of who asks, so an
// address that has one, or is for this host alone, stays as it is.
func (d *Daemon) collides(address netip.Addr) string {
	switch {
	case slices.Contains(d.ownAddresses(), address) || address == d.kubeSwitch || slices.Contains(d.resolvers, address):
		return "intercepted for others already"
	case address.IsLoopback() || address.IsUnspecified() || address.IsMulticast() || address.Is6() && address.IsLinkLocalUnicast():
		return "no Service's address"
	}
	return ""
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

// ways is what decides, beside the routes, whether the kernel may steer.
type ways struct {
	ipsec netdev.IPsec
	ports netdev.PortRange // of steered queries
}

// lookUpWays needs what only who steers has: CAP_NET_ADMIN.
func (d *Daemon) lookUpWays() (w ways, err error) {
	if !d.config.BPF {
		return w, nil
	}
	if w.ipsec, err = netdev.LookUpIPsec(); err != nil {
		return w, err
	}
	w.ports, err = netdev.PortsOutsideEphemeral()
	return w, err
}

// resolve finds the way to each endpoint. One that the kernel can't steer to, or only past what the stack does with packets
// to it, stays with the forwarder.
func (w ways) resolve(endpoints []discovery.Endpoint) []endpoint {
	resolved := make([]endpoint, 0, len(endpoints))
	for _, found := range endpoints {
		e := endpoint{Endpoint: found}
		route, err := netdev.RouteTo(found.Address.Addr())
		not := ""
		switch {
		case err != nil:
			e.note = err.Error()
		case route.Local:
			not = "on this host"
		case !route.Ethernet:
			not = route.Interface + " has no Ethernet header"
		case route.Bypass != "":
			not = route.Bypass
		default:
			port := found.Address.Port()
			query := netdev.Flow{
				From: single(route.Source), To: single(found.Address.Addr()), Ifindex: route.Ifindex,
				FromPorts: w.ports, ToPorts: netdev.PortRange{First: port, Last: port},
			}
			not = cmp.Or(w.ipsec.Sends(query), w.ipsec.Accepts(query.Reverse()))
		}
		if not != "" {
			e.note = not + ": asked by the forwarder, not steered to"
		}
		e.route = route
		resolved = append(resolved, e)
	}
	return resolved
}

// answers says why what the kernel sends from an address back to clients would go past what the stack does with it; empty if
// it does not.
func (w ways) answers(from netip.Addr, ifindex int, clients []netip.Prefix) (not string) {
	dns := netdev.PortRange{First: config.DNSPort, Last: config.DNSPort}
	for _, prefix := range clients {
		if prefix.Addr().Is4() != from.Is4() {
			continue
		}
		reply := netdev.Flow{
			From: single(from), To: prefix, Ifindex: ifindex,
			FromPorts: dns, ToPorts: netdev.PortRange{First: 1, Last: 1<<16 - 1},
		}
		if not = cmp.Or(w.ipsec.Sends(reply), w.ipsec.Accepts(reply.Reverse())); not != "" {
			return fmt.Sprintf("%s: %s", prefix, not)
		}
	}
	return ""
}

func unsteeredNote(why string) string {
	return why + ": what is asked at the KubeSwitch address is left to the server there, not steered"
}

func single(address netip.Addr) netip.Prefix {
	return netip.PrefixFrom(address.WithZone(""), address.BitLen())
}

// backends are the endpoints that queries are steered to. Without any the forwarder takes them: it asks what lives and can't be
// steered to, or says at once that nobody answers. Only probes try the dead.
func backends(endpoints []endpoint) []datapath.Backend {
	result := make([]datapath.Backend, 0, len(endpoints))
	for _, e := range endpoints {
		if e.steerable() && !e.dead && !e.severed {
			result = append(result, e.backend())
		}
	}
	return result
}

func (e endpoint) backend() datapath.Backend {
	return datapath.Backend{Address: e.Address, NATAddress: e.route.Source, Ifindex: uint32(e.route.Ifindex)}
}

// addresses are those of the endpoints of a kind.
func (n network) addresses(of func(endpoint) bool) (addresses []netip.AddrPort) {
	for _, e := range n.endpoints {
		if of(e) {
			addresses = append(addresses, e.Address)
		}
	}
	return addresses
}

// maxTrials bounds the ways that are tried at a time: each takes a zone in the kernel.
const maxTrials = 64

// trials gives each endpoint whose way is on trial a zone of its own. It is in a zone of the cluster, so that a query which
// is not steered goes nowhere else.
func (n network) trials() map[string]endpoint {
	trials := make(map[string]endpoint)
	for i, e := range n.endpoints {
		zone := fmt.Sprintf("k2s-dnsbpf-%d.%s", i, n.zones[0].Name)
		if _, ok := dns.IsDomainName(zone); ok && e.onTrial && e.steerable() && len(trials) < maxTrials {
			trials[zone] = e
		}
	}
	return trials
}

// severed says of each endpoint to which the kernel's way is broken what that means.
func (n network) severed() (problems []string) {
	for _, e := range n.endpoints {
		if e.severed {
			problems = append(problems, fmt.Sprintf("the kernel's way to %s is broken: what is steered to it over %s stays unanswered, while it answers when asked directly: nothing is steered to it: look for what drops or changes its replies on %s (tc, XDP, VLAN tags, MTU)",
				e.Address, e.route.Interface, e.route.Interface))
		}
	}
	return problems
}

// interceptedBy returns an address of a family at which this host's own queries are steered.
func (d *Daemon) interceptedBy(n network, is4 bool) (netip.AddrPort, bool) {
	for _, address := range slices.Concat(d.listen, onDNSPort(n.resolvers)) {
		if address.Addr().Is4() == is4 {
			return address, true
		}
	}
	return netip.AddrPort{}, false
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

// kernelListeners gives each intercepted address its scope.
func (d *Daemon) kernelListeners(n network) []datapath.Listener {
	listeners := make([]datapath.Listener, 0, len(d.listen)+len(n.clusterDNS)+len(n.resolvers))
	for _, address := range d.listen {
		scope := datapath.ScopeKubeSwitch
		if address.Addr().IsLoopback() {
			scope = datapath.ScopeHost
		} else if n.unsteered != "" {
			continue
		}
		listeners = append(listeners, datapath.Listener{Address: address, Scope: scope})
	}
	if d.sharesKubeSwitch() && n.clients.Index != 0 && n.unsteered == "" { // elsewhere it is another host's
		listeners = append(listeners, datapath.Listener{
			Address: netip.AddrPortFrom(d.kubeSwitch, config.DNSPort), Scope: datapath.ScopeShared,
		})
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
