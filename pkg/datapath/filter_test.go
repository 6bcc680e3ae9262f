//go:build linux

package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/sample"
)

// filterFamily is a worker that may ask at the KubeSwitch address, and somebody who may not.
type filterFamily struct {
	family
	stranger netip.AddrPort
}

var filterFamilies = []filterFamily{
	{
		family{
			"IPv4", netip.MustParseAddrPort("172.19.1.100:40000"), netip.MustParseAddrPort("172.19.1.1:53"), backend4, nat4,
			families[0].shortest, families[0].dnsOffset,
		},
		netip.MustParseAddrPort("172.19.2.100:40000"),
	},
	{
		family{
			"IPv6", netip.MustParseAddrPort("[fd00:19::100]:40000"), netip.MustParseAddrPort("[fd00:19::1]:53"), backend6, nat6,
			families[1].shortest, families[1].dnsOffset,
		},
		netip.MustParseAddrPort("[fd00:1a::100]:40000"),
	},
}

func filterPrefixes() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("172.19.1.0/24"), netip.MustParsePrefix("fd00:19::/64")}
}

// newFilterHarness has listeners on the KubeSwitch, and prefixes that may ask there.
func newFilterHarness(tb testing.TB) *harness {
	tb.Helper()
	h := newHarness(tb)
	var listeners []Listener
	for _, f := range filterFamilies {
		listeners = append(listeners, Listener{Address: f.listener, Scope: ScopeKubeSwitch})
	}
	if err := h.ReplaceListeners(listeners); err != nil {
		tb.Fatal(err)
	}
	h.replaceAllowed(tb, filterPrefixes()...)
	return h
}

func (h *harness) replaceAllowed(tb testing.TB, prefixes ...netip.Prefix) {
	tb.Helper()
	sources := make([]Source, 0, len(prefixes))
	for _, prefix := range prefixes {
		sources = append(sources, Source{Prefix: prefix, Ifindex: AnyInterface, Allowed: true})
	}
	if err := h.ReplaceSources(sources); err != nil {
		tb.Fatal(err)
	}
}

// filter runs the ingress filter, and returns its reason for dropping the frame, or notOurs. The frame must not be changed, and
// be counted once if and only if it is dropped.
func (h *harness) filter(tb testing.TB, frame []byte) (reason string) {
	tb.Helper()
	run := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256)}
	verdict, err := h.objects.DnsFilter.Run(&run)
	if err != nil {
		tb.Fatalf("%s on %d octets: %v", IngressFilter, len(frame), err)
	}
	counted := h.countedSince(tb)
	name := map[uint32]string{1: "drop", 2: "pass"}[verdict]
	if !bytes.Equal(run.DataOut, frame) {
		tb.Errorf("%s: verdict %s, changed\nin: %s\nout: %s", IngressFilter, name, pktgen.Dump(frame), pktgen.Dump(run.DataOut))
	}
	for _, refusal := range []string{"refused_source", "refused_message"} {
		if maps.Equal(counted, map[string]uint64{"kubeswitch:" + refusal: 1}) {
			reason = refusal
		}
	}
	if name == "pass" && len(counted) > 0 || name == "drop" && reason == notOurs || name == "" {
		tb.Fatalf("%s: verdict %d (%s), counted %v\n%s", IngressFilter, verdict, name, counted, pktgen.Dump(frame))
	}
	return reason
}

func (h *harness) expectFilter(tb testing.TB, frame []byte, want string) {
	tb.Helper()
	if got := h.filter(tb, frame); got != want {
		tb.Errorf("%s: reason %q, want %q\n%s", IngressFilter, got, want, pktgen.Dump(frame))
	}
}

// What comes from inside and from outside.
type filterCase struct {
	name            string
	frame           func(source netip.AddrPort) []byte
	inside, outside string
}

