package forwarder

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

func TestRouting(t *testing.T) {
	in, out := newPeer(t, answerTXT("inside")), newPeer(t, answerTXT("outside"))
	r := cluster(in)
	r.Upstreams = external(out).Upstreams
	s := start(t, r)
	for _, tt := range []struct{ name, want string }{
		{"a.b.CLUSTER.local.", "inside"},
		{"cluster.local.", "inside"},
		{"xcluster.local.", "outside"},
		{`cluster\.local.`, "outside"},
		{`\007cluster\005local.`, "outside"},
		{".", "outside"},
	} {
		for _, network := range []string{"udp", "tcp"} {
			m := dial(t, s, network).askMsg(query(tt.name, false))
			wantText(t, m, tt.want)
			if m.Question[0].Name != tt.name {
				t.Errorf("question %q, want %q", m.Question[0].Name, tt.name)
			}
		}
	}
	st := s.Stats()
	if st.UDPQueries != 6 || st.TCPQueries != 6 || st.Cluster != 4 || st.External != 8 || st.Failures != 0 {
		t.Errorf("stats %+v", st)
	}
	if in.tcp.Load() != 2 || out.tcp.Load() != 4 {
		t.Error("the client's transport is not mirrored")
	}
}

// TestReplyChecked sends forged replies before the right one.
func TestReplyChecked(t *testing.T) {
	tests := []struct {
		name  string
		forge func(t *testing.T, q *peerQuery, r *dns.Msg)
	}{
		{"wrong ID", func(_ *testing.T, q *peerQuery, r *dns.Msg) { r.Id++; q.replyMsg(r) }},
		{"wrong name", func(_ *testing.T, q *peerQuery, r *dns.Msg) { r.Question[0].Name = "www.example.net."; q.replyMsg(r) }},
		{"wrong type", func(_ *testing.T, q *peerQuery, r *dns.Msg) { r.Question[0].Qtype = dns.TypeA; q.replyMsg(r) }},
		{"wrong class", func(_ *testing.T, q *peerQuery, r *dns.Msg) { r.Question[0].Qclass = dns.ClassCHAOS; q.replyMsg(r) }},
		{"two questions", func(_ *testing.T, q *peerQuery, r *dns.Msg) {
			r.Question = append(r.Question, r.Question[0])
			q.replyMsg(r)
		}},
		{"no question", func(_ *testing.T, q *peerQuery, r *dns.Msg) { r.Question = nil; q.replyMsg(r) }},
		{"not a response", func(_ *testing.T, q *peerQuery, r *dns.Msg) { r.Response = false; q.replyMsg(r) }},
		{"short", func(_ *testing.T, q *peerQuery, _ *dns.Msg) { q.reply([]byte{1, 2, 3}) }},
		{"wrong source", func(t *testing.T, q *peerQuery, r *dns.Msg) {
			conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			raw, _ := r.Pack()
			conn.WriteToUDPAddrPort(raw, q.from)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := newPeer(t, func(q *peerQuery) {
				m := q.msg()
				bad := new(dns.Msg).SetReply(m)
				bad.Answer = []dns.RR{txt(m.Question[0].Name, "forged")}
				tt.forge(t, q, bad)
				answerTXT("right")(q)
			})
			s := start(t, external(p))
			wantText(t, ask(t, s, "www.example.org."), "right")
			if st := s.Stats(); st.Retries != 0 || st.Upstreams[0].Failures != 0 {
				t.Errorf("a forged reply counts as a failure: %+v", st)
			}
		})
	}
}

func TestQueryIsFresh(t *testing.T) {
	ids, ports := map[uint16]bool{}, map[uint16]bool{}
	queries := make(chan *peerQuery, 1)
	p := newPeer(t, func(q *peerQuery) { queries <- q; answerTXT("x")(q) })
	s := start(t, external(p))
	c := dial(t, s, "udp")
	const n = 20
	for range n {
		m := query("www.example.org.", false)
		m.Id = 42
		c.askMsg(m)
		q := <-queries
		ids[messageID(q.raw)] = true
		ports[q.from.Port()] = true
	}
	// Of 20 random 16-bit numbers two are hardly equal, and three never.
	if len(ids) < n-1 || len(ports) < n/2 {
		t.Errorf("%d IDs and %d ports in %d queries", len(ids), len(ports), n)
	}
}

