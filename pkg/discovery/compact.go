package discovery

import (
	"net/netip"
	"slices"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// compactService keeps what names and answers depend on, nil if o is no Service.
func compactService(o runtime.Object) *cluster.Service {
	s, ok := o.(*corev1.Service)
	if !ok {
		return nil
	}
	c := &cluster.Service{}
	for _, p := range s.Spec.Ports {
		c.Ports = append(c.Ports, cluster.Port{Name: intern(p.Name), Protocol: intern(string(p.Protocol)), Number: uint16(p.Port)}) //nolint:gosec // validated by the apiserver
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		c.ExternalName = s.Spec.ExternalName
		return c
	}
	ips := s.Spec.ClusterIPs
	if len(ips) == 0 {
		ips = []string{s.Spec.ClusterIP}
	}
	c.Headless = ips[0] == corev1.ClusterIPNone
	for _, ip := range ips {
		if address, err := netip.ParseAddr(ip); err == nil {
			c.ClusterIPs = append(c.ClusterIPs, address.Unmap())
		}
	}
	return c
}

// compactSlice keeps what names and answers depend on, nil if o is no EndpointSlice.
func compactSlice(o runtime.Object) *cluster.Slice {
	s, ok := o.(*discoveryv1.EndpointSlice)
	if !ok {
		return nil
	}
	c := &cluster.Slice{Service: s.Labels[discoveryv1.LabelServiceName]}
	for _, p := range s.Ports {
		var port cluster.Port
		if p.Name != nil {
			port.Name = intern(*p.Name)
		}
		if p.Protocol != nil {
			port.Protocol = intern(string(*p.Protocol))
		}
		if p.Port != nil {
			port.Number = uint16(*p.Port) //nolint:gosec // validated by the apiserver
		}
		c.Ports = append(c.Ports, port)
	}
	c.Members = make([]cluster.Member, 0, len(s.Endpoints))
	for _, e := range s.Endpoints {
		if e.Conditions.Ready != nil && !*e.Conditions.Ready {
			continue
		}
		m := cluster.Member{Zone: unique.Make("")}
		if e.Hostname != nil {
			m.Hostname = *e.Hostname
		}
		if e.TargetRef != nil {
			m.Pod = e.TargetRef.Name
		}
		if e.Zone != nil {
			m.Zone = unique.Make(*e.Zone)
		}
		for _, text := range e.Addresses {
			address, err := netip.ParseAddr(text)
			if m.Address = address.Unmap(); err != nil {
				c.Opaque = true
				continue
			}
			c.Members = append(c.Members, m)
		}
	}
	c.Members = slices.Clip(c.Members)
	return c
}

// compactNamespace is whether o is one: no more is of interest.
func compactNamespace(o runtime.Object) *struct{} {
	if _, ok := o.(*corev1.Namespace); !ok {
		return nil
	}
	return new(struct{})
}

// intern returns a string that is shared by all who need the same at present.
func intern(s string) string { return unique.Make(s).Value() }
