package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const (
	rightAnswer = "172.21.0.77"
	wrongAnswer = "198.51.100.66"
)

// liar stands in for CoreDNS 0. It sends whatever the test tells it to before and after the right answer.
type liar struct {
	conn  *net.UDPConn // 172.20.0.10:53
	other *net.UDPConn // the same address, another port
	app   *net.UDPConn // port 53 of another pod

	mu     sync.Mutex
	before func(l *liar, query *dns.Msg, asker netip.AddrPort)
	after  func(l *liar, query *dns.Msg, asker netip.AddrPort)
	hold   chan struct{} // the right answer waits for it, if not nil
	last   netip.AddrPort
}

func newLiar(t *testing.T, h *host) *liar {
	t.Helper()
	if err := h.CoreDNS(0).Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := &liar{}
	for _, socket := range []struct {
		conn    **net.UDPConn
		node    *lab.Node
		address string
	}{
		{&l.conn, h.Pod("coredns-0"), lab.CoreDNS0v4 + ":53"}, {&l.other, h.Pod("coredns-0"), lab.CoreDNS0v4 + ":54"},
		{&l.app, h.Pod("app"), lab.App4 + ":53"},
	} {
		conn, err := listenUDP(socket.node, socket.address)
		if err != nil {
			t.Fatal(err)
		}
		*socket.conn = conn
		t.Cleanup(func() { conn.Close() })
	}
	go l.serve()
	return l
}

func (l *liar) serve() {
	buf := make([]byte, 4096)
	for {
		n, asker, err := l.conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		query := new(dns.Msg)
		if query.Unpack(buf[:n]) != nil {
			continue
		}
		l.mu.Lock()
		before, after, hold := l.before, l.after, l.hold
		l.last = asker
		l.mu.Unlock()
		go func() {
			if before != nil && query.Question[0].Qtype == dns.TypeA {
				before(l, query, asker)
			}
			if hold != nil {
				<-hold
			}
			l.send(l.conn, answer(query, rightAnswer), asker)
			if after != nil && query.Question[0].Qtype == dns.TypeA {
				after(l, query, asker)
			}
		}()
	}
}

func (l *liar) tell(before, after func(*liar, *dns.Msg, netip.AddrPort), hold chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.before, l.after, l.hold = before, after, hold
}

func (l *liar) send(from *net.UDPConn, m *dns.Msg, asker netip.AddrPort) {
	if b, err := m.Pack(); err == nil {
		_, _ = from.WriteToUDPAddrPort(b, asker)
	}
}

// answer is a well-formed answer with one address; to the self-test's question for the SOA, one with that.
func answer(query *dns.Msg, address string) *dns.Msg {
	m := new(dns.Msg).SetReply(query)
	m.Authoritative = true
	header := dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}
	switch query.Question[0].Qtype {
	case dns.TypeA:
		m.Answer = []dns.RR{&dns.A{Hdr: header, A: net.ParseIP(address)}}
	case dns.TypeSOA:
		header.Rrtype = dns.TypeSOA
		m.Answer = []dns.RR{&dns.SOA{Hdr: header, Ns: "ns.", Mbox: "h.", Serial: 1, Refresh: 1, Retry: 1, Expire: 1, Minttl: 5}}
	}
	return m
}

