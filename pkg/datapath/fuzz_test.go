//go:build linux

package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// The programs against references, with frames and replies of any form. What one run of them costs is bounded by the
// verifier, which has looked at the longest way through; a frame is bounded by what a test run takes.
const longestFuzzed = 2000

// packet is what the reference reads in a frame.
type packet struct {
	protocol    byte
	source, to  netip.AddrPort
	ports       bool // they can be read: no options, extensions or fragment
	plain       bool // a UDP datagram that is whole and nothing else
	payload     []byte
	transportAt int
}

// referencePacket reads a frame as RFC 791, 8200 and 768 say, and for nothing else. It is not ok for what is no packet of
// these, or is cut before its ports end.
func referencePacket(frame []byte) (p packet, ok bool) {
	const minTransport = pktgen.UDPLength
	if len(frame) < pktgen.EthernetLength {
		return p, false
	}
	etherType, ip := binary.BigEndian.Uint16(frame[12:]), frame[pktgen.EthernetLength:]
	var length, end int
	switch {
	case etherType == 0x0800 && len(ip) >= pktgen.IPv4Length+minTransport && ip[0]>>4 == 4:
		p.protocol = ip[9]
		source, to := netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:]))
		length, end = pktgen.IPv4Length, int(binary.BigEndian.Uint16(ip[2:]))
		p.ports = ip[0]&0xf == 5 && binary.BigEndian.Uint16(ip[6:])&0x3fff == 0
		p.source, p.to = netip.AddrPortFrom(source, 0), netip.AddrPortFrom(to, 0)
	case etherType == 0x86dd && len(ip) >= pktgen.IPv6Length+minTransport && ip[0]>>4 == 6:
		p.protocol = ip[6]
		source, to := netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:]))
		length, end = pktgen.IPv6Length, pktgen.IPv6Length+int(binary.BigEndian.Uint16(ip[4:]))
		p.ports = true
		p.source, p.to = netip.AddrPortFrom(source, 0), netip.AddrPortFrom(to, 0)
		if source.Is4In6() || to.Is4In6() {
			return p, false
		}
	default:
		return p, false
	}
	p.transportAt = pktgen.EthernetLength + length
	if !p.ports {
		return p, true
	}
	transport := ip[length:]
	p.source = netip.AddrPortFrom(p.source.Addr(), binary.BigEndian.Uint16(transport))
	p.to = netip.AddrPortFrom(p.to.Addr(), binary.BigEndian.Uint16(transport[2:]))
	hasSum := p.to.Addr().Is4() || binary.BigEndian.Uint16(transport[6:]) != 0 // RFC 8200 section 8.1
	if end >= length+pktgen.UDPLength && end <= len(ip) && int(binary.BigEndian.Uint16(transport[4:])) == end-length && hasSum {
		p.plain, p.payload = true, ip[length+pktgen.UDPLength:end]
	}
	return p, true
}

// frameSeeds are frames of each kind that the programs tell apart.
func frameSeeds(tb testing.TB) (frames [][]byte) {
	tb.Helper()
	for _, f := range filterFamilies {
		message := query(tb, inZone, withOPT(4096))
		udp := func(options ...pktgen.Option) []byte { return pktgen.UDP(f.client, f.listener, message, options...) }
		frames = append(
			frames, udp(), pktgen.UDP(f.stranger, f.listener, message), pktgen.SYN(f.client, f.listener), pktgen.SYN(f.stranger, f.listener),
			pktgen.TCP(f.client, f.listener, message), pktgen.UDP(f.client, f.listener, put(message, 2, 0x81)), pktgen.UDP(f.client, f.listener, nil),
			pktgen.UDP(f.client, f.listener, query(tb, "www.example.com")), pktgen.UDP(f.backend, f.client, message),
			udp(func(frame *pktgen.Frame) { frame.IHL = 6 }), udp(asFragment), udp(func(frame *pktgen.Frame) { frame.NoUDPChecksum = true }),
			udp(func(frame *pktgen.Frame) { frame.IPLengthDelta = 1 }), udp(func(frame *pktgen.Frame) { frame.UDPLengthDelta = -1 }),
			udp(func(frame *pktgen.Frame) { frame.Padding = make([]byte, 7) }),
			slices.Insert(udp(), 12, 0x81, 0, 0xa0, 0), slices.Insert(udp(), 12, 0x88, 0xa8, 0, 5),
		)
	}
	return frames
}

func filterListeners() (listeners []netip.AddrPort) {
	for _, f := range filterFamilies {
		listeners = append(listeners, f.listener)
	}
	return listeners
}

func FuzzIngressFilter(f *testing.F) {
	for _, frame := range frameSeeds(f) {
		f.Add(frame)
	}
	h := newFilterHarness(f)
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) < pktgen.EthernetLength || len(frame) > longestFuzzed {
			t.Skip("a test run takes no such frame")
		}
		h.countedSince(t)
		h.expectFilter(t, frame, referenceFilter(frame, filterListeners(), filterPrefixes()))
	})
}