// TestQuestionEcho answers in lower case; the client sees its own spelling.
func TestQuestionEcho(t *testing.T) {
	p := newPeer(t, func(q *peerQuery) {
		m := q.msg()
		m.Question[0].Name = strings.ToLower(m.Question[0].Name)
		q.raw = pack(t, m)
		answerTXT("x")(q)
	})
	r := external(p)
	r.Zones["cluster.local"] = r.Upstreams
	s := start(t, r)
	for _, name := range []string{"WwW.eXaMpLe.oRg.", "kUbErNeTeS.ClUsTeR.LoCaL."} {
		if m := ask(t, s, name); m.Question[0].Name != name {
			t.Errorf("question %q, want %q", m.Question[0].Name, name)
		}
	}
}

func TestTruncatedGoesToTCP(t *testing.T) {
	p := newPeer(t, func(q *peerQuery) {
		if q.tcp {
			answerTXT("whole")(q)
			return
		}
		r := new(dns.Msg).SetReply(q.msg())
		r.Truncated = true
		q.replyMsg(r)
	})
	s := start(t, external(p))
	m := ask(t, s, "www.example.org.")
	wantText(t, m, "whole")
	if m.Truncated || s.Stats().TCPFallbacks != 1 || p.udp.Load() != 1 || p.tcp.Load() != 1 {
		t.Errorf("TC %v, stats %+v", m.Truncated, s.Stats())
	}
}

func TestTruncatedWithoutTCP(t *testing.T) {
	p := newPeer(t, func(q *peerQuery) {
		r := new(dns.Msg).SetReply(q.msg())
		r.Answer = []dns.RR{txt("www.example.org.", "part")}
		r.Truncated = true
		q.replyMsg(r)
	})
	p.ln.Close()
	s := start(t, external(p))
	m := ask(t, s, "www.example.org.")
	wantText(t, m, "part")
	if !m.Truncated {
		t.Error("TC is lost")
	}
}

// TestTruncatedFromCluster hands the server's own cut on.
func TestTruncatedFromCluster(t *testing.T) {
	p := newPeer(t, func(q *peerQuery) {
		r := new(dns.Msg).SetReply(q.msg())
		r.Answer = []dns.RR{txt("x.cluster.local.", "part")}
		r.Truncated = true
		q.replyMsg(r)
	})
	s := start(t, cluster(p))
	m := ask(t, s, "x.cluster.local.")
	wantText(t, m, "part")
	if !m.Truncated || p.tcp.Load() != 0 {
		t.Errorf("TC %v, %d queries by TCP", m.Truncated, p.tcp.Load())
	}
}

// hasty makes a server turn to the next one soon.
func hasty(s *Server) {
	p := &s.routes.Load().pace
	p.headStart, p.patience = 10*time.Millisecond, 10*time.Millisecond
}

func TestDeadFirstUpstream(t *testing.T) {
	refusing, live := deadAddr(t), newPeer(t, answerTXT("live"))
	r := external(live)
	r.Upstreams = append(r.Upstreams[:0:0], refusing, live.addr)
	s := start(t, r)
	for range 10 {
		wantText(t, ask(t, s, "www.example.org."), "live")
	}
	st := s.Stats()
	if st.Failures != 0 || st.Retries == 0 || st.Retries > 3 {
		t.Errorf("%d failures, %d retries: want the dead server put aside after three", st.Failures, st.Retries)
	}
	for _, u := range st.Upstreams {
		if u.Healthy != (u.Addr == live.addr) {
			t.Errorf("%v healthy: %v", u.Addr, u.Healthy)
		}
	}
}

// TestSilentFirstUpstream: its times are hours, so an answer at all within the test's time shows that a server without
// an answer is not waited for, once another has one.
func TestSilentFirstUpstream(t *testing.T) {
	first, second := newPeer(t, silent), newPeer(t, answerTXT("second"))
	s := startTuned(t, external(first, second), func(s *Server) {
		hasty(s)
		s.routes.Load().pace.first = 10 * time.Millisecond
	})
	for range 5 {
		wantText(t, ask(t, s, "www.example.org."), "second")
	}
	if u := s.routes.Load().upstreams.servers[0]; u.standing(time.Now()) != suspect {
		t.Error("the silent server is trusted")
	}
}

// TestSlowUpstreamStillWins: an answer that comes after the next server was
// asked is as good as any.
func TestSlowUpstreamStillWins(t *testing.T) {
	secondAsked := make(chan struct{})
	first := newPeer(t, func(q *peerQuery) { <-secondAsked; answerTXT("slow")(q) })
	second := newPeer(t, func(*peerQuery) { close(secondAsked) })
	s := startTuned(t, external(first, second), hasty)
	wantText(t, ask(t, s, "www.example.org."), "slow")
}

