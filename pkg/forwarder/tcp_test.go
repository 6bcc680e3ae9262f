package forwarder

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/miekg/dns"
)

// TestPipelined sends two queries at once; the first is answered last.
func TestPipelined(t *testing.T) {
	secondAnswered := make(chan struct{})
	p := newPeer(t, func(q *peerQuery) {
		if q.msg().Question[0].Name == "first.example." {
			<-secondAnswered
		}
		answerTXT("x")(q)
	})
	s := start(t, external(p))
	c := dial(t, s, "tcp")
	first, second := query("first.example.", false), query("second.example.", false)
	if _, err := c.conn.Write(append(frame(pack(t, first)), frame(pack(t, second))...)); err != nil {
		t.Fatal(err)
	}
	if m := unpack(t, c.receive()); m.Id != second.Id {
		t.Fatalf("the first answer is\n%v", m)
	}
	close(secondAnswered)
	if m := unpack(t, c.receive()); m.Id != first.Id {
		t.Fatalf("the second answer is\n%v", m)
	}
}

// TestSplitPrefix writes a query octet by octet, then half-closes.
func TestSplitPrefix(t *testing.T) {
	s := start(t, external(newPeer(t, answerTXT("x"))))
	c := dial(t, s, "tcp")
	c.conn.(*net.TCPConn).SetNoDelay(true)
	m := query("www.example.org.", false)
	for _, b := range frame(pack(t, m)) {
		if _, err := c.conn.Write([]byte{b}); err != nil {
			t.Fatal(err)
		}
	}
	c.conn.(*net.TCPConn).CloseWrite()
	wantText(t, unpack(t, c.receive()), "x")
	c.wantClosed()
}

func TestManyPipelined(t *testing.T) {
	s := start(t, external(newPeer(t, answerTXT("x"))))
	c := dial(t, s, "tcp")
	const n = 3 * maxPipelined
	want := map[uint16]string{}
	var all []byte
	for i := range n {
		m := query(fmt.Sprintf("n%d.example.", i), false)
		m.Id = uint16(i)
		want[m.Id] = m.Question[0].Name
		all = append(all, frame(pack(t, m))...)
	}
	if _, err := c.conn.Write(all); err != nil {
		t.Fatal(err)
	}
	for range n {
		m := unpack(t, c.receive())
		if want[m.Id] != m.Question[0].Name {
			t.Fatalf("ID %d answers %q, want %q", m.Id, m.Question[0].Name, want[m.Id])
		}
		delete(want, m.Id)
	}
}

func TestLongTCPReply(t *testing.T) {
	s := start(t, external(newPeer(t, answerMany(2000))))
	m := dial(t, s, "tcp").askMsg(query("www.example.org.", true))
	if len(m.Answer) != 2000 || m.Truncated {
		t.Errorf("%d answers, TC %v", len(m.Answer), m.Truncated)
	}
}

// TestTCPElsewhere: a server that serves TCP at a port of its own is asked there, now and after a change of that port.
func TestTCPElsewhere(t *testing.T) {
	udp := newPeer(t, func(q *peerQuery) {
		r := new(dns.Msg).SetReply(q.msg())
		r.Truncated = true
		q.replyMsg(r)
	})
	one, other := newPeer(t, answerTXT("one")), newPeer(t, answerTXT("other"))
	routes := func(tcp *peer) Routes {
		return Routes{Zones: map[string][]netip.AddrPort{"corp.test": {udp.addr}}, TCP: map[netip.AddrPort]netip.AddrPort{udp.addr: tcp.addr}}
	}
	s := start(t, routes(one))
	wantText(t, dial(t, s, "tcp").askMsg(query("a.corp.test.", false)), "one")
	if err := s.SetRoutes(routes(other)); err != nil {
		t.Fatal(err)
	}
	wantText(t, dial(t, s, "tcp").askMsg(query("a.corp.test.", false)), "other")
	if udp.tcp.Load() != 0 {
		t.Error("TCP to the UDP port")
	}
}

func TestTCPUpstreamFails(t *testing.T) {
	first, second := newPeer(t, answerTXT("first")), newPeer(t, answerTXT("second"))
	first.ln.Close()
	s := start(t, external(first, second))
	wantText(t, dial(t, s, "tcp").askMsg(query("www.example.org.", false)), "second")
}

func TestConnsAreBounded(t *testing.T) {
	s := start(t, external(newPeer(t, answerTXT("x"))), func(o *Options) { o.MaxConns = 1 })
	c := dial(t, s, "tcp")
	wantText(t, c.askMsg(query("www.example.org.", false)), "x")
	dial(t, s, "tcp").wantClosed()
	wantText(t, c.askMsg(query("www.example.org.", false)), "x")
	c.conn.Close()
	eventually(t, "the connection is gone", func() bool { return s.Stats().Conns == 0 })
	wantText(t, dial(t, s, "tcp").askMsg(query("www.example.org.", false)), "x")
	if n := s.Stats().ConnsRefused; n != 1 {
		t.Errorf("%d connections refused", n)
	}
}

func TestOverload(t *testing.T) {
	for _, network := range []string{"udp", "tcp"} {
		t.Run(network, func(t *testing.T) {
			asked, release := make(chan struct{}), make(chan struct{})
			p := newPeer(t, func(q *peerQuery) { asked <- struct{}{}; <-release; answerTXT("x")(q) })
			s := start(t, external(p), func(o *Options) { o.MaxInFlight = 1 })
			c := dial(t, s, network)
			first := query("first.example.", true)
			c.send(pack(t, first))
			<-asked
			m := c.askMsg(query("second.example.", true))
			wantRcode(t, m, dns.RcodeRefused)
			if e := ede(t, m); e.ExtraText != "k2s-dnsbpf: too many queries in flight" {
				t.Errorf("EDE %v", e)
			}
			wantRcode(t, c.askMsg(query("x.cluster.local.", false)), dns.RcodeRefused)
			close(release)
			if m := unpack(t, c.receive()); m.Id != first.Id {
				t.Errorf("the first query's answer is\n%v", m)
			}
			if st := s.Stats(); st.Refused != 2 || st.Failures != 0 {
				t.Errorf("stats %+v", st)
			}
		})
	}
}
