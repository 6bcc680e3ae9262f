package forwarder

import (
	"crypto/rand"
	"errors"
	"hash/maphash"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/zap"
)

// loopWarning is how often a loop is worth a line in the log.
const loopWarning = time.Minute

// errLoop is how a server fails that forwards to us.
var errLoop = errors.New("forwards to this host")

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
		remedy = "cluster DNS forwards to this host: let its Corefile forward to the host's upstream servers, such as those in kubelet-resolv.conf"
	}
	s.log.Warn("a query came back, answered SERVFAIL", zap.String("qname", loop.Name), zap.Stringer("from", loop.From), zap.String("remedy", remedy))
}

// loopGuard knows the questions that are with a server at the moment, to
// notice one that comes back. It is safe for concurrent use.
//
// Two signs are looked for. A redirect on the way returns the very packet, from
// the socket that we sent it from. A server that forwards to us asks, from its
// own address, what it was just asked. Once, that may be a program beside it, so
// the query is sent to it: if it is a loop, it comes back at once. Where the
// address is also that of honest clients of ours (both ends on one host), neither
// is to be seen. Such a query waits for the one that went out, as any equal one
// does, so that a loop can't grow; and a server that stays silent then is sent a
// name that only this Server answers: if that comes here, it is a loop. How many
// ask the same is no sign, and neither is an equal ID: of many honest queries for
// one name, some have one in use upstream.
type loopGuard struct {
	seed  maphash.Seed
	local func(a netip.Addr) bool // a is an address of this host

	mu     sync.Mutex
	out    map[loopKey]int
	once   map[loopKey]bool // servers that have asked us what they were asked
	doubt  map[uint64]bool  // questions that are out and were asked from this host meanwhile
	marked map[string]bool  // names sent to servers in doubt; whether they have come here
}

// loopKey is a question with the address that it may come back from: that of
// our socket, that of the server with port 0, or none.
type loopKey struct {
	question uint64
	from     netip.AddrPort
}

func newLoopGuard(local func(netip.Addr) bool) *loopGuard {
	return &loopGuard{seed: maphash.MakeSeed(), local: local, out: make(map[loopKey]int), once: make(map[loopKey]bool), doubt: make(map[uint64]bool), marked: make(map[string]bool)}
}

// hash identifies a question: name without regard to case, type, class.
func (g *loopGuard) hash(q *question) uint64 {
	h := maphash.Bytes(g.seed, q.name())
	return h ^ uint64(q.qtype)<<16 ^ uint64(q.qclass)
}

func loopKeys(question uint64, socket netip.AddrPort, server netip.Addr) [3]loopKey {
	return [3]loopKey{
		{question, socket},
		{question, netip.AddrPortFrom(server, 0)},
		{question, netip.AddrPort{}},
	}
}

// leaves notes that a question goes from a socket of ours to a server. The
// returned keys are for back.
func (g *loopGuard) leaves(question uint64, socket netip.AddrPort, server netip.Addr) [3]loopKey {
	keys := loopKeys(question, plain(socket), server.WithZone(""))
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, k := range keys {
		g.out[k]++
	}
	return keys
}

// back undoes leaves, once the server is not waited for any more.
func (g *loopGuard) back(keys [3]loopKey) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, k := range keys {
		if g.out[k]--; g.out[k] == 0 {
			delete(g.out, k)
			delete(g.once, k)
		}
	}
	if q := keys[2]; g.out[q] == 0 {
		delete(g.doubt, q.question)
	}
}

// comesBack reports whether a query is one that went out from here. If that is open, since its server asks us for the first time, the query
// must be asked by itself, and not wait for the one that is out.
func (g *loopGuard) comesBack(question uint64, from netip.AddrPort) (back, open bool) {
	from = plain(from)
	keys := loopKeys(question, from, from.Addr())
	local := g.local(from.Addr())
	g.mu.Lock()
	defer g.mu.Unlock()
	if local && g.out[keys[2]] > 0 {
		g.doubt[question] = true
	}
	server := keys[1]
	switch {
	case g.out[keys[0]] > 0:
		return true, false
	case local || g.out[server] == 0:
		return false, false
	case g.once[server]:
		return true, false
	}
	g.once[server] = true
	return false, true
}

// mark returns a query for a name of this Server's own, for a server that was
// asked a question in doubt; nil if there is no doubt. The name is to be given
// to unmark.
func (g *loopGuard) mark(question uint64) (name string, query []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.doubt[question] {
		return "", nil
	}
	q := new(dns.Msg).SetQuestion(strings.ToLower(rand.Text())+"."+ProbeZone, dns.TypeTXT)
	query, err := q.Pack()
	if err != nil {
		return "", nil
	}
	name = q.Question[0].Name
	g.marked[name] = false
	return name, query
}

// unmark ends the wait for a marked name.
func (g *loopGuard) unmark(name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.marked, name)
}

// markCame notes that a name of this Server's own was asked for here.
func (g *loopGuard) markCame(name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.marked[name]; ok {
		g.marked[name] = true
	}
}

// isLoop reports whether a marked name has come here.
func (g *loopGuard) isLoop(name string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.marked[name]
}

// plain returns addr without the details in which two spellings of it differ.
func plain(addr netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(addr.Addr().Unmap().WithZone(""), addr.Port())
}