// lies are the replies that must not reach an asker as an answer.
var lies = []struct {
	name string
	tell func(l *liar, query *dns.Msg, asker netip.AddrPort)
	// reason counts it in the kernel, "" where the packet is none of ours.
	reason string
}{
	{"wrong ID", func(l *liar, q *dns.Msg, asker netip.AddrPort) {
		m := answer(q, wrongAnswer)
		m.Id++
		l.send(l.conn, m, asker)
	}, ""},
	{"every bit of the ID wrong", func(l *liar, q *dns.Msg, asker netip.AddrPort) {
		for bit := range 16 {
			m := answer(q, wrongAnswer)
			m.Id ^= 1 << bit
			l.send(l.conn, m, asker)
		}
	}, ""},
	{"wrong name", func(l *liar, q *dns.Msg, asker netip.AddrPort) {
		m := answer(q, wrongAnswer)
		m.Question[0].Name = "x" + m.Question[0].Name[1:]
		l.send(l.conn, m, asker)
	}, "reply_question"},
	{"longer name", func(l *liar, q *dns.Msg, asker netip.AddrPort) {
		m := answer(q, wrongAnswer)
		m.Question[0].Name = "x." + m.Question[0].Name
		l.send(l.conn, m, asker)
	}, "reply_question"},
	{"wrong type", func(l *liar, q *dns.Msg, asker netip.AddrPort) {
		m := answer(q, wrongAnswer)
		m.Question[0].Qtype = dns.TypeAAAA
		l.send(l.conn, m, asker)
	}, "reply_question"},
	{"wrong class", func(l *liar, q *dns.Msg, asker netip.AddrPort) {
		m := answer(q, wrongAnswer)
		m.Question[0].Qclass = dns.ClassCHAOS
		l.send(l.conn, m, asker)
	}, "reply_malformed"},
	{"a query in place of a reply", func(l *liar, q *dns.Msg, asker netip.AddrPort) {
		m := answer(q, wrongAnswer)
		m.Response = false
		l.send(l.conn, m, asker)
	}, "reply_malformed"},
	{"cut short", func(l *liar, _ *dns.Msg, asker netip.AddrPort) {
		_, _ = l.conn.WriteToUDPAddrPort([]byte("short"), asker)
	}, ""},
	{"wrong port", func(l *liar, q *dns.Msg, asker netip.AddrPort) { l.send(l.other, answer(q, wrongAnswer), asker) }, ""},
	{"wrong address", func(l *liar, q *dns.Msg, asker netip.AddrPort) { l.send(l.app, answer(q, wrongAnswer), asker) }, ""},
	{"to nobody", func(l *liar, q *dns.Msg, asker netip.AddrPort) {
		for _, port := range []uint16{1, 53, asker.Port() + 1, asker.Port() - 1, 40000} {
			l.send(l.conn, answer(q, wrongAnswer), netip.AddrPortFrom(asker.Addr(), port))
		}
	}, ""},
}

// TestForgedReplies: whatever an endpoint or its neighbour sends, an asker gets the answer to what it asked, once, and
// from the address that it asked.
func TestForgedReplies(t *testing.T) {
	h := raise(t, lab.Options{})
	l := newLiar(t, h)
	h.attach([]string{"--dns-endpoint", lab.CoreDNS0v4})
	for _, from := range []struct {
		node   *lab.Node
		server netip.AddrPort
		scope  string
	}{{h.Host(), hostDNS, "host"}, {h.Worker(), switchDNS, "kubeswitch"}} {
		// A second answer, also a right one, is none that was asked for.
		list := append(slices.Clone(lies), struct {
			name   string
			tell   func(l *liar, query *dns.Msg, asker netip.AddrPort)
			reason string
		}{"again", func(l *liar, q *dns.Msg, asker netip.AddrPort) {}, ""})
		for _, lie := range list {
			t.Run(from.node.Name()+" "+lie.name, func(t *testing.T) {
				h := h.in(t)
				again := func(l *liar, q *dns.Msg, asker netip.AddrPort) {
					lie.tell(l, q, asker)
					l.send(l.conn, answer(q, wrongAnswer), asker) // the flow is over with the right answer
				}
				l.tell(lie.tell, again, nil)
				before := h.healthy()
				h.onlyRight(from.node, from.server)
				after := h.healthy()
				moved := func(reason string) uint64 {
					return after.Reasons[from.scope][reason] - before.Reasons[from.scope][reason]
				}
				// Each of two queries, see onlyRight.
				if moved("replied") != 2 || moved("steered") != 2 {
					t.Errorf("steered %d and replied %d, want 2", moved("steered"), moved("replied"))
				}
				if lie.reason != "" && moved(lie.reason) == 0 {
					t.Errorf("%s did not rise: %v", lie.reason, after.Reasons)
				}
			})
		}

	}

	t.Run("late", func(t *testing.T) {
		h := h.in(t)
		hold := make(chan struct{})
		l.tell(nil, nil, hold)
		before := h.healthy()
		conns := make(map[netip.AddrPort]*net.UDPConn)
		for node, server := range map[*lab.Node]netip.AddrPort{h.Host(): hostDNS, h.Worker(): switchDNS} {
			conn, err := listenUDP(node, "0.0.0.0:0")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conns[server] = conn
			if _, err := conn.WriteToUDPAddrPort(pack(t, 1, "late.cluster.local.", dns.TypeA), server); err != nil {
				t.Fatal(err)
			}
		}
		// Nothing tells when a flow is too old for its reply: five seconds after its query.
		time.Sleep(5500 * time.Millisecond)
		close(hold)
		l.tell(nil, nil, nil)
		for server, conn := range conns {
			if _, err := conn.WriteToUDPAddrPort(pack(t, 2, "now.cluster.local.", dns.TypeA), server); err != nil {
				t.Fatal(err)
			}
			got, err := receive(conn, server, patience)
			if err != nil || got.Id != 2 {
				t.Errorf("%s: want the answer to the second query first: %v %v", server, got, err)
			}
			if got, err := receive(conn, server, silence); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: a late reply was delivered: %v %v", server, got, err)
			}
		}
		after := h.healthy()
		for _, scope := range []string{"host", "kubeswitch"} {
			if n := after.Reasons[scope]["reply_late"] - before.Reasons[scope]["reply_late"]; n != 1 {
				t.Errorf("%s reply_late rose by %d, want 1: %v", scope, n, after.Reasons)
			}
		}
	})

	t.Run("slow", func(t *testing.T) {
		// But one that only takes its time is delivered, also when others overtake it.
		hold := make(chan struct{})
		l.tell(nil, nil, hold)
		conn, err := listenUDP(h.Host(), "0.0.0.0:0")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		send := func(id uint16) {
			t.Helper()
			if _, err := conn.WriteToUDPAddrPort(pack(t, id, fmt.Sprintf("n%d.cluster.local.", id), dns.TypeA), hostDNS); err != nil {
				t.Fatal(err)
			}
		}
		send(1)
		l.awaitQuery(t)
		l.tell(nil, nil, nil)
		for id := uint16(2); id < 10; id++ {
			send(id)
			if got, err := receive(conn, hostDNS, patience); err != nil || got.Id != id {
				t.Fatalf("query %d: %v %v", id, got, err)
			}
		}
		close(hold)
		if got, err := receive(conn, hostDNS, patience); err != nil || got.Id != 1 {
			t.Errorf("the slow one: %v %v", got, err)
		}
	})
}

