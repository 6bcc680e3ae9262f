package discovery

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func ptr[T any](v T) *T { return &v }

// backendObjects are a Service with a ready endpoint in one slice, and in another one with the same Pod's second port
// and an endpoint that is not ready.
func backendObjects() (*corev1.Service, []*discoveryv1.EndpointSlice) {
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "backend"}}
	service.Spec.ClusterIP, service.Spec.ClusterIPs = "172.21.0.20", []string{"172.21.0.20", "fd00:21::20"}
	service.Spec.InternalTrafficPolicy, service.Spec.SessionAffinity = ptr(corev1.ServiceInternalTrafficPolicyLocal), corev1.ServiceAffinityClientIP
	service.Spec.ExternalIPs = []string{"192.0.2.80"}
	service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.81"}, {Hostname: "lb.example.com"}}
	service.Spec.Ports = []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}, {Name: "metrics", Protocol: corev1.ProtocolTCP, Port: 9090}}
	slice := func(name, port string, number int32, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "backend"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: &port, Port: &number}},
			Endpoints:   endpoints,
		}
	}
	pod := &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "backend-1"}
	return service, []*discoveryv1.EndpointSlice{
		slice("backend-a", "http", 8080, discoveryv1.Endpoint{Addresses: []string{"172.20.1.10"}, TargetRef: pod}),
		slice("backend-b", "metrics", 9100,
			discoveryv1.Endpoint{Addresses: []string{"172.20.1.10"}, TargetRef: pod},
			discoveryv1.Endpoint{Addresses: []string{"172.20.1.9"}, NodeName: ptr("n2"), Conditions: discoveryv1.EndpointConditions{Ready: ptr(false), Serving: ptr(true), Terminating: ptr(true)}}),
	}
}

func newLookup(t *testing.T) (*Lookup, *fakeCluster) {
	t.Helper()
	c := newCluster(t)
	service, endpointSlices := backendObjects()
	c.createService(service)
	for _, s := range endpointSlices {
		c.setSlice(s)
	}
	alias := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "alias"}}
	alias.Spec.Type, alias.Spec.ExternalName = corev1.ServiceTypeExternalName, "www.example.com"
	c.createService(alias)
	return &Lookup{client: c, close: func() {}}, c
}

func wantService() Service {
	return Service{
		Namespace: "default", Name: "backend",
		IPs:       []netip.Addr{netip.MustParseAddr("172.21.0.20"), netip.MustParseAddr("fd00:21::20")},
		LocalOnly: true, Sticky: true, Selectorless: true,
		Ports: []ServicePort{{"http", "TCP", 80}, {"metrics", "TCP", 9090}},
		Endpoints: []ServiceEndpoint{
			{Address: netip.MustParseAddr("172.20.1.9"), Serving: true, Terminating: true, Node: "n2", Ports: map[string]uint16{"metrics": 9100}},
			{
				Address: netip.MustParseAddr("172.20.1.10"), Ready: true, Serving: true, Pod: "default/backend-1",
				Ports: map[string]uint16{"http": 8080, "metrics": 9100},
			},
		},
	}
}

func TestLookupService(t *testing.T) {
	l, _ := newLookup(t)
	got, err := l.Service(t.Context(), "default", "backend")
	if diff := cmp.Diff(wantService(), got, cmpopts.EquateComparable(netip.Addr{})); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	got, err = l.Service(t.Context(), "default", "alias")
	if err != nil || got.ExternalName != "www.example.com" {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := l.Service(t.Context(), "kube-system", "backend"); !errors.Is(err, ErrServiceNotFound) {
		t.Errorf("in another namespace: %v", err)
	}
	names, err := l.ServiceNames(t.Context(), "default")
	if diff := cmp.Diff([]string{"alias", "backend"}, names); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
}

func TestLookupServiceOf(t *testing.T) {
	l, _ := newLookup(t)
	for _, address := range []string{"172.21.0.20", "fd00:21::20", "192.0.2.80", "192.0.2.81", "172.20.1.10", "172.20.1.9"} {
		if got, err := l.ServiceOf(t.Context(), netip.MustParseAddr(address)); err != nil || got.Name != "backend" || len(got.Endpoints) != 2 {
			t.Errorf("%s: %+v, %v", address, got, err)
		}
	}
	if got, err := l.ServiceOf(t.Context(), netip.MustParseAddr("172.20.1.11")); !errors.Is(err, ErrServiceNotFound) {
		t.Errorf("nobody's: %+v, %v", got, err)
	}
}

func TestLookupErrors(t *testing.T) {
	l, c := newLookup(t)
	c.answer(always(apierrors.NewForbidden(schema.GroupResource{Resource: "services"}, "", errors.New("RBAC"))))
	if _, err := l.ServiceOf(t.Context(), netip.MustParseAddr("172.21.0.20")); !errors.Is(err, ErrForbidden) {
		t.Errorf("forbidden: %v", err)
	}
	if _, err := l.ServiceNames(t.Context(), "default"); !errors.Is(err, ErrForbidden) {
		t.Errorf("forbidden: %v", err)
	}
	c.answer(always(context.DeadlineExceeded))
	if _, err := l.Service(t.Context(), "default", "backend"); !errors.Is(err, ErrUnreachable) {
		t.Errorf("no reply: %v", err)
	}
}
