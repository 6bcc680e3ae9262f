package forwarder

import (
	"context"
	"sync"
)

// flights are the queries that are with servers, so that an equal one waits for
// the answer of the first and is not asked again. It is safe for concurrent use.
type flights struct {
	mu sync.Mutex
	m  map[flightKey]*flight
}

// flightKey is all of a query that its answer depends on.
type flightKey struct {
	servers *group
	tcp     bool
	msg     string // without ID, name in lower case
}

// flight is a query that is with servers. All but res and err is guarded by
// flights.mu.
type flight struct {
	waiting int           // who wants the answer
	gone    chan struct{} // closed when nobody does
	landed  chan struct{} // closed when res and err are there
	res     *response
	err     error
}

// coalesce asks the servers of q, for all who ask the same at that time. The
// same is what goes out (the OPT record, as it was made anew, and the flags
// included); each client's own part of the reply is made from the common one. A
// client that asks again, since it has no answer yet, joins its own first query.
func (s *Server) coalesce(ctx context.Context, q *request) (*response, error) {
	var key flightKey
	if q.shareable {
		key = q.key()
	}
	f, first := s.flights.join(key)
	if first {
		together := *q
		together.gone = f.gone
		r := s.exchange(ctx, &together)
		if r.finished {
			f.res, f.err = r.end()
			s.flights.land(key, f)
			return f.res, f.err
		}
		s.wg.Go(func() {
			f.res, f.err = r.run(ctx)
			s.flights.land(key, f)
		})
	} else {
		s.counters.coalesced.Add(1)
	}
	select {
	case <-f.landed:
		return f.res, f.err
	case <-q.gone:
		s.flights.leave(key, f)
		return nil, errEvicted
	}
}

func (q *request) key() flightKey {
	msg := make([]byte, 0, bufferSize)
	msg = append(msg, q.msg[2:headerLen]...)
	msg = append(msg, q.question.name()...)
	msg = append(msg, q.msg[q.question.end-4:]...)
	return flightKey{servers: q.servers, tcp: q.tcp, msg: string(msg)}
}

// join returns the flight of a key, and whether the caller is the first in it
// and has to make it land. The zero key is nobody else's.
func (f *flights) join(key flightKey) (_ *flight, first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if out := f.m[key]; out != nil {
		out.waiting++
		return out, false
	}
	out := &flight{waiting: 1, gone: make(chan struct{}), landed: make(chan struct{})}
	if key != (flightKey{}) {
		if f.m == nil {
			f.m = make(map[flightKey]*flight)
		}
		f.m[key] = out
	}
	return out, true
}

// leave is called by a waiter that gives up. After the last one the
// next that asks the same is the first again.
func (f *flights) leave(key flightKey, out *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if out.waiting--; out.waiting == 0 {
		f.forget(key, out)
		close(out.gone)
	}
}

func (f *flights) land(key flightKey, out *flight) {
	f.mu.Lock()
	f.forget(key, out)
	f.mu.Unlock()
	close(out.landed)
}

// forget is called with mu held.
func (f *flights) forget(key flightKey, out *flight) {
	if f.m[key] == out {
		delete(f.m, key)
	}
}
