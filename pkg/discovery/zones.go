package discovery

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// maxZones bounds the zones of all sources together: those of a Corefile, and a thousand reverse zones beside.
const maxZones = 2 * maxCorefileZones

// zoneSet collects zones and remarks about them. The first one who
// names a zone is its source.
type zoneSet struct {
	zones    []Zone
	seen     map[string]struct{}
	notes    []string
	problems []string
}

func (s *zoneSet) add(source string, names ...string) { s.append(source, false, names) }

// addCluster adds zones of the cluster itself.
func (s *zoneSet) addCluster(source string, names ...string) { s.append(source, true, names) }

func (s *zoneSet) append(source string, cluster bool, names []string) {
	if s.seen == nil {
		s.seen = make(map[string]struct{})
	}
	for _, name := range names {
		if _, ok := s.seen[name]; !ok && len(s.zones) < maxZones {
			s.seen[name] = struct{}{}
			s.zones = append(s.zones, Zone{Name: name, Source: source, Cluster: cluster})
		}
	}
}

func (s *zoneSet) problem(format string, arguments ...any) {
	s.problems = append(s.problems, fmt.Sprintf(format, arguments...))
}

func (s *zoneSet) note(format string, arguments ...any) {
	s.notes = append(s.notes, fmt.Sprintf(format, arguments...))
}

// namesFirst puts the reverse zones behind the others.
func (s *zoneSet) namesFirst() {
	slices.SortStableFunc(s.zones, func(a, b Zone) int {
		switch {
		case a.Reverse() == b.Reverse():
			return 0
		case b.Reverse():
			return -1
		}
		return 1
	})
}

// addServiceCIDRs adds the reverse zones of the ranges that Services get their
// addresses from.
func (s *zoneSet) addServiceCIDRs(all []*networkingv1.ServiceCIDR) {
	slices.SortFunc(all, func(a, b *networkingv1.ServiceCIDR) int { return cmp.Compare(a.Name, b.Name) })
	for _, c := range all {
		s.addReverse("ServiceCIDR "+c.Name, "--service-cidr", parsedPrefixes(c.Spec.CIDRs))
	}
}

// addPodCIDRs adds the reverse zones of the ranges that the nodes give to their
// pods. Thousands of nodes have ranges that lie side by side: they are joined.
func (s *zoneSet) addPodCIDRs(nodes []*corev1.Node) {
	var prefixes []netip.Prefix
	for _, n := range nodes {
		prefixes = append(prefixes, parsedPrefixes(n.Spec.PodCIDRs)...)
	}
	if len(prefixes) == 0 && len(nodes) > 0 {
		s.note("the nodes have no podCIDRs: the reverse zones of pods are not known; name their range with --pod-cidr")
	}
	s.addReverse("podCIDRs of nodes", "--pod-cidr", join(prefixes))
}

// addReverse adds the reverse zones of prefixes, the wide ones first, as many as
// may be.
func (s *zoneSet) addReverse(source, flag string, prefixes []netip.Prefix) {
	fit, left := cluster.Fitting(prefixes)
	if left > 0 {
		s.note("%s: %d of %d ranges need more than %d reverse zones and are left out; name the whole range with %s",
			source, left, len(prefixes), cluster.MaxReverseZones, flag)
	}
	names, err := cluster.ReverseZones(fit...)
	if err != nil {
		s.note("%s: %v", source, err)
	}
	s.add(source, slices.DeleteFunc(names, tooWide)...)
}

// join makes the shortest list of prefixes that covers the same addresses.
func join(prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range cluster.WithoutCovered(slices.Clone(prefixes)) {
		out = append(out, p)
		for len(out) > 1 {
			a, b := out[len(out)-2], out[len(out)-1]
			if a.Bits() != b.Bits() || a.Bits() == 0 || a.Addr().BitLen() != b.Addr().BitLen() {
				break
			}
			parent := netip.PrefixFrom(a.Addr(), a.Bits()-1).Masked()
			if !parent.Contains(b.Addr()) {
				break
			}
			out = append(out[:len(out)-2], parent)
		}
	}
	return out
}

// parsedPrefixes reads what the apiserver has checked already.
func parsedPrefixes(texts []string) []netip.Prefix {
	var out []netip.Prefix
	for _, t := range texts {
		if p, err := netip.ParsePrefix(strings.TrimSpace(t)); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}
