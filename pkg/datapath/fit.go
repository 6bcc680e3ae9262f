//go:build linux

package datapath

// zonesMax bounds the zones: a little less than half of dns_zones, which holds the old and the new ones, and the fallback's,
// while they change.
const zonesMax = 511

// FitZones returns those of the zones that the kernel programs can match, the first before later ones: they are bound in
// number, and in the number of different lengths and label counts. Queries for those left are passed to the stack.
func FitZones(zones []string) (fit, left []string, err error) {
	shapes := make(map[dnsbpfDnsZoneShape]bool)
	for _, zone := range zones {
		key, err := newZoneKey(zone)
		if err != nil {
			return nil, nil, err
		}
		shape := key.shape()
		if len(fit) == zonesMax || !shapes[shape] && len(shapes) == zoneShapesMax {
			left = append(left, zone)
			continue
		}
		shapes[shape] = true
		fit = append(fit, zone)
	}
	return fit, left, nil
}