func TestIngressFilter(t *testing.T) {
	h := newFilterHarness(t)
	message := query(t, inZone)
	for _, f := range filterFamilies {
		var cases []filterCase
		add := func(name, inside, outside string, frame func(source netip.AddrPort) []byte) {
			cases = append(cases, filterCase{name, frame, inside, outside})
		}
		udp := func(name, inside, outside string, payload []byte, options ...pktgen.Option) {
			add(name, inside, outside, func(source netip.AddrPort) []byte { return pktgen.UDP(source, f.listener, payload, options...) })
		}
		edit := func(edit func(*pktgen.Frame)) pktgen.Option { return edit }

		// Any query, and what is none that TC and user space have the say on.
		udp("cluster name", notOurs, "refused_source", message)
		udp("external name", notOurs, "refused_source", query(t, "example.com"))
		udp("EDNS", notOurs, "refused_source", query(t, inZone, withOPT(4096)))
		udp("opcode", notOurs, "refused_source", put(message, 2, 0x28))
		udp("QDCOUNT 0", notOurs, "refused_source", put(message, 4, 0, 0))
		udp("header only", notOurs, "refused_source", message[:12])
		udp("cut", notOurs, "refused_source", message[:20])
		udp("3000 octets", notOurs, "refused_source", append(slices.Clone(message), make([]byte, 3000-len(message))...))
		udp("padded frame", notOurs, "refused_source", message[:12], edit(func(frame *pktgen.Frame) { frame.Padding = make([]byte, 20) }))

		// What is no query whoever sends it.
		udp("QR", "refused_message", "refused_source", put(message, 2, 0x81))
		udp("QR alone", "refused_message", "refused_source", put(message[:12], 2, 0x80))
		udp("QR, 3000 octets", "refused_message", "refused_source", put(append(slices.Clone(message), make([]byte, 3000-len(message))...), 2, 0x80))
		for length := range 12 {
			udp(fmt.Sprint(length, " octets"), "refused_message", "refused_source", message[:length])
			// The rest of a query behind the datagram is not looked at.
			udp(fmt.Sprint(length, " octets and padding"), "refused_message", "refused_source", message[:length],
				edit(func(frame *pktgen.Frame) { frame.Padding = message[length:] }))
		}

		// Lengths that disagree: what the message is, is not known.
		for name, message := range map[string][]byte{"": message, ", QR": put(message, 2, 0x81), ", short": message[:3]} {
			udp("IP length above"+name, notOurs, "refused_source", message, edit(func(frame *pktgen.Frame) { frame.IPLengthDelta = 1 }))
			udp("IP length below"+name, notOurs, "refused_source", message, edit(func(frame *pktgen.Frame) { frame.IPLengthDelta = -1 }))
			udp("UDP length above"+name, notOurs, "refused_source", message, edit(func(frame *pktgen.Frame) { frame.UDPLengthDelta = 1 }))
			udp("UDP length below"+name, notOurs, "refused_source", message, edit(func(frame *pktgen.Frame) { frame.UDPLengthDelta = -1 }))
		}

		// TCP: only the source.
		add("SYN", notOurs, "refused_source", func(source netip.AddrPort) []byte { return pktgen.SYN(source, f.listener) })
		add("segment", notOurs, "refused_source", func(source netip.AddrPort) []byte { return pktgen.TCP(source, f.listener, message) })
		add("reply in a segment", notOurs, "refused_source", func(source netip.AddrPort) []byte {
			return pktgen.TCP(source, f.listener, put(message, 2, 0x81))
		})

		// Other services and other hosts.
		for _, port := range []uint16{0, 1, 52, 54, 0x3500, 5353, 65535} {
			other := netip.AddrPortFrom(f.listener.Addr(), port)
			add(fmt.Sprint("UDP port ", port), notOurs, notOurs, func(source netip.AddrPort) []byte { return pktgen.UDP(source, other, message) })
			add(fmt.Sprint("TCP port ", port), notOurs, notOurs, func(source netip.AddrPort) []byte { return pktgen.SYN(source, other) })
		}
		other := netip.AddrPortFrom(f.listener.Addr().Next(), 53)
		add("UDP, other address", notOurs, notOurs, func(source netip.AddrPort) []byte { return pktgen.UDP(source, other, message) })
		add("QR, other address", notOurs, notOurs, func(source netip.AddrPort) []byte { return pktgen.UDP(source, other, put(message, 2, 0x81)) })
		add("TCP, other address", notOurs, notOurs, func(source netip.AddrPort) []byte { return pktgen.SYN(source, other) })
		add("from port 53", notOurs, notOurs, func(source netip.AddrPort) []byte {
			return pktgen.UDP(netip.AddrPortFrom(source.Addr(), 53), netip.AddrPortFrom(f.listener.Addr(), 40000), put(message, 2, 0x81))
		})
		for _, protocol := range []uint8{1, 2, 33, 47, 50, 58, 132, 136} {
			udp(fmt.Sprint("protocol ", protocol), notOurs, notOurs, message, edit(func(frame *pktgen.Frame) { frame.Protocol = protocol }))
		}
		for _, etherType := range []uint16{0x0806, 0x8100, 0x88a8, 0x8847, 0x0000, 0x05dc, 0x0008, 0xdd86} {
			udp(fmt.Sprintf("ethertype %#x", etherType), notOurs, notOurs, message, edit(func(frame *pktgen.Frame) { frame.EtherType = etherType }))
		}
		add("802.1Q tag", notOurs, notOurs, func(source netip.AddrPort) []byte {
			return slices.Insert(pktgen.UDP(source, f.listener, message), 12, 0x81, 0x00, 0x00, 0x05)
		})

		// Where the port can't be read.
		odd := make(map[string]func(*pktgen.Frame))
		if f.name == "IPv4" {
			for ihl := uint8(6); ihl <= 15; ihl++ {
				odd[fmt.Sprint("IHL ", ihl)] = func(frame *pktgen.Frame) { frame.IHL = ihl }
			}
			for _, fragment := range []uint16{0x2000, 0x00b9, 0x2001, 0x1fff, 0x6000} {
				odd[fmt.Sprintf("fragment %#x", fragment)] = func(frame *pktgen.Frame) { frame.Fragment = fragment }
			}
			for _, whole := range []uint16{0x4000, 0x8000, 0xc000} {
				udp(fmt.Sprintf("no fragment %#x", whole), notOurs, "refused_source", message, edit(func(frame *pktgen.Frame) { frame.Fragment = whole }))
			}
		} else {
			for _, header := range []uint8{0, 43, 44, 51, 60, 135} {
				odd[fmt.Sprint("extension header ", header)] = func(frame *pktgen.Frame) {
					frame.Extension, frame.Protocol = []byte{frame.Protocol, 0, 1, 4, 0, 0, 0, 0}, header
				}
			}
			udp("no checksum", notOurs, "refused_source", put(message, 2, 0x81), edit(func(frame *pktgen.Frame) { frame.NoUDPChecksum = true }))
		}
		for name, change := range odd {
			udp("UDP, "+name, notOurs, notOurs, message, change)
			udp("UDP with QR, "+name, notOurs, notOurs, put(message, 2, 0x81), change)
			add("TCP, "+name, notOurs, notOurs, func(source netip.AddrPort) []byte { return pktgen.SYN(source, f.listener, change) })
		}
		for _, version := range []byte{0x05, 0x35, 0x55, 0x75, 0xf5} {
			for name, build := range map[string]func(source netip.AddrPort) []byte{
				"UDP": func(source netip.AddrPort) []byte { return pktgen.UDP(source, f.listener, message) },
				"TCP": func(source netip.AddrPort) []byte { return pktgen.SYN(source, f.listener) },
			} {
				add(fmt.Sprintf("%s, version %d", name, version>>4), notOurs, notOurs, func(source netip.AddrPort) []byte {
					return put(build(source), pktgen.EthernetLength, version)
				})
			}
		}

		for _, c := range cases {
			t.Run(c.name+"/"+f.name, func(t *testing.T) {
				h.expectFilter(t, c.frame(f.client), c.inside)
				h.expectFilter(t, c.frame(f.stranger), c.outside)
			})
		}
	}
	arp := make([]byte, 42)
	copy(arp[12:], []byte{0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1})
	for length := pktgen.EthernetLength; length <= len(arp); length++ {
		h.expectFilter(t, arp[:length], notOurs)
	}
}

