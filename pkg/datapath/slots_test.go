//go:build linux

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// setNATPorts also sets a flow timeout that no stall of the machine comes near.
func (h *harness) setNATPorts(tb testing.TB, ports PortRange) {
	tb.Helper()
	h.options.NATPorts, h.options.FlowTimeout = ports, time.Hour
	if err := h.configure(); err != nil {
		tb.Fatal(err)
	}
}

// fill steers queries until each slot of the range has one.
func (h *harness) fill(tb testing.TB, f family, inFlight map[uint32]steeredQuery) {
	tb.Helper()
	for tries := 0; len(inFlight) < h.options.NATPorts.count(); tries++ {
		// The last free one of 16 is missed by 8 draws about every second time.
		if tries > 2000 {
			tb.Fatalf("%d of %d slots filled after %d queries", len(inFlight), h.options.NATPorts.count(), tries)
		}
		frame := f.query(query(tb, inZone, func(m *dns.Msg) { m.Id = uint16(tries) }))
		before := len(inFlight)
		verdict, _ := h.run(tb, FromHost, frame, nil)
		if verdict == "redirect" {
			slot, flow := h.newestFlow(tb, inFlight)
			inFlight[slot] = steeredQuery{slot: slot, flow: flow}
		}
		want := map[string]uint64{"kubeswitch:passed_no_flow_slot": 1}
		if verdict == "redirect" {
			want = map[string]uint64{"kubeswitch:steered": 1}
		}
		if got := h.countedSince(tb); !maps.Equal(got, want) || verdict == "redirect" && len(inFlight) != before+1 {
			tb.Fatalf("verdict %s, counted %v, %d slots taken, before %d", verdict, got, len(inFlight), before)
		}
	}
}

// newestFlow finds the one slot that is taken and not yet known.
func (h *harness) newestFlow(tb testing.TB, known map[uint32]steeredQuery) (newest uint32, found dnsbpfDnsFlow) {
	tb.Helper()
	count := 0
	for slot := range uint32(h.options.NATPorts.count()) {
		var flow dnsbpfDnsFlow
		if err := h.objects.DnsFlows.Lookup(slot, &flow); err != nil {
			tb.Fatal(err)
		}
		q, ok := known[slot]
		if ok && q.flow != flow {
			tb.Fatalf("slot %d was taken from its query: %+v, was %+v", slot, flow, q.flow)
		}
		if !ok && flow.StartedNs != 0 {
			newest, found = slot, flow
			count++
		}
	}
	if count != 1 {
		tb.Fatalf("%d slots were taken by one query", count)
	}
	return newest, found
}

// With all slots taken a query is passed and takes nobody's slot away. Slots of queries that are too old go to new ones,
// and only those.
func TestAllSlotsTaken(t *testing.T) {
	h := newHarness(t)
	h.setNATPorts(t, PortRange{First: 2000, Last: 2015})
	f := families[0]
	inFlight := make(map[uint32]steeredQuery)
	h.fill(t, f, inFlight)
	for range 100 {
		h.expect(t, FromHost, f.query(query(t, inZone)), "passed_no_flow_slot")
		h.expect(t, FromClient, families[1].query(query(t, inZone)), "passed_no_flow_slot")
	}
	h.wantInFlight(t, 16)

	for _, slot := range []uint32{0, 3, 7, 15} {
		q := inFlight[slot]
		q.flow.StartedNs = monotonic(t) - uint64(h.options.FlowTimeout.Nanoseconds()) - 1
		if err := h.objects.DnsFlows.Put(slot, q.flow); err != nil {
			t.Fatal(err)
		}
		delete(inFlight, slot)
	}
	h.wantInFlight(t, 12)
	refilled := make(map[uint16]bool)
	for tries := 0; len(refilled) < 4; tries++ {
		if tries > 2000 {
			t.Fatalf("after %d queries only %v have a new one", tries, refilled)
		}
		verdict, out := h.run(t, FromHost, f.query(query(t, inZone)), nil)
		if verdict != "redirect" {
			continue
		}
		port := binary.BigEndian.Uint16(out[f.dnsOffset-pktgen.UDPLength:])
		if !slices.Contains([]uint16{2000, 2003, 2007, 2015}, port) || refilled[port] {
			t.Fatalf("NAT port %d was given to a second query; before: %v", port, refilled)
		}
		refilled[port] = true
	}
	h.countedSince(t)
	h.wantInFlight(t, 16)
	for slot, q := range inFlight {
		var flow dnsbpfDnsFlow
		if err := h.objects.DnsFlows.Lookup(slot, &flow); err != nil || flow != q.flow {
			t.Errorf("slot %d: %+v, %v; want %+v", slot, flow, err, q.flow)
		}
	}
	h.expect(t, FromHost, f.query(query(t, inZone)), "passed_no_flow_slot")
}

