package discovery

import (
	"cmp"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
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
	return sortEndpoints(out)
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
// has one, so its controller has not come to it yet, or makes it anew.
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
// be an endpoint from here are refused; a loopback address would be ourselves.
func endpointAddr(t discoveryv1.AddressType, e *discoveryv1.Endpoint) (netip.Addr, bool) {
	if len(e.Addresses) == 0 {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(e.Addresses[0])
	if err != nil {
		return netip.Addr{}, false
	}
	a = a.Unmap()
	if a.Is4() != (t == discoveryv1.AddressTypeIPv4) || a.Zone() != "" {
		return a, false
	}
	return a, !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback()
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
