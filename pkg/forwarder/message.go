package forwarder

import (
	"bytes"
	"encoding/binary"
	"errors"

	"github.com/miekg/dns"
)

const (
	headerLen  = 12    // RFC 1035 section 4.1.1
	maxNameLen = 255   // octets of a name in wire format, RFC 1035 section 2.3.4
	maxMessage = 65535 // octets, what a TCP length prefix can say

	// maxPointers bounds the compression pointers of one name. More than one for
	// each label of the longest name make no sense.
	maxPointers = 126

	// maxUDPSize is the largest UDP payload that is asked for or sent. It
	// fits the smallest IPv6 MTU, so no reply is ever fragmented, and it is
	// what the kernel path uses: both paths truncate at the same size.
	maxUDPSize = 1232

	optFixedLen = 11 // an OPT record without options, RFC 6891 section 6.1.2
)

// Bits of the second header word, RFC 1035 section 4.1.1 and RFC 4035 section 3.
const (
	flagQR = 1 << 15
	flagAA = 1 << 10
	flagTC = 1 << 9
	flagRD = 1 << 8
	flagRA = 1 << 7
	flagAD = 1 << 5
	flagCD = 1 << 4

	flagDO = 1 << 15 // in the low half of an OPT record's TTL, RFC 3225
)

// errMalformed is returned for a message that can't be read to its end.
var errMalformed = errors.New("malformed message")

func messageID(msg []byte) uint16        { return binary.BigEndian.Uint16(msg) }
func setMessageID(msg []byte, id uint16) { binary.BigEndian.PutUint16(msg, id) }
func flags(msg []byte) uint16            { return binary.BigEndian.Uint16(msg[2:]) }
func setFlags(msg []byte, f uint16)      { binary.BigEndian.PutUint16(msg[2:], f) }
func opcode(msg []byte) int              { return int(flags(msg)>>11) & 0xF }
func headerRcode(msg []byte) int         { return int(flags(msg)) & 0xF }

// The sections of a message, as arguments of count and setCount.
const (
	sectionQuestion = iota
	sectionAnswer
	sectionAuthority
	sectionAdditional
)

func count(msg []byte, section int) int {
	return int(binary.BigEndian.Uint16(msg[4+2*section:]))
}

func setCount(msg []byte, section, n int) {
	binary.BigEndian.PutUint16(msg[4+2*section:], uint16(n))
}

// question is the only question of a message.
type question struct {
	nameBuf [maxNameLen]byte
	nameLen int
	qtype   uint16
	qclass  uint16
	end     int // offset of the first byte behind the question
}

// name returns the name in wire format and lower case, root label included.
func (q *question) name() []byte { return q.nameBuf[:q.nameLen] }

// equal compares as RFC 5452 section 9.1 asks for: name without regard to
// case, type and class.
func (q *question) equal(o *question) bool {
	return q.qtype == o.qtype && q.qclass == o.qclass && bytes.Equal(q.name(), o.name())
}

// text returns the name for people. It is slow.
func (q *question) text() string {
	name, _, err := dns.UnpackDomainName(q.name(), 0)
	if err != nil {
		return "?"
	}
	return name
}

// parse reads the question behind the header of msg. A compression pointer is
// an error: nothing that it could point to precedes the first name.
func (q *question) parse(msg []byte) error {
	off := headerLen
	for {
		if off >= len(msg) {
			return errMalformed
		}
		n := int(msg[off])
		if n > 63 {
			return errMalformed
		}
		off += 1 + n
		if off-headerLen > maxNameLen {
			return errMalformed
		}
		if n == 0 {
			break
		}
	}
	if off+4 > len(msg) {
		return errMalformed
	}
	q.nameLen = off - headerLen
	lower(q.nameBuf[:q.nameLen], msg[headerLen:off])
	q.qtype = binary.BigEndian.Uint16(msg[off:])
	q.qclass = binary.BigEndian.Uint16(msg[off+2:])
	q.end = off + 4
	return nil
}

// lower copies the wire-format name src to dst in lower case. It need not
// tell length bytes from letters: a length is at most 63 and 'A' is 65.
func lower(dst, src []byte) {
	for i, b := range src {
		if 'A' <= b && b <= 'Z' {
			b += 'a' - 'A'
		}
		dst[i] = b
	}
}

// records is what a walk over the records behind the question finds.
type records struct {
	end    int  // offset of the first byte behind the last record
	signed bool // a TSIG or SIG record is among the additional ones
	hasSOA bool // in the authority section
	hasNS  bool // in the authority section
	hasOPT bool
	opt    optRecord
}

// optRecord is an OPT pseudo-record, RFC 6891 section 6.1.
type optRecord struct {
	start, end int // offsets of the whole record
	udpSize    uint16
	extRcode   uint8
	version    uint8
	do         bool
	options    []byte // aliases the message
}

