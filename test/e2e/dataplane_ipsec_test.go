package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// A transformation that is used if there is one, so that the stack answers here, where the kernel may have none at all.
const perhapsESP = " tmpl proto esp mode transport level use"

// noted waits until status says why an endpoint is not steered to; nothing where it is.
func (h *host) noted(address, why string) {
	h.t.Helper()
	eventually(h.t, fmt.Sprintf("the note of %s is %q", address, why), func() error {
		iface, note, healthy := h.dataplane().endpoint(address)
		if !healthy || !strings.Contains(note, why) || (why == "") != (note == "") || (iface == "") != (why != "") {
			return fmt.Errorf("healthy %v, interface %q, note %q", healthy, iface, note)
		}
		return nil
	})
}

// TestEndpointUnderIPsec: a redirect would go past a policy, in the clear. Policies that come later are noticed.
func TestEndpointUnderIPsec(t *testing.T) {
	h := raise(t, lab.Options{})
	r := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.82")
	const address = lab.App4 + ":53"
	policy := func(what string) { sh(t, h.Host(), "ip xfrm policy "+what) }
	policy("add src 0.0.0.0/0 dst " + lab.App4 + "/32 proto udp dport 53 dir out" + perhapsESP)
	h.attach(endpoint(lab.App4), ranges)
	h.noted(address, "under an IPsec policy")
	steered := func(want bool) {
		t.Helper()
		before, asked := h.dataplane(), len(r.sees())
		const rounds = 5
		for range rounds {
			resolve(t, h.Host(), hostDNS, lab.Backend, "172.21.0.82")
			resolve(t, h.Worker(), switchDNS, lab.Backend, "172.21.0.82")
		}
		after := h.dataplane()
		for _, scope := range []string{"host", "kubeswitch"} {
			if n := after.rose(before, scope, "steered"); (n != 0) != want {
				t.Errorf("%s: %d of %d queries were steered", scope, n, rounds)
			}
		}
		if n := len(r.sees()) - asked; n != 2*rounds {
			t.Errorf("it was asked %d times", n)
		}
	}
	steered(false)
	policy("delete src 0.0.0.0/0 dst " + lab.App4 + "/32 proto udp dport 53 dir out")
	h.noted(address, "")
	steered(true)
	policy("add src " + lab.App4 + "/32 dst 0.0.0.0/0 dir in" + perhapsESP) // plain replies are taken
	policy("add dst " + lab.App4 + "/32 dir out priority 10")               // exempt
	policy("add dst 172.20.0.0/16 dir out priority 20" + perhapsESP)
	h.noted(address, "")
	steered(true)
	policy("delete dst " + lab.App4 + "/32 dir out")
	h.noted(address, "under an IPsec policy")
	steered(false)
	policy("flush")
	h.noted(address, "")
	steered(true)
}

// TestIPsecDefaultBlock: what no policy is about is dropped by the stack. The kernel does not go past that.
func TestIPsecDefaultBlock(t *testing.T) {
	h := raise(t, lab.Options{})
	r := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.83")
	h.attach(endpoint(lab.App4), ranges)
	h.steers(hostDNS, "172.21.0.83")
	sh(t, h.Host(), "ip xfrm policy setdefault out block")
	eventually(t, "cluster names are answered SERVFAIL", func() error { return h.unserved(h.Host(), hostDNS) })
	asked := len(r.sees())
	if err := h.unserved(h.Host(), hostDNS); err != nil {
		t.Error(err)
	}
	if _, note, _ := h.dataplane().endpoint(lab.App4 + ":53"); !strings.Contains(note, "blocked by the default IPsec policy") {
		t.Errorf("note %q", note)
	}
	if n := len(r.sees()) - asked; n != 0 {
		t.Errorf("%d queries went past the policy", n)
	}
	sh(t, h.Host(), "ip xfrm policy setdefault out accept")
	h.steers(hostDNS, "172.21.0.83")
}

