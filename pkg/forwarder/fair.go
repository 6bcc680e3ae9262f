package forwarder

import (
	"container/heap"
	"container/list"
	"net/netip"
	"sync"
)

// fair divides what there is a limited number of (queries in flight,
// connections, octets) among those who ask. When there is none left, the source
// that has most gives up its oldest, whoever needs a place: so a flood crowds out
// itself. A part is kept for this host. It is safe for concurrent use.
type fair struct {
	limit  int // of all
	others int // of all but this host
	local  func(netip.Addr) bool

	mu      sync.Mutex
	host    *source
	sources map[netip.Prefix]*source // but for the host
	ranking ranking                  // the same, the one that has most first
	taken   int                      // by all
}

// source is who asks: this host, an IPv4 address, or an IPv6 /64, which one
// machine may have to itself.
type source struct {
	key   netip.Prefix
	taken int
	rank  int        // index in the ranking
	held  *list.List // of *place, the oldest first
}

// place is what one query or connection has taken.
type place struct {
	source *source
	amount int
	evict  func()
	held   *list.Element // nil once it is given back
}

// hostShare is the part of a limit that is kept for this host: one of so many.
const hostShare = 4

func newFair(limit int, local func(netip.Addr) bool) *fair {
	return &fair{
		limit: limit, others: max(1, limit-limit/hostShare), local: local,
		host: &source{held: list.New()}, sources: make(map[netip.Prefix]*source),
	}
}

// take takes an amount, which is at most what others may have in all. evict is
// called, once at most, if it is taken away again before it is given back. The
// callbacks of other places run before take returns.
func (f *fair) take(from netip.Addr, amount int, evict func()) *place {
	f.mu.Lock()
	s := f.source(from)
	var evicted []*place
	for {
		crowded := s != f.host && f.taken-f.host.taken+amount > f.others
		if !crowded && f.taken+amount <= f.limit {
			break
		}
		p := f.greediest(!crowded).held.Front().Value.(*place)
		f.remove(p)
		evicted = append(evicted, p)
	}
	if s != f.host && s.taken == 0 { // also if it was its own last that had to go
		f.sources[s.key] = s
		heap.Push(&f.ranking, s)
	}
	p := &place{source: s, amount: amount, evict: evict}
	p.held = s.held.PushBack(p)
	f.add(s, amount)
	f.mu.Unlock()
	for _, p := range evicted {
		p.evict()
	}
	return p
}

// source is called with mu held.
func (f *fair) source(from netip.Addr) *source {
	from = from.Unmap().WithZone("")
	if f.local(from) {
		return f.host
	}
	bits := 32
	if from.Is6() {
		bits = 64
	}
	key := netip.PrefixFrom(from, bits).Masked()
	if s := f.sources[key]; s != nil {
		return s
	}
	return &source{key: key, held: list.New()}
}

// greediest is called with mu held, and something taken.
func (f *fair) greediest(orHost bool) *source {
	if len(f.ranking) == 0 || orHost && f.host.taken > f.ranking[0].taken {
		return f.host
	}
	return f.ranking[0]
}

// add is called with mu held.
func (f *fair) add(s *source, amount int) {
	f.taken += amount
	s.taken += amount
	if s != f.host {
		heap.Fix(&f.ranking, s.rank)
	}
}

// remove is called with mu held.
func (f *fair) remove(p *place) {
	s := p.source
	s.held.Remove(p.held)
	p.held = nil
	f.add(s, -p.amount)
	if s != f.host && s.taken == 0 {
		heap.Remove(&f.ranking, s.rank)
		delete(f.sources, s.key)
	}
}

// giveBack ends a place, if it was not taken away.
func (f *fair) giveBack(p *place) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.held != nil {
		f.remove(p)
	}
}

// renew makes a place the youngest of its source.
func (f *fair) renew(p *place) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.held != nil {
		p.source.held.MoveToBack(p.held)
	}
}

func (f *fair) inUse() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.taken
}

// ranking is a heap of sources by what they have taken.
type ranking []*source

func (r ranking) Len() int           { return len(r) }
func (r ranking) Less(i, j int) bool { return r[i].taken > r[j].taken }
func (r ranking) Swap(i, j int) {
	r[i], r[j] = r[j], r[i]
	r[i].rank, r[j].rank = i, j
}

func (r *ranking) Push(x any) {
	s := x.(*source)
	s.rank = len(*r)
	*r = append(*r, s)
}

func (r *ranking) Pop() any {
	last := len(*r) - 1
	s := (*r)[last]
	*r = (*r)[:last]
	return s
}
