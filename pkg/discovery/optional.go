package discovery

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

// What may be read beside the endpoints, as messages and health call it. None of
// it is needed: what can't be read is a note.
const (
	resourceLabelled     = "services by label"
	resourceConfigMaps   = "configmaps"
	resourceServiceCIDRs = "servicecidrs"
	resourceNodes        = "nodes"
)

// loses says what is not known without a resource.
var loses = map[string]string{
	resourceLabelled:     "no other Service can be looked for",
	resourceConfigMaps:   "the zones of the Corefile are not known",
	resourceServiceCIDRs: "the reverse zones of Services are not known",
	resourceNodes:        "the reverse zones of pods are not known",
}

// The label that CoreDNS's Service has, whatever its name, as its forerunner's had.
const (
	dnsLabel      = "k8s-app"
	dnsLabelValue = "kube-dns"
)

// nodesPerPage bounds a page of nodes: with images and conditions, one has some
// ten kilobytes until it is trimmed.
const nodesPerPage = 200

// absence is the note about a resource that err keeps us from.
func absence(resource string, err error) string {
	switch {
	case apierrors.IsForbidden(err) && resource == resourceLabelled:
		return "not allowed to list Services: " + loses[resource] + "; allow it in the namespace, or name the Service with --dns-service"
	case apierrors.IsForbidden(err):
		return fmt.Sprintf("not allowed to read %s: %s; apply the RBAC manifest (scripts/rbac.yaml)", resource, loses[resource])
	case apierrors.IsNotFound(err) && resource == resourceServiceCIDRs:
		return "the cluster has no ServiceCIDR objects (Kubernetes 1.33 or later): " + loses[resource] + "; name the range with --service-cidr"
	}
	return fmt.Sprintf("can't read %s: %s; %s", resource, loses[resource], diagnose(err).why)
}

// newOptional makes an informer for what is not needed.
func newOptional(r *request, example runtime.Object, changed func()) (informer, error) {
	r.optional = true
	return newInformer(r, example, changed)
}

// labelledRequest asks for the Services that say that they are the cluster's DNS.
func labelledRequest(c kubernetes.Interface, o Options, t timeouts, h *health) *request {
	api := c.CoreV1().Services(o.Namespace)
	return newRequest(resourceLabelled, t, h,
		func(lo *metav1.ListOptions) { lo.LabelSelector = labels.Set{dnsLabel: dnsLabelValue}.String() },
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, lo) },
		api.Watch)
}

// configMapRequest asks for the one ConfigMap, by name.
func configMapRequest(c kubernetes.Interface, namespace, name string, t timeouts, h *health) *request {
	api := c.CoreV1().ConfigMaps(namespace)
	return newRequest(resourceConfigMaps, t, h,
		func(lo *metav1.ListOptions) {
			lo.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
		},
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, lo) },
		api.Watch)
}

func serviceCIDRRequest(c kubernetes.Interface, t timeouts, h *health) *request {
	api := c.NetworkingV1().ServiceCIDRs()
	return newRequest(resourceServiceCIDRs, t, h, func(*metav1.ListOptions) {},
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, lo) },
		api.Watch)
}

// nodeRequest asks for all nodes, page by page: the reflector joins the pages only
// after each has been trimmed. An apiserver gives pages only to who asks for the
// newest state, not for "any" (resourceVersion 0).
func nodeRequest(c kubernetes.Interface, t timeouts, h *health) *request {
	api := c.CoreV1().Nodes()
	return newRequest(resourceNodes, t, h, func(*metav1.ListOptions) {},
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) {
			lo.ResourceVersion, lo.ResourceVersionMatch, lo.Limit = "", "", nodesPerPage
			list, err := api.List(ctx, lo)
			if err != nil {
				return nil, err
			}
			for i := range list.Items {
				list.Items[i] = *trimNode(&list.Items[i])
			}
			return list, nil
		},
		api.Watch)
}

func newRequest(resource string, t timeouts, h *health, selector func(*metav1.ListOptions),
	list func(context.Context, metav1.ListOptions) (runtime.Object, error),
	open func(context.Context, metav1.ListOptions) (watch.Interface, error)) *request {
	return &request{resource: resource, timeouts: t, health: h, selector: selector, list: list, watch: open, failed: make(chan struct{})}
}

func trimNode(n *corev1.Node) *corev1.Node {
	t := &corev1.Node{ObjectMeta: trimMeta(&n.ObjectMeta), Spec: corev1.NodeSpec{PodCIDRs: n.Spec.PodCIDRs}}
	if zone, ok := n.Labels[corev1.LabelTopologyZone]; ok {
		t.Labels = map[string]string{corev1.LabelTopologyZone: zone}
	}
	return t
}

