package forwarder

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/errno"
)

func TestNewErrors(t *testing.T) {
	one := netip.MustParseAddrPort("127.0.0.1:53")
	for _, tt := range []struct {
		name string
		opts Options
		want string
	}{
		{"zero", Options{Listen: []netip.AddrPort{{}}}, "invalid listen address"},
		{"unspecified", Options{Listen: []netip.AddrPort{netip.MustParseAddrPort("[::]:53")}}, "name each address"},
		{"twice", Options{Listen: []netip.AddrPort{one, netip.MustParseAddrPort("[::ffff:127.0.0.1]:53")}}, "given twice"},
		{"negative", Options{Listen: []netip.AddrPort{one}, MaxInFlight: -1}, "negative"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.opts); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// TestListenInUse: the second address is taken for one protocol. Nothing stays
// bound, and the same server can listen once the port is free.
func TestListenInUse(t *testing.T) {
	for _, proto := range []string{"udp", "tcp"} {
		t.Run(proto, func(t *testing.T) {
			p := newPeer(t, answerTXT("x")) // both on one port; keep one
			if proto == "udp" {
				p.ln.Close()
			} else {
				p.conn.Close()
			}
			free := freeAddr(t)
			s, err := New(Options{Listen: []netip.AddrPort{free, p.addr}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { shutdown(t, s) })
			err = s.Listen(t.Context())
			if !errno.Is(err, syscall.EADDRINUSE) {
				t.Fatalf("error %v is not EADDRINUSE", err)
			}
			if want := "listen on " + proto + " " + p.addr.String() + ": "; !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "stop the DNS server") {
				t.Errorf("error %q does not say what and what to do", err)
			}
			if len(s.Addrs()) != 0 {
				t.Errorf("bound to %v", s.Addrs())
			}
			for _, addr := range []netip.AddrPort{free, p.addr} {
				if addr == p.addr {
					p.close()
				}
				sockets, err := listenBoth(t.Context(), addr)
				if err != nil {
					t.Fatalf("%v is still bound: %v", addr, err)
				}
				sockets.close()
			}
			if err := s.Listen(t.Context()); err != nil {
				t.Errorf("listening again: %v", err)
			}
			if err := s.Listen(t.Context()); err == nil {
				t.Error("listens twice")
			}
		})
	}
}

func TestListenNoSuchAddress(t *testing.T) {
	s, err := New(Options{Listen: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:5353")}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(t.Context()); !errno.Is(err, syscall.EADDRNOTAVAIL) || !strings.Contains(err.Error(), "bring the interface") {
		t.Errorf("error %v", err)
	}
}

func TestSeveralAddresses(t *testing.T) {
	needsLoopback(t)
	p := newPeer(t, answerTXT("x"))
	addrs := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("127.0.0.2:0")}
	if l, err := net.Listen("tcp6", "[::1]:0"); err == nil {
		l.Close()
		addrs = append(addrs, netip.MustParseAddrPort("[::1]:0"))
	}
	s := start(t, external(p), func(o *Options) { o.Listen = addrs })
	for i, addr := range s.Addrs() {
		if addr.Addr() != addrs[i].Addr() || addr.Port() == 0 {
			t.Errorf("address %v for %v", addr, addrs[i])
		}
		for _, network := range []string{"udp", "tcp"} {
			// A connected socket gets an answer from the address it asked only.
			conn, err := net.Dial(network, addr.String())
			if err != nil {
				t.Fatal(err)
			}
			conn.SetDeadline(time.Now().Add(patience))
			c := &client{t: t, conn: conn, tcp: network == "tcp"}
			wantText(t, c.askMsg(query("www.example.org.", false)), "x")
			conn.Close()
		}
	}
	if err := s.SetRoutes(Routes{Upstreams: s.Addrs()}); !errors.Is(err, ErrOwnAddress) {
		t.Errorf("error %v for own addresses", err)
	}
}

// TestShutdownDrains holds answers back until Shutdown has begun.
func TestShutdownDrains(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	p := newPeer(t, func(q *peerQuery) { asked <- struct{}{}; <-release; answerTXT("late")(q) })
	s := start(t, external(p))
	udp, tcp := dial(t, s, "udp"), dial(t, s, "tcp")
	m := query("www.example.org.", false)
	udp.send(pack(t, m))
	<-asked
	tcp.send(pack(t, m))
	<-asked
	idle := dial(t, s, "tcp")

	var wg sync.WaitGroup
	for range 2 { // idempotent, also at the same time
		wg.Go(func() { shutdown(t, s) })
	}
	idle.wantClosed() // so Shutdown has begun
	close(release)
	wantText(t, unpack(t, udp.receive()), "late")
	wantText(t, unpack(t, tcp.receive()), "late")
	tcp.wantClosed()
	wg.Wait()
	if err := s.Listen(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Listen after Shutdown: %v", err)
	}
	if n := s.Stats().InFlight; n != 0 {
		t.Errorf("%d in flight", n)
	}
}

func TestShutdownGivesUp(t *testing.T) {
	asked := make(chan struct{}, 8)
	p := newPeer(t, func(*peerQuery) { asked <- struct{}{} })
	s := start(t, external(p))
	dial(t, s, "udp").send(pack(t, query("www.example.org.", false)))
	<-asked
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if err := s.Shutdown(ctx); err != nil {
		t.Errorf("the second time: %v", err)
	}
}

func TestShutdownWithoutListen(t *testing.T) {
	s, err := New(Options{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}})
	if err != nil {
		t.Fatal(err)
	}
	shutdown(t, s)
}

// TestSetRoutesWhileServing switches between two tables under load: each
// answer is from one of the two.
func TestSetRoutesWhileServing(t *testing.T) {
	tables := []Routes{cluster(newPeer(t, answerTXT("a"))), cluster(newPeer(t, answerTXT("b")))}
	s := start(t, tables[0])
	var wg sync.WaitGroup
	defer wg.Wait()
	for range 4 {
		c := dial(t, s, "udp")
		wg.Go(func() {
			for i := range 200 {
				if err := s.SetRoutes(tables[i%2]); err != nil {
					t.Error(err)
				}
				c.send(pack(t, query("x.cluster.local.", false)))
				if got := text(unpack(t, c.receive())); got != "a" && got != "b" {
					t.Errorf("answer %q", got)
				}
				_ = s.Stats()
			}
		})
	}
}

// TestLoopRedirect: our own packet returns to us, as by a redirect on the way.
// Here the server is its own upstream, which SetRoutes would refuse.
func TestLoopRedirect(t *testing.T) {
	for _, network := range []string{"udp", "tcp"} {
		t.Run(network, func(t *testing.T) {
			s := start(t, external())
			routes, err := newTable(Routes{Upstreams: s.Addrs()}, nil, nil, &s.policy)
			if err != nil {
				t.Fatal(err)
			}
			s.routes.Store(routes)
			wantRcode(t, dial(t, s, network).askMsg(query("www.example.org.", false)), dns.RcodeServerFailure)
			shutdown(t, s)
			st := s.Stats()
			if st.Loops != 1 || st.Failures != 1 || st.External != 2 {
				t.Errorf("stats %+v, want the query, and the one that came back", st)
			}
			if l := st.LastLoop; l == nil || l.Name != "www.example.org." || l.From != s.Addrs()[0].Addr() || l.Zone != "" {
				t.Errorf("last loop %+v", l)
			}
			if n := len(s.loops.out); n != 0 {
				t.Errorf("%d keys left", n)
			}
		})
	}
}

// TestLoopForwarder: the upstream asks us under IDs and from ports of its own, on the same host, so nothing but a name of
// ours tells that it is a loop.
func TestLoopForwarder(t *testing.T) {
	target := make(chan netip.AddrPort, 1)
	p := newPeer(t, func(q *peerQuery) {
		m := q.msg()
		id := m.Id
		m.Id = dns.Id()
		r := unpack(t, askRaw(t, target, pack(t, m)))
		r.Id = id
		q.replyMsg(r)
	})
	s := startTuned(t, external(p), func(s *Server) { s.routes.Load().pace.resend = 100 * time.Millisecond })
	target <- s.Addrs()[0]
	for range 2 {
		wantRcode(t, dial(t, s, "udp").askMsg(query("www.example.org.", true)), dns.RcodeServerFailure)
	}
	if st := s.Stats(); st.Loops == 0 || st.LastLoop.Name != "www.example.org." || p.udp.Load() > 12 {
		t.Errorf("%d loops, last %+v, %d queries to the upstream", st.Loops, st.LastLoop, p.udp.Load())
	}
	eventually(t, "nothing is left over", func() bool {
		s.loops.mu.Lock()
		defer s.loops.mu.Unlock()
		return len(s.loops.out)+len(s.loops.doubt)+len(s.loops.marked) == 0
	})
}

// elsewhere has the server take all others for other hosts.
func elsewhere(s *Server) { s.loops.local = func(netip.Addr) bool { return false } }

// TestRemoteLoop: an upstream on another host that forwards to us is found out when it asks for the second time.
func TestRemoteLoop(t *testing.T) {
	target := make(chan netip.AddrPort, 1)
	p := newPeer(t, func(q *peerQuery) {
		m := q.msg()
		id := m.Id
		m.Id = dns.Id()
		r := unpack(t, askRaw(t, target, pack(t, m)))
		r.Id = id
		q.replyMsg(r)
	})
	s := startTuned(t, external(p), elsewhere)
	target <- s.Addrs()[0]
	wantRcode(t, dial(t, s, "udp").askMsg(query("www.example.org.", true)), dns.RcodeServerFailure)
	if st := s.Stats(); st.Loops != 1 || p.udp.Load() != 2 {
		t.Errorf("%d loops, %d queries to the upstream", st.Loops, p.udp.Load())
	}
}

// TestHostOfTheUpstreamAsks: a program beside an upstream on another host asks us what that one was just asked, and it is no loop.
func TestHostOfTheUpstreamAsks(t *testing.T) {
	target := make(chan netip.AddrPort, 1)
	var asked atomic.Bool
	p := newPeer(t, func(q *peerQuery) {
		if asked.CompareAndSwap(false, true) {
			wantText(t, unpack(t, askRaw(t, target, pack(t, query("www.example.org.", false)))), "x")
		}
		answerTXT("x")(q)
	})
	s := startTuned(t, external(p), elsewhere)
	target <- s.Addrs()[0]
	wantText(t, dial(t, s, "udp").askMsg(query("www.example.org.", false)), "x")
	if st := s.Stats(); st.Loops != 0 {
		t.Errorf("%d loops", st.Loops)
	}
}

// TestNoLoopOfHonestQueries: an upstream on this host that is only slow is not taken for one that asks back.
func TestNoLoopOfHonestQueries(t *testing.T) {
	hold := make(chan struct{})
	p := newPeer(t, held(hold))
	s := startTuned(t, external(p), func(s *Server) { s.routes.Load().pace.resend = 10 * time.Millisecond })
	a, b := dial(t, s, "udp"), dial(t, s, "udp")
	m := query("www.example.org.", false)
	a.send(pack(t, m))
	eventually(t, "it is asked", func() bool { return p.udp.Load() > 0 })
	b.send(pack(t, m))
	eventually(t, "it is asked for a name of ours, too", func() bool { return p.udp.Load() > 3 })
	close(hold)
	wantText(t, unpack(t, a.receive()), "x")
	wantText(t, unpack(t, b.receive()), "x")
	if n := s.Stats().Loops; n != 0 {
		t.Errorf("%d loops", n)
	}
}

// askRaw asks the server whose address waits in target, and puts it back.
func askRaw(t testing.TB, target chan netip.AddrPort, raw []byte) []byte {
	addr := <-target
	target <- addr
	conn, err := net.Dial("udp", addr.String())
	if err != nil {
		t.Error(err)
		return nil
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	conn.Write(raw)
	buf := make([]byte, bufferSize)
	n, err := conn.Read(buf)
	if err != nil {
		t.Error(err)
	}
	return buf[:n]
}

// TestLoopGuard: the upstream asks us, from its address, what it was asked.
func TestLoopGuard(t *testing.T) {
	local := netip.MustParseAddr("172.19.1.1")
	g := newLoopGuard(func(a netip.Addr) bool { return a == local })
	remote, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	socket := netip.AddrPortFrom(local, 40000)
	keys := g.leaves(1, socket, remote)
	keysLocal := g.leaves(2, netip.AddrPortFrom(local, 40001), local)
	for _, tt := range []struct {
		name     string
		question uint64
		from     netip.AddrPort
		want     bool
	}{
		{"from our socket", 1, socket, true},
		{"from our socket, mapped", 1, netip.MustParseAddrPort("[::ffff:172.19.1.1]:40000"), true},
		{"from our host", 1, netip.AddrPortFrom(local, 5000), false},
		{"from the server", 1, netip.AddrPortFrom(remote, 5000), false},
		{"from the server again", 1, netip.AddrPortFrom(remote, 5001), true},
		{"from somebody else", 1, netip.AddrPortFrom(other, 5000), false},
		{"other question", 3, netip.AddrPortFrom(remote, 5000), false},
		{"from this host, where the server is", 2, netip.AddrPortFrom(local, 5000), false},
	} {
		if got, _ := g.comesBack(tt.question, tt.from); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
	g.back(keys)
	g.back(keysLocal)
	if back, open := g.comesBack(1, netip.AddrPortFrom(remote, 5000)); back || open || len(g.out)+len(g.once) != 0 {
		t.Errorf("left over: %v, %v", g.out, g.once)
	}
}

// TestAdd: an address that comes later is served like the others, and no query is forwarded to it.
func TestAdd(t *testing.T) {
	needsLoopback(t)
	s := start(t, external(newPeer(t, answerTXT("x"))))
	if err := s.Add(t.Context(), netip.MustParseAddrPort("127.0.0.77:0")); err != nil {
		t.Fatal(err)
	}
	added := s.Addrs()[1]
	if err := s.Add(t.Context(), added); err != nil || len(s.Addrs()) != 2 {
		t.Errorf("added again: %v, %v", s.Addrs(), err)
	}
	for _, network := range []string{"udp", "tcp"} {
		conn, err := dns.Dial(network, added.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.WriteMsg(query("www.example.org.", false)); err != nil {
			t.Fatal(err)
		}
		if reply, err := conn.ReadMsg(); err != nil || len(reply.Answer) != 1 {
			t.Errorf("%s: %v, %v", network, reply, err)
		}
	}
	if err := s.SetRoutes(Routes{Upstreams: []netip.AddrPort{added}}); !errors.Is(err, ErrOwnAddress) {
		t.Errorf("an upstream that is served here: %v", err)
	}
	if !s.isLocal(added.Addr()) {
		t.Error("it is not taken for this host's own")
	}
	shutdown(t, s)
	if err := s.Add(t.Context(), netip.MustParseAddrPort("127.0.0.78:0")); !errors.Is(err, ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
}
