package discovery

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
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
}

// serviceRequest asks for the one Service, by name.
func serviceRequest(c kubernetes.Interface, o Options, t timeouts, h *health) *request {
	api := c.CoreV1().Services(o.Namespace)
	return &request{
		resource: resourceServices,
		timeouts: t,
		health:   h,
		selector: func(lo *metav1.ListOptions) {
			lo.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, o.Service).String()
		},
		list: func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) {
			return api.List(ctx, lo)
		},
		watch: func(ctx context.Context, lo metav1.ListOptions) (watch.Interface, error) {
			return api.Watch(ctx, lo)
		},
	}
}

// sliceRequest asks for the Service's slices, by the label that joins them.
func sliceRequest(c kubernetes.Interface, o Options, t timeouts, h *health) *request {
	api := c.DiscoveryV1().EndpointSlices(o.Namespace)
	return &request{
		resource: resourceSlices,
		timeouts: t,
		health:   h,
		selector: func(lo *metav1.ListOptions) {
			lo.LabelSelector = labels.Set{discoveryv1.LabelServiceName: o.Service}.String()
		},
		list: func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) {
			return api.List(ctx, lo)
		},
		watch: func(ctx context.Context, lo metav1.ListOptions) (watch.Interface, error) {
			return api.Watch(ctx, lo)
		},
	}
}

// newInformer makes an informer that calls changed after each change of its store
// that may mean something. The store is read by the one who is told.
func newInformer(r *request, example runtime.Object, changed func()) (informer, error) {
	inf := cache.NewSharedIndexInformerWithOptions(r, example, cache.SharedIndexInformerOptions{ObjectDescription: r.resource})
	if err := inf.SetTransform(trim); err != nil {
		return informer{}, fmt.Errorf("prepare informer for %s: %w", r.resource, err)
	}
	err := inf.SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *cache.Reflector, err error) {
		if ctx.Err() != nil || isExpired(err) {
			return
		}
		r.health.failed(r.resource, err)
	})
	if err != nil {
		return informer{}, fmt.Errorf("prepare informer for %s: %w", r.resource, err)
	}
	reg, err := inf.AddEventHandler(handler(changed))
	if err != nil {
		return informer{}, fmt.Errorf("prepare informer for %s: %w", r.resource, err)
	}
	return informer{SharedIndexInformer: inf, synced: reg.HasSyncedChecker().Done()}, nil
}

// handler turns events into "look again". It does not look into the objects, so
// that a tombstone (cache.DeletedFinalStateUnknown, when the delete itself was
// missed) is as good as a delete.
func handler(changed func()) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed() },
		UpdateFunc: func(before, after any) {
			if !sameVersion(before, after) {
				changed()
			}
		},
		DeleteFunc: func(any) { changed() },
	}
}

// sameVersion reports whether both are the same object at the same version, as
// after a relist.
func sameVersion(before, after any) bool {
	a, err := meta.Accessor(before)
	if err != nil {
		return false
	}
	b, err := meta.Accessor(after)
	if err != nil {
		return false
	}
	return a.GetResourceVersion() != "" && a.GetResourceVersion() == b.GetResourceVersion() && a.GetUID() == b.GetUID()
}

// trim is a cache.TransformFunc: it keeps of an object what this package reads.
// Anything else, a tombstone for one, passes as it is.
func trim(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Service:
		return &corev1.Service{
			ObjectMeta: trimMeta(&o.ObjectMeta),
			Spec:       corev1.ServiceSpec{ClusterIP: o.Spec.ClusterIP, ClusterIPs: o.Spec.ClusterIPs},
		}, nil
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
			}
		}
		return s, nil
	}
	return obj, nil
}

func trimMeta(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion}
}
