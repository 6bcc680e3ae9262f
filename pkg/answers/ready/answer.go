package ready

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/miekg/dns"
)

// Answer is what a query is answered with. It is never changed.
type Answer struct {
	Key
	// Flags are the second word of the header, as the source gave it.
	Flags uint16
	// Counts are those of the answer, authority and additional section, an OPT record left out.
	Counts [3]uint16
	// Body is all that follows the question, an OPT record left out. Its compression pointers lead into it, or to the whole name
	// of the question, so that they follow the asker's spelling.
	Body []byte
	// TTLs are the offsets of each record's TTL in Body, ascending.
	TTLs []uint16
	// Run is what changes places from answer to answer.
	Run Run
	// Life is how long the answer may be given, in seconds: the smallest TTL of its records, of a negative one (RFC 2308 section 5)
	// the SOA record's MINIMUM too.
	Life uint32
	// Negative is NXDOMAIN or NODATA.
	Negative bool
}

// Run is a number of records in an answer's Body that have the same size, owner, type and TTL: addresses. Without one it is zero.
type Run struct {
	Start  uint16 // offset in Body
	Count  uint16
	Stride uint16 // octets of a record
}

// Reply appends to buf the reply to a query for which the answer is, in wire form, as the kernel makes it.
// age is how long ago the source gave it; turn says which record of the run is first; limit is the largest reply in octets; with
// optSize 0 the OPT record has the size that the asker said.
func (a *Answer) Reply(buf, query []byte, q *Query, age time.Duration, turn uint32, limit int, optSize uint16) []byte {
	start := len(buf)
	buf = append(buf, query[:headerLen+len(a.Name)+questionTail]...)
	bits, counts := a.Flags, a.Counts
	body := len(buf)
	length := body - start + len(a.Body)
	if q.EDNS {
		length += optLen
	}
	if length > limit {
		bits, counts = bits|flagTruncated, [3]uint16{}
	} else {
		buf = a.appendBody(buf, age, turn)
	}
	if q.EDNS {
		counts[2]++
		if optSize == 0 {
			optSize = q.Size
		}
		buf = appendOPT(buf, optSize, q.Asked)
	}
	head := buf[start:]
	binary.BigEndian.PutUint16(head[2:], bits)
	for i, n := range counts {
		binary.BigEndian.PutUint16(head[6+2*i:], n)
	}
	return buf
}

func (a *Answer) appendBody(buf []byte, age time.Duration, turn uint32) []byte {
	body := len(buf)
	if r := a.Run; r.Count > 0 {
		end := r.Start + r.Count*r.Stride
		first := r.Start + uint16(turn%uint32(r.Count))*r.Stride
		buf = append(buf, a.Body[:r.Start]...)
		buf = append(buf, a.Body[first:end]...)
		buf = append(buf, a.Body[r.Start:first]...)
		buf = append(buf, a.Body[end:]...)
	} else {
		buf = append(buf, a.Body...)
	}
	seconds := uint32(max(0, (age+time.Second-1)/time.Second)) // so that nobody keeps it beyond its end
	for _, offset := range a.TTLs {
		ttl := buf[body+int(offset):]
		left := binary.BigEndian.Uint32(ttl)
		binary.BigEndian.PutUint32(ttl, left-min(left, seconds))
	}
	return buf
}

func appendOPT(buf []byte, size uint16, asked Asked) []byte {
	buf = append(buf, 0) // the root
	buf = binary.BigEndian.AppendUint16(buf, dns.TypeOPT)
	buf = binary.BigEndian.AppendUint16(buf, size)
	var ttl uint32
	if asked&DNSSECOK != 0 {
		ttl = flagDNSSECOK
	}
	buf = binary.BigEndian.AppendUint32(buf, ttl)
	return binary.BigEndian.AppendUint16(buf, 0)
}

// Sum is the Internet checksum (RFC 1071) of the Body with all TTLs zero, not inverted and in the machine's byte order, as if the
// Body began at an even offset.
func (a *Answer) Sum() uint32 {
	body := append([]byte(nil), a.Body...)
	for _, offset := range a.TTLs {
		clear(body[offset : offset+4])
	}
	if len(body)%2 != 0 {
		body = append(body, 0)
	}
	var sum uint32
	for i := 0; i < len(body); i += 2 {
		sum += uint32(binary.NativeEndian.Uint16(body[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return sum
}

// Octets is what the kernel needs to keep the answer, without what is the same for all.
func (a *Answer) Octets() int { return (len(a.Name)+7)/8*8 + 2*len(a.TTLs) + len(a.Body) }

// Fits reports whether the answer is within limits.
func (a *Answer) Fits(limits Limits) bool {
	return headerLen+len(a.Name)+questionTail+len(a.Body)+optLen <= limits.Octets && len(a.TTLs) <= limits.Records
}

// Rcode is the name of the answer's RCODE, or NODATA.
func (a *Answer) Rcode() string {
	rcode := int(a.Flags & maskRcode)
	if rcode == dns.RcodeSuccess && a.Negative {
		return "NODATA"
	}
	return dns.RcodeToString[rcode]
}

// NoName reports whether the answer is NXDOMAIN.
func (a *Answer) NoName() bool { return a.Flags&maskRcode == dns.RcodeNameError }

// Addresses are those of the A and AAAA records in the answer section, in their order.
func (a *Answer) Addresses() (addresses []netip.Addr) {
	for i, offset := range a.TTLs {
		if i == int(a.Counts[sectionAnswer]) {
			break
		}
		rrtype := binary.BigEndian.Uint16(a.Body[offset-4:])
		data := a.Body[offset+6:][:binary.BigEndian.Uint16(a.Body[offset+4:])]
		if address, ok := netip.AddrFromSlice(data); ok && (rrtype == dns.TypeA || rrtype == dns.TypeAAAA) {
			addresses = append(addresses, address)
		}
	}
	return addresses
}
