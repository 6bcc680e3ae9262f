package discovery

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clienttesting "k8s.io/client-go/testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// consumer notes what it is told, in one line each.
type consumer struct {
	mu    sync.Mutex
	lines []string
}

func (c *consumer) tell(change cluster.Change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	line := map[cluster.Kind]string{
		cluster.KindService: "service", cluster.KindSlice: "slice", cluster.KindNamespace: "namespace",
		cluster.KindCorefile: "Corefile", cluster.KindSynced: "synced", cluster.KindLost: "lost",
	}[change.Kind]
	if change.Name != "" {
		line += " " + strings.TrimPrefix(change.Namespace+"/"+change.Name, "/")
	}
	for _, s := range []*cluster.Service{change.Service.Old, change.Service.New} {
		if s != nil {
			line += fmt.Sprint(" ", s.ClusterIPs)
		}
	}
	for _, s := range []*cluster.Slice{change.Slice.Old, change.Slice.New} {
		if s != nil {
			line += " " + s.Service
			for _, m := range s.Members {
				line += "," + m.Address.String()
			}
		}
	}
	if change.Gone {
		line += " gone"
	}
	c.lines = append(c.lines, line)
}

// next returns what was told since it was last called, those before the mark sorted: resources are read side by side.
func (c *consumer) next() []string {
	synctest.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	lines := c.lines
	c.lines = nil
	if n := len(lines); n > 0 && lines[n-1] == "synced" {
		slices.Sort(lines[:n-1])
	}
	return lines
}

func (c *consumer) want(t *testing.T, want ...string) {
	t.Helper()
	if got := c.next(); !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
}

func namespaceOf(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// others is a Service of another namespace.
func others(ip string) *corev1.Service {
	s := kubeDNS(ip)
	s.Namespace, s.Name = "default", "web"
	return s
}

func TestChangesAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2"), unready("172.20.0.3")), namespaceOf("default"))
		var told consumer
		f := runWith(t, c, Options{Changes: told.tell, NoCorefile: true})
		if got := f.Coherence().State; got != cluster.CoherenceLost {
			t.Errorf("state %v before anything is read", got)
		}
		time.Sleep(defaultTimeouts.spread)
		told.want(t, "namespace default", "service kube-system/kube-dns [172.21.0.10]", "slice kube-system/a kube-dns,172.20.0.2", "synced")
		if got := f.Coherence(); got.State != cluster.Coherent || got.Reason != "" {
			t.Errorf("%+v", got)
		}

		services := c.CoreV1().Services("default")
		c.must(services.Create(t.Context(), others("172.21.0.7"), metav1.CreateOptions{}))
		told.want(t, "service default/web [172.21.0.7]")
		same := others("172.21.0.7")
		same.Annotations = map[string]string{"a": "b"}
		c.must(services.Update(t.Context(), same, metav1.UpdateOptions{}))
		told.want(t)
		c.must(services.Update(t.Context(), others("172.21.0.8"), metav1.UpdateOptions{}))
		told.want(t, "service default/web [172.21.0.7] [172.21.0.8]")
		if err := services.Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		told.want(t, "service default/web [172.21.0.8] gone")
		c.setSlice(slice("a", ready("172.20.0.4")))
		told.want(t, "slice kube-system/a kube-dns,172.20.0.2 kube-dns,172.20.0.4")
		if err := c.CoreV1().Namespaces().Delete(t.Context(), "default", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		told.want(t, "namespace default gone")
		f.stop()
		if got := told.next(); len(got) != 1 || got[0] != "lost" {
			t.Errorf("told %q when Run ends", got)
		}
	})
}

// What was missed is told before the next mark.
func TestChangesAreMissed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
		var told consumer
		f := runWith(t, c, Options{Changes: told.tell, NoCorefile: true})
		time.Sleep(defaultTimeouts.spread)
		told.next()
		c.answer(always(apierrors.NewResourceExpired("too old")))
		c.cut()
		told.want(t, "lost")
		if got := f.Coherence(); got.State != cluster.CoherenceLost || got.Reason == "" {
			t.Errorf("%+v", got)
		}
		c.answer(nil)
		time.Sleep(2 * time.Minute)
		if got := told.next(); len(got) == 0 || got[len(got)-1] != "synced" {
			t.Errorf("told %q after the apiserver is back", got)
		}
	})
}

// What is not allowed keeps nobody from following the cluster's DNS.
func TestChangesForbidden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
		c.answer(func(a clienttesting.Action) error {
			if a.GetNamespace() == "" {
				return forbid("services", "endpointslices", "namespaces")(a)
			}
			return nil
		})
		var told consumer
		f := runWith(t, c, Options{Changes: told.tell, NoCorefile: true})
		want(t, f.next(t), false, "172.20.0.2:53")
		time.Sleep(time.Minute)
		told.want(t)
		if got := f.Coherence(); got.State != cluster.CoherenceForbidden || !strings.Contains(got.Reason, "scripts/rbac-coherence.yaml") {
			t.Errorf("%+v", got)
		}
		c.answer(nil)
		time.Sleep(3 * time.Minute)
		if got := told.next(); len(got) == 0 || got[len(got)-1] != "synced" || f.Coherence().State != cluster.Coherent {
			t.Errorf("told %q, %+v once it is allowed", got, f.Coherence())
		}
	})
}

func TestChangesAreOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
		f := run(t, c)
		time.Sleep(time.Minute)
		for _, a := range c.Actions() {
			if r := a.GetResource().Resource; r == resourceNamespaces || a.GetNamespace() == "" && (r == resourceServices || r == resourceSlices) {
				t.Errorf("asked to %s %s", a.GetVerb(), r)
			}
		}
		if got := f.Coherence().State; got != cluster.CoherenceOff {
			t.Errorf("state %v", got)
		}
	})
}
