package discovery

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// merge makes one sorted set out of all slices of a Service: the ready endpoints,
// or, if there is none, those that serve while they terminate or are not ready.
// Of the ready ones, place chooses. Each address family is for itself, since its
// slices change by themselves: while only those of one family name the new Pods of
// a rollout, the other family still has its old ones. Slices of other Services are
// ignored.
func merge(all []*discoveryv1.EndpointSlice, namespace, service, portName string, place placement) []Endpoint {
	var out []Endpoint
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		ready, serving := ofFamily(all, family, namespace, service, portName)
		if len(ready) > 0 {
			serving = place.choose(ready)
		}
		out = append(out, serving...)
	}
	return sortEndpoints(out)
}

// ofFamily returns the endpoints of one address family that are ready, and those
// that serve without being ready.
func ofFamily(all []*discoveryv1.EndpointSlice, family discoveryv1.AddressType, namespace, service, portName string) (ready []placed, serving []Endpoint) {
	for _, s := range all {
		if s.AddressType != family || s.Namespace != namespace || s.Labels[discoveryv1.LabelServiceName] != service {
			continue
		}
		port, ok := dnsPort(s.Ports, portName)
		if !ok {
			continue
		}
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			addr, ok := endpointAddr(s.AddressType, e.Addresses)
			if !ok {
				continue
			}
			// nil means true for both (and Serving follows Ready), false for Terminating.
			c := e.Conditions
			isReady := c.Ready == nil || *c.Ready
			isServing := isReady
			if c.Serving != nil {
				isServing = *c.Serving
			}
			ep := Endpoint{
				Address:     netip.AddrPortFrom(addr, port),
				Source:      s.Namespace + "/" + s.Name,
				Node:        deref(e.NodeName),
				Zone:        deref(e.Zone),
				Terminating: deref(c.Terminating) && !isReady,
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

// dnsPort returns the number of the port called name, which must be UDP. A slice
// without it, or with one that has no number ("all ports"), offers no DNS.
func dnsPort(ports []discoveryv1.EndpointPort, name string) (uint16, bool) {
	for _, p := range ports {
		// The API's default for a missing protocol is TCP.
		if deref(p.Name) != name || p.Protocol == nil || *p.Protocol != corev1.ProtocolUDP {
			continue
		}
		if n := deref(p.Port); n > 0 && n <= 65535 {
			return uint16(n), true
		}
	}
	return 0, false
}

// endpointAddr returns the address to ask. Only an endpoint's first address has a
// meaning in the API. Names, addresses of the wrong family and those that can't
// be an endpoint from here are refused; a loopback address would be ourselves.
func endpointAddr(t discoveryv1.AddressType, addresses []string) (netip.Addr, bool) {
	if len(addresses) == 0 {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(addresses[0])
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
