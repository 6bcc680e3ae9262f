//go:build linux

package datapath

import (
	"maps"
	"testing"

	"github.com/vishvananda/netlink"
)

// addBridge makes a bridge with one port, a veth, and returns the index of each.
func addBridge(t *testing.T, name, port string) (bridge, portIndex int) {
	t.Helper()
	attributes := netlink.NewLinkAttrs()
	attributes.Name = name
	device := &netlink.Bridge{LinkAttrs: attributes}
	if err := netlink.LinkAdd(device); err != nil {
		t.Fatal(err)
	}
	portIndex = addInterface(t, port)
	link, err := netlink.LinkByName(port)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetMaster(link, device); err != nil {
		t.Fatal(err)
	}
	return device.Index, portIndex
}

func (h *harness) replaceReplyVia(t *testing.T, via map[uint32]uint32) {
	t.Helper()
	if err := h.ReplaceReplyVia(via); err != nil {
		t.Fatal(err)
	}
	// The map has what was asked for, and no more.
	got := make(map[uint32]uint32)
	var ifindex, out uint32
	entries := h.objects.DnsReplyVia.Iterate()
	for entries.Next(&ifindex, &out) {
		got[ifindex] = out
	}
	if err := entries.Err(); err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(got, via) {
		t.Errorf("dns_reply_via has %v, want %v", got, via)
	}
}

// A reply leaves through the bridge, where the query came in on a port of one; else where the query came in. What this
// host's own programs ask has nothing to do with it.
func TestReplyVia(t *testing.T) {
	newNamespace(t)
	bridge, port := addBridge(t, "cni0", "veth0")
	other := addInterface(t, "veth1")
	h := newHarness(t)
	if err := h.ReplaceListeners([]Listener{{Address: listener4, Scope: ScopePod}, {Address: listener6, Scope: ScopePod}}); err != nil {
		t.Fatal(err)
	}
	check := func(t *testing.T, program Program, ifindex, replies int) {
		t.Helper()
		for _, f := range families {
			as := steering{scope: ScopePod, reason: "steered", ifindex: ifindex, replies: replies}
			q := h.steerAs(t, program, f, f.query(query(t, inZone)), as)
			h.expectIn(t, FromBackend, replyFrame(q, answer(t, q)), ScopePod, "replied", nil)
			if h.hasFlow(t, q) {
				t.Error("the flow is still there")
			}
		}
	}
	own := func(t *testing.T, ifindexes ...int) {
		t.Helper()
		for _, ifindex := range ifindexes {
			check(t, FromClient, ifindex, ifindex)
		}
	}
	h.replaceReplyVia(t, map[uint32]uint32{})
	own(t, port, other, bridge, loIfindex)

	h.replaceReplyVia(t, map[uint32]uint32{uint32(port): uint32(bridge)})
	check(t, FromClient, port, bridge)
	own(t, other, bridge, loIfindex)

	// Another bridge for one, an entry more, and lo, where it must not count.
	h.replaceReplyVia(t, map[uint32]uint32{uint32(port): uint32(other), uint32(other): uint32(bridge), loIfindex: uint32(bridge)})
	check(t, FromClient, port, other)
	check(t, FromClient, other, bridge)
	check(t, FromClient, loIfindex, bridge)
	check(t, FromHost, loIfindex, loIfindex)
	check(t, FromHost, port, port)

	h.replaceReplyVia(t, map[uint32]uint32{uint32(other): uint32(bridge)})
	check(t, FromClient, other, bridge)
	own(t, port, loIfindex)
	h.replaceReplyVia(t, nil)
	own(t, port, other, bridge, loIfindex)
	h.wantInFlight(t, 0)
}

// What is in flight keeps the way that it had when it was steered.
func TestReplyViaInFlight(t *testing.T) {
	h := newHarness(t)
	f := families[0]
	h.replaceReplyVia(t, map[uint32]uint32{loIfindex: 77})
	as := steering{scope: testScope, reason: "steered", ifindex: loIfindex, replies: 77}
	q := h.steerAs(t, FromClient, f, f.query(query(t, inZone)), as)
	h.replaceReplyVia(t, nil)
	var flow dnsbpfDnsFlow
	if err := h.objects.DnsFlows.Lookup(q.slot, &flow); err != nil || flow.Ifindex != 77 {
		t.Errorf("flow %+v, %v", flow, err)
	}
	h.deliver(t, FromClient, f, q, replyFrame(q, answer(t, q)))
}
