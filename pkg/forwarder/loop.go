package forwarder

import (
	"hash/maphash"
	"net/netip"
	"sync"
)

// loopGuard knows the questions that are with a server at the moment, to
// notice one that comes back. It is safe for concurrent use.
//
// Three signs are looked for. A redirect on the way returns the very message:
// same ID, same question. A server that forwards to us asks, from its own
// address, what it was just asked. And where neither is to be told from an
// honest client (both ends on one host), the number of equal questions is
// bounded, so that a loop can't grow without limit.
type loopGuard struct {
	seed  maphash.Seed
	limit int                     // equal questions with servers at a time
	local func(a netip.Addr) bool // a is an address of this host

	mu  sync.Mutex
	out map[loopKey]int
}

type loopKey struct {
	question uint64
	id       int32      // -1 in the keys that are not about the ID
	addr     netip.Addr // of the server, zero in the keys that are not about it
}

func newLoopGuard(limit int, local func(netip.Addr) bool) *loopGuard {
	return &loopGuard{seed: maphash.MakeSeed(), limit: limit, local: local, out: make(map[loopKey]int)}
}

// hash identifies a question: name without regard to case, type, class.
func (g *loopGuard) hash(q *question) uint64 {
	h := maphash.Bytes(g.seed, q.name())
	return h ^ uint64(q.qtype)<<16 ^ uint64(q.qclass)
}

func loopKeys(question uint64, id uint16, server netip.Addr) [3]loopKey {
	return [3]loopKey{
		{question: question, id: int32(id)},
		{question: question, id: -1, addr: server.WithZone("")},
		{question: question, id: -1},
	}
}

// leaves notes that a question goes to a server under the given ID. The
// returned keys are for back.
func (g *loopGuard) leaves(question uint64, id uint16, server netip.Addr) [3]loopKey {
	keys := loopKeys(question, id, server)
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
		}
	}
}

// comesBack reports whether a query is one that went out from here.
func (g *loopGuard) comesBack(question uint64, id uint16, from netip.Addr) bool {
	from = from.Unmap().WithZone("")
	keys := loopKeys(question, id, from)
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.out[keys[0]] > 0 ||
		g.out[keys[1]] > 0 && !g.local(from) ||
		g.out[keys[2]] >= g.limit
}
