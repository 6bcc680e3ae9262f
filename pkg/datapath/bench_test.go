//go:build linux

package datapath

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

const (
	benchRepeat = 200_000
	// So few runs that change the flow map, that a free NAT port is nearly always the first one drawn.
	benchFlows = 4_000
	// The same for others than this host, of which each has fewer slots.
	benchShare = 700
)

// emptyProgram is the floor: what the kernel's test run costs by itself. Its verdict is to pass.
func emptyProgram(b *testing.B, hook ebpf.ProgramType) *ebpf.Program {
	b.Helper()
	verdict := map[ebpf.ProgramType]int32{ebpf.SchedCLS: -1, ebpf.XDP: 2}[hook]
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         hook,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()},
		License:      "Dual BSD/GPL",
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { program.Close() })
	return program
}

// BenchmarkProgram reports nanoseconds for one packet as the kernel measures them, and times the floor.
func BenchmarkProgram(b *testing.B) {
	h := newHarness(b)
	// The endpoint is the listener and the NAT address the client's, so that a steered packet is a query again and can
	// be steered again; else a repetition would measure the packet of another address.
	steered := newHarness(b)
	steered.options.NATPorts = PortRange{First: 1, Last: 65535}
	if err := steered.configure(); err != nil {
		b.Fatal(err)
	}
	steered.replaceZones(b, []string{testZone},
		Backend{Address: listener4, NATAddress: client4.Addr(), Ifindex: loIfindex},
		Backend{Address: listener6, NATAddress: client6.Addr(), Ifindex: loIfindex})

	const external = "abcdefgh.ijklmnop.qrst.example.com" // as long as inZone
	otherPort := netip.AddrPortFrom(listener4.Addr(), 8080)
	message, external1 := query(b, inZone), query(b, external)
	withEDNS := query(b, inZone, withOPT(4096))
	empty, emptyXDP := emptyProgram(b, ebpf.SchedCLS), emptyProgram(b, ebpf.XDP)
	floorOf := func(program *ebpf.Program) func(b *testing.B) float64 {
		return func(b *testing.B) float64 {
			b.Helper()
			return nanoseconds(b, program, pktgen.UDP(client4, listener4, message), benchRepeat)
		}
	}
	floor := floorOf(empty)
	// As while the daemon lives: its last sign of life is looked at for each external name.
	alive := newHarness(b)
	alive.beat(b, time.Hour)
	filter := newFilterHarness(b)
	worker, stranger, kubeSwitch := filterFamilies[0].client, filterFamilies[0].stranger, filterFamilies[0].listener
	otherService := netip.AddrPortFrom(kubeSwitch.Addr(), 8080)
	for _, c := range []struct {
		name    string
		program *ebpf.Program
		frame   []byte
		repeat  int
		prepare func(b *testing.B)
	}{
		{"floor", empty, pktgen.UDP(client4, listener4, message), benchRepeat, nil},
		{"other/tcp", h.objects.DnsFromHost, pktgen.TCP(client4, otherPort, message), benchRepeat, nil},
		{"other/udp", h.objects.DnsFromHost, pktgen.UDP(client4, otherPort, message), benchRepeat, nil},
		{"other/udp6", h.objects.DnsFromHost, pktgen.UDP(client6, backend6, message), benchRepeat, nil},
		{"other/client", h.objects.DnsFromClient, pktgen.UDP(client4, otherPort, message), benchRepeat, nil},
		{"other/backend", h.objects.DnsFromBackend, pktgen.UDP(backend4, client4, message), benchRepeat, nil},
		{"external/ipv4", h.objects.DnsFromHost, pktgen.UDP(client4, listener4, external1), benchRepeat, nil},
		{"external/ipv6", h.objects.DnsFromHost, pktgen.UDP(client6, listener6, external1), benchRepeat, nil},
		{"external/alive", alive.objects.DnsFromHost, pktgen.UDP(client4, listener4, external1), benchRepeat, nil},
		{"external/255octets", h.objects.DnsFromHost, pktgen.UDP(client4, listener4, rawQuery(many(120)[:240]+labels("clusterx", "x"))), benchRepeat, nil},
		{"steered/ipv4", steered.objects.DnsFromHost, pktgen.UDP(client4, listener4, message), benchFlows, steered.emptyFlows},
		{"steered/ipv6", steered.objects.DnsFromHost, pktgen.UDP(client6, listener6, message), benchFlows, steered.emptyFlows},
		{"steered/client", steered.objects.DnsFromClient, pktgen.UDP(client4, listener4, message), benchShare, steered.emptyFlows},
		{"steered/edns", steered.objects.DnsFromHost, pktgen.UDP(client4, listener4, withEDNS), benchFlows, steered.emptyFlows},
	} {
		b.Run(c.name, func(b *testing.B) {
			report(b, floor, c.program, c.frame, c.repeat, c.prepare)
		})
	}
	for _, c := range []struct {
		name  string
		frame []byte
	}{
		{"other/tcp", pktgen.TCP(worker, otherService, message)},
		{"other/udp", pktgen.UDP(worker, otherService, message)},
		{"allowed/ipv4", pktgen.UDP(worker, kubeSwitch, message)},
		{"allowed/ipv6", pktgen.UDP(filterFamilies[1].client, filterFamilies[1].listener, message)},
		{"allowed/tcp", pktgen.SYN(worker, kubeSwitch)},
		{"refused/source", pktgen.UDP(stranger, kubeSwitch, message)},
		{"refused/message", pktgen.UDP(worker, kubeSwitch, put(message, 2, 0x81))},
	} {
		b.Run("filter/"+c.name, func(b *testing.B) {
			report(b, floorOf(emptyXDP), filter.objects.DnsFilter, c.frame, benchRepeat, nil)
		})
	}
	b.Run("reply", func(b *testing.B) {
		h.countedSince(b)
		q := h.steer(b, FromHost, families[0], families[0].query(message))
		// Behind the ports of the chain.
		q.slot = natPortsMax - 1
		q.Source = netip.AddrPortFrom(q.Source.Addr(), natPorts.First+natPortsMax-1)
		frame := replyFrame(q, answer(b, q))
		report(b, floor, h.objects.DnsFromBackend, frame, benchFlows, func(b *testing.B) {
			b.Helper()
			h.emptyFlows(b)
			h.chainFlows(b, q, benchFlows)
		})
		h.wantInFlight(b, 0)
	})
	benchAnswers(b)
	b.StopTimer()
	// A query in some hundred thousand finds no free port. It is passed, and so a query still for the next repetition.
	delta := steered.countedSince(b)
	steers, passes := delta["kubeswitch:steered"], delta["kubeswitch:passed_no_flow_slot"]
	delete(delta, "kubeswitch:steered")
	delete(delta, "kubeswitch:passed_no_flow_slot")
	if len(delta) > 0 || passes > 0 && steers/passes < 10_000 {
		b.Errorf("the steered benchmarks counted %d steered, %d without a port, %v", steers, passes, delta)
	}
}

