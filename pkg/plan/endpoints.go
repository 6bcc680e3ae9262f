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
	// Note says why the kernel does not steer to it; empty if it does.
	Note string
}

// Asked reports whether it is asked at all, if only by health probes.
func (e Endpoint) Asked() bool { return e.Way.Astray == "" }

// Lives reports whether it is alive.
func (e Endpoint) Lives() bool { return !e.Dead && e.Asked() }

// Steerable reports whether the kernel knows a path to it, which may be severed.
func (e Endpoint) Steerable() bool { return e.Note == "" }

// Backend is the endpoint as the kernel programs know it.
func (e Endpoint) Backend() Backend {
	return Backend{Address: e.Address, NATAddress: e.Way.Source, Ifindex: uint32(e.Way.Ifindex)}
}

// newEndpoint finds the path to a server. One that the kernel can't steer to, or only by bypassing what the stack does with packets
// to it, is left to the forwarder.
func (in Input) newEndpoint(found cluster.Endpoint) Endpoint {
	e := Endpoint{Endpoint: found, Health: in.Health[found.Address], Way: in.Facts.Ways[found.Address.Addr()]}
	if e.Way.Not != "" {
		e.Note = e.Way.Not + ": asked by the forwarder, not steered to"
	}
	return e
}

// endpoints are those of the snapshot that this host may ask, with a note on each of the others.
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

// unfit says why an endpoint from the cluster is not asked from this host; empty if it is. An endpoint from the user always is.
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

// upstreams are the servers that the user gave, or else those that the host had.
func (in Input) upstreams() []netip.AddrPort {
	if len(in.Settings.Upstreams) > 0 {
		return in.Settings.Upstreams
	}
	return OnDNSPort(in.Facts.Resolver.Upstreams)
}

// OnDNSPort adds the DNS port to addresses.
func OnDNSPort(addresses []netip.Addr) []netip.AddrPort {
	servers := make([]netip.AddrPort, 0, len(addresses))
	for _, address := range addresses {
		servers = append(servers, netip.AddrPortFrom(address, config.DNSPort))
	}
	return servers
}

// backends are the endpoints that queries are steered to. If there are none, the forwarder takes over: it asks those that are alive and can't
// be steered to, or fails at once. Dead endpoints are only probed.
func backends(endpoints []Endpoint) []Backend {
	result := make([]Backend, 0, len(endpoints))
	for _, e := range endpoints {
		if e.Steerable() && !e.Dead && !e.Severed {
			result = append(result, e.Backend())
		}
	}
	return result
}

// Addresses returns the addresses of selected endpoints.
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

// maxTrials limits the paths that are tested at a time: each takes a zone in the kernel.
const maxTrials = 64

// Trials gives each endpoint whose path is on trial its own zone, within a zone of the cluster, so that a query that is
// not steered is not sent anywhere else.
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

// routes sends names in the zones to live endpoints, and all others to the upstreams; in transparent mode to the
// host's resolver at its current address: it does not ask us, and it knows which names go where.
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
