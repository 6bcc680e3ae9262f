package resolvconf

import (
	"net/netip"
	"slices"
)

// Upstream is a server of the old configuration and where it was found.
type Upstream struct {
	Addr   netip.Addr
	Source string // a path, or "journal"
}

// journalSource is the source of servers that only the journal still knows.
const journalSource = "journal"

// serverList is one source of servers.
type serverList struct {
	source  string
	servers []netip.Addr
}

// The stub addresses of systemd-resolved(8). It reads /etc/resolv.conf itself
// once that is no longer its own, so asking it would create a loop.
var resolvedStubs = [...]netip.Addr{
	netip.AddrFrom4([4]byte{127, 0, 0, 53}),
	netip.AddrFrom4([4]byte{127, 0, 0, 54}),
}

func isResolvedStub(a netip.Addr) bool { return slices.Contains(resolvedStubs[:], a) }

// chooseUpstreams picks from the servers of the effective old file all that can
// be asked, in order. A stub of systemd-resolved is replaced by uplinks, which
// are its own servers. If nothing is left, the first of the other sources that
// has something is taken. dropped says why each of the others isn't used.
func chooseUpstreams(file serverList, uplinks serverList, others []serverList, own []netip.Addr) (ups []Upstream, dropped []Skip) {
	take := func(a netip.Addr, source string) {
		a = a.Unmap()
		reason := ""
		switch {
		case slices.ContainsFunc(ups, func(u Upstream) bool { return u.Addr == a }):
			reason = "named twice"
		default:
			reason = unusable(a, own)
		}
		if reason != "" {
			dropped = append(dropped, Skip{Text: a.String(), Reason: reason + " (" + source + ")"})
			return
		}
		ups = append(ups, Upstream{a, source})
	}
	for _, a := range file.servers {
		if isResolvedStub(a.Unmap()) && !isOwn(a.Unmap(), own) && len(uplinks.servers) > 0 {
			dropped = append(dropped, Skip{Text: a.String(), Reason: "stub of systemd-resolved: its uplinks in " + uplinks.source + " are asked directly"})
			for _, u := range uplinks.servers {
				take(u, uplinks.source)
			}
			continue
		}
		take(a, file.source)
	}
	for _, list := range append([]serverList{uplinks}, others...) {
		if len(ups) > 0 {
			break
		}
		if list.source == file.source {
			continue
		}
		for _, a := range list.servers {
			take(a, list.source)
		}
	}
	return ups, dropped
}

// unusable says why a can't be an upstream, or "".
func unusable(a netip.Addr, own []netip.Addr) string {
	switch {
	case a.IsUnspecified():
		return "the unspecified address means this host itself"
	case isOwn(a, own):
		return "this program would forward to itself"
	case isResolvedStub(a):
		return "stub of systemd-resolved, which reads this file itself, and its uplinks are not known"
	case a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "":
		return "link-local address without a zone (%interface)"
	case a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "not the address of one server"
	}
	return ""
}

func isOwn(a netip.Addr, own []netip.Addr) bool {
	return slices.ContainsFunc(own, func(o netip.Addr) bool { return o.Unmap().WithZone("") == a.WithZone("") })
}
