package discovery

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
)

var dnsLabels = map[string]string{dnsLabel: dnsLabelValue}

// selecting gives a Service the selector of CoreDNS.
func selecting(s *corev1.Service) *corev1.Service {
	s.Spec.Selector = dnsLabels
	return s
}

// volume is a volume and where a container has it.
type volume struct {
	source corev1.VolumeSource
	mount  corev1.VolumeMount
}

// mounting mounts a ConfigMap, of which only some keys at other paths if "key=path" are named.
func mounting(configMap, at string, items ...string) volume {
	source := &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: configMap}}
	for _, item := range items {
		key, path, _ := strings.Cut(item, "=")
		source.Items = append(source.Items, corev1.KeyToPath{Key: key, Path: path})
	}
	return volume{corev1.VolumeSource{ConfigMap: source}, corev1.VolumeMount{MountPath: at}}
}

func podTemplate(args []string, volumes []volume) corev1.PodTemplateSpec {
	pod := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: dnsLabels}}
	c := corev1.Container{Name: "coredns", Args: args}
	for i, v := range volumes {
		v.mount.Name = fmt.Sprint("v", i)
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: v.mount.Name, VolumeSource: v.source})
		c.VolumeMounts = append(c.VolumeMounts, v.mount)
	}
	pod.Spec.Containers = []corev1.Container{{Name: "sidecar"}, c}
	return pod
}

func deployment(name string, volumes ...volume) *appsv1.Deployment {
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: name},
		Spec:       appsv1.DeploymentSpec{Template: podTemplate([]string{"-conf", "/etc/coredns/Corefile"}, volumes)},
	}
}

func daemonSet(name string, volumes ...volume) *appsv1.DaemonSet {
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: name},
		Spec:       appsv1.DaemonSetSpec{Template: podTemplate([]string{"-conf=/etc/coredns/Corefile"}, volumes)},
	}
}

func withData(m *corev1.ConfigMap, key, text string) *corev1.ConfigMap {
	m.Data[key] = text
	return m
}

func labelledMap(m *corev1.ConfigMap) *corev1.ConfigMap {
	m.Labels = dnsLabels
	return m
}

// serving is a Corefile with one zone of the kubernetes plugin.
func serving(zone string) string { return ".:53 {\n kubernetes " + zone + "\n}\n" }

