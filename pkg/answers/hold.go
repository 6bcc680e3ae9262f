package answers

import (
	"strings"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
)

// holdFor is how long names that a change affects are held: longer than CoreDNS takes to hear of it, and than a query that was asked
// before may be answered.
const holdFor = 6 * time.Second

// hold is what is known of the last change that affected some names.
type hold struct {
	generation uint32
	until      time.Duration
}

// holds are the changes of lately, by the names that they affect: those alone, those and all below them, or all. It is not safe for
// concurrent use.
type holds struct {
	exact, below map[string]hold
	all          hold
}

func newHolds() holds { return holds{exact: make(map[string]hold), below: make(map[string]hold)} }

func (h *holds) add(affected coherence.Affected, now hold) {
	if affected.All {
		h.all = now
	}
	for _, name := range affected.Exact {
		h.exact[name] = now
	}
	for _, name := range affected.Below {
		h.below[name] = now
	}
}

// of returns the newest change that affects a name.
func (h *holds) of(name string) hold {
	newest := h.all
	take := func(other hold, ok bool) {
		if ok && int32(other.generation-newest.generation) > 0 {
			newest = other
		}
	}
	other, ok := h.exact[name]
	take(other, ok)
	for suffix := range suffixes(name) {
		other, ok := h.below[suffix]
		take(other, ok)
	}
	return newest
}

// forget drops those that are over.
func (h *holds) forget(now time.Duration) {
	for _, names := range []map[string]hold{h.exact, h.below} {
		for name, hold := range names {
			if hold.until <= now {
				delete(names, name)
			}
		}
	}
}

// suffixes visits a name, without the dot at the end, and all that it is below.
func suffixes(name string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for yield(name) {
			_, rest, ok := strings.Cut(name, ".")
			if !ok {
				return
			}
			name = rest
		}
	}
}
