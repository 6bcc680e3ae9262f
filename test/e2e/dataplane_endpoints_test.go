package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// outWithin is three times what the issue promises for a dead endpoint, since the machine that tests run on is shared.
const outWithin = 3 * time.Second

func endpoint(addresses ...string) (args []string) {
	for _, a := range addresses {
		args = append(args, "--dns-endpoint", a)
	}
	return args
}

// judged waits until status says of an endpoint that it is healthy, or not.
func (h *host) judged(address string, healthy bool) (after time.Duration) {
	h.t.Helper()
	begin := time.Now()
	eventually(h.t, fmt.Sprintf("%s is healthy: %v", address, healthy), func() error {
		if _, note, now := h.dataplane().endpoint(address); now != healthy {
			return fmt.Errorf("healthy: %v, note: %q", now, note)
		}
		return nil
	})
	return time.Since(begin)
}

// steers asks until a query is steered and answered, and fails the test if none is.
func (h *host) steers(server netip.AddrPort, want string) {
	h.t.Helper()
	eventually(h.t, "a query is steered to "+want, func() error {
		before := h.dataplane()
		raw, err := ask(h.Host(), server, pack(h.t, 9, lab.Backend, dns.TypeA), noReply)
		if err := errors.Join(err, isAddress(raw, want)); err != nil {
			return err
		}
		if n := h.dataplane().rose(before, "host", "replied"); n != 1 {
			return fmt.Errorf("answered, but not by steering")
		}
		return nil
	})
}

// TestEndpointDies: one of two endpoints goes, under a steady load, and comes back.
func TestEndpointDies(t *testing.T) {
	t.Parallel()
	const second = lab.CoreDNS1v4 + ":53"
	for _, fault := range []struct {
		name        string
		begin, mend func(h *host) error
	}{
		{"killed", func(h *host) error { return h.CoreDNS(1).Kill(h.t.Context()) }, func(h *host) error { return h.CoreDNS(1).Start(h.t.Context()) }},
		{"hung", func(h *host) error { return h.CoreDNS(1).Pause() }, func(h *host) error { return h.CoreDNS(1).Resume() }},
		{"unplugged", func(h *host) error { return h.Host().Run(h.t.Context(), "ip", "link", "set", "vcoredns1", "down") },
			func(h *host) error { return h.Host().Run(h.t.Context(), "ip", "link", "set", "vcoredns1", "up") }},
	} {
		t.Run(fault.name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			h.attach()
			outside := queries(t, h.outside()...)
			l := startLoad(t, h.Host(), hostDNS, lab.Backend, lab.Backend4, 2*time.Millisecond)
			l.more(t, 100)
			begin := time.Now()
			if err := fault.begin(h); err != nil {
				t.Fatal(err)
			}
			h.judged(second, false)
			known := time.Since(begin)
			l.more(t, 300) // with none for the dead one among them, or they would be in lost
			sent, lost, failed := l.finish()
			if len(lost) == 0 {
				t.Error("no query was lost: the fault was none")
			} else if out := lost[len(lost)-1].Sub(begin); out > outWithin {
				t.Errorf("the last query to the dead endpoint was sent %s after its death", out)
			} else {
				t.Logf("out of rotation after %s, in status after %s; %d of %d queries lost", out.Round(time.Millisecond), known.Round(time.Millisecond), len(lost), sent)
			}
			if failed > 0 {
				t.Errorf("%d wrong answers", failed)
			}

			l = startLoad(t, h.Host(), hostDNS, lab.Backend, lab.Backend4, 2*time.Millisecond)
			defer func() {
				if _, lost, failed := l.finish(); len(lost) > 0 || failed > 0 {
					t.Errorf("%d queries lost and %d wrong with the dead one out and on its way back", len(lost), failed)
				}
				if n := queries(t, h.outside()...) - outside; n != 0 {
					t.Errorf("the external servers saw %d queries", n)
				}
			}()
			if err := fault.mend(h); err != nil {
				t.Fatal(err)
			}
			back := h.judged(second, true)
			if back > outWithin {
				t.Errorf("back after %s", back)
			}
			t.Logf("back after %s", back.Round(time.Millisecond))
			first := queries(t, h.CoreDNS(1))
			l.more(t, 200)
			if n := queries(t, h.CoreDNS(1)) - first; n < 20 {
				t.Errorf("the second endpoint has got %d of 200 queries", n)
			}
		})
	}
}