// Without a prefix nobody may ask, and without a listener nobody is stopped.
func TestIngressFilterEmptyMaps(t *testing.T) {
	h := newFilterHarness(t)
	for _, without := range []string{"prefixes", "listeners"} {
		want := "refused_source"
		if without == "prefixes" {
			h.replaceAllowed(t)
		} else if err := h.ReplaceListeners(nil); err != nil {
			t.Fatal(err)
		} else {
			want = notOurs
		}
		for _, f := range filterFamilies {
			for _, source := range []netip.AddrPort{f.client, f.stranger, netip.AddrPortFrom(f.listener.Addr(), 40000)} {
				h.expectFilter(t, pktgen.UDP(source, f.listener, query(t, inZone)), want)
				h.expectFilter(t, pktgen.SYN(source, f.listener), want)
			}
		}
	}
}

// Each prefix of a frame: from inside it goes on, from outside it stops as soon as the ports are there.
func TestIngressFilterTruncationSweep(t *testing.T) {
	h := newFilterHarness(t)
	count := 0
	for _, f := range filterFamilies {
		for _, message := range sweepMessages(t) {
			for _, source := range []netip.AddrPort{f.client, f.stranger} {
				for _, c := range []struct {
					frame    []byte
					readable int
				}{
					{pktgen.UDP(source, f.listener, message), f.dnsOffset},
					{pktgen.TCP(source, f.listener, message), f.dnsOffset - pktgen.UDPLength + pktgen.TCPLength},
				} {
					for length := pktgen.EthernetLength; length <= len(c.frame); length++ {
						want := notOurs
						if source == f.stranger && length >= c.readable {
							want = "refused_source"
						}
						h.expectFilter(t, slices.Clone(c.frame[:length]), want)
						count++
					}
				}
			}
		}
	}
	t.Logf("%d frames", count)
}

