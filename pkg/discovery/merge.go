package discovery

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// maxEndpoints bounds whom a host asks. Each of them is probed by every host.
const maxEndpoints = 256

// merge makes one sorted set out of all slices of a Service: the ready endpoints,
// or, if there is none, those that serve while they terminate or are not ready.
// Of the ready ones, place chooses. Each address family is for itself, since its
// slices change by themselves: while only those of one family name the new Pods of
// a rollout, the other family still has its old ones. Slices of other Services are
// ignored.
func merge(all []*discoveryv1.EndpointSlice, namespace, service string, ports dnsPorts, place placement) []Endpoint {
	if ports.udp == nil {
		return nil
	}
	all = slices.DeleteFunc(slices.Clone(all), func(s *discoveryv1.EndpointSlice) bool {
		return s.Namespace != namespace || s.Labels[discoveryv1.LabelServiceName] != service
	})
	var out []Endpoint
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		ready, serving := ofFamily(all, family, ports)
		if len(ready) > 0 {
			serving = place.choose(ready)
		}
		out = append(out, serving...)
	}
	return cluster.SortEndpoints(out)
}

// ofFamily returns the endpoints of one address family that are ready, and those
// that serve without being ready.
func ofFamily(all []*discoveryv1.EndpointSlice, family discoveryv1.AddressType, ports dnsPorts) (ready []placed, serving []Endpoint) {
	elsewhere := make(map[netip.Addr]uint16) // TCP ports: slices made by hand may tell of one protocol each
	for _, s := range all {
		tcp := numberOf(s.Ports, ports.tcp)
		for i := range s.Endpoints {
			if addr, ok := endpointAddr(family, &s.Endpoints[i]); ok && tcp != 0 {
				elsewhere[addr] = tcp
			}
		}
	}
	for _, s := range all {
		port := numberOf(s.Ports, ports.udp)
		if port == 0 || s.AddressType != family {
			continue
		}
		tcp := numberOf(s.Ports, ports.tcp)
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			addr, ok := endpointAddr(s.AddressType, e)
			if !ok {
				continue
			}
			isReady, isServing := conditions(e)
			ep := Endpoint{
				Address:     netip.AddrPortFrom(addr, port),
				TCPPort:     cmp.Or(tcp, elsewhere[addr]),
				Source:      s.Namespace + "/" + s.Name,
				Node:        deref(e.NodeName),
				Zone:        deref(e.Zone),
				Terminating: deref(e.Conditions.Terminating) && !isReady,
			}
			switch {
			case isReady:
				ready = append(ready, placed{ep, hintedZones(e)})
			case isServing:
				serving = append(serving, ep)
			}
		}
	}
	return ready, serving
}

// conditions reads those of an endpoint: nil means true for Ready, and as Ready for
// Serving.
func conditions(e *discoveryv1.Endpoint) (ready, serving bool) {
	c := e.Conditions
	ready = c.Ready == nil || *c.Ready
	if c.Serving != nil {
		return ready, *c.Serving
	}
	return ready, ready
}

// isEmpty reports whether the slices of a Service say that nobody serves it, in
// either family. Without any slice nothing is said: every Service with a selector
// has one, so its controller has not processed it yet, or is recreating it.
func isEmpty(all []*discoveryv1.EndpointSlice, namespace, service string) bool {
	said := false
	for _, s := range all {
		if s.Namespace != namespace || s.Labels[discoveryv1.LabelServiceName] != service {
			continue
		}
		said = true
		for i := range s.Endpoints {
			if _, serving := conditions(&s.Endpoints[i]); serving {
				return false
			}
		}
	}
	return said
}

// dnsPorts are a Service's ports for DNS, nil for none. The name of a Service's port is what its slices call theirs.
type dnsPorts struct{ udp, tcp *corev1.ServicePort }

