package forwarder

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"time"

	"go.uber.org/zap"
)

// loopWarning is how often a loop is worth a line in the log.
const loopWarning = time.Minute

// Loop is a query of our own that came back to us.
type Loop struct {
	At   time.Time
	From netip.Addr // who asked us
	Name string     // as in a question, with the final dot
	Zone string     // the cluster zone of the name, "" for none
}

// noteLoop counts a query that came back. The first of them, and then one in a
// while, is worth a warning that says what to do.
func (s *Server) noteLoop(c *clientQuery) {
	s.counters.loops.Add(1)
	loop := &Loop{At: time.Now(), From: c.from.Addr().Unmap().WithZone(""), Name: c.question.text(), Zone: c.zone}
	s.lastLoop.Store(loop)
	warned, now := s.loopWarned.Load(), loop.At.UnixNano()
	if now-warned < int64(loopWarning) || !s.loopWarned.CompareAndSwap(warned, now) {
		return
	}
	remedy := "an upstream forwards to this host: name other servers with --upstream"
	if c.zone != "" {
		remedy = "cluster DNS forwards to this host: let its Corefile forward to the host's former servers, such as those in kubelet-resolv.conf"
	}
	s.log.Warn("a query came back, answered SERVFAIL", zap.String("qname", loop.Name), zap.Stringer("from", loop.From), zap.String("remedy", remedy))
}

// loopGuard knows the questions that are with a server at the moment, to
// notice one that comes back. It is safe for concurrent use.
//
// Two signs are looked for. A redirect on the way returns the very packet, from
// the socket that we sent it from. A server that forwards to us asks, from its
// own address, what it was just asked. Where that is also the address of honest
// clients (both ends on one host), neither is to be seen: such a query waits for
// the one that went out, as any equal one does, so that a loop can't grow. How
// many ask the same is no sign, and neither is an equal ID: of many honest
// queries for one name, some have an ID that is in use upstream.
type loopGuard struct {
	seed  maphash.Seed
	local func(a netip.Addr) bool // a is an address of this host

	mu  sync.Mutex
	out map[loopKey]int
}

// loopKey is a question with the address that it may come back from: that of
// our socket, or that of the server with port 0.
type loopKey struct {
	question uint64
	from     netip.AddrPort
}

func newLoopGuard(local func(netip.Addr) bool) *loopGuard {
	return &loopGuard{seed: maphash.MakeSeed(), local: local, out: make(map[loopKey]int)}
}

// hash identifies a question: name without regard to case, type, class.
func (g *loopGuard) hash(q *question) uint64 {
	h := maphash.Bytes(g.seed, q.name())
	return h ^ uint64(q.qtype)<<16 ^ uint64(q.qclass)
}

func loopKeys(question uint64, socket netip.AddrPort, server netip.Addr) [2]loopKey {
	return [2]loopKey{
		{question, socket},
		{question, netip.AddrPortFrom(server, 0)},
	}
}

// leaves notes that a question goes from a socket of ours to a server. The
// returned keys are for back.
func (g *loopGuard) leaves(question uint64, socket netip.AddrPort, server netip.Addr) [2]loopKey {
	keys := loopKeys(question, plain(socket), server.WithZone(""))
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, k := range keys {
		g.out[k]++
	}
	return keys
}

// back undoes leaves, once the server is not waited for any more.
func (g *loopGuard) back(keys [2]loopKey) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, k := range keys {
		if g.out[k]--; g.out[k] == 0 {
			delete(g.out, k)
		}
	}
}

// comesBack reports whether a query is one that went out from here.
func (g *loopGuard) comesBack(question uint64, from netip.AddrPort) bool {
	from = plain(from)
	keys := loopKeys(question, from, from.Addr())
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.out[keys[0]] > 0 ||
		g.out[keys[1]] > 0 && !g.local(from.Addr())
}

// plain returns addr without the details in which two spellings of it differ.
func plain(addr netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(addr.Addr().Unmap().WithZone(""), addr.Port())
}
