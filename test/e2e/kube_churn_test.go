package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// reconnect is how long a client of the apiserver may need to notice that it is back: client-go waits ever longer.
const reconnect = time.Minute

// onCluster is a host in a lab with a cluster whose DNS is the lab's own two CoreDNS.
func onCluster(t *testing.T, options cluster.Options) (*host, *cluster.Cluster) {
	t.Helper()
	h := raise(t, lab.Options{})
	c := cluster.Start(t, h.Lab, options)
	if err := c.CreateDNS(t.Context()); err != nil {
		t.Fatal(err)
	}
	return h, c
}

// setEndpoints replaces the IPv4 endpoints of kube-dns.
func setEndpoints(t *testing.T, c *cluster.Cluster, addresses ...string) {
	t.Helper()
	slices := c.Client.DiscoveryV1().EndpointSlices(cluster.System)
	slice, err := slices.Get(t.Context(), "kube-dns-4", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	slice.Endpoints = cluster.NewSlice(cluster.NewDNSService(nil), slice.Name, addresses...).Endpoints
	if _, err := slices.Update(t.Context(), slice, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// endpoints4 are the IPv4 endpoints that status names.
func (h *host) endpoints4() (list []string) {
	for _, e := range h.dataplane().Endpoints {
		if address, _, ok := strings.Cut(e.Address, ":"); ok && !strings.HasPrefix(e.Address, "[") {
			list = append(list, address)
		}
	}
	slices.Sort(list)
	return list
}

// follows waits until status has exactly these IPv4 endpoints, for at most the given time.
func (h *host) follows(limit time.Duration, want ...string) {
	h.t.Helper()
	slices.Sort(want)
	eventuallyIn(h.t, limit, "status has the cluster's endpoints", func() error {
		if got := h.endpoints4(); !slices.Equal(got, want) {
			return fmt.Errorf("endpoints are %v, want %v", got, want)
		}
		return nil
	})
}

// TestKubernetesChangeAtABadTime: a change that the daemon can't put into effect just then is put into effect later.
func TestKubernetesChangeAtABadTime(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	h.attach(discovered, ranges)
	h.follows(reconnect, lab.CoreDNS0v4, lab.CoreDNS1v4)
	pid := h.healthy().PID
	limit := func(soft string) { must(t, h.Host(), "prlimit", "--pid", fmt.Sprint(pid), "--nofile="+soft+":") }
	limit("3")
	setEndpoints(t, c, lab.CoreDNS1v4)
	eventually(t, "the daemon has no descriptor to find the way with", func() error {
		log, err := h.Host().ReadFile("/run/k2s-dnsbpf/daemon.log")
		if err == nil && !strings.Contains(string(log), "list interfaces: too many open files") {
			err = errors.New(string(log))
		}
		return err
	})
	limit("1024")
	h.follows(reconnect, lab.CoreDNS1v4)
	h.confirmed()
	h.works()
	h.detach()
}

// stale waits until status says that the endpoints can't be confirmed, and returns what it says.
func (h *host) stale() (problem string) {
	h.t.Helper()
	eventuallyIn(h.t, reconnect, "status says that the endpoints can't be confirmed", func() error {
		for _, p := range h.status().Problems {
			if strings.Contains(p, "endpoints") {
				problem = p
				return nil
			}
		}
		return fmt.Errorf("status names no problem with the endpoints: %q", h.status().Problems)
	})
	return problem
}

// confirmed waits until status is healthy again.
func (h *host) confirmed() {
	h.t.Helper()
	eventuallyIn(h.t, reconnect, "all is well again", func() error {
		if r := h.status(); !r.Healthy {
			return fmt.Errorf("not healthy: %q", r.Problems)
		}
		return nil
	})
}

// TestKubernetesClusterChurn is what happens to an apiserver in a year. Whatever it is, the last good set stays in use, and what
// comes after it is followed.
func TestKubernetesClusterChurn(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	h.attach(discovered, ranges, []string{"--pods", "cni0"})
	both := []string{lab.CoreDNS0v4, lab.CoreDNS1v4}
	h.follows(patience, both...)
	do := func(t *testing.T, f func(context.Context) error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), reconnect)
		defer cancel()
		if err := f(ctx); err != nil {
			t.Fatal(err)
		}
	}

	t.Run("an endpoint goes and comes", func(t *testing.T) {
		h := h.in(t)
		setEndpoints(t, c, lab.CoreDNS1v4)
		h.follows(patience, lab.CoreDNS1v4)
		setEndpoints(t, c, both...)
		h.follows(patience, both...)
	})

	t.Run("not ready", func(t *testing.T) {
		h := h.in(t)
		slices := c.Client.DiscoveryV1().EndpointSlices(cluster.System)
		slice, err := slices.Get(t.Context(), "kube-dns-4", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		slice.Endpoints[0].Conditions.Ready = new(false)
		slice.Endpoints[1].Conditions.Ready = nil // means yes
		if _, err := slices.Update(t.Context(), slice, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		h.follows(patience, slice.Endpoints[1].Addresses[0])
		setEndpoints(t, c, both...)
		h.follows(patience, both...)
	})

	t.Run("no endpoints for a moment", func(t *testing.T) {
		h := h.in(t)
		setEndpoints(t, c)
		// The IPv6 slice still has endpoints, so IPv4 has none; with that gone too, the last good set stays.
		slices := c.Client.DiscoveryV1().EndpointSlices(cluster.System)
		setEndpoints(t, c, both...)
		h.follows(patience, both...)
		if err := slices.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		h.stale()
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		service := cluster.NewDNSService(nil)
		for _, slice := range []*discoveryv1.EndpointSlice{
			cluster.NewSlice(service, "kube-dns-4", both...), cluster.NewSlice(service, "kube-dns-6", lab.CoreDNS0v6, lab.CoreDNS1v6),
		} {
			if _, err := slices.Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		h.follows(patience, both...)
		h.confirmed()
	})

	t.Run("scaled to zero", func(t *testing.T) {
		h := h.in(t)
		outside := queries(t, h.outside()...)
		slices := c.Client.DiscoveryV1().EndpointSlices(cluster.System)
		six, err := slices.Get(t.Context(), "kube-dns-6", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		setEndpoints(t, c)
		were := six.Endpoints
		six.Endpoints = nil
		if six, err = slices.Update(t.Context(), six, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "status knows that there is nobody", func() error {
			if d := h.dataplane(); len(d.Endpoints) > 0 || d.Healthy || !strings.Contains(strings.Join(d.Problems, "\n"), "has no ready endpoint") {
				return fmt.Errorf("endpoints %v, problems %q", d.Endpoints, d.Problems)
			}
			return nil
		})
		for _, server := range []netip.AddrPort{hostDNS, hostDNS6} {
			if err := h.unserved(h.Host(), server); err != nil {
				t.Error(err)
			}
		}
		h.check(lab.Backend, "coredns-unknown", "has no ready endpoint")
		// So it stays while nobody can be asked.
		do(t, c.KillAPIServer)
		eventuallyIn(t, reconnect, "the apiserver is missed", func() error {
			if problems := strings.Join(h.status().Problems, "\n"); !strings.Contains(problems, "can't be confirmed") {
				return fmt.Errorf("%s", problems)
			}
			return nil
		})
		if err := h.unserved(h.Host(), hostDNS); err != nil {
			t.Error(err)
		}
		do(t, c.StartAPIServer)
		six.Endpoints = were
		if _, err := slices.Update(t.Context(), six, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		setEndpoints(t, c, both...)
		h.follows(reconnect, both...)
		h.confirmed()
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		if n := queries(t, h.outside()...) - outside; n != 0 {
			t.Errorf("the external servers saw %d queries", n)
		}
	})

	t.Run("the apiserver restarts", func(t *testing.T) {
		h := h.in(t)
		do(t, c.StopAPIServer)
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		do(t, c.StartAPIServer)
		setEndpoints(t, c, lab.CoreDNS0v4)
		h.follows(reconnect, lab.CoreDNS0v4)
		setEndpoints(t, c, both...)
		h.follows(reconnect, both...)
		h.confirmed()
	})

	t.Run("the apiserver is gone", func(t *testing.T) {
		h := h.in(t)
		do(t, c.KillAPIServer)
		problem := h.stale()
		if !strings.Contains(problem, " old") {
			t.Errorf("the problem does not say how old the endpoints are: %q", problem)
		}
		if got := h.endpoints4(); !slices.Equal(got, both) {
			t.Errorf("endpoints are %v, want %v", got, both)
		}
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		do(t, c.StartAPIServer)
		h.confirmed()
	})

	t.Run("410 Gone", func(t *testing.T) {
		h := h.in(t)
		// Cut off the daemon alone, so that it misses more than the apiserver remembers after its restart.
		do(t, func(ctx context.Context) error { return h.cutOff(ctx, true) })
		setEndpoints(t, c, lab.CoreDNS0v4)
		for i := range 200 {
			setEndpoints(t, c, []string{lab.CoreDNS0v4, lab.CoreDNS1v4}[i%2])
		}
		do(t, c.KillAPIServer)
		do(t, c.StartAPIServer)
		setEndpoints(t, c, lab.CoreDNS1v4)
		do(t, func(ctx context.Context) error { return h.cutOff(ctx, false) })
		h.follows(2*reconnect, lab.CoreDNS1v4)
		setEndpoints(t, c, both...)
		h.follows(reconnect, both...) // what it follows until now may be from before the cut
		h.confirmed()
	})

	t.Run("the Service has another address", func(t *testing.T) {
		h := h.in(t)
		services := c.Client.CoreV1().Services(cluster.System)
		if err := services.Delete(t.Context(), cluster.DNSService, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		const other = "172.21.0.99"
		service := cluster.NewDNSService(nil)
		service.Spec.IPFamilyPolicy, service.Spec.IPFamilies = nil, []corev1.IPFamily{corev1.IPv4Protocol}
		service.Spec.ClusterIP, service.Spec.ClusterIPs = other, []string{other}
		if _, err := services.Create(t.Context(), service, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		// It is intercepted at the pods' interface, in place of the old one.
		eventually(t, "the new address is steered to", func() error {
			raw, err := ask(h.Pod("app"), netip.MustParseAddrPort(other+":53"), pack(t, 1, lab.Backend, dns.TypeA), noReply)
			if err != nil {
				return err
			}
			return isAddress(raw, lab.Backend4)
		})
		if raw, err := ask(h.Pod("app"), clusterDNS, pack(t, 2, lab.Backend, dns.TypeA), noReply); raw != nil || err != nil {
			t.Errorf("the old address still answers: %s %v", text(raw), err)
		}
		h.follows(patience, both...)
	})

	t.Run("the certificate is renewed", func(t *testing.T) {
		h := h.in(t)
		if err := c.RenewServerCertificate(time.Hour); err != nil {
			t.Fatal(err)
		}
		do(t, c.KillAPIServer)
		do(t, c.StartAPIServer)
		setEndpoints(t, c, lab.CoreDNS0v4)
		h.follows(reconnect, lab.CoreDNS0v4)
		setEndpoints(t, c, both...)
		h.follows(reconnect, both...)
		h.confirmed()
	})
}

// cutOff drops what the daemon sends to the apiserver, or lets it pass again. The test's own client uses another address.
func (h *host) cutOff(ctx context.Context, cut bool) error {
	if !cut {
		return h.Host().Run(ctx, "nft", "delete", "table", "ip", "cut")
	}
	return h.Host().Run(ctx, "nft", "add table ip cut; add chain ip cut out { type filter hook output priority 0; }; "+
		"add rule ip cut out ip daddr "+lab.KubeSwitch4+" tcp dport 6443 drop")
}

// TestKubernetesSlowAPIServer: nothing is programmed before the first answer, and attach waits for it as long as it may.
func TestKubernetesSlowAPIServer(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	before := h.snapshot()
	if err := c.PauseAPIServer(); err != nil {
		t.Fatal(err)
	}
	r := h.run(append([]string{"attach", "--wait", "2s"}, discovered...)...)
	if r.code != 1 || !strings.Contains(r.stderr, "apiserver") {
		t.Errorf("an apiserver that does not answer: %v", r)
	}
	if err := c.ResumeAPIServer(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what has waited for the apiserver is answered", func() error {
		if out := must(t, h.Host(), "ss", "-Hlnt", "sport = :6443"); strings.Fields(out)[1] != "0" {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	h.unchanged(before)

	if err := c.PauseAPIServer(); err != nil {
		t.Fatal(err)
	}
	done := make(chan result, 1)
	go func() { done <- h.run(append([]string{"attach", "--wait", "60s"}, discovered...)...) }()
	eventually(t, "the attach is on its way", func() error {
		if out := command(t, h.Host(), "pgrep", "-x", "k2s-dnsbpf").stdout; out == "" {
			return fmt.Errorf("no process")
		}
		return nil
	})
	if err := c.ResumeAPIServer(); err != nil {
		t.Fatal(err)
	}
	if r := <-done; r.code != 0 {
		t.Fatal(r)
	}
	h.healthy()
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
}

// TestKubernetesRestoredEtcd: after a restore of etcd resource versions go back, and a watch from one that is yet to come is silent.
// The endpoints are those of the restored state, and changes of it are followed, long before that version is reached.
func TestKubernetesRestoredEtcd(t *testing.T) {
	h, c := onCluster(t, cluster.Options{})
	h.attach(discovered, ranges)
	both := []string{lab.CoreDNS0v4, lab.CoreDNS1v4}
	h.follows(patience, both...)
	ctx, cancel := context.WithTimeout(t.Context(), 4*reconnect)
	defer cancel()
	if err := c.Snapshot(ctx); err != nil {
		t.Fatal(err)
	}
	h.confirmed()
	for range 20 {
		setEndpoints(t, c, lab.CoreDNS0v4)
		setEndpoints(t, c, lab.CoreDNS1v4)
	}
	h.follows(patience, lab.CoreDNS1v4)
	if err := c.Restore(ctx); err != nil {
		t.Fatal(err)
	}
	h.follows(2*reconnect, both...)
	h.confirmed()
	setEndpoints(t, c, lab.CoreDNS0v4)
	h.follows(patience, lab.CoreDNS0v4)
}
