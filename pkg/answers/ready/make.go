package ready

import (
	"encoding/binary"

	"github.com/miekg/dns"
)

// Refusal is why a reply is not kept, as it is counted and shown.
type Refusal string

// A reply is kept unless it is one of these.
const (
	Malformed Refusal = "malformed" // not readable to its end, or longer
	Question  Refusal = "question"  // not for what was asked
	Truncated Refusal = "truncated" // RFC 2181 section 9
	Failure   Refusal = "failure"   // an rcode other than NOERROR and NXDOMAIN
	Type      Refusal = "type"      // ANY, transfers, and types that only probes ask for
	TTL       Refusal = "ttl"       // 0, or 2^31 and more (RFC 2181 section 8)
	NoSOA     Refusal = "no_soa"    // negative without one (RFC 2308 section 5)
	Foreign   Refusal = "foreign"   // records in the answer section that nothing leads to (RFC 2181 section 5.4.1), or of other zones
	Large     Refusal = "large"     // more octets or records than there is room for
	Options   Refusal = "options"   // EDNS options, which are for one asker
	// Spelling refuses replies, good otherwise, to questions that are not all in lower case: a server may repeat their spelling in other names, and
	// CoreDNS answers some of them otherwise (NS of a zone). Ask it in lower case.
	Spelling   Refusal = "spelling"
	Signed     Refusal = "transaction" // signed for one asker (RFC 8945, RFC 2931)
	notRefused Refusal = ""
)

// Limits are those of the place where an answer is kept.
type Limits struct {
	Octets  int // of the whole reply, with an OPT record
	Records int
}

// Make judges a server's reply to the query and makes an answer of it. zone is the one, in presentation form and with its final dot,
// to which the server was asked for names in: what is of others is not its to say, "." for none. Without a refusal there is an answer.
func Make(q *Query, reply []byte, zone string, limits Limits) (*Answer, Refusal) {
	if len(reply) < headerLen || flags(reply)&(flagResponse|maskOpcode) != flagResponse {
		return nil, Malformed
	}
	name, end := questionName(reply)
	if name == nil || count(reply, 0) != 1 {
		return nil, Malformed
	}
	if lower(name) != q.Name || binary.BigEndian.Uint16(reply[end-questionTail:]) != q.Type ||
		binary.BigEndian.Uint16(reply[end-2:]) != dns.ClassINET {
		return nil, Question
	}
	if refusal := judgeHead(q, flags(reply)); refusal != notRefused {
		return nil, refusal
	}
	m := maker{
		answer: &Answer{Key: q.Key, Flags: flags(reply) &^ flagZ, Life: largestTTL},
		reply:  reply, zone: dns.CanonicalName(zone), seen: make(map[string]int), spelled: string(name) != q.Name,
	}
	if m.qname, _, _ = dns.UnpackDomainName([]byte(q.Name), 0); m.qname == "" {
		return nil, Malformed
	}
	m.chain = map[string]bool{m.qname: true}
	if refusal := m.readAll(end); refusal != notRefused {
		return nil, refusal
	}
	return m.finish(limits)
}

func judgeHead(q *Query, bits uint16) Refusal {
	switch rcode := int(bits & maskRcode); {
	case bits&flagTruncated != 0:
		return Truncated
	case rcode != dns.RcodeSuccess && rcode != dns.RcodeNameError:
		return Failure
	}
	switch q.Type {
	case dns.TypeANY, dns.TypeAXFR, dns.TypeIXFR, dns.TypeMAILA, dns.TypeMAILB, dns.TypeRRSIG, dns.TypeSIG, dns.TypeHINFO, dns.TypeOPT,
		dns.TypeTSIG, dns.TypeTKEY:
		return Type
	}
	return notRefused
}

// maker makes one answer.
type maker struct {
	answer  *Answer
	reply   []byte
	zone    string
	spelled bool            // the question is not all in lower case
	qname   string          // as in the answer's Name
	chain   map[string]bool // the owners that an answer may have: the question's name, and what CNAME records lead to
	seen    map[string]int  // where a name is in the new message
	run     runFinder
	final   bool   // a record of the type that was asked for
	soa     uint32 // MINIMUM of a SOA record above a name of the chain, that says how long a negative answer lives
	hasSOA  bool
}

const (
	sectionAnswer = iota
	sectionAuthority
	sectionAdditional
)

func (m *maker) readAll(off int) Refusal {
	for section := range m.answer.Counts {
		for range count(m.reply, section+1) {
			rr, next, err := dns.UnpackRR(m.reply, off)
			if err != nil || next <= off || rr == nil {
				return Malformed
			}
			if refusal := m.read(section, rr, off, next); refusal != notRefused {
				return refusal
			}
			off = next
		}
	}
	if off != len(m.reply) {
		return Malformed
	}
	return notRefused
}