// TestCorefileIsFound: where the workload mounts it, then by the usual names, then by label, and a note if nowhere.
func TestCorefileIsFound(t *testing.T) {
	custom := serving("k2s.internal") + "import custom/*.server\n"
	for name, tc := range map[string]struct {
		objects []runtime.Object
		fail    func(clienttesting.Action) error
		options Options
		zones   []string
		notes   []string
	}{
		"where the Deployment mounts it": {objects: []runtime.Object{
			configMap("coredns", serving("wrong.test")), configMap("mine", serving("k2s.internal")), deployment("dns", mounting("mine", "/etc/coredns"))},
			zones: []string{"k2s.internal"}},
		"where the DaemonSet mounts it": {objects: []runtime.Object{
			configMap("coredns", serving("wrong.test")), configMap("mine", serving("k2s.internal")), daemonSet("dns", mounting("mine", "/etc/coredns"))},
			zones: []string{"k2s.internal"}},
		"another key": {objects: []runtime.Object{
			withData(configMap("mine", serving("wrong.test")), "cf", serving("k2s.internal")), deployment("dns", mounting("mine", "/etc/coredns", "cf=Corefile"))},
			zones: []string{"k2s.internal"}},
		"a single file": {objects: []runtime.Object{
			withData(configMap("mine", serving("wrong.test")), "cf", serving("k2s.internal")),
			deployment("dns", func() volume {
				v := mounting("mine", "/etc/coredns/Corefile")
				v.mount.SubPath = "cf"
				return v
			}())},
			zones: []string{"k2s.internal"}},
		"a projected volume": {objects: []runtime.Object{
			configMap("mine", serving("k2s.internal")),
			deployment("dns", volume{corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{
				ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "mine"}}}}}},
				corev1.VolumeMount{MountPath: "/etc/coredns/"}})},
			zones: []string{"k2s.internal"}},
		"a directory of several": {objects: []runtime.Object{
			withData(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: "extra"}, Data: map[string]string{}}, "a.server", "corp.example {\n file db\n}\n"),
			configMap("mine", serving("k2s.internal")+"import *.server\n"), configMap("coredns", serving("wrong.test")),
			deployment("dns", volume{corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "extra"}}},
				{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "mine"}}}}}},
				corev1.VolumeMount{MountPath: "/etc/coredns"}})},
			zones: []string{"k2s.internal", "corp.example"}},
		"it names no zone": {objects: []runtime.Object{configMap("coredns", ".:53 {\n kubernetai cluster.local\n forward . 10.0.0.1\n}")},
			notes: []string{"names no zone that CoreDNS answers itself"}},
		"K3s, AKS: servers in coredns-custom": {objects: []runtime.Object{
			configMap("coredns", custom), deployment("dns", mounting("coredns", "/etc/coredns", "Corefile=Corefile"), mounting("coredns-custom", "/etc/coredns/custom")),
			withData(withData(configMap("coredns-custom", ""), "corp.server", "corp.example {\n file db\n}\n"), "x.override", "bad {")},
			zones: []string{"k2s.internal", "corp.example"}},
		"K3s, AKS: overrides in coredns-custom": {objects: []runtime.Object{
			configMap("coredns", ".:53 {\n kubernetes cluster.local\n import /etc/coredns/custom/*.override\n}\n"),
			deployment("dns", mounting("coredns", "/etc/coredns"), mounting("coredns-custom", "/etc/coredns/custom")),
			withData(configMap("coredns-custom", ""), "a.override", "file db corp.example\nforward . 192.0.2.1")},
			zones: []string{"cluster.local", "corp.example"}},
		"no coredns-custom": {objects: []runtime.Object{
			configMap("coredns", custom), deployment("dns", mounting("coredns", "/etc/coredns"), mounting("coredns-custom", "/etc/coredns/custom"))},
			zones: []string{"k2s.internal"}},
		"coredns-custom forbidden": {objects: []runtime.Object{
			configMap("coredns", custom), deployment("dns", mounting("coredns", "/etc/coredns"), mounting("coredns-custom", "/etc/coredns/custom"))},
			fail: func(a clienttesting.Action) error {
				if l, ok := a.(clienttesting.ListActionImpl); ok && strings.Contains(l.ListRestrictions.Fields.String(), "coredns-custom") {
					return forbid("configmaps")(a)
				}
				return nil
			},
			zones: []string{"k2s.internal"}, notes: []string{"not allowed to read configmaps coredns-custom", "imports custom/*.server, which can't be seen"}},
		"fewer rights": {objects: []runtime.Object{configMap("coredns", serving("k2s.internal")), deployment("dns", mounting("coredns", "/etc/coredns"))},
			fail:  forbid("deployments", "daemonsets"),
			zones: []string{"k2s.internal"}, notes: []string{"not allowed to read deployments", "not allowed to read daemonsets"}},
		"no workload: the usual name": {objects: []runtime.Object{configMap("coredns", serving("k2s.internal")), configMap("kube-dns", serving("wrong.test"))},
			zones: []string{"k2s.internal"}},
		"the Service's name": {objects: []runtime.Object{configMap("kube-dns", serving("k2s.internal"))}, zones: []string{"k2s.internal"}},
		"GKE's kube-dns has none": {objects: []runtime.Object{
			withData(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: "kube-dns"}, Data: map[string]string{}}, "stubDomains", "{}")},
			notes: []string{"no Corefile was found in kube-system (looked at ConfigMap coredns, ConfigMap kube-dns, those with the label k8s-app)"}},
		"by label": {objects: []runtime.Object{labelledMap(configMap("eks", serving("k2s.internal")))}, zones: []string{"k2s.internal"}},
		"named": {objects: []runtime.Object{configMap("coredns", serving("wrong.test")), configMap("mine", custom),
			withData(configMap("coredns-custom", ""), "corp.server", "corp.example {\n file db\n}\n"),
			deployment("dns", mounting("coredns", "/etc/coredns"), mounting("coredns-custom", "/etc/coredns/custom"))},
			options: Options{ConfigMap: "mine"}, zones: []string{"k2s.internal", "corp.example"}},
		"named, and not there": {objects: []runtime.Object{configMap("coredns", serving("wrong.test"))},
			options: Options{ConfigMap: "mine"}, notes: []string{"no Corefile was found in kube-system (looked at ConfigMap mine)"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, append(tc.objects, selecting(kubeDNS("172.21.0.10")), slice("a", ready("172.20.0.2")))...)
				c.answer(tc.fail)
				tc.options.NoPodCIDRs, tc.options.NoServiceCIDRs = true, true
				s := runWith(t, c, tc.options).next(t)
				want(t, s, false, "172.20.0.2:53")
				wantZones(t, s, tc.zones...)
				wantNotes(t, s, tc.notes...)
			})
		})
	}
}

