// Package cluster defines the values by which the packages of this program describe the cluster: which servers answer which names. It
// imports nothing from Kubernetes, so that planning with these values needs no Kubernetes client.
package cluster

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// SourceStatic is the [Endpoint.Source] of an endpoint that the user named.
const SourceStatic = "static"

// Endpoint is one CoreDNS endpoint that may be asked. It is comparable.
type Endpoint struct {
	// Address is where DNS over UDP is served: the endpoint's first address and
	// the port behind the Service's (53 as a rule, but any is possible).
	// IPv4 is always in its four-byte form.
	Address netip.AddrPort

	// TCPPort is where DNS over TCP is served at the same address, 0 if nobody
	// has said so: then it is worth trying the port of Address.
	TCPPort uint16

	// Source says who told us: [SourceStatic], or namespace and name of the
	// EndpointSlice, as in "kube-system/kube-dns-abcde". When several slices
	// carry the endpoint, it is the one that sorts first.
	Source string

	// Node and Zone are where the endpoint runs; empty when unknown.
	Node, Zone string

	// Terminating marks an endpoint that is no longer ready but serves until it
	// has shut down. Such endpoints appear only when no endpoint is ready.
	Terminating bool
}

// compareEndpoints orders by address, then by everything else, so that two
// builds of the same set are equal element by element.
func compareEndpoints(a, b Endpoint) int {
	return cmp.Or(
		a.Address.Compare(b.Address),
		cmp.Compare(a.Source, b.Source),
		cmp.Compare(b.TCPPort, a.TCPPort),
		cmp.Compare(a.Node, b.Node),
		cmp.Compare(a.Zone, b.Zone),
	)
}

// SortEndpoints sorts in place and drops all but the first entry of each address.
func SortEndpoints(eps []Endpoint) []Endpoint {
	slices.SortFunc(eps, compareEndpoints)
	return slices.CompactFunc(eps, func(a, b Endpoint) bool { return a.Address == b.Address })
}

// Snapshot is one consistent view of which servers answer which names. It is immutable once
// published: its slices are shared between readers and must not be written to.
type Snapshot struct {
	// Endpoints are sorted by address and free of duplicates. They are the ready
	// ones, or, if none is ready, those that still serve. Empty if there has been
	// no good set yet, or if the apiserver says that there is nobody: then the set
	// is true, not Stale, and Reason says so.
	Endpoints []Endpoint

	// ServiceIPs are the Service's cluster addresses, the primary family first.
	// Empty for a headless Service and for a static source.
	ServiceIPs []netip.Addr

	// Zones are those that the cluster's DNS answers itself, as far as they are
	// known: names first, the cluster's domain before all others, then addresses.
	// None for a static source.
	Zones []Zone

	// Service is the followed Service as namespace/name; empty for a static source.
	Service string

	// Notes say, each in one sentence for a person, what could not be read or
	// understood and is not needed: the endpoints are good without it.
	Notes []string

	// Problems say, each in one sentence for a person, what keeps names from where
	// they belong.
	Problems []string

	// Updated is when this set was last known to be true. While the watches are
	// open it is the time of the call or of publication; once Stale, it stands
	// still.
	Updated time.Time

	// Stale says that the set could not be confirmed: the apiserver does not
	// answer, or what it says can't be understood. Endpoints then holds the last
	// good set.
	Stale bool

	// Reason is one sentence for a person that says why Stale is set or Endpoints
	// is empty; else empty.
	Reason string
}

// Equal reports whether s and o mean the same: the same endpoints from the same
// slices, the same Service addresses, zones, notes and problems, the same staleness for the
// same reason.
// Updated is not compared.
func (s Snapshot) Equal(o Snapshot) bool {
	return s.Stale == o.Stale &&
		s.Reason == o.Reason &&
		slices.Equal(s.Endpoints, o.Endpoints) &&
		slices.Equal(s.ServiceIPs, o.ServiceIPs) &&
		slices.Equal(s.Zones, o.Zones) &&
		s.Service == o.Service &&
		slices.Equal(s.Notes, o.Notes) &&
		slices.Equal(s.Problems, o.Problems)
}

// TCP returns where the endpoints are asked over TCP that have a port of its own for it, by Address.
func (s Snapshot) TCP() map[netip.AddrPort]netip.AddrPort {
	tcp := make(map[netip.AddrPort]netip.AddrPort)
	for _, e := range s.Endpoints {
		if e.TCPPort != 0 && e.TCPPort != e.Address.Port() {
			tcp[e.Address] = netip.AddrPortFrom(e.Address.Addr(), e.TCPPort)
		}
	}
	return tcp
}

// Addresses returns the endpoints' addresses in order, in a slice of its own.
func (s Snapshot) Addresses() []netip.AddrPort {
	out := make([]netip.AddrPort, len(s.Endpoints))
	for i, e := range s.Endpoints {
		out[i] = e.Address
	}
	return out
}

// Zone is a zone that the cluster's DNS answers itself. It is comparable.
type Zone struct {
	// Name is in lower case and without a final dot.
	Name string

	// Source says for a person where it is from, as in "Corefile kube-system/coredns".
	Source string

	// Cluster marks a zone of CoreDNS's plugin for the cluster itself. Others are what a Corefile serves beside it.
	Cluster bool

	// Uncached says why none of its answers may be kept: they depend on who asks, or on what is not understood. Empty if they may.
	Uncached string

	// Vouched says that its answers come from objects of the cluster alone, so that each change of them can be told.
	Vouched bool
}

// Reverse reports whether the zone holds names of addresses (RFC 1035 section 3.5,
// RFC 3596 section 2.5).
func (z Zone) Reverse() bool { return Below(z.Name, "in-addr.arpa") || Below(z.Name, "ip6.arpa") }

// Below reports whether zone is parent or in it.
func Below(zone, parent string) bool {
	return parent == "" || zone == parent || strings.HasSuffix(zone, "."+parent)
}