// unserved asks for a cluster's name, wants SERVFAIL by the forwarder, and returns the reason that comes with it.
func (h *host) unserved(from *lab.Node, server netip.AddrPort) error {
	query := new(dns.Msg).SetQuestion(lab.Backend, dns.TypeA)
	query.SetEdns0(1232, false)
	payload, err := query.Pack()
	if err != nil {
		return err
	}
	raw, err := ask(from, server, payload, noReply)
	var m dns.Msg
	if err := errors.Join(err, m.Unpack(raw)); err != nil || m.Rcode != dns.RcodeServerFailure {
		return fmt.Errorf("%s from %s: want SERVFAIL, got %v, %w", from.Name(), server, &m, err)
	}
	if opt := m.IsEdns0(); opt == nil || !strings.Contains(opt.String(), "no endpoint for zone") {
		return fmt.Errorf("%s from %s: no reason: %v", from.Name(), server, &m)
	}
	return nil
}

// TestAllEndpointsDead: once that is known, SERVFAIL comes at once, and nothing leaks; and either that answers first is used
// at once.
func TestAllEndpointsDead(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoints, endpoints6, ranges)
	outside := queries(t, h.outside()...)
	for _, s := range h.cluster() {
		if err := s.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, address := range []string{lab.CoreDNS0v4 + ":53", lab.CoreDNS1v4 + ":53", "[" + lab.CoreDNS0v6 + "]:53", "[" + lab.CoreDNS1v6 + "]:53"} {
		h.judged(address, false)
	}
	now := h.dataplane()
	if now.Healthy || !strings.Contains(strings.Join(now.Problems, "\n"), "no endpoint answers") {
		t.Errorf("status does not tell: healthy %v, %q", now.Healthy, now.Problems)
	}
	const rounds = 10
	for range rounds {
		if err := errors.Join(h.unserved(h.Host(), hostDNS), h.unserved(h.Host(), hostDNS6), h.unserved(h.Worker(), switchDNS)); err != nil {
			t.Error(err)
		}
	}
	if after := h.dataplane(); after.rose(now, "host", "steered") != 0 || after.rose(now, "kubeswitch", "steered") != 0 {
		t.Errorf("queries were steered to the dead: %v, before %v", after.Reasons, now.Reasons)
	}
	if n := queries(t, h.outside()...) - outside; n != 0 {
		t.Errorf("the external servers saw %d queries", n)
	}
	resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
	if err := h.CoreDNS(0).Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	back := h.judged(lab.CoreDNS0v4+":53", true)
	t.Logf("back after %s", back.Round(time.Millisecond))
	for range rounds {
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	}
	h.steers(hostDNS, lab.Backend4)
}

// TestFamilyOfEndpointsDead: while those of one family are dead, its queries are the forwarder's, which asks the others.
func TestFamilyOfEndpointsDead(t *testing.T) {
	h := raise(t, lab.Options{})
	six := respond(t, h.Pod("app"), "["+lab.App6+"]:53", "172.21.0.81")
	four := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.81")
	h.attach(endpoint(lab.App4, lab.App6), ranges)
	four.setMute(true)
	h.judged(lab.App4+":53", false)
	before, asked := h.dataplane(), len(six.sees())
	const rounds = 10
	for range rounds {
		resolve(t, h.Host(), hostDNS, lab.Backend, "172.21.0.81")
		resolve(t, h.Host(), hostDNS6, lab.Backend, "172.21.0.81")
		resolve(t, h.Worker(), switchDNS, lab.Backend, "172.21.0.81")
	}
	after := h.dataplane()
	if n := after.rose(before, "host", "replied"); n != rounds {
		t.Errorf("replied rose by %d, want the %d by IPv6", n, rounds)
	}
	if n := after.forwarded(before); n != 2*rounds {
		t.Errorf("the forwarder saw %d queries, want the %d by IPv4", n, 2*rounds)
	}
	if n := len(six.sees()) - asked; n != 3*rounds {
		t.Errorf("the living one saw %d queries", n)
	}
}

