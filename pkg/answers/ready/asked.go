package ready

import (
	"encoding/binary"
	"strings"

	"github.com/miekg/dns"
)

// Asked are the bits of a query that change its answer, besides the question. They are part of the key: an answer is given to
// those only who asked alike.
type Asked uint8

// The values are those of the kernel programs.
const (
	RecursionDesired Asked = 1 << iota
	AuthenticData          // RFC 6840 section 5.7
	CheckingDisabled       // RFC 4035 section 3.2.2
	DNSSECOK               // RFC 3225
)

// Bits of a header's second word (RFC 1035 section 4.1.1, RFC 4035 section 3).
const (
	flagResponse                = 1 << 15
	flagTruncated               = 1 << 9
	flagRecursionDesired        = 1 << 8
	flagZ                       = 1 << 6
	flagAuthenticData           = 1 << 5
	flagCheckingDisabled        = 1 << 4
	maskOpcode                  = 0xf << 11
	maskRcode                   = 0xf
	flagDNSSECOK                = 1 << 15 // of an OPT record
	headerLen                   = 12
	optLen                      = 11 // RFC 6891 section 6.1.2, without options
	questionTail                = 4  // QTYPE and QCLASS
	maxPointer                  = 0x3fff
	recordTail                  = 10 // TYPE, CLASS, TTL, RDLENGTH
	pointerLen                  = 2
	pointerBits                 = 0xc000
	compressedA                 = pointerLen + recordTail + 4
	compressedAAAA              = pointerLen + recordTail + 16
	minimumSize                 = dns.MinMsgSize
	largestTTL                  = 1<<31 - 1 // RFC 2181 section 8
	plainQueryFlags      uint16 = flagRecursionDesired | flagAuthenticData | flagCheckingDisabled
)

// Key is what a query and its answer have in common.
type Key struct {
	Name  string // of the question, in wire form and lower case
	Type  uint16
	Asked Asked
}

// Text is the name as people write it, in lower case and without the dot at the end.
func (k Key) Text() string {
	name, _, err := dns.UnpackDomainName([]byte(k.Name), 0)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(name, ".")
}

// TypeText is the mnemonic of the type.
func (k Key) TypeText() string { return dns.Type(k.Type).String() }

// Query is the query for a key, in wire form: with ID 0, and with an OPT record that lets the answer be large.
func (k Key) Query() []byte {
	bits := uint16(0)
	for bit, asked := range askedBits {
		if k.Asked&asked != 0 {
			bits |= bit
		}
	}
	msg := binary.BigEndian.AppendUint16([]byte{0, 0}, bits)
	msg = append(msg, 0, 1, 0, 0, 0, 0, 0, 1)
	msg = append(msg, k.Name...)
	msg = binary.BigEndian.AppendUint16(msg, k.Type)
	msg = binary.BigEndian.AppendUint16(msg, dns.ClassINET)
	return appendOPT(msg, querySize, k.Asked)
}

// querySize is the largest reply that is taken by UDP, in octets (DNS flag day 2020).
const querySize = 1232

// askedBits are the flags of a query's header that count.
var askedBits = map[uint16]Asked{
	flagRecursionDesired: RecursionDesired, flagAuthenticData: AuthenticData, flagCheckingDisabled: CheckingDisabled,
}

// ReplyKey reads the question of a reply to a query with these bits.
func ReplyKey(reply []byte, asked Asked) (key Key, ok bool) {
	if len(reply) < headerLen || count(reply, 0) != 1 {
		return key, false
	}
	name, end := questionName(reply)
	if name == nil {
		return key, false
	}
	return Key{lower(name), binary.BigEndian.Uint16(reply[end-questionTail:]), asked}, true
}

// Query is what of a query an answer depends on.
type Query struct {
	Key
	// EDNS says that it has an OPT record, Size what that says of the asker's buffer, in octets.
	EDNS bool
	Size uint16
}

// Limit is the largest reply that the asker takes by UDP, in octets (RFC 1035 section 4.2.1, RFC 6891 section 6.2.3).
func (q *Query) Limit() int {
	if !q.EDNS {
		return minimumSize
	}
	return max(minimumSize, int(q.Size))
}

// ParseQuery reads a query that can be answered from what is ready: one question in class IN, no record but an OPT record
// without options, no flag but RD, AD and CD. Any other is for the server to judge.
func ParseQuery(msg []byte) (q Query, ok bool) {
	if len(msg) < headerLen || flags(msg)&^plainQueryFlags != 0 || count(msg, 0) != 1 || count(msg, 1) != 0 || count(msg, 2) != 0 {
		return q, false
	}
	name, end := questionName(msg)
	if name == nil || binary.BigEndian.Uint16(msg[end-2:]) != dns.ClassINET {
		return q, false
	}
	q.Key = Key{Name: lower(name), Type: binary.BigEndian.Uint16(msg[end-questionTail:])}
	bits := flags(msg)
	q.Asked = Asked(bits>>8&1)*RecursionDesired | Asked(bits>>5&1)*AuthenticData | Asked(bits>>4&1)*CheckingDisabled
	switch count(msg, 3) {
	case 0:
		return q, len(msg) == end
	case 1:
		return q, q.parseOPT(msg[end:])
	}
	return q, false
}

// parseOPT reads a record that has to be OPT, of version 0, with no flag but DO and without options.
func (q *Query) parseOPT(record []byte) bool {
	if len(record) != optLen || record[0] != 0 || binary.BigEndian.Uint16(record[1:]) != dns.TypeOPT {
		return false
	}
	ttl := binary.BigEndian.Uint32(record[5:])
	if ttl&^flagDNSSECOK != 0 || binary.BigEndian.Uint16(record[9:]) != 0 {
		return false
	}
	q.EDNS, q.Size = true, binary.BigEndian.Uint16(record[3:])
	if ttl != 0 {
		q.Asked |= DNSSECOK
	}
	return true
}

func flags(msg []byte) uint16           { return binary.BigEndian.Uint16(msg[2:]) }
func count(msg []byte, section int) int { return int(binary.BigEndian.Uint16(msg[4+2*section:])) }

// questionName returns the name of the question, in wire form and without a copy, and where the question ends. Without a
// readable one it is nil.
func questionName(msg []byte) (name []byte, end int) {
	for end = headerLen; ; {
		if end >= len(msg) || msg[end] > 63 {
			return nil, 0
		}
		length := int(msg[end])
		end += 1 + length
		if end-headerLen > 255 { // RFC 1035 section 3.1
			return nil, 0
		}
		if length == 0 {
			break
		}
	}
	if end+questionTail > len(msg) {
		return nil, 0
	}
	return msg[headerLen:end], end + questionTail
}

// lower folds a name in wire form (RFC 4343). It need not tell length octets from letters: a length is at most 63.
func lower(name []byte) string {
	folded := make([]byte, len(name))
	for i, octet := range name {
		if 'A' <= octet && octet <= 'Z' {
			octet += 'a' - 'A'
		}
		folded[i] = octet
	}
	return string(folded)
}
