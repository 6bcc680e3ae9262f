package forwarder

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/errno"
)

// errEvicted is for a query that had to make room for another source's.
var errEvicted = errors.New("too many queries in flight")

// errBadReply is a reply to our question that can't be read to its end.
var errBadReply = errors.New("malformed reply")

// errForbidden is for a server that must not be asked any more.
var errForbidden = errors.New("not to be asked any more")

// request is what is asked of a group of servers.
type request struct {
	*outgoing
	servers *group
	pace    *pace
	gone    <-chan struct{} // closed when nobody waits for the answer any more
}

// response is an accepted reply of a server. It is not changed any more, and
// may be the answer to several clients.
type response struct {
	msg  []byte
	recs records
}

// rank tells how much a reply is worth. Below rankNo it is a failure: a stub
// resolver turns to its next server for it.
type rank int

const (
	rankLame    rank = iota // "ask elsewhere"
	rankRefused             // REFUSED
	rankError               // any other RCODE
	rankFailed              // SERVFAIL
	rankNo                  // there is no such name, or no such record of it
	rankCut                 // an answer, truncated
	rankAnswer
)

func (out *outgoing) rank(res *response) rank {
	msg := res.msg
	if res.recs.hasOPT && res.recs.opt.extRcode != 0 {
		return rankError
	}
	switch headerRcode(msg) {
	case dns.RcodeSuccess:
	case dns.RcodeNameError:
		return rankNo
	case dns.RcodeServerFailure:
		return rankFailed
	case dns.RcodeRefused:
		return rankRefused
	default:
		return rankError
	}
	switch {
	case flags(msg)&flagTC != 0 && !out.passThrough:
		return rankCut
	case count(msg, sectionAnswer) > 0:
		return rankAnswer
	case out.recursive() && !res.recs.hasSOA && flags(msg)&flagAA == 0 && (flags(msg)&flagRA == 0 || res.recs.hasNS):
		// Neither a resolver's nor an authority's word that there is nothing
		// (RFC 2308 section 2.2), but a referral, or less than that.
		return rankLame
	}
	return rankNo
}

// atOnce is how long an answer of the first server is waited for without a
// goroutine of the exchange's own. Most answers come in this time.
const atOnce = 50 * time.Millisecond

// exchange begins to ask the servers of q, in their order, for the best reply,
// with the patience of a stub resolver but in less time. It turns to the next
// server when one fails, and when one is silent for a moment the next is asked
// as well. What is found counts more than that there is nothing, and an earlier
// server's word more than a later one's, as long as a stub would wait for it.
//
// It returns the race when it is over, or has taken a moment; run continues it.
func (s *Server) exchange(ctx context.Context, q *request) *race {
	r := &race{s: s, request: q, begin: time.Now(), leader: -1}
	var alive bool
	r.order, alive = q.servers.order(r.begin)
	r.limit = r.begin.Add(q.pace.whole)
	if !alive && q.servers.zone != "" {
		r.limit = r.begin.Add(q.pace.hopeless)
	}
	c := &r.order[0]
	if moment := min(atOnce, r.wait(c)); moment > 0 && !q.tcp {
		r.begun(c)
		r.first.dialog, r.first.err = r.dial(c.upstream, q.outgoing, true)
		if r.first.err == nil {
			r.first.res, r.first.err = r.first.receive(ctx, c.sent.Add(moment))
		}
		if !errors.Is(r.first.err, errTimeout) {
			if r.first.dialog != nil {
				r.first.close()
			}
			r.health(ctx, c.upstream, c.sent, r.first.err)
			if res := r.first.res; res == nil || !refusesEDNS(res, q.outgoing) && !isCut(res, q.outgoing) {
				r.report(c.upstream, r.first.err)
				r.take(result{res: r.first.res, err: r.first.err})
				_, r.finished = r.wake(time.Now())
			}
		}
	}
	return r
}

// race is one exchange: tries that overlap, one of each server, and what came of them.
type race struct {
	s *Server
	*request
	begin, limit time.Time
	order        []contender
	results      chan result
	timer        *time.Timer
	cancel       context.CancelFunc

	started int       // servers asked so far
	pending int       // of these, without a final result
	leader  int       // index of the server whose reply is best, -1 for none yet
	best    *response // its reply
	rank    rank      // of best
	cameAt  time.Time // when best came

	// first is how far the first server got at once: it is silent yet, or has a
	// reply that is not the end of its try.
	first struct {
		*dialog
		res *response
		err error
	}
	finished bool // end has the outcome already

	tries atomic.Int32 // that run, and 1 until the race is over
	over  atomic.Bool  // nobody waits for results any more
	spare func() bool  // set if tries run on: see leave
}

// contender is a server in a race.
type contender struct {
	*upstream
	standing standing
	sent     time.Time
	pending  bool
	err      error // how its try failed
}

// result is what one try, of the server with that index in the order, has come
// to. A truncated reply is not the end of it: more is true then.
type result struct {
	server int
	res    *response
	err    error
	more   bool
}

