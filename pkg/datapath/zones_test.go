//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/sample"
)

func TestZoneKeyErrors(t *testing.T) {
	long := strings.Repeat("x", 63)
	for _, zone := range []string{
		"..", ".local", "a..b", "a.b..", long + "x", long + "x.local", "sp ace", "tab\t", "nul\x00", "del\x7f", "caf\u00e9",
		`a\.b`, `a\046b`, strings.Join([]string{long, long, long, long}, "."),
		strings.Repeat("a.", 127) + "a",
	} {
		if _, err := newZoneKey(zone); !errors.Is(err, ErrBadZone) {
			t.Errorf("newZoneKey(%q) returned %v, want ErrBadZone", zone, err)
		} else if !strings.Contains(err.Error(), fmt.Sprintf("%q", zone)) {
			t.Errorf("error does not name the zone: %v", err)
		}
	}
}

func TestZoneKeys(t *testing.T) {
	for zone, want := range map[string]string{
		"cluster.local": ".cluster.local\x00", "cluster.local.": ".cluster.local\x00", "CLUSTER.Local": ".cluster.local\x00",
		".": "\x00", "": "\x00", "a": ".a\x00", "_x.a-b": "._x.a-b\x00",
	} {
		key, err := newZoneKey(zone)
		if err != nil {
			t.Errorf("newZoneKey(%q): %v", zone, err)
			continue
		}
		octets := make([]byte, len(key.dotted))
		for i, octet := range key.dotted {
			octets[i] = byte(octet)
		}
		if got := string(octets[:key.length]); got != want {
			t.Errorf("newZoneKey(%q) = %q, want %q", zone, got, want)
		}
		if strings.Trim(string(octets[key.length:]), "\x00") != "" {
			t.Errorf("newZoneKey(%q) is not padded with NUL", zone)
		}
	}
}

// The kernel finds a zone by the hash that Go computed: one name for each length there is, and for each length modulo
// the hash's word.
func TestZoneOfEachLength(t *testing.T) {
	h := newHarness(t)
	count := 0
	for length := 1; length <= 253; length++ {
		var zone strings.Builder
		for left := length; left > 0; {
			label := min(left, 63)
			if left == 64 {
				label = 62 // else a dot and no label would be left
			}
			zone.WriteString(strings.Repeat(string(rune('a'+label%26)), label))
			if left -= label + 1; left > 0 {
				zone.WriteByte('.')
			}
		}
		h.replaceZones(t, []string{zone.String()}, defaultBackends()...)
		f := families[length%2]
		h.forget(t, h.steer(t, FromHost, f, f.query(query(t, strings.ToUpper(zone.String())))))
		if length <= 251 {
			h.forget(t, h.steer(t, FromHost, f, f.query(query(t, "x."+zone.String()))))
			h.expect(t, FromHost, f.query(query(t, "0"+zone.String()[1:])), "passed_external")
		}
		count++
	}
	t.Logf("%d zones", count)
}

func TestSeveralZones(t *testing.T) {
	longest := strings.Repeat("z.", 126) + "z"
	h := newHarness(t, testZone, "cluster.other", "kluster.local", "a", "internal", "k2s.cluster.test",
		"21.172.in-addr.arpa", "0.0.0.0.0.2.0.0.0.0.d.f.ip6.arpa", longest)
	testQueries(t, h, slices.Concat(
		names(t, "steered", "x.cluster.local", "x.cluster.other", "x.kluster.local", "a", "b.a", "A", "www.internal",
			"k2s.cluster.test", "10.0.21.172.in-addr.arpa", "21.172.IN-ADDR.ARPA", longest,
			"1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.2.0.0.0.0.d.f.ip6.arpa"),
		names(t, "passed_external", "b", "aa", "x.aa", "cluster.test", "test", "172.in-addr.arpa", "22.172.in-addr.arpa",
			"121.172.in-addr.arpa", "arpa", "d.f.ip6.arpa", "1.0.0.0.2.0.0.0.0.d.f.ip6.arpa", "cluster.internal.x",
			longest[2:], "y"+longest[1:]),
	))
}

