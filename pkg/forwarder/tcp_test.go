package forwarder

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
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

// neighbour has 127.0.0.1 count as this host, and the rest of 127.0.0.0/8 as others.
func neighbour(s *Server) {
	only := func(a netip.Addr) bool { return a == netip.MustParseAddr("127.0.0.1") }
	s.inFlight.local, s.connPlaces.local, s.octets.local = only, only, only
}

// TestIdleConnsMakeRoom: one neighbour's idle connections close none but its own.
func TestIdleConnsMakeRoom(t *testing.T) {
	const limit = 8
	s := startTuned(t, external(newPeer(t, answerTXT("x"))), neighbour, func(o *Options) { o.MaxConns = limit })
	host := dial(t, s, "tcp")
	wantText(t, host.askMsg(query("www.example.org.", false)), "x")
	other := dialFrom(t, s, "tcp", "127.0.0.3")
	wantText(t, other.askMsg(query("www.example.org.", false)), "x")
	flood := make([]*client, 3*limit)
	for i := range flood {
		flood[i] = dialFrom(t, s, "tcp", "127.0.0.2")
		wantText(t, flood[i].askMsg(query("www.example.org.", false)), "x")
		if i == 0 {
			continue
		}
		// The first one stays in use, so it is not the one that was idle longest.
		wantText(t, flood[0].askMsg(query("www.example.org.", false)), "x")
	}
	flood[1].wantClosed()
	wantText(t, host.askMsg(query("www.example.org.", false)), "x")
	wantText(t, other.askMsg(query("www.example.org.", false)), "x")
	for range limit / hostShare {
		wantText(t, dial(t, s, "tcp").askMsg(query("www.example.org.", false)), "x")
	}
	wantText(t, other.askMsg(query("www.example.org.", false)), "x")
	if st := s.Stats(); st.ConnsClosed == 0 || st.Conns > limit {
		t.Errorf("%d connections open, %d closed", st.Conns, st.ConnsClosed)
	}
}

// TestFloodOfQueriesMakesRoom: what a neighbour asks of a silent server crowds out none but its own.
func TestFloodOfQueriesMakesRoom(t *testing.T) {
	needsLoopback(t)
	var asked atomic.Int64
	release, end := make(chan struct{}), make(chan struct{})
	defer close(end)
	p := newPeer(t, func(q *peerQuery) {
		asked.Add(1)
		if strings.HasPrefix(q.msg().Question[0].Name, "flood") {
			<-end
		} else {
			<-release
		}
		answerTXT("x")(q)
	})
	const limit = 16
	s := startTuned(t, external(p), neighbour, func(o *Options) { o.MaxInFlight = limit })
	host, other := dial(t, s, "udp"), dialFrom(t, s, "udp", "127.0.0.3")
	host.send(pack(t, query("host.example.", false)))
	other.send(pack(t, query("other.example.", false)))
	eventually(t, "both are asked for", func() bool { return asked.Load() == 2 })
	flood := dialFrom(t, s, "udp", "127.0.0.2")
	const n = 4 * limit
	for i := range n {
		flood.send(pack(t, query(fmt.Sprintf("flood%d.example.", i), true)))
	}
	refused := unpack(t, flood.receive())
	wantRcode(t, refused, dns.RcodeRefused)
	if e := ede(t, refused); e.ExtraText != "k2s-dnsbpf: too many queries in flight" {
		t.Errorf("EDE %v", e)
	}
	eventually(t, "the flood is within its part", func() bool { return s.Stats().Refused == n-(limit-limit/hostShare-1) })
	close(release)
	wantText(t, unpack(t, host.receive()), "x")
	wantText(t, unpack(t, other.receive()), "x")
}

