package discovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zapcore"
	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"
)

const rkeService = "rke2-coredns-rke2-coredns"

func configMap(name, corefile string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: name},
		Data:       map[string]string{corefileName: corefile},
	}
}

func serviceCIDR(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
}

// dnsService is a Service with the label of the cluster's DNS.
func dnsService(name string) *corev1.Service {
	s := kubeDNS("172.21.0.10")
	s.Name, s.Labels, s.Spec.Selector = name, dnsLabels, dnsLabels
	return s
}

// of makes a slice one of another Service.
func of(service string, s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	s.Labels[discoveryv1.LabelServiceName] = service
	return s
}

func (c *fakeCluster) must(_ any, err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *fakeCluster) setCorefile(text string) {
	c.t.Helper()
	m := configMap(DefaultConfigMap, text)
	m.ResourceVersion = fmt.Sprint(len(c.Actions()))
	c.must(c.CoreV1().ConfigMaps(DefaultNamespace).Update(context.Background(), m, metav1.UpdateOptions{}))
}

// forbid makes the apiserver refuse requests for these resources.
func forbid(resources ...string) func(clienttesting.Action) error {
	return func(a clienttesting.Action) error {
		if r := a.GetResource(); slices.Contains(resources, r.Resource) {
			return apierrors.NewForbidden(schema.GroupResource{Group: r.Group, Resource: r.Resource}, "", errors.New("no"))
		}
		return nil
	}
}

func wantZones(t testing.TB, s Snapshot, want ...string) {
	t.Helper()
	if d := cmp.Diff(want, names(s.Zones)); d != "" && len(want)+len(s.Zones) > 0 {
		t.Errorf("zones -want +got:\n%s", d)
	}
}

// wantNotes wants one note with each of the parts, in any order.
func wantNotes(t testing.TB, s Snapshot, parts ...string) {
	t.Helper()
	if len(s.Notes) != len(parts) {
		t.Errorf("notes %q, want %d", s.Notes, len(parts))
	}
	for _, part := range parts {
		if !slices.ContainsFunc(s.Notes, func(n string) bool { return strings.Contains(n, part) }) {
			t.Errorf("notes %q, want one with %q", s.Notes, part)
		}
	}
}

// TestZonesOfAllSources also follows each of them.
func TestZonesOfAllSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")), configMap(DefaultConfigMap, kubeadmCorefile),
			serviceCIDR("kubernetes", "172.21.0.0/16", "fd00:21::/108"), nodes("172.20.0.0/24")[0])
		f := run(t, c)
		s := f.next(t)
		want(t, s, false, "172.20.0.2:53")
		wantNotes(t, s)
		zones := names(s.Zones)
		if len(zones) != 4 || zones[0] != "cluster.local" || zones[1] != "21.172.in-addr.arpa" || zones[3] != "0.20.172.in-addr.arpa" {
			t.Errorf("zones %v", zones)
		}
		if d := cmp.Diff([]string{"Corefile kube-system/coredns", "ServiceCIDR kubernetes", "ServiceCIDR kubernetes", "podCIDRs of nodes"},
			[]string{s.Zones[0].Source, s.Zones[1].Source, s.Zones[2].Source, s.Zones[3].Source}); d != "" || s.Service != "kube-system/kube-dns" {
			t.Errorf("Service %s, sources -want +got:\n%s", s.Service, d)
		}
		f.none(t) // all of it was in the first one

		c.setCorefile(strings.ReplaceAll(kubeadmCorefile, "cluster.local", "k2s.test"))
		if s = f.next(t); s.Zones[0].Name != "k2s.test" || len(s.Zones) != 4 {
			t.Errorf("zones %v", names(s.Zones))
		}
		c.must(c.NetworkingV1().ServiceCIDRs().Create(t.Context(), serviceCIDR("more", "10.7.0.0/16"), metav1.CreateOptions{}))
		wantZones(t, f.next(t), "k2s.test", "21.172.in-addr.arpa", zones[2], "7.10.in-addr.arpa", "0.20.172.in-addr.arpa")
		if err := c.NetworkingV1().ServiceCIDRs().Delete(t.Context(), "kubernetes", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		wantZones(t, f.next(t), "k2s.test", "7.10.in-addr.arpa", "0.20.172.in-addr.arpa")
		second := nodes("", "172.20.1.0/24")[1]
		c.must(c.CoreV1().Nodes().Create(t.Context(), second, metav1.CreateOptions{}))
		wantZones(t, f.next(t), "k2s.test", "7.10.in-addr.arpa", "0.20.172.in-addr.arpa", "1.20.172.in-addr.arpa")

		// What a kubelet writes all the time is nothing new.
		second.ResourceVersion, second.Annotations = "77", map[string]string{"a": "b"}
		second.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady}}
		c.must(c.CoreV1().Nodes().Update(t.Context(), second, metav1.UpdateOptions{}))
		f.none(t)
	})
}

