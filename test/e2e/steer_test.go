package e2e

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// pack makes the datagram of a plain query.
func pack(t *testing.T, id uint16, name string, qtype uint16) []byte {
	t.Helper()
	m := new(dns.Msg).SetQuestion(name, qtype)
	m.Id = id
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// resolve asks for an address and wants exactly the one.
func resolve(t *testing.T, from *lab.Node, server netip.AddrPort, name, want string) {
	t.Helper()
	raw, err := ask(from, server, pack(t, dns.Id(), name, dns.TypeA), patience)
	if err != nil {
		t.Fatal(err)
	}
	var m dns.Msg
	if err := m.Unpack(raw); err != nil {
		t.Fatalf("%s asked %s for %s: %v", from.Name(), server, name, err)
	}
	if len(m.Answer) != 1 || m.Rcode != dns.RcodeSuccess || m.Answer[0].(*dns.A).A.String() != want {
		t.Fatalf("%s asked %s for %s: want %s, got %v", from.Name(), server, name, want, &m)
	}
}

// TestSteeredQueriesStayInTheKernel: neither the forwarder nor connection tracking's NAT sees a steered query.
func TestSteeredQueriesStayInTheKernel(t *testing.T) {
	h := raise(t, lab.Options{})
	if err := h.LoadKubeProxyLikeRules(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.attach()
	const rounds = 50
	before, conntrack := h.healthy(), h.conntrack()
	askBoth := func(t *testing.T) {
		t.Helper()
		for range rounds {
			resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
			resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
		}
	}
	askBoth(t)
	after := h.healthy()
	if before.Forwarder.Queries != after.Forwarder.Queries {
		t.Errorf("the forwarder saw %d of the steered queries", after.Forwarder.Queries-before.Forwarder.Queries)
	}
	for _, scope := range []string{"host", "kubeswitch"} {
		for _, reason := range []string{"steered", "replied"} {
			if n := after.Reasons[scope][reason] - before.Reasons[scope][reason]; n != rounds {
				t.Errorf("%s %s rose by %d, want %d", scope, reason, n, rounds)
			}
		}
		if n := after.Counters[scope].Steered - before.Counters[scope].Steered; n != rounds {
			t.Errorf("counter %s.steered rose by %d, want %d", scope, n, rounds)
		}
	}

	t.Run("conntrack", func(t *testing.T) {
		h := h.in(t)
		now := h.conntrack()
		for _, entry := range now.Matching("dport=53") {
			if slices.Contains(conntrack.Entries, entry) {
				continue
			}
			if strings.Contains(entry, "src="+lab.Worker4+" ") {
				t.Errorf("a query from the worker made an entry: %s", entry)
			}
			if translated(entry) {
				t.Errorf("a steered query was translated: %s", entry)
			}
		}
		if n := now.Stats["insert_failed"] - conntrack.Stats["insert_failed"]; n != 0 {
			t.Errorf("insert_failed rose by %d", n)
		}
		// The rules must be at work, or the above shows nothing: the Service's address needs them.
		service := netip.MustParseAddrPort(lab.KubeDNS4 + ":53")
		resolve(t, h.Host(), service, lab.Backend, lab.Backend4)
		resolve(t, h.Worker(), service, lab.Backend, lab.Backend4)
		for _, client := range []string{"", "src=" + lab.Worker4} {
			found := h.conntrack().Matching(strings.Fields("dport=53 dst=" + lab.KubeDNS4 + " " + client)...)
			if len(found) == 0 || !translated(found[0]) {
				t.Errorf("no NAT entry for a query of %q to the Service: the rules do not work: %v", client, found)
			}
		}
	})

	t.Run("stopped daemon", func(t *testing.T) {
		h := h.in(t)
		pid := h.healthy().PID
		h.signal("STOP", pid)
		t.Cleanup(func() { h.signal("CONT", pid) })
		askBoth(t)
		out := h.run("status")
		if out.took > patience || out.code != 3 {
			t.Errorf("status beside a stopped daemon: want exit 3 in time: %v", out)
		}
		if !strings.Contains(out.stdout, "does not answer") || !strings.Contains(out.stdout, "dns_from_host") {
			t.Errorf("status does not say what it can see and what not: %v", out)
		}
		h.signal("CONT", pid)
		eventually(t, "the daemon answers again", func() error {
			resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
			return nil
		})
		h.healthy()
	})
}

func (h *host) conntrack() *lab.Conntrack {
	h.t.Helper()
	c, err := h.Conntrack(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	return c
}

var tuple = regexp.MustCompile(`src=(\S+) dst=(\S+) sport=(\S+) dport=(\S+)`)

// translated tells whether the two directions of a conntrack entry are not each other's mirror.
func translated(entry string) bool {
	m := tuple.FindAllStringSubmatch(entry, -1)
	if len(m) != 2 {
		return true // unreadable: look at it
	}
	there, back := m[0], m[1]
	return there[1] != back[2] || there[2] != back[1] || there[3] != back[4] || there[4] != back[3]
}

// TestSteeringIPv6 is about the same path with the other IP version.
func TestSteeringIPv6(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoints, endpoints6, ranges, ranges6, []string{"--kubeswitch-address", lab.KubeSwitch6})
	before := h.healthy()
	const rounds = 20
	for range rounds {
		resolve(t, h.Host(), hostDNS6, lab.Backend, lab.Backend4)
		resolve(t, h.Worker(), netip.AddrPortFrom(netip.MustParseAddr(lab.KubeSwitch6), 53), lab.Backend, lab.Backend4)
	}
	after := h.healthy()
	for _, scope := range []string{"host", "kubeswitch"} {
		if n := after.Reasons[scope]["replied"] - before.Reasons[scope]["replied"]; n != rounds {
			t.Errorf("%s replied rose by %d, want %d", scope, n, rounds)
		}
	}
	if before.Forwarder.Queries != after.Forwarder.Queries {
		t.Errorf("the forwarder saw %d of the steered queries", after.Forwarder.Queries-before.Forwarder.Queries)
	}
}
