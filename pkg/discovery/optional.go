package discovery

import (
	"context"
	"fmt"
	"strings"
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
	resourceConfigMaps   = "configmaps" // and a name, see [resourceConfigMap]
	resourceLabelledMaps = "configmaps by label"
	resourceDeployments  = "deployments"
	resourceDaemonSets   = "daemonsets"
	resourceServiceCIDRs = "servicecidrs"
	resourceNodes        = "nodes"
)

// loses says what is not known without a resource.
var loses = map[string]string{
	resourceLabelled:     "no other Service can be looked for",
	resourceLabelledMaps: "no other Corefile can be looked for",
	resourceDeployments:  "which Corefile CoreDNS reads, and what that imports, is not known for sure",
	resourceDaemonSets:   "which Corefile CoreDNS reads, and what that imports, is not known for sure",
	resourceServiceCIDRs: "the reverse zones of Services are not known",
	resourceNodes:        "the reverse zones of pods are not known",
}

const lossOfConfigMap = "the zones of the Corefile are not known"

// The label that CoreDNS's Service has, whatever its name, as its forerunner's had.
const (
	dnsLabel      = "k8s-app"
	dnsLabelValue = "kube-dns"
)

// nodesPerPage bounds a page of nodes: with images and conditions, one has some
// ten kilobytes until it is trimmed.
const nodesPerPage = 200

// resourceConfigMap is one ConfigMap.
func resourceConfigMap(name string) string { return resourceConfigMaps + " " + name }

// absence is the note about a resource that err keeps us from.
func absence(resource string, err error) string {
	loses := loses[resource]
	if strings.HasPrefix(resource, resourceConfigMap("")) && loses == "" {
		loses = lossOfConfigMap
	}
	switch {
	case apierrors.IsForbidden(err) && resource == resourceLabelled:
		return "not allowed to list Services: " + loses + "; allow it in the namespace, or name the Service with --dns-service"
	case apierrors.IsForbidden(err) && resource == resourceLabelledMaps:
		return "not allowed to list ConfigMaps: " + loses + "; allow it in the namespace, or name one with --corefile-configmap"
	case apierrors.IsForbidden(err):
		return fmt.Sprintf("not allowed to read %s: %s; apply the RBAC manifest (scripts/rbac.yaml)", resource, loses)
	case apierrors.IsNotFound(err) && resource == resourceServiceCIDRs:
		return "the cluster has no ServiceCIDR objects (Kubernetes 1.33 or later): " + loses + "; name the range with --service-cidr"
	}
	return fmt.Sprintf("can't read %s: %s; %s", resource, loses, diagnose(err).why)
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

// configMapRequest asks for one ConfigMap, by name.
func configMapRequest(c kubernetes.Interface, namespace, name string, t timeouts, h *health) *request {
	api := c.CoreV1().ConfigMaps(namespace)
	return newRequest(resourceConfigMap(name), t, h,
		func(lo *metav1.ListOptions) {
			lo.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
		},
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, lo) },
		api.Watch)
}

// labelledMapRequest asks for ConfigMaps with the label of the Service, or of CoreDNS's Helm chart.
func labelledMapRequest(c kubernetes.Interface, namespace string, t timeouts, h *health) *request {
	api := c.CoreV1().ConfigMaps(namespace)
	return newRequest(resourceLabelledMaps, t, h,
		func(lo *metav1.ListOptions) {
			lo.LabelSelector = fmt.Sprintf("%s in (%s,%s)", dnsLabel, DefaultConfigMap, dnsLabelValue)
		},
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, lo) },
		api.Watch)
}

func deploymentRequest(c kubernetes.Interface, namespace string, t timeouts, h *health) *request {
	api := c.AppsV1().Deployments(namespace)
	return newRequest(resourceDeployments, t, h, func(*metav1.ListOptions) {},
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, lo) },
		api.Watch)
}

