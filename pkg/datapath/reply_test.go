//go:build linux

package datapath

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/sample"
)

// answer is an endpoint's reply to a query that it got, changed by edits.
func answer(tb testing.TB, q steeredQuery, edits ...func(*dns.Msg)) []byte {
	tb.Helper()
	asked := new(dns.Msg)
	if err := asked.Unpack(q.Payload); err != nil {
		tb.Fatal(err)
	}
	reply := new(dns.Msg).SetReply(asked)
	reply.Compress = true
	reply.Answer = []dns.RR{&dns.A{
		Hdr: dns.RR_Header{Name: asked.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5},
		A:   net.IPv4(172, 21, 0, 10),
	}}
	for _, edit := range edits {
		edit(reply)
	}
	return pack(tb, reply)
}

// replyFrame is a reply on its way from the endpoint that was asked.
func replyFrame(q steeredQuery, payload []byte, options ...pktgen.Option) []byte {
	return pktgen.UDP(q.Destination, q.Source, payload, options...)
}

// deliver runs a reply that must be delivered, and checks every octet of it, and that the flow is closed.
func (h *harness) deliver(tb testing.TB, program Program, f family, q steeredQuery, frame []byte) {
	tb.Helper()
	out := h.expect(tb, FromBackend, frame, "replied")
	want := rewritten(frame, f, f.listener, f.client)
	if program == FromHost {
		clear(want[:12]) // on lo's ingress: zero is lo's address
	}
	want = pktgen.RefreshChecksums(want)
	if !slices.Equal(out, want) {
		tb.Fatalf("reply\ngot: %s\nwant: %s", pktgen.Dump(out), pktgen.Dump(want))
	}
	if _, err := pktgen.Parse(out); err != nil {
		tb.Errorf("reply: %v: %s", err, pktgen.Dump(out))
	}
	if h.hasFlow(tb, q) {
		tb.Error("the flow is still there after the reply")
	}
}

func (h *harness) hasFlow(tb testing.TB, q steeredQuery) bool {
	tb.Helper()
	var flow dnsbpfDnsFlow
	if err := h.objects.DnsFlows.Lookup(q.slot, &flow); err != nil {
		tb.Fatal(err)
	}
	return flow.StartedNs != 0
}

// eachPath runs a test for a query of each program over each address family.
func eachPath(t *testing.T, h *harness, test func(t *testing.T, program Program, f family)) {
	t.Helper()
	for _, f := range families {
		for _, program := range queryPrograms {
			t.Run(fmt.Sprintf("%s/%s", f.name, program), func(t *testing.T) { test(t, program, f) })
		}
	}
	h.wantInFlight(t, 0)
}

func manyRecords(count int) func(*dns.Msg) {
	return func(m *dns.Msg) {
		m.Answer = slices.Repeat(m.Answer, count)
	}
}

// paddedTo makes a reply as long as a UDP reply may be.
func paddedTo(tb testing.TB, size int) func(*dns.Msg) {
	tb.Helper()
	return func(m *dns.Msg) {
		padding := &dns.EDNS0_PADDING{}
		withOPT(1232, padding)(m)
		padding.Padding = make([]byte, size-m.Len())
		if m.Len() != size {
			tb.Fatalf("reply of %d octets, want %d", m.Len(), size)
		}
	}
}

