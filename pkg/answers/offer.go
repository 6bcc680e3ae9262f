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

// Offer is a reply that was given to who asked, from a source that was asked for it.
type Offer struct {
	Query      ready.Query
	Reply      []byte
	Replied    time.Duration // on the store's clock
	Generation uint32        // when it was asked
	// External replies are of this host's resolver, for a name outside of the cluster's zones.
	External bool

	own bool // the store has asked
}

// Offer takes a reply in if the rules are for it. It must have been asked for more than once lately.
func (s *Store) Offer(o Offer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if refusal := s.take(o); refusal != "" {
		s.counters.refused[refusal]++
		return
	}
	s.counters.stored++
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
	if o.External && !o.own && s.on {
		s.popular.add(o.Query.Key, 1)
		if s.popular.estimate(o.Query.Key) < 2 && s.entries[o.Query.Key] == nil {
			return refusedOnce // the kernel offers none of these
		}
	}
	name := o.Query.Text()
	zone, inZone := s.zoneOf(name)
	switch {
	case !s.on, o.External == inZone, o.External && s.external == "", inZone && zone.Off != "":
		return refusedZone
	}
	if inZone {
		s.popular.add(o.Query.Key, 1)
	}
	apex, optSize := zone.Name+".", uint16(0)
	if o.External {
		apex, optSize = ".", resolverSize
	}
	answer, refusal := ready.Make(&o.Query, o.Reply, apex, s.options.Limits)
	if refusal == ready.Spelling && !o.own {
		s.ask(context.Background(), o.Query.Key, o.External, unvouchedLife)
	}
	if refusal != "" {
		return refusal
	}
	given := Given{Stored: o.Replied, Life: time.Duration(answer.Life) * time.Second, Cluster: inZone, OPTSize: optSize}
	if inZone {
		vouched, refusal := s.judge(name, answer, o.Generation)
		if refusal != "" {
			return refusal
		}
		if !vouched || zone.Unvouched {
			given.Life = min(given.Life, unvouchedLife)
		}
	} else if answer.Negative {
		given.Life = min(given.Life, negativeLife)
	}
	given.Life = min(given.Life, externalLife)
	if given.Stored+given.Life <= s.options.Now() {
		return refusedLate
	}
	return s.put(name, zone.Name, answer, given)
}

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
		if answer.Negative && s.negative >= s.options.Entries/negativeShare {
			return refusedNegative
		}
		if len(s.entries) >= s.options.Entries && !s.makeRoom(answer.Key, nil) {
			return refusedUnpopular
		}
	}
	ok, err := s.options.Kernel.Put(answer, given)
	if err == nil && !ok {
		if !s.makeRoom(answer.Key, answer) {
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

// makeRoom ends an answer that is asked for less often than a new one, as far as is known. With like only one of its size is any good.
func (s *Store) makeRoom(candidate ready.Key, like *ready.Answer) bool {
	var victim ready.Key
	least, seen := s.popular.estimate(candidate), 0
	var found *entry
	for key, e := range s.entries { // in no order: a sample
		if key == candidate || like != nil && s.isSmall(e.answer) != s.isSmall(like) {
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
