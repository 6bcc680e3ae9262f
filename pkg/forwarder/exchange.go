package forwarder

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/zap"
)

// errBadReply is a reply to our question that can't be read to its end.
var errBadReply = errors.New("malformed reply")

// rounds is how often each server is asked for one query at most. The second
// time makes up for a lost packet.
const rounds = 2

// response is an accepted reply of a server.
type response struct {
	msg  []byte // in buf
	recs records
	buf  *[]byte
}

// release gives the buffer back. msg must not be used any more.
func (r *response) release() { putBuffer(r.buf) }

// rank tells how good a reply is. Less than rankFinal is a reply that another
// server may better: stub resolvers turn to their next server for these too.
func (r *response) rank() int {
	if r.recs.hasOPT && r.recs.opt.extRcode != 0 {
		return rankFinal
	}
	switch headerRcode(r.msg) {
	case dns.RcodeRefused:
		return 1
	case dns.RcodeNotImplemented:
		return 2
	case dns.RcodeServerFailure:
		return 3
	default:
		return rankFinal
	}
}

const rankFinal = 4

// deadShare is the part of Options.Timeout that is spent on servers of which
// none has answered lately: a client is better off with an early SERVFAIL.
const deadShare = 4

// exchange asks the servers of g, in order, and returns the best reply. It
// turns to the next server when one fails or says that it failed; when one is
// silent for longer than its wait, the next is asked as well and the first
// good reply wins. So a dead server costs its wait, not a timeout.
func (s *Server) exchange(ctx context.Context, g *group, out *outgoing) (*response, error) {
	order, alive := g.order(time.Now(), s.probe)
	timeout := s.opts.Timeout
	if !alive {
		timeout /= deadShare
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel() // ends the tries that lost

	r := &race{s: s, out: out, order: order}
	r.sent = make([]time.Time, len(r.order))
	r.errs = make([]error, len(r.order))
	r.results = make(chan result, rounds*len(r.order)) // no try ever blocks on it
	r.timer = time.NewTimer(0)
	defer r.timer.Stop()
	return r.run(ctx)
}

// race is one exchange: tries that overlap, and what came of them.
type race struct {
	s       *Server
	out     *outgoing
	order   []*upstream
	sent    []time.Time // per server: when it was asked last
	errs    []error     // per server: how its last try failed
	results chan result
	timer   *time.Timer

	started int // tries so far
	pending int // of these, without a result
	struck  int // value of started when a server was last found silent
	best    *response
}

// result is the end of one try, of the server with that index in the order.
type result struct {
	server int
	res    *response
	err    error
}

func (r *race) run(ctx context.Context) (*response, error) {
	r.next(ctx)
	for {
		select {
		case got := <-r.results:
			r.pending--
			if got.err != nil {
				r.errs[got.server] = got.err
			} else if r.keep(got.res); r.best.rank() == rankFinal {
				return r.best, nil
			}
			if r.started < len(r.order) {
				r.next(ctx)
			} else if r.pending == 0 {
				return r.end()
			}
		case <-r.timer.C:
			if r.best != nil && r.started >= len(r.order) {
				return r.end() // all were asked: a silent one is not worth the client's time
			}
			if r.started > r.struck {
				last := (r.started - 1) % len(r.order)
				if errors.Is(r.errs[last], errTimeout) { // nothing worse was heard of it
					r.s.strike(r.order[last], r.sent[last], errTimeout)
				}
				r.struck = r.started
			}
			if r.started < rounds*len(r.order) {
				r.next(ctx)
			} else {
				r.timer.Reset(r.s.policy.patience)
			}
		case <-ctx.Done():
			return r.end()
		}
	}
}

// next starts a try of the next server.
func (r *race) next(ctx context.Context) {
	i := r.started % len(r.order)
	u := r.order[i]
	if r.started > 0 {
		r.s.counters.retries.Add(1)
	}
	r.started++
	r.pending++
	r.sent[i] = time.Now()
	r.errs[i] = errTimeout
	r.timer.Reset(u.wait())
	r.s.wg.Go(func() {
		res, err := r.s.try(ctx, u, r.out)
		r.results <- result{server: i, res: res, err: err}
	})
}

// keep remembers the better one of res and what there was before.
func (r *race) keep(res *response) {
	switch {
	case r.best == nil:
		r.best = res
	case res.rank() > r.best.rank():
		r.best.release()
		r.best = res
	default:
		res.release()
	}
}

// end returns the best reply, or says how each server failed.
func (r *race) end() (*response, error) {
	if r.best != nil {
		return r.best, nil
	}
	e := &exchangeError{}
	for i, u := range r.order {
		if r.errs[i] != nil {
			e.errs = append(e.errs, fmt.Errorf("%v %w", u.addr, r.errs[i]))
		}
	}
	return nil, e
}

// exchangeError says in one line how each server failed.
type exchangeError struct{ errs []error }

func (e *exchangeError) Error() string {
	var b strings.Builder
	for i, err := range e.errs {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(err.Error())
	}
	return b.String()
}

func (e *exchangeError) Unwrap() []error { return e.errs }

// try asks one server once and keeps its health up to date.
func (s *Server) try(ctx context.Context, u *upstream, out *outgoing) (*response, error) {
	u.queries.Add(1)
	sent := time.Now()
	res, err := s.ask(ctx, u, out)
	switch {
	case err == nil || errors.Is(err, errBadReply):
		u.answered()
	case ctx.Err() == nil && !isOurFault(err): // silence is for the race to judge
		s.strike(u, sent, shorten(err))
	}
	if err != nil {
		if ce := s.log.Check(zap.DebugLevel, "upstream failed"); ce != nil {
			ce.Write(zap.Stringer("upstream", u.addr), zap.String("qname", out.question.text()), zap.String("reason", err.Error()))
		}
		return nil, shorten(err)
	}
	return res, nil
}

// strike notes a failure of u, and tells when it puts u aside.
func (s *Server) strike(u *upstream, sent time.Time, reason error) {
	if u.strike(sent) {
		s.log.Warn("upstream put aside", zap.Stringer("upstream", u.addr), zap.NamedError("reason", reason))
	}
}

// isOurFault reports whether err says that this host has run out of something.
func isOurFault(err error) bool {
	for _, ours := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL} {
		if errors.Is(err, ours) {
			return true
		}
	}
	return false
}