// race runs two functions at once, again and again, with check between the rounds. The second one starts as soon as it
// sees the round's number: woken through a channel it would come too late to race.
func race(rounds int, prepare, first, second, check func()) {
	var round, done atomic.Int64
	var racing sync.WaitGroup
	racing.Go(func() {
		for next := int64(1); ; next++ {
			for round.Load() < next {
				runtime.Gosched()
			}
			if round.Load() > int64(rounds) {
				return
			}
			second()
			done.Store(next)
		}
	})
	defer racing.Wait()
	defer round.Store(int64(rounds) + 1) // also when check ends the test
	for next := int64(1); next <= int64(rounds); next++ {
		prepare()
		round.Store(next)
		first()
		for done.Load() < next {
			runtime.Gosched()
		}
		check()
	}
}

// Two copies of one reply on two CPUs at once: one is delivered, the other is nobody's.
func TestRacingReplies(t *testing.T) {
	const rounds = 10_000
	h := newHarness(t)
	h.setNATPorts(t, natPorts)
	f := families[0]
	q := h.steer(t, FromHost, f, f.query(query(t, inZone)))
	frame := replyFrame(q, answer(t, q))
	var verdicts [2]uint32
	var errs [2]error
	reply := func(copy int) func() {
		room := make([]byte, len(frame)+256)
		return func() {
			verdicts[copy], errs[copy] = h.objects.DnsFromBackend.Run(&ebpf.RunOptions{Data: frame, DataOut: room})
		}
	}
	reopen := func() {
		q.flow.StartedNs = monotonic(t)
		if err := h.objects.DnsFlows.Put(q.slot, q.flow); err != nil {
			t.Fatal(err)
		}
	}
	race(rounds, reopen, reply(0), reply(1), func() {
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatal(err)
		}
		if a, b := verdictName(verdicts[0]), verdictName(verdicts[1]); min(a, b) != "pass" || max(a, b) != "redirect" {
			t.Fatalf("verdicts of the two copies: %s, %s", a, b)
		}
	})
	counted := h.countedSince(t)
	delete(counted, "kubeswitch:latency")
	if want := map[string]uint64{"kubeswitch:replied": rounds}; !maps.Equal(counted, want) {
		t.Errorf("counted %v, want %v", counted, want)
	}
	h.wantInFlight(t, 0)
}

// Two CPUs steer until no slot is free: as many queries are steered as there are slots. The kernel repeats the program
// by itself; a steered packet is a query again, as the endpoint is the listener.
func TestRacingClaims(t *testing.T) {
	const rounds, slots = 1000, 64
	// So many that the last slot is found: with one of 64 free, 4 draws miss it with a probability of 0.94.
	const repeat = 400
	h := newHarness(t)
	h.setNATPorts(t, PortRange{First: 1024, Last: 1024 + slots - 1})
	h.replaceZones(t, []string{testZone}, Backend{Address: listener4, NATAddress: client4.Addr(), Ifindex: loIfindex})
	frame := pktgen.UDP(client4, listener4, query(t, inZone))
	var errs [2]error
	steer := func(i int, program *ebpf.Program) func() {
		return func() { _, _, errs[i] = program.Benchmark(frame, repeat, nil) }
	}
	keys, free := make([]uint32, slots), make([]dnsbpfDnsFlow, slots)
	for slot := range keys {
		keys[slot] = uint32(slot)
	}
	empty := func() {
		if _, err := h.objects.DnsFlows.BatchUpdate(keys, free, nil); err != nil {
			t.Fatal(err)
		}
	}
	race(rounds, empty, steer(0, h.objects.DnsFromHost), steer(1, h.objects.DnsFromHost), func() {
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatal(err)
		}
		counted := h.countedSince(t)
		if counted["kubeswitch:steered"] != slots || len(counted) != 2 || counted["kubeswitch:passed_no_flow_slot"] == 0 {
			t.Fatalf("counted %v for %d slots", counted, slots)
		}
	})
	h.wantInFlight(t, slots)
}

