package forwarder

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// answerHeader answers with no record and the flags and the code given.
func answerHeader(authoritative, recursive bool, rcode int, authority ...dns.RR) func(*peerQuery) {
	return func(q *peerQuery) {
		r := new(dns.Msg).SetRcode(q.msg(), rcode)
		r.Authoritative, r.RecursionAvailable, r.Ns = authoritative, recursive, authority
		q.replyMsg(r)
	}
}

var (
	soa = &dns.SOA{Hdr: dns.RR_Header{Name: "org.", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 60}, Ns: "ns.org.", Mbox: "x.org.", Minttl: 60}
	ns  = &dns.NS{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeNS, Class: dns.ClassINET, Ttl: 60}, Ns: "a.root-servers.net."}
)

// TestEarlierServerIsWaitedFor: what the second server says at once waits for the first, which a stub resolver would wait
// for too.
func TestEarlierServerIsWaitedFor(t *testing.T) {
	for name, second := range map[string]func(*peerQuery){
		"NXDOMAIN":       answerHeader(false, true, dns.RcodeNameError, soa),
		"NODATA":         answerHeader(false, true, dns.RcodeSuccess, soa),
		"SERVFAIL":       answerRcode(dns.RcodeServerFailure),
		"REFUSED":        answerRcode(dns.RcodeRefused),
		"another answer": answerTXT("second"),
	} {
		t.Run(name, func(t *testing.T) {
			answered := make(chan struct{})
			s := startTuned(t, external(
				newPeer(t, func(q *peerQuery) { <-answered; answerTXT("first")(q) }),
				newPeer(t, func(q *peerQuery) { second(q); close(answered) }),
			), hasty)
			wantText(t, ask(t, s, "www.example.org."), "first")
		})
	}
}

// TestFoundBeatsNo: what another server finds counts more than that the first has nothing.
func TestFoundBeatsNo(t *testing.T) {
	answered := make(chan struct{})
	s := startTuned(t, external(
		newPeer(t, func(q *peerQuery) { <-answered; answerRcode(dns.RcodeNameError)(q) }),
		newPeer(t, answerTXT("second")),
	), hasty)
	second := s.routes.Load().upstreams.servers[1]
	go func() {
		defer close(answered)
		for heard := false; !heard; time.Sleep(10 * time.Millisecond) { // and then a moment, for the race to hear of it
			second.mu.Lock()
			heard = !second.heard.IsZero()
			second.mu.Unlock()
		}
	}()
	wantText(t, ask(t, s, "www.example.org."), "second")
}

// TestNoIsNotHeldForEver: the first server says nothing, so in the end the second's word is what there is.
func TestNoIsNotHeldForEver(t *testing.T) {
	r := external(newPeer(t, silent), newPeer(t, answerHeader(false, true, dns.RcodeNameError, soa)))
	r.Timeout = 100 * time.Millisecond
	wantRcode(t, ask(t, start(t, r), "www.example.org."), dns.RcodeNameError)
}

// TestLoserIsNotPutAside: a server that is always slower than the next, but answers, is in use.
func TestLoserIsNotPutAside(t *testing.T) {
	answered := make(chan struct{})
	first := newPeer(t, func(q *peerQuery) { <-answered; answerTXT("first")(q) })
	s := startTuned(t, external(first, newPeer(t, answerTXT("second"))), func(s *Server) {
		hasty(s)
		s.routes.Load().pace.first = 0
	})
	u := s.routes.Load().upstreams.servers[0]
	for range 2 * s.policy.strikes {
		wantText(t, ask(t, s, "www.example.org."), "second")
		answered <- struct{}{}
		eventually(t, "the late answer is heard", func() bool { return u.standing(time.Now()) == trusted })
	}
	if !u.healthy() || u.failures.Load() != 0 {
		t.Errorf("%d failures of a server that answers", u.failures.Load())
	}
}

