//go:build !race

package resolvconf

import "testing"

func exhaustive(t *testing.T) { t.Helper() }
