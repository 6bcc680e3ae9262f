package forwarder

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/sample"
)

func wire(t testing.TB, name string) []byte {
	t.Helper()
	buf := make([]byte, 300)
	n, err := dns.PackDomainName(dns.Fqdn(name), buf, 0, nil, false)
	if err != nil {
		t.Fatalf("%q: %v", name, err)
	}
	lower(buf, buf[:n])
	return buf[:n]
}

func testTable(t testing.TB) *table {
	t.Helper()
	a := netip.MustParseAddrPort("192.0.2.1:53")
	tab, err := newTable(Routes{
		Zones: map[string][]netip.AddrPort{
			"Cluster.LOCAL.":           {a},
			"sub.cluster.local":        {a},
			"21.172.in-addr.arpa":      nil,
			"8.b.d.0.1.0.0.2.ip6.arpa": {a},
		},
	}, nil, nil, &healthPolicy{})
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

func TestLookup(t *testing.T) {
	tab := testTable(t)
	long := strings.Repeat("a.", 120) + "cluster.local"
	tests := []struct{ name, zone string }{
		{"cluster.local", "cluster.local"},
		{"svc.cluster.local", "cluster.local"},
		{"a.b.cluster.local", "cluster.local"},
		{"kUbErNeTeS.DeFaUlT.sVc.ClUsTeR.LoCaL", "cluster.local"},
		{strings.Repeat("x", 63) + ".cluster.local", "cluster.local"},
		{long, "cluster.local"},
		{"sub.cluster.local", "sub.cluster.local"},
		{"x.SUB.cluster.local", "sub.cluster.local"},
		{"xsub.cluster.local", "cluster.local"},
		{"1.0.21.172.in-addr.arpa", "21.172.in-addr.arpa"},
		{"121.172.in-addr.arpa", ""},
		{"1.8.b.d.0.1.0.0.2.ip6.arpa", "8.b.d.0.1.0.0.2.ip6.arpa"},

		{"notcluster.local", ""},
		{"xcluster.local", ""},
		{"my-cluster.local", ""},
		{"cluster.localx", ""},
		{"cluster.local.example.com", ""},
		{"local", ""},
		{"cluster", ""},
		{".", ""},
		{`cluster\.local`, ""},                // one label
		{`\007cluster\005local`, ""},          // one label with the zone's bytes
		{`x\007cluster\005local.example`, ""}, // the same elsewhere
		{`a.\007cluster\005local\000`, ""},    // with the root's byte too
		{`cluster\000.local`, ""},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%.40s", tt.name), func(t *testing.T) {
			g, in := tab.lookup(wire(t, tt.name))
			if in != (tt.zone != "") || g.zone != tt.zone {
				t.Errorf("zone %q (%v), want %q", g.zone, in, tt.zone)
			}
		})
	}
}

// TestLookupRandom compares with miekg/dns on names that are near misses.
func TestLookupRandom(t *testing.T) {
	tab := testTable(t)
	rng := sample.Random(t)
	parts := []string{"cluster", "local", "Cluster", "LOCAL", "sub", "x", "cluster\\.local", "\\007cluster\\005local", "xcluster", "arpa", "in-addr", "172", "21"}
	for range 20000 {
		labels := make([]string, rng.IntN(6))
		for i := range labels {
			labels[i] = parts[rng.IntN(len(parts))]
		}
		name := dns.Fqdn(strings.Join(labels, "."))
		want := ""
		for _, z := range []string{"cluster.local", "21.172.in-addr.arpa", "sub.cluster.local"} { // longest last
			if dns.IsSubDomain(z+".", name) {
				want = z
			}
		}
		if g, _ := tab.lookup(wire(t, name)); g.zone != want {
			t.Fatalf("%q is in zone %q, want %q", name, g.zone, want)
		}
	}
}