// TestSlowOnlyServer: it takes longer than a stub's first try, and gets all the time of the stub's others, also when it was
// dead before.
func TestSlowOnlyServer(t *testing.T) {
	t.Parallel()
	var queries atomic.Int64
	p := newPeer(t, func(q *peerQuery) {
		if queries.Add(1) == 1 { // what is sent again is not answered again
			time.Sleep(1200 * time.Millisecond)
			answerTXT("slow")(q)
		}
	})
	r := external(p)
	r.Timeout, r.Attempts = time.Second, 20
	s := start(t, r)
	u := s.routes.Load().upstreams.servers[0]
	for range s.policy.strikes {
		s.strike(u, time.Now(), errTimeout)
	}
	if u.healthy() {
		t.Fatal("the server is not put aside")
	}
	wantText(t, ask(t, s, "www.example.org."), "slow")
	if !u.healthy() {
		t.Error("a slow server is still aside after its answer")
	}
}

// TestDeadZoneFailsSoon: with a bound of hours, an answer within the test's time shows that cluster servers which are all
// aside get a part of it only.
func TestDeadZoneFailsSoon(t *testing.T) {
	dead := newPeer(t, silent)
	s := startTuned(t, cluster(dead), func(s *Server) { s.routes.Load().pace.hopeless = 10 * time.Millisecond })
	u := s.routes.Load().known[dead.addr]
	for range s.policy.strikes {
		s.strike(u, time.Now(), errTimeout)
	}
	wantRcode(t, ask(t, s, "x.cluster.local."), dns.RcodeServerFailure)
}

func TestNextAfterLameReply(t *testing.T) {
	for _, tt := range []struct {
		name string
		lame func(*peerQuery)
		want string // "" if it is an answer
	}{
		{"empty, neither AA nor RA", answerHeader(false, false, dns.RcodeSuccess), "second"},
		{"referral upwards", answerHeader(false, false, dns.RcodeSuccess, ns), "second"},
		{"referral from a resolver", answerHeader(false, true, dns.RcodeSuccess, ns), "second"},
		{"FORMERR", answerRcode(dns.RcodeFormatError), "second"},
		{"NOTAUTH", answerRcode(dns.RcodeNotAuth), "second"},
		{"BADVERS", answerRcode(dns.RcodeBadVers), "second"},
		{"NODATA of a resolver", answerHeader(false, true, dns.RcodeSuccess), ""},
		{"NODATA of an authority", answerHeader(true, false, dns.RcodeSuccess), ""},
		{"NODATA with SOA", answerHeader(false, false, dns.RcodeSuccess, soa), ""},
		{"NXDOMAIN", answerHeader(false, false, dns.RcodeNameError), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := start(t, external(newPeer(t, tt.lame), newPeer(t, answerTXT("second"))))
			wantText(t, ask(t, s, "www.example.org."), tt.want)
		})
	}
	t.Run("asked for a referral", func(t *testing.T) {
		s := start(t, external(newPeer(t, answerHeader(false, false, dns.RcodeSuccess, ns)), newPeer(t, answerTXT("second"))))
		m := query("www.example.org.", false)
		m.RecursionDesired = false
		if r := dial(t, s, "udp").askMsg(m); len(r.Ns) != 1 {
			t.Errorf("no referral:\n%v", r)
		}
	})
	t.Run("all lame", func(t *testing.T) { // the client's stub judges it, as it would have
		s := start(t, external(newPeer(t, answerHeader(false, false, dns.RcodeSuccess))))
		if r := ask(t, s, "www.example.org."); r.Rcode != dns.RcodeSuccess || r.RecursionAvailable {
			t.Errorf("answer\n%v", r)
		}
	})
}

// TestServerWithoutEDNS: RFC 6891 section 7.
func TestServerWithoutEDNS(t *testing.T) {
	for _, rcode := range []int{dns.RcodeFormatError, dns.RcodeNotImplemented} {
		p := newPeer(t, func(q *peerQuery) {
			if q.msg().IsEdns0() != nil {
				answerRcode(rcode)(q)
				return
			}
			answerTXT("plain")(q)
		})
		m := dial(t, start(t, external(p)), "udp").askMsg(query("www.example.org.", true))
		wantText(t, m, "plain")
		if m.IsEdns0() == nil {
			t.Error("the client's OPT is not answered")
		}
	}
}

