package plan

import (
	"cmp"
	"net/netip"
	"slices"
)

// impossibleSources can't be the source of a packet from a network (RFC 6890): this host and network, loopback,
// multicast, limited broadcast.
var impossibleSources = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("::/127"), netip.MustParsePrefix("ff00::/8"),
}

// sources says on which interface packets from a source arrive, as far as its address tells, and which sources
// may ask at the KubeSwitch address, which is that of the interface clients. A network that is behind one interface is behind no
// other, and an allowed network of which nothing is known is behind clients. This host's own addresses, and broadcast addresses
// of networks, are not valid sources on any interface.
func sources(allowed []netip.Prefix, clients int, own []netip.Prefix, networks []Network) []Source {
	known := make(map[netip.Prefix]Source)
	var behind []netip.Prefix
	for _, network := range networks {
		ifindex := uint32(network.Ifindex)
		if old, twice := known[network.Prefix]; twice && old.Ifindex != ifindex {
			ifindex = AnyInterface // link-local addresses, for one
		}
		known[network.Prefix] = Source{Prefix: network.Prefix, Ifindex: ifindex, Allowed: contained(allowed, network.Prefix)}
		behind = append(behind, network.Prefix)
	}
	// The longest prefix first, because it counts.
	slices.SortFunc(behind, func(a, b netip.Prefix) int { return b.Bits() - a.Bits() })
	for _, prefix := range allowed {
		ifindex := uint32(clients)
		if i := slices.IndexFunc(behind, func(n netip.Prefix) bool { return contained([]netip.Prefix{n}, prefix) }); i >= 0 {
			ifindex = known[behind[i]].Ifindex
		}
		known[prefix.Masked()] = Source{Prefix: prefix.Masked(), Ifindex: ifindex, Allowed: true}
	}

	nobodys := slices.Clone(impossibleSources)
	for _, address := range own {
		for _, a := range append(sharedAddresses(address), address.Addr()) {
			// Addresses outside all known prefixes need no entry. There may be thousands (kube-proxy's IPVS mode).
			if contained(behind, Single(a)) || contained(allowed, Single(a)) {
				nobodys = append(nobodys, Single(a))
			}
		}
	}
	for _, prefix := range nobodys {
		known[prefix] = Source{Prefix: prefix}
	}
	result := make([]Source, 0, len(known))
	for _, source := range known {
		result = append(result, source)
	}
	slices.SortFunc(result, func(a, b Source) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), a.Prefix.Bits()-b.Prefix.Bits())
	})
	return result
}

// permits returns the sources that may ask the forwarder at the KubeSwitch address. Of those that are not valid on a
// network, the stack delivers only what this host sends to itself.
func permits(sources []Source, allowed []netip.Prefix) (permits []Permit) {
	for _, source := range sources {
		switch {
		case source.Allowed && source.Ifindex != AnyInterface:
			permits = append(permits, Permit{Prefix: source.Prefix, Interface: int(source.Ifindex)})
		case source.Allowed, source.Ifindex == 0 && contained(allowed, source.Prefix):
			permits = append(permits, Permit{Prefix: source.Prefix})
		}
	}
	return permits
}

// Single is the prefix of one address, without its zone.
func Single(address netip.Addr) netip.Prefix {
	return netip.PrefixFrom(address.WithZone(""), address.BitLen())
}

// contained reports whether all of a prefix is in one of others.
func contained(others []netip.Prefix, inner netip.Prefix) bool {
	return slices.ContainsFunc(others, func(p netip.Prefix) bool { return p.Bits() <= inner.Bits() && p.Contains(inner.Addr()) })
}

// sharedAddresses are those of a network that belong to no single host: the lowest one (RFC 1122 section 3.2.1.3; for IPv6
// the routers' anycast address, RFC 4291 section 2.6.1), and for IPv4 the highest one, broadcast.
func sharedAddresses(network netip.Prefix) []netip.Addr {
	lowest := network.Masked().Addr()
	if network.Bits() >= lowest.BitLen()-1 { // point to point: RFC 3021, RFC 6164
		return nil
	}
	if lowest.Is6() {
		return []netip.Addr{lowest}
	}
	highest := lowest.As4()
	for bit := network.Bits(); bit < lowest.BitLen(); bit++ {
		highest[bit/8] |= 0x80 >> (bit % 8)
	}
	return []netip.Addr{lowest, netip.AddrFrom4(highest)}
}