// TestEndpointPort: an EndpointSlice may name any port.
func TestEndpointPort(t *testing.T) {
	h := raise(t, lab.Options{})
	r := respond(t, h.Pod("app"), lab.App4+":5353", "172.21.0.77")
	h.attach(endpoint(lab.App4+":5353"), ranges)
	before := h.dataplane()
	resolve(t, h.Host(), hostDNS, lab.Backend, "172.21.0.77")
	resolve(t, h.Worker(), switchDNS, lab.Backend, "172.21.0.77")
	if m, err := h.Host().Query(t.Context(), "tcp", hostDNS, lab.Backend, dns.TypeA); err != nil || len(m.Answer) != 1 {
		t.Errorf("TCP: %v %v", m, err)
	}
	after := h.dataplane()
	if after.rose(before, "host", "replied") != 1 || after.rose(before, "kubeswitch", "replied") != 1 {
		t.Errorf("not steered: %v", after.Reasons)
	}
	if n := len(r.sees()); n < 3 {
		t.Errorf("the endpoint saw %d queries", n)
	}
}

func TestEndpointIPv6(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoints6, ranges, ranges6)
	h.steers(hostDNS6, lab.Backend4)
	// Of the other family there is none: user space goes over.
	before := h.dataplane()
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	if n := h.dataplane().rose(before, "host", "passed_no_backend"); n != 1 {
		t.Errorf("passed_no_backend rose by %d", n)
	}
	if err := h.CoreDNS(1).Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := startLoad(t, h.Host(), hostDNS6, lab.Backend, lab.Backend4, 2*time.Millisecond)
	h.judged("["+lab.CoreDNS1v6+"]:53", false)
	l.more(t, 100)
	l.finish()
	before = h.dataplane()
	for range 20 {
		resolve(t, h.Host(), hostDNS6, lab.Backend, lab.Backend4)
	}
	if n := h.dataplane().rose(before, "host", "replied"); n != 20 {
		t.Errorf("replied rose by %d with one endpoint dead, want 20", n)
	}
}

// vxlan is another machine of the cluster behind the KubeSwitch, with a server for pods that are reached by VXLAN.
func (h *host) vxlan() (far *lab.Node, pod string) {
	h.t.Helper()
	far, err := h.AddNode("node1", "172.19.1.102", "fd00:19::102")
	if err != nil {
		h.t.Fatal(err)
	}
	h.cable(h.Host(), "vnode1", far, "eth0")
	sh(h.t, h.Host(), `ip link set vnode1 master kubeswitch
		ip link add flannel.1 type vxlan id 1 dev kubeswitch local `+lab.KubeSwitch4+` remote 172.19.1.102 dstport 8472
		ip link set flannel.1 mtu 1450 up
		ip address add 172.20.254.1/32 dev flannel.1
		ip route add 172.20.5.0/24 dev flannel.1`)
	sh(h.t, far, `ip address add 172.19.1.102/24 dev eth0
		ip link add flannel.1 type vxlan id 1 dev eth0 local 172.19.1.102 remote `+lab.KubeSwitch4+` dstport 8472
		ip link set flannel.1 mtu 1450 up
		ip address add 172.20.5.10/24 dev flannel.1
		ip route add 172.20.254.1/32 dev flannel.1`)
	return far, "172.20.5.10"
}

func TestEndpointBehindVXLAN(t *testing.T) {
	h := raise(t, lab.Options{})
	far, pod := h.vxlan()
	r := respond(t, far, pod+":53", "172.21.0.78")
	h.attach(endpoint(pod), ranges, pods("cni0"))
	before := h.dataplane()
	const rounds = 10
	for range rounds {
		resolve(t, h.Host(), hostDNS, lab.Backend, "172.21.0.78")
		resolve(t, h.Worker(), switchDNS, lab.Backend, "172.21.0.78")
		resolve(t, h.Pod("app"), clusterDNS, lab.Backend, "172.21.0.78")
	}
	after := h.dataplane()
	for _, scope := range []string{"host", "kubeswitch", "pod"} {
		if n := after.rose(before, scope, "replied"); n != rounds {
			t.Errorf("%s: replied rose by %d", scope, n)
		}
	}
	for _, s := range r.sees() {
		if s.from.Addr().String() != "172.20.254.1" {
			t.Errorf("a query came from %s", s.from)
			break
		}
	}
	if iface, note, _ := after.endpoint(pod + ":53"); iface != "flannel.1" || note != "" {
		t.Errorf("status: interface %q, note %q", iface, note)
	}
	h.big(before)
}