// TestLostPacketIsSentAgain, as long as a client may: its own tries join the first.
func TestLostPacketIsSentAgain(t *testing.T) {
	for _, lost := range []int64{1, 20} { // had the gap doubled, the 20th would have come after hours
		var n atomic.Int64
		p := newPeer(t, func(q *peerQuery) {
			if n.Add(1) > lost {
				answerTXT("sent again")(q)
			}
		})
		s := startTuned(t, external(p), func(s *Server) { s.routes.Load().pace.resend = 10 * time.Millisecond })
		wantText(t, ask(t, s, "www.example.org."), "sent again")
	}
}

func TestServerComesBack(t *testing.T) {
	var up atomic.Bool
	first := newPeer(t, func(q *peerQuery) {
		if up.Load() && q.msg().Question[0].Name != "." { // some answer nothing about the root
			answerTXT("first")(q)
		}
	})
	second := newPeer(t, answerTXT("second"))
	r := external(first, second)
	r.Timeout = 100 * time.Millisecond
	s := startTuned(t, r, func(s *Server) {
		s.policy.minPause = time.Millisecond
		s.policy.maxPause = 50 * time.Millisecond
	})
	for s.routes.Load().upstreams.servers[0].healthy() {
		wantText(t, ask(t, s, "www.example.org."), "second")
	}
	up.Store(true)
	eventually(t, "the first server is used again", func() bool {
		return text(ask(t, s, "www.example.org.")) == "first"
	})
}

func (u *upstream) healthy() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return !u.aside
}

func TestStrikeIsForgivenByALaterReply(t *testing.T) {
	u := newUpstream(freeAddr(t), &healthPolicy{strikes: 1, minPause: time.Hour, maxPause: time.Hour})
	sent := time.Now()
	u.answered()
	u.strike(sent.Add(-time.Second))
	if !u.healthy() {
		t.Error("put aside for a query older than its last reply")
	}
	u.strike(time.Now().Add(time.Second))
	if u.healthy() {
		t.Error("not put aside")
	}
	if got := u.standing(time.Now()); got != aside {
		t.Errorf("standing %v before the pause is over", got)
	}
	if got := u.standing(time.Now().Add(2 * time.Hour)); got != onTrial {
		t.Errorf("standing %v after the pause", got)
	}
	if got := u.standing(time.Now().Add(2 * time.Hour)); got != aside {
		t.Errorf("standing %v beside a trial", got)
	}
}

func TestPauseDoubles(t *testing.T) {
	u := newUpstream(freeAddr(t), &healthPolicy{strikes: 1, minPause: time.Second, maxPause: 3 * time.Second})
	u.strike(time.Now())
	for _, want := range []time.Duration{time.Second, 2 * time.Second, 3 * time.Second, 3 * time.Second} {
		if u.pause != want {
			t.Errorf("pause %v, want %v", u.pause, want)
		}
		u.strike(time.Now())
	}
	sent := time.Now().Add(-time.Second)
	if !u.answered() || u.answered() {
		t.Error("answered must tell once that a server is back")
	}
	if u.strike(sent); !u.healthy() || u.pause != 0 {
		t.Error("a late report of a trial puts a live server aside")
	}
}

// TestLog: one line when a server is put aside and one when it is back, and
// one per query at debug level only.
func TestLog(t *testing.T) {
	for _, level := range []zapcore.Level{zap.DebugLevel, zap.InfoLevel} {
		t.Run(level.String(), func(t *testing.T) {
			core, logs := observer.New(level)
			dead := deadAddr(t)
			s := startTuned(t, Routes{Upstreams: []netip.AddrPort{dead}}, func(s *Server) { s.policy.minPause = time.Nanosecond },
				func(o *Options) { o.Logger = zap.New(core) })
			for range 5 {
				wantRcode(t, ask(t, s, "www.example.org."), dns.RcodeServerFailure)
			}
			aside := logs.FilterMessage("upstream put aside").All()
			if len(aside) != 1 || aside[0].ContextMap()["upstream"] != dead.String() || aside[0].ContextMap()["reason"] != "connection refused" {
				t.Errorf("lines of servers put aside: %v", aside)
			}
			failed := logs.FilterMessage("query failed").All()
			if want := map[zapcore.Level]int{zap.DebugLevel: 5}[level]; len(failed) != want {
				t.Fatalf("%d lines of failed queries, want %d", len(failed), want)
			}
			for _, l := range failed {
				if l.ContextMap()["qname"] != "www.example.org." {
					t.Errorf("line %v", l.ContextMap())
				}
			}
		})
	}
}

