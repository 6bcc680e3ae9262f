// Package say puts things into words for people. It is a leaf; every room may use it.
package say

import (
	"fmt"
	"strings"
)

// Count is a number and its noun, in the plural unless it is one: "1 endpoint", "0 endpoints".
func Count[T int | uint32 | uint64](n T, noun string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(noun, "ry"):
		noun = noun[:len(noun)-1] + "ies"
	default:
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
