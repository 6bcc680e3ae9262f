//go:build linux

package datapath

import (
	"encoding/binary"
	"slices"

	"github.com/miekg/dns"
)

// The reference says, from the RFCs and another DNS library, what is to be steered. It shares nothing with the BPF
// programs or with newZoneKey; where it and the kernel differ, one of them is wrong.

// referenceResult is what the reference reads in a message.
type referenceResult struct {
	// plain is set for a message that is understood in full: only such a one is steered.
	plain bool
	name  string
	// sizeOffset is where the EDNS UDP payload size is, 0 if there is none.
	sizeOffset int
}

// referenceQuery reads a UDP payload.
func referenceQuery(payload []byte) (result referenceResult) {
	const header = 12
	if len(payload) < header || len(payload) > 512 {
		return result
	}
	word := func(offset int) uint16 { return binary.BigEndian.Uint16(payload[offset:]) }
	flags, qdcount, ancount, nscount, arcount := word(2), word(4), word(6), word(8), word(10)
	isQuery := flags>>15 == 0 && flags>>11&0xf == dns.OpcodeQuery
	if !isQuery || qdcount != 1 || ancount != 0 || nscount != 0 || arcount > 1 {
		return result
	}
	name, end, err := dns.UnpackDomainName(payload, header)
	if err != nil {
		return result
	}
	// A name that was compressed is longer when packed again.
	packed := make([]byte, 256)
	length, err := dns.PackDomainName(name, packed, 0, nil, false)
	if err != nil || !slices.Equal(packed[:length], payload[header:end]) {
		return result
	}
	if len(payload) < end+4 || word(end+2) != dns.ClassINET {
		return result
	}
	end += 4
	result.name = name
	if arcount == 0 {
		result.plain = end == len(payload)
		return result
	}
	// RFC 6891 section 6.1.2: root name, type, size, extended RCODE, version, flags, RDLEN.
	const optFixed = 11
	if len(payload) < end+optFixed || payload[end] != 0 || word(end+1) != dns.TypeOPT || payload[end+6] != 0 {
		return result
	}
	result.plain = end+optFixed+int(word(end+9)) == len(payload)
	if result.plain {
		result.sizeOffset = end + 3
	}
	return result
}

// referenceSteered says whether a message is steered, given the zones.
func referenceSteered(payload []byte, zones []string) bool {
	result := referenceQuery(payload)
	return result.plain && slices.ContainsFunc(zones, func(zone string) bool {
		return dns.IsSubDomain(dns.Fqdn(zone), result.name)
	})
}

// naiveInZone compares labels from the right, one by one.
func naiveInZone(name, zone []string) bool {
	if len(zone) > len(name) {
		return false
	}
	for i := range zone {
		if asciiLower(name[len(name)-len(zone)+i]) != asciiLower(zone[i]) {
			return false
		}
	}
	return true
}

func asciiLower(text string) string {
	lower := []byte(text)
	for i, octet := range lower {
		if 'A' <= octet && octet <= 'Z' {
			lower[i] = octet + 'a' - 'A'
		}
	}
	return string(lower)
}
