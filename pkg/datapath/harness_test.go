//go:build linux

package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// Addresses of the tests, named so that they read alike.
var (
	client4   = netip.MustParseAddrPort("127.0.0.1:40000")
	listener4 = netip.MustParseAddrPort("127.0.0.1:53")
	backend4  = netip.MustParseAddrPort("172.20.0.10:53")
	nat4      = netip.MustParseAddr("172.20.0.1")
	client6   = netip.MustParseAddrPort("[::1]:40000")
	listener6 = netip.MustParseAddrPort("[::1]:53")
	backend6  = netip.MustParseAddrPort("[fd00:20::10]:5353")
	nat6      = netip.MustParseAddr("fd00:20::1")
	natPorts  = PortRange{First: 1024, Last: 32767}
)

const (
	loIfindex = 1
	testZone  = "cluster.local"
	inZone    = "backend.default.svc.cluster.local"
	testID    = 0x1234

	// testScope is the one in which queries of this host and of others are looked at alike.
	testScope = ScopeKubeSwitch

	// notOurs stands where a reason would, for a packet that is passed without being counted.
	notOurs = ""
)

// family is what a test needs to do the same over IPv4 and IPv6.
type family struct {
	name                      string
	client, listener, backend netip.AddrPort
	nat                       netip.Addr
	// shortest is the smallest frame that BPF_PROG_TEST_RUN takes with this ethertype.
	shortest int
	// dnsOffset is where the message begins in a plain frame.
	dnsOffset int
}

var families = []family{
	{
		"IPv4", client4, listener4, backend4, nat4, pktgen.EthernetLength + pktgen.IPv4Length,
		pktgen.EthernetLength + pktgen.IPv4Length + pktgen.UDPLength,
	},
	{
		"IPv6", client6, listener6, backend6, nat6, pktgen.EthernetLength + pktgen.IPv6Length,
		pktgen.EthernetLength + pktgen.IPv6Length + pktgen.UDPLength,
	},
}

func (f family) query(payload []byte, options ...pktgen.Option) []byte {
	return pktgen.UDP(f.client, f.listener, payload, options...)
}

// queryPrograms take queries; each table of queries runs on both.
var queryPrograms = []Program{FromHost, FromClient}

// needKernel skips a test without privilege. CI and "make test" run as root and say so, so there a skip is a failure.
func needKernel(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") != "" || os.Getenv("K2S_LAB_REQUIRED") != "" {
		tb.Fatal("this run must not skip the kernel tests: run as root")
	}
	tb.Skip("loading BPF programs needs root")
}

// harness is the loaded programs, without pins or attachments.
type harness struct {
	*Datapath
	counted [scopeMax][][]byte // as read last, by scope and CPU
}

func defaultBackends() []Backend {
	return []Backend{
		{Address: backend4, NATAddress: nat4, Ifindex: loIfindex},
		{Address: backend6, NATAddress: nat6, Ifindex: loIfindex},
	}
}