// read judges the record that is between two offsets of the reply, and takes it over.
func (m *maker) read(section int, rr dns.RR, off, next int) Refusal {
	header := rr.Header()
	switch header.Rrtype {
	case dns.TypeOPT:
		opt := rr.(*dns.OPT)
		switch {
		case section != sectionAdditional || header.Name != ".":
			return Malformed
		case len(opt.Option) > 0:
			return Options
		case opt.Version() != 0 || opt.Hdr.Ttl>>24 != 0:
			return Failure
		}
		return notRefused
	case dns.TypeTSIG, dns.TypeSIG:
		return Signed
	}
	if header.Class != dns.ClassINET {
		return Foreign
	}
	owner := dns.CanonicalName(header.Name)
	if !dns.IsSubDomain(m.zone, owner) {
		if section == sectionAnswer {
			return Foreign
		}
		return notRefused // left out
	}
	if section == sectionAnswer && !m.follows(owner, rr) {
		return Foreign
	}
	if header.Ttl == 0 || header.Ttl > largestTTL {
		return TTL
	}
	if soa, is := rr.(*dns.SOA); is && section == sectionAuthority && m.isAbove(owner) {
		m.hasSOA, m.soa = true, soa.Minttl
	}
	m.answer.Life = min(m.answer.Life, header.Ttl)
	return m.take(section, owner, rr, off, next)
}

// isAbove reports whether a name is that of a zone which a name of the chain may be in.
func (m *maker) isAbove(owner string) bool {
	for name := range m.chain {
		if dns.IsSubDomain(owner, name) {
			return true
		}
	}
	return false
}

// follows reports whether a record of the answer section belongs to what was asked: to the name of the question, or to one that a
// CNAME record before it leads to. A DNAME record is above such a name (RFC 6672 section 3.1).
func (m *maker) follows(owner string, rr dns.RR) bool {
	switch record := rr.(type) {
	case *dns.DNAME:
		for name := range m.chain {
			if name != owner && dns.IsSubDomain(owner, name) {
				m.chain[owner] = true // its signature
				return true
			}
		}
		return m.answer.Type == dns.TypeDNAME && m.chain[owner]
	case *dns.CNAME:
		if !m.chain[owner] {
			return false
		}
		m.chain[dns.CanonicalName(record.Target)] = true
	}
	m.final = m.final || rr.Header().Rrtype == m.answer.Type
	return m.chain[owner]
}

// take appends a record to the new message. Its data is copied as it is, but for types whose names may be compressed (RFC 3597
// section 4): they are written out.
func (m *maker) take(section int, owner string, rr dns.RR, off, next int) Refusal {
	a := m.answer
	start := len(a.Body)
	a.Body = m.appendOwner(a.Body, owner, rr.Header().Name, rr.Header().Rrtype == dns.TypeSOA)
	fixed, ok := fixedPart(m.reply, off, next)
	if !ok {
		return Malformed
	}
	a.TTLs = append(a.TTLs, uint16(len(a.Body)+4))
	tail := len(a.Body)
	a.Body = append(a.Body, m.reply[fixed:fixed+recordTail]...)
	rdata := len(a.Body)
	if soa, is := rr.(*dns.SOA); is {
		packed, err := m.packedSOA(soa, owner)
		if err != nil {
			return Malformed
		}
		a.Body = append(a.Body, packed...)
	} else if mayBeCompressed(rr.Header().Rrtype) {
		packed, err := packedData(rr)
		if err != nil {
			return Malformed
		}
		a.Body = append(a.Body, packed...)
	} else {
		a.Body = append(a.Body, m.reply[fixed+recordTail:next]...)
	}
	if len(a.Body) > dns.MaxMsgSize {
		return Large
	}
	binary.BigEndian.PutUint16(a.Body[tail+recordTail-2:], uint16(len(a.Body)-rdata))
	if cname, is := rr.(*dns.CNAME); is {
		m.noteName(cname.Target, rdata)
	}
	a.Counts[section]++
	if section == sectionAnswer {
		m.run.add(owner, rr.Header(), start, len(a.Body))
	}
	return notRefused
}

// appendOwner writes the owner of a record: by a pointer if it is the name of the question, so that it follows the asker's
// spelling, or one that has been there, spelled alike. The zone of a SOA record follows the asker's spelling, too: so do CoreDNS and
// whoever compresses names.
func (m *maker) appendOwner(body []byte, owner, spelled string, isSOA bool) []byte {
	at, seen := m.seen[spelled]
	if owner == m.qname {
		at, seen = headerLen, true
	} else if inQuestion := m.inQuestion(owner); isSOA && inQuestion > 0 {
		at, seen = inQuestion, true
	}
	if seen {
		return binary.BigEndian.AppendUint16(body, uint16(pointerBits|at))
	}
	m.noteName(spelled, len(body))
	var wire [256]byte
	n, err := dns.PackDomainName(spelled, wire[:], 0, nil, false)
	if err != nil { // it was unpacked just now
		n = 0
	}
	return append(body, wire[:n]...)
}