// TestEndpointOnThisHost: a host-network pod of this host is asked by the forwarder, and status says so.
func TestEndpointOnThisHost(t *testing.T) {
	h := raise(t, lab.Options{})
	const local = lab.PodGateway4 + ":5353"
	respond(t, h.Host(), local, "172.21.0.79")
	t.Run("alone", func(t *testing.T) {
		h := h.in(t)
		h.attach(endpoint(local), ranges)
		defer h.detach()
		before := h.dataplane()
		resolve(t, h.Host(), hostDNS, lab.Backend, "172.21.0.79")
		resolve(t, h.Worker(), switchDNS, lab.Backend, "172.21.0.79")
		after := h.dataplane()
		if iface, note, healthy := after.endpoint(local); iface != "" || !healthy || !strings.Contains(note, "on this host") {
			t.Errorf("status: interface %q, note %q, healthy %v", iface, note, healthy)
		}
		if n := after.forwarded(before); n != 2 {
			t.Errorf("the forwarder saw %d queries, want both", n)
		}
	})
	t.Run("beside a dead pod", func(t *testing.T) {
		h := h.in(t)
		h.attach(endpoint(local, lab.CoreDNS0v4), ranges)
		defer h.detach()
		h.steers(hostDNS, lab.Backend4)
		if err := h.CoreDNS(0).Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the endpoint on this host answers", func() error {
			raw, err := ask(h.Host(), hostDNS, pack(t, 9, lab.Backend, dns.TypeA), silence)
			return errors.Join(err, isAddress(raw, "172.21.0.79"))
		})
	})
}

// TestEndpointRouteChanges: the way to an endpoint changes to another interface and back while queries run.
func TestEndpointRouteChanges(t *testing.T) {
	h := raise(t, lab.Options{})
	pod := h.CoreDNS(0).Node()
	h.cable(h.Host(), "vsecond", pod, "eth1")
	sh(t, h.Host(), "ip address add 10.99.0.1/32 dev vsecond")
	sh(t, pod, "ip route add 10.99.0.1/32 dev eth1")
	h.attach(endpoint(lab.CoreDNS0v4), ranges)
	at := func(iface string) {
		t.Helper()
		eventually(t, "the endpoint is at "+iface, func() error {
			if now, note, _ := h.dataplane().endpoint(lab.CoreDNS0v4 + ":53"); now != iface {
				return fmt.Errorf("it is at %q %s", now, note)
			}
			return nil
		})
	}
	at("cni0")
	pid := h.healthy().PID
	l := startLoad(t, h.Host(), hostDNS, lab.Backend, lab.Backend4, 2*time.Millisecond)
	l.more(t, 50)
	sh(t, h.Host(), "ip route add "+lab.CoreDNS0v4+"/32 dev vsecond")
	at("vsecond")
	l.more(t, 50)
	sh(t, h.Host(), "ip link set vcoredns0 down") // so that it is no accident
	l.more(t, 50)
	before := h.dataplane()
	l.more(t, 50)
	if n := h.dataplane().rose(before, "host", "replied"); n < 50 {
		t.Errorf("replied rose by %d with 50 answers", n)
	}
	sh(t, h.Host(), "ip link set vcoredns0 up; ip route del "+lab.CoreDNS0v4+"/32 dev vsecond")
	at("cni0")
	l.more(t, 50)
	sent, lost, failed := l.finish()
	t.Logf("%d of %d queries lost over two changes of the route", len(lost), sent)
	if failed > 0 {
		t.Errorf("%d wrong answers", failed)
	}
	if d := h.healthy(); d.PID != pid {
		t.Error("the daemon is another one")
	}
}

