package forwarder

import (
	"encoding/binary"

	"github.com/miekg/dns"
)

// rejectReply answers a message that is not a query this server takes, the way
// miekg/dns and so CoreDNS does: opcode echoed, no records. The question is
// repeated if it could be read (q not nil).
func rejectReply(query []byte, q *question, rcode int) []byte {
	end := headerLen
	if q != nil {
		end = q.end
	}
	reply := make([]byte, end)
	copy(reply, query[:end])
	const kept = 0xF<<11 | flagRD | flagAD | flagCD
	setFlags(reply, flags(query)&kept|flagQR|uint16(rcode))
	clear(reply[4:headerLen])
	if q != nil {
		setCount(reply, sectionQuestion, 1)
	}
	return reply
}

// failureReply answers c with f. It has an OPT record if and only if the query
// had one (RFC 6891 section 6.1.1).
func failureReply(c *clientQuery, f failure) []byte {
	reply := make([]byte, c.question.end, c.question.end+optFixedLen+6+maxExtraText)
	copy(reply, c.raw[:c.question.end])
	bits := flags(c.raw)&(flagRD|flagCD) | flagQR | uint16(f.rcode&0xF)
	if c.zone == "" {
		bits |= flagRA
	}
	setFlags(reply, bits)
	clear(reply[4:headerLen])
	setCount(reply, sectionQuestion, 1)
	if c.recs.hasOPT {
		reply = appendOPT(reply, uint8(f.rcode>>4), c.recs.opt.do, f.option())
		setCount(reply, sectionAdditional, 1)
	}
	return reply
}

// clientReply makes the reply for a client out of a server's: the client's ID
// and spelling of the name, its EDNS, its size.
func clientReply(c *clientQuery, res *response) ([]byte, error) {
	recs := res.recs
	reply := append(make([]byte, 0, recs.end+c.question.end+optFixedLen), res.msg[:recs.end]...)
	setMessageID(reply, messageID(c.raw))
	if count(reply, sectionQuestion) == 0 { // a bare error, see accepts
		reply = append(reply[:headerLen], c.raw[headerLen:c.question.end]...)
		setCount(reply, sectionQuestion, 1)
		setCount(reply, sectionAdditional, 0)
		recs = records{end: len(reply)}
	}
	// Same length as the question in the reply, so pointers stay valid.
	copy(reply[headerLen:], c.raw[headerLen:c.question.end])

	var opt []byte
	if c.passThrough {
		if recs.hasOPT {
			opt = reply[recs.opt.start:recs.opt.end]
		}
	} else {
		var err error
		if reply, opt, err = swapOPT(c, reply, recs); err != nil {
			return nil, err
		}
	}
	if len(reply) > c.sizeLimit() {
		reply = truncate(reply, c.question.end, c.sizeLimit(), opt)
	}
	return reply, nil
}

// swapOPT replaces the server's OPT record by our own, or by none if the
// client sent none, and returns a copy of the new record also. Of the server's
// options only extended errors are handed on: RFC 8914 section 3 lets a
// forwarder do so, and no other option is meant for our client.
func swapOPT(c *clientQuery, reply []byte, recs records) (whole, opt []byte, err error) {
	var extRcode uint8
	var options []byte
	if recs.hasOPT {
		extRcode = recs.opt.extRcode
		if c.recs.hasOPT {
			options = extendedErrors(recs.opt.options)
		}
		if recs.opt.end == recs.end {
			reply = reply[:recs.opt.start]
			setCount(reply, sectionAdditional, count(reply, sectionAdditional)-1)
		} else if reply, err = removeOPT(reply, c.question.end); err != nil {
			return nil, nil, err
		}
	}
	if !c.recs.hasOPT {
		return reply, nil, nil
	}
	opt = appendOPT(nil, extRcode, c.recs.opt.do, options)
	setCount(reply, sectionAdditional, count(reply, sectionAdditional)+1)
	return append(reply, opt...), opt, nil
}

// extendedErrors returns a copy of the Extended DNS Error options.
func extendedErrors(options []byte) []byte {
	var out []byte
	for len(options) > 0 {
		n, ok := optionLen(options)
		if !ok {
			break
		}
		if binary.BigEndian.Uint16(options) == dns.EDNS0EDE {
			out = append(out, options[:n]...)
		}
		options = options[n:]
	}
	return out
}

// removeOPT is for the rare server that sends records after OPT: cutting it
// out would break compression pointers behind it, so the message is packed
// anew. question is where its question ends.
func removeOPT(reply []byte, question int) ([]byte, error) {
	var m dns.Msg
	if err := m.Unpack(reply); err != nil {
		return nil, errBadReply
	}
	extra := m.Extra[:0]
	for _, rr := range m.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			extra = append(extra, rr)
		}
	}
	m.Extra = extra
	m.Rcode &= 0xF // the rest lives in OPT
	m.Compress = true
	packed, err := m.Pack()
	if err == nil { // RDATA that was cut short, and read as nothing, is not packed as such
		_, err = scanRecords(packed, question)
	}
	if err != nil {
		return nil, errBadReply
	}
	return packed, nil
}

// truncate cuts msg down to limit octets at a record's end and sets TC
// (RFC 2181 section 9). Cutting never breaks a compression pointer, because
// those point backwards. opt is msg's OPT record, which is kept: without its
// options if they would not leave room for anything, and then no record but
// OPT is kept.
func truncate(msg []byte, questionEnd, limit int, opt []byte) []byte {
	opt = append([]byte(nil), opt...)
	if questionEnd+len(opt) > limit {
		opt = opt[:optFixedLen]
		clear(opt[optFixedLen-2:])
	}
	counts := [4]int{sectionQuestion: 1}
	end := questionEnd
	budget := limit - len(opt)
walk:
	for section := sectionAnswer; section <= sectionAdditional; section++ {
		for range count(msg, section) {
			rr, err := scanRecord(msg, end)
			if err != nil || rr.end > budget || rr.rtype == dns.TypeOPT || rr.rtype == dns.TypeTSIG {
				break walk
			}
			counts[section]++
			end = rr.end
		}
	}
	msg = append(msg[:end:end], opt...)
	if len(opt) > 0 {
		counts[sectionAdditional]++
	}
	for section, n := range counts {
		setCount(msg, section, n)
	}
	setFlags(msg, flags(msg)|flagTC)
	return msg
}