// TestBrokenCorefile: the last good zones stay, and a note says why.
func TestBrokenCorefile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")), configMap(DefaultConfigMap, kubeadmCorefile))
		f := run(t, c)
		wantZones(t, f.next(t), "cluster.local")

		c.setCorefile(".:53 {\n kubernetes other.test {\n")
		s := f.next(t)
		want(t, s, false, "172.20.0.2:53") // the endpoints are as good as before
		wantZones(t, s, "cluster.local")
		wantNotes(t, s, "Corefile of kube-system/coredns is broken")

		c.setCorefile(".:53 {\n kubernetes k2s.test\n}\n")
		s = f.next(t)
		wantZones(t, s, "k2s.test")
		wantNotes(t, s)

		if err := c.CoreV1().ConfigMaps(DefaultNamespace).Delete(t.Context(), DefaultConfigMap, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		s = f.next(t)
		wantZones(t, s, "k2s.test")
		wantNotes(t, s, "kube-system/coredns is gone")
	})
}

func TestCorefileBrokenFromTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := run(t, newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")), configMap(DefaultConfigMap, "{")))
		s := f.next(t)
		want(t, s, false, "172.20.0.2:53")
		wantZones(t, s)
		wantNotes(t, s, "its zones are not known")
	})
}

// TestPortOfCoreDNS: server blocks at other ports than the endpoints' are not theirs.
func TestPortOfCoreDNS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		at := func(s *discoveryv1.EndpointSlice, port int32) *discoveryv1.EndpointSlice {
			return withPorts(s, discoveryv1.EndpointPort{Name: new("dns"), Protocol: new(corev1.ProtocolUDP), Port: &port})
		}
		c := newCluster(t, kubeDNS("172.21.0.10"), at(slice("a", ready("172.20.0.2")), 1053),
			configMap(DefaultConfigMap, ".:1053 {\n kubernetes cluster.local\n}\n.:53 {\n kubernetes other.test\n}\nown.test {\n file db\n}"))
		f := run(t, c)
		wantZones(t, f.next(t), "cluster.local", "own.test")
		c.setSlice(at(slice("a", ready("172.20.0.2")), 53))
		wantZones(t, f.next(t), "other.test", "own.test")
		c.deleteSlice("a")
		s := f.next(t)
		want(t, s, true, "172.20.0.2:53")
		wantZones(t, s, "other.test", "own.test")
	})
}

