package forwarder

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"

	"github.com/miekg/dns"
)

// outgoing is a query as servers get it.
type outgoing struct {
	msg         []byte // whole message; each try puts an ID of its own into its copy
	question    *question
	hash        uint64 // of the question, for the loop guard
	tcp         bool
	passThrough bool

	// shareable says that the answer suits everybody who asks the same: nothing in the
	// query is one client's own, as a signature, a cookie or a subnet is.
	shareable bool

	// withoutOPT is the same query for a server that takes no EDNS, nil if
	// there is nothing to leave out or it must not be touched.
	withoutOPT *outgoing
}

// recursive reports whether the client wants more than a referral.
func (out *outgoing) recursive() bool { return flags(out.msg)&flagRD != 0 }

// newOutgoing derives the query for the servers from a client's.
func newOutgoing(c *clientQuery, hash uint64) *outgoing {
	out := &outgoing{question: &c.question, hash: hash, tcp: c.tcp, passThrough: c.passThrough, shareable: true}
	if c.passThrough {
		out.shareable = !c.recs.signed && len(c.recs.opt.options) == 0
		// A copy, because a try that lost may outlive the client's buffer.
		out.msg = append([]byte(nil), c.raw...)
		if c.recs.hasOPT && !c.recs.signed && !c.tcp && c.recs.opt.udpSize > maxUDPSize {
			setUDPSize(out.msg, c.recs.opt.start, maxUDPSize)
		}
		return out
	}
	out.msg = make([]byte, 0, c.question.end+optFixedLen)
	out.msg = append(out.msg, c.raw[:c.question.end]...)
	setFlags(out.msg, flags(c.raw)&(flagRD|flagAD|flagCD))
	clear(out.msg[4:headerLen])
	setCount(out.msg, sectionQuestion, 1)
	if c.recs.hasOPT {
		plain := *out
		plain.msg = bytes.Clone(out.msg)
		out.withoutOPT = &plain
		out.msg = appendOPT(out.msg, 0, c.recs.opt.do, nil)
		setCount(out.msg, sectionAdditional, 1)
	}
	return out
}

// accepts reports whether msg is a reply to this query that was sent with the
// given ID (RFC 5452 section 9.1). The socket is connected, so the source is
// right. Some servers leave the question out of an error: that is taken if
// nothing else is in it, for it can do no harm but to make us ask the next.
func (out *outgoing) accepts(msg []byte, id uint16) bool {
	if len(msg) < headerLen || flags(msg)&flagQR == 0 || messageID(msg) != id || opcode(msg) != dns.OpcodeQuery {
		return false
	}
	switch count(msg, sectionQuestion) {
	case 0:
		bare := count(msg, sectionAnswer) == 0 && count(msg, sectionAuthority) == 0
		switch headerRcode(msg) {
		case dns.RcodeFormatError, dns.RcodeServerFailure, dns.RcodeNotImplemented, dns.RcodeRefused:
			return bare
		}
		return false
	case 1:
		var q question
		return q.parse(msg) == nil && q.equal(out.question)
	default:
		return false
	}
}

// read makes a response of an accepted message, which it keeps. A truncated
// message may end anywhere; what can't be read of it is cut off.
func (out *outgoing) read(msg []byte) (*response, error) {
	off := headerLen
	if count(msg, sectionQuestion) == 1 {
		off = out.question.end
	}
	recs, err := scanRecords(msg, off)
	if err != nil {
		if flags(msg)&flagTC == 0 {
			return nil, errBadReply
		}
		for section := sectionAnswer; section <= sectionAdditional; section++ {
			setCount(msg, section, 0)
		}
		recs = records{end: off}
	}
	return &response{msg: msg, recs: recs}, nil
}

// randomID returns an ID that can't be foreseen. Reading never fails: crypto/rand
// ends the program instead.
func randomID() uint16 {
	var b [2]byte
	rand.Read(b[:])
	return binary.BigEndian.Uint16(b[:])
}
