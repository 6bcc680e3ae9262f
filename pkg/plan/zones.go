package plan

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/net/publicsuffix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

// Sources of zones that are not discovered.
const (
	sourceSettings = "settings"
	sourceDefault  = "default"
)

// ConfiguredZones returns the zones in the settings, including the reverse zones of ranges.
func ConfiguredZones(c config.Config) (zones []cluster.Zone, err error) {
	reverse, err := cluster.ReverseZones(slices.Concat(c.ServiceCIDRs, c.PodCIDRs)...)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Concat(c.Zones, reverse) {
		zones = append(zones, cluster.Zone{Name: strings.ToLower(strings.TrimSuffix(name, ".")), Source: sourceSettings})
	}
	return zones, nil
}

// zonesOf merges the configured zones with the discovered ones, names before addresses. Only if there is no name at all it
// uses the default zone. Other zones in a Corefile are left out, with a note, if they would take
// more names from this host than intended: whoever may edit the Corefile has no authority over those.
func zonesOf(configured, discovered []cluster.Zone, search []string) (zones []cluster.Zone, notes []string) {
	names, reverse := []cluster.Zone{}, []cluster.Zone{}
	seen := make(map[string]bool)
	var own []string // the cluster's
	for _, zone := range slices.Concat(configured, discovered) {
		why := ""
		if zone.Source != sourceSettings && !zone.Cluster && !slices.ContainsFunc(own, func(c string) bool { return within(zone.Name, c) }) {
			why = tooWide(zone.Name, search)
		}
		switch {
		case seen[zone.Name]:
		case why != "":
			notes = append(notes, fmt.Sprintf("the zone %s of %s is %s and is left out: to use it, name it with --zone, together with all others", zone.Name, zone.Source, why))
		case zone.Reverse():
			reverse = append(reverse, zone)
		default:
			names = append(names, zone)
		}
		seen[zone.Name] = true
		if zone.Cluster {
			own = append(own, zone.Name)
		}
	}
	if len(names) == 0 {
		names = append(names, cluster.Zone{Name: config.DefaultZone, Source: sourceDefault})
	}
	return append(names, reverse...), notes
}

// tooWide says why a zone does not belong to the cluster alone: anybody can register names in it, or this
// host's own names are in it.
func tooWide(zone string, search []string) string {
	if suffix, _ := publicsuffix.PublicSuffix(zone); suffix == zone {
		return "a public suffix"
	}
	for _, domain := range search {
		if domain = strings.ToLower(strings.TrimSuffix(domain, ".")); within(domain, zone) {
			return "the search domain of this host, or one above it, " + domain
		}
	}
	return ""
}

// within reports whether a name is a zone or below it. Both are lower-case without a final dot.
func within(name, zone string) bool { return name == zone || strings.HasSuffix(name, "."+zone) }

// ZoneNames returns the names of zones.
func ZoneNames(zones []cluster.Zone) []string {
	names := make([]string, 0, len(zones))
	for _, zone := range zones {
		names = append(names, zone.Name)
	}
	return names
}