// TestEvictedLeavesOthers: who shares a question with one that had to make room gets the answer.
func TestEvictedLeavesOthers(t *testing.T) {
	needsLoopback(t)
	hold, asked := make(chan struct{}), make(chan struct{}, 8)
	p := newPeer(t, func(q *peerQuery) { asked <- struct{}{}; <-hold; answerTXT("x")(q) })
	s := startTuned(t, external(p), neighbour)
	greedy, host := dialFrom(t, s, "udp", "127.0.0.2"), dial(t, s, "udp")
	m := query("www.example.org.", false)
	greedy.send(pack(t, m))
	<-asked
	host.send(pack(t, m))
	eventually(t, "both wait", func() bool { return s.Stats().Coalesced == 1 })
	s.inFlight.mu.Lock()
	place := s.inFlight.ranking[0].held.Front().Value.(*place)
	s.inFlight.remove(place)
	s.inFlight.mu.Unlock()
	place.evict()
	wantRcode(t, unpack(t, greedy.receive()), dns.RcodeRefused)
	close(hold)
	wantText(t, unpack(t, host.receive()), "x")
	if p.udp.Load() != 1 {
		t.Errorf("asked %d times", p.udp.Load())
	}
}

// TestLongMessages: a query that is too long is refused, however many come; one with a signature is not.
func TestLongMessages(t *testing.T) {
	s := start(t, external(newPeer(t, answerTXT("x"))))
	long := query("www.example.org.", true)
	long.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_PADDING{Padding: make([]byte, 60000)}}
	for _, network := range []string{"tcp", "udp"} {
		r := dial(t, s, network).askMsg(long)
		wantRcode(t, r, dns.RcodeRefused)
		if network == "tcp" {
			if e := ede(t, r); !strings.Contains(e.ExtraText, "too long") {
				t.Errorf("EDE %v", e)
			}
		}
	}
	signed := long.Copy()
	signed.SetTsig("key.", dns.HmacSHA256, 300, 0)
	raw, _, err := dns.TsigGenerate(signed, "c2VjcmV0", "", false)
	if err != nil {
		t.Fatal(err)
	}
	if r := unpack(t, dial(t, s, "tcp").ask(raw)); text(r) != "x" {
		t.Errorf("signed: %v", r)
	}
	eventually(t, "their octets are given back", func() bool { return s.octets.inUse() == 0 })
}

// TestLongMessagesAreCounted: more than fit at a time make the greediest give up.
func TestLongMessagesAreCounted(t *testing.T) {
	s := startTuned(t, external(newPeer(t, answerTXT("x"))), neighbour)
	const each = maxMessage
	var held []*client
	for range 2 * maxOctets / each {
		c := dialFrom(t, s, "tcp", "127.0.0.2")
		c.conn.Write([]byte{each >> 8, each & 0xff, 0}) // the rest never comes
		held = append(held, c)
	}
	held[0].wantClosed()
	if n := s.octets.inUse(); n > s.octets.others {
		t.Errorf("%d octets in use, at most %d", n, s.octets.others)
	}
	wantText(t, dial(t, s, "tcp").askMsg(query("www.example.org.", false)), "x")
}

func TestSocketsAreBounded(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	p := newPeer(t, held(release))
	const limit = 64
	s := startTuned(t, external(p, newPeer(t, silent), newPeer(t, silent)), hasty, func(o *Options) { o.MaxSockets = limit })
	c := dial(t, s, "udp")
	for i := range 4 * limit {
		c.send(pack(t, query(fmt.Sprintf("n%d.example.", i), false)))
	}
	eventually(t, "as many are refused as don't fit", func() bool { return s.Stats().Refused == 4*limit-limit/2 })
	eventually(t, "the others have a socket each, and what is left besides", func() bool { return s.sockets.Load() >= limit/2 })
	eventually(t, "those refused have none", func() bool { return s.sockets.Load() <= limit-limit/8 })
	if n := s.Stats().Failures; n > 0 {
		t.Errorf("%d queries failed for want of sockets", n)
	}
	for _, u := range s.Stats().Upstreams {
		if !u.Healthy {
			t.Errorf("%v is put aside for want of sockets", u.Addr)
		}
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
			second := query("second.example.", true)
			c.send(pack(t, second))
			m := unpack(t, c.receive())
			wantRcode(t, m, dns.RcodeRefused)
			if e := ede(t, m); m.Id != first.Id || e.ExtraText != "k2s-dnsbpf: too many queries in flight" {
				t.Errorf("the oldest is to be refused, and told why:\n%v", m)
			}
			<-asked
			close(release)
			if m := unpack(t, c.receive()); m.Id != second.Id {
				t.Errorf("the second query's answer is\n%v", m)
			}
			if st := s.Stats(); st.Refused != 1 || st.Failures != 0 {
				t.Errorf("stats %+v", st)
			}
		})
	}
}
