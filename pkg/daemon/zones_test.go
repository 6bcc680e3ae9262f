//go:build linux

package daemon

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
)

func TestZonesOf(t *testing.T) {
	found := []discovery.Zone{
		{Name: "k2s.test", Source: "Corefile"}, {Name: "own.test", Source: "Corefile"}, {Name: "21.172.in-addr.arpa", Source: "ServiceCIDR"},
	}
	for name, c := range map[string]struct {
		settings   func(*config.Config)
		discovered []discovery.Zone
		want       []discovery.Zone
	}{
		"nothing is known": {func(*config.Config) {}, nil, []discovery.Zone{{Name: "cluster.local", Source: "default"}}},
		"discovered":       {func(*config.Config) {}, found, found},
		"only addresses are known": {func(*config.Config) {}, found[2:], []discovery.Zone{
			{Name: "cluster.local", Source: "default"}, found[2]}},
		"configured names beside discovered addresses": {func(c *config.Config) { c.Zones = []string{"Mine.Test."} }, found[2:], []discovery.Zone{
			{Name: "mine.test", Source: "settings"}, found[2]}},
		"configured addresses beside discovered names": {func(c *config.Config) {
			c.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.7.0.0/16")}
			c.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.8.0.0/16")}
		}, found[:2], []discovery.Zone{
			found[0], found[1], {Name: "7.10.in-addr.arpa", Source: "settings"}, {Name: "8.10.in-addr.arpa", Source: "settings"}}},
		"the same from both": {func(c *config.Config) { c.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("172.21.0.0/16")} }, found, []discovery.Zone{
			found[0], found[1], {Name: "21.172.in-addr.arpa", Source: "settings"}}},
	} {
		t.Run(name, func(t *testing.T) {
			settings := config.Default()
			c.settings(&settings)
			zones, err := configuredZones(settings)
			if err != nil {
				t.Fatal(err)
			}
			got, notes := routing{zones: zones}.zonesOf(discovery.Snapshot{Zones: c.discovered}, nil)
			if d := cmp.Diff(c.want, got); d != "" || len(notes) > 0 {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

// TestOthersZones: a Corefile takes no names of everybody, nor this host's own; the cluster's zones and the user's are beyond doubt.
func TestOthersZones(t *testing.T) {
	search := []string{"Eng.Corp.Example.", "svc.cluster.local"}
	for name, want := range map[string]string{
		"com": "a public suffix", "org": "a public suffix", "de": "a public suffix", "co.uk": "a public suffix", "github.io": "a public suffix",
		"xn--p1ai": "a public suffix", "anything.ck": "a public suffix", "lan": "a public suffix",
		"corp.example": "eng.corp.example", "eng.corp.example": "eng.corp.example", "local": "a public suffix",
		"other.corp.example": "", "rp.example": "", "k2s.internal": "", "example.com": "", "20.172.in-addr.arpa": "",
	} {
		found := []discovery.Zone{{Name: "cluster.local", Source: "Corefile", Cluster: true}, {Name: name, Source: "Corefile"}}
		zones, notes := routing{}.zonesOf(discovery.Snapshot{Zones: found}, search)
		if taken := len(zones) == 2; taken != (want == "") || taken == (len(notes) > 0) || !strings.Contains(strings.Join(notes, " "), want) {
			t.Errorf("%s: zones %v, notes %q, want one with %q", name, zones, notes, want)
		}
		// Named by the user, or by the plugin for the cluster, it is taken.
		if zones, notes := (routing{zones: []discovery.Zone{{Name: name, Source: sourceSettings}}}).zonesOf(discovery.Snapshot{Zones: found}, search); len(zones) != 2 || len(notes) > 0 {
			t.Errorf("%s of the settings: zones %v, notes %q", name, zones, notes)
		}
		found[1].Cluster = true
		if zones, notes := (routing{}).zonesOf(discovery.Snapshot{Zones: found}, search); len(zones) != 2 || len(notes) > 0 {
			t.Errorf("%s of the cluster: zones %v, notes %q", name, zones, notes)
		}
	}
	below := []discovery.Zone{{Name: "k2s.example", Source: "Corefile", Cluster: true}, {Name: "a.k2s.example", Source: "Corefile"}}
	if zones, notes := (routing{}).zonesOf(discovery.Snapshot{Zones: below}, []string{"a.k2s.example"}); len(zones) != 2 || len(notes) > 0 {
		t.Errorf("below the cluster's: zones %v, notes %q", zones, notes)
	}
}

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
			got := New(settings, "", zap.NewNop()).discoveryOptions(settings)
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
	snapshot discovery.Snapshot
}

func (f fixed) Current() (discovery.Snapshot, bool) { return f.snapshot, true }

func TestDiscoveryReport(t *testing.T) {
	now := time.Now()
	d := New(config.Default(), "", zap.NewNop())
	d.routing.source = fixed{snapshot: discovery.Snapshot{
		Service: "kube-system/kube-dns", Updated: now.Add(-130 * time.Second), Stale: true, Reason: "gone", Notes: []string{"a note"},
	}}
	if got := d.discoveryReport(now); got.AgeSeconds != 130 || !got.Stale || got.Reason != "gone" || got.Service != "kube-system/kube-dns" || len(got.Notes) != 1 {
		t.Errorf("report %+v", got)
	}
	// What the user has named does not get old.
	d.routing.source = discovery.Static([]netip.AddrPort{endpointA})
	if got := d.discoveryReport(now.Add(time.Hour)); got.AgeSeconds != 0 || got.Stale || got.Service != "" {
		t.Errorf("report of named endpoints %+v", got)
	}
}