func TestReplies(t *testing.T) {
	none := func(frame *pktgen.Frame) { frame.NoUDPChecksum = true }
	replies := map[string]func(*testing.T, steeredQuery) []byte{
		"one record": func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return replyFrame(q, answer(t, q))
		},
		"60 records": func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return replyFrame(q, answer(t, q, manyRecords(60)))
		},
		"1232 octets": func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return replyFrame(q, answer(t, q, manyRecords(60), paddedTo(t, 1232)))
		},
		"NXDOMAIN": func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return replyFrame(q, answer(t, q, func(m *dns.Msg) { m.Rcode, m.Answer = dns.RcodeNameError, nil }))
		},
		"truncated": func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return replyFrame(q, answer(t, q, func(m *dns.Msg) { m.Truncated, m.Answer = true, nil }))
		},
		"other case": func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return replyFrame(q, answer(t, q, func(m *dns.Msg) {
				m.Question[0].Name = strings.ToUpper(m.Question[0].Name)
				m.Answer[0].Header().Name = m.Question[0].Name
			}))
		},
		// Sections behind the question are the asker's to judge.
		"records that are cut off": func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			whole := answer(t, q)
			return replyFrame(q, whole[:len(whole)-3])
		},
		"counts of records that are not there": func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return replyFrame(q, put(answer(t, q), 6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff))
		},
		"frame with padding": func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return replyFrame(q, answer(t, q), func(frame *pktgen.Frame) { frame.Padding = []byte{1, 2, 3, 4, 5} })
		},
	}
	h := newHarness(t)
	eachPath(t, h, func(t *testing.T, program Program, f family) {
		t.Helper()
		for name, reply := range replies {
			t.Run(name, func(t *testing.T) {
				for _, asked := range []string{"b.cluster.local", "kUbE-dNs.cLuStEr.LoCaL", "cluster.local"} {
					q := h.steer(t, program, f, f.query(query(t, asked, withOPT(4096))))
					h.deliver(t, program, f, q, reply(t, q))
				}
			})
		}
		if f.name == "IPv4" {
			q := h.steer(t, program, f, f.query(query(t, inZone), none))
			h.deliver(t, program, f, q, replyFrame(q, answer(t, q), none))
		}
	})
}

// An asker with a name of any length gets its reply: the question is compared to its last octet.
func TestReplyQuestionOfEachLength(t *testing.T) {
	h := newHarness(t)
	f := families[0]
	count := 0
	for length := range 121 {
		q := h.steer(t, FromHost, f, f.query(rawQuery(many(length))))
		reply := put(q.Payload, 2, 0x81, 0x80)
		// One octet of the name, and one of the type, is another.
		for at := 13; at < len(reply)-2; at++ {
			if reply[at] == 'a' || reply[at] == 'l' || at >= len(reply)-4 {
				h.expect(t, FromBackend, replyFrame(q, put(reply, at, reply[at]^2)), "reply_question")
				count++
			}
		}
		h.deliver(t, FromHost, f, q, replyFrame(q, reply))
	}
	t.Logf("%d questions with one other octet", count)
}

