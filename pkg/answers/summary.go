package answers

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// counters are since the start.
type counters struct {
	stored, asked, expired, ended, displaced uint64
	refused                                  map[ready.Refusal]uint64
}

func newCounters() counters { return counters{refused: make(map[ready.Refusal]uint64)} }

// Summary returns how things stand.
func (s *Store) Summary() status.Cache {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum := status.Cache{
		On: s.on, Coherent: s.state != nil && s.state.Synced(), Entries: len(s.entries), Negative: s.negative, Room: s.options.Entries,
		Stored: s.counters.stored, Asked: s.counters.asked, Expired: s.counters.expired, Ended: s.counters.ended,
		Displaced: s.counters.displaced, Refused: make(map[string]uint64),
	}
	for refusal, count := range s.counters.refused {
		sum.Refused[string(refusal)] = count
	}
	zones := make(map[string]*status.CachedZone)
	for _, zone := range s.zones {
		zones[zone.Name] = &status.CachedZone{Zone: zone.Name, Off: zone.Off}
	}
	for key, e := range s.entries {
		s.harvest(key, e)
		if zones[e.zone] == nil {
			zones[e.zone] = &status.CachedZone{Zone: e.zone}
		}
		zones[e.zone].Entries++
		zones[e.zone].Uses += e.uses
		sum.Octets += e.answer.Octets()
	}
	for _, name := range slices.Sorted(maps.Keys(zones)) {
		sum.Zones = append(sum.Zones, *zones[name])
	}
	return sum
}

// List returns the answers of a name and of those below it, all for "", those that are used most first.
func (s *Store) List(suffix string) []status.CachedAnswer {
	s.mu.Lock()
	defer s.mu.Unlock()
	suffix = strings.ToLower(strings.TrimSuffix(suffix, "."))
	list := []status.CachedAnswer{}
	now := s.options.Now()
	for key, e := range s.entries {
		if _, below := s.below[suffix][key]; suffix != "" && !below {
			continue
		}
		s.harvest(key, e)
		list = append(list, status.CachedAnswer{
			Name: e.name, Type: key.TypeText(), Zone: e.zone, Rcode: e.answer.Rcode(),
			TTL: e.answer.Life, TTLLeft: uint32(max(0, e.end()-now) / time.Second), Uses: e.uses, Why: e.why(),
		})
	}
	slices.SortFunc(list, func(a, b status.CachedAnswer) int {
		return cmp.Or(cmp.Compare(b.Uses, a.Uses), strings.Compare(a.Name, b.Name), strings.Compare(a.Type, b.Type))
	})
	return list
}

// why says why an answer is there, and why it ends when it does.
func (e *entry) why() string {
	why := "asked again"
	if e.renewed > 0 {
		why = "in use"
	}
	if e.given.Cluster && e.given.Life == unvouchedLife && e.answer.Life > uint32(unvouchedLife/time.Second) {
		why += ", for a short time: nobody tells of its changes"
	}
	return why
}
