package forwarder

import (
	"bytes"
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
)

// Bounds of the cache of upstream servers' answers.
const (
	cacheOctets = 16 << 20        // of all answers together
	cacheLife   = 24 * time.Hour  // however long a TTL is (RFC 8767 section 4)
	cacheNone   = 5 * time.Minute // of names and types that do not exist (RFC 2308 section 5)
	cacheRenew  = 90              // percent of its life at which an answer that is used is asked for anew
	entryOctets = 256             // beside the answer itself
)

// answerCache keeps what upstream servers have answered, by the rules of package ready: what a query is answered with depends on its
// question and on what it asked beside. It is safe for concurrent use.
type answerCache struct {
	on    atomic.Bool
	off   atomic.Pointer[[]string] // zones of which nothing is kept, each with a dot before it
	epoch atomic.Uint64            // of the upstream servers
	kept  *otter.Cache[ready.Key, *cachedAnswer]
	now   func() time.Time
}

type cachedAnswer struct {
	*ready.Answer
	stored  time.Time
	life    time.Duration
	renewed atomic.Bool // it was asked for anew
	turns   atomic.Uint32
}

func newAnswerCache() *answerCache {
	c := &answerCache{now: time.Now, kept: otter.Must(&otter.Options[ready.Key, *cachedAnswer]{
		MaximumWeight: cacheOctets,
		// What is asked often is known from the beginning, not from when half of the room is taken.
		InitialCapacity: cacheOctets / entryOctets,
		Weigher:         func(key ready.Key, a *cachedAnswer) uint32 { return uint32(len(key.Name) + a.Octets() + entryOctets) },
	})}
	c.off.Store(new([]string))
	return c
}

// flush forgets all answers, those of queries that are under way too.
func (c *answerCache) flush() {
	c.epoch.Add(1)
	c.kept.InvalidateAll()
}

// SetCache says whether answers of upstream servers are kept, but for names that are in one of these zones. It may be called at any time.
func (s *Server) SetCache(on bool, not ...string) {
	off := make([]string, len(not))
	for i, zone := range not {
		off[i] = "." + strings.ToLower(strings.Trim(zone, "."))
	}
	old := s.cache.off.Swap(&off)
	if was := s.cache.on.Swap(on); was && (!on || !slices.Equal(*old, off)) {
		s.cache.flush()
	}
}

// excludes reports whether a name, without its dot at the end, is in a zone of which nothing is kept.
func (c *answerCache) excludes(name string) bool {
	return slices.ContainsFunc(*c.off.Load(), func(zone string) bool { return zone == "." || strings.HasSuffix("."+name, zone) })
}

// Flush forgets the answers of a name and of those below it, all for "", and returns how many.
func (s *Server) Flush(suffix string) (dropped int) {
	zone := "." + strings.ToLower(strings.Trim(suffix, "."))
	s.cache.epoch.Add(1)
	for key := range s.cache.kept.Keys() {
		if zone == "." || strings.HasSuffix("."+key.Text(), zone) {
			s.cache.kept.Invalidate(key)
			dropped++
		}
	}
	return dropped
}

// fromCache answers a query for a name outside of the cluster zones, or returns nil. An answer that is in use is asked for anew some time
// before its end, once.
func (s *Server) fromCache(c *clientQuery) []byte {
	if !s.cache.on.Load() {
		return nil
	}
	q, ok := ready.ParseQuery(c.raw)
	if !ok {
		return nil
	}
	epoch := s.cache.epoch.Load()
	a, ok := s.cache.kept.GetIfPresent(q.Key)
	if !ok {
		return nil
	}
	age := s.cache.now().Sub(a.stored)
	if age >= a.life {
		s.cache.kept.Invalidate(q.Key)
		return nil
	}
	if _, inZone := s.routes.Load().lookup([]byte(q.Name)); inZone {
		return nil
	}
	if age >= a.life*cacheRenew/100 && a.renewed.CompareAndSwap(false, true) {
		s.renew(a, c.from.Addr())
	}
	s.counters.cached.Add(1)
	s.counters.external.Add(1)
	limit := maxMessage
	if !c.tcp {
		limit = min(q.Limit(), maxUDPSize) // see sizeLimit
	}
	size := len(c.raw) + a.Octets() + optFixedLen
	reply := a.Reply(make([]byte, 0, size), c.raw, &q, age, a.turns.Add(1), limit, maxUDPSize)
	s.tell(a, age, epoch)
	return reply
}

// KeptAnswer is an answer of the cache.
type KeptAnswer struct {
	*ready.Answer
	Age  time.Duration // since its server gave it
	Life time.Duration // of which that is a part
	// Current reports whether the servers are still those that gave it, and nobody has flushed the cache since.
	Current func() bool
}

// tell hands on an answer that is as old, and was kept at an epoch.
func (s *Server) tell(a *cachedAnswer, age time.Duration, epoch uint64) {
	if s.opts.Kept != nil {
		s.opts.Kept(KeptAnswer{a.Answer, age, a.life, func() bool { return s.cache.epoch.Load() == epoch && s.cache.on.Load() }})
	}
}

// renew asks the upstream servers anew for an answer that is about to end, in a place of its asker's.
func (s *Server) renew(a *cachedAnswer, asker netip.Addr) {
	gone := make(chan struct{})
	place := s.inFlight.take(asker, 1, func() { close(gone) })
	s.wg.Go(func() {
		defer s.inFlight.giveBack(place)
		s.resolveFor(s.queryCtx, a.Query(), gone)
	})
}

// keep takes in what an upstream server has answered. epoch is that of when it was asked.
func (s *Server) keep(raw []byte, res *response, epoch uint64) {
	if !s.cache.on.Load() {
		return
	}
	q, ok := ready.ParseQuery(raw)
	if !ok || s.cache.excludes(q.Text()) {
		return
	}
	msg := res.msg
	if count(msg, sectionQuestion) == 1 {
		msg = bytes.Clone(msg)
		copy(msg[headerLen:], q.Name) // its first asker's spelling is for nobody else
	}
	a, refusal := ready.Make(&q, msg, ".", ready.Limits{Octets: maxMessage, Records: maxMessage})
	if refusal != "" || epoch != s.cache.epoch.Load() {
		return
	}
	life := min(time.Duration(a.Life)*time.Second, cacheLife)
	if a.Negative {
		life = min(life, cacheNone)
	}
	kept := &cachedAnswer{Answer: a, stored: s.cache.now(), life: life}
	s.cache.kept.Set(q.Key, kept)
	if epoch != s.cache.epoch.Load() { // a flush has come in between
		s.cache.kept.Invalidate(q.Key)
	}
	s.tell(kept, 0, epoch)
}

// Resolve answers a query of this program itself as one that a client on this host sends by UDP, but by asking in any case. Nil means no
// answer.
func (s *Server) Resolve(ctx context.Context, query []byte) []byte {
	return s.resolveFor(ctx, query, nil)
}

// resolveFor does so until gone is closed.
func (s *Server) resolveFor(ctx context.Context, query []byte, gone <-chan struct{}) []byte {
	return s.handle(ctx, &clientQuery{raw: query, from: netip.AddrPortFrom(netip.IPv6Loopback(), 0), gone: gone})
}
