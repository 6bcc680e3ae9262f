package forwarder

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"
)

// held is a peer's handler that answers nothing before release is closed.
func held(release <-chan struct{}) func(*peerQuery) {
	return func(q *peerQuery) { <-release; answerTXT("x")(q) }
}

// TestEqualQueriesAreAskedOnce: many more than were once taken for a loop, each with its own ID and spelling.
func TestEqualQueriesAreAskedOnce(t *testing.T) {
	for name, r := range map[string]func(...*peer) Routes{"www.example.org.": external, "www.x.cluster.local.": cluster} {
		hold := make(chan struct{})
		p := newPeer(t, held(hold))
		release := sync.OnceFunc(func() { close(hold) })
		t.Cleanup(release)
		s := start(t, r(p))
		const n = 600
		clients := make([]*client, n)
		sent := make([]*dns.Msg, n)
		for i := range clients {
			m := query(name, false)
			if i%2 > 0 {
				m.Question[0].Name = strings.ToUpper(name)
			}
			m.Id = uint16(i)
			clients[i], sent[i] = dial(t, s, "udp"), m
			clients[i].send(pack(t, m))
			if i%50 == 49 { // a socket's queue is not endless
				eventually(t, "all wait", func() bool { return s.Stats().Coalesced == uint64(i) })
			}
		}
		release()
		for i, c := range clients {
			m := unpack(t, c.receive())
			wantText(t, m, "x")
			if m.Id != sent[i].Id || m.Question[0].Name != sent[i].Question[0].Name {
				t.Fatalf("client %d: %v", i, m)
			}
		}
		if p.udp.Load() != 1 || s.Stats().Loops != 0 {
			t.Errorf("%d queries to the upstream, %d loops", p.udp.Load(), s.Stats().Loops)
		}
		if len(s.flights.m) != 0 {
			t.Errorf("left over: %v", s.flights.m)
		}
	}
}

// TestDifferentQueriesAreAskedEach: what differs in anything that an answer depends on, or carries what is one client's own.
func TestDifferentQueriesAreAskedEach(t *testing.T) {
	edit := func(f func(m *dns.Msg)) *dns.Msg {
		m := query("www.x.cluster.local.", true)
		f(m)
		return m
	}
	cookie := func(m *dns.Msg) {
		m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"}}
	}
	subnet := func(m *dns.Msg) {
		m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: []byte{192, 0, 2, 0}}}
	}
	signed := func(m *dns.Msg) { m.SetTsig("key.", dns.HmacSHA256, 300, 0) }
	common := []*dns.Msg{
		query("www.x.cluster.local.", false),
		edit(func(*dns.Msg) {}),
		edit(func(m *dns.Msg) { m.IsEdns0().SetDo() }),
		edit(func(m *dns.Msg) { m.CheckingDisabled = true }),
		edit(func(m *dns.Msg) { m.AuthenticatedData = true }),
		edit(func(m *dns.Msg) { m.RecursionDesired = false }),
		edit(func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeA }),
		edit(func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }),
		edit(func(m *dns.Msg) { m.Question[0].Name = "w2.x.cluster.local." }),
		edit(signed), edit(signed),
	}
	for name, tt := range map[string]struct {
		routes func(...*peer) Routes
		list   []*dns.Msg
	}{
		"external": {external, common},
		// What a cluster's server gets is what the client sent.
		"cluster": {cluster, append(common, edit(cookie), edit(cookie), edit(subnet), edit(subnet),
			edit(func(m *dns.Msg) { m.IsEdns0().SetUDPSize(600) }))},
	} {
		t.Run(name, func(t *testing.T) {
			release := make(chan struct{})
			defer close(release)
			p := newPeer(t, held(release))
			s := start(t, tt.routes(p))
			n := 0
			for _, network := range []string{"udp", "tcp"} {
				for _, m := range tt.list {
					m = m.Copy()
					if name == "external" {
						m.Question[0].Name = strings.ReplaceAll(m.Question[0].Name, "cluster.local", "example.org")
					}
					n++
					dial(t, s, network).send(pack(t, m))
					eventually(t, fmt.Sprint("asked for ", m), func() bool { return p.udp.Load()+p.tcp.Load() == int64(n) })
				}
			}
			if c := s.Stats().Coalesced; c != 0 {
				t.Errorf("%d queries were taken for equal ones", c)
			}
		})
	}
}