// optional are the informers of what is not needed. Those that are switched off
// are zero.
type optional struct {
	configMaps, serviceCIDRs, nodes informer
	configMap                       string // its name
}

// newOptionals prepares what the options ask for, beside the Service called
// service.
func (w *Watcher) newOptionals(service string) (o optional, err error) {
	if o.configMap = w.opts.ConfigMap; o.configMap == "" {
		o.configMap = DefaultConfigMap
		if w.opts.search && service != DefaultService {
			o.configMap = service
		}
	}
	if !w.opts.NoCorefile {
		r := configMapRequest(w.api, w.opts.Namespace, o.configMap, w.timeouts, w.health)
		if o.configMaps, err = newOptional(r, &corev1.ConfigMap{}, w.look); err != nil {
			return o, err
		}
	}
	if !w.opts.NoServiceCIDRs {
		r := serviceCIDRRequest(w.api, w.timeouts, w.health)
		if o.serviceCIDRs, err = newOptional(r, &networkingv1.ServiceCIDR{}, w.look); err != nil {
			return o, err
		}
	}
	if !w.opts.NoPodCIDRs || w.opts.Prefer == PreferZone {
		r := nodeRequest(w.api, w.timeouts, w.health)
		if o.nodes, err = newOptional(r, &corev1.Node{}, w.look); err != nil {
			return o, err
		}
	}
	return o, nil
}

func (o optional) informers() (all []informer) {
	for _, i := range []informer{o.configMaps, o.serviceCIDRs, o.nodes} {
		if i.SharedIndexInformer != nil {
			all = append(all, i)
		}
	}
	return all
}

// settle waits until each informer has its first list or an error, so that the
// first snapshot is whole where it can be. A list that does not come holds nothing
// up for long.
func (o optional) settle(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, i := range o.informers() {
		select {
		case <-i.synced:
		case <-i.failed:
		case <-ctx.Done():
			return
		}
	}
}

// stored returns what an informer holds, nothing for a zero one.
func stored[T runtime.Object](i informer) (all []T) {
	if i.SharedIndexInformer == nil {
		return nil
	}
	for _, obj := range i.GetStore().List() {
		if o, ok := obj.(T); ok {
			all = append(all, o)
		}
	}
	return all
}

// zones collects the zones of all sources, and the notes. w.mu is held.
func (w *Watcher) zones(ports []uint16) zoneSet {
	var s zoneSet
	if w.several != "" {
		s.notes = append(s.notes, w.several)
	}
	if w.optional.configMaps.SharedIndexInformer != nil {
		w.readCorefile(&s)
	}
	if w.corefile != nil {
		names, notes := w.corefile.zones(ports, w.opts.StubZones)
		s.add(fmt.Sprintf("Corefile %s/%s", w.opts.Namespace, w.optional.configMap), names...)
		s.notes = append(s.notes, notes...)
	}
	s.addServiceCIDRs(stored[*networkingv1.ServiceCIDR](w.optional.serviceCIDRs))
	if !w.opts.NoPodCIDRs {
		s.addPodCIDRs(stored[*corev1.Node](w.optional.nodes))
	}
	if w.opts.Prefer == PreferZone && w.placement().zone == "" {
		s.note("the topology zone of node %s is not known: all endpoints are asked; name the node with --node-name", w.opts.NodeName)
	}
	s.notes = append(s.notes, w.health.notes()...)
	s.namesFirst()
	return s
}

// readCorefile parses the Corefile if it has changed. What was good once stays.
// w.mu is held.
func (w *Watcher) readCorefile(s *zoneSet) {
	found := fmt.Sprintf("%s/%s", w.opts.Namespace, w.optional.configMap)
	obj, ok, err := w.optional.configMaps.GetStore().GetByKey(found)
	m, isMap := obj.(*corev1.ConfigMap)
	if err != nil || !ok || !isMap {
		if w.corefile != nil {
			s.note("the ConfigMap %s is gone: the zones of its last Corefile stay", found)
		}
		return
	}
	if m != w.parsed {
		c, err := parseCorefile(m.Data[corefileName])
		if err == nil {
			w.corefile = c
		}
		w.parsed, w.parseError = m, err
	}
	if w.parseError == nil {
		return
	}
	kept := "its zones are not known"
	if w.corefile != nil {
		kept = "the zones of the one before stay"
	}
	s.note("the Corefile of %s is broken: %s; %s", found, plain(w.parseError.Error()), kept)
}

// placement says where this host is.
func (w *Watcher) placement() placement {
	p := placement{prefer: w.opts.Prefer, node: w.opts.NodeName}
	if p.prefer == PreferZone {
		p.zone = zoneOfNode(stored[*corev1.Node](w.optional.nodes), p.node)
	}
	return p
}