// TestOptionalSources: what may not be read, or is not there, is a note.
func TestOptionalSources(t *testing.T) {
	notFound := func(resource string) func(clienttesting.Action) error {
		return func(a clienttesting.Action) error {
			if r := a.GetResource(); r.Resource == resource {
				return apierrors.NewNotFound(schema.GroupResource{Group: r.Group, Resource: r.Resource}, "")
			}
			return nil
		}
	}
	for name, tc := range map[string]struct {
		fail  func(clienttesting.Action) error
		zones []string
		notes []string
	}{
		"all forbidden": {forbid("configmaps", "servicecidrs", "nodes"), nil, []string{
			"not allowed to read configmaps coredns: the zones of the Corefile are not known; apply the RBAC manifest",
			"not allowed to read servicecidrs", "not allowed to read nodes: the reverse zones of pods",
		}},
		"nodes forbidden": {forbid("nodes"), []string{"cluster.local", "21.172.in-addr.arpa"}, []string{"not allowed to read nodes"}},
		"no such API": {notFound("servicecidrs"), []string{"cluster.local", "0.20.172.in-addr.arpa"}, []string{
			"no ServiceCIDR objects (Kubernetes 1.33 or later)"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")), configMap(DefaultConfigMap, kubeadmCorefile),
					serviceCIDR("kubernetes", "172.21.0.0/16"), nodes("172.20.0.0/24")[0])
				c.answer(tc.fail)
				f := run(t, c)
				s, err := f.WaitForSync(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				want(t, s, false, "172.20.0.2:53")
				wantZones(t, s, tc.zones...)
				wantNotes(t, s, tc.notes...)
				if err := f.LastError(); err != nil {
					t.Errorf("last error %v", err)
				}
				if logs := f.logs.FilterLevelExact(zapcore.WarnLevel).Len(); logs > 0 {
					t.Errorf("%d warnings", logs)
				}
				f.next(t)

				// Once it is allowed, it is read, without a restart.
				c.answer(nil)
				time.Sleep(time.Minute)
				s = f.next(t)
				wantZones(t, s, "cluster.local", "21.172.in-addr.arpa", "0.20.172.in-addr.arpa")
				wantNotes(t, s)
			})
		})
	}
}

// TestSettle: what does not come holds the first snapshot up for a while only, and
// what fails not at all. (A fake apiserver can't be slow: it has one lock.)
func TestSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWatcher(newCluster(t), Options{}.withDefaults(), "apiserver fake", defaultTimeouts)
		i, err := newOptional(serviceCIDRRequest(w.api, w.timeouts, w.health), &networkingv1.ServiceCIDR{}, w.look)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		settle(t.Context(), start.Add(5*time.Second), []informer{i, i})
		if d := time.Since(start); d != 5*time.Second {
			t.Errorf("waited %v", d)
		}
		failed := make(chan struct{})
		close(failed)
		i.failed = failed
		start = time.Now()
		settle(t.Context(), start.Add(5*time.Second), []informer{i, i})
		if d := time.Since(start); d != 0 {
			t.Errorf("waited %v for what has failed", d)
		}
	})
}

// TestNamedByTheUser: what the user has named is not asked for.
func TestNamedByTheUser(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
		f := runWith(t, c, Options{NoCorefile: true, NoServiceCIDRs: true, NoPodCIDRs: true})
		wantNotes(t, f.next(t))
		for _, a := range c.Actions() {
			if r := a.GetResource().Resource; r != resourceServices && r != resourceSlices {
				t.Errorf("asked for %s", r)
			}
		}
	})
}

// TestServiceByLabel finds the Service under another name, comes back to the usual
// one when the other goes, and looks for none when one was named.
func TestServiceByLabel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, dnsService(rkeService), of(rkeService, slice("r", ready("172.20.0.2"))),
			configMap(rkeService, ".:53 {\n kubernetes k2s.test\n}"), configMap(DefaultConfigMap, kubeadmCorefile))
		f := run(t, c)
		s := f.next(t)
		want(t, s, false, "172.20.0.2:53")
		wantZones(t, s, "k2s.test") // the ConfigMap of the Service's name
		wantNotes(t, s)
		if s.Service != "kube-system/"+rkeService {
			t.Errorf("Service %s", s.Service)
		}
		f.none(t)

		// It is replaced by the usual one: the old set stays until the new one is known.
		c.setSlice(slice("k", ready("172.20.0.7")))
		c.createService(dnsService(DefaultService))
		f.none(t)
		if err := c.CoreV1().Services(DefaultNamespace).Delete(t.Context(), rkeService, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		s = f.next(t)
		want(t, s, false, "172.20.0.7:53")
		wantZones(t, s, "cluster.local")

		// And all are gone: the last good set stays.
		c.deleteService()
		s = f.next(t)
		want(t, s, true, "172.20.0.7:53")
		wantZones(t, s, "cluster.local")
	})
}

func TestSeveralServicesByLabel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := dnsService("b-dns")
		c := newCluster(t, other, dnsService("a-dns"), of("a-dns", slice("a", ready("172.20.0.2"))), of("b-dns", slice("b", ready("172.20.0.3"))))
		c.must(c.CoreV1().ConfigMaps(DefaultNamespace).Create(t.Context(), configMap(DefaultConfigMap, kubeadmCorefile), metav1.CreateOptions{}))
		s := run(t, c).next(t)
		want(t, s, false, "172.20.0.2:53")
		wantNotes(t, s, "several Services have the label k8s-app=kube-dns (a-dns, b-dns): a-dns is followed")
	})
}