// Queries on several CPUs at once: none gets a NAT port that another one has, and each gets its own reply.
func TestRacingQueries(t *testing.T) {
	const askers, perAsker, held = 8, 3000, 4
	h := newHarness(t)
	// So few that draws meet often.
	h.setNATPorts(t, PortRange{First: 3000, Last: 3000 + 2*askers*held - 1})
	var taken sync.Map // NAT port -> who has it
	var steered, crowded atomic.Int64
	askAndReply := func(asker int) error {
		f, program := families[asker%2], []*ebpf.Program{h.objects.DnsFromHost, h.objects.DnsFromClient}[asker/2%2]
		f.client = netip.AddrPortFrom(f.client.Addr(), uint16(10000+asker))
		message := rawQuery(labels(fmt.Sprintf("asker%d", asker), "cluster", "local"))
		room := make([]byte, 2048)
		type waiting struct {
			port  uint16
			reply []byte
		}
		var mine []waiting
		for i := range perAsker {
			binary.BigEndian.PutUint16(message, uint16(i))
			run := ebpf.RunOptions{Data: f.query(message), DataOut: room}
			verdict, err := program.Run(&run)
			if err != nil {
				return err
			}
			if verdictName(verdict) == "redirect" {
				steered.Add(1)
				port := binary.BigEndian.Uint16(run.DataOut[f.dnsOffset-pktgen.UDPLength:])
				if other, loaded := taken.LoadOrStore(port, asker); loaded {
					return fmt.Errorf("NAT port %d of asker %v was given to asker %d", port, other, asker)
				}
				reply := put(message, 2, 0x81, 0x80)
				mine = append(mine, waiting{port, pktgen.UDP(f.backend, netip.AddrPortFrom(f.nat, port), reply)})
			} else {
				crowded.Add(1)
			}
			if len(mine) < held && i < perAsker-1 {
				continue
			}
			for _, w := range mine {
				// Before the slot is free, not after.
				taken.Delete(w.port)
				run := ebpf.RunOptions{Data: w.reply, DataOut: room}
				verdict, err := h.objects.DnsFromBackend.Run(&run)
				if err != nil {
					return err
				}
				delivered, err := pktgen.Parse(run.DataOut)
				if err != nil {
					return err
				}
				if verdictName(verdict) != "redirect" || delivered.Source != f.listener || delivered.Destination != f.client {
					return fmt.Errorf("asker %d's reply: verdict %s, %s to %s", asker, verdictName(verdict), delivered.Source, delivered.Destination)
				}
			}
			mine = mine[:0]
		}
		return nil
	}
	errs := make([]error, askers)
	var running sync.WaitGroup
	for asker := range askers {
		running.Go(func() { errs[asker] = askAndReply(asker) })
	}
	running.Wait()
	for _, err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
	h.wantInFlight(t, 0)
	want := map[string]uint64{"kubeswitch:steered": uint64(steered.Load()), "kubeswitch:replied": uint64(steered.Load())}
	if crowded.Load() > 0 {
		want["kubeswitch:passed_no_flow_slot"] = uint64(crowded.Load())
	}
	counted := h.countedSince(t)
	delete(counted, "kubeswitch:latency")
	if !maps.Equal(counted, want) || steered.Load() == 0 {
		t.Errorf("counted %v, want %v", counted, want)
	}
	t.Logf("%d steered, %d found no port", steered.Load(), crowded.Load())
}

