package forwarder

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// Routes is one complete routing table; SetRoutes switches to it atomically.
type Routes struct {
	// Zones maps a cluster zone (any spelling, trailing dot optional) to the
	// servers that answer it. The longest zone that matches on label
	// boundaries, without regard to case, wins. Queries are spread over a
	// zone's servers. A zone with no servers is answered SERVFAIL at once and
	// never goes to Upstreams.
	Zones map[string][]netip.AddrPort

	// TCP says where a server of Zones is asked over TCP, if that is not where it
	// is asked over UDP.
	TCP map[netip.AddrPort]netip.AddrPort

	// Unserved says why a zone has no servers, for error replies; empty if there is
	// no more to say.
	Unserved string

	// Upstreams are the upstream servers of the host, in order of preference.
	// IPv6 zone ids (fe80::1%eth0) are kept and dialled.
	Upstreams []netip.AddrPort

	// Forbidden servers, none of those above, are not asked any more by queries in
	// flight on the old table either: another host may have their address now.
	Forbidden []netip.AddrPort

	// Timeout and Attempts are those of resolv.conf(5), by which the stub
	// resolvers of the clients go: no server is given up sooner than they give
	// up. Rotate spreads queries over Upstreams. 0 means DefaultTimeout and
	// DefaultAttempts.
	Timeout  time.Duration
	Attempts int
	Rotate   bool
}

// SetRoutes replaces the routing table. Queries in flight end on the old one.
// The health of servers that stay is kept. It is safe for concurrent use,
// before or after Listen. On an error the old table stays.
func (s *Server) SetRoutes(r Routes) error {
	s.routesMu.Lock()
	defer s.routesMu.Unlock()
	if r.Timeout < 0 || r.Attempts < 0 {
		return errors.New("set routes: negative timeout or attempts")
	}
	old := s.routes.Load()
	t, err := newTable(r, s.ownAddrs(), old, &s.policy)
	if err != nil {
		return fmt.Errorf("set routes: %w", err)
	}
	for _, u := range t.known {
		u.forbidden.Store(false)
	}
	s.routes.Store(t)
	if old == nil {
		return nil
	}
	if !slices.Equal(old.upstreams.servers, t.upstreams.servers) {
		s.cache.flush() // others may say something else
	}
	for _, addr := range r.Forbidden {
		if u := old.known[unmap(addr)]; u != nil && t.known[u.addr] == nil {
			u.forbidden.Store(true)
		}
	}
	return nil
}

// table is a Routes in the form that queries need. It is immutable. A nil
// table has no routes.
type table struct {
	zones     map[string]*group // by name in lower-case wire format
	unserved  string
	upstreams *group
	known     map[netip.AddrPort]*upstream
	pace      pace
}

// group is a set of servers that answer the same names.
type group struct {
	zone    string // in text, "" for upstreams
	servers []*upstream

	// spread says to start at another server each time instead of in order.
	spread bool
	turn   atomic.Uint32
}

// hasMoreThan reports whether there is a server that old has not.
func (g *group) hasMoreThan(old *group) bool {
	return slices.ContainsFunc(g.servers, func(u *upstream) bool { return !slices.Contains(old.servers, u) })
}

func newTable(r Routes, own []netip.AddrPort, old *table, policy *healthPolicy) (*table, error) {
	t := &table{
		zones:    make(map[string]*group, len(r.Zones)),
		unserved: r.Unserved,
		known:    make(map[netip.AddrPort]*upstream),
		pace:     newPace(r.Timeout, r.Attempts),
	}
	var previous []netip.AddrPort // as a rule all zones have the same servers
	var servers []*upstream
	newGroup := func(zone string, addrs []netip.AddrPort) (*group, error) {
		g := &group{zone: zone, spread: zone != "" || r.Rotate}
		if slices.Equal(addrs, previous) {
			g.servers = servers
			return g, nil
		}
		for _, addr := range addrs {
			u, err := t.upstream(addr, r.TCP[addr], own, old, policy)
			if err != nil {
				return nil, err
			}
			if !slices.Contains(g.servers, u) {
				g.servers = append(g.servers, u)
			}
		}
		previous, servers = addrs, g.servers
		return g, nil
	}

	for name, addrs := range r.Zones {
		wire, err := zoneName(name)
		if err != nil {
			return nil, fmt.Errorf("zone %q: %w", name, err)
		}
		if t.zones[wire] != nil {
			return nil, fmt.Errorf("zone %q: given twice", name)
		}
		text, _, _ := dns.UnpackDomainName([]byte(wire), 0) // zoneName packed it
		if t.zones[wire], err = newGroup(text[:len(text)-1], addrs); err != nil {
			return nil, fmt.Errorf("zone %q: %w", name, err)
		}
	}
	var err error
	if t.upstreams, err = newGroup("", r.Upstreams); err != nil {
		return nil, fmt.Errorf("upstreams: %w", err)
	}
	return t, nil
}

// upstream returns the one object for addr, so that its health is shared by
// all groups and outlives a change of routes.
func (t *table) upstream(addr, tcp netip.AddrPort, own []netip.AddrPort, old *table, policy *healthPolicy) (*upstream, error) {
	addr = unmap(addr)
	if !tcp.IsValid() {
		tcp = addr
	}
	switch {
	case !addr.IsValid() || addr.Port() == 0 || addr.Addr().IsUnspecified():
		return nil, fmt.Errorf("server %v: not an address and port", addr)
	case slices.Contains(own, addr):
		return nil, fmt.Errorf("server %v: %w", addr, ErrOwnAddress)
	}
	u := t.known[addr]
	if u == nil && old != nil {
		u = old.known[addr]
	}
	if u == nil || u.tcp != tcp {
		u = newUpstream(addr, policy)
		u.tcp = tcp
	}
	t.known[addr] = u
	return u, nil
}

// lookup returns the servers for a name in lower-case wire format, and whether
// they are those of a cluster zone. It compares whole labels: at each step the
// rest of the name starts with a length byte.
func (t *table) lookup(name []byte) (g *group, inZone bool) {
	if t == nil {
		return nil, false
	}
	for off := 0; off < len(name) && name[off] != 0; off += 1 + int(name[off]) {
		if g := t.zones[string(name[off:])]; g != nil {
			return g, true
		}
	}
	return t.upstreams, false
}

// zoneName returns name in lower-case wire format.
func zoneName(name string) (string, error) {
	name = dns.Fqdn(name)
	if name == "." {
		return "", errors.New("the root would take every name")
	}
	buf := make([]byte, maxNameLen+1)
	n, err := dns.PackDomainName(name, buf, 0, nil, false)
	if err != nil || n > maxNameLen {
		return "", errors.New("not a domain name")
	}
	lower(buf, buf[:n])
	return string(buf[:n]), nil
}

func unmap(addr netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
}
