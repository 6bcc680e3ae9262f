package say

import "testing"

func TestCount(t *testing.T) {
	for want, got := range map[string]string{
		"0 endpoints": Count(0, "endpoint"), "1 endpoint": Count(1, "endpoint"), "2 endpoints": Count(uint64(2), "endpoint"),
		"1 query": Count(1, "query"), "3 queries": Count(3, "query"),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