// TestRouteChangesAfterFlood: the kernel drops events of a listener that does not keep up. Such a one must look at
// everything again, and not go deaf.
func TestRouteChangesAfterFlood(t *testing.T) {
	h := raise(t, lab.Options{})
	pod := h.CoreDNS(0).Node()
	h.cable(h.Host(), "vsecond", pod, "eth1")
	sh(t, h.Host(), "ip address add 10.99.0.1/32 dev vsecond")
	sh(t, pod, "ip route add 10.99.0.1/32 dev eth1")
	h.attach(endpoint(lab.CoreDNS0v4), ranges)
	pid := h.healthy().PID
	h.signal("STOP", pid)
	sh(t, h.Host(), `seq 20000 | sed 's|.*|route add 198.18.0.0/24 dev vsecond metric &|' | ip -batch -
		ip route add `+lab.CoreDNS0v4+`/32 dev vsecond
		seq 300 | sed 's|.*|link set vsecond alias a&\naddress add 10.98.0.1/32 dev vsecond\naddress del 10.98.0.1/32 dev vsecond|' | ip -batch -`)
	h.signal("CONT", pid)
	at := func(iface string) {
		t.Helper()
		eventually(t, "the endpoint is at "+iface, func() error {
			if now, note, _ := h.dataplane().endpoint(lab.CoreDNS0v4 + ":53"); now != iface {
				return fmt.Errorf("it is at %q %s", now, note)
			}
			return nil
		})
	}
	at("vsecond")
	sh(t, h.Host(), "ip route del "+lab.CoreDNS0v4+"/32 dev vsecond")
	at("cni0")
	sh(t, h.Host(), "ip route add "+lab.CoreDNS0v4+"/32 dev vsecond")
	at("vsecond")
	h.steers(hostDNS, lab.Backend4)
}

// TestEvenChoice compares the queries that each of four endpoints got by Pearson's chi-square. With three degrees of
// freedom 30 is exceeded by chance in one run of a million.
func TestEvenChoice(t *testing.T) {
	h := raise(t, lab.Options{})
	var list []string
	var servers []*responder
	for i := range 4 {
		address := fmt.Sprintf("172.20.0.%d", 30+i)
		sh(t, h.Pod("app"), "ip address add "+address+"/16 dev eth0")
		servers = append(servers, respond(t, h.Pod("app"), address+":53", "172.21.0.80"))
		list = append(list, address)
	}
	h.attach(endpoint(list...), ranges)
	base := make([]int, len(servers))
	for i, s := range servers {
		base[i] = len(s.sees())
	}
	const n = 4000
	for range n {
		raw, err := ask(h.Host(), hostDNS, pack(t, 5, lab.Backend, dns.TypeA), patience)
		if err := errors.Join(err, isAddress(raw, "172.21.0.80")); err != nil {
			t.Fatal(err)
		}
	}
	counts, chi := make([]int, len(servers)), 0.0
	const expected = n / 4.0
	for i, s := range servers {
		counts[i] = len(s.sees()) - base[i]
		d := float64(counts[i]) - expected
		chi += d * d / expected
	}
	t.Logf("%v, chi-square %.1f", counts, chi)
	if chi > 30 {
		t.Errorf("%v is not even: chi-square %.1f", counts, chi)
	}
}

// TestEndpointsOfOneAddress are told apart by their ports, in health too.
func TestEndpointsOfOneAddress(t *testing.T) {
	h := raise(t, lab.Options{})
	one := respond(t, h.Pod("app"), lab.App4+":5353", "172.21.0.87")
	two := respond(t, h.Pod("app"), lab.App4+":5354", "172.21.0.87")
	h.attach(endpoint(lab.App4+":5353", lab.App4+":5354"), ranges)
	two.setMute(true)
	l := startLoad(t, h.Host(), hostDNS, lab.Backend, "172.21.0.87", 2*time.Millisecond)
	h.judged(lab.App4+":5354", false)
	if _, _, healthy := h.dataplane().endpoint(lab.App4 + ":5353"); !healthy {
		t.Error("the other port is taken for dead too")
	}
	l.more(t, 50)
	first, base := len(one.sees()), len(two.sees())
	l.more(t, 100)
	if n := len(two.sees()) - base; n > 0 {
		t.Errorf("the dead one has got %d queries", n)
	}
	if n := len(one.sees()) - first; n < 100 {
		t.Errorf("the living one has got %d queries", n)
	}
	two.setMute(false)
	h.judged(lab.App4+":5354", true)
	base = len(two.sees())
	l.more(t, 100)
	if n := len(two.sees()) - base; n < 10 {
		t.Errorf("back, and %d of 100 queries", n)
	}
	l.finish()
}