// An escape in a zone's name does not exist, so a zone never holds what a label with a dot becomes.
func TestRootZone(t *testing.T) {
	h := newHarness(t, ".")
	testQueries(t, h, names(t, "steered", ".", "example.com", "cluster.local", "a"))
}

// Of nested zones the longest decides. The maps are written by hand, since ReplaceZones gives all zones one group.
func TestNestedZones(t *testing.T) {
	zones := []string{"local", "cluster.local", "svc.cluster.local", "default.svc.cluster.local"}
	for range 2 {
		h := newHarness(t, zones...)
		endpoints := make(map[string]netip.AddrPort)
		for i, zone := range zones {
			group := uint32(100 + i)
			endpoints[zone] = netip.MustParseAddrPort(fmt.Sprintf("172.20.1.%d:53", i))
			if _, err := h.writeGroup(group, []Backend{{Address: endpoints[zone], NATAddress: nat4, Ifindex: loIfindex}}); err != nil {
				t.Fatal(err)
			}
			key, err := newZoneKey(zone)
			if err != nil {
				t.Fatal(err)
			}
			value := dnsbpfDnsZone{Group: group, Backends4: 1, Length: key.length, Name: key.dotted}
			if err := h.objects.DnsZones.Put(key.hash(), value); err != nil {
				t.Fatal(err)
			}
		}
		for name, zone := range map[string]string{
			"local": "local", "other.local": "local", "xcluster.local": "local", "cluster.local": "cluster.local",
			"x.cluster.local": "cluster.local", "xsvc.cluster.local": "cluster.local", "svc.cluster.local": "svc.cluster.local",
			"default.svc.cluster.local": "default.svc.cluster.local", "a.b.default.svc.cluster.local": "default.svc.cluster.local",
			"default.other.svc.cluster.local": "svc.cluster.local",
		} {
			f := families[0]
			f.backend = endpoints[zone]
			h.forget(t, h.steer(t, FromHost, f, f.query(query(t, name))))
		}
		slices.Reverse(zones) // the order in which they are given says nothing
	}
}

// A zone's name is compared, its hash is not trusted: put a zone where another's hash points.
func TestZoneHashCollision(t *testing.T) {
	h := newHarness(t)
	key, err := newZoneKey(testZone)
	if err != nil {
		t.Fatal(err)
	}
	for _, other := range []string{"cluster.lokal", "klaster.local", "cluster.loca", "cluster.localx"} {
		wrong, err := newZoneKey(other)
		if err != nil {
			t.Fatal(err)
		}
		value := dnsbpfDnsZone{Group: h.group, Backends4: 1, Backends6: 1, Length: wrong.length, Name: wrong.dotted}
		if err := h.objects.DnsZones.Put(key.hash(), value); err != nil {
			t.Fatal(err)
		}
		h.expect(t, FromHost, families[0].query(query(t, inZone)), "passed_external")
	}
}

// Each octet that a zone may have, against each that a name may have: only letters have another case.
func TestEachOctet(t *testing.T) {
	h := newHarness(t)
	f := families[0]
	counts := make(map[bool]int)
	for own := byte(0x21); own <= 0x7e; own++ {
		if own == '.' || own == '\\' {
			continue
		}
		h.replaceZones(t, []string{"a" + string(rune(own)) + "b.test"}, defaultBackends()...)
		for octet := range 256 {
			asked := string([]byte{'a', byte(octet), 'b'})
			steered, counted := h.steered(t, FromHost, f.query(rawQuery(labels(asked, "test"))))
			if want := naiveInZone([]string{asked}, []string{"a" + string(rune(own)) + "b"}); steered != want || !counted {
				t.Errorf("zone octet %#x, name octet %#x: steered %v, want %v", own, octet, steered, want)
			}
			counts[steered]++
		}
	}
	t.Logf("steered: %v", counts)
}

