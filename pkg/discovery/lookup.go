package discovery

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Service is one Service and everything behind it, as the apiserver has it now.
type Service struct {
	Namespace, Name string
	// ExternalName is the name that the Service is an alias of, empty for one
	// that has endpoints.
	ExternalName string
	// IPs are its cluster addresses; a headless Service has none.
	IPs       []netip.Addr
	Ports     []ServicePort
	Endpoints []ServiceEndpoint
	// LocalOnly is internalTrafficPolicy: Local, Sticky is sessionAffinity:
	// ClientIP. Selectorless: its EndpointSlices are made by hand.
	LocalOnly, Sticky, Selectorless bool
}

// ServicePort is one port of a Service. Its name is what an endpoint's port is
// found by; it may be empty if there is only one.
type ServicePort struct {
	Name     string
	Protocol string // TCP, UDP or SCTP
	Port     uint16
}

// ServiceEndpoint is one address behind a Service. Its conditions are those of
// the EndpointSlice: ready is what its maker wants it to be taken for, also where
// a Service publishes addresses that are not.
type ServiceEndpoint struct {
	Address                     netip.Addr
	Ready, Serving, Terminating bool
	Pod                         string            // namespace/name; empty if it is no Pod
	Node                        string            // empty if it is on none
	Ports                       map[string]uint16 // by the names of [ServicePort]
}

// Lookup asks the apiserver single questions, for a person who waits. Its
// methods end with their context, and their errors match the package's
// sentinels; [ErrForbidden] is to be expected, since they need more than the
// daemon has: get and list on services and endpointslices in all namespaces.
type Lookup struct {
	client kubernetes.Interface
	close  func()

	// Source names the apiserver and the kubeconfig.
	Source string
	// Node is the name of this host's Node.
	Node string
}

// NewLookup finds the kubeconfig as [New] does. It does not use the network.
func NewLookup(o Options) (*Lookup, error) {
	o = o.withDefaults()
	k, err := findKubeconfig(o)
	if err != nil {
		return nil, err
	}
	c, err := connect(k)
	if err != nil {
		return nil, err
	}
	return &Lookup{client: c.api, Source: c.where, Node: o.NodeName, close: c.close}, nil
}

// lookupProblem is a problem of a person's question: the daemon's rights do not help.
func lookupProblem(err error) *problem {
	p := diagnose(err)
	if errors.Is(p.kind, ErrForbidden) {
		p.remedy = "name a kubeconfig that has the right with --kubeconfig"
	}
	return p
}

// Close closes the connections.
func (l *Lookup) Close() { l.close() }

// Service returns a Service by its name, [ErrServiceNotFound] if there is none.
func (l *Lookup) Service(ctx context.Context, namespace, name string) (Service, error) {
	found, err := l.client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return Service{}, fmt.Errorf("%w %s/%s", ErrServiceNotFound, namespace, name)
	}
	if err != nil {
		return Service{}, lookupProblem(err)
	}
	return l.withEndpoints(ctx, found)
}

// ServiceOf returns the Service that an address belongs to: as its cluster,
// external or load balancer address, or as that of an endpoint of it.
// [ErrServiceNotFound] if it is nobody's.
func (l *Lookup) ServiceOf(ctx context.Context, address netip.Addr) (Service, error) {
	services, err := l.client.CoreV1().Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return Service{}, lookupProblem(err)
	}
	for i := range services.Items {
		if slices.Contains(allIPs(&services.Items[i]), address) {
			return l.withEndpoints(ctx, &services.Items[i])
		}
	}
	endpointSlices, err := l.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return Service{}, lookupProblem(err)
	}
	for i := range endpointSlices.Items {
		s := &endpointSlices.Items[i]
		for _, e := range serviceEndpoints(s) {
			if name := s.Labels[discoveryv1.LabelServiceName]; e.Address == address && name != "" {
				return l.Service(ctx, s.Namespace, name)
			}
		}
	}
	return Service{}, fmt.Errorf("%w with the address %s", ErrServiceNotFound, address)
}

