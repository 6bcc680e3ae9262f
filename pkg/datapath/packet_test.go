//go:build linux

package datapath

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// A packetCase is a query for a name in the zone in a packet that is unusual in one way.
type packetCase struct {
	name   string
	frame  []byte
	reason string
}

func testPackets(t *testing.T, cases []packetCase) {
	t.Helper()
	h := newHarness(t)
	for _, program := range queryPrograms {
		for _, c := range cases {
			t.Run(fmt.Sprintf("%s/%s", c.name, program), func(t *testing.T) { h.expect(t, program, c.frame, c.reason) })
		}
	}
	h.wantInFlight(t, 0)
}

func TestIPv4Headers(t *testing.T) {
	message := query(t, inZone)
	udp := func(edit func(*pktgen.Frame)) []byte { return pktgen.UDP(client4, listener4, message, edit) }
	var cases []packetCase
	for ihl := uint8(6); ihl <= 15; ihl++ {
		cases = append(cases, packetCase{fmt.Sprint("IHL ", ihl), udp(func(f *pktgen.Frame) { f.IHL = ihl }), "passed_ip_options"})
	}
	for ihl := range byte(5) {
		frame := udp(func(*pktgen.Frame) {})
		frame[pktgen.EthernetLength] = 4<<4 | ihl
		cases = append(cases, packetCase{fmt.Sprint("IHL ", ihl), frame, "passed_ip_options"})
	}
	for name, fragment := range map[string]uint16{
		"first fragment": 0x2000, "later fragment": 0x00b9, "middle fragment": 0x2001, "last possible fragment": 0x1fff,
		"first fragment with DF": 0x6000,
	} {
		cases = append(cases, packetCase{name, udp(func(f *pktgen.Frame) { f.Fragment = fragment }), "passed_fragment"})
	}
	for name, delta := range map[string]int{
		"total length above the frame": 1, "total length far above": 1000, "total length below": -1,
		"total length without a message": -len(message), "total length without UDP": -len(message) - 8, "total length 0": -len(message) - 28,
	} {
		cases = append(cases, packetCase{name, udp(func(f *pktgen.Frame) { f.IPLengthDelta = delta }), "passed_malformed"})
	}
	for name, delta := range map[string]int{
		"UDP length above": 1, "UDP length below": -1, "UDP length of the header": -len(message), "UDP length below the header": -len(message) - 1,
		"UDP length 0": -len(message) - 8,
	} {
		cases = append(cases, packetCase{name, udp(func(f *pktgen.Frame) { f.UDPLengthDelta = delta }), "passed_malformed"})
	}
	// Lengths that agree with each other, and only not with the frame; a sum of 16 bits wraps around.
	headers := pktgen.IPv4Length + pktgen.UDPLength + len(message)
	for _, total := range []int{headers + 1, headers + 100, 65521, 65522, 65530, 65534, 65535} {
		cases = append(cases, packetCase{fmt.Sprint("both lengths agree on ", total), udp(func(f *pktgen.Frame) {
			f.IPLengthDelta = total - headers
			f.UDPLengthDelta = f.IPLengthDelta
		}), "passed_malformed"})
	}
	testPackets(t, cases)
}

// What is no fragment, and what need not be looked at.
func TestSteeredIPv4Variants(t *testing.T) {
	h := newHarness(t)
	f := families[0]
	message := query(t, inZone)
	edits := map[string]pktgen.Option{
		"DF":           func(frame *pktgen.Frame) { frame.Fragment = 0x4000 },
		"reserved bit": func(frame *pktgen.Frame) { frame.Fragment = 0x8000 },
		"no checksum":  func(frame *pktgen.Frame) { frame.NoUDPChecksum = true },
		"source port 0": func(frame *pktgen.Frame) {
			frame.Source = netip.AddrPortFrom(frame.Source.Addr(), 0)
		},
		"source port 53": func(frame *pktgen.Frame) {
			frame.Source = netip.AddrPortFrom(frame.Source.Addr(), 53)
		},
	}
	for name, edit := range edits {
		for _, program := range queryPrograms {
			t.Run(name+"/"+string(program), func(t *testing.T) {
				h.forget(t, h.steer(t, program, f, f.query(message, edit)))
			})
		}
	}
	// TOS and TTL differ between clients; neither is touched.
	frame := f.query(message)
	frame[pktgen.EthernetLength+1], frame[pktgen.EthernetLength+8] = 0xb8, 1
	h.forget(t, h.steer(t, FromHost, f, pktgen.RefreshChecksums(frame)))
}