func TestTooManyZoneLengths(t *testing.T) {
	h := newHarness(t)
	var zones []string
	for length := range zoneShapesMax {
		zones = append(zones, strings.Repeat("x", length+1))
	}
	h.replaceZones(t, zones, defaultBackends()...)
	f := families[0]
	for _, zone := range zones {
		h.forget(t, h.steer(t, FromHost, f, f.query(query(t, "a."+zone))))
	}
	// One more length is refused as a whole, and what was there goes on.
	err := h.ReplaceZones(append(zones, strings.Repeat("y", zoneShapesMax+1)), defaultBackends(), nil, nil)
	if !errors.Is(err, ErrBadZone) {
		t.Errorf("ReplaceZones returned %v, want ErrBadZone", err)
	}
	h.forget(t, h.steer(t, FromHost, f, f.query(query(t, "a."+zones[0]))))
}

func (h *harness) backendGroups(tb testing.TB) map[uint32]int {
	tb.Helper()
	groups := make(map[uint32]int)
	var key dnsbpfDnsBackendKey
	var value dnsbpfDnsBackend
	entries := h.objects.DnsBackends.Iterate()
	for entries.Next(&key, &value) {
		groups[key.Group]++
	}
	if err := entries.Err(); err != nil {
		tb.Fatal(err)
	}
	return groups
}

// Each replacement is a new generation, of which alone is something left.
func TestReplaceZonesGenerations(t *testing.T) {
	h := newHarness(t)
	f := families[0]
	for round := range 20 {
		before := h.group
		zone := fmt.Sprintf("round%d.test", round)
		f.backend = netip.AddrPortFrom(netip.AddrFrom4([4]byte{172, 20, 2, byte(round)}), 53)
		h.replaceZones(t, []string{zone, testZone}, Backend{Address: f.backend, NATAddress: nat4, Ifindex: loIfindex})
		if h.group != before+2 {
			t.Errorf("generation %d follows %d", h.group, before)
		}
		if groups := h.backendGroups(t); len(groups) != 1 || groups[h.group-1] != 1 {
			t.Errorf("groups %v, want one endpoint in %d", groups, h.group-1)
		}
		h.forget(t, h.steer(t, FromHost, f, f.query(query(t, zone))))
		h.forget(t, h.steer(t, FromHost, f, f.query(query(t, testZone))))
		if round > 0 {
			h.expect(t, FromHost, f.query(query(t, fmt.Sprintf("round%d.test", round-1))), "passed_external")
		}
	}
	if newest, err := newestGroup(h.objects.DnsBackends); err != nil || newest != h.group-1 {
		t.Errorf("newestGroup returned %d, %v; want %d", newest, err, h.group-1)
	}
}

// A replacement that fails leaves the old state, whole.
func TestReplaceZonesFailure(t *testing.T) {
	h := newHarness(t)
	tooMany := make([]Backend, 0, 4200) // dns_backends has room for 4096
	for i := range cap(tooMany) {
		address := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		tooMany = append(tooMany, Backend{Address: netip.AddrPortFrom(address, 53), NATAddress: nat4, Ifindex: loIfindex})
	}
	group := h.group - 1
	for name, replace := range map[string]func() error{
		"bad zone": func() error { return h.ReplaceZones([]string{"good.test", "b..d"}, defaultBackends(), nil, nil) },
		"other family": func() error {
			return h.ReplaceZones([]string{"good.test"}, append(defaultBackends(), Backend{Address: backend4, NATAddress: nat6}), nil, nil)
		},
		"too many endpoints": func() error { return h.ReplaceZones([]string{"good.test"}, tooMany, nil, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			if err := replace(); err == nil {
				t.Fatal("no error")
			}
			if groups := h.backendGroups(t); len(groups) != 1 || groups[group] != 2 {
				t.Errorf("groups %v, want the two endpoints of %d", groups, group)
			}
			for _, f := range families {
				h.forget(t, h.steer(t, FromHost, f, f.query(query(t, inZone))))
				h.expect(t, FromHost, f.query(query(t, "good.test")), "passed_external")
			}
		})
	}
	h.replaceZones(t, []string{testZone}, defaultBackends()...)
}

