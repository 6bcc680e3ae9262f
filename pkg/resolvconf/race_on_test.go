//go:build race

package resolvconf

import "testing"

// exhaustive tests run in one goroutine, where the race detector finds nothing and makes them ten times slower. They are
// run without it.
func exhaustive(t *testing.T) {
	t.Helper()
	t.Skip("run without -race: one goroutine, some ten thousand cases")
}
