package plan

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

func TestZonesOf(t *testing.T) {
	found := []cluster.Zone{
		{Name: "k2s.test", Source: "Corefile"}, {Name: "own.test", Source: "Corefile"}, {Name: "21.172.in-addr.arpa", Source: "ServiceCIDR"},
	}
	for name, c := range map[string]struct {
		settings   func(*config.Config)
		discovered []cluster.Zone
		want       []cluster.Zone
	}{
		"nothing is known": {func(*config.Config) {}, nil, []cluster.Zone{{Name: "cluster.local", Source: "default"}}},
		"discovered":       {func(*config.Config) {}, found, found},
		"only addresses are known": {func(*config.Config) {}, found[2:], []cluster.Zone{
			{Name: "cluster.local", Source: "default"}, found[2]}},
		"configured names beside discovered addresses": {func(c *config.Config) { c.Zones = []string{"Mine.Test."} }, found[2:], []cluster.Zone{
			{Name: "mine.test", Source: "settings"}, found[2]}},
		"configured addresses beside discovered names": {func(c *config.Config) {
			c.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.7.0.0/16")}
			c.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.8.0.0/16")}
		}, found[:2], []cluster.Zone{
			found[0], found[1], {Name: "7.10.in-addr.arpa", Source: "settings"}, {Name: "8.10.in-addr.arpa", Source: "settings"}}},
		"the same from both": {func(c *config.Config) { c.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("172.21.0.0/16")} }, found, []cluster.Zone{
			found[0], found[1], {Name: "21.172.in-addr.arpa", Source: "settings"}}},
	} {
		t.Run(name, func(t *testing.T) {
			settings := config.Default()
			c.settings(&settings)
			zones, err := ConfiguredZones(settings)
			if err != nil {
				t.Fatal(err)
			}
			got, notes := zonesOf(zones, c.discovered, nil)
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
		found := []cluster.Zone{{Name: "cluster.local", Source: "Corefile", Cluster: true}, {Name: name, Source: "Corefile"}}
		zones, notes := zonesOf(nil, found, search)
		if taken := len(zones) == 2; taken != (want == "") || taken == (len(notes) > 0) || !strings.Contains(strings.Join(notes, " "), want) {
			t.Errorf("%s: zones %v, notes %q, want one with %q", name, zones, notes, want)
		}
		// Named by the user, or by the plugin for the cluster, it is taken.
		if zones, notes := zonesOf([]cluster.Zone{{Name: name, Source: sourceSettings}}, found, search); len(zones) != 2 || len(notes) > 0 {
			t.Errorf("%s of the settings: zones %v, notes %q", name, zones, notes)
		}
		found[1].Cluster = true
		if zones, notes := zonesOf(nil, found, search); len(zones) != 2 || len(notes) > 0 {
			t.Errorf("%s of the cluster: zones %v, notes %q", name, zones, notes)
		}
	}
	below := []cluster.Zone{{Name: "k2s.example", Source: "Corefile", Cluster: true}, {Name: "a.k2s.example", Source: "Corefile"}}
	if zones, notes := zonesOf(nil, below, []string{"a.k2s.example"}); len(zones) != 2 || len(notes) > 0 {
		t.Errorf("below the cluster's: zones %v, notes %q", zones, notes)
	}
}
