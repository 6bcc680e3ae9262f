package answers

import (
	"container/heap"
	"context"
	"slices"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
)

// tick is how often the store looks at its clock: often enough that an answer of one second is asked for anew before its end.
const tick = 50 * time.Millisecond

// timetable says when which answer is to be looked at. It is not safe for concurrent use.
type timetable struct{ items appointments }

type appointment struct {
	at  time.Duration
	key ready.Key
	e   *entry
}

func (t *timetable) add(at time.Duration, key ready.Key, e *entry) {
	heap.Push(&t.items, appointment{at, key, e})
}

// next takes out what is due.
func (t *timetable) next(now time.Duration) (a appointment, ok bool) {
	if len(t.items) == 0 || t.items[0].at > now {
		return a, false
	}
	return heap.Pop(&t.items).(appointment), true
}

// keep drops what nobody waits for any more.
func (t *timetable) keep(wanted func(appointment) bool) {
	t.items = slices.DeleteFunc(t.items, func(a appointment) bool { return !wanted(a) })
	heap.Init(&t.items)
}

// appointments is a heap, the next one first.
type appointments []appointment

func (a appointments) Len() int           { return len(a) }
func (a appointments) Less(i, j int) bool { return a[i].at < a[j].at }
func (a appointments) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }
func (a *appointments) Push(x any)        { *a = append(*a, x.(appointment)) }
func (a *appointments) Pop() any {
	last := len(*a) - 1
	x := (*a)[last]
	*a = (*a)[:last]
	return x
}

// Run ends and refreshes answers at their time, until ctx ends.
func (s *Store) Run(ctx context.Context) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	defer s.asking.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			s.Tick(ctx)
		}
	}
}

// Tick does what is due: an answer that was used is asked for anew some time before its end, once; at its end it goes.
func (s *Store) Tick(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.options.Now()
	for {
		due, ok := s.due.next(now)
		if !ok {
			break
		}
		if s.entries[due.key] != due.e {
			continue // another one is in its place
		}
		if now >= due.e.end() {
			s.drop(due.key, due.e)
			s.counters.expired++
			continue
		}
		s.due.add(due.e.end(), due.key, due.e)
		if s.harvest(due.key, due.e); due.e.used {
			s.ask(ctx, due.key, due.e.zone == "", due.e.given.Life)
		}
	}
	s.holds.forget(now)
}

// ask asks the source of a name and takes in its reply, unless that is being done. With too much under way nothing is asked: the answer
// ends then, and is learned again.
func (s *Store) ask(ctx context.Context, key ready.Key, external bool, patience time.Duration) {
	query := key.Query()
	q, ok := ready.ParseQuery(query)
	if _, asked := s.asked[key]; asked || !ok || len(s.asked) >= refreshesMax {
		return
	}
	s.asked[key] = struct{}{}
	offer := Offer{Query: q, Generation: s.generation, own: true}
	ctx, cancel := context.WithTimeout(ctx, patience)
	s.asking.Go(func() {
		defer cancel()
		// An external answer comes by OfferExternal.
		if offer.Reply = s.options.Ask(ctx, query); offer.Reply != nil && !external {
			offer.Replied = s.options.Now()
			s.Offer(offer)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.asked, key)
		s.counters.asked++
	})
}