// run continues a race until it is finished.
func (r *race) run(ctx context.Context) (*response, error) {
	r.tries.Store(1)                              // the race itself
	r.results = make(chan result, 2*len(r.order)) // no try ever blocks on it
	ctx, r.cancel = context.WithCancel(ctx)
	defer r.leave()
	r.timer = time.NewTimer(0)
	defer r.timer.Stop()
	if r.started == 0 {
		r.next(ctx)
	} else if r.pending > 0 {
		r.try(ctx, 0, true)
	}
	for {
		now := time.Now()
		wake, done := r.wake(now)
		switch {
		case done:
			return r.end()
		case !wake.After(now):
			r.next(ctx)
			continue
		}
		r.timer.Reset(wake.Sub(now))
		select {
		case got := <-r.results:
			r.take(got)
		case <-r.timer.C:
		case <-r.gone:
			return nil, errEvicted
		case <-ctx.Done():
			return r.end()
		}
	}
}

// wake says when there is something to do, unless something comes in before:
// the next server to ask, or, as done says then, the end.
func (r *race) wake(now time.Time) (at time.Time, done bool) {
	at = r.limit
	if r.leader >= 0 && (r.rank >= rankNo || r.started == len(r.order)) {
		at = earlier(at, r.due())
	}
	if !now.Before(at) || r.pending == 0 && r.started == len(r.order) {
		return now, true
	}
	// A word that there is nothing, or an answer, ends the search; but a cut answer may be whole elsewhere.
	if r.started < len(r.order) && (r.leader < 0 || r.rank < rankNo || r.rank == rankCut) {
		next := now
		if r.pending > 0 {
			last := &r.order[r.started-1]
			next = last.sent.Add(r.wait(last))
		}
		if r.rank == rankCut && r.leader >= 0 && r.order[r.leader].pending { // TCP comes first
			next = r.cameAt.Add(r.pace.patience)
		}
		at = earlier(at, next)
	}
	return at, false
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// wait returns how long to wait for a server before the next is asked too.
func (r *race) wait(c *contender) time.Duration {
	switch c.standing {
	case trusted:
		return r.pace.patience
	case onTrial:
		return 0
	}
	return r.pace.headStart
}

// due returns when the best reply is good enough: until then another server's
// may still come that counts more.
func (r *race) due() (at time.Time) {
	if r.rank == rankCut && r.cutMayBecomeWhole() {
		at = r.cameAt.Add(r.pace.tcp)
	}
	for i := range r.order[:r.started] {
		c := &r.order[i]
		var until time.Time
		switch {
		case !c.pending, i == r.leader:
		case r.rank >= rankNo && (i > r.leader || r.servers.zone != ""): // a zone's servers are equals
		case r.rank > rankNo && c.standing == trusted:
			until = c.sent.Add(r.pace.first)
		case r.rank > rankNo:
		case c.standing < onTrial:
			until = c.sent.Add(r.pace.negative)
		default:
			until = c.sent.Add(r.pace.trial)
		}
		if until.After(at) {
			at = until
		}
	}
	return at
}

// cutMayBecomeWhole reports whether somebody is left who may have the whole of
// a truncated answer, by TCP or at all.
func (r *race) cutMayBecomeWhole() bool { return r.pending > 0 || r.started < len(r.order) }

// next starts the try of the next server.
func (r *race) next(ctx context.Context) {
	i, needed := r.started, r.pending == 0
	if i > 0 {
		r.s.counters.retries.Add(1)
	}
	r.begun(&r.order[i])
	r.try(ctx, i, needed)
}

// begun notes that a server is asked, as the next one.
func (r *race) begun(c *contender) {
	r.started++
	r.pending++
	c.sent, c.pending, c.err = time.Now(), true, errTimeout
	c.queries.Add(1)
}

// take notes a result, and keeps the better one of its reply and the best so far.
func (r *race) take(got result) {
	c := &r.order[got.server]
	if !got.more {
		r.pending--
		c.pending = false
	}
	c.err = got.err
	if got.res == nil {
		return
	}
	rank := r.outgoing.rank(got.res)
	if r.leader < 0 || rank > r.rank || rank == r.rank && got.server < r.leader {
		r.leader, r.best, r.rank, r.cameAt = got.server, got.res, rank, time.Now()
	}
}

// end returns the best reply, or says how each server failed.
func (r *race) end() (*response, error) {
	if r.leader < 0 {
		e := &exchangeError{}
		for i := range r.order[:r.started] {
			e.errs = append(e.errs, fmt.Errorf("%v %w", r.order[i].addr, r.order[i].err))
		}
		return nil, e
	}
	for i := range r.order[:r.leader] {
		if c := &r.order[i]; c.pending && r.rank > rankNo {
			c.overtaken(c.sent)
		}
	}
	return r.best, nil
}

// maxSpares bounds the races that are over of which a try still runs.
const maxSpares = 256

// leave is called when the answer is out. Tries by UDP that it was not waited
// for run on for the time in which a stub takes an answer: whether one comes
// tells a slow server from a dead one.
func (r *race) leave() {
	r.over.Store(true)
	if !r.tcp && r.tries.Load() > 1 && r.s.spares.Load() < maxSpares && r.s.sockets.Load() <= r.s.spareSockets {
		r.s.spares.Add(1)
		r.spare = context.AfterFunc(r.s.spareCtx, r.cancel)
	} else {
		r.cancel()
	}
	r.done()
}

// done ends one try, or the race itself.
func (r *race) done() {
	if r.tries.Add(-1) > 0 {
		return
	}
	r.cancel()
	if r.spare != nil {
		r.spare()
		r.s.spares.Add(-1)
	}
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

// try asks one server in the background. needed says that no other is asked.
func (r *race) try(ctx context.Context, i int, needed bool) {
	r.tries.Add(1)
	u := r.order[i].upstream
	r.s.wg.Go(func() {
		defer r.done()
		res, err := r.ask(ctx, i, u, needed)
		r.report(u, err)
		r.results <- result{server: i, res: res, err: err}
	})
}

func (r *race) report(u *upstream, err error) {
	if err == nil {
		return
	}
	if ce := r.s.log.Check(zap.DebugLevel, "upstream failed"); ce != nil {
		ce.Write(zap.Stringer("upstream", u.addr), zap.String("qname", r.question.text()), zap.String("reason", err.Error()))
	}
}

// ask mirrors the client's transport. A server that does not know EDNS is asked
// again without (RFC 6891 section 7). A truncated reply to an external query is
// asked for again by TCP; if that fails it is better than none. That of a
// cluster's server is what the client would have got directly, and the size
// asked for is the client's, so it is handed on.
func (r *race) ask(ctx context.Context, i int, u *upstream, needed bool) (*response, error) {
	out := r.outgoing
	if out.tcp {
		// That a server has no TCP says nothing of its health.
		return r.s.askTCP(ctx, u, out, r.pace.whole, needed)
	}
	var res *response
	var err error
	if i == 0 && r.first.res != nil {
		res = r.first.res
	} else {
		var begun *dialog
		if i == 0 {
			begun = r.first.dialog
		}
		res, err = r.askUDP(ctx, u, out, needed, begun)
	}
	if err == nil && refusesEDNS(res, out) {
		if plain, err := r.askUDP(ctx, u, out.withoutOPT, needed, nil); err == nil {
			res, out = plain, out.withoutOPT
		}
	}
	if err != nil || !isCut(res, out) || r.over.Load() {
		return res, err
	}
	r.s.counters.tcpFallbacks.Add(1)
	r.results <- result{server: i, res: res, more: true}
	whole, err := r.s.askTCP(ctx, u, out, r.pace.tcp, needed)
	if err != nil {
		return nil, nil
	}
	return whole, nil
}

// isCut reports whether a reply makes its server be asked again by TCP.
func isCut(res *response, out *outgoing) bool { return flags(res.msg)&flagTC != 0 && !out.passThrough }

func refusesEDNS(res *response, out *outgoing) bool {
	if res.recs.hasOPT || out.withoutOPT == nil {
		return false
	}
	rcode := headerRcode(res.msg)
	return rcode == dns.RcodeFormatError || rcode == dns.RcodeNotImplemented
}

// askUDP asks one server and waits until it has answered, or nobody waits any
// more. It continues a dialog that has begun.
func (r *race) askUDP(ctx context.Context, u *upstream, out *outgoing, needed bool, d *dialog) (res *response, err error) {
	sent := time.Now()
	if d != nil {
		sent = d.sent
	} else {
		d, err = r.dial(u, out, needed)
	}
	if err == nil {
		res, err = d.await(ctx)
		d.close()
	}
	r.health(ctx, u, sent, err)
	return res, err
}

// health keeps that of a server up to date. Its silence was noted before.
func (r *race) health(ctx context.Context, u *upstream, sent time.Time, err error) {
	switch {
	case err == nil || errors.Is(err, errBadReply):
		if u.answered() {
			r.s.log.Info("upstream answers again", zap.Stringer("upstream", u.addr))
		}
	case ctx.Err() == nil && !errors.Is(err, errTimeout) && !isOurFault(err):
		r.s.strike(u, sent, err)
	}
}

// strike notes a failure of u, and tells when it puts u aside.
func (s *Server) strike(u *upstream, sent time.Time, reason error) {
	if u.strike(sent) {
		s.log.Warn("upstream put aside", zap.Stringer("upstream", u.addr), zap.NamedError("reason", reason))
	}
}

// isOurFault reports whether err says that this host has run out of something.
func isOurFault(err error) bool {
	return errors.Is(err, errNoSocket) || errors.Is(err, errForbidden) ||
		errno.Is(err, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL)
}

var errTimeout = errors.New("timeout")

// shorten cuts a network error down to its cause: the rest is about sockets of
// ours that are closed already.
func shorten(err error) error {
	var timeout interface{ Timeout() bool }
	var number syscall.Errno
	switch {
	case errors.As(err, &timeout) && timeout.Timeout():
		return errTimeout
	case errors.As(err, &number):
		return number
	default:
		return err
	}
}
