package forwarder

import (
	"bytes"

	"github.com/miekg/dns"
)

// ProbeZone holds the names that every Server answers by itself: with a TXT
// record of its own identity. Whoever asks another server for a name in it, and
// gets that answer, knows that the other server forwards to this one. Nobody
// else can have such names (RFC 6761 section 6.4); a name that was not asked
// before is in no cache.
const ProbeZone = "loop-probe.k2s-dnsbpf.invalid."

// probeSuffix is ProbeZone in wire format.
var probeSuffix = []byte("\x0aloop-probe\x0ak2s-dnsbpf\x07invalid\x00")

func isProbe(q *question) bool { return bytes.HasSuffix(q.name(), probeSuffix) }

// probeReply says who we are, whatever the type of the question.
func probeReply(c *clientQuery, id string) []byte {
	query, reply := new(dns.Msg), new(dns.Msg)
	if err := query.Unpack(c.raw); err != nil {
		return rejectReply(c.raw, &c.question, dns.RcodeFormatError)
	}
	reply.SetReply(query)
	reply.RecursionAvailable = true
	reply.Answer = []dns.RR{&dns.TXT{
		Hdr: dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET},
		Txt: []string{id},
	}}
	if opt := query.IsEdns0(); opt != nil {
		reply.SetEdns0(maxUDPSize, opt.Do())
	}
	packed, err := reply.Pack()
	if err != nil {
		return rejectReply(c.raw, &c.question, dns.RcodeServerFailure)
	}
	return packed
}