func TestNamedServiceIsNotSearched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, dnsService(rkeService), of(rkeService, slice("r", ready("172.20.0.2"))))
		f := runWith(t, c, Options{Namespace: DefaultNamespace, Service: "mine"})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := f.WaitForSync(ctx)
		if !errors.Is(err, ErrServiceNotFound) {
			t.Errorf("error %v", err)
		}
		checkLine(t, err, "kube-system/mine", "--dns-service")
		for _, a := range c.Actions() {
			if l, ok := a.(clienttesting.ListActionImpl); ok && !l.ListRestrictions.Labels.Empty() && a.GetResource().Resource == resourceServices {
				t.Errorf("searched: %v", a)
			}
		}
	})
}

// TestSearchForbidden: the error says that there may be another Service.
func TestSearchForbidden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, dnsService(rkeService))
		c.answer(func(a clienttesting.Action) error {
			if l, ok := a.(clienttesting.ListActionImpl); ok && l.ListRestrictions.Fields.Empty() {
				return forbid("services")(a)
			}
			return nil
		})
		f := run(t, c)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := f.WaitForSync(ctx)
		if !errors.Is(err, ErrServiceNotFound) {
			t.Errorf("error %v", err)
		}
		checkLine(t, err, "not allowed to list Services", "--dns-service")
	})
}

func TestPreferences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		on := func(e discoveryv1.Endpoint, node, zone string) discoveryv1.Endpoint {
			e.NodeName, e.Zone = &node, &zone
			e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
			return e
		}
		node := nodes("")[0]
		node.Labels = map[string]string{corev1.LabelTopologyZone: "east"}
		c := newCluster(t, kubeDNS("172.21.0.10"), node, configMap(DefaultConfigMap, kubeadmCorefile),
			slice("a", on(ready("172.20.0.1"), "n0", "east"), on(ready("172.20.0.2"), "n1", "east"), on(ready("172.20.0.3"), "n2", "west")))
		near := runWith(t, c, Options{Prefer: PreferNode, NodeName: "n0", NoPodCIDRs: true})
		zonal := runWith(t, c, Options{Prefer: PreferZone, NodeName: "n0", NoPodCIDRs: true})
		lost := runWith(t, c, Options{Prefer: PreferZone, NodeName: "n9", NoPodCIDRs: true})
		want(t, near.next(t), false, "172.20.0.1:53")
		want(t, zonal.next(t), false, "172.20.0.1:53", "172.20.0.2:53")
		s := lost.next(t)
		want(t, s, false, "172.20.0.1:53", "172.20.0.2:53", "172.20.0.3:53")
		wantNotes(t, s, "topology zone of node n9 is not known")

		// The one on this node is no longer ready, those in the zone go one by one.
		c.setSlice(slice("a", on(draining("172.20.0.1"), "n0", "east"), on(ready("172.20.0.2"), "n1", "east"), on(ready("172.20.0.3"), "n2", "west")))
		want(t, near.next(t), false, "172.20.0.2:53", "172.20.0.3:53")
		want(t, zonal.next(t), false, "172.20.0.2:53")
		c.setSlice(slice("a", on(draining("172.20.0.1"), "n0", "east"), on(ready("172.20.0.3"), "n2", "west")))
		want(t, zonal.next(t), false, "172.20.0.3:53")
	})
}

// rule is a rule of a Role, as the apiserver judges it.
type rule struct {
	APIGroups     []string `yaml:"apiGroups"`
	Resources     []string `yaml:"resources"`
	ResourceNames []string `yaml:"resourceNames"`
	Verbs         []string `yaml:"verbs"`
}

