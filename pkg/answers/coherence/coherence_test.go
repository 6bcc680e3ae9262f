package coherence

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

const zone = "cluster.local"

func addresses(texts ...string) (all []netip.Addr) {
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}

func clusterIP(texts ...string) *cluster.Service {
	return &cluster.Service{ClusterIPs: addresses(texts...)}
}

func slice(service string, texts ...string) *cluster.Slice {
	s := &cluster.Slice{Service: service}
	for _, address := range addresses(texts...) {
		s.Members = append(s.Members, cluster.Member{Address: address})
	}
	return s
}

func serviceOf(name string, old, now *cluster.Service) cluster.Change {
	return cluster.Change{Kind: cluster.KindService, Namespace: "default", Name: name, Gone: now == nil, Service: cluster.Pair[cluster.Service]{Old: old, New: now}}
}

func sliceOf(name string, old, now *cluster.Slice) cluster.Change {
	return cluster.Change{Kind: cluster.KindSlice, Namespace: "default", Name: name, Gone: now == nil, Slice: cluster.Pair[cluster.Slice]{Old: old, New: now}}
}

func TestAffected(t *testing.T) {
	own := []string{zone, "ns.dns." + zone}
	for name, c := range map[string]struct {
		change cluster.Change
		want   Affected
	}{
		"new Service": {serviceOf("web", nil, clusterIP("172.21.0.7", "fd00::1")), Affected{
			Below: []string{"web.default.svc.cluster.local"},
			Exact: append([]string{"7.0.21.172.in-addr.arpa", "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.d.f.ip6.arpa"}, own...),
		}},
		"other address": {serviceOf("web", clusterIP("172.21.0.7"), clusterIP("172.21.0.8")), Affected{
			Below: []string{"web.default.svc.cluster.local"},
			Exact: append([]string{"7.0.21.172.in-addr.arpa", "8.0.21.172.in-addr.arpa"}, own...),
		}},
		"one endpoint less": {sliceOf("a", slice("web", "10.0.0.1", "10.0.0.2"), slice("web", "10.0.0.1")), Affected{
			Below: []string{"web.default.svc.cluster.local"}, Exact: append([]string{"2.0.0.10.in-addr.arpa"}, own...),
		}},
		"other Service's slice": {sliceOf("a", slice("web", "10.0.0.1"), slice("db", "10.0.0.1")), Affected{
			Below: []string{"db.default.svc.cluster.local", "web.default.svc.cluster.local"}, Exact: append([]string{"1.0.0.10.in-addr.arpa"}, own...),
		}},
		"namespace": {cluster.Change{Kind: cluster.KindNamespace, Name: "x"}, Affected{Below: []string{"x.pod.cluster.local", "x.svc.cluster.local"}}},
		"Corefile":  {cluster.Change{Kind: cluster.KindCorefile}, Affected{All: true}},
		"lost":      {cluster.Change{Kind: cluster.KindLost}, Affected{All: true}},
		"synced":    {cluster.Change{Kind: cluster.KindSynced}, Affected{}},
	} {
		t.Run(name, func(t *testing.T) {
			slices.Sort(c.want.Exact)
			if d := cmp.Diff(c.want, Of(c.change, zone)); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

func TestHas(t *testing.T) {
	a := Affected{Below: []string{"web.default.svc.cluster.local"}, Exact: []string{zone}}
	for name, want := range map[string]bool{
		"web.default.svc.cluster.local": true, "_http._tcp.web.default.svc.cluster.local": true, zone: true,
		"xweb.default.svc.cluster.local": false, "default.svc.cluster.local": false, "svc.cluster.local": false,
	} {
		if got := a.Has(name); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	if !(Affected{All: true}).Has("x") {
		t.Error("all names are affected")
	}
}

func TestFirstAndLastServiceOfANamespace(t *testing.T) {
	s := New(zone)
	const empty = "default.svc.cluster.local"
	for i, c := range []struct {
		change cluster.Change
		want   bool
	}{
		{serviceOf("a", nil, clusterIP("172.21.0.1")), true},
		{serviceOf("b", nil, clusterIP("172.21.0.2")), false},
		{serviceOf("a", clusterIP("172.21.0.1"), nil), false},
		{serviceOf("b", clusterIP("172.21.0.2"), nil), true},
	} {
		if got := s.Apply(c.change).Has(empty); got != c.want {
			t.Errorf("change %d affects %s: %v, want %v", i, empty, got, c.want)
		}
	}
	if len(s.namespaces) != 0 {
		t.Errorf("left behind: %v", s.namespaces)
	}
}

// An alias of an alias has the addresses of what both lead to in its answer.
func TestAliases(t *testing.T) {
	s := New(zone)
	s.Apply(serviceOf("first", nil, &cluster.Service{ExternalName: "Second.default.svc.cluster.local."}))
	s.Apply(serviceOf("second", nil, &cluster.Service{ExternalName: "web.default.svc.cluster.local"}))
	s.Apply(serviceOf("outside", nil, &cluster.Service{ExternalName: "www.example.com"}))
	a := s.Apply(serviceOf("web", nil, clusterIP("172.21.0.7")))
	for name, want := range map[string]bool{"first": true, "second": true, "outside": false} {
		if got := a.Has(name + ".default.svc.cluster.local"); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	s.Apply(serviceOf("second", &cluster.Service{ExternalName: "web.default.svc.cluster.local"}, nil))
	if s.Apply(serviceOf("web", clusterIP("172.21.0.7"), nil)).Has("first.default.svc.cluster.local") {
		t.Error("a chain that is broken is still followed")
	}
}

func TestExpect(t *testing.T) {
	s := New("Cluster.Local.")
	if _, known := s.Expect("web.default.svc.cluster.local.", typeA); known {
		t.Error("knows a name before all has been told")
	}
	for _, c := range []cluster.Change{
		{Kind: cluster.KindNamespace, Name: "default"},
		serviceOf("web", nil, clusterIP("172.21.0.7", "fd00::1")),
		serviceOf("four", nil, clusterIP("172.21.0.8")),
		serviceOf("headless", nil, &cluster.Service{Headless: true}),
		sliceOf("h-1", nil, slice("headless", "10.0.0.2", "10.0.0.1")),
		sliceOf("h-2", nil, slice("headless", "10.0.0.1", "fd00::9")),
		serviceOf("nobody", nil, &cluster.Service{Headless: true}),
		serviceOf("alias", nil, &cluster.Service{ExternalName: "www.example.com"}),
		serviceOf("named", nil, &cluster.Service{Headless: true}),
		sliceOf("n-1", nil, &cluster.Slice{Service: "named", Opaque: true}),
		serviceOf("pending", nil, &cluster.Service{}),
		{Kind: cluster.KindSynced},
	} {
		s.Apply(c)
	}
	for _, c := range []struct {
		name  string
		qtype uint16
		known bool
		want  Expected
	}{
		{"WEB.default.svc.cluster.local.", typeA, true, Expected{Addresses: addresses("172.21.0.7")}},
		{"web.default.svc.cluster.local", typeAAAA, true, Expected{Addresses: addresses("fd00::1")}},
		{"four.default.svc.cluster.local", typeAAAA, true, Expected{}},
		{"headless.default.svc.cluster.local", typeA, true, Expected{Addresses: addresses("10.0.0.1", "10.0.0.2")}},
		{"headless.default.svc.cluster.local", typeAAAA, true, Expected{Addresses: addresses("fd00::9")}},
		{"nobody.default.svc.cluster.local", typeA, true, Expected{NoName: true}},
		{"missing.default.svc.cluster.local", typeA, true, Expected{NoName: true}},
		{"web.other.svc.cluster.local", typeA, true, Expected{NoName: true}},
		{"alias.default.svc.cluster.local", typeA, false, Expected{}},
		{"named.default.svc.cluster.local", typeA, false, Expected{}},
		{"pending.default.svc.cluster.local", typeA, false, Expected{}},
		{"web.default.svc.cluster.local", 16, false, Expected{}},
		{"x.web.default.svc.cluster.local", typeA, false, Expected{}},
		{"default.svc.cluster.local", typeA, false, Expected{}},
		{"www.example.com", typeA, false, Expected{}},
	} {
		got, known := s.Expect(c.name, c.qtype)
		if d := cmp.Diff(c.want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); known != c.known || known && d != "" {
			t.Errorf("%s %d: known %v, want %v; -want +got:\n%s", c.name, c.qtype, known, c.known, d)
		}
	}
	s.Apply(cluster.Change{Kind: cluster.KindLost})
	if _, known := s.Expect("web.default.svc.cluster.local", typeA); known {
		t.Error("knows a name after the watch is lost")
	}
}