// TestEndpointLinkLocal: its zone is kept on the whole way, from the command line to health and the steered probes.
func TestEndpointLinkLocal(t *testing.T) {
	h := raise(t, lab.Options{})
	sh(t, h.Pod("app"), "ip address add fe80::53/64 dev eth0 nodad")
	// The same address on another link must not be meant.
	sh(t, h.Worker(), "ip address add fe80::53/64 dev eth0 nodad")
	r := respond(t, h.Pod("app"), "[fe80::53%eth0]:53", "172.21.0.84")
	wrong := respond(t, h.Worker(), "[fe80::53%eth0]:53", "172.21.0.85")
	const address = "[fe80::53%cni0]:53"
	if out := h.run("attach", "--dns-endpoint", "fe80::53"); out.code != 2 || !strings.Contains(out.stderr, "name the interface") {
		t.Errorf("without a zone: %v", out)
	}
	for _, own := range []string{"fe80::1", "fe80::1%kubeswitch"} {
		if out := h.run(attachArgs("--kubeswitch-address", own)...); out.code != 2 || !strings.Contains(out.stderr, "link-local") || strings.Count(out.stderr, "\n") != 1 {
			t.Errorf("own link-local address: %v", out)
		}
	}
	h.attach(endpoint("fe80::53%cni0"), ranges)
	h.steers(hostDNS6, "172.21.0.84")
	resolve(t, h.Host(), hostDNS, lab.Backend, "172.21.0.84") // by the forwarder
	if iface, note, healthy := h.dataplane().endpoint(address); iface != "cni0" || note != "" || !healthy {
		t.Errorf("status: interface %q, note %q, healthy %v", iface, note, healthy)
	}
	l := startLoad(t, h.Host(), hostDNS6, lab.Backend, "172.21.0.84", 2*time.Millisecond)
	l.more(t, 20)
	r.setMute(true)
	h.judged(address, false)
	l.finish()
	r.setMute(false)
	h.judged(address, true)
	h.steers(hostDNS6, "172.21.0.84")
	if n := len(wrong.sees()); n != 0 {
		t.Errorf("the one on the other link was asked %d times", n)
	}
}

// TestBusyLastEndpoint: one that answers clients and is too slow for probes is no dead one, if there is no other.
func TestBusyLastEndpoint(t *testing.T) {
	h := raise(t, lab.Options{})
	r := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.88")
	h.attach(endpoint(lab.App4), ranges)
	l := startLoad(t, h.Host(), hostDNS, lab.Backend, "172.21.0.88", 5*time.Millisecond)
	l.more(t, 20)
	r.setBusy(true)
	// Long enough for many probes: each is sent a fifth of a second after the one before.
	l.more(t, 600)
	if _, note, healthy := h.dataplane().endpoint(lab.App4 + ":53"); !healthy {
		t.Errorf("taken for dead: %s", note)
	}
	if _, lost, failed := l.finish(); len(lost) > 0 || failed > 0 {
		t.Errorf("%d lost, %d failed", len(lost), failed)
	}
	// Without clients there is nothing that speaks for it.
	h.judged(lab.App4+":53", false)
	r.setBusy(false)
	h.judged(lab.App4+":53", true)
}

// TestServersOfLateInterface: a server that is named by an interface which does not exist yet, as at boot, does not prevent an attach,
// and is asked once the interface is there, endpoint and upstream alike.
func TestServersOfLateInterface(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoint(lab.CoreDNS0v4), endpoint("fe80::53%vlate"), ranges, []string{"--upstream", "fe80::99%vlate", "--upstream", lab.External0})
	h.works()
	pod := h.Pod("app")
	h.cable(h.Host(), "vlate", pod, "elate")
	sh(t, pod, "ip address add fe80::53/64 dev elate nodad; ip address add fe80::99/64 dev elate nodad")
	external := respond(t, pod, "[fe80::99%elate]:53", "198.51.100.99")
	cluster := respond(t, pod, "[fe80::53%elate]:53", "172.21.0.84")
	for name, c := range map[string]struct {
		args   []string
		server *responder
	}{
		"the upstream": {[]string{"@127.0.0.1", "late.example"}, external},
		"the endpoint": {[]string{"@::1", lab.Backend}, cluster},
	} {
		eventually(t, name+" behind the new interface is asked", func() error {
			out := command(t, h.Host(), append([]string{"dig", "+short", "+tries=1", "+time=2"}, c.args...)...)
			if strings.TrimSpace(out.stdout) != c.server.address {
				return fmt.Errorf("%v", out)
			}
			return nil
		})
	}
	if len(external.sees()) == 0 || len(cluster.sees()) == 0 {
		t.Error("one of them has seen nothing")
	}
	h.detach()
}
