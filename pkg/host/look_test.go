//go:build linux

package host

import (
	"net/netip"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
)

// TestAstray: where the route to an endpoint leads one look after the other, and whether it is still the endpoint there.
func TestAstray(t *testing.T) {
	type look struct {
		endpoint, network, iface string
		astray                   bool
	}
	const a, b = "172.20.0.10", "172.20.9.9"
	for name, looks := range map[string][]look{
		"the bridge goes, and comes back": {
			{a, "172.20.0.0/16", "cni0", false}, {a, "0.0.0.0/0", "eth0", true}, {a, "172.20.0.0/16", "cni0", false},
		},
		"another endpoint of that network": {{a, "172.20.0.0/16", "cni0", false}, {b, "0.0.0.0/0", "eth0", true}},
		"half a default route":             {{a, "172.20.0.0/16", "cni0", false}, {a, "128.0.0.0/1", "tun0", true}},
		"a site's route to all private addresses": {
			{a, "172.20.0.0/16", "cni0", false}, {a, "172.16.0.0/12", "eth0", true},
		},
		"behind the default route all the time": {{a, "0.0.0.0/0", "eth0", false}, {a, "0.0.0.0/0", "eth0", false}, {b, "0.0.0.0/0", "eth0", false}},
		"one is, the others are not": {
			{"10.9.9.9", "0.0.0.0/0", "eth0", false}, {a, "172.20.0.0/16", "cni0", false}, {a, "0.0.0.0/0", "eth0", true}, {"10.9.9.9", "0.0.0.0/0", "eth0", false},
		},
		"a narrower route comes and goes": {
			{a, "172.20.0.0/16", "cni0", false}, {a, "172.20.0.10/32", "veth1", false}, {a, "172.20.0.0/16", "cni0", false},
		},
		"another node's route": {{a, "172.20.0.0/24", "eth0", false}, {a, "0.0.0.0/0", "eth0", true}},
		"routes are joined":    {{a, "172.20.0.0/24", "eth0", false}, {a, "172.20.0.0/16", "eth0", false}},
		"IPv6":                 {{"fd00:20::10", "fd00:20::/64", "cni0", false}, {"fd00:20::10", "::/0", "eth0", true}},
	} {
		t.Run(name, func(t *testing.T) {
			l := Looker{usual: make(map[netip.Addr]behind)}
			for i, look := range looks {
				e := cluster.Endpoint{Address: netip.AddrPortFrom(netip.MustParseAddr(look.endpoint), 53)}
				why := l.astray(e, plan.Way{Interface: look.iface, Ifindex: 7}, netip.MustParsePrefix(look.network), map[string]bool{"eth0": true}, "n1")
				if (why != "") != look.astray {
					t.Errorf("look %d: %q", i, why)
				}
			}
		})
	}
	l := Looker{usual: make(map[netip.Addr]behind)}
	e := cluster.Endpoint{Address: netip.MustParseAddrPort(a + ":53"), Node: "n1"}
	if why := l.astray(e, plan.Way{Interface: "eth0", Ifindex: 2}, netip.MustParsePrefix("0.0.0.0/0"), nil, "n1"); why == "" {
		t.Error("an endpoint on this very host is behind the default route")
	}
}
