package answers

import (
	"net/netip"
	"slices"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
)

// agree reports whether an answer is what the API says about the name.
func agree(answer *ready.Answer, expected coherence.Expected) bool {
	if answer.Negative {
		return len(expected.Addresses) == 0 && expected.NoName == answer.NoName()
	}
	got := answer.Addresses()
	slices.SortFunc(got, netip.Addr.Compare)
	return !expected.NoName && slices.Equal(slices.Compact(got), expected.Addresses)
}