// newHarness loads the programs with one listener and one endpoint per address family.
func newHarness(tb testing.TB, zones ...string) *harness {
	tb.Helper()
	needKernel(tb)
	spec, err := loadDnsbpf()
	if err != nil {
		tb.Fatal(err)
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	h := &harness{Datapath: newDatapath(Options{NATPorts: natPorts, FlowTimeout: DefaultFlowTimeout})}
	if h.objects, err = loadSpec(spec, nil); err != nil {
		tb.Fatalf("%v", describeLoadError(err))
	}
	tb.Cleanup(func() {
		if err := h.Close(); err != nil {
			tb.Error(err)
		}
	})
	if h.answers, err = newAnswers(&h.objects); err != nil {
		tb.Fatal(err)
	}
	if err := h.configure(); err != nil {
		tb.Fatal(err)
	}
	listeners := []Listener{{Address: listener4, Scope: testScope}, {Address: listener6, Scope: testScope}}
	if err := h.ReplaceListeners(listeners); err != nil {
		tb.Fatal(err)
	}
	h.replaceAllowed(tb, everyone...)
	if len(zones) == 0 {
		zones = []string{testZone}
	}
	h.replaceZones(tb, zones, defaultBackends()...)
	h.countedSince(tb)
	return h
}

func (h *harness) replaceZones(tb testing.TB, zones []string, backends ...Backend) {
	tb.Helper()
	if err := h.ReplaceZones(zones, backends, nil, nil); err != nil {
		tb.Fatal(err)
	}
}

// counterNames are the reasons in the order of struct dns_counters; behind them is the histogram.
var counterNames = func() (names []string) {
	for field := range reflect.TypeFor[dnsbpfDnsCounters]().Fields() {
		if field.Type.Kind() == reflect.Uint64 {
			names = append(names, reasonName(field.Name))
		}
	}
	return names
}()

// countedSince returns what was counted since it was called last, as "scope:reason" and "scope:latency". It reads the
// map by itself, since it runs after each of some hundred thousand packets; TestSumCounters is for Counters.
func (h *harness) countedSince(tb testing.TB) map[string]uint64 {
	tb.Helper()
	delta := make(map[string]uint64)
	for scope := range scopeMax {
		var perCPU [][]byte
		if err := h.objects.DnsStats.Lookup(uint32(scope), &perCPU); err != nil {
			tb.Fatal(err)
		}
		if h.counted[scope] == nil {
			h.counted[scope] = make([][]byte, len(perCPU))
		}
		for cpu, now := range perCPU {
			before := h.counted[scope][cpu]
			if bytes.Equal(before, now) {
				continue
			}
			for offset := 0; offset < len(now); offset += 8 {
				count := binary.NativeEndian.Uint64(now[offset:])
				if before != nil {
					count -= binary.NativeEndian.Uint64(before[offset:])
				}
				if count == 0 {
					continue
				}
				name := "latency"
				if offset/8 < len(counterNames) {
					name = counterNames[offset/8]
				}
				delta[scope.String()+":"+name] += count
			}
		}
		h.counted[scope] = perCPU
	}
	return delta
}

// skbField is the offset in struct __sk_buff of a field that a test run may set.
type skbField int

const (
	skbIfindex skbField = 40
	skbGSOSize skbField = 176
)

func skbContext(field skbField, value uint32) []byte {
	context := make([]byte, 192)
	binary.NativeEndian.PutUint32(context[field:], value)
	return context
}

// run runs a program once. Context is optional.
func (h *harness) run(tb testing.TB, name Program, frame []byte, context []byte) (verdict string, out []byte) {
	tb.Helper()
	program, err := h.program(name)
	if err != nil {
		tb.Fatal(err)
	}
	// More room than the frame: a kernel that grew it would otherwise fail the call and hide what it did.
	run := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+2048)}
	if context != nil {
		run.Context = context
	}
	code, err := program.Run(&run)
	if err != nil {
		tb.Fatalf("%s on %d octets: %v", name, len(frame), err)
	}
	return verdictName(code), run.DataOut
}

// verdictName names the TC verdicts that the programs may return.
func verdictName(verdict uint32) string {
	switch int32(verdict) {
	case -1:
		return "pass"
	case 0:
		return "ok"
	case 2:
		return "shot"
	case 7:
		return "redirect"
	}
	return fmt.Sprintf("verdict %d", int32(verdict))
}

// expect runs a program and requires the reason, its verdict, and exactly one count of it. What is
// passed must leave as it came.
func (h *harness) expect(tb testing.TB, program Program, frame []byte, reason string) []byte {
	tb.Helper()
	return h.expectIn(tb, program, frame, testScope, reason, nil)
}

func (h *harness) expectIn(tb testing.TB, program Program, frame []byte, scope Scope, reason string, context []byte) []byte {
	tb.Helper()
	verdict, out := h.run(tb, program, frame, context)
	counted := h.countedSince(tb)

	wantVerdict, want := "pass", map[string]uint64{scope.String() + ":" + reason: 1}
	switch reason {
	case notOurs:
		want = nil
	case "answered_failure", "answered_cached":
		wantVerdict = "ok"
		if program == FromClient {
			wantVerdict = "redirect"
		}
	case "refused_source":
		wantVerdict = "shot"
	case "steered", "steered_fallback":
		wantVerdict = "redirect"
	case "replied":
		wantVerdict = "redirect"
		if reply, err := pktgen.Parse(frame); err == nil && isTimed(reply.Destination.Port()) {
			want[scope.String()+":latency"] = 1
		}
	}
	if verdict != wantVerdict || !maps.Equal(counted, want) {
		tb.Fatalf("%s: verdict %s, counted %v; want %s, %v\nin: %s\nout: %s",
			program, verdict, counted, wantVerdict, want, pktgen.Dump(frame), dumpChanged(frame, out))
	}
	if wantVerdict == "pass" && !slices.Equal(out, frame) {
		tb.Fatalf("%s: passed, but changed\nin: %s\nout: %s", program, pktgen.Dump(frame), pktgen.Dump(out))
	}
	return out
}