// inQuestion returns where a name is in the question, as the name that it is below of; 0 for nowhere.
func (m *maker) inQuestion(name string) int {
	if name == "." || !dns.IsSubDomain(name, m.qname) {
		return 0
	}
	var wire [256]byte
	length, err := dns.PackDomainName(name, wire[:], 0, nil, false)
	if err != nil {
		return 0
	}
	return headerLen + len(m.answer.Name) - length
}

// packedSOA returns the data of a SOA record, in which names of its zone follow the asker's spelling.
func (m *maker) packedSOA(soa *dns.SOA, zone string) (packed []byte, err error) {
	at := m.inQuestion(zone)
	for _, name := range []string{soa.Ns, soa.Mbox} {
		var wire [256]byte
		n, err := dns.PackDomainName(name, wire[:], 0, nil, false)
		if err != nil {
			return nil, err
		}
		if at > 0 && dns.IsSubDomain(zone, dns.CanonicalName(name)) {
			packed = append(packed, wire[:n-(headerLen+len(m.answer.Name)-at)]...)
			packed = binary.BigEndian.AppendUint16(packed, uint16(pointerBits|at))
			continue
		}
		packed = append(packed, wire[:n]...)
	}
	for _, number := range []uint32{soa.Serial, soa.Refresh, soa.Retry, soa.Expire, soa.Minttl} {
		packed = binary.BigEndian.AppendUint32(packed, number)
	}
	return packed, nil
}

// noteName remembers where a name is, unless it can be had shorter or a pointer does not reach it.
func (m *maker) noteName(spelled string, inBody int) {
	at := m.offset() + inBody
	if _, seen := m.seen[spelled]; !seen && spelled != "." && at <= maxPointer {
		m.seen[spelled] = at
	}
}

// offset is where Body is in a message.
func (m *maker) offset() int { return headerLen + len(m.answer.Name) + questionTail }

func (m *maker) finish(limits Limits) (*Answer, Refusal) {
	a := m.answer
	a.Negative = !m.final || a.Flags&maskRcode == dns.RcodeNameError
	if a.Negative {
		if !m.hasSOA {
			return nil, NoSOA
		}
		a.Life = min(a.Life, m.soa)
	}
	if a.Life == 0 || len(a.TTLs) == 0 {
		return nil, TTL
	}
	if !a.Fits(limits) {
		return nil, Large
	}
	if m.spelled {
		return nil, Spelling
	}
	a.Run = m.run.found()
	return a, notRefused
}

// fixedPart returns where the TYPE of the record between two offsets is.
func fixedPart(msg []byte, off, next int) (int, bool) {
	_, fixed, err := dns.UnpackDomainName(msg, off)
	return fixed, err == nil && fixed+recordTail <= next
}

// mayBeCompressed names the types whose data has names that a server may have compressed: those of RFC 1035, and some of before
// RFC 3597.
func mayBeCompressed(rrtype uint16) bool {
	switch rrtype {
	case dns.TypeNS, dns.TypeMD, dns.TypeMF, dns.TypeCNAME, dns.TypeSOA, dns.TypeMB, dns.TypeMG, dns.TypeMR, dns.TypePTR,
		dns.TypeMINFO, dns.TypeMX, dns.TypeRP, dns.TypeAFSDB, dns.TypeRT, dns.TypePX, dns.TypeSRV, dns.TypeKX, dns.TypeDNAME,
		dns.TypeNAPTR, dns.TypeNXT:
		return true
	}
	return false
}

// packedData returns a record's data without compression.
func packedData(rr dns.RR) ([]byte, error) {
	packed := make([]byte, dns.Len(rr)+1)
	n, err := dns.PackRR(rr, packed, 0, nil, false)
	if err != nil {
		return nil, err
	}
	_, fixed, err := dns.UnpackDomainName(packed[:n], 0)
	if err != nil {
		return nil, err
	}
	return packed[fixed+recordTail : n], nil
}

// runFinder finds the addresses that change places: consecutive records of one size, owner, type and TTL.
type runFinder struct {
	run    Run
	owner  string
	header dns.RR_Header
	over   bool // other records came behind it
}

func (f *runFinder) add(owner string, header *dns.RR_Header, start, end int) {
	stride := end - start
	address := header.Rrtype == dns.TypeA && stride == compressedA || header.Rrtype == dns.TypeAAAA && stride == compressedAAAA
	switch {
	case f.over:
	case f.run.Count == 0 && address:
		f.run, f.owner, f.header = Run{Start: uint16(start), Count: 1, Stride: uint16(stride)}, owner, *header
	case f.run.Count > 0 && address && owner == f.owner && header.Rrtype == f.header.Rrtype && header.Ttl == f.header.Ttl:
		f.run.Count++
	case f.run.Count > 0:
		f.over = true
	}
}

// found returns the run, if there is one of at least two records.
func (f *runFinder) found() Run {
	if f.run.Count < 2 {
		return Run{}
	}
	return f.run
}
