package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const callIPTables = "net.bridge.bridge-nf-call-iptables"

// pods are the arguments that have the queries of pods steered at the interfaces of a pattern.
func pods(patterns ...string) []string {
	args := []string{"--cluster-dns", lab.KubeDNS4}
	for _, p := range patterns {
		args = append(args, "--pods", p)
	}
	return args
}

// TestPods asks from a pod on the bridge that CoreDNS is on, with and without the machinery that a cluster has there.
func TestPods(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"cni0", "v*"} {
		for _, bridged := range []string{"0", "1"} {
			for _, rules := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s bridged=%s rules=%v", pattern, bridged, rules), func(t *testing.T) {
					h := raise(t, lab.Options{})
					if err := h.Host().SetSysctl(callIPTables, bridged); errors.Is(err, os.ErrNotExist) {
						t.Skip("no br_netfilter in this kernel")
					} else if err != nil {
						t.Fatal(err)
					}
					if rules {
						if err := h.LoadKubeProxyLikeRules(t.Context()); err != nil {
							t.Fatal(err)
						}
					}
					h.attach(endpoints, ranges, pods(pattern))
					// A bridge that hands packets to the rules does so before they reach the bridge interface: there the query is
					// to CoreDNS already and no longer ours. It must work all the same.
					translatedFirst := pattern == "cni0" && bridged == "1" && rules
					h.podQueries(translatedFirst, rules, rules)
				})
			}
		}
	}
}

// podQueries asks from a pod for what is steered, and for what is not. translatedFirst: the rules see its packets before
// the program does. rules: there are such rules. whole: they also bring answers back, so what is not steered works.
func (h *host) podQueries(translatedFirst, rules, whole bool) {
	t := h.t
	app := h.Pod("app")
	before := h.dataplane()
	var conntrack map[string]bool
	if rules {
		conntrack = make(map[string]bool)
		for _, e := range h.conntrack().Entries {
			conntrack[e] = true
		}
	}
	const rounds = 30
	for range rounds {
		resolve(t, app, clusterDNS, lab.Backend, lab.Backend4) // ask() checks where the reply comes from
	}
	after := h.dataplane()
	want := rounds
	if translatedFirst {
		want = 0
	}
	for _, reason := range []string{"steered", "replied"} {
		if n := after.rose(before, "pod", reason); n != want {
			t.Errorf("pod %s rose by %d, want %d: %v", reason, n, want, after.Reasons)
		}
	}
	if n := after.forwarded(before); n != 0 {
		t.Errorf("the forwarder saw %d queries", n)
	}
	if rules && !translatedFirst {
		for _, e := range h.conntrack().Entries {
			if !conntrack[e] && strings.Contains(e, "src="+lab.App4+" ") && strings.Contains(e, "dport=53 ") {
				t.Errorf("a steered query made an entry: %s", e)
			}
		}
	}
	if whole {
		// What is not steered goes the cluster's way, to another address family of the same Service too.
		m, err := app.Query(t.Context(), "tcp", clusterDNS, lab.Backend, dns.TypeA)
		if err != nil || len(m.Answer) != 1 {
			t.Errorf("TCP: %v %v", m, err)
		}
		m, err = app.Query(t.Context(), "udp", netip.AddrPortFrom(netip.MustParseAddr(lab.KubeDNS6), 53), lab.Backend, dns.TypeA)
		if err != nil || len(m.Answer) != 1 {
			t.Errorf("IPv6: %v %v", m, err)
		}
		// A name outside the cluster is for CoreDNS to answer, which refuses it in this lab, and not for the forwarder.
		m, err = app.Query(t.Context(), "udp", clusterDNS, lab.WWW, dns.TypeA)
		if err != nil || m.Rcode != dns.RcodeRefused {
			t.Errorf("a name outside: %v %v", m, err)
		}
		if n := h.dataplane().forwarded(before); n != 0 {
			t.Errorf("the forwarder saw %d of the pod's other queries", n)
		}
	}
}

// TestPodsAtKubeSwitchAddress: whether a pod may ask at the KubeSwitch address is decided by its source, wherever its
// query is intercepted. Without --pods the forwarder turns it away.
func TestPodsAtKubeSwitchAddress(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"", "cni0", "v*"} {
		t.Run("pods="+pattern, func(t *testing.T) {
			h := raise(t, lab.Options{})
			h.straySubnet()
			var more []string
			if pattern != "" {
				more = pods(pattern)
			}
			h.attach(endpoints, ranges, more)
			if raw, err := ask(h.Pod("app"), switchDNS, pack(t, 1, lab.Backend, dns.TypeA), noReply); raw != nil || err != nil {
				t.Errorf("from a pod, which is outside the allowed prefixes: want no reply, got %s, %v", text(raw), err)
			}
			h.refusedEverywhere(switchDNS)
			resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
		})
	}
}