// TestZonesBeforeEndpoints: as long as CoreDNS has no endpoint its port is not known. Its names go nowhere else meanwhile.
func TestZonesBeforeEndpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a"), configMap(DefaultConfigMap, serving("k2s.internal")+"other.test:5353 {\n file db\n}"))
		f := run(t, c)
		wantZones(t, f.next(t), "k2s.internal", "other.test")
		c.setSlice(slice("a", ready("172.20.0.2")))
		s := f.next(t)
		wantZones(t, s, "k2s.internal")
		if len(s.Problems) > 0 {
			t.Errorf("problems %q", s.Problems)
		}
	})
}

// TestCustomIsFollowed: what a Corefile imports changes too.
func TestCustomIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, selecting(kubeDNS("172.21.0.10")), slice("a", ready("172.20.0.2")),
			configMap("coredns", kubeadmCorefile+"import custom/*.server\n"),
			deployment("coredns", mounting("coredns", "/etc/coredns"), mounting("coredns-custom", "/etc/coredns/custom")))
		f := run(t, c)
		wantZones(t, f.next(t), "cluster.local")
		m := withData(configMap("coredns-custom", ""), "a.server", "corp.example {\n file db\n}\n")
		c.must(c.CoreV1().ConfigMaps(DefaultNamespace).Create(t.Context(), m, metav1.CreateOptions{}))
		wantZones(t, f.next(t), "cluster.local", "corp.example")
		m = withData(configMap("coredns-custom", ""), "a.server", "corp.example {\n file db\n")
		c.must(c.CoreV1().ConfigMaps(DefaultNamespace).Update(t.Context(), m, metav1.UpdateOptions{}))
		s := f.next(t)
		wantZones(t, s, "cluster.local", "corp.example")
		wantNotes(t, s, "is broken")
	})
}

// TestLostZones: a zone that was served and no longer is, is a problem; it stays where the Corefile is not clear about it.
func TestLostZones(t *testing.T) {
	for name, tc := range map[string]struct {
		next    string
		zones   []string
		problem string
	}{
		"another domain":       {serving("k2s.internal"), []string{"k2s.internal"}, "no longer names go to this host's own servers: cluster.local;"},
		"none of the cluster":  {".:53 {\n forward . /etc/resolv.conf\n}", []string{"cluster.local", "own.example"}, "stay in use: cluster.local, own.example;"},
		"a variable":           {serving("{$DOMAIN}"), []string{"cluster.local", "own.example"}, "stay in use: cluster.local, own.example;"},
		"no name":              {serving("cluster_local:domain"), []string{"cluster.local", "own.example"}, "stay in use: cluster.local, own.example;"},
		"written another way":  {serving("dns://Cluster.Local.:53") + "own.example.:53 {\n file db\n}", []string{"cluster.local", "own.example"}, ""},
		"an import of unknown": {serving("k2s.internal") + "import /elsewhere/*", []string{"k2s.internal", "cluster.local", "own.example"}, "stay in use: cluster.local, own.example;"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				first := serving("cluster.local") + "own.example {\n file db\n}"
				c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")), configMap(DefaultConfigMap, first))
				f := run(t, c)
				if s := f.next(t); len(s.Problems) > 0 {
					t.Errorf("problems %q", s.Problems)
				}
				c.setCorefile(tc.next)
				if tc.problem == "" {
					f.none(t)
					return
				}
				s := f.next(t)
				wantZones(t, s, tc.zones...)
				if len(s.Problems) == 0 || !strings.Contains(s.Problems[0], tc.problem) {
					t.Errorf("problems %q, want one with %q", s.Problems, tc.problem)
				}
				if told := strings.Join(append(s.Problems, s.Notes...), "|"); !strings.Contains(told, "own.example") {
					t.Errorf("nothing is said of own.example: %q", told)
				}
				c.setCorefile(first)
				s = f.next(t)
				wantZones(t, s, "cluster.local", "own.example")
				if told := strings.Join(s.Problems, "|"); strings.Contains(told, "cluster.local") || strings.Contains(told, "own.example") {
					t.Errorf("problems %q of zones that are back", s.Problems)
				}
			})
		})
	}
}