// ServiceNames lists the Services of a namespace. A namespace that does not
// exist has none.
func (l *Lookup) ServiceNames(ctx context.Context, namespace string) ([]string, error) {
	services, err := l.client.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, lookupProblem(err)
	}
	names := make([]string, 0, len(services.Items))
	for _, s := range services.Items {
		names = append(names, s.Name)
	}
	slices.Sort(names)
	return names, nil
}

func (l *Lookup) withEndpoints(ctx context.Context, s *corev1.Service) (Service, error) {
	found := Service{
		Namespace: s.Namespace, Name: s.Name, IPs: serviceIPs(s),
		LocalOnly:    deref(s.Spec.InternalTrafficPolicy) == corev1.ServiceInternalTrafficPolicyLocal,
		Sticky:       s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP,
		Selectorless: len(s.Spec.Selector) == 0,
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		found.ExternalName = s.Spec.ExternalName
		return found, nil
	}
	for _, p := range s.Spec.Ports {
		found.Ports = append(found.Ports, ServicePort{Name: p.Name, Protocol: string(p.Protocol), Port: uint16(p.Port)})
	}
	endpointSlices, err := l.client.DiscoveryV1().EndpointSlices(s.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + s.Name,
	})
	if err != nil {
		return found, lookupProblem(err)
	}
	for i := range endpointSlices.Items {
		found.Endpoints = append(found.Endpoints, serviceEndpoints(&endpointSlices.Items[i])...)
	}
	found.Endpoints = mergeEndpoints(found.Endpoints)
	return found, nil
}

// mergeEndpoints sorts, and makes one of an address that is in several slices,
// as that of a Pod is whose ports differ from those of others.
func mergeEndpoints(all []ServiceEndpoint) []ServiceEndpoint {
	slices.SortStableFunc(all, func(a, b ServiceEndpoint) int { return a.Address.Compare(b.Address) })
	var merged []ServiceEndpoint
	for _, e := range all {
		if last := len(merged) - 1; last >= 0 && merged[last].Address == e.Address {
			merged[last].Ready = merged[last].Ready || e.Ready
			merged[last].Serving = merged[last].Serving || e.Serving
			merged[last].Terminating = merged[last].Terminating && e.Terminating
			for name, port := range e.Ports {
				merged[last].Ports[name] = port
			}
			continue
		}
		merged = append(merged, e)
	}
	return merged
}

func serviceEndpoints(s *discoveryv1.EndpointSlice) []ServiceEndpoint {
	var endpoints []ServiceEndpoint
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		address, ok := endpointAddr(s.AddressType, e)
		if !ok {
			continue
		}
		found := ServiceEndpoint{
			Address:     address,
			Ready:       e.Conditions.Ready == nil || *e.Conditions.Ready,
			Serving:     e.Conditions.Serving == nil || *e.Conditions.Serving,
			Terminating: deref(e.Conditions.Terminating),
			Node:        deref(e.NodeName),
			Ports:       make(map[string]uint16),
		}
		if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
			found.Pod = strings.TrimPrefix(e.TargetRef.Namespace+"/"+e.TargetRef.Name, "/")
		}
		for _, p := range s.Ports {
			if p.Port != nil {
				found.Ports[deref(p.Name)] = uint16(*p.Port)
			}
		}
		endpoints = append(endpoints, found)
	}
	return endpoints
}

// allIPs are the addresses at which a Service is reached.
func allIPs(s *corev1.Service) []netip.Addr {
	ips := serviceIPs(s)
	texts := slices.Clone(s.Spec.ExternalIPs)
	for _, ingress := range s.Status.LoadBalancer.Ingress {
		texts = append(texts, ingress.IP)
	}
	for _, text := range texts {
		if ip, err := netip.ParseAddr(text); err == nil {
			ips = append(ips, ip.Unmap())
		}
	}
	return ips
}