func TestOurFaultIsNoStrike(t *testing.T) {
	for err, want := range map[error]bool{
		&net.OpError{Op: "dial", Err: os.NewSyscallError("socket", syscall.EMFILE)}:         true,
		&net.OpError{Op: "read", Err: os.NewSyscallError("recvfrom", syscall.ECONNREFUSED)}: false,
		errTimeout: false,
	} {
		if got := isOurFault(err); got != want {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
	}
}

func TestAllDead(t *testing.T) {
	a, b := deadAddr(t), deadAddr(t)
	r := external()
	r.Upstreams = append(r.Upstreams, a, b)
	r.Zones["cluster.local"] = r.Upstreams[:1]
	s := start(t, r)
	for _, tt := range []struct {
		name, text string
		code       uint16
	}{
		{"www.example.org.", "k2s-dnsbpf: no answer from upstream: " + a.String() + " connection refused, " + b.String() + " connection refused", dns.ExtendedErrorCodeNetworkError},
		{"x.cluster.local.", "k2s-dnsbpf: no answer for zone cluster.local: " + a.String() + " connection refused", dns.ExtendedErrorCodeNoReachableAuthority},
	} {
		m := dial(t, s, "udp").askMsg(query(tt.name, true))
		wantRcode(t, m, dns.RcodeServerFailure)
		if e := ede(t, m); e.InfoCode != tt.code || e.ExtraText != tt.text {
			t.Errorf("EDE %v, want %d %q", e, tt.code, tt.text)
		}
		m = ask(t, s, tt.name)
		wantRcode(t, m, dns.RcodeServerFailure)
		if m.IsEdns0() != nil {
			t.Error("OPT in the reply to a query without")
		}
	}
	if n := s.Stats().Failures; n != 4 {
		t.Errorf("%d failures, want 4", n)
	}
}

func TestAllSilent(t *testing.T) {
	p := newPeer(t, silent)
	r := external(p)
	r.Timeout = 50 * time.Millisecond
	s := start(t, r)
	m := dial(t, s, "udp").askMsg(query("www.example.org.", true))
	wantRcode(t, m, dns.RcodeServerFailure)
	if e := ede(t, m); !strings.Contains(e.ExtraText, p.addr.String()+" timeout") {
		t.Errorf("text %q", e.ExtraText)
	}
}

func TestNextAfterErrorReply(t *testing.T) {
	for _, rcode := range []int{dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented} {
		t.Run(dns.RcodeToString[rcode], func(t *testing.T) {
			s := start(t, external(newPeer(t, answerRcode(rcode)), newPeer(t, answerTXT("second"))))
			wantText(t, ask(t, s, "www.example.org."), "second")
		})
	}
	t.Run("bare", func(t *testing.T) { // an error without the question
		p := newPeer(t, func(q *peerQuery) {
			m := new(dns.Msg).SetRcode(q.msg(), dns.RcodeRefused)
			m.Question = nil
			q.replyMsg(m)
		})
		s := start(t, external(p, newPeer(t, answerTXT("second"))))
		wantText(t, ask(t, s, "www.example.org."), "second")

		s = start(t, external(p))
		m := dial(t, s, "udp").askMsg(query("www.example.org.", true))
		wantRcode(t, m, dns.RcodeRefused)
		if len(m.Question) != 1 || m.IsEdns0() == nil {
			t.Errorf("no question or no OPT in\n%v", m)
		}
	})
	t.Run("final", func(t *testing.T) { // an answer that is one
		second := newPeer(t, answerTXT("second"))
		s := start(t, external(newPeer(t, answerRcode(dns.RcodeNameError)), second))
		wantRcode(t, ask(t, s, "www.example.org."), dns.RcodeNameError)
		if second.udp.Load() != 0 {
			t.Error("NXDOMAIN was not taken for an answer")
		}
	})
}

func TestBestErrorReply(t *testing.T) {
	s := start(t, external(newPeer(t, answerRcode(dns.RcodeServerFailure)), newPeer(t, answerRcode(dns.RcodeRefused))))
	wantRcode(t, ask(t, s, "www.example.org."), dns.RcodeServerFailure)
	if n := s.Stats().Failures; n != 0 {
		t.Errorf("%d failures: the SERVFAIL is not ours", n)
	}
	// A silent server keeps a failure back while a stub would wait for it, and no longer.
	r := external(newPeer(t, silent), newPeer(t, answerRcode(dns.RcodeRefused)))
	r.Timeout = 100 * time.Millisecond
	wantRcode(t, ask(t, start(t, r), "www.example.org."), dns.RcodeRefused)
}

func TestMalformedReply(t *testing.T) {
	broken := newPeer(t, func(q *peerQuery) {
		m := new(dns.Msg).SetReply(q.msg())
		m.Answer = []dns.RR{txt("www.example.org.", "cut")}
		raw := pack(t, m)
		q.reply(raw[:len(raw)-2])
	})
	s := start(t, external(broken))
	m := dial(t, s, "udp").askMsg(query("www.example.org.", true))
	wantRcode(t, m, dns.RcodeServerFailure)
	if e := ede(t, m); e.InfoCode != dns.ExtendedErrorCodeInvalidData {
		t.Errorf("EDE %v", e)
	}
	if !s.Stats().Upstreams[0].Healthy {
		t.Error("a server that answers is not dead")
	}
}

// TestClusterStaysInside: whatever fails, no upstream sees a cluster name.
func TestClusterStaysInside(t *testing.T) {
	tests := []struct {
		name    string
		handler func(*peerQuery)
	}{
		{"no endpoint", nil},
		{"SERVFAIL", answerRcode(dns.RcodeServerFailure)},
		{"REFUSED", answerRcode(dns.RcodeRefused)},
		{"NXDOMAIN", answerRcode(dns.RcodeNameError)},
		{"silent", silent},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			outside := newPeer(t, answerTXT("outside"))
			r := external(outside)
			if tt.handler != nil {
				r.Zones["cluster.local"] = cluster(newPeer(t, tt.handler)).Zones["cluster.local"]
			}
			r.Timeout = 50 * time.Millisecond
			s := start(t, r)
			for _, network := range []string{"udp", "tcp"} {
				for _, qtype := range []uint16{dns.TypeA, dns.TypeAXFR, dns.TypeANY} {
					m := query("x.Cluster.local.", true)
					m.Question[0].Qtype = qtype
					if r := dial(t, s, network).askMsg(m); r.Rcode == dns.RcodeSuccess {
						t.Errorf("answered:\n%v", r)
					}
				}
			}
			if n := outside.udp.Load() + outside.tcp.Load(); n != 0 {
				t.Errorf("%d queries went outside", n)
			}
		})
	}
}

