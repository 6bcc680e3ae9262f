//go:build linux

package datapath

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unsafe"
)

// drainPoll is how often Drain looks: replies take about a millisecond, and the kernel tells nobody of the last one.
const drainPoll = 10 * time.Millisecond

// natPortsMax is DNS_NAT_PORTS_MAX.
const natPortsMax = 16384

// InFlight counts the steered queries that still wait for their reply.
func (d *Datapath) InFlight() (count int, err error) {
	err = d.walkFlows(func(dnsbpfDnsFlow, time.Duration) { count++ })
	return count, err
}

// Waiting is what an endpoint owes.
type Waiting struct {
	// Longest is how long the oldest of the steered queries that are in flight to it has waited for its reply.
	Longest time.Duration
	// Lost counts those of which, since the last look, it has become clear that no reply comes.
	Lost int
}

// Waiting returns the endpoints that a steered query waits for.
func (d *Datapath) Waiting() (map[netip.AddrPort]Waiting, error) {
	before, err := d.traffic()
	if err != nil {
		return nil, err
	}
	d.flowsMu.Lock()
	idle := d.quiet && before.unanswered() == d.trafficThen.unanswered()
	d.flowsMu.Unlock()
	if idle {
		// As many replies as queries since none was in flight, so the slots need not be examined.
		return nil, nil
	}
	now, err := coarseClock()
	if err != nil {
		return nil, err
	}
	waiting := make(map[netip.AddrPort]Waiting)
	inFlight := 0
	// A little before its slot is free, in which another query may come.
	lost := d.options.FlowTimeout * 9 / 10
	d.flowsMu.Lock()
	sinceLast := time.Duration(now - d.lookedAt)
	d.lookedAt = now
	d.flowsMu.Unlock()
	err = d.walkFlows(func(flow dnsbpfDnsFlow, age time.Duration) {
		inFlight++
		if age <= 0 {
			return
		}
		w := waiting[flow.endpoint()]
		w.Longest = max(w.Longest, age)
		if age > lost && age-sinceLast <= lost {
			w.Lost++
		}
		waiting[flow.endpoint()] = w
	})
	if err != nil {
		return nil, err
	}
	after, err := d.traffic()
	d.flowsMu.Lock()
	// Only if nothing moved meanwhile do the counters and the slots tell of the same moment.
	d.quiet, d.trafficThen = err == nil && inFlight == 0 && after == before, after
	d.flowsMu.Unlock()
	return waiting, err
}

// Steered returns the endpoint that a query of this host was steered to last, and whether its reply has been delivered.
// client is the socket that asked, id the DNS ID. Not found is one that was not steered.
func (d *Datapath) Steered(client netip.AddrPort, id uint16) (endpoint netip.AddrPort, replied, found bool, err error) {
	address := client.Addr().As16()
	err = d.walkSlots(func(uint64) bool { return true }, func(flow dnsbpfDnsFlow) {
		if flow.Id == id && flow.ClientPort == client.Port() && flow.Client == address {
			endpoint, replied, found = flow.endpoint(), flow.StartedNs == 0, true
		}
	})
	return endpoint, replied, found, err
}

func (f dnsbpfDnsFlow) endpoint() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(f.Endpoint).Unmap(), f.EndpointPort)
}

// traffic counts the queries that were steered and the replies that were delivered.
type traffic struct{ steered, replied uint64 }

func (t traffic) unanswered() uint64 { return t.steered - t.replied }

func (d *Datapath) traffic() (t traffic, err error) {
	for scope := range scopeMax {
		var cpus []dnsbpfDnsCounters
		if err := d.objects.DnsStats.Lookup(uint32(scope), &cpus); err != nil {
			return t, fmt.Errorf("read map dns_stats: %w", err)
		}
		for _, cpu := range cpus {
			t.steered += cpu.Steered + cpu.SteeredFallback
			t.replied += cpu.Replied
		}
	}
	return t, nil
}

// walkFlows visits the queries in flight with their age. Those whose reply would be too late are in flight no more.
func (d *Datapath) walkFlows(visit func(flow dnsbpfDnsFlow, age time.Duration)) error {
	now, err := coarseClock()
	if err != nil {
		return err
	}
	return d.walkSlots(func(started uint64) bool {
		return started != 0 && time.Duration(now-int64(started)) <= d.options.FlowTimeout
	}, func(flow dnsbpfDnsFlow) { visit(flow, time.Duration(now-int64(flow.StartedNs))) })
}

// walkSlots visits the slots, but for those that are not wanted by their start, 0 for a query that is over.
func (d *Datapath) walkSlots(wanted func(started uint64) bool, visit func(flow dnsbpfDnsFlow)) error {
	d.flowsMu.Lock()
	defer d.flowsMu.Unlock()
	memory, err := d.objects.DnsFlows.Memory()
	if err != nil {
		return fmt.Errorf("map dns_flows into memory: %w", err)
	}
	if d.flows == nil {
		d.flows = make([]byte, natPortsMax*flowSize)
	}
	if _, err := memory.ReadAt(d.flows, 0); err != nil {
		return fmt.Errorf("read map dns_flows: %w", err)
	}
	for slot := range slices.Chunk(d.flows, flowSize) {
		if !wanted(binary.NativeEndian.Uint64(slot)) { // its first field
			continue
		}
		var flow dnsbpfDnsFlow
		if _, err := binary.Decode(slot, binary.NativeEndian, &flow); err != nil {
			return fmt.Errorf("decode map dns_flows: %w", err)
		}
		visit(flow)
	}
	return nil
}

// flowSize is the size of a slot in octets.
const flowSize = int(unsafe.Sizeof(dnsbpfDnsFlow{}))

// Drain waits until no steered query is in flight or ctx ends.
func (d *Datapath) Drain(ctx context.Context) error {
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	for {
		count, err := d.InFlight()
		if err != nil || count == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