// What is no reply to the query, by a packet that meets its flow: it is passed and counted, and the flow stays for the
// right reply.
func TestRefusedReplies(t *testing.T) {
	question := func(edit func(*dns.Question)) func(*testing.T, steeredQuery) []byte {
		return func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return answer(t, q, func(m *dns.Msg) { edit(&m.Question[0]) })
		}
	}
	edited := func(offset int, octets ...byte) func(*testing.T, steeredQuery) []byte {
		return func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return put(answer(t, q), offset, octets...)
		}
	}
	named := func(name string) func(*testing.T, steeredQuery) []byte {
		return func(*testing.T, steeredQuery) []byte { return put(rawQuery(name), 2, 0x81, 0x80) }
	}
	cut := func(length int) func(*testing.T, steeredQuery) []byte {
		return func(t *testing.T, q steeredQuery) []byte {
			t.Helper()
			return answer(t, q)[:length]
		}
	}
	cases := []struct {
		name   string
		reply  func(*testing.T, steeredQuery) []byte
		reason string
	}{
		{"other name", question(func(q *dns.Question) { q.Name = "backend.other.svc.cluster.local." }), "reply_question"},
		{"name of the zone", question(func(q *dns.Question) { q.Name = "cluster.local." }), "reply_question"},
		{"root", question(func(q *dns.Question) { q.Name = "." }), "reply_question"},
		{"name and more", question(func(q *dns.Question) { q.Name = "x." + q.Name }), "reply_question"},
		{"label boundary elsewhere", named(labels("backend.default", "svc", "cluster", "local")), "reply_question"},
		{"other type", question(func(q *dns.Question) { q.Qtype = dns.TypeAAAA }), "reply_question"},
		{"other class", question(func(q *dns.Question) { q.Qclass = dns.ClassCHAOS }), "reply_malformed"},
		{"QR=0", edited(2, 0x01), "reply_malformed"},
		{"QDCOUNT 0", edited(4, 0, 0), "reply_malformed"},
		{"QDCOUNT 2", edited(4, 0, 2), "reply_malformed"},
		{"QDCOUNT 256", edited(4, 1, 0), "reply_malformed"},
		{"compressed question", named("\xc0\x0c"), "reply_malformed"},
		{"question compressed after a label", named("\x07backend\xc0\x0c"), "reply_malformed"},
		{"label type 0x40", named("\x40" + strings.Repeat("x", 64) + "\x00"), "reply_malformed"},
		{"name of 257", named(many(121)), "reply_malformed"},
		{"header only", cut(12), "reply_malformed"},
		{"cut in the name", cut(20), "reply_malformed"},
		{"cut in the type", cut(12 + len(inZone) + 2 + 1), "reply_malformed"},
		{"cut in the class", cut(12 + len(inZone) + 2 + 3), "reply_malformed"},
	}
	h := newHarness(t)
	eachPath(t, h, func(t *testing.T, program Program, f family) {
		t.Helper()
		for _, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				q := h.steer(t, program, f, f.query(query(t, inZone)))
				h.expect(t, FromBackend, replyFrame(q, c.reply(t, q)), c.reason)
				if !h.hasFlow(t, q) {
					t.Error("a refused reply closed the flow")
				}
				h.deliver(t, program, f, q, replyFrame(q, answer(t, q)))
			})
		}
	})
}

// What does not meet the flow of a query is nobody's: uncounted, untouched.
func TestRepliesToNobody(t *testing.T) {
	cases := map[string]func(q *steeredQuery){
		"other source address": func(q *steeredQuery) {
			q.Destination = netip.AddrPortFrom(q.Destination.Addr().Next(), q.Destination.Port())
		},
		"other source port":      func(q *steeredQuery) { q.Destination = netip.AddrPortFrom(q.Destination.Addr(), 54) },
		"other NAT port":         func(q *steeredQuery) { q.Source = netip.AddrPortFrom(q.Source.Addr(), q.Source.Port()^1) },
		"first ephemeral port":   func(q *steeredQuery) { q.Source = netip.AddrPortFrom(q.Source.Addr(), natPorts.Last+1) },
		"port below the range":   func(q *steeredQuery) { q.Source = netip.AddrPortFrom(q.Source.Addr(), natPorts.First-1) },
		"port 0":                 func(q *steeredQuery) { q.Source = netip.AddrPortFrom(q.Source.Addr(), 0) },
		"port 53":                func(q *steeredQuery) { q.Source = netip.AddrPortFrom(q.Source.Addr(), 53) },
		"other ID":               func(q *steeredQuery) { q.Payload = put(q.Payload, 1, q.Payload[1]^1) },
		"ID the other way round": func(q *steeredQuery) { q.Payload = put(q.Payload, 0, q.Payload[1], q.Payload[0]) },
	}
	newNamespace(t)
	other := addInterface(t, "eth0")
	h := newHarness(t)
	eachPath(t, h, func(t *testing.T, program Program, f family) {
		t.Helper()
		for name, change := range cases {
			t.Run(name, func(t *testing.T) {
				q := h.steer(t, program, f, f.query(query(t, inZone)))
				forged := q
				change(&forged)
				h.expect(t, FromBackend, replyFrame(forged, answer(t, forged)), notOurs)
				h.deliver(t, program, f, q, replyFrame(q, answer(t, q)))
			})
		}
		q := h.steer(t, program, f, f.query(query(t, inZone)))
		reply := answer(t, q)
		for name, frame := range map[string][]byte{
			"TCP":       pktgen.TCP(q.Destination, q.Source, reply),
			"cut":       replyFrame(q, reply[:11]),
			"empty":     replyFrame(q, nil),
			"UDP short": replyFrame(q, reply, func(frame *pktgen.Frame) { frame.UDPLengthDelta = -1 }),
			"UDP long":  replyFrame(q, reply, func(frame *pktgen.Frame) { frame.UDPLengthDelta = 1 }),
			"IP long":   replyFrame(q, reply, func(frame *pktgen.Frame) { frame.IPLengthDelta = 1 }),
			"both lengths 65535": replyFrame(q, reply, func(frame *pktgen.Frame) {
				frame.UDPLengthDelta = 65535 - pktgen.IPv4Length - pktgen.UDPLength - len(reply)
				frame.IPLengthDelta = frame.UDPLengthDelta
			}),
			"fragment":    replyFrame(q, reply, asFragment),
			"ARP by type": replyFrame(q, reply, func(frame *pktgen.Frame) { frame.EtherType = 0x0806 }),
		} {
			t.Run(name, func(t *testing.T) { h.expect(t, FromBackend, frame, notOurs) })
		}
		h.expectIn(t, FromBackend, replyFrame(q, reply), testScope, notOurs, skbContext(skbGSOSize, 20))
		// Who has the endpoint's address, or says so, behind another interface.
		h.expectIn(t, FromBackend, replyFrame(q, reply), testScope, notOurs, skbContext(skbIfindex, uint32(other)))
		h.deliver(t, program, f, q, replyFrame(q, reply))

		// A second copy finds nothing.
		h.expect(t, FromBackend, replyFrame(q, reply), notOurs)
	})
}

