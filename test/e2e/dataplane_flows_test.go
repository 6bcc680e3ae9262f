package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// flowSlots is how many steered queries can wait for their reply at once.
const flowSlots = 16384

// TestNATPorts looks at the source ports of steered queries as the endpoint sees them.
func TestNATPorts(t *testing.T) {
	t.Parallel()
	for _, ephemeral := range [][2]uint16{{32768, 60999}, {10000, 40000}} {
		t.Run(fmt.Sprint(ephemeral), func(t *testing.T) {
			h := raise(t, lab.Options{HostSysctls: map[string]string{
				"net.ipv4.ip_local_port_range": fmt.Sprintf("%d %d", ephemeral[0], ephemeral[1]),
			}})
			r := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.82")
			h.attach(endpoint(lab.App4), ranges)
			base := len(r.sees())
			const n = 2000
			for range n {
				raw, err := ask(h.Host(), hostDNS, pack(t, 5, lab.Backend, dns.TypeA), patience)
				if err := errors.Join(err, isAddress(raw, "172.21.0.82")); err != nil {
					t.Fatal(err)
				}
			}
			ports := make(map[uint16]int)
			lowest, highest, near, last := uint16(65535), uint16(0), 0, 0
			for _, s := range r.sees()[base:] {
				port := s.from.Port()
				ports[port]++
				lowest, highest = min(lowest, port), max(highest, port)
				if port >= ephemeral[0] && port <= ephemeral[1] {
					t.Fatalf("port %d is one that the host gives to its own sockets", port)
				}
				if d := int(port) - last; d > -64 && d < 64 {
					near++
				}
				last = int(port)
			}
			width := int(highest) - int(lowest) + 1
			t.Logf("%d queries from %d ports in [%d, %d], %d within 64 of the one before", n, len(ports), lowest, highest, near)
			// 2000 draws out of 16384 meet 1881 ports on average; a fresh draw is within 64 of the last one in 0.8 %.
			if width < flowSlots*9/10 || len(ports) < 1800 || near > n/20 {
				t.Errorf("the ports are not drawn at random from all slots")
			}
			// Sixteen bins: chi-square with 15 degrees of freedom exceeds 55 in one run of a million.
			bins := make([]float64, 16)
			for port, count := range ports {
				bins[int(port-lowest)*16/width] += float64(count)
			}
			chi := 0.0
			for _, b := range bins {
				chi += (b - n/16.0) * (b - n/16.0) / (n / 16.0)
			}
			if chi > 55 {
				t.Errorf("the ports are not even: chi-square %.1f over %v", chi, bins)
			}
		})
	}
}

// TestSamePortAndID: a client that has several questions under one ID from one port gets the right answer to each.
func TestSamePortAndID(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	want := map[string]string{lab.Backend: lab.Backend4, lab.Kubernetes: lab.Kubernetes4, lab.KubeDNS: lab.KubeDNS4}
	for _, from := range []struct {
		node   *lab.Node
		server netip.AddrPort
	}{{h.Host(), hostDNS}, {h.Worker(), switchDNS}} {
		conn, err := listenUDP(from.node, "0.0.0.0:0")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for range 200 {
			for name := range want {
				if _, err := conn.WriteToUDPAddrPort(pack(t, 77, name, dns.TypeA), from.server); err != nil {
					t.Fatal(err)
				}
			}
			got := make(map[string]string)
			for range want {
				m, err := receive(conn, from.server, patience)
				if err != nil {
					t.Fatalf("%s: %v, with %v", from.node.Name(), err, got)
				}
				if len(m.Answer) == 1 {
					got[m.Question[0].Name] = m.Answer[0].(*dns.A).A.String()
				}
			}
			for name, address := range want {
				if got[name] != address {
					t.Fatalf("%s: %s is %q, want %s", from.node.Name(), name, got[name], address)
				}
			}
		}
	}
}