func TestSetRoutesErrors(t *testing.T) {
	listen := netip.MustParseAddrPort("127.0.0.1:53")
	s, err := New(Options{Listen: []netip.AddrPort{listen}})
	if err != nil {
		t.Fatal(err)
	}
	good := netip.MustParseAddrPort("192.0.2.1:53")
	tests := []struct {
		name   string
		routes Routes
		want   string
	}{
		{"own address upstream", Routes{Upstreams: []netip.AddrPort{good, listen}}, "would forward to itself"},
		{"own address mapped", Routes{Upstreams: []netip.AddrPort{netip.MustParseAddrPort("[::ffff:127.0.0.1]:53")}}, "would forward to itself"},
		{"own address in zone", Routes{Zones: map[string][]netip.AddrPort{"cluster.local": {listen}}}, "would forward to itself"},
		{"zero address", Routes{Upstreams: []netip.AddrPort{{}}}, "not an address and port"},
		{"port 0", Routes{Upstreams: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:0")}}, "not an address and port"},
		{"unspecified", Routes{Upstreams: []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:53")}}, "not an address and port"},
		{"root zone", Routes{Zones: map[string][]netip.AddrPort{".": {good}}}, "root"},
		{"empty zone", Routes{Zones: map[string][]netip.AddrPort{"": {good}}}, "root"},
		{"bad zone", Routes{Zones: map[string][]netip.AddrPort{"a..b": {good}}}, "not a domain name"},
		{"twice", Routes{Zones: map[string][]netip.AddrPort{"a.b": {good}, "A.b.": {good}}}, "given twice"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := s.SetRoutes(tt.routes)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error %v, want one with %q", err, tt.want)
			}
		})
	}
	if err := s.SetRoutes(Routes{Upstreams: []netip.AddrPort{listen}}); !errors.Is(err, ErrOwnAddress) {
		t.Errorf("error %v is not ErrOwnAddress", err)
	}
	if s.routes.Load() != nil {
		t.Error("a refused table is in use")
	}
}

func TestSetRoutesKeepsHealth(t *testing.T) {
	s := start(t, Routes{Upstreams: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:53")}})
	first := s.routes.Load().upstreams.servers[0]
	if err := s.SetRoutes(Routes{Upstreams: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.2:53"), first.addr, first.addr}}); err != nil {
		t.Fatal(err)
	}
	servers := s.routes.Load().upstreams.servers
	if len(servers) != 2 || servers[1] != first {
		t.Error("the server that stayed is not the same object, once")
	}
}

func TestZoneIDIsKept(t *testing.T) {
	addr := netip.MustParseAddrPort("[fe80::1%eth0]:53")
	u := newUpstream(addr, &healthPolicy{})
	if u.udpAddr.Zone != "eth0" || u.addr != addr {
		t.Errorf("dials %v for %v", u.udpAddr, addr)
	}
}

// A zone's server may go while it is asked, and another come: as in a rollout with one replica.
func TestRoutesChangeMeanwhile(t *testing.T) {
	for _, network := range []string{"udp", "tcp"} {
		t.Run(network, func(t *testing.T) {
			after := newPeer(t, answerTXT("after"))
			started := make(chan *Server, 1)
			before := newPeer(t, func(q *peerQuery) {
				s := <-started
				started <- s
				if err := s.SetRoutes(cluster(after)); err != nil {
					t.Error(err)
				}
			})
			s := startTuned(t, cluster(before), func(s *Server) { s.routes.Load().pace.whole = 200 * time.Millisecond })
			started <- s
			r := dial(t, s, network).askMsg(query("x.cluster.local.", true))
			if r.Rcode != dns.RcodeSuccess {
				t.Fatalf("failed:\n%v", r)
			}
			wantText(t, r, "after")
		})
	}
}

// TestManyZones: zones with the same servers share them, so that a change costs what there is, not zones times servers squared.
func TestManyZones(t *testing.T) {
	r := Routes{Zones: make(map[string][]netip.AddrPort)}
	var servers []netip.AddrPort
	for i := range 1000 {
		servers = append(servers, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, byte(i / 250), byte(i%250 + 1)}), 53))
	}
	for i := range 2000 {
		r.Zones[fmt.Sprintf("z%d.test", i)] = servers
	}
	table, err := newTable(r, nil, nil, new(healthPolicy))
	if err != nil {
		t.Fatal(err)
	}
	var first *group
	for _, g := range table.zones {
		if first == nil {
			first = g
		}
		if len(g.servers) != len(servers) || &g.servers[0] != &first.servers[0] {
			t.Fatalf("zone %s has %d servers of its own", g.zone, len(g.servers))
		}
	}
}

// TestForbidden: a query that is in flight on the old routes does not turn to a server that must not be asked any more.
func TestForbidden(t *testing.T) {
	asked := make(chan struct{}, 1)
	first, second := newPeer(t, func(*peerQuery) {
		select {
		case asked <- struct{}{}:
		default:
		}
	}), newPeer(t, answerTXT("another host"))
	routes := external(first, second)
	routes.Timeout, routes.Attempts = time.Second, 1
	s := start(t, routes)
	c := dial(t, s, "udp")
	c.send(pack(t, query("www.example.org.", true)))
	<-asked
	third := newPeer(t, answerTXT("well"))
	now := external(third)
	now.Forbidden = routes.Upstreams
	if err := s.SetRoutes(now); err != nil {
		t.Fatal(err)
	}
	wantRcode(t, unpack(t, c.receive()), dns.RcodeServerFailure)
	wantText(t, ask(t, s, "www.example.org."), "well")
	// It may come back.
	if err := s.SetRoutes(external(second)); err != nil {
		t.Fatal(err)
	}
	wantText(t, ask(t, s, "www.example.org."), "another host")
}