func dumpChanged(in, out []byte) string {
	if slices.Equal(in, out) {
		return "unchanged"
	}
	return pktgen.Dump(out)
}

// steeredQuery is a query that was steered, as the endpoint gets it.
type steeredQuery struct {
	pktgen.Datagram
	slot uint32 // in dns_flows
	flow dnsbpfDnsFlow
}

// steer runs a query that must be steered to the family's endpoint, and checks every octet of the result and the flow.
func (h *harness) steer(tb testing.TB, program Program, f family, frame []byte) steeredQuery {
	tb.Helper()
	return h.steerIn(tb, program, f, frame, testScope, loIfindex)
}

func (h *harness) steerIn(tb testing.TB, program Program, f family, frame []byte, scope Scope, ifindex int) steeredQuery {
	tb.Helper()
	return h.steerAs(tb, program, f, frame, steering{scope: scope, reason: "steered", ifindex: ifindex, replies: ifindex})
}

// steering is how a query is steered: for which reason, where it enters, and where its reply leaves.
type steering struct {
	scope            Scope
	reason           string
	ifindex, replies int
}

func (h *harness) steerAs(tb testing.TB, program Program, f family, frame []byte, as steering) steeredQuery {
	tb.Helper()
	var context []byte
	if as.ifindex != loIfindex {
		context = skbContext(skbIfindex, uint32(as.ifindex))
	}
	before := monotonic(tb)
	out := h.expectIn(tb, program, frame, as.scope, as.reason, context)
	after := monotonic(tb)

	in, err := pktgen.Parse(frame)
	if err != nil {
		tb.Fatalf("the test's own frame: %v", err)
	}
	got, err := pktgen.Parse(out)
	if err != nil {
		tb.Fatalf("%s: %v\nin: %s\nout: %s", program, err, pktgen.Dump(frame), pktgen.Dump(out))
	}
	if got.Source.Port() < h.options.NATPorts.First || got.Source.Port() > h.options.NATPorts.Last {
		tb.Errorf("NAT port %d is outside of %v", got.Source.Port(), h.options.NATPorts)
	}
	if want := referenceSteering(frame, f, got.Source.Port()); !slices.Equal(out, want) {
		tb.Fatalf("%s: steered packet\ngot: %s\nwant: %s", program, pktgen.Dump(out), pktgen.Dump(want))
	}

	q := steeredQuery{Datagram: got, slot: uint32(got.Source.Port() - h.options.NATPorts.First)}
	if err := h.objects.DnsFlows.Lookup(q.slot, &q.flow); err != nil {
		tb.Fatalf("slot %d: %v", q.slot, err)
	}
	if started := q.flow.StartedNs; started < before || started > after {
		tb.Errorf("flow started at %d, the program ran from %d to %d", started, before, after)
	}
	wantFlow := dnsbpfDnsFlow{
		StartedNs:    q.flow.StartedNs,
		TimedNs:      q.flow.TimedNs,
		QuestionHash: q.flow.QuestionHash, // checked by replies
		Endpoint:     f.backend.Addr().As16(),
		Client:       in.Source.Addr().As16(),
		Listener:     in.Destination.Addr().As16(),
		EndpointPort: f.backend.Port(),
		ClientPort:   in.Source.Port(),
		ListenerPort: in.Destination.Port(),
		Id:           binary.BigEndian.Uint16(in.Payload),
		Ifindex:      uint32(as.replies),
		Scope:        dnsbpfDnsScope(as.scope),
		OutIfindex:   loIfindex, // of all endpoints
		Asked:        referenceAsked(in.Payload),
		Generation:   h.config.Generation,
	}
	if timed := q.flow.TimedNs != 0; timed != isTimed(got.Source.Port()) {
		tb.Errorf("NAT port %d: latency sampled: %v", got.Source.Port(), timed)
	}
	if program == FromHost {
		wantFlow.Local = 1
	}
	if q.flow != wantFlow {
		tb.Errorf("flow\ngot  %+v\nwant %+v", q.flow, wantFlow)
	}
	return q
}

