//go:build linux

package daemon

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
)

// Sources of zones that are not discovered.
const (
	sourceSettings = "settings"
	sourceDefault  = "default"
)

// discoveryOptions says what is to be discovered: what the settings name is not looked for.
func (d *Daemon) discoveryOptions(c config.Config) discovery.Options {
	options := discovery.Options{
		Kubeconfig:     c.Kubeconfig,
		ConfigMap:      c.CorefileConfigMap,
		StubZones:      c.StubZones,
		NoCorefile:     len(c.Zones) > 0,
		NoServiceCIDRs: len(c.ServiceCIDRs) > 0,
		NoPodCIDRs:     len(c.PodCIDRs) > 0,
		Prefer:         discovery.Preference(c.EndpointPreference),
		NodeName:       c.NodeName,
		Logger:         d.log.Named("discovery"),
	}
	options.Namespace, options.Service, _ = strings.Cut(c.DNSService, "/")
	return options
}

// configuredZones are the zones that the settings name, the reverse zones of ranges among them.
func configuredZones(c config.Config) (zones []discovery.Zone, err error) {
	reverse, err := discovery.ReverseZones(slices.Concat(c.ServiceCIDRs, c.PodCIDRs)...)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Concat(c.Zones, reverse) {
		zones = append(zones, discovery.Zone{Name: strings.ToLower(strings.TrimSuffix(name, ".")), Source: sourceSettings})
	}
	return zones, nil
}

// zonesOf unites the configured zones with the discovered ones, names before addresses. Only if there is no name at all it
// is the default one.
func (r routing) zonesOf(snapshot discovery.Snapshot) []discovery.Zone {
	names, reverse := []discovery.Zone{}, []discovery.Zone{}
	seen := make(map[string]bool)
	for _, zone := range slices.Concat(r.zones, snapshot.Zones) {
		switch {
		case seen[zone.Name]:
		case zone.Reverse():
			reverse = append(reverse, zone)
		default:
			names = append(names, zone)
		}
		seen[zone.Name] = true
	}
	if len(names) == 0 {
		names = append(names, discovery.Zone{Name: config.DefaultZone, Source: sourceDefault})
	}
	return append(names, reverse...)
}

func zoneNames(zones []discovery.Zone) []string {
	names := make([]string, 0, len(zones))
	for _, zone := range zones {
		names = append(names, zone.Name)
	}
	return names
}

// routesTo gives every zone the same endpoints.
func routesTo(zones []discovery.Zone, endpoints []netip.AddrPort) map[string][]netip.AddrPort {
	routes := make(map[string][]netip.AddrPort, len(zones))
	for _, zone := range zones {
		routes[zone.Name] = endpoints
	}
	return routes
}
