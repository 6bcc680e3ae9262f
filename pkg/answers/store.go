package answers

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// Bounds on how long an answer may be given, beside its own TTL.
const (
	// unvouchedLife is for cluster names of which nobody says that they have changed.
	unvouchedLife = 5 * time.Second
)

const (
	// refreshAt is the part of its life, in percent, at which an answer that was used is asked for anew.
	refreshAt = 90
	// refreshesMax bounds the queries of the store itself that are under way.
	refreshesMax = 64
	// negativeShare is the part of the room that negative answers may have: one in so many.
	negativeShare = 4
	// sampled is how many answers are looked at to find one that can go.
	sampled = 16
)

// Kernel is where the kernel programs look answers up.
type Kernel interface {
	// Put makes the programs give an answer. Without room for it ok is false.
	Put(answer *ready.Answer, given Given) (ok bool, err error)
	// Drop makes them forget it.
	Drop(key ready.Key) error
	// Uses is about how often it was given since the last call, and never 0 if it was.
	Uses(key ready.Key) uint64
	// Switch says whether they answer, and which generation queries are marked with from now on.
	Switch(on bool, generation uint32) error
}

// Given says where and for how long an answer may be given.
type Given struct {
	Stored  time.Duration // on the store's clock: when its source gave it
	Life    time.Duration
	Cluster bool // of a cluster zone: for whoever asks; without this daemon it is worthless. Else for who asks this host's resolver
	// OPTSize is the UDP payload size in the OPT record, in octets. Zero repeats the asker's.
	OPTSize uint16
}

// Options are what a Store needs. All but Log are required.
type Options struct {
	Kernel Kernel
	// Now reads a monotonic clock, that of Given.
	Now func() time.Duration
	// Ask asks the source of a name anew, and returns its reply, nil for none.
	Ask func(ctx context.Context, query []byte) []byte
	// Entries is how many answers there may be, and Small of how many octets one is that has a place for small ones.
	Entries, Small int
	Limits         ready.Limits
	Log            *zap.Logger
}

// Zone is a cluster zone, or part of one, and what may be kept of it.
type Zone struct {
	Name   string // lower case, without a dot at the end
	Source string // what answers for it: another one ends all that is kept
	Off    string // why nothing is kept of it, empty if something may be
	// Unvouched says that answers come from what no watched object tells of, too.
	Unvouched bool
}

// Store decides what the kernel programs answer. Its methods may be called from several goroutines.
type Store struct {
	options Options
	asking  sync.WaitGroup // queries of its own

	mu         sync.Mutex
	on         bool
	external   string // whose answers those to names outside of the zones are, empty if none are kept
	zones      []Zone
	state      *coherence.State
	generation uint32
	flushed    uint32 // the generation of the last Flush
	holds      holds
	entries    map[ready.Key]*entry
	below      map[string]map[ready.Key]struct{} // by each name that a name is, or is below of
	negative   int
	popular    *sketch[ready.Key]
	due        timetable
	asked      map[ready.Key]struct{} // what is being asked for
	counters   counters
}

// entry is an answer that the kernel gives.
type entry struct {
	answer  *ready.Answer
	given   Given
	name    string // lower case, without the dot at the end
	zone    string // empty for a name outside of all
	uses    uint64
	renewed int  // times that it was asked for anew
	used    bool // since then
}

func (e *entry) end() time.Duration { return e.given.Stored + e.given.Life }

// refresh is when the answer is looked at again, before its end.
func (e *entry) refresh() time.Duration { return e.given.Stored + e.given.Life*refreshAt/100 }

// New returns an empty Store, which is off.
func New(options Options) *Store {
	if options.Log == nil {
		options.Log = zap.NewNop()
	}
	return &Store{
		options: options, holds: newHolds(), asked: make(map[ready.Key]struct{}),
		entries: make(map[ready.Key]*entry), below: make(map[string]map[ready.Key]struct{}),
		popular: newSketch[ready.Key](options.Entries), counters: newCounters(),
	}
}

// Switch turns the cache on or off. Off, it is empty.
func (s *Store) Switch(on bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.on = on
	err := s.options.Kernel.Switch(on, s.generation)
	for key, e := range s.entries {
		if !on {
			s.drop(key, e)
		}
	}
	return err
}