func TestNoBackend(t *testing.T) {
	h := newHarness(t)
	all := defaultBackends()
	for _, c := range []struct {
		backends []Backend
		reasons  [2]string
	}{
		{nil, [2]string{"passed_no_backend", "passed_no_backend"}},
		{all[:1], [2]string{"steered", "passed_no_backend"}},
		{all[1:], [2]string{"passed_no_backend", "steered"}},
		{all, [2]string{"steered", "steered"}},
	} {
		h.replaceZones(t, []string{testZone}, c.backends...)
		for i, f := range families {
			for _, program := range queryPrograms {
				if c.reasons[i] == "steered" {
					h.forget(t, h.steer(t, program, f, f.query(query(t, inZone))))
					continue
				}
				h.expect(t, program, f.query(query(t, inZone)), c.reasons[i])
			}
		}
	}
	h.wantInFlight(t, 0)
}

// Endpoints are drawn evenly. The bound is passed by a fair draw all but once in three million runs.
func TestEvenChoice(t *testing.T) {
	const runs, bound = 20000, 30
	h := newHarness(t)
	for _, f := range families {
		counts := make(map[netip.Addr]int)
		var backends []Backend
		address := f.backend.Addr()
		for range 3 {
			backends = append(backends, Backend{Address: netip.AddrPortFrom(address, 53), NATAddress: f.nat, Ifindex: loIfindex})
			counts[address] = 0
			address = address.Next()
		}
		h.replaceZones(t, []string{testZone}, backends...)
		message := query(t, inZone)
		for id := range runs {
			_, out := h.run(t, FromHost, f.query(put(message, 0, byte(id>>8), byte(id))), nil)
			datagram, err := pktgen.Parse(out)
			if err != nil {
				t.Fatal(err)
			}
			counts[datagram.Destination.Addr()]++
			h.free(t, datagram.Source.Port())
		}
		if len(counts) != len(backends) {
			t.Errorf("%s: sent to %v", f.name, counts)
		}
		expected := float64(runs) / float64(len(backends))
		chiSquare := 0.0
		for _, count := range counts {
			chiSquare += (float64(count) - expected) * (float64(count) - expected) / expected
		}
		t.Logf("%s: %v, chi-square %.2f", f.name, counts, chiSquare)
		if chiSquare > bound {
			t.Errorf("%s: chi-square %.2f of %v is above %d", f.name, chiSquare, counts, bound)
		}
		if delta := h.countedSince(t); delta["kubeswitch:steered"] != runs {
			t.Errorf("counted %v, want %d steered", delta, runs)
		}
	}
}

// Random names against random zones, compared with a matcher that goes label by label.
func TestRandomSuffixes(t *testing.T) {
	const rounds, perRound = 50, 400
	random := sample.Random(t)
	h := newHarness(t)
	// A few labels that are easily mistaken for each other, so that near misses are common.
	alphabet := []string{"a", "b", "aa", "ab", "ba", "cluster", "local", "xcluster", "clusterx", "svc"}
	inside := append(slices.Clone(alphabet), "cluster.local", "a.b", ".a", "a.", "\x01a", "a\x00", "a\xae", "\x07cluster\x05local")
	draw := func(from []string, most int) []string {
		drawn := make([]string, 1+random.IntN(most))
		for i := range drawn {
			drawn[i] = from[random.IntN(len(from))]
		}
		return drawn
	}
	counts := make(map[string]int)
	for range rounds {
		var zones [][]string
		var texts []string
		for range 1 + random.IntN(6) {
			zone := draw(alphabet, 3)
			zones = append(zones, zone)
			texts = append(texts, strings.Join(zone, "."))
		}
		h.replaceZones(t, texts, defaultBackends()...)
		for range perRound {
			name := draw(inside, 5)
			if random.IntN(2) == 0 {
				name = append(name, zones[random.IntN(len(zones))]...)
			}
			want := "passed_external"
			if slices.ContainsFunc(zones, func(zone []string) bool { return naiveInZone(name, zone) }) {
				want = "steered"
			}
			for i := range name {
				if random.IntN(2) == 0 {
					name[i] = strings.ToUpper(name[i])
				}
			}
			counts[want]++
			f := families[random.IntN(2)]
			frame := f.query(rawQuery(labels(name...)))
			if want != "steered" {
				h.expect(t, FromHost, frame, want)
				continue
			}
			h.forget(t, h.steer(t, FromHost, f, frame))
		}
	}
	t.Logf("%d names: %v", rounds*perRound, counts)
}
