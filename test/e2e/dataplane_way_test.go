package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// natPorts are those of steered queries in the lab, outside the ephemeral ones that the stack's probes come from.
const natPorts = "udp dport 1024-32767"

// severed waits until status says of an endpoint that the kernel's path to it is broken, or is not.
func (h *host) severed(address string, want bool) {
	h.t.Helper()
	eventuallyIn(h.t, time.Minute, fmt.Sprintf("the way to %s is broken: %v", address, want), func() error {
		iface, note, healthy := h.dataplane().endpoint(address)
		if now := strings.Contains(note, "the kernel's path"); !healthy || now != want || now != (iface == "") {
			return fmt.Errorf("healthy %v, interface %q, note %q", healthy, iface, note)
		}
		return nil
	})
}

// TestKernelWayBroken: an endpoint answers the stack, and what is steered to it is lost. The forwarder asks it then, and when
// the way is mended it is steered to again.
func TestKernelWayBroken(t *testing.T) {
	t.Parallel()
	const first = lab.CoreDNS0v4 + ":53"
	for _, fault := range []struct {
		name        string
		begin, mend string // in the pod
	}{
		{"replies are dropped", "nft 'add table ip lost; add chain ip lost out { type filter hook output priority 0; }; add rule ip lost out udp sport 53 " + natPorts + " drop'",
			"nft delete table ip lost"},
		// As with several routes of the same cost: where replies come in, no program waits for them.
		{"replies take another way", "ip route add " + lab.PodGateway4 + "/32 dev eth1", "ip route del " + lab.PodGateway4 + "/32 dev eth1"},
	} {
		t.Run(fault.name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			pod := h.CoreDNS(0).Node()
			h.cable(h.Host(), "vsecond", pod, "eth1")
			h.attach()
			outside := queries(t, h.outside()...)
			l := startLoad(t, h.Host(), hostDNS, lab.Backend, lab.Backend4, 2*time.Millisecond)
			l.more(t, 100)
			begin := time.Now()
			sh(t, pod, fault.begin)
			h.severed(first, true)
			known := time.Since(begin)
			l.more(t, 300)
			_, lost, failed := l.finish()
			if len(lost) == 0 || failed > 0 {
				t.Errorf("%d lost, so the fault was none, or %d wrong answers", len(lost), failed)
			} else {
				t.Logf("known after %s, the last lost query was sent after %s", known.Round(time.Millisecond), lost[len(lost)-1].Sub(begin).Round(time.Millisecond))
			}
			if r := h.status(); r.Healthy || !strings.Contains(strings.Join(r.Problems, "\n"), "the kernel's path to "+first+" is broken") {
				t.Errorf("status does not tell: %q", r.Problems)
			}
			c := h.check(lab.Backend, "kernel-path", "DNS is fine, but the kernel's path to CoreDNS at "+first+" is broken")
			c.step(t, "status", "bad", "the kernel's path to "+first)

			// The other one is steered to, and the broken one is still asked: by TCP.
			before := h.dataplane()
			const rounds = 20
			for range rounds {
				resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
			}
			if n := h.dataplane().rose(before, "host", "replied"); n < rounds {
				t.Errorf("replied rose by %d", n)
			}
			h.run("attach", "--dns-endpoint", lab.CoreDNS0v4)
			asked := queries(t, h.CoreDNS(0))
			for range rounds {
				resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
				resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
			}
			if n := queries(t, h.CoreDNS(0)) - asked; n < 2*rounds {
				t.Errorf("the only one, of which the way is broken, was asked %d times", n)
			}
			sh(t, pod, fault.mend)
			h.severed(first, false)
			h.steers(hostDNS, lab.Backend4)
			h.healthy()
			if n := queries(t, h.outside()...) - outside; n != 0 {
				t.Errorf("the external servers saw %d queries", n)
			}
		})
	}
}

// TestKernelWayLosesLargeReplies: probes come through, also steered ones.
func TestKernelWayLosesLargeReplies(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoint(lab.CoreDNS0v4), ranges)
	sh(t, h.CoreDNS(0).Node(), "nft 'add table ip lost; add chain ip lost out { type filter hook output priority 0; }; add rule ip lost out udp sport 53 "+
		natPorts+" meta length 600-65535 drop'")
	query := new(dns.Msg).SetQuestion(lab.Big, dns.TypeA)
	query.SetEdns0(1232, false)
	payload, err := query.Pack()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := listenUDP(h.Host(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 20 {
		if _, err := conn.WriteToUDPAddrPort(payload, hostDNS); err != nil {
			t.Fatal(err)
		}
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	}
	h.severed(lab.CoreDNS0v4+":53", true)
	raw, err := ask(h.Host(), hostDNS, payload, patience)
	var m dns.Msg
	if err := errors.Join(err, m.Unpack(raw)); err != nil || !m.Truncated && len(m.Answer) == 0 {
		t.Errorf("no large answer by the forwarder: %v, %v", &m, err)
	}
}

// TestAttachWithBrokenWay: the self-test tells a broken way from a dead endpoint, and the forwarder serves.
func TestAttachWithBrokenWay(t *testing.T) {
	h := raise(t, lab.Options{})
	for _, s := range h.cluster() {
		sh(t, s.Node(), "nft 'add table ip lost; add chain ip lost out { type filter hook output priority 0; }; add rule ip lost out udp sport 53 "+natPorts+" drop'")
	}
	h.attach()
	h.severed(lab.CoreDNS0v4+":53", true)
	h.severed(lab.CoreDNS1v4+":53", true)
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
}