// scanRecords walks over all records from off to the end of msg. What follows
// the last record is not looked at.
func scanRecords(msg []byte, off int) (records, error) {
	var recs records
	for section := sectionAnswer; section <= sectionAdditional; section++ {
		for range count(msg, section) {
			rr, err := scanRecord(msg, off)
			if err != nil {
				return records{}, err
			}
			switch rr.rtype {
			case dns.TypeOPT:
				// RFC 6891 section 6.1.1: one at most, in the additional
				// section, owned by the root.
				if section != sectionAdditional || recs.hasOPT || msg[off] != 0 {
					return records{}, errMalformed
				}
				if recs.opt, err = parseOPT(msg, off, rr); err != nil {
					return records{}, err
				}
				recs.hasOPT = true
			case dns.TypeTSIG, dns.TypeSIG:
				recs.signed = recs.signed || section == sectionAdditional
			case dns.TypeSOA:
				recs.hasSOA = recs.hasSOA || section == sectionAuthority
			case dns.TypeNS:
				recs.hasNS = recs.hasNS || section == sectionAuthority
			}
			off = rr.end
		}
	}
	recs.end = off
	return recs, nil
}

// record is the outline of one resource record.
type record struct {
	rtype uint16
	fixed int // offset of the TYPE field
	rdata int
	end   int
}

func scanRecord(msg []byte, off int) (record, error) {
	fixed, err := skipName(msg, off)
	if err != nil {
		return record{}, err
	}
	rdata := fixed + 10
	if rdata > len(msg) {
		return record{}, errMalformed
	}
	rr := record{rtype: binary.BigEndian.Uint16(msg[fixed:]), fixed: fixed, rdata: rdata}
	if rr.end = rdata + int(binary.BigEndian.Uint16(msg[fixed+8:])); rr.end > len(msg) {
		return record{}, errMalformed
	}
	return rr, rr.scanNames(msg)
}

// scanNames reads the names in a record that may be compressed (RFC 3597
// section 4): a client that follows their pointers must come to an end. A record
// without data, as in a prerequisite, has none.
func (rr record) scanNames(msg []byte) (err error) {
	off, names := rr.rdata, 1
	switch rr.rtype {
	case dns.TypeNS, dns.TypeMD, dns.TypeMF, dns.TypeCNAME, dns.TypeMB, dns.TypeMG, dns.TypeMR, dns.TypePTR, dns.TypeDNAME:
	case dns.TypeSOA, dns.TypeMINFO, dns.TypeRP:
		names = 2
	case dns.TypeMX, dns.TypeAFSDB, dns.TypeRT, dns.TypeKX:
		off += 2
	case dns.TypeSRV:
		off += 6
	case dns.TypePX:
		off, names = off+2, 2
	default:
		return nil
	}
	if rr.rdata == rr.end {
		return nil
	}
	for range names {
		if off >= rr.end {
			return errMalformed
		}
		if off, err = skipName(msg, off); err != nil {
			return err
		}
	}
	if off > rr.end {
		return errMalformed
	}
	return nil
}

// skipName returns the offset behind the name at off. It is read to its end,
// also where compression pointers lead: these point to what precedes (RFC 1035
// section 4.1.4), so that following them ends, after maxNameLen octets and
// maxPointers at the latest.
func skipName(msg []byte, off int) (int, error) {
	behind := 0 // the offset behind the first pointer
	start, length := off, 0
	for pointers := 0; off < len(msg); {
		n := int(msg[off])
		switch {
		case n == 0:
			if behind == 0 {
				behind = off + 1
			}
			return behind, nil
		case n >= 0xC0:
			if off+2 > len(msg) {
				return 0, errMalformed
			}
			if behind == 0 {
				behind = off + 2
			}
			to := n&0x3F<<8 | int(msg[off+1])
			if pointers++; to < headerLen || to >= start || pointers > maxPointers {
				return 0, errMalformed
			}
			start, off = to, to
			continue
		case n > 63:
			return 0, errMalformed
		}
		off += 1 + n
		if length += 1 + n; length >= maxNameLen {
			return 0, errMalformed
		}
	}
	return 0, errMalformed
}

func parseOPT(msg []byte, start int, rr record) (optRecord, error) {
	opt := optRecord{
		start:    start,
		end:      rr.end,
		udpSize:  binary.BigEndian.Uint16(msg[rr.fixed+2:]),
		extRcode: msg[rr.fixed+4],
		version:  msg[rr.fixed+5],
		do:       binary.BigEndian.Uint16(msg[rr.fixed+6:])&flagDO != 0,
		options:  msg[rr.rdata:rr.end],
	}
	for rest := opt.options; len(rest) > 0; {
		n, ok := optionLen(rest)
		if !ok {
			return optRecord{}, errMalformed
		}
		rest = rest[n:]
	}
	return opt, nil
}

// optionLen returns the length of the first option of options, its header
// included.
func optionLen(options []byte) (n int, ok bool) {
	if len(options) < 4 {
		return 0, false
	}
	n = 4 + int(binary.BigEndian.Uint16(options[2:]))
	return n, n <= len(options)
}

// setUDPSize writes the payload size of the OPT record that starts at off.
func setUDPSize(msg []byte, off int, size uint16) {
	binary.BigEndian.PutUint16(msg[off+3:], size)
}

// appendOPT appends an OPT record with this server's own payload size.
// Options must be well-formed. The record is not counted in the header.
func appendOPT(msg []byte, extRcode uint8, do bool, options []byte) []byte {
	var z uint16
	if do {
		z = flagDO
	}
	msg = append(msg, 0) // root
	msg = binary.BigEndian.AppendUint16(msg, dns.TypeOPT)
	msg = binary.BigEndian.AppendUint16(msg, maxUDPSize)
	msg = append(msg, extRcode, 0) // version 0
	msg = binary.BigEndian.AppendUint16(msg, z)
	msg = binary.BigEndian.AppendUint16(msg, uint16(len(options)))
	return append(msg, options...)
}
