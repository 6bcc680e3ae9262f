//go:build linux

package datapath

import (
	"testing"
	"time"
)

// The clock ticks every few milliseconds, and a program may have read it before another CPU writes a time of the next
// tick. An hour ahead stands for that here: such a time is young, not older than everything.
func TestTimesAhead(t *testing.T) {
	const ahead = uint64(time.Hour)
	h := newHarness(t)
	f := families[0]
	h.options.NATPorts = PortRange{First: 5000, Last: 5000}
	if err := h.configure(); err != nil {
		t.Fatal(err)
	}
	q := h.steer(t, FromHost, f, f.query(query(t, inZone)))
	q.flow.StartedNs += ahead
	if err := h.objects.DnsFlows.Put(q.slot, q.flow); err != nil {
		t.Fatal(err)
	}
	// The slot's query is just being steered: nobody else gets the slot.
	h.expect(t, FromHost, f.query(query(t, inZone)), "passed_no_flow_slot")
	h.wantInFlight(t, 1)
	if waiting, err := h.Waiting(); err != nil || len(waiting) != 0 {
		t.Errorf("Waiting returned %v, %v: it has not waited yet", waiting, err)
	}
	h.deliver(t, FromHost, f, q, replyFrame(q, answer(t, q)))

	if err := h.ReplaceZones([]string{testZone}, defaultBackends(), defaultBackends(), nil); err != nil {
		t.Fatal(err)
	}
	config, err := h.readConfig()
	if err != nil {
		t.Fatal(err)
	}
	config.HeartbeatNs, config.HeartbeatLimitNs = monotonic(t)+ahead, 1
	if err := h.writeConfig(config); err != nil {
		t.Fatal(err)
	}
	h.expect(t, FromHost, f.query(query(t, "example.com")), "passed_external")
}
