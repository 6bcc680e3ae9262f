package coherence

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// Affected are the names whose answers, of every type, positive or negative, may be wrong now. Names are lower case, without
// the dot at the end.
type Affected struct {
	All   bool     // every name of the cluster's zones and of its reverse zones
	Below []string // these, and all names below them
	Exact []string // these alone
}

// Has reports whether a name, lower case and without the dot at the end, is among them.
func (a Affected) Has(name string) bool {
	return a.All || slices.Contains(a.Exact, name) ||
		slices.ContainsFunc(a.Below, func(top string) bool { return isBelow(name, top) })
}

// isBelow reports whether name is top, or below it.
func isBelow(name, top string) bool {
	head, ok := strings.CutSuffix(name, top)
	return ok && (head == "" || strings.HasSuffix(head, "."))
}

// Of returns what a change affects by itself in these zones of the cluster, as "cluster.local". What else it affects, since
// other names lead to these, only [State.Apply] knows. It is a pure function.
func Of(c cluster.Change, zones ...string) (a Affected) {
	switch c.Kind {
	case cluster.KindCorefile, cluster.KindLost:
		a.All = true
	case cluster.KindNamespace: // a Pod's name, with "pods insecure", is true if its namespace exists
		for _, zone := range zones {
			a.Below = append(a.Below, join(c.Name, "svc", zone), join(c.Name, "pod", zone))
		}
	case cluster.KindService:
		a.service(c.Name, c.Namespace, zones)
		for _, s := range []*cluster.Service{c.Service.Old, c.Service.New} {
			if s != nil {
				a.reverse(s.ClusterIPs...)
			}
		}
	case cluster.KindSlice:
		a.slice(c.Namespace, c.Slice, zones)
	}
	slices.Sort(a.Below)
	slices.Sort(a.Exact)
	a.Below, a.Exact = slices.Compact(a.Below), slices.Compact(a.Exact)
	return a
}

// service adds a Service's name and all below it: SRV, hostnames, Pods. CoreDNS finds the zone's own NS records, and the address
// of ns.dns, by the Services that lead to it, and these may be any.
func (a *Affected) service(name, namespace string, zones []string) {
	for _, zone := range zones {
		a.Exact = append(a.Exact, zone, join("ns", "dns", zone))
		if name != "" {
			a.Below = append(a.Below, join(name, namespace, "svc", zone))
		}
	}
}

func (a *Affected) slice(namespace string, s cluster.Pair[cluster.Slice], zones []string) {
	was, is := map[cluster.Member]bool{}, map[cluster.Member]bool{}
	for _, side := range []struct {
		slice   *cluster.Slice
		members map[cluster.Member]bool
	}{{s.Old, was}, {s.New, is}} {
		if side.slice == nil {
			continue
		}
		a.service(side.slice.Service, namespace, zones)
		for _, m := range side.slice.Members {
			side.members[m] = true
		}
	}
	moved := s.Old != nil && s.New != nil && s.Old.Service != s.New.Service
	for m := range was {
		if moved || !is[m] {
			a.reverse(m.Address)
		}
	}
	for m := range is {
		if moved || !was[m] {
			a.reverse(m.Address)
		}
	}
}

func (a *Affected) reverse(addresses ...netip.Addr) {
	for _, address := range addresses {
		a.Exact = append(a.Exact, ReverseName(address))
	}
}

// ReverseName is the name of an address's PTR record (RFC 1035 3.5, RFC 3596 2.5), without the dot at the end.
func ReverseName(address netip.Addr) string {
	address = address.Unmap()
	var name []byte
	octets := address.AsSlice()
	for _, o := range slices.Backward(octets) {
		if address.Is4() {
			name = append(strconv.AppendUint(name, uint64(o), 10), '.')
			continue
		}
		const digits = "0123456789abcdef"
		name = append(name, digits[o&0xf], '.', digits[o>>4], '.')
	}
	if address.Is4() {
		return string(append(name, "in-addr.arpa"...))
	}
	return string(append(name, "ip6.arpa"...))
}

func join(labels ...string) string { return strings.Join(labels, ".") }
