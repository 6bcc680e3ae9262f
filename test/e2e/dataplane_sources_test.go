package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestClaimsToBeLocal: what enters by a wire for a loopback address is none of ours, also where the kernel would deliver
// it, as kube-proxy has it do.
func TestClaimsToBeLocal(t *testing.T) {
	h := raise(t, lab.Options{HostSysctls: map[string]string{"net.ipv4.conf.all.route_localnet": "1"}})
	h.attach(endpoints, endpoints6, ranges, pods("cni0"))
	before := h.dataplane()
	for _, from := range []struct {
		node      *lab.Node
		via, via6 string
	}{
		{h.Worker(), lab.KubeSwitch4, lab.KubeSwitch6}, {h.Pod("app"), lab.PodGateway4, lab.PodGateway6}, {h.Ext(), lab.Uplink4, lab.Uplink6},
	} {
		sh(t, from.node, fmt.Sprintf("ip address flush dev lo; ip route add 127.0.0.1 via %s; ip -6 route add ::1 via %s", from.via, from.via6))
		for _, server := range []netip.AddrPort{hostDNS, hostDNS6} {
			for _, name := range []string{lab.Backend, lab.WWW} {
				if raw, err := ask(from.node, server, pack(t, 1, name, dns.TypeA), noReply); raw != nil {
					t.Errorf("%s asked %s for %s: want no reply, got %s, %v", from.node.Name(), server, name, text(raw), err)
				}
			}
			if err := connectAs(from.node, "", server, noReply); err == nil {
				t.Errorf("%s connected to %s", from.node.Name(), server)
			}
		}
	}
	after := h.dataplane()
	for _, scope := range []string{"host", "kubeswitch", "pod"} {
		if n := after.rose(before, scope, "steered"); n != 0 {
			t.Errorf("%s: steered rose by %d", scope, n)
		}
	}
	if n := after.forwarded(before); n != 0 {
		t.Errorf("the forwarder has seen %d queries", n)
	}
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Host(), hostDNS6, lab.WWW, lab.WWW4)
}

// TestSourceOfInterface: who asks must have an address that is right for the interface, or somebody else would get the
// reply.
func TestSourceOfInterface(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoints, ranges, pods("cni0"), []string{"--allow", "172.16.0.0/12"})
	cases := []struct {
		what    string
		from    *lab.Node
		source  string
		server  netip.AddrPort
		scope   string
		refused int
	}{
		{"a Pod as a worker", h.Pod("app"), lab.Worker4, switchDNS, "kubeswitch", 1},
		{"a worker as a Pod", h.Worker(), lab.App4, switchDNS, "kubeswitch", 1},
		{"a worker as this host", h.Worker(), lab.PodGateway4, switchDNS, "kubeswitch", 1},
		{"a Pod as this host", h.Pod("app"), lab.KubeSwitch4, clusterDNS, "pod", 0},
		{"a Pod as a worker, of CoreDNS", h.Pod("app"), lab.Worker4, clusterDNS, "pod", 0},
		{"the workers' network", h.Worker(), "172.19.1.0", switchDNS, "kubeswitch", 1},
	}
	for _, c := range cases {
		t.Run(c.what, func(t *testing.T) {
			h := h.in(t)
			sh(t, c.from, "ip address add "+c.source+"/32 dev lo")
			before := h.dataplane()
			if raw, err := askAs(c.from, c.source, c.server, pack(t, 1, lab.Backend, dns.TypeA), noReply); raw != nil || err != nil {
				t.Errorf("want no reply, got %s, %v", text(raw), err)
			}
			after := h.dataplane()
			if n := after.rose(before, c.scope, "steered"); n != 0 {
				t.Errorf("steered rose by %d", n)
			}
			if n := after.rose(before, c.scope, "refused_source"); n != c.refused {
				t.Errorf("refused_source rose by %d, want %d", n, c.refused)
			}
			sh(t, c.from, "ip address delete "+c.source+"/32 dev lo")
		})
	}
	// Those who say the truth.
	resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Pod("app"), switchDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Pod("app"), clusterDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Host(), switchDNS, lab.Backend, lab.Backend4)
}

// TestForwarderSourceOfInterface: the forwarder looks at the interface too, where no program of ours does: a Pod asks in a
// worker's name.
func TestForwarderSourceOfInterface(t *testing.T) {
	h := raise(t, lab.Options{})
	switch6 := netip.AddrPortFrom(netip.MustParseAddr(lab.KubeSwitch6), 53)
	for _, s := range []struct {
		what, source string
		server       netip.AddrPort
		args         []string
	}{
		{"kernel", lab.Worker4, switchDNS, nil},
		{"no-bpf", lab.Worker4, switchDNS, []string{"--no-bpf"}},
		{"IPv6", lab.Worker6, switch6, []string{"--kubeswitch-address", lab.KubeSwitch6}},
	} {
		t.Run(s.what, func(t *testing.T) {
			h := h.in(t)
			h.attach(endpoints, endpoints6, ranges, s.args)
			sh(t, h.Pod("app"), "ip address add "+s.source+" dev lo")
			before := h.dataplane()
			for _, name := range []string{lab.Backend, lab.WWW} {
				if raw, err := askAs(h.Pod("app"), s.source, s.server, pack(t, 1, name, dns.TypeA), noReply); raw != nil || err != nil {
					t.Errorf("%s: want no reply, got %s, %v", name, text(raw), err)
				}
			}
			if n := h.dataplane().forwarded(before); n != 0 {
				t.Errorf("the forwarder has taken %d queries", n)
			}
			sh(t, h.Pod("app"), "ip address delete "+s.source+" dev lo")
			for _, node := range []*lab.Node{h.Worker(), h.Host()} {
				resolve(t, node, s.server, lab.WWW, lab.WWW4)
			}
			h.detach()
		})
	}
}