// TestWorkersUnderIPsec: what goes back to them would go past a policy just as well.
func TestWorkersUnderIPsec(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	before := h.dataplane()
	resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
	if n := h.dataplane().rose(before, "kubeswitch", "replied"); n != 1 {
		t.Fatalf("replied rose by %d", n)
	}
	sh(t, h.Host(), "ip xfrm policy add src "+lab.KubeSwitch4+" dst "+lab.Worker4+" dir out"+perhapsESP)
	eventually(t, "status says that workers are not steered", func() error {
		if out := h.run("status"); !strings.Contains(out.stdout, "under an IPsec policy: what is asked at the KubeSwitch address is left to the server there") {
			return errors.New(out.stdout)
		}
		return nil
	})
	before = h.dataplane()
	resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
	h.steers(hostDNS, lab.Backend4)
	after := h.dataplane()
	if n := after.rose(before, "kubeswitch", "steered"); n != 0 || after.forwarded(before) != 1 {
		t.Errorf("%d steered, %d forwarded", n, after.forwarded(before))
	}
	// Who may ask is still decided, by the forwarder.
	if raw, err := askAs(h.Pod("app"), lab.App4, switchDNS, pack(t, 1, lab.Backend, dns.TypeA), noReply); raw != nil || err != nil {
		t.Errorf("a stranger is answered: %s, %v", text(raw), err)
	}
	sh(t, h.Host(), "ip xfrm policy flush")
	eventually(t, "workers are steered again", func() error {
		before := h.dataplane()
		resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
		if h.dataplane().rose(before, "kubeswitch", "replied") != 1 {
			return errors.New("not steered")
		}
		return nil
	})
}

// TestEndpointBehindEncapsulation: the stack wraps what goes there, a redirect does not.
func TestEndpointBehindEncapsulation(t *testing.T) {
	h := raise(t, lab.Options{})
	const address = lab.CoreDNS0v4 + ":53"
	h.attach()
	h.noted(address, "")
	sh(t, h.Host(), "ip route add "+lab.CoreDNS0v4+"/32 encap ip id 7 dst 172.20.0.99 via 172.20.0.99 dev cni0")
	eventually(t, "status says why it is not steered to", func() error {
		if iface, note, _ := h.dataplane().endpoint(address); iface != "" || !strings.Contains(note, "encapsulation") {
			return fmt.Errorf("interface %q, note %q", iface, note)
		}
		return nil
	})
	sh(t, h.Host(), "ip route del "+lab.CoreDNS0v4+"/32")
	h.noted(address, "")
}

// TestHooksThatAreSkipped pins what docs/limits.md says of a host's own rules: which see a steered query on its way to an endpoint.
func TestHooksThatAreSkipped(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoint(lab.CoreDNS0v4), ranges)
	h.kill() // it asks the endpoint too, to see whether it lives
	sh(t, h.Host(), `nft -f - <<-'EOF'
		table ip seen {
			counter output {}
			counter postrouting {}
			chain out { type filter hook output priority 0; ip daddr `+lab.CoreDNS0v4+` udp dport 53 counter name output; }
			chain post { type filter hook postrouting priority 0; ip daddr `+lab.CoreDNS0v4+` udp dport 53 counter name postrouting; }
		}
		table netdev seen {
			counter egress {}
			counter port {}
			chain onbridge { type filter hook egress device cni0 priority 0; ip daddr `+lab.CoreDNS0v4+` udp dport 53 counter name egress; }
			chain onport { type filter hook egress device vcoredns0 priority 0; ip daddr `+lab.CoreDNS0v4+` udp dport 53 counter name port; }
		}
	EOF`)
	counted := func(table string) string {
		return must(t, h.Host(), "nft", "list", "counters", "table", table, "seen")
	}
	const rounds = 10
	before := h.dataplane()
	for range rounds {
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	}
	if n := h.dataplane().rose(before, "host", "replied"); n != rounds {
		t.Fatalf("replied rose by %d", n)
	}
	for _, counter := range strings.Split(counted("ip")+counted("netdev"), "counter ")[1:] {
		name, _, _ := strings.Cut(counter, " ")
		if want := map[bool]string{false: "packets 0 ", true: fmt.Sprintf("packets %d ", rounds)}[name == "port"]; !strings.Contains(counter, want) {
			t.Errorf("want %s, got %s", want, counter)
		}
	}
}
