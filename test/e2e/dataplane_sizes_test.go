package e2e

import (
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// fragments adds up what each node has cut up, put together or not been able to send for its size.
func (h *host) fragments() (sum uint64) {
	h.t.Helper()
	for _, node := range h.Nodes() {
		counters, err := node.Counters()
		if err != nil {
			h.t.Fatal(err)
		}
		for name, n := range counters {
			if strings.Contains(name, "Frag") || strings.Contains(name, "Reasm") {
				sum += n
			}
		}
	}
	return sum
}

// big asks for what fits no UDP reply, and wants to be told so in one unbroken packet, and then all of it over TCP.
func (h *host) big(since dataplane) {
	h.t.Helper()
	fragments := h.fragments()
	for _, from := range []struct {
		node   *lab.Node
		server string
	}{{h.Host(), "127.0.0.1"}, {h.Worker(), lab.KubeSwitch4}} {
		for _, size := range []string{"512", "1232", "4096", "65535"} {
			r := command(h.t, from.node, "dig", "+ignore", "+tries=1", "+bufsize="+size, "@"+from.server, lab.Big, "A")
			if !strings.Contains(r.stdout, " tc ") {
				h.t.Errorf("want TC=1 over UDP: %v", r)
			}
			r = command(h.t, from.node, "dig", "+short", "+tries=1", "+bufsize="+size, "@"+from.server, lab.Big, "A")
			if n := strings.Count(r.stdout, "172.20.2."); n != lab.BigCount {
				h.t.Errorf("want %d addresses with the retry over TCP, got %d: %v", lab.BigCount, n, r)
			}
		}
	}
	if n := h.fragments() - fragments; n != 0 {
		h.t.Errorf("the counters of fragments rose by %d", n)
	}
	after := h.dataplane()
	for _, scope := range []string{"host", "kubeswitch"} {
		if n := after.rose(since, scope, "replied"); n < 8 {
			h.t.Errorf("%s: replied rose by %d: not steered", scope, n)
		}
	}
}

func TestSizes(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	h.big(h.dataplane())
	// The same question straight to CoreDNS, with a large size, comes in one piece: it is the clamp that cuts.
	m := new(dns.Msg).SetQuestion(lab.Big, dns.TypeA)
	m.SetEdns0(4096, false)
	reply, err := h.Host().Exchange(t.Context(), "udp", h.CoreDNS(0).Addr4(), m)
	if err != nil || reply.Truncated || len(reply.Answer) != lab.BigCount {
		t.Errorf("straight from CoreDNS: %v %v", err, reply)
	}
}

// TestClamp: what an endpoint sees of the size that a client offers.
func TestClamp(t *testing.T) {
	h := raise(t, lab.Options{})
	r := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.81")
	h.attach(endpoint(lab.App4), ranges)
	for _, test := range []struct{ offers, sees uint16 }{{0, 0}, {512, 512}, {1231, 1231}, {1232, 1232}, {1233, 1232}, {4096, 1232}, {65535, 1232}} {
		for _, from := range []*lab.Node{h.Host(), h.Worker()} {
			server := hostDNS
			if from == h.Worker() {
				server = switchDNS
			}
			m := new(dns.Msg).SetQuestion(lab.Backend, dns.TypeA)
			if test.offers > 0 {
				m.SetEdns0(test.offers, true)
			}
			reply, err := from.Exchange(t.Context(), "udp", server, m)
			if err != nil || len(reply.Answer) != 1 {
				t.Fatalf("offering %d: %v %v", test.offers, err, reply)
			}
			log := r.sees()
			if last := log[len(log)-1]; last.id != m.Id || last.size != test.sees {
				t.Errorf("%s offers %d: the endpoint sees %d, want %d", from.Name(), test.offers, last.size, test.sees)
			}
		}
	}
}
