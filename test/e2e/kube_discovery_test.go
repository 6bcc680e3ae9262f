package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const (
	readerName = "k2s-dnsbpf"
	readerUser = "system:serviceaccount:kube-system:k2s-dnsbpf"
)

// readKinds are the resources that the daemon reads.
var readKinds = []string{"services", "endpointslices", "configmaps", "servicecidrs", "nodes"}

// manifest is the RBAC manifest that users apply.
func manifest(t *testing.T) []byte {
	t.Helper()
	root, err := lab.Root()
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(root, "scripts", "rbac.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// reader gives host0 a kubeconfig of the identity in the RBAC manifest.
func reader(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	if err := c.Apply(t.Context(), manifest(t)); err != nil {
		t.Fatal(err)
	}
	file, err := c.AccountKubeconfig(t.Context(), cluster.System, readerName)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// requests are the daemon's, each once, as "verb URI".
func requests(t *testing.T, c *cluster.Cluster) (list []string) {
	t.Helper()
	all, err := c.Requests(readerUser)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		if r.Verb == "watch" && r.Stage != "ResponseStarted" {
			continue // its end
		}
		if r.Response.Code >= 400 {
			t.Errorf("%s %s: %d", r.Verb, r.URI, r.Response.Code)
		}
		list = append(list, r.Verb+" "+r.URI)
	}
	return list
}

// awaitZones waits until status has exactly these zones.
func (h *host) awaitZones(want ...string) {
	h.t.Helper()
	slices.Sort(want)
	eventually(h.t, "the zones are as the cluster says", func() error {
		var got []string
		for _, z := range h.status().Zones {
			got = append(got, strings.TrimSuffix(z.Name, "."))
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("zones are %v, want %v", got, want)
		}
		return nil
	})
}

// TestKubernetesDiscoveredZones: zones come from the Corefile, from ServiceCIDR objects and from Nodes, and follow each of them.
// All is read with the rights of the RBAC manifest, and nothing that is read is refused.
func TestKubernetesDiscoveredZones(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	const corefile = `.:53 {
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
    }
    forward . /etc/resolv.conf
}
k2s.internal:53 {
    file /etc/coredns/k2s.internal
}
corp.example:53 {
    forward . 192.0.2.53
}
`
	if err := c.SetCorefile(t.Context(), corefile); err != nil {
		t.Fatal(err)
	}
	h.attach([]string{"--kubeconfig", reader(t, c)})
	ranges := []string{
		"21.172.in-addr.arpa", "20.172.in-addr.arpa",
		"0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.2.0.0.0.0.d.f.ip6.arpa", "0.0.0.0.0.0.0.0.0.2.0.0.0.0.d.f.ip6.arpa",
	}
	h.awaitZones(append([]string{"cluster.local", "k2s.internal"}, ranges...)...)
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	before := h.dataplane()
	if m, err := h.Host().Query(t.Context(), "udp", hostDNS, "20.0.21.172.in-addr.arpa.", 12); err != nil || len(m.Answer) != 1 {
		t.Errorf("reverse name of a Service: %v %v", m, err)
	}
	if n := h.dataplane().rose(before, "host", "steered"); n != 1 {
		t.Errorf("the reverse name was steered %d times: %v", n, h.dataplane().Reasons)
	}

	t.Run("the Corefile changes", func(t *testing.T) {
		h := h.in(t)
		if err := c.SetCorefile(t.Context(), strings.ReplaceAll(corefile, "k2s.internal", "other.internal")); err != nil {
			t.Fatal(err)
		}
		h.awaitZones(append([]string{"cluster.local", "other.internal"}, ranges...)...)
		if err := c.SetCorefile(t.Context(), "broken {"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "status says that the Corefile can't be read", func() error {
			if out := h.run("status", "-o", "json").stdout; !strings.Contains(out, "Corefile") {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
		h.awaitZones(append([]string{"cluster.local", "other.internal"}, ranges...)...)
		if err := c.SetCorefile(t.Context(), corefile); err != nil {
			t.Fatal(err)
		}
		h.awaitZones(append([]string{"cluster.local", "k2s.internal"}, ranges...)...)
	})

	t.Run("a Node and a range of Services come", func(t *testing.T) {
		h := h.in(t)
		node := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "worker1"},
			Spec:       corev1.NodeSpec{PodCIDR: "10.244.7.0/24", PodCIDRs: []string{"10.244.7.0/24"}},
		}
		if _, err := c.Client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		more := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.97.0.0/16"}}}
		if _, err := c.Client.NetworkingV1().ServiceCIDRs().Create(t.Context(), more, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		h.awaitZones(append([]string{"cluster.local", "k2s.internal", "7.244.10.in-addr.arpa", "97.10.in-addr.arpa"}, ranges...)...)
		if err := c.Client.CoreV1().Nodes().Delete(t.Context(), node.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		h.awaitZones(append([]string{"cluster.local", "k2s.internal", "97.10.in-addr.arpa"}, ranges...)...)
	})

	h.healthy()
	asked := requests(t, c)
	for _, kind := range readKinds {
		if !slices.ContainsFunc(asked, func(r string) bool { return strings.Contains(r, "/"+kind) }) {
			t.Errorf("%s was not read: %q", kind, asked)
		}
	}
}

// TestKubernetesFewerRights: what is optional may be forbidden. It is a note in status, and no reason not to attach.
func TestKubernetesFewerRights(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	file := reader(t, c)
	if err := c.Client.RbacV1().ClusterRoleBindings().Delete(t.Context(), readerName, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	h.attach([]string{"--kubeconfig", file})
	h.awaitZones("cluster.local")
	h.healthy()
	if out := h.run("status").stdout; !strings.Contains(out, "nodes") || !strings.Contains(out, "servicecidrs") {
		t.Errorf("status does not say what may not be read:\n%s", out)
	}
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	// Allowed later, they are read without a new attach; client-go asks again after a while.
	if err := c.Apply(t.Context(), manifest(t)); err != nil {
		t.Fatal(err)
	}
	eventuallyIn(t, reconnect, "the zones are read", func() error {
		if n := len(h.status().Zones); n != 5 {
			return fmt.Errorf("%d zones", n)
		}
		return nil
	})
}

// TestKubernetesOtherDNSService: a distribution may call its Service as it likes.
func TestKubernetesOtherDNSService(t *testing.T) {
	h := raise(t, lab.Options{})
	c := cluster.Start(t, h.Lab, cluster.Options{})
	service := cluster.NewDNSService(nil)
	service.Name = "rke2-coredns-rke2-coredns"
	created, err := c.Client.CoreV1().Services(cluster.System).Create(t.Context(), service, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	slice := cluster.NewSlice(created, "rke2-4", lab.CoreDNS0v4)
	if _, err := c.Client.DiscoveryV1().EndpointSlices(cluster.System).Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, more := range [][]string{nil, {"--dns-service", "kube-system/rke2-coredns-rke2-coredns"}} {
		h.attach(discovered, more) // found by its label, or named
		if got := h.endpoints4(); !slices.Equal(got, []string{lab.CoreDNS0v4}) {
			t.Errorf("%v: endpoints are %v", more, got)
		}
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		h.detach()
	}
}

// revoke deletes the reader's ServiceAccount, so that its tokens are those of a former life, and waits until status says so.
func (h *host) revoke(c *cluster.Cluster) {
	h.t.Helper()
	if err := c.Client.CoreV1().ServiceAccounts(cluster.System).Delete(h.t.Context(), readerName, metav1.DeleteOptions{}); err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(h.t.Context(), 3*reconnect)
	defer cancel()
	// Watches that are open stay so; the next ones are refused.
	if err := errors.Join(c.KillAPIServer(ctx), c.StartAPIServer(ctx)); err != nil {
		h.t.Fatal(err)
	}
	eventuallyIn(h.t, 3*reconnect, "status names the refusal", func() error {
		if problems := strings.Join(h.status().Problems, "\n"); !strings.Contains(problems, "401") {
			return fmt.Errorf("problems: %q", problems)
		}
		return nil
	})
}

// well waits until status has no complaint.
func (h *host) well() {
	h.t.Helper()
	eventuallyIn(h.t, 3*reconnect, "all is well", func() error {
		if r := h.status(); !r.Healthy {
			return fmt.Errorf("%q", r.Problems)
		}
		return nil
	})
}

// TestKubernetesRevokedToken: the token of a ServiceAccount that is gone is refused, which status says; with a new one in its file
// all is well again. Meanwhile the last good endpoints stay.
func TestKubernetesRevokedToken(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	file := reader(t, c)
	h.attach([]string{"--kubeconfig", file})
	h.healthy()
	h.revoke(c)
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	reader(t, c)
	h.well()
}

// TestKubernetesRenewedKubeconfig: a token inside the kubeconfig is renewed there, and the next attach knows of it as well.
func TestKubernetesRenewedKubeconfig(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	reader(t, c)
	const file = cluster.Dir + "/renewed.kubeconfig"
	renew := func() {
		t.Helper()
		token, err := c.Token(t.Context(), cluster.System, readerName)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.WriteKubeconfig(h.Host(), file, "127.0.0.1", &clientapi.AuthInfo{Token: token}); err != nil {
			t.Fatal(err)
		}
	}
	renew()
	h.attach([]string{"--kubeconfig", file})
	h.healthy()
	if r := h.run("attach", "--kubeconfig", file, "--no-cache"); r.code != 0 || strings.TrimSpace(r.stdout) != "already attached" {
		t.Errorf("attach again: %v", r)
	}
	h.revoke(c)
	reader(t, c)
	renew()
	if r := h.run("attach", "--kubeconfig", file, "--no-cache"); r.code != 0 {
		t.Errorf("attach with the renewed token: %v", r)
	}
	h.well()
	setEndpoints(t, c, lab.CoreDNS1v4)
	h.follows(patience, lab.CoreDNS1v4)
}

// TestKubernetesOthersKubeconfig: a kubeconfig of an unprivileged user runs nothing and reads nothing with root's rights, not even if
// that came into it after an attach.
func TestKubernetesOthersKubeconfig(t *testing.T) {
	h, _ := onCluster(t, cluster.Options{})
	const (
		home  = "/run/lab/alice"
		file  = home + "/config"
		proof = "/run/lab/proof"
	)
	must(t, h.Host(), "mkdir", "-p", home)
	admin, err := h.Host().ReadFile(cluster.AdminKubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	write := func(content string) {
		t.Helper()
		if err := h.Host().WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		must(t, h.Host(), "chown", "-R", "4711", home)
	}
	write(string(admin))
	h.attach([]string{"--kubeconfig", file})
	h.healthy()
	for what, user := range map[string]string{
		"a command":    "{exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: [" + proof + "], interactiveMode: Never}}",
		"a token file": "{tokenFile: /etc/shadow}",
	} {
		before, _, _ := strings.Cut(string(admin), "users:")
		write(before + "users:\n- name: user\n  user: " + user + "\n")
		for _, args := range [][]string{{"check", "kubernetes.default.svc.cluster.local"}, {"attach", "--kubeconfig", file}} {
			r := h.run(args...)
			if said := r.stdout + r.stderr; !strings.Contains(said, "root won't") || !strings.Contains(said, "4711") {
				t.Errorf("%s, %s does not say that it is refused, and why: %v", what, args[0], r)
			}
		}
		if r := command(t, h.Host(), "test", "-e", proof); r.code == 0 {
			t.Fatalf("%s of another user was run as root", what)
		}
	}
	eventually(t, "status says what the daemon does not use", func() error {
		if problems := strings.Join(h.status().Problems, "\n"); !strings.Contains(problems, "root won't") {
			return fmt.Errorf("problems: %q", problems)
		}
		return nil
	})
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
}

// TestKubernetesHostileCorefile: whoever may edit one ConfigMap neither stops the hosts of the cluster nor takes everybody's names.
func TestKubernetesHostileCorefile(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	if err := c.SetCorefile(t.Context(), cluster.Corefile); err != nil {
		t.Fatal(err)
	}
	h.attach(discovered, ranges)
	served := h.status().Zones
	nested, zones := "(s0) {\n}\n", ".:53 {\n kubernetes cluster.local"
	for i := range 9 {
		nested += fmt.Sprintf("(s%d) {\n%s}\n", i+1, strings.Repeat(fmt.Sprintf(" import s%d\n", i), 40))
	}
	for i := range 20_000 {
		zones += fmt.Sprintf(" z%d.test", i)
	}
	for what, corefile := range map[string]string{"nested imports of nothing": nested + ".:53 {\n import s9\n}\n", "20,000 zones": zones + "\n}\n"} {
		if err := c.SetCorefile(t.Context(), corefile); err != nil {
			t.Fatal(err)
		}
		eventually(t, "status says that the Corefile costs too much: "+what, func() error {
			if out := h.run("status", "-o", "json").stdout; !strings.Contains(out, "too large") {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
		if got := h.status().Zones; !slices.Equal(got, served) {
			t.Errorf("%s: zones %v, want %v", what, got, served)
		}
		setEndpoints(t, c, lab.CoreDNS0v4)
		h.follows(patience, lab.CoreDNS0v4)
		setEndpoints(t, c, lab.CoreDNS0v4, lab.CoreDNS1v4)
		h.follows(patience, lab.CoreDNS0v4, lab.CoreDNS1v4)
	}
	if err := c.SetCorefile(t.Context(), cluster.Corefile+"com:53 org:53 co.uk:53 {\n file db\n}\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "status says that public suffixes are left out", func() error {
		if out := h.run("status", "-o", "json").stdout; strings.Count(out, "public suffix") != 3 {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	if got := h.status().Zones; !slices.Equal(got, served) {
		t.Errorf("zones %v, want %v", got, served)
	}
	h.healthy()
	h.detach()
}