// SetExternal says whose answers those to names outside of the cluster's zones are. Those of others end. Empty, none are kept.
func (s *Store) SetExternal(source string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.external == source {
		return
	}
	s.external = source
	for key, e := range s.entries {
		if e.zone == "" {
			s.drop(key, e)
		}
	}
}

// SetZones replaces the zones. What is kept of one that has changed ends.
func (s *Store) SetZones(zones []Zone) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Equal(s.zones, zones) {
		return
	}
	changed := func(name string) bool {
		return !slices.Equal(zonesNamed(s.zones, name), zonesNamed(zones, name))
	}
	var affected coherence.Affected
	for _, zone := range slices.Concat(s.zones, zones) {
		if changed(zone.Name) {
			affected.Below = append(affected.Below, zone.Name)
		}
	}
	s.zones = slices.Clone(zones)
	s.forget(affected)
}

func zonesNamed(zones []Zone, name string) (named []Zone) {
	for _, zone := range zones {
		if zone.Name == name {
			named = append(named, zone)
		}
	}
	return named
}

// SetState replaces what the API is known to say: all that was known before is worth nothing. While it is not in step, or nil, answers
// of the cluster's zones live for some seconds only.
func (s *Store) SetState(state *coherence.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == state {
		return
	}
	s.state = state
	s.forget(coherence.Affected{All: true})
}

// Change notes a change of the cluster in a State. If it is the one that is in use, what the change can have made wrong ends now.
func (s *Store) Change(state *coherence.State, change cluster.Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	affected := state.Apply(change)
	if s.state != state {
		return
	}
	if affected.All || len(affected.Below) > 0 || len(affected.Exact) > 0 {
		s.forget(affected)
	}
}

// forget ends all that is affected. The generation comes first: a query that is marked with it was asked afterwards.
func (s *Store) forget(affected coherence.Affected) {
	s.generation++
	if err := s.options.Kernel.Switch(s.on, s.generation); err != nil {
		s.options.Log.Error("answers from the kernel: the generation was not written, so nothing is kept", zap.Error(err))
		affected = coherence.Affected{All: true}
	}
	s.holds.add(affected, hold{s.generation, s.options.Now() + holdFor})
	for key, e := range s.affected(affected) {
		s.drop(key, e)
		s.counters.ended++
	}
}

// affected visits the answers of affected names.
func (s *Store) affected(affected coherence.Affected) func(yield func(ready.Key, *entry) bool) {
	return func(yield func(ready.Key, *entry) bool) {
		if affected.All {
			for key, e := range s.entries {
				if e.zone != "" && !yield(key, e) {
					return
				}
			}
			return
		}
		for _, name := range affected.Below {
			for key := range s.below[name] {
				if !yield(key, s.entries[key]) {
					return
				}
			}
		}
		for _, name := range affected.Exact {
			for key := range s.below[name] {
				if e := s.entries[key]; e.name == name && !yield(key, e) {
					return
				}
			}
		}
	}
}

// ForgetCluster ends all answers of the cluster's zones: others answer for them now.
func (s *Store) ForgetCluster() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(coherence.Affected{All: true})
}

// Flush ends all answers of a name, and of those below it; of all names for "". It returns how many.
func (s *Store) Flush(suffix string) (dropped int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	suffix = strings.ToLower(strings.TrimSuffix(suffix, "."))
	s.forget(coherence.Affected{})
	s.flushed = s.generation // what was asked before is not taken in again
	for key, e := range s.entries {
		if _, below := s.below[suffix][key]; below || suffix == "" {
			s.drop(key, e)
			dropped++
		}
	}
	return dropped
}

// drop is called with mu held.
func (s *Store) drop(key ready.Key, e *entry) {
	if err := s.options.Kernel.Drop(key); err != nil {
		s.options.Log.Error("an answer could not be taken out of the kernel's index; it is not given any more", zap.String("name", e.name), zap.Error(err))
	}
	s.unlist(key, e)
}

func (s *Store) unlist(key ready.Key, e *entry) {
	delete(s.entries, key)
	if e.answer.Negative {
		s.negative--
	}
	for suffix := range suffixes(e.name) {
		delete(s.below[suffix], key)
		if len(s.below[suffix]) == 0 {
			delete(s.below, suffix)
		}
	}
}