// FuzzHeaders gives frames of any form to the programs that steer, and compares what becomes of them.
func FuzzHeaders(f *testing.F) {
	for _, frame := range frameSeeds(f) {
		f.Add(frame, false)
		f.Add(frame, true)
	}
	h := newFilterHarness(f)
	f.Fuzz(func(t *testing.T, frame []byte, local bool) {
		if len(frame) < pktgen.EthernetLength || len(frame) > longestFuzzed {
			t.Skip("a test run takes no such frame")
		}
		name := FromClient
		if local {
			name = FromHost
		}
		program, err := h.program(name)
		if err != nil {
			t.Fatal(err)
		}
		run := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256)}
		code, err := program.Run(&run)
		if errors.Is(err, unix.EINVAL) {
			t.Skip("cut within its IP header, which a test run does not take")
		}
		if err != nil {
			t.Fatal(err)
		}
		want := "pass"
		p, ok := referencePacket(frame)
		if ok && p.protocol == protocolUDP && p.ports && slices.Contains(filterListeners(), p.to) {
			permitted := local || slices.ContainsFunc(filterPrefixes(), func(prefix netip.Prefix) bool { return prefix.Contains(p.source.Addr()) })
			switch {
			case !permitted:
				want = "shot"
			case p.plain && referenceSteered(p.payload, []string{testZone}):
				want = "redirect"
			}
		}
		if verdict := verdictName(code); verdict != want {
			t.Fatalf("%s: verdict %s, want %s\n%s", name, verdict, want, pktgen.Dump(frame))
		}
		if want != "redirect" {
			if !bytes.Equal(run.DataOut, frame) {
				t.Errorf("%s: %s, but changed\nin: %s\nout: %s", name, want, pktgen.Dump(frame), pktgen.Dump(run.DataOut))
			}
			return
		}
		fam := filterFamilies[0].family
		if p.to.Addr().Is6() {
			fam = filterFamilies[1].family
		}
		natPort := binary.BigEndian.Uint16(run.DataOut[p.transportAt:])
		if err := h.objects.DnsFlows.Put(uint32(natPort-h.options.NATPorts.First), dnsbpfDnsFlow{}); err != nil {
			t.Fatal(err)
		}
		steered := referenceSteering(frame, fam, natPort)
		if got := pktgen.RefreshChecksums(run.DataOut); !bytes.Equal(got, steered) {
			t.Errorf("%s\ngot: %s\nwant: %s", name, pktgen.Dump(got), pktgen.Dump(steered))
		}
		if _, err := pktgen.Parse(frame); err == nil && !bytes.Equal(run.DataOut, steered) {
			t.Errorf("%s: checksums\ngot: %s\nwant: %s", name, pktgen.Dump(run.DataOut), pktgen.Dump(steered))
		}
	})
}

// referenceReply says what becomes of a payload from the endpoint that the question was steered to.
func referenceReply(payload []byte, id uint16, question dns.Question) string {
	if len(payload) < pktgen.DNSLength || binary.BigEndian.Uint16(payload) != id {
		return notOurs
	}
	if payload[2]&0x80 == 0 || binary.BigEndian.Uint16(payload[4:]) != 1 {
		return "reply_malformed"
	}
	name, end, err := dns.UnpackDomainName(payload, pktgen.DNSLength)
	if err != nil || len(payload) < end+4 || binary.BigEndian.Uint16(payload[end+2:]) != dns.ClassINET {
		return "reply_malformed"
	}
	packed := make([]byte, 256)
	length, err := dns.PackDomainName(name, packed, 0, nil, false)
	if err != nil || !slices.Equal(packed[:length], payload[pktgen.DNSLength:end]) { // it was compressed
		return "reply_malformed"
	}
	if asciiLower(name) != asciiLower(question.Name) || binary.BigEndian.Uint16(payload[end:]) != question.Qtype {
		return "reply_question"
	}
	return "replied"
}

func FuzzReply(f *testing.F) {
	h := newHarness(f)
	for _, seed := range fuzzSeeds(f) {
		f.Add(seed, uint8(0))
		if len(seed) > 2 {
			f.Add(put(seed, 0, testID>>8, testID&0xff, 0x81), uint8(3))
		}
	}
	question := dns.Question{Name: dns.Fqdn(inZone), Qtype: dns.TypeA, Qclass: dns.ClassINET}
	for _, answer := range []func(*dns.Msg){
		func(*dns.Msg) {},
		func(m *dns.Msg) { m.Question[0].Name = "BACKEND.Default.svc.cluster.LOCAL." },
		func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA },
		func(m *dns.Msg) { m.Id ^= 1 },
	} {
		m := &dns.Msg{Question: []dns.Question{question}}
		m.Id, m.Response = testID, true
		answer(m)
		f.Add(pack(f, m), uint8(1))
	}
	f.Fuzz(func(t *testing.T, payload []byte, path uint8) {
		if len(payload) > longestFuzzed {
			t.Skip("a test run takes no such frame")
		}
		fam, program := families[path%2], queryPrograms[path/2%2]
		h.countedSince(t)
		q := h.steer(t, program, fam, fam.query(query(t, inZone)))
		frame := replyFrame(q, payload)
		want := referenceReply(payload, testID, question)
		if want == "replied" {
			h.deliver(t, program, fam, q, frame)
			return
		}
		h.expect(t, FromBackend, frame, want)
		if !h.hasFlow(t, q) {
			t.Error("a refused reply closed the flow")
		}
		h.forget(t, q)
	})
}