// TestReuseAfterSilence: the answer to an old question, that comes when the client has asked a new one from the same
// port under the same ID, is told from the new one's.
func TestReuseAfterSilence(t *testing.T) {
	h := raise(t, lab.Options{})
	r := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.83")
	h.attach(endpoint(lab.App4), ranges)
	conn, err := listenUDP(h.Host(), "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r.setHold(true)
	base := len(r.sees())
	for _, name := range []string{"old.cluster.local.", "new.cluster.local."} {
		if _, err := conn.WriteToUDPAddrPort(pack(t, 7, name, dns.TypeA), hostDNS); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "both are in flight", func() error {
		if n := len(r.sees()) - base; n != 2 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	r.setHold(false)
	got := make(map[string]bool)
	for range 2 {
		m, err := receive(conn, hostDNS, patience)
		if err != nil || len(m.Answer) != 1 || m.Answer[0].Header().Name != m.Question[0].Name {
			t.Fatalf("%v %v", m, err)
		}
		got[m.Question[0].Name] = true
	}
	if len(got) != 2 {
		t.Errorf("two answers to one question: %v", got)
	}
}

// inFlight counts the slots of dns_flows that are taken, as an operator would.
func (h *host) inFlight() int {
	h.t.Helper()
	dump := must(h.t, h.Host(), "bpftool", "map", "dump", "pinned", "/sys/fs/bpf/k2s-dnsbpf/maps/dns_flows")
	return strings.Count(dump, `"started_ns":`) - strings.Count(dump, `"started_ns": 0,`)
}

// TestInFlight fills every slot with a query that waits, shows that further ones are passed to user space, and that all
// is as before when the endpoint goes on.
func TestInFlight(t *testing.T) {
	h := raiseAlone(t, lab.Options{})
	r := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.84")
	h.attach(endpoint(lab.App4), ranges)
	conn, err := bigSocket(h.Host(), "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answers := make(chan uint16, 1<<17)
	go func() {
		defer close(answers)
		buf := make([]byte, 4096)
		for {
			n, err := conn.Read(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && isAddress(buf[:n], "172.21.0.84") == nil {
				answers <- uint16(buf[0])<<8 | uint16(buf[1])
			}
		}
	}()
	before := h.dataplane()
	r.setHold(true)
	payload := pack(t, 0, lab.Backend, dns.TypeA)
	begin := time.Now()
	send := func(n int) {
		for id := range n {
			payload[0], payload[1] = byte(id>>8), byte(id)
			if _, err := conn.WriteToUDPAddrPort(payload, hostDNS); err != nil {
				t.Fatal(err)
			}
		}
	}
	// Fewer than half: not one may have been passed.
	send(flowSlots / 4)
	half := h.dataplane()
	if n := half.rose(before, "host", "passed_no_flow_slot"); n != 0 {
		t.Errorf("%d of %d queries found no slot", n, flowSlots/4)
	}
	// Eight draws a query: the last free slots need many.
	const all = 60_000
	send(all)
	filled := time.Since(begin)
	full := h.inFlight()
	counted := time.Since(begin)
	now := h.dataplane()
	steered, passed := now.rose(before, "host", "steered"), now.rose(before, "host", "passed_no_flow_slot")
	t.Logf("filled in %s, counted after %s: %d slots taken, %d steered, %d passed for want of one",
		filled.Round(time.Millisecond), counted.Round(time.Millisecond), full, steered, passed)
	// The daemon may have tried the kernel's path itself.
	if more := steered + passed - (flowSlots/4 + all); more < 0 || more > 10 {
		t.Errorf("steered %d and passed %d of %d queries", steered, passed, flowSlots/4+all)
	}
	if counted > 4*time.Second {
		t.Skipf("this machine took %s to send and count, and a query waits for 5 s only", counted)
	}
	if steered < flowSlots*99/100 || steered > flowSlots || passed == 0 || full < flowSlots*99/100 {
		t.Errorf("%d slots are taken and %d queries are steered with none answered, want %d at most and nearly all of them", full, steered, flowSlots)
	}
	// The endpoint's view: as many ports as queries in flight.
	ports := make(map[uint16]bool)
	for _, s := range r.sees() {
		if s.from.Port() < 32768 {
			ports[s.from.Port()] = true
		}
	}
	if len(ports) != steered {
		t.Errorf("the endpoint has seen %d NAT ports for %d queries in flight", len(ports), steered)
	}
	eventually(t, "the forwarder has seen some of the passed queries", func() error {
		if h.dataplane().forwarded(before) == 0 {
			return errors.New("none")
		}
		return nil
	})

	r.setHold(false)
	eventually(t, "no query is in flight", func() error {
		d := h.dataplane()
		ended := 0
		for _, reason := range []string{"replied", "reply_late"} {
			ended += d.rose(before, "host", reason)
		}
		if ended < steered {
			return fmt.Errorf("%d of %d have ended", ended, steered)
		}
		return nil
	})
	late := h.dataplane().rose(before, "host", "reply_late")
	for range steered - late {
		select {
		case <-answers:
		case <-time.After(patience):
			t.Fatal("an answer has not come")
		}
	}
	t.Logf("%d answers after release, %d of them too late", steered, late)
	eventually(t, "the slots are free", func() error {
		if n := h.inFlight(); n > 0 {
			return fmt.Errorf("%d are taken", n)
		}
		return nil
	})
	eventually(t, "the endpoint, which so much was lost to, is steered to", func() error {
		before = h.dataplane()
		resolve(t, h.Host(), hostDNS, lab.Backend, "172.21.0.84")
		if h.dataplane().rose(before, "host", "replied") != 1 {
			return errors.New("it is not")
		}
		return nil
	})
	before = h.dataplane()
	for range 100 {
		resolve(t, h.Host(), hostDNS, lab.Backend, "172.21.0.84")
	}
	if n := h.dataplane().rose(before, "host", "replied"); n != 100 {
		t.Errorf("replied rose by %d", n)
	}
}

// TestFlowsExpire: the slots of queries that never got a reply are free again by themselves.
func TestFlowsExpire(t *testing.T) {
	h := raise(t, lab.Options{})
	r := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.85")
	h.attach(endpoint(lab.App4), ranges)
	h.kill() // a daemon would put an endpoint aside that so much is lost to
	conn, err := bigSocket(h.Host(), "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r.setHold(true)
	payload := pack(t, 0, lab.Backend, dns.TypeA)
	for id := range 60_000 {
		payload[0], payload[1] = byte(id>>8), byte(id)
		if _, err := conn.WriteToUDPAddrPort(payload, hostDNS); err != nil {
			t.Fatal(err)
		}
	}
	r.mu.Lock()
	r.held, r.hold = nil, false // they are lost
	r.mu.Unlock()
	eventually(t, "queries are steered again", func() error {
		before := h.dataplane()
		for range 20 {
			raw, err := ask(h.Host(), hostDNS, pack(t, 5, lab.Backend, dns.TypeA), noReply)
			if err := errors.Join(err, isAddress(raw, "172.21.0.85")); err != nil {
				return err
			}
		}
		if n := h.dataplane().rose(before, "host", "replied"); n != 20 {
			return fmt.Errorf("%d of 20", n)
		}
		return nil
	})
}

// TestFlood: one worker's queries that nobody answers take no slots from this host, and leave some to another worker.
func TestFlood(t *testing.T) {
	h := raiseAlone(t, lab.Options{})
	r := respond(t, h.Pod("app"), lab.App4+":53", "172.21.0.86")
	h.attach(endpoint(lab.App4), ranges, pods("cni0"))
	h.kill() // a daemon would put an endpoint aside that so much is lost to
	conn, err := bigSocket(h.Worker(), "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	before := h.dataplane()
	r.setHold(true)
	payload := pack(t, 0, lab.Backend, dns.TypeA)
	begin := time.Now()
	for id := range 3 * flowSlots {
		payload[0], payload[1] = byte(id>>8), byte(id)
		if _, err := conn.WriteToUDPAddrPort(payload, switchDNS); err != nil {
			t.Fatal(err)
		}
	}
	taken := h.inFlight()
	if took := time.Since(begin); took > 4*time.Second {
		t.Skipf("this machine took %s to send, and a query waits for 5 s only", took)
	}
	if taken > flowSlots/4 {
		t.Errorf("one worker has %d of %d slots", taken, flowSlots)
	}
	r.mu.Lock()
	r.held, r.hold = nil, false // they are lost
	r.mu.Unlock()
	const asked = 50
	for range asked {
		resolve(t, h.Host(), hostDNS, lab.Backend, "172.21.0.86")
	}
	after := h.dataplane()
	if n := after.rose(before, "host", "replied"); n != asked {
		t.Errorf("%d of %d of this host's queries went by the kernel's path", n, asked)
	}
	if after.rose(before, "kubeswitch", "passed_no_flow_slot") == 0 {
		t.Error("the flood found a slot for each query: this shows nothing")
	}
}