// ask mirrors the client's transport. A truncated reply to an external query
// is asked for again by TCP; if that fails it is better than none. That of a
// cluster's server is what the client would have got directly, and the size
// asked for is the client's, so it is handed on.
func (s *Server) ask(ctx context.Context, u *upstream, out *outgoing) (*response, error) {
	if out.tcp {
		return s.askTCP(ctx, u, out)
	}
	res, err := s.askUDP(ctx, u, out)
	if err != nil || flags(res.msg)&flagTC == 0 || out.passThrough {
		return res, err
	}
	s.counters.tcpFallbacks.Add(1)
	u.answered()
	whole, err := s.askTCP(ctx, u, out)
	if err != nil {
		return res, nil
	}
	res.release()
	return whole, nil
}

// probe asks a server that was put aside for the root's name servers, in the
// background; any reply brings it back.
func (s *Server) probe(u *upstream) {
	s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(s.probeCtx, s.opts.Timeout/2)
		defer cancel()
		u.queries.Add(1)
		res, err := s.askUDP(ctx, u, newProbe(s.loops))
		if err != nil {
			u.failures.Add(1)
			u.probeFailed()
			return
		}
		res.release()
		u.answered()
		s.log.Info("upstream answers again", zap.Stringer("upstream", u.addr))
	})
}

var errTimeout = errors.New("timeout")

// shorten cuts a network error down to its cause: the rest is about sockets of
// ours that are closed already.
func shorten(err error) error {
	var timeout interface{ Timeout() bool }
	var errno syscall.Errno
	switch {
	case errors.As(err, &timeout) && timeout.Timeout():
		return errTimeout
	case errors.As(err, &errno):
		return errno
	default:
		return err
	}
}
