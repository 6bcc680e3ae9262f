//go:build linux

package host

import (
	"testing"
	"time"
)

// TestFight: the same thing again and again within a minute is one, and nothing else waits for it; many things once are none.
func TestFight(t *testing.T) {
	var k keeping
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	k.forget(now)
	for i := range maxHeals {
		if k.fighting() || !k.due("a", now) {
			t.Errorf("a fight after %d times", i)
		}
		now = now.Add(time.Second)
		k.heals["a"] = append(k.heals["a"], now)
		k.heals[string(rune('b'+i))] = []time.Time{now}
	}
	if !k.fighting() || k.due("a", now.Add(healPause/2)) || !k.due("a", now.Add(healPause)) {
		t.Error("no fight, or one without a pause")
	}
	if !k.due("b", now) {
		t.Error("what nobody fights over waits")
	}
	if k.forget(now.Add(healWindow + time.Second)); k.fighting() {
		t.Error("left alone for a while, it is still a fight")
	}
}

// TestRecord: what happens again is one event with a count, and the past is bounded.
func TestRecord(t *testing.T) {
	var k keeping
	now := time.Now()
	for i := range 3 {
		if other := k.record(now.Add(time.Duration(i)*time.Second), "a", "put back"); other != (i == 0) {
			t.Errorf("time %d: another one: %v", i, other)
		}
	}
	if e := k.events[0]; len(k.events) != 1 || e.Count != 3 || e.Last == nil {
		t.Errorf("events %+v", k.events)
	}
	for i := range 3 * maxEvents {
		k.record(now, string(rune('a'+i)), "put back")
	}
	if len(k.events) != maxEvents {
		t.Errorf("%d events", len(k.events))
	}
}