// referenceFilter says what the ingress filter is to do with a frame, from the RFCs.
func referenceFilter(frame []byte, listeners []netip.AddrPort, allowed []netip.Prefix) string {
	if len(frame) < pktgen.EthernetLength {
		return notOurs
	}
	// A tag of VLAN 0 has but a priority.
	isTag := slices.Contains([]uint16{0x8100, 0x88a8}, binary.BigEndian.Uint16(frame[12:]))
	if isTag && len(frame) >= pktgen.EthernetLength+4 && binary.BigEndian.Uint16(frame[14:])&0xfff == 0 {
		frame = slices.Delete(slices.Clone(frame), 12, 16)
	}
	packet := frame[pktgen.EthernetLength:]
	word := func(at int) int { return int(binary.BigEndian.Uint16(packet[at:])) }
	var source, destination netip.Addr
	var header, total int
	var protocol byte
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		header = pktgen.IPv4Length
		if len(packet) < header || packet[0] != 0x45 || word(6)&0x3fff != 0 {
			return notOurs
		}
		protocol, total = packet[9], word(2)
		source, destination = netip.AddrFrom4([4]byte(packet[12:])), netip.AddrFrom4([4]byte(packet[16:]))
	case 0x86dd:
		header = pktgen.IPv6Length
		if len(packet) < header || packet[0]>>4 != 6 {
			return notOurs
		}
		protocol, total = packet[6], header+word(4)
		source, destination = netip.AddrFrom16([16]byte(packet[8:])), netip.AddrFrom16([16]byte(packet[24:]))
		if source.Is4In6() || destination.Is4In6() {
			return notOurs
		}
	default:
		return notOurs
	}
	least := map[byte]int{6: pktgen.TCPLength, 17: pktgen.UDPLength}[protocol]
	if least == 0 || len(packet) < header+least {
		return notOurs
	}
	if !slices.Contains(listeners, netip.AddrPortFrom(destination, uint16(word(header+2)))) {
		return notOurs
	}
	if !slices.ContainsFunc(allowed, func(prefix netip.Prefix) bool { return prefix.Contains(source) }) {
		return "refused_source"
	}
	agree := total >= header+least && total <= len(packet) && word(header+4) == total-header && (header == pktgen.IPv4Length || word(header+6) != 0)
	if message := header + pktgen.UDPLength; protocol == 17 && agree && (total-message < pktgen.DNSLength || packet[message+2]&0x80 != 0) {
		return "refused_message"
	}
	return notOurs
}

