package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

// Endpoint is a server and how this host reaches it. It is comparable.
type Endpoint struct {
	cluster.Endpoint
	Health
	Way Way
	// Note says why the kernel does not steer to it, if it does not.
	Note string
}

// Asked reports whether it is asked at all, if only whether it lives.
func (e Endpoint) Asked() bool { return e.Way.Astray == "" }

// Lives reports whether it is worth asking.
func (e Endpoint) Lives() bool { return !e.Dead && e.Asked() }

// Steerable reports whether the kernel knows a way to it, which may be severed.
func (e Endpoint) Steerable() bool { return e.Note == "" }

// Backend is the endpoint as the kernel programs know it.
func (e Endpoint) Backend() Backend {
	return Backend{Address: e.Address, NATAddress: e.Way.Source, Ifindex: uint32(e.Way.Ifindex)}
}

// newEndpoint finds the way to a server. One that the kernel can't steer to, or only past what the stack does with packets
// to it, stays with the forwarder.
func (in Input) newEndpoint(found cluster.Endpoint) Endpoint {
	e := Endpoint{Endpoint: found, Health: in.Health[found.Address], Way: in.Facts.Ways[found.Address.Addr()]}
	if e.Way.Not != "" {
		e.Note = e.Way.Not + ": asked by the forwarder, not steered to"
	}
	return e
}

// endpoints are those of the snapshot, but for those that this host must not ask, with a note on each of these.
func (in Input) endpoints() (endpoints []Endpoint, notes []string) {
	for _, found := range in.Snapshot.Endpoints {
		e := in.newEndpoint(found)
		if why := in.unfit(e); why != "" {
			notes = append(notes, fmt.Sprintf("endpoint %s (%s) is left out: it is %s", e.Address, e.Source, why))
			continue
		}
		if e.Way.Astray != "" {
			e.Note = e.Way.Astray
		}
		endpoints = append(endpoints, e)
	}
	return endpoints, notes
}

// unfit says why an endpoint that the cluster names is not asked from this host; empty if it is. What the user has named is.
func (in Input) unfit(e Endpoint) string {
	switch {
	case e.Source == cluster.SourceStatic:
	case slices.Contains(in.listen(), e.Address) || e.Address == netip.AddrPortFrom(KubeSwitchAddress(in.Settings), config.DNSPort):
		return "an address of this host's own DNS"
	case slices.Contains(in.upstreams(), e.Address):
		return "a server for external names"
	case e.Way.Group:
		return "a broadcast address"
	}
	return ""
}

// upstreams are the servers that the user named, or else those that the host had.
func (in Input) upstreams() []netip.AddrPort {
	if len(in.Settings.Upstreams) > 0 {
		return in.Settings.Upstreams
	}
	return OnDNSPort(in.Facts.Resolver.Upstreams)
}

// OnDNSPort gives addresses the port of DNS.
func OnDNSPort(addresses []netip.Addr) []netip.AddrPort {
	servers := make([]netip.AddrPort, 0, len(addresses))
	for _, address := range addresses {
		servers = append(servers, netip.AddrPortFrom(address, config.DNSPort))
	}
	return servers
}

// backends are the endpoints that queries are steered to. Without any the forwarder takes them: it asks what lives and can't
// be steered to, or says at once that nobody answers. Only probes try the dead.
func backends(endpoints []Endpoint) []Backend {
	result := make([]Backend, 0, len(endpoints))
	for _, e := range endpoints {
		if e.Steerable() && !e.Dead && !e.Severed {
			result = append(result, e.Backend())
		}
	}
	return result
}

// Addresses are those of the endpoints of a kind.
func (d Desired) Addresses(of func(Endpoint) bool) (addresses []netip.AddrPort) {
	for _, e := range d.Endpoints {
		if of(e) {
			addresses = append(addresses, e.Address)
		}
	}
	return addresses
}

// maxName is how long a name may be in text, without its final dot (RFC 1035 section 3.1).
const maxName = 253

// maxTrials bounds the ways that are tried at a time: each takes a zone in the kernel.
const maxTrials = 64

// Trials gives each endpoint whose way is on trial a zone for itself. It is in a zone of the cluster, so that a query which is
// not steered goes nowhere else.
func (d Desired) Trials() map[string]Endpoint {
	trials := make(map[string]Endpoint)
	for i, e := range d.Endpoints {
		zone := fmt.Sprintf("k2s-dnsbpf-%d.%s", i, d.Zones[0].Name)
		if len(zone) <= maxName && e.OnTrial && e.Steerable() && len(trials) < maxTrials {
			trials[zone] = e
		}
	}
	return trials
}

// routes sends names of the zones to the endpoints that live, and all others to the upstreams; in transparent mode to the
// host's resolver, wherever it is now: it does not ask us, and it knows which names go where.
func (in Input) routes(d Desired) Routes {
	resolver := in.Facts.Resolver
	routes := Routes{
		Zones: make(map[string][]netip.AddrPort, len(d.Zones)), TCP: in.Snapshot.TCP(), Upstreams: in.upstreams(),
		Unserved: in.Snapshot.Reason, Timeout: resolver.Timeout, Attempts: resolver.Attempts, Rotate: resolver.Rotate,
	}
	living := d.Addresses(Endpoint.Lives)
	routes.Forbidden = d.Addresses(func(e Endpoint) bool { return !e.Asked() })
	for _, zone := range d.Zones {
		routes.Zones[zone.Name] = living
	}
	if IsTransparent(in.Settings) && len(in.Settings.Upstreams) == 0 {
		routes.Upstreams = OnDNSPort(resolver.Loopback)
	}
	switch n := len(in.Snapshot.Endpoints); n {
	case 0:
	case 1:
		routes.Unserved = "the only one does not answer"
	default:
		routes.Unserved = fmt.Sprintf("none of %d answers", n)
	}
	return routes
}
