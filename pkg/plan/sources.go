package plan

import (
	"cmp"
	"net/netip"
	"slices"
)

// impossibleSources are no source of a packet that comes by a wire (RFC 6890): this host and network, loopback,
// multicast, limited broadcast.
var impossibleSources = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("::/127"), netip.MustParsePrefix("ff00::/8"),
}

// sources says on which interface the packets of a source come in, as far as a source's address tells, and which of them
// may ask at the KubeSwitch address, that of the interface clients. A network that is behind an interface is behind no
// other, and one of which nothing is known behind clients, if it is allowed. This host's own addresses, and those that all
// in a network have, are nobody's behind a wire.
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
	// The narrowest one first: it is the one that counts.
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
			// Those that are in no known prefix need no entry of their own. There may be thousands (kube-proxy's IPVS mode).
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

// permits are the sources that may ask at the KubeSwitch address, for the forwarder. Of those that are nobody's behind a
// wire the stack delivers only what this host sends itself.
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

// sharedAddresses are those of a network that no single host has: the lowest one (RFC 1122 section 3.2.1.3; for IPv6
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