// Random frames, most of them broken in a header: the ingress filter does as the reference says, and never stops what the next
// program would steer. What that one does not see as DNS, the ingress filter does not stop either, but for TCP.
func TestIngressFilterDifferential(t *testing.T) {
	const runs = 20_000
	random := sample.Random(t)
	h := newFilterHarness(t)
	a := newAssembler(t, random)
	var listeners []netip.AddrPort
	for _, f := range filterFamilies {
		listeners = append(listeners, f.listener)
	}
	reasons, clients := make(map[string]int), make(map[string]int)
	for range runs {
		f := filterFamilies[random.IntN(len(filterFamilies))]
		source := []netip.AddrPort{f.client, f.stranger}[random.IntN(2)]
		message := a.draw()
		if random.IntN(4) == 0 {
			message = message[:random.IntN(len(message)+1)]
		}
		frame := pktgen.UDP(source, f.listener, message)
		if random.IntN(4) == 0 {
			frame = pktgen.TCP(source, f.listener, message)
		}
		for range random.IntN(3) {
			// In the headers; the first octet of the DNS flags is within reach.
			at := 12 + random.IntN(min(f.dnsOffset+3, len(frame))-12)
			switch random.IntN(3) {
			case 0:
				frame[at] ^= 1 << random.IntN(8)
			case 1:
				frame[at] = byte(random.Uint32())
			case 2:
				frame[at] += byte(1 - 2*random.IntN(2))
			}
		}
		if random.IntN(4) == 0 {
			frame = frame[:pktgen.EthernetLength+random.IntN(len(frame)-pktgen.EthernetLength+1)]
		}
		want := referenceFilter(frame, listeners, filterPrefixes())
		got := h.filter(t, frame)
		if got != want {
			t.Fatalf("filter: %q, reference: %q\n%s", got, want, pktgen.Dump(frame))
		}
		reasons[got]++

		// The kernel's test run takes none for TC that its ethertype belies.
		var protocol byte
		switch ipv4, ipv6 := bytes.HasPrefix(frame[12:], []byte{0x08, 0}), bytes.HasPrefix(frame[12:], []byte{0x86, 0xdd}); {
		case ipv4 && len(frame) >= families[0].shortest:
			protocol = frame[pktgen.EthernetLength+9]
		case ipv6 && len(frame) >= families[1].shortest:
			protocol = frame[pktgen.EthernetLength+6]
		default:
			continue
		}
		verdict, out := h.run(t, FromClient, frame, nil)
		if verdict == "redirect" {
			h.free(t, binary.BigEndian.Uint16(out[f.dnsOffset-pktgen.UDPLength:]))
		}
		reason := notOurs
		for counted := range h.countedSince(t) {
			reason = strings.TrimPrefix(counted, "kubeswitch:")
		}
		clients[reason]++
		unreadable := reason == "passed_fragment" || reason == "passed_ip_options"
		switch {
		case got == "refused_message" && reason != "passed_response" && reason != "passed_malformed",
			got == notOurs && reason == "passed_response",
			got == "refused_source" && unreadable,
			protocol == 17 && (got == "refused_source") != (reason == "refused_source"),
			got != notOurs && reason == notOurs && protocol != 6:
			t.Fatalf("filter: %q, %s: %q\n%s", got, FromClient, reason, pktgen.Dump(frame))
		}
	}
	t.Logf("filter: %v", reasons)
	t.Logf("%s: %v", FromClient, clients)
	for _, reason := range []string{notOurs, "refused_source", "refused_message"} {
		if reasons[reason] < runs/100 {
			t.Errorf("only %d of %d frames were %q", reasons[reason], runs, reason)
		}
	}
	if clients["steered"] < runs/100 {
		t.Errorf("only %d of %d frames were steered", clients["steered"], runs)
	}
}

