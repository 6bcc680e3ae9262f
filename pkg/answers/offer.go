package answers

import (
	"context"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
)

// Refusals of the store, beside those of package ready.
const (
	refusedZone      ready.Refusal = "zone"      // of no zone that is kept
	refusedStale     ready.Refusal = "stale"     // asked before a change that may have made it wrong
	refusedHeld      ready.Refusal = "held"      // after such a change: the source may not know of it yet
	refusedUnpopular ready.Refusal = "unpopular" // there is no room, and others are asked for more often
	refusedNegative  ready.Refusal = "negative"  // there are enough negative ones
	refusedOnce      ready.Refusal = "once"      // not asked for again yet
	refusedLate      ready.Refusal = "late"      // its end is over already
)

// Offer is a reply of a server that answers for cluster zones, which was given to who asked.
type Offer struct {
	Query      ready.Query
	Reply      []byte
	Replied    time.Duration // on the store's clock
	Generation uint32        // when it was asked

	own bool // the store has asked
}

// Offer takes a reply in if the rules are for it. It must have been asked for more than once lately.
func (s *Store) Offer(o Offer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count(s.take(o))
}

// count notes what became of what was offered. It is called with mu held.
func (s *Store) count(refusal ready.Refusal) {
	if refusal != "" {
		s.counters.refused[refusal]++
		return
	}
	s.counters.stored++
}

// External is an answer of this host's resolver, for a name outside of the cluster's zones.
type External struct {
	*ready.Answer
	Age, Life time.Duration
	// Current reports whether the resolver would still say so, but for the time.
	Current func() bool
}

// OfferExternal takes in what the resolver keeps, at its second use. It may be called at each use.
func (s *Store) OfferExternal(o External) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.entries[o.Key]; old != nil && old.answer == o.Answer {
		return
	}
	s.count(s.takeExternal(o))
}

func (s *Store) takeExternal(o External) ready.Refusal {
	if !s.on || s.external == "" {
		return refusedZone
	}
	s.popular.add(o.Key, 1)
	if s.popular.estimate(o.Key) < 2 && s.entries[o.Key] == nil {
		return refusedOnce // the kernel offers none of these
	}
	name := o.Text()
	if _, found := s.zoneOf(name); found || !o.Current() {
		return refusedZone
	}
	if !o.Fits(s.options.Limits) {
		return ready.Large
	}
	return s.put(name, "", o.Answer, Given{Stored: s.options.Now() - o.Age, Life: o.Life, OPTSize: resolverSize})
}

// OfferRaw is Offer for a reply to a query of which only the question, as it is in the reply, and these bits are known.
func (s *Store) OfferRaw(asked ready.Asked, reply []byte, replied time.Duration, generation uint32) {
	key, ok := ready.ReplyKey(reply, asked)
	if !ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.counters.refused[ready.Malformed]++
		return
	}
	s.Offer(Offer{Query: ready.Query{Key: key}, Reply: reply, Replied: replied, Generation: generation})
}

func (s *Store) take(o Offer) ready.Refusal {
	name := o.Query.Text()
	zone, inZone := s.zoneOf(name)
	now := s.options.Now()
	switch {
	case !s.on, !inZone, zone.Off != "":
		return refusedZone
	case now-o.Replied > offerLate:
		return refusedLate
	case int32(o.Generation-s.flushed) < 0:
		return refusedStale
	}
	s.popular.add(o.Query.Key, 1)
	answer, refusal := ready.Make(&o.Query, o.Reply, zone.Name+".", s.options.Limits)
	if refusal == ready.Spelling && !o.own && s.holds.of(name).until <= now {
		s.ask(context.Background(), o.Query.Key, false, unvouchedLife)
	}
	if refusal != "" {
		return refusal
	}
	given := Given{Stored: o.Replied, Life: time.Duration(answer.Life) * time.Second, Cluster: true}
	vouched, refusal := s.judge(name, answer, o.Generation)
	if refusal != "" {
		return refusal
	}
	if !vouched || zone.Unvouched {
		given.Life = min(given.Life, unvouchedLife)
	}
	if given.Stored+given.Life <= now {
		return refusedLate
	}
	return s.put(name, zone.Name, answer, given)
}

// offerLate is how old a reply may be that is offered: holdFor counts on it.
const offerLate = time.Second

const typeA = 1 // RFC 1035 section 3.2.2

// resolverSize is the UDP payload size that this host's resolver tells, in octets.
const resolverSize = 1232

