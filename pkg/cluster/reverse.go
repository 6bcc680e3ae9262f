package cluster

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// MaxReverseZones bounds what ReverseZones returns: each zone is a map entry in
// the kernel, and a list longer than this is a mistake in a prefix.
const MaxReverseZones = 256

// ReverseZones returns the reverse zones (below in-addr.arpa and ip6.arpa, lower
// case, no trailing dot) that cover the prefixes exactly: no address outside
// them, so that names of somebody else's network are never taken over.
//
// Reverse zones are cut at octets (IPv4) and nibbles (IPv6). A prefix that ends
// in between becomes several zones of the next longer cut: 172.20.0.0/14 becomes
// four /16 zones. The same holds beyond /24: the zone of the /24 around
// 192.168.1.0/25 holds 128 names that are not in the prefix, so the prefix
// becomes 128 zones of one address each. (RFC 2317 zones do not help: clients
// ask for the plain name, and it is the plain name that the datapath matches.)
//
// Host bits are ignored, an IPv4-mapped prefix counts as IPv4, and a prefix
// inside another one adds nothing. Zones are ordered by address. It is an error
// if a prefix is invalid or if more than 256 zones are needed in all.
func ReverseZones(prefixes ...netip.Prefix) ([]string, error) {
	blocks := make([]netip.Prefix, 0, len(prefixes))
	for _, p := range prefixes {
		b, err := unmapPrefix(p)
		if err != nil {
			return nil, err
		}
		blocks = append(blocks, b)
	}
	blocks = WithoutCovered(blocks)

	total := 0
	for _, b := range blocks {
		total += 1 << (cutAfter(b) - b.Bits()) // at most 1<<7
	}
	if total > MaxReverseZones {
		return nil, fmt.Errorf("reverse zones of %s: %d zones needed, at most %d allowed; give prefixes that end at an octet (IPv4) or nibble (IPv6)",
			joinPrefixes(blocks), total, MaxReverseZones)
	}

	zones := make([]string, 0, total)
	for _, b := range blocks {
		cut := cutAfter(b)
		for i := range 1 << (cut - b.Bits()) {
			zones = append(zones, reverseName(b.Addr().AsSlice(), cut, i))
		}
	}
	return zones, nil
}

// Fitting takes the widest prefixes that together need no more than
// MaxReverseZones, and counts those left.
func Fitting(prefixes []netip.Prefix) (fit []netip.Prefix, left int) {
	byWidth := slices.Clone(prefixes)
	slices.SortStableFunc(byWidth, func(a, b netip.Prefix) int { return cmp.Compare(a.Bits(), b.Bits()) })
	total := 0
	for _, p := range byWidth {
		needs := 1 << (cutAfter(p) - p.Bits())
		if total+needs > MaxReverseZones {
			left++
			continue
		}
		total += needs
		fit = append(fit, p)
	}
	return fit, left
}

// unmapPrefix validates p, clears its host bits and turns IPv4-mapped IPv6 into IPv4.
func unmapPrefix(p netip.Prefix) (netip.Prefix, error) {
	if !p.IsValid() {
		return p, fmt.Errorf("reverse zones: %s is not a valid prefix; write it as in 172.21.0.0/16", p)
	}
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return p, fmt.Errorf("reverse zones of %s: the prefix is wider than all of IPv4; write it as an IPv4 prefix", p)
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), nil
}

// WithoutCovered sorts the masked prefixes and drops each one that lies inside another.
func WithoutCovered(ps []netip.Prefix) []netip.Prefix {
	slices.SortFunc(ps, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	out := ps[:0]
	for _, p := range ps {
		// Sorted like this, whatever covers p is the last one kept.
		if n := len(out); n > 0 && out[n-1].Overlaps(p) {
			continue
		}
		out = append(out, p)
	}
	return out
}

// labelBits is how many address bits one label of a reverse name holds.
func labelBits(a netip.Addr) int {
	if a.Is4() {
		return 8
	}
	return 4
}

// cutAfter returns the first label boundary, in bits, at or after p's length.
func cutAfter(p netip.Prefix) int {
	n := labelBits(p.Addr())
	return (p.Bits() + n - 1) / n * n
}

// reverseName names the i-th zone of cut bits that starts at addr's network.
func reverseName(addr []byte, cut, i int) string {
	var labels []string
	if len(addr) == 4 {
		for n := cut/8 - 1; n >= 0; n-- {
			b := addr[n]
			if n == cut/8-1 {
				b |= byte(i)
			}
			labels = append(labels, strconv.Itoa(int(b)))
		}
		return strings.Join(append(labels, "in-addr.arpa"), ".")
	}
	for n := cut/4 - 1; n >= 0; n-- {
		b := addr[n/2] >> 4
		if n%2 == 1 {
			b = addr[n/2] & 0xf
		}
		if n == cut/4-1 {
			b |= byte(i)
		}
		labels = append(labels, strconv.FormatUint(uint64(b), 16))
	}
	return strings.Join(append(labels, "ip6.arpa"), ".")
}

func joinPrefixes(ps []netip.Prefix) string {
	s := make([]string, len(ps))
	for i, p := range ps {
		s[i] = p.String()
	}
	return strings.Join(s, ", ")
}