// mapped is a prefix in the one address space that dns_sources has.
func mapped(prefix netip.Prefix) netip.Prefix {
	if prefix.Addr().Is4() {
		return netip.PrefixFrom(netip.AddrFrom16(prefix.Addr().As16()), 96+prefix.Bits())
	}
	return prefix
}

// expectAllowed runs a query of an address, over IPv4 or IPv6 as it is.
func (h *harness) expectAllowed(tb testing.TB, address netip.Addr, message []byte, allowed bool) {
	tb.Helper()
	f := filterFamilies[0]
	if address.Is6() {
		f = filterFamilies[1]
	}
	want := notOurs
	if !allowed {
		want = "refused_source"
	}
	h.expectFilter(tb, pktgen.UDP(netip.AddrPortFrom(address, 40000), f.listener, message), want)
}

func TestAllowedPrefixes(t *testing.T) {
	h := newFilterHarness(t)
	message := query(t, inZone)
	for _, c := range []struct {
		prefixes        string
		inside, outside string
	}{
		{"", "", "10.0.0.1 127.0.0.1 0.0.0.0 255.255.255.255 ::1 :: fd00::1"},
		{"0.0.0.0/0", "10.0.0.1 0.0.0.0 255.255.255.255", "::1 :: fd00::1 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"},
		{"10.0.0.1/32", "10.0.0.1", "10.0.0.0 10.0.0.2 11.0.0.1 138.0.0.1 ::a00:1 a00:1::"},
		{"0.0.0.0/1", "0.0.0.0 127.255.255.255", "128.0.0.0 255.255.255.255"},
		{"128.0.0.0/1", "128.0.0.0 255.255.255.255", "0.0.0.0 127.255.255.255"},
		{"10.1.2.254/31", "10.1.2.254 10.1.2.255", "10.1.2.253 10.1.3.0"},
		// The host's part of an address is not compared.
		{"172.19.1.1/24", "172.19.1.0 172.19.1.255", "172.19.0.255 172.19.2.0"},
		// One inside of another, in either order; the outer one goes on to count.
		{"10.0.0.0/8 10.1.0.0/16", "10.0.0.1 10.1.0.1 10.255.255.255", "11.0.0.0 9.255.255.255"},
		{"10.1.0.0/16 10.0.0.0/8", "10.0.0.1 10.1.0.1 10.255.255.255", "11.0.0.0 9.255.255.255"},
		{"10.1.0.0/16 10.1.0.0/16", "10.1.0.1", "10.0.0.1"},
		{"10.0.0.0/9 10.128.0.0/9", "10.0.0.0 10.127.255.255 10.128.0.0 10.255.255.255", "11.0.0.0"},
		{"fd00:19::/64", "fd00:19:: fd00:19::ffff:ffff:ffff:ffff", "fd00:19:0:1:: fd00:18:ffff:ffff:ffff:ffff:ffff:ffff 172.19.1.1"},
		{"fd00::1/128", "fd00::1", "fd00:: fd00::2 fd00::8000:0:0:1"},
		{"fd00::/127", "fd00:: fd00::1", "fd00::2"},
		{"fd00::/65", "fd00::7fff:ffff:ffff:ffff", "fd00::8000:0:0:0"},
		{"8000::/1", "ffff:: fd00::1 8000::", "7fff:: ::1 10.0.0.1"},
		{"fe80::/10 172.19.1.0/24", "fe80::1 febf::1 172.19.1.9", "fec0::1 172.19.0.9"},
	} {
		t.Run(c.prefixes, func(t *testing.T) {
			var prefixes []netip.Prefix
			for prefix := range strings.FieldsSeq(c.prefixes) {
				prefixes = append(prefixes, netip.MustParsePrefix(prefix))
			}
			// Each set replaces the one before.
			h.replaceAllowed(t, prefixes...)
			for address := range strings.FieldsSeq(c.inside) {
				h.expectAllowed(t, netip.MustParseAddr(address), message, true)
			}
			for address := range strings.FieldsSeq(c.outside) {
				h.expectAllowed(t, netip.MustParseAddr(address), message, false)
			}
		})
	}
}

