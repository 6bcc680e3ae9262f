package forwarder

import (
	"cmp"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"
)

// Stats is a snapshot of a Server's counters, which only grow, and gauges.
type Stats struct {
	UDPQueries uint64 // messages received by UDP, of any kind
	TCPQueries uint64 // messages received by TCP, of any kind

	Cluster  uint64 // queries routed to a cluster zone
	External uint64 // queries routed to the upstreams

	Failures  uint64 // SERVFAIL made here
	Refused   uint64 // over the limit of queries in flight, or too long
	Malformed uint64 // no proper query: ignored, FORMERR or NOTIMP
	Loops     uint64 // queries of our own that came back, also counted as Failures
	LastLoop  *Loop  // the last of them, nil if there was none

	Cached       uint64 // queries that were answered with what upstream servers said before
	Coalesced    uint64 // queries that were answered with an equal one
	Retries      uint64 // further servers, or further tries, for a query
	TCPFallbacks uint64 // truncated replies that were asked for again by TCP

	ConnsClosed uint64 // TCP connections that had to make room
	Forbidden   uint64 // packets and connections of clients outside SetPermitted

	InFlight int // gauge: queries being answered now
	Conns    int // gauge: open TCP connections of clients

	Upstreams []UpstreamStats // the servers of the present routes, by address
}

// UpstreamStats describes one server that queries go to.
type UpstreamStats struct {
	Addr     netip.AddrPort
	Healthy  bool      // false: put aside after failures in a row
	Queries  uint64    // client queries that it was asked
	Failures uint64    // of these, without an answer in good time
	Heard    time.Time // when it last replied, zero if never
}

type counters struct {
	udp, tcp          atomic.Uint64
	cluster, external atomic.Uint64
	failures, refused atomic.Uint64
	malformed, loops  atomic.Uint64
	coalesced, cached atomic.Uint64
	retries           atomic.Uint64
	tcpFallbacks      atomic.Uint64
	connsClosed       atomic.Uint64
	forbidden         atomic.Uint64
}

// Stats returns the present counters. It is safe for concurrent use.
func (s *Server) Stats() Stats {
	c := &s.counters
	st := Stats{
		UDPQueries:   c.udp.Load(),
		TCPQueries:   c.tcp.Load(),
		Cluster:      c.cluster.Load(),
		External:     c.external.Load(),
		Failures:     c.failures.Load(),
		Refused:      c.refused.Load(),
		Malformed:    c.malformed.Load(),
		Loops:        c.loops.Load(),
		LastLoop:     s.lastLoop.Load(),
		Cached:       c.cached.Load(),
		Coalesced:    c.coalesced.Load(),
		Retries:      c.retries.Load(),
		TCPFallbacks: c.tcpFallbacks.Load(),
		ConnsClosed:  c.connsClosed.Load(),
		Forbidden:    c.forbidden.Load(),
		InFlight:     s.inFlight.inUse(),
	}
	s.mu.Lock()
	st.Conns = len(s.conns)
	s.mu.Unlock()
	if t := s.routes.Load(); t != nil {
		for addr, u := range t.known {
			u.mu.Lock()
			healthy, heard := !u.aside, u.heard
			u.mu.Unlock()
			st.Upstreams = append(st.Upstreams, UpstreamStats{
				Addr:     addr,
				Healthy:  healthy,
				Queries:  u.queries.Load(),
				Failures: u.failures.Load(),
				Heard:    heard,
			})
		}
	}
	slices.SortFunc(st.Upstreams, func(a, b UpstreamStats) int {
		return cmp.Or(a.Addr.Addr().Compare(b.Addr.Addr()), cmp.Compare(a.Addr.Port(), b.Addr.Port()))
	})
	return st
}