// referenceAsked are the DNS_ASKED_* of a query that is steered.
func referenceAsked(payload []byte) uint32 {
	if q, ok := ready.ParseQuery(payload); ok {
		return uint32(q.Asked)
	}
	bits := binary.BigEndian.Uint16(payload[2:])
	asked := uint32(0x80) | uint32(bits>>8&1) | uint32(bits>>5&1)<<1 | uint32(bits>>4&1)<<2
	if at := referenceQuery(payload).sizeOffset; at != 0 && payload[at+4]&0x80 != 0 {
		asked |= 8
	}
	return asked
}

// referenceSteering is a frame as it must leave, given the NAT port that was drawn.
func referenceSteering(frame []byte, f family, natPort uint16) []byte {
	want := rewritten(frame, f, netip.AddrPortFrom(f.nat, natPort), f.backend)
	payload := frame[f.dnsOffset:]
	payload = payload[:binary.BigEndian.Uint16(frame[f.dnsOffset-4:])-pktgen.UDPLength]
	if at := referenceQuery(payload).sizeOffset; at != 0 {
		size := want[f.dnsOffset+at:]
		binary.BigEndian.PutUint16(size, min(binary.BigEndian.Uint16(size), 1232))
	}
	return pktgen.RefreshChecksums(want)
}

// forget removes the flow of a query whose reply a test does not care for.
func (h *harness) forget(tb testing.TB, q steeredQuery) {
	tb.Helper()
	if err := h.objects.DnsFlows.Put(q.slot, dnsbpfDnsFlow{}); err != nil {
		tb.Fatal(err)
	}
}

func (h *harness) wantInFlight(tb testing.TB, want int) {
	tb.Helper()
	got, err := h.InFlight()
	if err != nil {
		tb.Fatal(err)
	}
	if got != want {
		tb.Errorf("%d queries in flight, want %d", got, want)
	}
}

// rewritten is a frame with other addresses and ports. Checksums are left as they were.
func rewritten(frame []byte, f family, source, destination netip.AddrPort) []byte {
	out := slices.Clone(frame)
	addresses := out[pktgen.EthernetLength+12:]
	if f.client.Addr().Is6() {
		addresses = out[pktgen.EthernetLength+8:]
	}
	n := copy(addresses, source.Addr().AsSlice())
	copy(addresses[n:], destination.Addr().AsSlice())
	ports := out[f.dnsOffset-pktgen.UDPLength:]
	binary.BigEndian.PutUint16(ports, source.Port())
	binary.BigEndian.PutUint16(ports[2:], destination.Port())
	return out
}

// isTimed says whether the latency of a query with this NAT port is sampled: one in DNS_LATENCY_SAMPLE.
func isTimed(natPort uint16) bool { return natPort%16 == 0 }

func monotonic(tb testing.TB) uint64 {
	tb.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
		tb.Fatal(err)
	}
	return uint64(now.Nano())
}

// query packs a plain query for A records, changed by edits.
func query(tb testing.TB, name string, edits ...func(*dns.Msg)) []byte {
	tb.Helper()
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), dns.TypeA)
	m.Id = testID
	for _, edit := range edits {
		edit(m)
	}
	return pack(tb, m)
}

func pack(tb testing.TB, m *dns.Msg) []byte {
	tb.Helper()
	wire, err := m.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	return wire
}

// rawQuery is a query of class IN and type A for a name in wire form, with the counts of a plain query.
func rawQuery(name string) []byte {
	wire := []byte{testID >> 8, testID & 0xff, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}
	wire = append(wire, name...)
	return append(wire, 0, 1, 0, 1)
}

// labels is a name in wire form.
func labels(labels ...string) string {
	var wire strings.Builder
	for _, label := range labels {
		wire.WriteByte(byte(len(label)))
		wire.WriteString(label)
	}
	wire.WriteByte(0)
	return wire.String()
}

// put returns a copy of a message with octets replaced.
func put(message []byte, offset int, octets ...byte) []byte {
	changed := slices.Clone(message)
	copy(changed[offset:], octets)
	return changed
}
