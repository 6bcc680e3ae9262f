package forwarder

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// TestProbe: a server says who it is, by both transports and in any spelling, and asks nobody for it.
func TestProbe(t *testing.T) {
	p := newPeer(t, func(q *peerQuery) { q.replyMsg(new(dns.Msg).SetReply(q.msg())) })
	s, other := start(t, external(p)), start(t, external(p))
	identity := func(s *Server, network, name string) string {
		t.Helper()
		m := dial(t, s, network).askMsg(query(name, true))
		wantRcode(t, m, dns.RcodeSuccess)
		if len(m.Answer) != 1 || m.Answer[0].Header().Ttl != 0 || m.IsEdns0() == nil {
			t.Fatalf("%v", m)
		}
		return m.Answer[0].(*dns.TXT).Txt[0]
	}
	id := identity(s, "udp", "x1."+ProbeZone)
	if id == "" || id != identity(s, "tcp", "X2."+strings.ToUpper(ProbeZone)) || id == identity(other, "udp", "x1."+ProbeZone) {
		t.Errorf("identity %q must be one server's, and no other's", id)
	}
	if n := p.udp.Load(); n != 0 {
		t.Errorf("an upstream was asked %d times", n)
	}
	wantRcode(t, dial(t, s, "udp").askMsg(query("k2s-dnsbpf.invalid.", false)), dns.RcodeSuccess)
	if n := p.udp.Load(); n != 1 {
		t.Errorf("a name beside the zone: %d queries to the upstream", n)
	}
}

// TestLoopIsLoggedOnce: one line for a storm, which says what to do.
func TestLoopIsLoggedOnce(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	s, err := New(Options{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, Logger: zap.New(core)})
	if err != nil {
		t.Fatal(err)
	}
	c := &clientQuery{raw: pack(t, query("x.cluster.local.", false)), from: netip.MustParseAddrPort("172.20.0.10:4000"), zone: "cluster.local."}
	if err := c.question.parse(c.raw); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		s.noteLoop(c)
	}
	list := logs.All()
	if len(list) != 1 || !strings.Contains(list[0].ContextMap()["remedy"].(string), "Corefile") || list[0].ContextMap()["from"] != "172.20.0.10" {
		t.Errorf("%d lines: %v", len(list), list)
	}
	if st := s.Stats(); st.Loops != 1000 {
		t.Errorf("%d loops counted", st.Loops)
	}
}
