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

// Waiting returns the endpoints from which a steered query has waited for its reply for longer than a time.
func (d *Datapath) Waiting(longer time.Duration) (map[netip.AddrPort]bool, error) {
	before, err := d.traffic()
	if err != nil {
		return nil, err
	}
	d.flowsMu.Lock()
	idle := d.quiet && before.unanswered() == d.trafficThen.unanswered()
	d.flowsMu.Unlock()
	if idle {
		// As many replies as queries since none was in flight: there is no need to look at each slot.
		return nil, nil
	}
	waiting := make(map[netip.AddrPort]bool)
	inFlight := 0
	err = d.walkFlows(func(flow dnsbpfDnsFlow, age time.Duration) {
		inFlight++
		if age > longer {
			waiting[netip.AddrPortFrom(netip.AddrFrom16(flow.Endpoint).Unmap(), flow.EndpointPort)] = true
		}
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
		started := binary.NativeEndian.Uint64(slot) // its first field
		age := time.Duration(now - int64(started))
		if started == 0 || age > d.options.FlowTimeout {
			continue
		}
		var flow dnsbpfDnsFlow
		if _, err := binary.Decode(slot, binary.NativeEndian, &flow); err != nil {
			return fmt.Errorf("decode map dns_flows: %w", err)
		}
		visit(flow, age)
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
