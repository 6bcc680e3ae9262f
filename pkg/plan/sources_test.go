package plan

import (
	"net/netip"
	"testing"
)

func TestSources(t *testing.T) {
	const (
		uplink, kubeSwitch, cni, cali, twin = 2, 3, 4, 5, 6
		anywhere                            = AnyInterface
	)
	prefixes := func(texts ...string) (list []netip.Prefix) {
		for _, text := range texts {
			list = append(list, netip.MustParsePrefix(text))
		}
		return list
	}
	own := prefixes("127.0.0.1/8", "::1/128", "192.0.2.2/24", "fe80::2/64", "172.19.1.1/24", "172.19.1.2/24", "fd00:19::1/64", "fe80::3/64",
		"172.20.0.1/16", "172.21.0.10/32", "172.20.9.9/32", "10.7.0.1/24", "10.7.0.2/24", "198.51.100.2/31")
	network := func(ifindex int, prefix string) Network {
		return Network{Ifindex: ifindex, Prefix: netip.MustParsePrefix(prefix)}
	}
	networks := []Network{
		network(uplink, "192.0.2.0/24"), network(uplink, "fe80::/64"), network(kubeSwitch, "172.19.1.0/24"), network(kubeSwitch, "fd00:19::/64"),
		network(kubeSwitch, "fe80::/64"), network(cni, "172.20.0.0/16"), network(uplink, "10.7.0.0/24"), network(twin, "10.7.0.0/24"),
		network(uplink, "198.51.100.2/31"), network(cali, "172.20.4.4/32"),
	}
	type want struct {
		address string
		known   bool
		ifindex uint32
		allowed bool
	}
	nobody := func(address string) want { return want{address, true, 0, false} }
	subnets := prefixes("172.19.1.0/24", "fd00:19::/64", "fe80::/64")
	for _, c := range []struct {
		name    string
		allowed []netip.Prefix
		want    []want
	}{
		{"the interface's networks", subnets, []want{
			{"172.19.1.100", true, kubeSwitch, true}, {"fd00:19::100", true, kubeSwitch, true}, {"fe80::100", true, anywhere, true},
			nobody("172.19.1.1"), nobody("172.19.1.2"), nobody("172.19.1.0"), nobody("172.19.1.255"), nobody("fd00:19::1"), nobody("fd00:19::"),
			nobody("fe80::2"), nobody("fe80::3"),
			{"172.20.0.20", true, cni, false}, {"172.20.4.4", true, cali, false}, nobody("172.20.0.1"), nobody("172.20.255.255"), nobody("172.20.9.9"), {"172.20.1.0", true, cni, false},
			{"192.0.2.7", true, uplink, false}, nobody("192.0.2.2"), {"10.7.0.9", true, anywhere, false},
			{"172.21.0.10", false, 0, false}, {"203.0.113.1", false, 0, false}, {"fd00:77::1", false, 0, false},
			nobody("127.0.0.1"), nobody("127.9.9.9"), nobody("::1"), nobody("::"), nobody("0.0.0.0"), nobody("224.0.0.1"), nobody("ff02::1"),
			nobody("255.255.255.255"), {"198.51.100.3", true, uplink, false}, nobody("198.51.100.2"),
		}},
		{"a wider one", prefixes("172.16.0.0/12"), []want{
			{"172.19.1.100", true, kubeSwitch, true}, {"172.20.0.20", true, cni, true}, {"172.18.0.1", true, kubeSwitch, true},
			nobody("172.21.0.10"), nobody("172.20.0.1"), {"192.0.2.7", true, uplink, false}, {"fd00:19::100", true, kubeSwitch, false},
		}},
		{"a narrower one", prefixes("172.19.1.64/26", "172.20.7.0/24"), []want{
			{"172.19.1.100", true, kubeSwitch, true}, {"172.19.1.200", true, kubeSwitch, false}, {"172.20.7.1", true, cni, true},
			{"172.20.8.1", true, cni, false}, nobody("172.19.1.255"),
		}},
		{"everybody", prefixes("0.0.0.0/0", "::/0"), []want{
			{"203.0.113.1", true, kubeSwitch, true}, {"192.0.2.7", true, uplink, true}, {"fd00:77::1", true, kubeSwitch, true},
			nobody("172.21.0.10"), nobody("127.0.0.1"), nobody("::1"), nobody("255.255.255.255"),
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			found := sources(c.allowed, kubeSwitch, own, networks)
			for _, w := range c.want {
				var best Source
				for _, s := range found {
					if s.Prefix.Contains(netip.MustParseAddr(w.address)) && (!best.Prefix.IsValid() || s.Prefix.Bits() > best.Prefix.Bits()) {
						best = s
					}
				}
				if got := (want{w.address, best.Prefix.IsValid(), best.Ifindex, best.Allowed}); got != w {
					t.Errorf("got %+v, want %+v", got, w)
				}
			}
		})
	}
}
