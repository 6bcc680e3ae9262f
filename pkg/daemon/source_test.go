//go:build linux

package daemon

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
)

// TestDiscoveryOptions: each setting replaces the source that would tell the same.
func TestDiscoveryOptions(t *testing.T) {
	prefixes := []netip.Prefix{netip.MustParsePrefix("10.7.0.0/16")}
	for name, c := range map[string]struct {
		settings func(*config.Config)
		want     discovery.Options
	}{
		"default":      {func(*config.Config) {}, discovery.Options{}},
		"zones":        {func(c *config.Config) { c.Zones = []string{"a"} }, discovery.Options{NoCorefile: true}},
		"serviceCIDRs": {func(c *config.Config) { c.ServiceCIDRs = prefixes }, discovery.Options{NoServiceCIDRs: true}},
		"podCIDRs":     {func(c *config.Config) { c.PodCIDRs = prefixes }, discovery.Options{NoPodCIDRs: true}},
		"Service":      {func(c *config.Config) { c.DNSService = "dns/coredns" }, discovery.Options{Namespace: "dns", Service: "coredns"}},
		"others": {func(c *config.Config) {
			c.CorefileConfigMap, c.StubZones, c.NodeName, c.EndpointPreference, c.Kubeconfig = "m", true, "n", config.PreferZone, "k"
		}, discovery.Options{ConfigMap: "m", StubZones: true, NodeName: "n", Prefer: discovery.PreferZone, Kubeconfig: "k"}},
	} {
		t.Run(name, func(t *testing.T) {
			settings := config.Default()
			c.settings(&settings)
			got := discoveryOptions(settings, zap.NewNop())
			got.Logger = nil
			if c.want.Prefer == "" {
				c.want.Prefer = discovery.PreferAll
			}
			if d := cmp.Diff(c.want, got, cmp.FilterPath(func(p cmp.Path) bool {
				return p.Last().String() == ".search" || p.Last().String() == ".Env" || p.Last().String() == ".HomeOf"
			}, cmp.Ignore())); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
	for _, p := range []config.EndpointPreference{config.PreferAll, config.PreferNode, config.PreferZone} {
		if q := discovery.Preference(p); q != discovery.PreferAll && q != discovery.PreferNode && q != discovery.PreferZone {
			t.Errorf("discovery does not know the preference %q", p)
		}
	}
}

// fixed is a source that has one snapshot.
type fixed struct {
	discovery.Source
	snapshot cluster.Snapshot
}

func (f fixed) Current() (cluster.Snapshot, bool) { return f.snapshot, true }

func TestDiscoveryReport(t *testing.T) {
	now := time.Now()
	var s attachment
	s.source.Source = fixed{snapshot: cluster.Snapshot{
		Service: "kube-system/kube-dns", Updated: now.Add(-130 * time.Second), Stale: true, Reason: "gone", Notes: []string{"a note"},
	}}
	if got := s.discovery(now); got.AgeSeconds != 130 || !got.Stale || got.Reason != "gone" || got.Service != "kube-system/kube-dns" || len(got.Notes) != 1 {
		t.Errorf("report %+v", got)
	}
	// What the user has named does not get old.
	s.source.Source = discovery.Static([]netip.AddrPort{endpointA})
	if got := s.discovery(now.Add(time.Hour)); got.AgeSeconds != 0 || got.Stale || got.Service != "" {
		t.Errorf("report of named endpoints %+v", got)
	}
}
