package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// counted returns the names that format makes of from..to.
func counted(format string, from, to int) []string {
	var out []string
	for i := from; i <= to; i++ {
		out = append(out, fmt.Sprintf(format, i))
	}
	return out
}

func TestReverseZones(t *testing.T) {
	tests := []struct {
		name     string
		prefixes string // separated by blanks
		want     []string
	}{
		{"none", "", []string{}},
		{"K2s services", "172.21.0.0/16", []string{"21.172.in-addr.arpa"}},
		{"K2s services and pods", "172.21.0.0/16 172.20.0.0/16", []string{"20.172.in-addr.arpa", "21.172.in-addr.arpa"}},
		{"inside an octet", "172.20.0.0/14", counted("%d.172.in-addr.arpa", 20, 23)},
		{"one octet", "10.0.0.0/8", []string{"10.in-addr.arpa"}},
		{"kubeadm services", "10.96.0.0/12", counted("%d.10.in-addr.arpa", 96, 111)},
		{"slash 20", "10.1.16.0/20", counted("%d.1.10.in-addr.arpa", 16, 31)},
		{"three octets", "192.168.1.0/24", []string{"1.168.192.in-addr.arpa"}},
		{"half of a /24 takes over no more than its own", "192.168.1.0/25", counted("%d.1.168.192.in-addr.arpa", 0, 127)},
		{"other half", "192.168.1.128/25", counted("%d.1.168.192.in-addr.arpa", 128, 255)},
		{"one address", "192.0.2.7/32", []string{"7.2.0.192.in-addr.arpa"}},
		{"all of IPv4", "0.0.0.0/0", []string{"in-addr.arpa"}},
		{"half of IPv4", "128.0.0.0/1", counted("%d.in-addr.arpa", 128, 255)},
		{"host bits are ignored", "172.21.0.10/16", []string{"21.172.in-addr.arpa"}},
		{"IPv4-mapped", "::ffff:172.21.0.0/112", []string{"21.172.in-addr.arpa"}},
		{"covered", "10.0.0.0/8 10.96.0.0/12 10.96.0.0/16 11.0.0.0/8", []string{"10.in-addr.arpa", "11.in-addr.arpa"}},
		{"twice", "172.21.0.0/16 172.21.0.0/16", []string{"21.172.in-addr.arpa"}},
		{"IPv6 services", "fd00:10:96::/112", []string{"0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.1.0.0.0.0.d.f.ip6.arpa"}},
		{"IPv6 services, shorter", "fd00:10:96::/108", []string{"0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.1.0.0.0.0.d.f.ip6.arpa"}},
		{"IPv6 odd number of nibbles", "fd00:10:9000::/36", []string{"9.0.1.0.0.0.0.d.f.ip6.arpa"}},
		{"IPv6 inside a nibble", "2001:db8::/30", []string{"8.b.d.0.1.0.0.2.ip6.arpa", "9.b.d.0.1.0.0.2.ip6.arpa", "a.b.d.0.1.0.0.2.ip6.arpa", "b.b.d.0.1.0.0.2.ip6.arpa"}},
		{"all of IPv6", "::/0", []string{"ip6.arpa"}},
		{"both families", "fd00::/8 10.0.0.0/8", []string{"10.in-addr.arpa", "d.f.ip6.arpa"}},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			got, err := ReverseZones(parsePrefixes(t, tc.prefixes)...)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

func parsePrefixes(t *testing.T, s string) []netip.Prefix {
	t.Helper()
	var ps []netip.Prefix
	for f := range strings.FieldsSeq(s) {
		ps = append(ps, netip.MustParsePrefix(f))
	}
	return ps
}

func TestReverseZonesErrors(t *testing.T) {
	tests := []struct {
		name     string
		prefixes []netip.Prefix
		want     string
	}{
		{"zero value", []netip.Prefix{{}}, "not a valid prefix"},
		{"too many", parsePrefixes(t, "10.0.0.0/9 11.0.0.0/9 12.0.0.0/15"), "258 zones needed, at most 256"},
		{"wider than IPv4", parsePrefixes(t, "::ffff:0:0/90"), "wider than all of IPv4"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			zones, err := ReverseZones(tc.prefixes...)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error %v, want one with %q", err, tc.want)
			}
			if zones != nil {
				t.Errorf("zones %v beside an error", zones)
			}
		})
	}
	if z, err := ReverseZones(parsePrefixes(t, "10.0.0.0/9 11.0.0.0/9")...); err != nil || len(z) != 256 {
		t.Errorf("exactly 256 zones: got %d, %v", len(z), err)
	}
}

// ptrName writes the name that a client asks for an address's PTR record, in
// another way than ReverseZones does.
func ptrName(a netip.Addr) string {
	labels, suffix := strings.Split(a.String(), "."), "in-addr.arpa"
	if a.Is6() {
		labels, suffix = strings.Split(strings.ReplaceAll(a.StringExpanded(), ":", ""), ""), "ip6.arpa"
	}
	slices.Reverse(labels)
	return strings.Join(append(labels, suffix), ".")
}

// FuzzReverseZones checks the promise of the doc comment: an address's name is
// below one of the zones if and only if the address is in the prefix.
func FuzzReverseZones(f *testing.F) {
	for _, s := range []string{"172.20.0.0", "192.168.1.200", "fd00:10:96::a", "::ffff:10.0.0.1"} {
		f.Add(netip.MustParseAddr(s).AsSlice(), uint8(13), netip.MustParseAddr(s).AsSlice())
	}
	f.Fuzz(func(t *testing.T, network []byte, bits uint8, probe []byte) {
		n, ok := netip.AddrFromSlice(network)
		if !ok || n.Is4In6() {
			t.Skip("not an address, or one that its IPv4 form covers")
		}
		p, err := n.Prefix(int(bits) % (n.BitLen() + 1))
		if err != nil {
			t.Fatal(err)
		}
		zones, err := ReverseZones(p)
		if err != nil {
			t.Fatal(err) // one prefix never needs more than 128
		}
		probes := []netip.Addr{p.Addr(), p.Addr().Prev(), n, n.Next()}
		if a, ok := netip.AddrFromSlice(probe); ok {
			probes = append(probes, a.Unmap())
		}
		for _, a := range probes {
			if !a.IsValid() {
				continue
			}
			if a.Is4In6() {
				continue // its text has dots
			}
			name, below := ptrName(a), false
			for _, z := range zones {
				below = below || strings.HasSuffix("."+name, "."+z)
			}
			if below != p.Contains(a) {
				t.Errorf("%s of %s: below the zones %v: %t, in the prefix: %t", a, p, zones, below, p.Contains(a))
			}
		}
	})
}