// TestTruncatedAndTCPSilent: the connection is taken and never answered, as where a firewall drops TCP.
func TestTruncatedAndTCPSilent(t *testing.T) {
	p := newPeer(t, func(q *peerQuery) {
		if q.tcp {
			return
		}
		r := new(dns.Msg).SetReply(q.msg())
		r.Answer = []dns.RR{txt("www.example.org.", "part")}
		r.Truncated = true
		q.replyMsg(r)
	})
	s := startTuned(t, external(p, newPeer(t, answerTXT("second"))), func(s *Server) { s.routes.Load().pace.tcp = 50 * time.Millisecond })
	for range 2 * s.policy.strikes {
		m := ask(t, s, "www.example.org.")
		wantText(t, m, "part")
		if !m.Truncated {
			t.Error("TC is lost")
		}
	}
	if !s.Stats().Upstreams[0].Healthy || !s.Stats().Upstreams[1].Healthy {
		t.Error("a server without TCP was put aside")
	}
}

// TestTruncatedIsWholeElsewhere: the first server has no TCP, the second has.
func TestTruncatedIsWholeElsewhere(t *testing.T) {
	cutting := func(tcp func(*peerQuery)) func(*peerQuery) {
		return func(q *peerQuery) {
			if q.tcp {
				tcp(q)
				return
			}
			r := new(dns.Msg).SetReply(q.msg())
			r.Truncated = true
			q.replyMsg(r)
		}
	}
	for _, closed := range []bool{true, false} {
		first, second := newPeer(t, cutting(silent)), newPeer(t, cutting(answerTXT("whole")))
		if closed {
			first.ln.Close()
		}
		s := startTuned(t, external(first, second), func(s *Server) {
			hasty(s)
			s.routes.Load().pace.first = 0
		})
		wantText(t, ask(t, s, "www.example.org."), "whole")
	}
}

func TestRotate(t *testing.T) {
	a, b := newPeer(t, answerTXT("a")), newPeer(t, answerTXT("b"))
	r := external(a, b)
	r.Rotate = true
	s := start(t, r)
	for range 10 {
		ask(t, s, "www.example.org.")
	}
	if a.udp.Load() != 5 || b.udp.Load() != 5 {
		t.Errorf("%d and %d queries", a.udp.Load(), b.udp.Load())
	}
}

// TestPaceFitsStubs: what comes first of musl's (one timeout in all) and glibc's and Go's (one for each attempt).
func TestPaceFitsStubs(t *testing.T) {
	for _, tt := range []struct {
		timeout  time.Duration
		attempts int
		whole    time.Duration
	}{{0, 0, 10 * time.Second}, {10 * time.Second, 0, 20 * time.Second}, {time.Second, 1, time.Second}} {
		p := newPace(tt.timeout, tt.attempts)
		if p.whole != tt.whole || p.negative >= p.timeout || 2*p.patience+p.timeout*9/10 > p.timeout || p.first > p.timeout/2 {
			t.Errorf("%v, %d: %+v", tt.timeout, tt.attempts, p)
		}
	}
	s, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer shutdown(t, s)
	for _, r := range []Routes{{Timeout: -1}, {Attempts: -1}} {
		if err := s.SetRoutes(r); err == nil {
			t.Errorf("%+v is taken", r)
		}
	}
}

// TestShutdownEndsSpares: a try that is not waited for any more is not waited for by Shutdown either.
func TestShutdownEndsSpares(t *testing.T) {
	s := startTuned(t, external(newPeer(t, silent), newPeer(t, answerTXT("second"))), func(s *Server) {
		hasty(s)
		s.routes.Load().pace.first = 0
	})
	for range 10 {
		wantText(t, ask(t, s, "www.example.org."), "second")
	}
	if s.spares.Load() == 0 {
		t.Error("no try runs on")
	}
	shutdown(t, s)
	if n := s.spares.Load(); n != 0 {
		t.Errorf("%d tries run on after Shutdown", n)
	}
}

// TestSparesAreBounded: beyond, the tries that lost end at once.
func TestSparesAreBounded(t *testing.T) {
	s := startTuned(t, external(newPeer(t, silent), newPeer(t, answerTXT("second"))), func(s *Server) {
		hasty(s)
		s.routes.Load().pace.first = 0
		s.spares.Store(maxSpares)
	})
	wantText(t, ask(t, s, "www.example.org."), "second")
	eventually(t, "nothing waits for the first server", func() bool {
		s.loops.mu.Lock()
		defer s.loops.mu.Unlock()
		return len(s.loops.out) == 0
	})
	if n := s.spares.Swap(0); n != maxSpares {
		t.Errorf("%d spares counted", n)
	}
}
