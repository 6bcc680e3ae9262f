package coherence

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	kube "github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const account = "system:serviceaccount:kube-system:k2s-dnsbpf"

// TestKubernetesPermitted begins without the right to follow all Services, gets it, and loses the apiserver for a while.
func TestKubernetesPermitted(t *testing.T) {
	l := lab.Start(t, lab.Options{NoServers: true})
	c := kube.Start(t, l, kube.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	w := &world{t: t, ctx: ctx, c: c, state: coherence.New(zone)}
	w.must(nil, c.CreateDNS(ctx))
	w.apply("rbac.yaml")
	config, err := c.AccountKubeconfig(ctx, kube.System, "k2s-dnsbpf")
	w.must(config, err)
	w.listen(config)
	w.must(nil, kube.Eventually(ctx, func(context.Context) error {
		if w.requests(403, "/api/v1/services?") == 0 || w.requests(200, "/api/v1/namespaces/kube-system/services?") == 0 {
			return errors.New("all Services are not asked for, or the own one is not followed")
		}
		return nil
	}))
	w.apply("rbac-coherence.yaml")
	w.await(func(c cluster.Change) bool { return c.Kind == cluster.KindSynced })
	streams := w.requests(200, "sendInitialEvents=true")
	if streams != 3 {
		t.Errorf("%d streams were opened, want one for each kind", streams)
	}
	w.must(nil, c.KillAPIServer(ctx))
	w.await(func(c cluster.Change) bool { return c.Kind == cluster.KindLost })
	w.must(nil, c.StartAPIServer(ctx))
	w.must(c.Client.CoreV1().Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "late"}, Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone},
	}, metav1.CreateOptions{}))
	synced, late := false, false
	w.await(func(c cluster.Change) bool {
		synced, late = synced || c.Kind == cluster.KindSynced, late || c.Name == "late"
		return synced && late
	})
	// An apiserver that has just begun does not know what was before: what changed then is read again, once.
	if n := w.requests(200, "sendInitialEvents=true") - streams; n > 3 {
		t.Errorf("%d streams were opened after the apiserver was away, want at most one for each kind", n)
	}
}

func (w *world) apply(name string) {
	w.t.Helper()
	manifest, err := os.ReadFile(filepath.Join("..", "..", "scripts", name))
	w.must(manifest, err)
	if _, text, ok := strings.Cut(string(manifest), "\napiVersion"); ok {
		manifest = []byte("apiVersion" + text) // a document of comments is none
	}
	w.must(nil, w.c.Apply(w.ctx, manifest))
}

// requests counts those of the account with a status and a part of the address, by their beginning.
func (w *world) requests(code int, part string) (n int) {
	w.t.Helper()
	all, err := w.c.Requests(account)
	w.must(all, err)
	seen := map[string]bool{}
	for _, r := range all {
		if r.Response.Code == code && strings.Contains(r.URI, part) && !seen[r.URI] {
			seen[r.URI] = true
			n++
		}
	}
	return n
}
