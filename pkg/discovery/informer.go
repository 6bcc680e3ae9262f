package discovery

import (
	"context"
	"fmt"
	"maps"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// The resources followed, as messages and health call them.
const (
	resourceServices = "services"
	resourceSlices   = "endpointslices"
)

// informer is one shared informer with our handler on it.
type informer struct {
	cache.SharedIndexInformer
	synced <-chan struct{} // closed when the handler has seen the whole first list
	failed <-chan struct{} // closed when a request has failed
}

// done reports whether the first list has come, or a request has failed.
func (i informer) done() bool {
	select {
	case <-i.synced:
	case <-i.failed:
	default:
		return false
	}
	return true
}

// serviceRequest asks for the one Service, by name.
func serviceRequest(c kubernetes.Interface, namespace, name string, t timeouts, h *health) *request {
	api := c.CoreV1().Services(namespace)
	return newRequest(resourceServices, t, h,
		func(lo *metav1.ListOptions) {
			lo.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
		},
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, lo) },
		api.Watch)
}

// sliceRequest asks for a Service's slices, by the label that joins them.
func sliceRequest(c kubernetes.Interface, namespace, service string, t timeouts, h *health) *request {
	api := c.DiscoveryV1().EndpointSlices(namespace)
	return newRequest(resourceSlices, t, h,
		func(lo *metav1.ListOptions) {
			lo.LabelSelector = labels.Set{discoveryv1.LabelServiceName: service}.String()
		},
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, lo) },
		api.Watch)
}

// newInformer makes an informer that calls changed after each change of its store
// that may mean something. The store is read by the one who is told.
func newInformer(r *request, example runtime.Object, changed func()) (informer, error) {
	r.health.follow(r.resource, r.optional)
	inf := cache.NewSharedIndexInformerWithOptions(r, example, cache.SharedIndexInformerOptions{ObjectDescription: r.resource})
	if err := inf.SetTransform(trim); err != nil {
		return informer{}, fmt.Errorf("prepare informer for %s: %w", r.resource, err)
	}
	err := inf.SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *cache.Reflector, err error) {
		if ctx.Err() != nil || isExpired(err) {
			return
		}
		r.fail(err)
	})
	if err != nil {
		return informer{}, fmt.Errorf("prepare informer for %s: %w", r.resource, err)
	}
	reg, err := inf.AddEventHandler(handler(changed))
	if err != nil {
		return informer{}, fmt.Errorf("prepare informer for %s: %w", r.resource, err)
	}
	return informer{SharedIndexInformer: inf, synced: reg.HasSyncedChecker().Done(), failed: r.failed}, nil
}

// handler turns events into "look again". It does not look into the objects, so
// that a tombstone (cache.DeletedFinalStateUnknown, when the delete itself was
// missed) counts as a delete.
func handler(changed func()) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed() },
		UpdateFunc: func(before, after any) {
			if !sameNode(before, after) {
				changed()
			}
		},
		DeleteFunc: func(any) { changed() },
	}
}

// sameNode reports whether both are a node with the same meaning for us. A kubelet
// writes its node's status every few minutes.
func sameNode(before, after any) bool {
	a, okA := before.(*corev1.Node)
	b, okB := after.(*corev1.Node)
	return okA && okB && a.Name == b.Name && slices.Equal(a.Spec.PodCIDRs, b.Spec.PodCIDRs) && maps.Equal(a.Labels, b.Labels)
}

// trim is a cache.TransformFunc: it keeps of an object what this package reads.
// Anything else, a tombstone for one, passes as it is.
func trim(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Service:
		s := &corev1.Service{
			ObjectMeta: trimMeta(&o.ObjectMeta),
			Spec: corev1.ServiceSpec{
				Type: o.Spec.Type, ClusterIP: o.Spec.ClusterIP, ClusterIPs: o.Spec.ClusterIPs, Ports: o.Spec.Ports, Selector: o.Spec.Selector,
			},
		}
		if value, ok := o.Labels[dnsLabel]; ok {
			s.Labels = map[string]string{dnsLabel: value}
		}
		return s, nil
	case *corev1.ConfigMap:
		return &corev1.ConfigMap{
			ObjectMeta: trimMeta(&o.ObjectMeta),
			Data:       o.Data,
		}, nil
	case *appsv1.Deployment:
		return &appsv1.Deployment{ObjectMeta: trimMeta(&o.ObjectMeta), Spec: appsv1.DeploymentSpec{Template: trimTemplate(&o.Spec.Template)}}, nil
	case *appsv1.DaemonSet:
		return &appsv1.DaemonSet{ObjectMeta: trimMeta(&o.ObjectMeta), Spec: appsv1.DaemonSetSpec{Template: trimTemplate(&o.Spec.Template)}}, nil
	case *networkingv1.ServiceCIDR:
		return &networkingv1.ServiceCIDR{ObjectMeta: trimMeta(&o.ObjectMeta), Spec: o.Spec}, nil
	case *corev1.Node:
		return trimNode(o), nil
	case *discoveryv1.EndpointSlice:
		s := &discoveryv1.EndpointSlice{
			ObjectMeta:  trimMeta(&o.ObjectMeta),
			AddressType: o.AddressType,
			Ports:       o.Ports,
			Endpoints:   make([]discoveryv1.Endpoint, len(o.Endpoints)),
		}
		if name, ok := o.Labels[discoveryv1.LabelServiceName]; ok {
			s.Labels = map[string]string{discoveryv1.LabelServiceName: name}
		}
		for i, e := range o.Endpoints {
			s.Endpoints[i] = discoveryv1.Endpoint{
				Addresses:  e.Addresses,
				Conditions: e.Conditions,
				NodeName:   e.NodeName,
				Zone:       e.Zone,
				Hints:      e.Hints,
			}
		}
		return s, nil
	}
	return obj, nil
}

func trimMeta(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion}
}
