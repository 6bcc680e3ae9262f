//go:build linux

package datapath

import (
	"context"
	"fmt"
	"time"
)

// drainPoll is how often Drain looks: replies take about a millisecond, and the kernel tells nobody of the last one.
const drainPoll = 2 * time.Millisecond

// InFlight counts the steered queries whose reply has not come.
func (d *Datapath) InFlight() (count int, err error) {
	var (
		key   dnsbpfDnsFlowKey
		value dnsbpfDnsFlow
	)
	entries := d.objects.DnsFlows.Iterate()
	for entries.Next(&key, &value) {
		count++
	}
	if err := entries.Err(); err != nil {
		return 0, fmt.Errorf("walk map dns_flows: %w", err)
	}
	return count, nil
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