// InFlight and Waiting read ages from the map; a minute more or less does not matter here.
func TestWaiting(t *testing.T) {
	h := newHarness(t)
	h.options.FlowTimeout = time.Hour
	if err := h.configure(); err != nil {
		t.Fatal(err)
	}
	endpoints := []netip.AddrPort{
		backend4, backend6, netip.MustParseAddrPort("172.20.0.11:53"), netip.MustParseAddrPort("172.20.0.10:5353"),
	}
	for i, flow := range []struct {
		slot     uint32
		endpoint int
		age      time.Duration
	}{
		{0, 0, 10 * time.Minute},
		{natPortsMax - 1, 0, 50 * time.Minute}, // the longest wait counts
		{100, 1, 30 * time.Minute},
		{8191, 2, time.Minute},
		{8192, 3, 61 * time.Minute}, // nobody waits any more
	} {
		endpoint := endpoints[flow.endpoint]
		err := h.objects.DnsFlows.Put(flow.slot, dnsbpfDnsFlow{
			StartedNs: monotonic(t) - uint64(flow.age.Nanoseconds()), Endpoint: endpoint.Addr().As16(), EndpointPort: endpoint.Port(),
		})
		if err != nil {
			t.Fatal(err)
		}
		h.wantInFlight(t, min(i+1, 4))
	}
	look := func(want map[netip.AddrPort]Waiting) {
		t.Helper()
		got, err := h.Waiting()
		if err != nil {
			t.Fatal(err)
		}
		for endpoint, w := range got {
			w.Longest = w.Longest.Truncate(time.Minute)
			got[endpoint] = w
		}
		if !maps.Equal(got, want) {
			t.Errorf("waiting: %v, want %v", got, want)
		}
	}
	want := map[netip.AddrPort]Waiting{
		endpoints[0]: {Longest: 50 * time.Minute}, endpoints[1]: {Longest: 30 * time.Minute}, endpoints[2]: {Longest: time.Minute},
	}
	look(want)
	// Once, when nine tenths of its time are over, a query is lost.
	h.lookedAt -= int64(5 * time.Minute)
	if err := h.objects.DnsFlows.Put(uint32(100), dnsbpfDnsFlow{
		StartedNs: monotonic(t) - uint64(56*time.Minute), Endpoint: endpoints[1].Addr().As16(), EndpointPort: endpoints[1].Port(),
	}); err != nil {
		t.Fatal(err)
	}
	want[endpoints[1]] = Waiting{Longest: 56 * time.Minute, Lost: 1}
	look(want)
	want[endpoints[1]] = Waiting{Longest: 56 * time.Minute}
	look(want)
	h.forgetSteered(t)
	f := families[1]
	// While nothing is in flight it does not look at the slots, but it notices the next query.
	for range 3 {
		for range 2 {
			if waiting, err := h.Waiting(); err != nil || len(waiting) != 0 {
				t.Errorf("without a query: Waiting returned %v, %v", waiting, err)
			}
		}
		q := h.steer(t, FromHost, f, f.query(query(t, inZone)))
		q.flow.StartedNs -= uint64(time.Minute)
		if err := h.objects.DnsFlows.Put(q.slot, q.flow); err != nil {
			t.Fatal(err)
		}
		h.wantInFlight(t, 1)
		if waiting, err := h.Waiting(); err != nil || len(waiting) != 1 || waiting[f.backend].Longest < time.Minute {
			t.Errorf("with a query: Waiting returned %v, %v", waiting, err)
		}
		h.deliver(t, FromHost, f, q, replyFrame(q, answer(t, q)))
		h.wantInFlight(t, 0)
	}
}

// chiSquare is the statistic of observed counts against equal shares.
func chiSquare(observed []int, draws int) (statistic float64) {
	expected := float64(draws) / float64(len(observed))
	for _, count := range observed {
		difference := float64(count) - expected
		statistic += difference * difference / expected
	}
	return statistic
}