// Random sets, each of which replaces the one before, and addresses at their edges.
func TestRandomAllowedPrefixes(t *testing.T) {
	const rounds, perRound = 100, 60
	random := sample.Random(t)
	h := newFilterHarness(t)
	message := query(t, inZone)
	draw := func() netip.Addr {
		// Few bits, so that prefixes overlap.
		if random.IntN(2) == 0 {
			return netip.AddrFrom4([4]byte{10, byte(random.IntN(2)) << 7, byte(random.IntN(4)), byte(random.IntN(256))})
		}
		address := netip.MustParseAddr("fd00::").As16()
		address[7], address[8], address[15] = byte(random.IntN(4)), byte(random.IntN(2))<<7, byte(random.IntN(256))
		return netip.AddrFrom16(address)
	}
	counts := make(map[bool]int)
	for range rounds {
		var prefixes []netip.Prefix
		for range random.IntN(6) {
			address := draw()
			// No IPv6 prefix so short that it has the mapped addresses in it.
			prefix := netip.PrefixFrom(address, 8+random.IntN(address.BitLen()-8+1))
			prefixes = append(prefixes, prefix)
		}
		h.replaceAllowed(t, prefixes...)
		for range perRound {
			address := draw()
			if len(prefixes) > 0 && random.IntN(2) == 0 {
				address = prefixes[random.IntN(len(prefixes))].Masked().Addr()
				if random.IntN(2) == 0 && address.Prev().IsValid() {
					address = address.Prev()
				}
			}
			allowed := slices.ContainsFunc(prefixes, func(prefix netip.Prefix) bool { return prefix.Contains(address) })
			h.expectAllowed(t, address, message, allowed)
			counts[allowed]++
		}
		var key dnsbpfDnsPrefix
		var value dnsbpfDnsSource
		distinct := make(map[netip.Prefix]bool)
		for _, prefix := range prefixes {
			distinct[mapped(prefix).Masked()] = true
		}
		entries := h.objects.DnsSources.Iterate()
		for entries.Next(&key, &value) {
			if prefix := netip.PrefixFrom(netip.AddrFrom16(key.Addr), int(key.Length)); !distinct[prefix] {
				t.Errorf("dns_sources has %s, which is none of %v", prefix, prefixes)
			} else {
				delete(distinct, prefix)
			}
		}
		if err := entries.Err(); err != nil {
			t.Fatal(err)
		}
		if len(distinct) > 0 {
			t.Errorf("dns_sources lacks %v", slices.Collect(maps.Keys(distinct)))
		}
	}
	t.Logf("allowed: %v", counts)
}