func daemonSetRequest(c kubernetes.Interface, namespace string, t timeouts, h *health) *request {
	api := c.AppsV1().DaemonSets(namespace)
	return newRequest(resourceDaemonSets, t, h, func(*metav1.ListOptions) {},
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
// after each has been trimmed.
func nodeRequest(c kubernetes.Interface, t timeouts, h *health) *request {
	api := c.CoreV1().Nodes()
	r := newRequest(resourceNodes, t, h, func(*metav1.ListOptions) {},
		func(ctx context.Context, lo metav1.ListOptions) (runtime.Object, error) {
			lo.Limit = nodesPerPage
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
	r.many = true
	return r
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

// optional are the informers of what is not needed. Those that nobody needs, or not yet, are zero.
type optional struct {
	serviceCIDRs, nodes     informer
	deployments, daemonSets informer
	labelledMaps            informer
	configMaps              map[string]*informer // by name
}

// starter starts informers.
type starter struct {
	run     func(informer)
	changed func()
	started []informer
	err     error
}

// need starts an informer unless it runs, and reports whether it has its first list, or an error.
func (s *starter) need(i *informer, r func() *request, example runtime.Object) (done bool) {
	if i.SharedIndexInformer == nil && s.err == nil {
		if *i, s.err = newOptional(r(), example, s.changed); s.err != nil {
			return false
		}
		s.run(*i)
		s.started = append(s.started, *i)
	}
	return i.done()
}

// enrich starts what is to be known beside the endpoints if the Service is there, and the search for another one if it is
// not, or is of no use. It returns what it has started.
func (w *Watcher) enrich(run func(informer)) ([]informer, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := starter{run: run, changed: w.look}
	service := w.service()
	searches := w.searches() && rankOf(service, nil) < rankAddress
	if searches {
		s.need(&w.labelled, func() *request { return labelledRequest(w.api, w.opts, w.timeouts, w.health) }, &corev1.Service{})
		if candidates := w.candidates(); len(candidates) > 1 {
			for _, c := range candidates[:min(len(candidates), maxMounts)] {
				w.needConfigMap(&s, c.Name)
			}
		}
	}
	if (service != nil || searches) && !w.opts.NoServiceCIDRs {
		s.need(&w.optional.serviceCIDRs, func() *request { return serviceCIDRRequest(w.api, w.timeouts, w.health) }, &networkingv1.ServiceCIDR{})
	}
	if service != nil {
		if !w.opts.NoPodCIDRs || w.opts.Prefer == PreferZone {
			s.need(&w.optional.nodes, func() *request { return nodeRequest(w.api, w.timeouts, w.health) }, &corev1.Node{})
		}
		if !w.opts.NoCorefile {
			w.seekCorefile(&s, service)
		}
	}
	return s.started, s.err
}

func (w *Watcher) needConfigMap(s *starter, name string) (done bool) {
	if w.optional.configMaps[name] == nil {
		w.optional.configMaps[name] = new(informer)
	}
	return s.need(w.optional.configMaps[name], func() *request {
		return configMapRequest(w.api, w.opts.Namespace, name, w.timeouts, w.health)
	}, &corev1.ConfigMap{})
}

// settle waits until each informer has its first list or an error, so that the
// first snapshot is whole where it can be. A list that does not come holds nothing
// up for long.
func settle(ctx context.Context, until time.Time, all []informer) {
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	for _, i := range all {
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

// zones collects the zones of all sources, and remarks about them. w.mu is held.
func (w *Watcher) zones(ports []uint16) zoneSet {
	var s zoneSet
	if w.several != "" {
		s.notes = append(s.notes, w.several)
	}
	if !w.opts.NoCorefile {
		w.addCorefile(&s, ports)
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
	if c := &w.corefile; c.parsed != nil && !w.opts.NoCorefile {
		for i := range s.zones {
			zone := &s.zones[i]
			var unvouched bool
			zone.Uncached, unvouched = c.parsed.keeping(zone.Name, ports)
			zone.Vouched = !unvouched && c.err == nil
		}
	}
	return s
}

// placement says where this host is.
func (w *Watcher) placement() placement {
	p := placement{prefer: w.opts.Prefer, node: w.opts.NodeName}
	if p.prefer == PreferZone {
		p.zone = zoneOfNode(stored[*corev1.Node](w.optional.nodes), p.node)
	}
	return p
}