func TestIPv6Headers(t *testing.T) {
	message := query(t, inZone)
	udp := func(edit func(*pktgen.Frame)) []byte { return pktgen.UDP(client6, listener6, message, edit) }
	options := []byte{17, 0, 1, 4, 0, 0, 0, 0} // UDP follows; PadN
	extension := func(header uint8, octets ...byte) []byte {
		return udp(func(f *pktgen.Frame) { f.Protocol, f.Extension = header, octets })
	}
	cases := []packetCase{
		{"hop-by-hop options", extension(0, options...), "passed_ip_options"},
		{"routing header", extension(43, options...), "passed_ip_options"},
		{"first fragment", extension(44, 17, 0, 0, 1, 0, 0, 0, 1), "passed_ip_options"},
		{"atomic fragment", extension(44, 17, 0, 0, 0, 0, 0, 0, 1), "passed_ip_options"},
		{"later fragment", extension(44, 17, 0, 1, 0, 0, 0, 0, 1), "passed_ip_options"},
		{"destination options", extension(60, options...), "passed_ip_options"},
		{"authentication header", extension(51, slices.Concat([]byte{17, 4}, make([]byte, 22))...), "passed_ip_options"},
		{"mobility header", extension(135, options...), "passed_ip_options"},
		{"nine headers", extension(0, slices.Concat(slices.Repeat([]byte{60, 0, 1, 4, 0, 0, 0, 0}, 8), options)...), "passed_ip_options"},
		{"no next header", extension(59), notOurs},
		{"ICMPv6", extension(58), notOurs},
		{"TCP by its number", extension(6), notOurs},
		{"ESP", extension(50), notOurs},
	}
	for name, delta := range map[string]int{
		"payload length above the frame": 1, "payload length below": -1, "payload length of the UDP header": -len(message),
		"payload length without UDP": -len(message) - 1, "payload length 0 (jumbogram)": -len(message) - 8,
		"payload length 65535": 65535 - len(message) - 8,
	} {
		cases = append(cases, packetCase{name, udp(func(f *pktgen.Frame) { f.IPLengthDelta = delta }), "passed_malformed"})
	}
	for name, delta := range map[string]int{
		"UDP length above": 1, "UDP length below": -1, "UDP length of the header": -len(message), "UDP length 0": -len(message) - 8,
	} {
		cases = append(cases, packetCase{name, udp(func(f *pktgen.Frame) { f.UDPLengthDelta = delta }), "passed_malformed"})
	}
	for _, delta := range []int{1, 65535 - 100 - len(message), 65535 - 62 - len(message), 65535 - 8 - len(message)} {
		cases = append(cases, packetCase{
			fmt.Sprint("both lengths above the frame by ", delta),
			udp(func(f *pktgen.Frame) { f.IPLengthDelta, f.UDPLengthDelta = delta, delta }), "passed_malformed",
		})
	}
	testPackets(t, cases)
}

// Whatever is not for a listener stays uncounted and untouched, be it broken or not.
func TestNotOurs(t *testing.T) {
	message := query(t, inZone)
	var cases []packetCase
	for _, f := range families {
		add := func(name string, frame []byte) {
			cases = append(cases, packetCase{f.name + " " + name, frame, notOurs})
		}
		to := func(address netip.AddrPort, options ...pktgen.Option) []byte {
			return pktgen.UDP(f.client, address, message, options...)
		}
		for _, port := range []uint16{0, 1, 52, 54, 0x3500, 5353, 65535} {
			add(fmt.Sprint("port ", port), to(netip.AddrPortFrom(f.listener.Addr(), port)))
		}
		other := netip.AddrPortFrom(f.listener.Addr().Next(), 53)
		add("other address", to(other))
		add("endpoint's address", to(f.backend))
		add("other address, cut", to(other, func(frame *pktgen.Frame) { frame.IPLengthDelta = 1 }))
		add("from the listener", pktgen.UDP(f.listener, f.client, message))
		add("TCP", pktgen.TCP(f.client, f.listener, message))
		for _, protocol := range []uint8{1, 2, 6, 33, 132, 136} {
			add(fmt.Sprint("protocol ", protocol), to(f.listener, func(frame *pktgen.Frame) { frame.Protocol = protocol }))
		}
		for _, etherType := range []uint16{0x0806, 0x8035, 0x8100, 0x88a8, 0x8847, 0x88e5, 0x0000, 0x05dc, 0xffff, 0x0008, 0xdd86} {
			add(fmt.Sprintf("ethertype %#x", etherType), to(f.listener, func(frame *pktgen.Frame) { frame.EtherType = etherType }))
		}
		tagged := to(f.listener)
		add("802.1Q tag in the frame", slices.Insert(tagged, 12, 0x81, 0x00, 0x00, 0x05))
		add("headers only, cut", to(f.listener)[:f.dnsOffset-1])
	}
	// The ethertype of the other family.
	swapped := pktgen.UDP(client6, listener6, message)
	binary.BigEndian.PutUint16(swapped[12:], 0x0800)
	cases = append(cases, packetCase{"IPv6 packet as IPv4", swapped, notOurs})
	arp := make([]byte, 42)
	copy(arp[12:], []byte{0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1})
	cases = append(cases, packetCase{"ARP", arp, notOurs}, packetCase{"Ethernet header only", arp[:14], notOurs})
	testPackets(t, cases)
}

// A packet of several datagrams, which segmentation offload takes apart only later, is not one query.
func TestOffloadedSegments(t *testing.T) {
	h := newHarness(t)
	for _, f := range families {
		for _, program := range queryPrograms {
			frame := f.query(query(t, inZone))
			h.expectIn(t, program, frame, testScope, "passed_malformed", skbContext(skbGSOSize, 20))
		}
	}
}
