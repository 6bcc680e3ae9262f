package discovery

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// Preference says which of the ready endpoints are asked.
type Preference string

// The preferences.
const (
	PreferAll  Preference = "all"  // every endpoint
	PreferNode Preference = "node" // those on this node, if there is one
	PreferZone Preference = "zone" // those for this node's topology zone, if there is one
)

// placement is where this host is, and what follows for the choice of endpoints.
type placement struct {
	prefer Preference
	node   string // this node's name
	zone   string // its topology zone, empty if unknown
}

// placed is an endpoint and the zones that its topology hints give it to.
type placed struct {
	Endpoint
	zones []string
}

func hintedZones(e *discoveryv1.Endpoint) (zones []string) {
	if e.Hints == nil {
		return nil
	}
	for _, z := range e.Hints.ForZones {
		zones = append(zones, z.Name)
	}
	return zones
}

// choose returns the endpoints that are preferred, or all if none is: an endpoint
// far away is better than no answer.
func (p placement) choose(all []placed) []Endpoint {
	preferred := func(placed) bool { return true }
	switch {
	case p.prefer == PreferNode:
		preferred = func(c placed) bool { return c.Node == p.node }
	case p.prefer != PreferZone || p.zone == "":
	case slices.ContainsFunc(all, func(c placed) bool { return len(c.zones) == 0 }):
		// As kube-proxy does: hints count only if every endpoint has some. Without
		// them it is the endpoints' own zone.
		preferred = func(c placed) bool { return c.Zone == p.zone }
	default:
		preferred = func(c placed) bool { return slices.Contains(c.zones, p.zone) }
	}
	if !slices.ContainsFunc(all, preferred) {
		preferred = func(placed) bool { return true }
	}
	var out []Endpoint
	for _, c := range all {
		if preferred(c) {
			out = append(out, c.Endpoint)
		}
	}
	return out
}

// zoneOfNode returns the topology zone of the node called name, empty if it is not
// known.
func zoneOfNode(nodes []*corev1.Node, name string) string {
	for _, n := range nodes {
		if n.Name == name {
			return n.Labels[corev1.LabelTopologyZone]
		}
	}
	return ""
}