// benchAnswers measures answers from the cache. A packet is a query only once, so each run is one of its own: the floor, too, is
// that of single runs, with the kernel's two looks at the clock.
func benchAnswers(b *testing.B) {
	b.Helper()
	h := newHarness(b)
	empty := emptyProgram(b, ebpf.SchedCLS)
	for _, c := range []struct {
		name, want string
		records    []string
		edits      []func(*dns.Msg)
	}{
		{"1 address", "answered_cached", []string{inZoneAddress}, nil},
		{"1 address, EDNS", "answered_cached", []string{inZoneAddress}, []func(*dns.Msg){withOPT(1232)}},
		{"10 addresses, EDNS", "answered_cached", addresses(inZone, 10), []func(*dns.Msg){withOPT(1232)}},
		{"60 addresses, EDNS", "answered_cached", addresses(inZone, 60), []func(*dns.Msg){withOPT(1232)}},
		{"truncated", "answered_cached", addresses(inZone, 60), nil},
		{"NXDOMAIN, EDNS", "answered_cached", []string{"-", "cluster.local. 5 IN SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5"}, []func(*dns.Msg){withOPT(1232)}},
		{"miss, external", "passed_external", nil, nil},
	} {
		b.Run("answered/"+c.name, func(b *testing.B) {
			message := query(b, inZone, c.edits...)
			if c.records != nil {
				h.give(b, made(b, message, c.records...))
			} else {
				message = query(b, "www.example.com")
			}
			frame := pktgen.UDP(client4, listener4, message)
			single := func(program *ebpf.Program) float64 {
				var durations []float64
				for range 2000 {
					durations = append(durations, nanoseconds(b, program, frame, 1))
				}
				slices.Sort(durations)
				return durations[len(durations)/2]
			}
			single(h.objects.DnsFromHost) // warm
			var packets, floors []float64
			h.countedSince(b)
			for b.Loop() {
				packets, floors = append(packets, single(h.objects.DnsFromHost)), append(floors, single(empty))
			}
			if counted := h.countedSince(b); len(counted) != 1 || counted["kubeswitch:"+c.want] == 0 {
				b.Errorf("counted %v", counted)
			}
			slices.Sort(packets)
			slices.Sort(floors)
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(packets[len(packets)/2], "ns/packet")
			b.ReportMetric(floors[len(floors)/2], "ns/floor")
		})
	}
}

// nanoseconds is the mean of one run.
func nanoseconds(b *testing.B, program *ebpf.Program, frame []byte, repeat int) float64 {
	b.Helper()
	_, mean, err := program.Benchmark(frame, repeat, nil)
	if err != nil {
		b.Fatal(err)
	}
	return float64(mean.Nanoseconds())
}

// report measures a program and, beside it in the same second, the floor.
func report(b *testing.B, floor func(*testing.B) float64, program *ebpf.Program, frame []byte, repeat int, prepare func(*testing.B)) {
	b.Helper()
	var packets, floors []float64
	for b.Loop() {
		if prepare != nil {
			b.StopTimer()
			prepare(b)
			b.StartTimer()
		}
		packets = append(packets, nanoseconds(b, program, frame, repeat))
		floors = append(floors, floor(b))
	}
	// Medians: a round in which another task had the CPU says nothing.
	slices.Sort(packets)
	slices.Sort(floors)
	packet, least := packets[len(packets)/2], floors[len(floors)/2]
	b.ReportMetric(0, "ns/op") // of the loop, which is of no interest
	b.ReportMetric(packet, "ns/packet")
	b.ReportMetric(least, "ns/floor")
	b.ReportMetric(packet/least, "x-floor")
}

func (h *harness) emptyFlows(b *testing.B) {
	b.Helper()
	h.forgetSteered(b)
}

// chainFlows makes flows of which each turns the reply to it into the reply to the next one, so that repetitions of one
// packet are each delivered.
func (h *harness) chainFlows(b *testing.B, first steeredQuery, count int) {
	b.Helper()
	slot, flow := first.slot, first.flow
	flow.StartedNs, flow.TimedNs = monotonic(b), 0
	flow.Listener, flow.ListenerPort = flow.Endpoint, flow.EndpointPort
	for next := range uint32(count) {
		flow.ClientPort = natPorts.First + uint16(next)
		if err := h.objects.DnsFlows.Put(slot, flow); err != nil {
			b.Fatal(err)
		}
		slot = next
	}
}