func TestNoServers(t *testing.T) {
	s := start(t, external())
	for _, tt := range []struct {
		name, text string
		code       uint16
	}{
		{"x.cluster.local.", "k2s-dnsbpf: no endpoint for zone cluster.local", dns.ExtendedErrorCodeNoReachableAuthority},
		{"www.example.org.", "k2s-dnsbpf: no upstream server is known", dns.ExtendedErrorCodeNotReady},
	} {
		m := dial(t, s, "udp").askMsg(query(tt.name, true))
		wantRcode(t, m, dns.RcodeServerFailure)
		if e := ede(t, m); e.InfoCode != tt.code || e.ExtraText != tt.text {
			t.Errorf("EDE %v", e)
		}
	}
	s.routes.Store(nil)
	m := dial(t, s, "udp").askMsg(query("www.example.org.", true))
	if e := ede(t, m); m.Rcode != dns.RcodeServerFailure || e.InfoCode != dns.ExtendedErrorCodeNotReady {
		t.Errorf("without routes: %v", m)
	}
}

func TestZoneServersShareTheLoad(t *testing.T) {
	a, b := newPeer(t, answerTXT("a")), newPeer(t, answerTXT("b"))
	s := start(t, cluster(a, b))
	for range 10 {
		ask(t, s, "x.cluster.local.")
	}
	if a.udp.Load() != 5 || b.udp.Load() != 5 {
		t.Errorf("%d and %d queries", a.udp.Load(), b.udp.Load())
	}
}

func TestUpstreamsAreAskedInOrder(t *testing.T) {
	a, b := newPeer(t, answerTXT("a")), newPeer(t, answerTXT("b"))
	s := start(t, external(a, b))
	for range 10 {
		wantText(t, ask(t, s, "www.example.org."), "a")
	}
}
