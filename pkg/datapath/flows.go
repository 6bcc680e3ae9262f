//go:build linux

package datapath

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
)

// drainPoll is how often Drain looks: replies take about a millisecond, and the kernel tells nobody of the last one.
const drainPoll = 10 * time.Millisecond

// natPortsMax is DNS_NAT_PORTS_MAX.
const natPortsMax = 16384

// InFlight counts the steered queries that still wait for their reply.
func (d *Datapath) InFlight() (count int, err error) {
	now, err := coarseClock()
	if err != nil {
		return 0, err
	}
	var cursor ebpf.MapBatchCursor
	keys, flows := make([]uint32, natPortsMax), make([]dnsbpfDnsFlow, natPortsMax)
	for {
		n, err := d.objects.DnsFlows.BatchLookup(&cursor, keys, flows, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return 0, fmt.Errorf("read map dns_flows: %w", err)
		}
		for _, flow := range flows[:n] {
			if flow.StartedNs != 0 && now-int64(flow.StartedNs) <= d.options.FlowTimeout.Nanoseconds() {
				count++
			}
		}
		if err != nil {
			return count, nil
		}
	}
}

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