func asFragment(frame *pktgen.Frame) {
	frame.Fragment = 0x2000
	if frame.EtherType == 0x86dd {
		frame.Protocol, frame.Extension = 44, []byte{17, 0, 0, 1, 0, 0, 0, 1}
	}
}

func TestLateReply(t *testing.T) {
	h := newHarness(t)
	eachPath(t, h, func(t *testing.T, program Program, f family) {
		t.Helper()
		age := func(q steeredQuery, nanoseconds int64) {
			q.flow.StartedNs = monotonic(t) - uint64(nanoseconds)
			if err := h.objects.DnsFlows.Put(q.slot, q.flow); err != nil {
				t.Fatal(err)
			}
		}
		q := h.steer(t, program, f, f.query(query(t, inZone)))
		age(q, DefaultFlowTimeout.Nanoseconds()+1)
		reply := replyFrame(q, answer(t, q))
		h.expect(t, FromBackend, reply, "reply_late")
		if h.hasFlow(t, q) {
			t.Error("the flow is still there after a late reply")
		}
		h.expect(t, FromBackend, reply, notOurs)

		// Slow, but a minute from being late under the timeout that is set now: also in the histogram.
		h.options.FlowTimeout = 2 * DefaultFlowTimeout * 12
		if err := h.configure(); err != nil {
			t.Fatal(err)
		}
		q = h.steer(t, program, f, f.query(query(t, inZone)))
		age(q, DefaultFlowTimeout.Nanoseconds()*12)
		h.deliver(t, program, f, q, replyFrame(q, answer(t, q)))
		h.options.FlowTimeout = DefaultFlowTimeout
		if err := h.configure(); err != nil {
			t.Fatal(err)
		}
	})
}

// precise is the clock that latency is measured by, in nanoseconds.
func precise(tb testing.TB) uint64 {
	tb.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		tb.Fatal(err)
	}
	return uint64(now.Nano())
}