// manifestRules reads scripts/rbac.yaml: the rules by namespace, empty for all.
func manifestRules(t *testing.T) map[string][]rule {
	t.Helper()
	file, err := os.Open(filepath.Join("..", "..", "scripts", "rbac.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rules := make(map[string][]rule)
	for decoder := yaml.NewDecoder(file); ; {
		var object struct {
			Kind     string
			Metadata struct{ Name, Namespace string }
			Rules    []rule
		}
		if err := decoder.Decode(&object); err != nil {
			return rules
		}
		if object.Kind == "Role" || object.Kind == "ClusterRole" {
			rules[object.Metadata.Namespace] = append(rules[object.Metadata.Namespace], object.Rules...)
		}
	}
}

// TestManifestAllowsWhatIsAsked: every request is allowed by a rule of the RBAC
// manifest, and every rule is for a request.
func TestManifestAllowsWhatIsAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, selecting(kubeDNS("172.21.0.10")), slice("a", ready("172.20.0.2")), configMap(DefaultConfigMap, kubeadmCorefile),
			configMap("coredns-custom", ""), daemonSet("coredns", mounting("coredns", "/etc/coredns"), mounting("coredns-custom", "/etc/coredns/custom")))
		run(t, c).next(t)
		rules := manifestRules(t)
		used := make(map[string]bool)
		for _, a := range c.Actions() {
			name := ""
			switch a := a.(type) {
			case clienttesting.ListActionImpl:
				name, _ = a.ListRestrictions.Fields.RequiresExactMatch("metadata.name")
			case clienttesting.WatchActionImpl:
				name, _ = a.WatchRestrictions.Fields.RequiresExactMatch("metadata.name")
			}
			allowed := false
			for i, r := range rules[a.GetNamespace()] {
				if slices.Contains(r.APIGroups, a.GetResource().Group) && slices.Contains(r.Resources, a.GetResource().Resource) &&
					slices.Contains(r.Verbs, a.GetVerb()) && (r.ResourceNames == nil || slices.Contains(r.ResourceNames, name)) {
					allowed = true
					used[fmt.Sprint(a.GetNamespace(), i, a.GetVerb())] = true
				}
			}
			if !allowed {
				t.Errorf("the manifest does not allow %s of %s in %q", a.GetVerb(), a.GetResource(), a.GetNamespace())
			}
		}
		for namespace, all := range rules {
			for i, r := range all {
				for _, verb := range r.Verbs {
					if !used[fmt.Sprint(namespace, i, verb)] {
						t.Errorf("nobody needs %s of %v in %q", verb, r.Resources, namespace)
					}
				}
			}
		}
	})
}

// TestNodesComeInPages follows a server that pages, over the wire.
func TestNodesComeInPages(t *testing.T) {
	api := newAPI(t)
	pages := make(chan string, 16)
	srv := quietServer(t, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		switch {
		case r.URL.Path != "/api/v1/nodes":
			api.ServeHTTP(w, r)
		case q.Get("watch") != "":
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			start, _ := strconv.Atoi(q.Get("continue"))
			limit, err := strconv.Atoi(q.Get("limit"))
			if err != nil || q.Get("resourceVersion") != "" {
				t.Errorf("nodes asked with %v", q)
			}
			list := corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"}}
			for i := start; i < min(start+limit, 512); i++ {
				n := nodes(fmt.Sprintf("10.%d.%d.0/24", i/256, i%256))[0]
				n.Name = fmt.Sprint("n", i)
				list.Items = append(list.Items, *n)
			}
			if start+limit < 512 {
				list.Continue = strconv.Itoa(start + limit)
			}
			pages <- q.Get("continue")
			w.Header().Set("Content-Type", "application/json")
			if err := json.NewEncoder(w).Encode(list); err != nil {
				t.Error(err)
			}
		}
	}, (*httptest.Server).StartTLS)
	w, err := newFromKubeconfig(Options{
		Kubeconfig: serverKubeconfig(t, srv.URL, srv.Certificate()), Env: noEnv, NoCorefile: true, NoServiceCIDRs: true,
	}, defaultTimeouts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	defer func() { cancel(); <-done }()
	s, err := w.WaitForSync(ctx)
	if err != nil {
		t.Fatal(err)
	}
	wantZones(t, s, "0.10.in-addr.arpa", "1.10.in-addr.arpa")
	if len(pages) != 3 {
		t.Errorf("%d pages, want 3", len(pages))
	}
}