// dnsPortsOf chooses as clients do, who know no names: UDP port 53, or else the only one, or else the one called "dns".
// TCP is the port of the same number.
func dnsPortsOf(s *corev1.Service) (ports dnsPorts) {
	var udp []*corev1.ServicePort
	for i := range s.Spec.Ports {
		if p := &s.Spec.Ports[i]; p.Protocol == corev1.ProtocolUDP {
			udp = append(udp, p)
		}
	}
	for _, p := range udp {
		if p.Port == dnsPort || ports.udp == nil && (len(udp) == 1 || p.Name == dnsPortName) {
			ports.udp = p
		}
	}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if ports.udp != nil && p.Port == ports.udp.Port && protocolOf(p.Protocol) == corev1.ProtocolTCP {
			ports.tcp = p
		}
	}
	return ports
}

// protocolOf puts in the API's default.
func protocolOf(p corev1.Protocol) corev1.Protocol { return cmp.Or(p, corev1.ProtocolTCP) }

// numberOf returns the number of a Service's port in a slice, 0 if the slice does not offer it, or offers it without a
// number ("all ports").
func numberOf(ports []discoveryv1.EndpointPort, wanted *corev1.ServicePort) uint16 {
	if wanted == nil {
		return 0
	}
	for _, p := range ports {
		if deref(p.Name) != wanted.Name || protocolOf(deref(p.Protocol)) != protocolOf(wanted.Protocol) {
			continue
		}
		if n := deref(p.Port); n > 0 && n <= 65535 {
			return uint16(n)
		}
	}
	return 0
}

// endpointAddr returns the address to ask. Only an endpoint's first address has a
// meaning in the API. Names, addresses of the wrong family and those that can't
// be an endpoint from here are refused.
func endpointAddr(t discoveryv1.AddressType, e *discoveryv1.Endpoint) (netip.Addr, bool) {
	if len(e.Addresses) == 0 {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(e.Addresses[0])
	if err != nil {
		return netip.Addr{}, false
	}
	a = a.Unmap()
	return a, a.Is4() == (t == discoveryv1.AddressTypeIPv4) && unusable(a) == ""
}

// unusable says why nobody can be asked at an address, whatever host asks; empty if
// somebody can (RFC 6890). A loopback address would be the asker itself, and a
// link-local one is another host's on each link.
func unusable(a netip.Addr) string {
	switch {
	case a.IsLoopback():
		return "a loopback address"
	case a.IsMulticast():
		return "a multicast address"
	case a.IsLinkLocalUnicast() || a.Zone() != "":
		return "a link-local address"
	case a.IsUnspecified() || a.Is4() && (a.As4()[0] == 0 || a.As4()[0] >= 240):
		return "no host's address"
	}
	return ""
}

// maxLeftOut bounds the notes of endpoints that are left out.
const maxLeftOut = 5

// leftOut says which endpoints of a Service are left out for their addresses.
func leftOut(all []*discoveryv1.EndpointSlice, namespace, service string) (notes []string) {
	for _, s := range all {
		if s.Namespace != namespace || s.Labels[discoveryv1.LabelServiceName] != service {
			continue
		}
		for i := range s.Endpoints {
			for _, text := range s.Endpoints[i].Addresses[:min(1, len(s.Endpoints[i].Addresses))] {
				if a, err := netip.ParseAddr(text); err == nil && unusable(a.Unmap()) != "" {
					notes = append(notes, fmt.Sprintf("endpoint %s of %s/%s is left out: it is %s", a.Unmap(), s.Namespace, s.Name, unusable(a.Unmap())))
				}
			}
		}
	}
	slices.Sort(notes)
	if more := len(notes) - maxLeftOut; more > 0 {
		notes = append(notes[:maxLeftOut], fmt.Sprintf("%d more endpoints are left out for their addresses", more))
	}
	return notes
}

// serviceIPs returns the cluster addresses of s in its own order; a headless
// Service ("None") has none.
func serviceIPs(s *corev1.Service) []netip.Addr {
	texts := s.Spec.ClusterIPs
	if len(texts) == 0 {
		texts = []string{s.Spec.ClusterIP}
	}
	var ips []netip.Addr
	for _, t := range texts {
		if ip, err := netip.ParseAddr(t); err == nil && !slices.Contains(ips, ip.Unmap()) {
			ips = append(ips, ip.Unmap())
		}
	}
	return ips
}

// deref returns the zero value for nil.
func deref[T any](p *T) T {
	var zero T
	if p == nil {
		return zero
	}
	return *p
}