// A reply that a server sends to the listener's port is a message from one that may ask, and still no query.
func TestIngressFilterReplyFromAllowed(t *testing.T) {
	h := newFilterHarness(t)
	for _, f := range filterFamilies {
		reply := new(dns.Msg).SetReply(&dns.Msg{Question: []dns.Question{{Name: "example.com.", Qtype: dns.TypeA, Qclass: dns.ClassINET}}})
		frame := pktgen.UDP(netip.AddrPortFrom(f.client.Addr(), 53), f.listener, pack(t, reply))
		h.expectFilter(t, frame, "refused_message")
	}
}

// A tag of VLAN 0 has but a priority: the stack ignores it, and so does the ingress filter. Other VLANs have interfaces of their own.
func TestIngressFilterVLAN(t *testing.T) {
	h := newFilterHarness(t)
	message := query(t, inZone)
	for _, f := range filterFamilies {
		for name, frame := range map[string]func(source netip.AddrPort) []byte{
			"UDP": func(source netip.AddrPort) []byte { return pktgen.UDP(source, f.listener, message) },
			"TCP": func(source netip.AddrPort) []byte { return pktgen.SYN(source, f.listener) },
		} {
			for _, tag := range []struct {
				name    string
				octets  []byte
				outside string
			}{
				{"priority 0", []byte{0x81, 0, 0, 0}, "refused_source"},
				{"priority 5", []byte{0x81, 0, 0xa0, 0}, "refused_source"},
				{"drop eligible", []byte{0x81, 0, 0xf0, 0}, "refused_source"},
				{"802.1ad", []byte{0x88, 0xa8, 0x20, 0}, "refused_source"},
				{"VLAN 1", []byte{0x81, 0, 0, 1}, notOurs},
				{"VLAN 256", []byte{0x81, 0, 0xa1, 0}, notOurs},
				{"VLAN 4095", []byte{0x88, 0xa8, 0x0f, 0xff}, notOurs},
			} {
				t.Run(f.name+"/"+name+"/"+tag.name, func(t *testing.T) {
					h.expectFilter(t, slices.Insert(frame(f.client), 12, tag.octets...), notOurs)
					h.expectFilter(t, slices.Insert(frame(f.stranger), 12, tag.octets...), tag.outside)
				})
			}
		}
		reply := slices.Insert(pktgen.UDP(f.client, f.listener, put(message, 2, 0x81)), 12, 0x81, 0, 0xa0, 0)
		h.expectFilter(t, reply, "refused_message")
		h.expectFilter(t, reply[:17], notOurs)
		h.expectFilter(t, reply[:18], notOurs)
	}
}

// An IPv4 address in IPv6's form is nobody's on a wire (RFC 4291 section 2.5.5.2), whatever IPv4 addresses may ask and be
// asked. The stack drops such a packet.
func TestIngressFilterMappedAddresses(t *testing.T) {
	h := newFilterHarness(t)
	for _, c := range []struct{ source, destination, want string }{
		{"::ffff:172.19.1.100", "fd00:19::1", notOurs},
		{"fd00:19::100", "::ffff:172.19.1.1", notOurs},
		{"::ffff:172.19.1.100", "::ffff:172.19.1.1", notOurs},
		{"::172.19.1.100", "fd00:19::1", "refused_source"},
		{"::ffff:0:172.19.1.100", "fd00:19::1", "refused_source"},
		{"64:ff9b::172.19.1.100", "fd00:19::1", "refused_source"},
	} {
		frame := pktgen.UDP(filterFamilies[1].client, filterFamilies[1].listener, query(t, inZone))
		for i, address := range []string{c.source, c.destination} {
			octets := netip.MustParseAddr(address).As16()
			copy(frame[pktgen.EthernetLength+8+16*i:], octets[:])
		}
		frame = pktgen.RefreshChecksums(frame)
		h.expectFilter(t, frame, c.want)
		for _, program := range queryPrograms {
			want := c.want
			if program == FromHost && want != notOurs {
				continue
			}
			h.expectIn(t, program, frame, ScopeKubeSwitch, want, nil)
		}
	}
}