// TestPodsComeAndGo: the interfaces of pods are followed while attached.
func TestPodsComeAndGo(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoints, ranges, pods("vapp", "vlate*"))
	steered := func(pod *lab.Node, iface string) {
		t.Helper()
		eventually(t, iface+" is steered from", func() error {
			before := h.dataplane()
			raw, err := ask(pod, clusterDNS, pack(t, 7, lab.Backend, dns.TypeA), noReply)
			if err := errors.Join(err, isAddress(raw, lab.Backend4)); err != nil {
				return err
			}
			after := h.dataplane()
			if len(after.programs(iface)) == 0 || after.rose(before, "pod", "replied") != 1 {
				return fmt.Errorf("programs on %s: %v, %v", iface, after.programs(iface), after.Reasons["pod"])
			}
			return nil
		})
		if d := h.dataplane(); !d.Healthy {
			t.Errorf("not healthy: %q", d.Problems)
		}
	}
	app := h.Pod("app")
	steered(app, "vapp")

	t.Run("gone", func(t *testing.T) {
		h := h.in(t)
		sh(t, h.Host(), "ip link delete vapp")
		eventually(t, "the interface is gone from status", func() error {
			if d := h.dataplane(); len(d.programs("vapp")) > 0 || !d.Healthy {
				return fmt.Errorf("%v %q", d.programs("vapp"), d.Problems)
			}
			return nil
		})
	})
	h.cable(h.Host(), "vapp", app, "eth0")
	sh(t, h.Host(), "ip link set vapp master cni0")
	sh(t, app, "ip address add "+lab.App4+"/16 dev eth0; ip route add default via "+lab.PodGateway4)
	steered(app, "vapp")

	late, err := h.AddNode("pod-late", "172.20.0.21", "fd00:20::21")
	if err != nil {
		t.Fatal(err)
	}
	h.cable(h.Host(), "vlate0", late, "eth0")
	sh(t, h.Host(), "ip link set vlate0 master cni0")
	sh(t, late, "ip address add 172.20.0.21/16 dev eth0; ip route add default via "+lab.PodGateway4)
	steered(late, "vlate0")

	// The same within one breath, as a pod that is restarted: two events may be told as one.
	sh(t, h.Host(), "ip link delete vlate0")
	h.cable(h.Host(), "vlate0", late, "eth0")
	sh(t, h.Host(), "ip link set vlate0 master cni0")
	sh(t, late, "ip address add 172.20.0.21/16 dev eth0; ip route add default via "+lab.PodGateway4)
	steered(late, "vlate0")
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
}

// TestPodsRouted: as with Calico, each pod is behind an interface of its own and no bridge.
func TestPodsRouted(t *testing.T) {
	h := raise(t, lab.Options{})
	pod, err := h.AddNode("pod-routed", "172.20.9.9", "fd00:20:9::9")
	if err != nil {
		t.Fatal(err)
	}
	h.attach(endpoints, ranges, pods("cali*"))
	h.cable(h.Host(), "cali0123456789a", pod, "eth0")
	sh(t, h.Host(), "ip route add 172.20.9.9/32 dev cali0123456789a; sysctl -qw net.ipv4.conf.cali0123456789a.proxy_arp=1")
	sh(t, pod, "ip address add 172.20.9.9/32 dev eth0; ip route add 169.254.1.1 dev eth0 scope link; ip route add default via 169.254.1.1 src 172.20.9.9")
	eventually(t, "the pod's queries are steered", func() error {
		before := h.dataplane()
		raw, err := ask(pod, clusterDNS, pack(t, 7, lab.Backend, dns.TypeA), noReply)
		if err := errors.Join(err, isAddress(raw, lab.Backend4)); err != nil {
			return err
		}
		if n := h.dataplane().rose(before, "pod", "replied"); n != 1 {
			return fmt.Errorf("replied rose by %d", n)
		}
		return nil
	})
}

// TestPodsAllDead: a pod's query goes where it would without us: to kube-proxy, which may know better.
func TestPodsAllDead(t *testing.T) {
	const address = lab.CoreDNS0v4 + ":5353"
	h := raise(t, lab.Options{})
	if err := h.LoadKubeProxyLikeRules(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := respond(t, h.Pod("coredns-0"), address, "172.21.0.86")
	h.attach(endpoint(address), ranges, pods("vapp"), []string{"--cluster-dns", lab.KubeDNS4})
	pod := h.Pod("app")
	resolve(t, pod, clusterDNS, lab.Backend, "172.21.0.86")
	r.setMute(true)
	h.judged(address, false)
	outside := queries(t, h.outside()...)
	before := h.dataplane()
	const rounds = 10
	for range rounds {
		resolve(t, pod, clusterDNS, lab.Backend, lab.Backend4) // by the Service's other endpoints
	}
	if n := h.dataplane().rose(before, "pod", "passed_no_backend"); n != rounds {
		t.Errorf("passed_no_backend rose by %d", n)
	}
	if n := queries(t, h.outside()...) - outside; n != 0 {
		t.Errorf("the external servers saw %d queries", n)
	}
	r.setMute(false)
	h.judged(address, true)
	eventually(t, "pods are steered again", func() error {
		raw, err := ask(pod, clusterDNS, pack(t, 8, lab.Backend, dns.TypeA), noReply)
		return errors.Join(err, isAddress(raw, "172.21.0.86"))
	})
}
