package forwarder

import (
	"context"
	"errors"
	"net/netip"

	"github.com/miekg/dns"
	"go.uber.org/zap"
)

// clientQuery is one accepted query of a client.
type clientQuery struct {
	raw      []byte
	from     netip.AddrPort
	tcp      bool
	gone     <-chan struct{} // closed when the query has to make room for another source's
	question question
	recs     records

	zone        string // the cluster zone that the name is in, "" for none
	passThrough bool   // message and reply are forwarded unchanged
}

// sizeLimit returns the largest reply that the client takes, in octets:
// RFC 1035 section 4.2.1 without OPT, else what OPT says but no less than 512
// (RFC 6891 section 6.2.3) and no more than maxUDPSize.
func (c *clientQuery) sizeLimit() int {
	switch {
	case c.tcp:
		return maxMessage
	case !c.recs.hasOPT:
		return dns.MinMsgSize
	default:
		return max(dns.MinMsgSize, min(int(c.recs.opt.udpSize), maxUDPSize))
	}
}

// handle answers one message. Nil means no answer. c.raw is neither kept nor
// changed.
func (s *Server) handle(ctx context.Context, c *clientQuery) []byte {
	if c.tcp { // what comes by UDP has been looked for when it was read
		if reply := s.fromCache(c); reply != nil {
			return reply
		}
	}
	reply, ok := s.accept(c)
	if !ok {
		s.counters.malformed.Add(1)
		return reply
	}
	reply, f := s.resolve(ctx, c)
	if reply != nil {
		return reply
	}
	return s.fail(c, f)
}

// accept reads c.raw up to the end of the question. If the message is no query
// then ok is false and reply is what to say, if anything.
//
// The rules are those of miekg/dns' MsgAcceptFunc, which CoreDNS uses, but
// that NOTIFY is not implemented: a forwarder is nobody's secondary.
func (s *Server) accept(c *clientQuery) (reply []byte, ok bool) {
	raw := c.raw
	switch {
	case len(raw) < headerLen, flags(raw)&flagQR != 0:
		return nil, false // any reply to it could be used to reflect
	case opcode(raw) != dns.OpcodeQuery:
		return rejectReply(raw, nil, dns.RcodeNotImplemented), false
	case count(raw, sectionQuestion) != 1, // RFC 9619
		count(raw, sectionAnswer) > 1,
		count(raw, sectionAuthority) > 1, // IXFR has one, RFC 1995 section 3
		count(raw, sectionAdditional) > 2:
		return rejectReply(raw, nil, dns.RcodeFormatError), false
	}
	if err := c.question.parse(raw); err != nil {
		return rejectReply(raw, nil, dns.RcodeFormatError), false
	}
	return nil, true
}

// resolve routes c and asks. Without a reply, the failure says why.
func (s *Server) resolve(ctx context.Context, c *clientQuery) ([]byte, failure) {
	epoch := s.cache.epoch.Load() // before the routes, whose change ends it
	table := s.routes.Load()
	servers, inZone := table.lookup(c.question.name())
	var err error
	c.recs, err = scanRecords(c.raw, c.question.end)

	if len(c.raw) > bufferSize && !c.recs.signed {
		return s.refuse(c.raw, failTooLong(len(c.raw))), failure{}
	}
	if inZone {
		// A cluster zone's server judges the rest of the message itself,
		// readable or not: the kernel path would ask it the same.
		c.zone = servers.zone
		c.passThrough = true
		s.counters.cluster.Add(1)
	} else if reply := s.screen(c, err); reply != nil {
		return reply, failure{}
	}

	switch {
	case table == nil:
		return nil, failNotReady()
	case len(servers.servers) == 0 && inZone:
		return nil, failNoEndpoint(c.zone, table.unserved)
	case len(servers.servers) == 0:
		return nil, failNoUpstream()
	}
	res, err := s.askRouted(ctx, c, table, servers)
	switch {
	case errors.Is(err, errLoop):
		s.noteLoop(c)
		return nil, failLoop()
	case errors.Is(err, errEvicted):
		s.counters.refused.Add(1)
		return failureReply(c, failOverload()), failure{}
	case err != nil:
		return nil, failExchange(c.zone, err)
	}
	reply, err := clientReply(c, res)
	if err != nil {
		return nil, failExchange(c.zone, err)
	}
	if !inZone && !c.passThrough {
		s.keep(c.raw, res, epoch)
	}
	return reply, failure{}
}

// screen judges a query for a name outside the cluster. It returns the reply to one that is not forwarded; unreadable is the error
// of reading its records.
func (s *Server) screen(c *clientQuery, unreadable error) []byte {
	switch {
	case unreadable != nil:
		s.counters.malformed.Add(1)
		return rejectReply(c.raw, &c.question, dns.RcodeFormatError)
	case c.recs.hasOPT && c.recs.opt.version != 0: // RFC 6891 section 6.1.3
		return failureReply(c, failure{rcode: dns.RcodeBadVers})
	}
	s.counters.external.Add(1)
	if isProbe(&c.question) {
		s.loops.markCame(c.question.text())
		return probeReply(c, s.probeID)
	}
	if c.question.qtype == dns.TypeAXFR || c.question.qtype == dns.TypeIXFR {
		return failureReply(c, failTransfer())
	}
	// RFC 8945 section 5.5: what is signed with a key that is not ours
	// is forwarded unchanged.
	c.passThrough = c.recs.signed
	return nil
}

// askRouted asks the servers of a table, and those of the next one if they are replaced meanwhile.
func (s *Server) askRouted(ctx context.Context, c *clientQuery, table *table, servers *group) (*response, error) {
	inZone := c.zone != ""
	hash := s.loops.hash(&c.question)
	back, open := s.loops.comesBack(hash, c.from)
	if back || open && inZone { // beside cluster DNS there is nobody else
		return nil, errLoop
	}
	out := newOutgoing(c, hash)
	out.shareable = out.shareable && !open
	res, err := s.ask(ctx, &request{outgoing: out, servers: servers, pace: &table.pace, gone: c.gone})
	if now := s.routes.Load(); err != nil && inZone && now != table && !errors.Is(err, errEvicted) {
		// Its servers may have gone meanwhile, and others come.
		if others, ok := now.lookup(c.question.name()); ok && others.hasMoreThan(servers) {
			res, err = s.ask(ctx, &request{outgoing: out, servers: others, pace: &now.pace, gone: c.gone})
		}
	}
	return res, err
}

// fail counts and logs a failure and returns the answer that says so.
func (s *Server) fail(c *clientQuery, f failure) []byte {
	s.counters.failures.Add(1)
	if ce := s.log.Check(zap.DebugLevel, "query failed"); ce != nil {
		ce.Write(zap.String("qname", c.question.text()), zap.String("zone", c.zone), zap.String("reason", f.text))
	}
	return failureReply(c, f)
}

// refuse answers a query with f, without asking anybody.
func (s *Server) refuse(raw []byte, f failure) []byte {
	s.counters.refused.Add(1)
	c := &clientQuery{raw: raw}
	reply, ok := s.accept(c)
	if !ok {
		return reply
	}
	if servers, inZone := s.routes.Load().lookup(c.question.name()); inZone {
		c.zone = servers.zone
	}
	// An unreadable rest means no OPT record, which is answered by none.
	c.recs, _ = scanRecords(raw, c.question.end)
	return failureReply(c, f)
}
