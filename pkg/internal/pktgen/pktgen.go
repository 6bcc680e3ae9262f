// Package pktgen builds the frames that tests give to the BPF programs: a good DNS query or reply in Ethernet, with
// options that break one thing at a time. For tests only.
package pktgen

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"

	"github.com/miekg/dns"
)

// Header sizes, in octets.
const (
	EthernetLength = 14
	IPv4Length     = 20
	IPv6Length     = 40
	UDPLength      = 8
	TCPLength      = 20
	DNSLength      = 12
)

const (
	etherTypeIPv4 = 0x0800
	etherTypeIPv6 = 0x86dd
	protocolTCP   = 6
	protocolUDP   = 17
)

// Frame is an Ethernet frame under construction. Its fields are written as they are: options change them after the
// consistent values have been set and before the checksums are computed.
type Frame struct {
	Source, Destination netip.AddrPort
	EtherType           uint16
	Protocol            uint8
	Payload             []byte

	// IHL is the IPv4 header length in 32-bit words; words over 5 are filled with no-operation options.
	IHL uint8
	// Fragment is the IPv4 flags-and-offset field.
	Fragment uint16
	// Extension is put between the IPv6 and the UDP header.
	Extension []byte
	// IPLengthDelta and UDPLengthDelta falsify the length fields.
	IPLengthDelta, UDPLengthDelta int
	// NoUDPChecksum leaves the UDP checksum zero.
	NoUDPChecksum bool
	// Padding is appended to the frame, outside of the IP packet.
	Padding []byte
}

// Option changes a frame.
type Option func(*Frame)

// UDP returns the frame of one UDP datagram, over IPv4 or IPv6 as its addresses are.
func UDP(source, destination netip.AddrPort, payload []byte, options ...Option) []byte {
	f := &Frame{Source: source, Destination: destination, Payload: payload, Protocol: protocolUDP, IHL: 5}
	f.EtherType = etherTypeIPv6
	if source.Addr().Is4() {
		f.EtherType = etherTypeIPv4
	}
	for _, option := range options {
		option(f)
	}
	return f.bytes()
}

// Control bits of TCP (RFC 9293 section 3.1).
const (
	tcpSYN    = 0x02
	tcpPSHACK = 0x18
)

// TCP returns the frame of a segment that carries payload with the two-octet length that DNS has there (RFC 1035
// section 4.2.2). Its checksum is left zero: no test looks at it.
func TCP(source, destination netip.AddrPort, payload []byte, options ...Option) []byte {
	data := binary.BigEndian.AppendUint16(nil, uint16(len(payload)))
	return tcp(source, destination, tcpPSHACK, append(data, payload...), options)
}

// SYN returns the frame of the segment that a connection begins with.
func SYN(source, destination netip.AddrPort, options ...Option) []byte {
	return tcp(source, destination, tcpSYN, nil, options)
}

func tcp(source, destination netip.AddrPort, control byte, data []byte, options []Option) []byte {
	segment := make([]byte, TCPLength, TCPLength+len(data))
	binary.BigEndian.PutUint16(segment[0:], source.Port())
	binary.BigEndian.PutUint16(segment[2:], destination.Port())
	segment[12] = TCPLength / 4 << 4
	segment[13] = control
	segment = append(segment, data...)
	// The UDP header that the builder makes is cut out again.
	frame := UDP(source, destination, segment, append([]Option{func(f *Frame) {
		f.Protocol = protocolTCP
		f.IPLengthDelta = -UDPLength
	}}, options...)...)
	at := len(frame) - len(segment)
	return append(frame[:at-UDPLength], segment...)
}

// RefreshChecksums returns a copy of a plain UDP frame with both checksums recomputed; a UDP checksum of zero stays.
func RefreshChecksums(frame []byte) []byte {
	fresh := slices.Clone(frame)
	packet := fresh[EthernetLength:]
	addresses, udp := packet[12:20], packet[IPv4Length:]
	if binary.BigEndian.Uint16(fresh[12:]) == etherTypeIPv6 {
		addresses, udp = packet[8:40], packet[IPv6Length:]
	} else {
		binary.BigEndian.PutUint16(packet[10:], 0)
		binary.BigEndian.PutUint16(packet[10:], ^sum(packet[:IPv4Length], 0))
	}
	if binary.BigEndian.Uint16(udp[6:]) == 0 {
		return fresh
	}
	binary.BigEndian.PutUint16(udp[6:], 0)
	source, _ := netip.AddrFromSlice(addresses[:len(addresses)/2])
	destination, _ := netip.AddrFromSlice(addresses[len(addresses)/2:])
	udp = udp[:binary.BigEndian.Uint16(udp[4:])]
	binary.BigEndian.PutUint16(udp[6:], udpChecksum(source, destination, udp))
	return fresh
}

func (f *Frame) bytes() []byte {
	frame := make([]byte, 12, 128)
	copy(frame[0:6], []byte{0x02, 0, 0, 0, 0, 0x01})
	copy(frame[6:12], []byte{0x02, 0, 0, 0, 0, 0x02})
	frame = binary.BigEndian.AppendUint16(frame, f.EtherType)

	udp := make([]byte, UDPLength, UDPLength+len(f.Payload))
	binary.BigEndian.PutUint16(udp[0:], f.Source.Port())
	binary.BigEndian.PutUint16(udp[2:], f.Destination.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(UDPLength+len(f.Payload)+f.UDPLengthDelta))
	udp = append(udp, f.Payload...)
	if !f.NoUDPChecksum {
		binary.BigEndian.PutUint16(udp[6:], udpChecksum(f.Source.Addr(), f.Destination.Addr(), udp))
	}
	if f.Source.Addr().Is4() {
		frame = append(frame, f.ipv4Header(len(udp))...)
	} else {
		frame = append(frame, f.ipv6Header(len(udp))...)
	}
	frame = append(frame, udp...)
	return append(frame, f.Padding...)
}

