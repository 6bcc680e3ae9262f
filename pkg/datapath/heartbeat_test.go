//go:build linux

package datapath

import "testing"

func TestMonotonicOffset(t *testing.T) {
	for text, want := range map[string]int64{
		"": 0,
		"monotonic           0         0\nboottime            0         0\n": 0,
		"monotonic        1000         5\nboottime            7         0\n": 1_000_000_000_005,
		"boottime            7         0\nmonotonic       -1000 500000000\n": -999_500_000_000,
		"monotonic\n": 0,
	} {
		if got := monotonicOffset(text); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}