// zoneOf returns the longest zone that a name is in.
func (s *Store) zoneOf(name string) (zone Zone, ok bool) {
	for suffix := range suffixes(name) {
		if i := slices.IndexFunc(s.zones, func(z Zone) bool { return z.Name == suffix }); i >= 0 {
			return s.zones[i], true
		}
	}
	if i := slices.IndexFunc(s.zones, func(z Zone) bool { return z.Name == "" }); i >= 0 {
		return s.zones[i], true
	}
	return Zone{}, false
}

// judge compares an answer of a cluster zone with what is known of the cluster. It is vouched for if a change of it will be told.
func (s *Store) judge(name string, answer *ready.Answer, generation uint32) (vouched bool, _ ready.Refusal) {
	held := s.holds.of(name)
	if held.until > s.options.Now() && int32(generation-held.generation) < 0 {
		return false, refusedStale
	}
	if s.state == nil || !s.state.Synced() {
		return false, ""
	}
	expected, known := s.state.Expect(name, answer.Type)
	agrees := known && agree(answer, expected)
	if held.until > s.options.Now() && !agrees {
		return false, refusedHeld
	}
	if known {
		return agrees && !expected.NoName, ""
	}
	return !answer.Negative && s.isOfService(name), ""
}

// isOfService reports whether a name is a Service's, or below one, so that changes of it are told.
func (s *Store) isOfService(name string) bool {
	labels := strings.Split(name, ".")
	at := slices.Index(labels, "svc")
	if at < 2 {
		// The name of an address leads to Services only, which changes tell of.
		return strings.HasSuffix(name, ".in-addr.arpa") || strings.HasSuffix(name, ".ip6.arpa")
	}
	expected, known := s.state.Expect(strings.Join(labels[at-2:], "."), typeA)
	return known && !expected.NoName
}

// put gives an answer to the kernel, in place of one that is asked for less often if there is no room.
func (s *Store) put(name, zone string, answer *ready.Answer, given Given) ready.Refusal {
	old := s.entries[answer.Key]
	if old == nil {
		if negative := func(a *ready.Answer) bool { return a.Negative }; answer.Negative && s.negative >= s.options.Entries/negativeShare &&
			!s.makeRoom(answer.Key, negative) {
			return refusedNegative
		}
		if len(s.entries) >= s.options.Entries && !s.makeRoom(answer.Key, func(*ready.Answer) bool { return true }) {
			return refusedUnpopular
		}
	}
	ok, err := s.options.Kernel.Put(answer, given)
	if err == nil && !ok {
		if !s.makeRoom(answer.Key, func(a *ready.Answer) bool { return s.isSmall(a) == s.isSmall(answer) }) {
			return refusedUnpopular
		}
		ok, err = s.options.Kernel.Put(answer, given)
	}
	if err != nil {
		s.options.Log.Error("an answer could not be given to the kernel", zap.String("name", name), zap.Error(err))
	}
	if err != nil || !ok {
		if old != nil {
			s.drop(answer.Key, old)
		}
		return refusedUnpopular
	}
	e := &entry{answer: answer, given: given, name: name, zone: zone}
	if old != nil {
		e.uses, e.renewed = old.uses, old.renewed+1
		s.unlist(answer.Key, old)
	}
	s.entries[answer.Key] = e
	if answer.Negative {
		s.negative++
	}
	for suffix := range suffixes(name) {
		if s.below[suffix] == nil {
			s.below[suffix] = make(map[ready.Key]struct{})
		}
		s.below[suffix][answer.Key] = struct{}{}
	}
	s.due.add(e.refresh(), answer.Key, e)
	if len(s.due.items) > 4*s.options.Entries { // those of answers that went before their end stay there otherwise, for a day perhaps
		s.due.keep(func(a appointment) bool { return s.entries[a.key] == a.e })
	}
	return ""
}

// makeRoom ends an answer that is asked for less often than a new one, as far as is known, of those that are any good.
func (s *Store) makeRoom(candidate ready.Key, good func(*ready.Answer) bool) bool {
	var victim ready.Key
	least, seen := s.popular.estimate(candidate), 0
	var found *entry
	for key, e := range s.entries { // in no order: a sample
		if key == candidate || !good(e.answer) {
			continue
		}
		s.harvest(key, e)
		if estimate := s.popular.estimate(key); estimate < least {
			least, victim, found = estimate, key, e
		}
		if seen++; seen == sampled {
			break
		}
	}
	if found == nil {
		return false
	}
	s.drop(victim, found)
	s.counters.displaced++
	return true
}

func (s *Store) isSmall(a *ready.Answer) bool { return a.Octets() <= s.options.Small }

// harvest takes over how often an answer was given, and returns that.
func (s *Store) harvest(key ready.Key, e *entry) uint64 {
	uses := s.options.Kernel.Uses(key)
	if uses > 0 {
		e.uses += uses
		e.used = true
		s.popular.add(key, uses)
	}
	return uses
}