// Each power of two has its bucket; what is slower than all is in the last.
func TestLatencyBuckets(t *testing.T) {
	h := newHarness(t)
	f := families[0]
	h.options.FlowTimeout = 1 << 40
	if err := h.configure(); err != nil {
		t.Fatal(err)
	}
	buckets := func() []uint64 {
		counters, err := h.Counters()
		if err != nil {
			t.Fatal(err)
		}
		return counters[testScope].LatencyMicrosecondsLog2
	}
	// From where the time that the test itself takes can't reach the next bucket. 1.5 is the middle of a bucket.
	for bits := 16; bits < 30; bits++ {
		q := h.steer(t, FromHost, f, f.query(query(t, inZone)))
		for !isTimed(q.Source.Port()) {
			h.forget(t, q)
			q = h.steer(t, FromHost, f, f.query(query(t, inZone)))
		}
		begin := precise(t)
		q.flow.TimedNs = begin - (3<<(bits-2))*1000
		if err := h.objects.DnsFlows.Put(q.slot, q.flow); err != nil {
			t.Fatal(err)
		}
		before := buckets()
		h.deliver(t, FromHost, f, q, replyFrame(q, answer(t, q)))
		after := buckets()
		if precise(t)-begin >= (1<<(bits-2))*1000 {
			bits-- // an emulated machine may stand still for so long: once more
			continue
		}
		want := slices.Clone(before)
		want[min(bits, len(want)-1)]++
		if !slices.Equal(after, want) {
			t.Errorf("3<<%d microseconds: buckets %v, want %v", bits-2, after, want)
		}
	}
}

// A flow keeps the scope and the interface that its query came from; the reply is counted there.
func TestReplyScope(t *testing.T) {
	h := newHarness(t)
	kubeSwitch := netip.MustParseAddrPort("172.19.1.1:53")
	if err := h.ReplaceListeners([]Listener{{Address: kubeSwitch, Scope: ScopeKubeSwitch}}); err != nil {
		t.Fatal(err)
	}
	h.replaceAllowed(t, netip.MustParsePrefix("172.19.1.0/24"))
	f := families[0]
	f.client, f.listener = netip.MustParseAddrPort("172.19.1.100:33333"), kubeSwitch
	q := h.steerIn(t, FromClient, f, f.query(query(t, inZone)), ScopeKubeSwitch, loIfindex)
	frame := replyFrame(q, answer(t, q))
	h.expectIn(t, FromBackend, put(frame, f.dnsOffset+4, 0, 0), ScopeKubeSwitch, "reply_malformed", nil)
	h.expectIn(t, FromBackend, frame, ScopeKubeSwitch, "replied", nil)
}

// Several queries of one client are told apart, in whatever order their replies come.
func TestInterleavedReplies(t *testing.T) {
	random := sample.Random(t)
	h := newHarness(t)
	type pending struct {
		steeredQuery
		f       family
		program Program
	}
	var queries []pending
	for i := range 500 {
		f, program := families[i%2], queryPrograms[i/2%2]
		f.client = netip.AddrPortFrom(f.client.Addr(), uint16(10000+random.IntN(8)))
		message := query(t, fmt.Sprintf("s%d.cluster.local", random.IntN(1000)), func(m *dns.Msg) { m.Id = uint16(random.IntN(8)) })
		queries = append(queries, pending{h.steer(t, program, f, f.query(message)), f, program})
	}
	h.wantInFlight(t, len(queries))
	random.Shuffle(len(queries), func(i, j int) { queries[i], queries[j] = queries[j], queries[i] })
	for _, q := range queries {
		h.deliver(t, q.program, q.f, q.steeredQuery, replyFrame(q.steeredQuery, answer(t, q.steeredQuery)))
	}
	h.wantInFlight(t, 0)
}