// Every NAT port is equally likely, also in a range whose size is no power of two, and no port hints at the next one.
// The statistic of 63 degrees of freedom is above 160 once in some 10^10 runs.
func TestNATPortsUniform(t *testing.T) {
	const draws, buckets, bound = 20_000, 64, 160
	h := newHarness(t)
	f := families[0]
	frame := f.query(query(t, inZone))
	room := make([]byte, 512)
	for _, ports := range []PortRange{{1024, 1024 + natPortsMax - 1}, {20000, 29983}, {1, 64}} {
		h.setNATPorts(t, ports)
		var observed, steps [buckets]int
		last := 0
		for range draws {
			run := ebpf.RunOptions{Data: frame, DataOut: room}
			verdict, err := h.objects.DnsFromHost.Run(&run)
			if err != nil || verdictName(verdict) != "redirect" {
				t.Fatalf("verdict %s, %v", verdictName(verdict), err)
			}
			port := binary.BigEndian.Uint16(run.DataOut[f.dnsOffset-pktgen.UDPLength:])
			h.free(t, port)
			bucket := int(port-ports.First) * buckets / ports.count()
			observed[bucket]++
			steps[(bucket-last+buckets)%buckets]++
			last = bucket
		}
		single, step := chiSquare(observed[:], draws), chiSquare(steps[:], draws)
		t.Logf("%v: chi-square %.1f, of the steps %.1f", ports, single, step)
		if single > bound || step > bound {
			t.Errorf("%v: chi-square %.1f, of the steps %.1f, over %d draws: not uniform", ports, single, step, draws)
		}
	}
}

// flood runs a query until it has been repeated as often, and returns how many were steered.
func (h *harness) flood(t *testing.T, program *ebpf.Program, frame []byte, repeat int) int {
	t.Helper()
	before, err := h.InFlight()
	if err != nil {
		t.Fatal(err)
	}
	for range repeat {
		if _, err := program.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256)}); err != nil {
			t.Fatal(err)
		}
	}
	after, err := h.InFlight()
	if err != nil {
		t.Fatal(err)
	}
	return after - before
}

// One source can't have all slots: a worker's flood leaves most of them to others, and that of many workers a quarter to
// this host. To IPv6 a /64 is one source.
func TestShares(t *testing.T) {
	const slots = 2048
	const share, own = (slots - slots/4) / 4, slots / 4
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			h := newHarness(t)
			h.setNATPorts(t, PortRange{First: 1024, Last: 1024 + slots - 1})
			message := query(t, inZone)
			from := func(address string) []byte {
				f.client = netip.AddrPortFrom(netip.MustParseAddr(address), 40000)
				return f.query(message)
			}
			floods, format := []string{"172.19.200.100"}, "172.19.%d.1"
			if f.client.Addr().Is6() {
				floods, format = []string{"fd00:19:0:200::1", "fd00:19:0:200::2", "fd00:19:0:200:ffff:ffff:ffff:3"}, "fd00:19:0:%d::1"
			}
			taken := 0
			for _, source := range floods {
				taken += h.flood(t, h.objects.DnsFromClient, from(source), 3*share)
			}
			if taken > share || taken < share*9/10 {
				t.Errorf("a flood took %d slots, want %d at most", taken, share)
			}
			// Shares may overlap, and those of a few be the same.
			steered := 0
			for other := range 20 {
				steered += h.flood(t, h.objects.DnsFromClient, from(fmt.Sprintf(format, other)), 5)
			}
			if steered < 50 {
				t.Errorf("%d of 100 queries of others are steered beside a flood", steered)
			}
			if steered := h.flood(t, h.objects.DnsFromHost, f.query(message), 20); steered != 20 {
				t.Errorf("%d of 20 of this host's queries are steered beside a flood", steered)
			}
			for worker := range 40 {
				h.flood(t, h.objects.DnsFromClient, from(fmt.Sprintf(format, 100+worker)), share)
			}
			if steered := h.flood(t, h.objects.DnsFromHost, f.query(message), own/8); steered < own/8-3 {
				t.Errorf("%d of %d of this host's queries are steered beside many floods", steered, own/8)
			}
		})
	}
}

// What was drawn before tells nothing of the next draw: the generator is keyed, and with another key it goes elsewhere.
func TestDrawKey(t *testing.T) {
	ports := func() (drawn [8]uint16) {
		h := newHarness(t)
		for i := range drawn {
			q := h.steer(t, FromHost, families[0], families[0].query(query(t, inZone)))
			drawn[i] = q.Source.Port()
			h.forget(t, q)
		}
		return drawn
	}
	if a, b := ports(), ports(); a == b {
		t.Errorf("two loads draw the same ports: %v", a)
	}
}
