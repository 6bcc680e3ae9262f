package discovery

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

func TestJoin(t *testing.T) {
	for name, c := range map[string]struct{ in, want string }{
		"none":               {"", ""},
		"side by side":       {"10.0.0.0/24 10.0.1.0/24", "10.0.0.0/23"},
		"not of one parent":  {"10.0.1.0/24 10.0.2.0/24", "10.0.1.0/24 10.0.2.0/24"},
		"several levels":     {"10.0.3.0/24 10.0.0.0/24 10.0.2.0/24 10.0.1.0/24", "10.0.0.0/22"},
		"of different width": {"10.0.0.0/24 10.0.1.0/25 10.0.1.128/25", "10.0.0.0/23"},
		"twice":              {"10.0.0.0/24 10.0.0.0/24", "10.0.0.0/24"},
		"covered":            {"10.0.0.0/16 10.0.7.0/24", "10.0.0.0/16"},
		"both families":      {"10.0.0.0/24 fd00::/64 fd00:0:0:1::/64 10.0.1.0/24", "10.0.0.0/23 fd00::/63"},
		"everything":         {"0.0.0.0/1 128.0.0.0/1", "0.0.0.0/0"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := strings.Trim(fmt.Sprint(join(parsedPrefixes(strings.Fields(c.in)))), "[]"); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

// nodes makes nodes with the given podCIDRs, each of which is a list.
func nodes(podCIDRs ...string) (all []*corev1.Node) {
	for i, cidrs := range podCIDRs {
		all = append(all, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i)},
			Spec:       corev1.NodeSpec{PodCIDRs: strings.Fields(cidrs)},
		})
	}
	return all
}

func names(zones []Zone) (out []string) {
	for _, z := range zones {
		out = append(out, z.Name)
	}
	return out
}

// TestPodCIDRsOfThousands: the ranges of 5,000 nodes become some zones, and those
// that are in their gaps are never among them.
func TestPodCIDRsOfThousands(t *testing.T) {
	var cidrs []string
	first := netip.MustParseAddr("10.100.0.0").As4()
	for i := range 5000 {
		cidrs = append(cidrs, fmt.Sprintf("%d.%d.%d.0/24", first[0], int(first[1])+i/256, i%256))
	}
	var s zoneSet
	s.addPodCIDRs(nodes(cidrs...))
	// 19 whole /16 and 136 of the last one.
	if len(s.zones) != 19+136 || len(s.notes) > 0 {
		t.Errorf("%d zones, want %d; notes %v", len(s.zones), 19+136, s.notes)
	}
	if d := cmp.Diff([]string{"100.10.in-addr.arpa", "101.10.in-addr.arpa"}, names(s.zones)[:2]); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}

	// Every second one is missing: they can't be joined, and are more than may be.
	var gaps []string
	for i := 0; i < 1000; i += 2 {
		gaps = append(gaps, fmt.Sprintf("10.%d.%d.0/24", i/256, i%256))
	}
	s = zoneSet{}
	s.addPodCIDRs(nodes(append(gaps, "10.200.0.0/16")...))
	if len(s.zones) != cluster.MaxReverseZones || len(s.notes) != 1 || !strings.Contains(s.notes[0], "245 of 501 ranges") {
		t.Errorf("%d zones, notes %v", len(s.zones), s.notes)
	}
	if z := names(s.zones); z[len(z)-1] != "200.10.in-addr.arpa" {
		t.Errorf("the widest range was left out: %v", z)
	}
	for _, z := range s.zones {
		if z.Name == "1.0.10.in-addr.arpa" || z.Name == "10.in-addr.arpa" {
			t.Errorf("zone %s holds addresses of nobody", z.Name)
		}
	}
}

func TestPodCIDRs(t *testing.T) {
	var s zoneSet
	s.addPodCIDRs(nodes("172.20.0.0/24 fd00:20::/64", "172.20.1.0/24", "", "bad"))
	want := []Zone{
		{Name: "0.20.172.in-addr.arpa", Source: "podCIDRs of nodes", Cluster: false}, {Name: "1.20.172.in-addr.arpa", Source: "podCIDRs of nodes", Cluster: false},
		{Name: "0.0.0.0.0.0.0.0.0.2.0.0.0.0.d.f.ip6.arpa", Source: "podCIDRs of nodes", Cluster: false},
	}
	if d := cmp.Diff(want, s.zones); d != "" || len(s.notes) > 0 {
		t.Errorf("notes %v, zones -want +got:\n%s", s.notes, d)
	}
	s = zoneSet{}
	s.addPodCIDRs(nodes("", ""))
	if len(s.notes) != 1 || !strings.Contains(s.notes[0], "--pod-cidr") {
		t.Errorf("notes %v", s.notes)
	}
	s = zoneSet{}
	s.addPodCIDRs(nil)
	s.addPodCIDRs(nodes("0.0.0.0/0"))
	if len(s.notes)+len(s.zones) > 0 {
		t.Errorf("zones %v, notes %v", s.zones, s.notes)
	}
}

func TestPlacement(t *testing.T) {
	on := func(address, node, zone string, hints ...string) placed {
		return placed{Endpoint{Address: netip.MustParseAddrPort(address), Node: node, Zone: zone}, hints}
	}
	hinted := []placed{on("10.0.0.1:53", "n1", "a", "a"), on("10.0.0.2:53", "n2", "b", "b", "c"), on("10.0.0.3:53", "n3", "b", "a")}
	half := []placed{on("10.0.0.1:53", "n1", "a", "a"), on("10.0.0.2:53", "n2", "b"), on("10.0.0.3:53", "n3", "b", "a")}
	for name, c := range map[string]struct {
		place placement
		all   []placed
		want  string // last octets
	}{
		"all":                      {placement{PreferAll, "n1", "a"}, hinted, "123"},
		"zero value":               {placement{}, hinted, "123"},
		"this node":                {placement{PreferNode, "n2", ""}, hinted, "2"},
		"none on this node":        {placement{PreferNode, "n9", ""}, hinted, "123"},
		"hinted for this zone":     {placement{PreferZone, "n1", "a"}, hinted, "13"},
		"hinted for a third zone":  {placement{PreferZone, "n1", "c"}, hinted, "2"},
		"not hinted for this zone": {placement{PreferZone, "n1", "d"}, hinted, "123"},
		"not all hinted":           {placement{PreferZone, "n1", "b"}, half, "23"},
		"none in this zone":        {placement{PreferZone, "n1", "c"}, half, "123"},
		"zone not known":           {placement{PreferZone, "n1", ""}, hinted, "123"},
	} {
		t.Run(name, func(t *testing.T) {
			got := ""
			for _, e := range c.place.choose(c.all) {
				a := e.Address.Addr().As4()
				got += fmt.Sprint(a[3])
			}
			if got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}