func TestFlowCollisions(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			h := newHarness(t)
			h.options.NATPorts = PortRange{First: 5000, Last: 5000}
			if err := h.configure(); err != nil {
				t.Fatal(err)
			}
			withID := func(name string, id uint16) []byte {
				return f.query(query(t, name, func(m *dns.Msg) { m.Id = id }))
			}
			first := h.steer(t, FromHost, f, withID("a.cluster.local", 7))
			for _, id := range []uint16{7, 8} {
				h.expect(t, FromHost, withID("a.cluster.local", id), "passed_no_flow_slot")
				h.expect(t, FromClient, withID("b.cluster.local", id), "passed_no_flow_slot")
			}
			// The slot is still the first asker's.
			var flow dnsbpfDnsFlow
			if err := h.objects.DnsFlows.Lookup(first.slot, &flow); err != nil || flow != first.flow {
				t.Errorf("flow %+v, %v; want %+v", flow, err, first.flow)
			}
			h.deliver(t, FromHost, f, first, replyFrame(first, answer(t, first)))
			// Given back by the reply, and claimed anew from a query whose reply never came.
			second := h.steer(t, FromHost, f, withID("c.cluster.local", 7))
			second.flow.StartedNs -= uint64(DefaultFlowTimeout.Nanoseconds()) + 1
			if err := h.objects.DnsFlows.Put(second.slot, second.flow); err != nil {
				t.Fatal(err)
			}
			h.wantInFlight(t, 0)
			third := h.steer(t, FromHost, f, withID("d.cluster.local", 9))
			h.expect(t, FromBackend, replyFrame(second, answer(t, second)), notOurs)
			h.deliver(t, FromHost, f, third, replyFrame(third, answer(t, third)))
			h.wantInFlight(t, 0)
		})
	}
}

// All ports of a range are drawn, and none beside it.
func TestNATPortRange(t *testing.T) {
	h := newHarness(t)
	f := families[0]
	for _, ports := range []PortRange{{1024, 1039}, {65520, 65535}, {1, 16}} {
		h.options.NATPorts = ports
		if err := h.configure(); err != nil {
			t.Fatal(err)
		}
		seen := make(map[uint16]int)
		for range 600 {
			q := h.steer(t, FromHost, f, f.query(query(t, inZone)))
			seen[q.Source.Port()]++
			h.deliver(t, FromHost, f, q, replyFrame(q, answer(t, q)))
		}
		drawn := slices.Sorted(maps.Keys(seen))
		// A port of 16 is missed in 600 draws once in 10^15 runs.
		if len(drawn) != 16 || drawn[0] != ports.First || drawn[15] != ports.Last {
			t.Errorf("drew %v from %v", drawn, ports)
		}
	}
}

// Broken replies at random: whatever is not the reply must not be delivered.
func TestReplyBitFlips(t *testing.T) {
	h := newHarness(t)
	counts := make(map[string]int)
	for _, f := range families {
		q := h.steer(t, FromHost, f, f.query(query(t, inZone)))
		reply := answer(t, q)
		questionEnd := 12 + len(inZone) + 2 + 4
		for bit := range 8 * len(reply) {
			flipped := put(reply, bit/8, reply[bit/8]^1<<(bit%8))
			verdict, _ := h.run(t, FromBackend, replyFrame(q, flipped), nil)
			h.countedSince(t)
			message := new(dns.Msg)
			err := message.Unpack(flipped)
			sameQuestion := asciiLower(string(flipped[12:questionEnd-4])) == asciiLower(string(reply[12:questionEnd-4])) &&
				slices.Equal(flipped[questionEnd-4:questionEnd], reply[questionEnd-4:questionEnd])
			isReply := binary.BigEndian.Uint16(flipped) == testID && flipped[2]&0x80 != 0 &&
				binary.BigEndian.Uint16(flipped[4:]) == 1 && sameQuestion
			if want := map[bool]string{true: "redirect", false: "pass"}[isReply]; verdict != want {
				t.Errorf("bit %d: %s, want %s (%v)\n%s", bit, verdict, want, err, pktgen.Dump(replyFrame(q, flipped)))
			}
			counts[verdict]++
			if verdict == "redirect" {
				if err := h.objects.DnsFlows.Put(q.slot, q.flow); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	t.Logf("%v", counts)
}