func (f *Frame) ipv4Header(payload int) []byte {
	header := make([]byte, int(f.IHL)*4)
	header[0] = 4<<4 | f.IHL
	binary.BigEndian.PutUint16(header[2:], uint16(len(header)+payload+f.IPLengthDelta))
	binary.BigEndian.PutUint16(header[4:], 0x1234)
	binary.BigEndian.PutUint16(header[6:], f.Fragment)
	header[8] = 64
	header[9] = f.Protocol
	copy(header[12:], f.Source.Addr().AsSlice())
	copy(header[16:], f.Destination.Addr().AsSlice())
	for i := IPv4Length; i < len(header); i++ {
		header[i] = 1 // no operation
	}
	binary.BigEndian.PutUint16(header[10:], ^sum(header, 0))
	return header
}

func (f *Frame) ipv6Header(payload int) []byte {
	header := make([]byte, IPv6Length, IPv6Length+len(f.Extension))
	header[0] = 6 << 4
	binary.BigEndian.PutUint16(header[4:], uint16(len(f.Extension)+payload+f.IPLengthDelta))
	header[6] = f.Protocol
	header[7] = 64
	copy(header[8:], f.Source.Addr().AsSlice())
	copy(header[24:], f.Destination.Addr().AsSlice())
	return append(header, f.Extension...)
}

// sum is the ones' complement sum of RFC 1071.
func sum(data []byte, seed uint32) uint16 {
	for i := 0; i < len(data); i += 2 {
		word := uint32(data[i]) << 8
		if i+1 < len(data) {
			word |= uint32(data[i+1])
		}
		seed += word
	}
	for seed > 0xffff {
		seed = seed&0xffff + seed>>16
	}
	return uint16(seed)
}

func udpChecksum(source, destination netip.Addr, udp []byte) uint16 {
	seed := uint32(sum(source.AsSlice(), 0)) + uint32(sum(destination.AsSlice(), 0)) + protocolUDP + uint32(len(udp))
	if checksum := ^sum(udp, seed); checksum != 0 {
		return checksum
	}
	return 0xffff // RFC 768: a computed zero
}

// Datagram is a frame taken apart again.
type Datagram struct {
	Source, Destination netip.AddrPort
	Payload             []byte
}

// Parse takes a frame apart that holds a plain UDP datagram, and verifies its lengths and checksums.
func Parse(frame []byte) (d Datagram, err error) {
	if len(frame) < EthernetLength+IPv4Length {
		return d, fmt.Errorf("frame of %d octets is too short", len(frame))
	}
	var source, destination netip.Addr
	packet := frame[EthernetLength:]
	header := IPv6Length
	var length int
	switch binary.BigEndian.Uint16(frame[12:]) {
	case etherTypeIPv4:
		header = IPv4Length
		length = int(binary.BigEndian.Uint16(packet[2:]))
		if check := sum(packet[:header], 0); check != 0xffff {
			return d, fmt.Errorf("IPv4 header sums to %#x: checksum is wrong", check)
		}
		source, _ = netip.AddrFromSlice(packet[12:16])
		destination, _ = netip.AddrFromSlice(packet[16:20])
	case etherTypeIPv6:
		length = IPv6Length + int(binary.BigEndian.Uint16(packet[4:]))
		source, _ = netip.AddrFromSlice(packet[8:24])
		destination, _ = netip.AddrFromSlice(packet[24:40])
	default:
		return d, fmt.Errorf("ethertype %#x is not IP", frame[12:14])
	}
	if length > len(packet) || length < header+UDPLength {
		return d, fmt.Errorf("IP length %d does not fit a packet of %d", length, len(packet))
	}
	udp := packet[header:length]
	if check := binary.BigEndian.Uint16(udp[6:]); check != 0 || source.Is6() {
		seed := uint32(sum(source.AsSlice(), 0)) + uint32(sum(destination.AsSlice(), 0)) + protocolUDP + uint32(len(udp))
		if got := sum(udp, seed); got != 0xffff {
			return d, fmt.Errorf("UDP datagram sums to %#x: checksum %#x is wrong", got, check)
		}
	}
	d.Source = netip.AddrPortFrom(source, binary.BigEndian.Uint16(udp[0:]))
	d.Destination = netip.AddrPortFrom(destination, binary.BigEndian.Uint16(udp[2:]))
	d.Payload = udp[UDPLength:]
	return d, nil
}

// Dump returns a frame decoded as far as it can be, and in the form of hexdump -C, for failure output.
func Dump(frame []byte) string {
	return describe(frame) + "\n" + hex.Dump(frame)
}

func describe(frame []byte) string {
	datagram, err := Parse(frame)
	if err != nil {
		return fmt.Sprintf("%d octets: %v", len(frame), err)
	}
	head := fmt.Sprintf("UDP %s > %s, %d octets", datagram.Source, datagram.Destination, len(datagram.Payload))
	message := new(dns.Msg)
	if err := message.Unpack(datagram.Payload); err != nil {
		return fmt.Sprintf("%s, not DNS: %v", head, err)
	}
	return head + "\n" + message.String()
}
