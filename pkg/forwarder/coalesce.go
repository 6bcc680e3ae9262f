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

// flight is a query that is with servers.
type flight struct {
	landed chan struct{} // closed when the rest is there
	res    *response
	err    error
}

// coalesce returns ask for queries of which equal ones are asked once. Equal is
// what goes out (the OPT record, as it was made anew, and the flags included);
// each client's own part of the reply is made from the common one. A client
// that asks again, since it has no answer yet, joins its own first query.
func (s *Server) coalesce(ask func(context.Context, *request) (*response, error)) func(context.Context, *request) (*response, error) {
	return func(ctx context.Context, q *request) (*response, error) {
		if !q.shareable {
			return ask(ctx, q)
		}
		key := q.key()
		f, first := s.flights.join(key)
		if first {
			f.res, f.err = ask(ctx, q)
			s.flights.land(key, f)
			return f.res, f.err
		}
		s.counters.coalesced.Add(1)
		select {
		case <-f.landed:
			return f.res, f.err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
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
// and has to make it land.
func (f *flights) join(key flightKey) (_ *flight, first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if out := f.m[key]; out != nil {
		return out, false
	}
	out := &flight{landed: make(chan struct{})}
	if f.m == nil {
		f.m = make(map[flightKey]*flight)
	}
	f.m[key] = out
	return out, true
}

func (f *flights) land(key flightKey, out *flight) {
	f.mu.Lock()
	delete(f.m, key)
	f.mu.Unlock()
	close(out.landed)
}