// TestWhichService: of several Services with the label it is the one that Pods ask.
func TestWhichService(t *testing.T) {
	at := func(s *corev1.Service, ip string) *corev1.Service {
		s.Spec.ClusterIP, s.Spec.ClusterIPs = ip, []string{ip}
		return s
	}
	metrics := dnsService("a-metrics")
	metrics.Spec.Ports = metrics.Spec.Ports[:1]
	alias := kubeDNS()
	alias.Spec.Type, alias.Spec.ExternalName = corev1.ServiceTypeExternalName, "dns.example.org"
	headless := kubeDNS("None")
	for name, tc := range map[string]struct {
		objects []runtime.Object
		want    string
		note    string
	}{
		"RKE2 with NodeLocal DNSCache": {[]runtime.Object{at(dnsService("kube-dns-upstream"), "10.43.77.9"), at(dnsService(rkeService), "10.43.0.10")}, rkeService, "the tenth of the Services'"},
		"the ranges are known":         {[]runtime.Object{at(dnsService("a"), "10.43.7.10"), at(dnsService("b"), "10.43.0.10"), serviceCIDR("kubernetes", "10.43.0.0/16")}, "b", "the tenth of the Services'"},
		"a range within an octet":      {[]runtime.Object{at(dnsService("a"), "10.43.0.10"), at(dnsService("b"), "10.43.0.138"), serviceCIDR("kubernetes", "10.43.0.128/25")}, "b", "the tenth of the Services'"},
		"its own ConfigMap":            {[]runtime.Object{at(dnsService("a"), "10.233.0.4"), at(dnsService("b"), "10.233.0.3"), configMap("b", kubeadmCorefile)}, "b", "since a ConfigMap of its name has a Corefile"},
		"neither":                      {[]runtime.Object{at(dnsService("b"), "10.233.0.4"), at(dnsService("a"), "10.233.0.3")}, "a", "as the first by name"},
		"headless beside":              {[]runtime.Object{at(dnsService("a"), "None"), at(dnsService("b"), "10.233.0.3")}, "b", "as the first by name of those with an address"},
		"metrics beside":               {[]runtime.Object{metrics, at(dnsService("b"), "10.233.0.3")}, "b", ""},
		"an alias named kube-dns":      {[]runtime.Object{alias, at(dnsService("b"), "10.233.0.3")}, "b", ""},
		"headless kube-dns beside":     {[]runtime.Object{headless, at(dnsService("b"), "10.233.0.3")}, "b", "(b, kube-dns): b is followed"},
		"headless kube-dns alone":      {[]runtime.Object{headless}, DefaultService, ""},
		"kube-dns for TCP only":        {[]runtime.Object{func() runtime.Object { s := kubeDNS("10.43.0.10"); s.Spec.Ports = s.Spec.Ports[:2]; return s }(), at(dnsService("b"), "10.43.0.11")}, "b", ""},
		"kube-dns comes first":         {[]runtime.Object{kubeDNS("10.233.0.3"), at(dnsService("b"), "10.233.0.10")}, DefaultService, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				objects := append(tc.objects, of(tc.want, slice("s", ready("172.20.0.2"))), configMap(DefaultConfigMap, kubeadmCorefile))
				s := runWith(t, newCluster(t, objects...), Options{NoPodCIDRs: true}).next(t)
				want(t, s, false, "172.20.0.2:53")
				if s.Service != DefaultNamespace+"/"+tc.want {
					t.Errorf("Service %s", s.Service)
				}
				if notes := strings.Join(s.Notes, "|"); (notes == "") != (tc.note == "") || !strings.Contains(notes, tc.note) {
					t.Errorf("notes %q, want one with %q", notes, tc.note)
				}
			})
		})
	}
}

// TestAliasAlone: the error says what kube-dns is.
func TestAliasAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alias := kubeDNS()
		alias.Spec.Type, alias.Spec.ExternalName = corev1.ServiceTypeExternalName, "dns.example.org"
		f := run(t, newCluster(t, alias))
		s := f.next(t)
		if !s.Stale || !strings.Contains(s.Reason, "an alias of an external name") {
			t.Errorf("reason %q", s.Reason)
		}
	})
}
