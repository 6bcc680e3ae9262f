//go:build linux

package datapath

import (
	"fmt"
	"net/netip"
	"testing"
)

// What enters by a wire for an address that is for programs of this host only claims to be of one: it is none of ours,
// wherever it says that it comes from, and whoever may ask at other addresses.
func TestLocalOnly(t *testing.T) {
	h := newHarness(t)
	message := query(t, inZone)
	for _, scope := range []Scope{ScopeHost, ScopeTransparent} {
		h.replaceScope(t, scope)
		for i, f := range families {
			for _, client := range []netip.AddrPort{f.client, f.listener, filterFamilies[i].client} {
				f.client = client
				h.expectIn(t, FromClient, f.query(message), scope, notOurs, nil)
				h.expectFilter(t, f.query(message), notOurs)
				h.forget(t, h.steerIn(t, FromHost, f, f.query(message), scope, loIfindex))
			}
		}
	}
}

// sourceCase is a source that may ask at the KubeSwitch address, or at one of pods, by an interface.
type sourceCase struct {
	source            string
	ifindex           uint32
	kubeSwitch, asPod bool
}

// A source must be right for the interface that it comes in on.
func TestSources(t *testing.T) {
	const (
		kubeSwitch, pods, port = 11, 12, 13 // port is one of the bridge pods
		elsewhere              = 99
	)
	newNamespace(t)
	for i, ifindex := range []int{kubeSwitch, pods, port, elsewhere} {
		addInterfaceAt(t, fmt.Sprint("eth", i), ifindex)
	}
	h := newHarness(t)
	if err := h.ReplaceReplyVia(map[uint32]uint32{port: pods}); err != nil {
		t.Fatal(err)
	}
	source := func(prefix string, ifindex uint32, allowed bool) Source {
		return Source{Prefix: netip.MustParsePrefix(prefix), Ifindex: ifindex, Allowed: allowed}
	}
	if err := h.ReplaceSources([]Source{
		source("172.16.0.0/12", kubeSwitch, true), source("172.19.1.1/32", 0, false), source("172.19.1.255/32", 0, false),
		source("172.20.0.0/16", pods, true), source("172.20.0.1/32", 0, false),
		source("10.1.0.0/16", pods, false), source("127.0.0.0/8", 0, false), source("192.0.2.0/24", elsewhere, false),
		source("fd00:19::/64", kubeSwitch, true), source("fd00:19::1/128", 0, false), source("fd00:20::/64", pods, true),
		source("fe80::/64", AnyInterface, true), source("::/127", 0, false),
	}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []sourceCase{
		{"172.19.1.100", kubeSwitch, true, true},
		{"172.19.1.100", pods, false, false},
		{"172.19.1.100", port, false, false},
		{"172.19.1.100", elsewhere, false, false},
		{"172.19.1.1", kubeSwitch, false, false},
		{"172.19.1.1", pods, false, false},
		{"172.19.1.255", kubeSwitch, false, false},
		{"172.20.0.20", pods, true, true},
		{"172.20.0.20", port, true, true},
		{"172.20.0.20", kubeSwitch, false, false},
		{"172.20.0.1", pods, false, false},
		{"172.20.0.1", port, false, false},
		{"10.1.2.3", pods, false, true},
		{"10.1.2.3", kubeSwitch, false, false},
		{"10.2.0.1", pods, false, true}, // of which nothing is known
		{"127.0.0.1", kubeSwitch, false, false},
		{"127.0.0.1", pods, false, false},
		{"192.0.2.7", pods, false, false},
		{"fd00:19::100", kubeSwitch, true, true},
		{"fd00:19::100", pods, false, false},
		{"fd00:19::1", kubeSwitch, false, false},
		{"fd00:20::20", port, true, true},
		{"fd00:20::20", kubeSwitch, false, false},
		{"fe80::1", kubeSwitch, true, true},
		{"fe80::1", port, true, true},
		{"fd00:77::1", pods, false, true},
		{"::1", pods, false, false},
		{"::", pods, false, false},
	} {
		address := netip.MustParseAddr(c.source)
		f := families[0]
		if address.Is6() {
			f = families[1]
		}
		f.client = netip.AddrPortFrom(address, 40000)
		frame := f.query(query(t, inZone))
		for _, scope := range []struct {
			Scope
			asked   bool
			refusal string
		}{{ScopeKubeSwitch, c.kubeSwitch, "refused_source"}, {ScopeShared, c.kubeSwitch, "refused_source"}, {ScopePod, c.asPod, notOurs}} {
			h.replaceScope(t, scope.Scope)
			want := scope.refusal
			if scope.asked {
				want = "steered"
			}
			h.expectIn(t, FromClient, frame, scope.Scope, want, skbContext(skbIfindex, c.ifindex))
		}
		if t.Failed() {
			t.Fatalf("%s on interface %d", c.source, c.ifindex)
		}
	}
	h.forgetSteered(t)
}