// awaitQuery waits until the liar has got one since it started.
func (l *liar) awaitQuery(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	from := l.last
	l.mu.Unlock()
	_ = from
	eventually(t, "the query has arrived", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.last == from {
			return errors.New("none yet")
		}
		return nil
	})
}

// receive reads one reply, which must come from the server.
func receive(conn *net.UDPConn, server netip.AddrPort, wait time.Duration) (*dns.Msg, error) {
	if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return nil, err
	}
	buf := make([]byte, 4096)
	n, source, err := conn.ReadFromUDPAddrPort(buf)
	if err != nil {
		return nil, err
	}
	if source = netip.AddrPortFrom(source.Addr().Unmap(), source.Port()); source != server {
		return nil, fmt.Errorf("a datagram from %s, and %s was asked", source, server)
	}
	m := new(dns.Msg)
	return m, m.Unpack(buf[:n])
}

// onlyRight asks twice from one socket and wants exactly two right answers on it. The second query comes after all lies
// that the first has caused have passed the same way; after it nothing may come any more.
func (h *host) onlyRight(from *lab.Node, server netip.AddrPort) {
	h.t.Helper()
	conn, err := listenUDP(from, "0.0.0.0:0")
	if err != nil {
		h.t.Fatal(err)
	}
	defer conn.Close()
	for id := uint16(0x1234); id < 0x1236; id++ {
		name := fmt.Sprintf("n%d.default.svc.cluster.local.", id)
		if _, err := conn.WriteToUDPAddrPort(pack(h.t, id, name, dns.TypeA), server); err != nil {
			h.t.Fatal(err)
		}
		m, err := receive(conn, server, patience)
		if err != nil {
			h.t.Fatalf("no answer: %v", err)
		}
		if m.Id != id || len(m.Answer) != 1 || m.Question[0].Name != name || m.Answer[0].(*dns.A).A.String() != rightAnswer {
			h.t.Errorf("the asker got %v", m)
		}
	}
	if m, err := receive(conn, server, silence/2); !errors.Is(err, os.ErrDeadlineExceeded) {
		h.t.Errorf("the asker got one more: %v %v", m, err)
	}
}
