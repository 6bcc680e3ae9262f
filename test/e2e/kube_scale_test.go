package e2e

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// maxResident is what the daemon may keep in memory beside a large cluster, in KiB.
const maxResident = 60 << 10

// resident is the memory of a process, in KiB, now and at its highest.
func (h *host) resident(pid int) (now, peak int) {
	h.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/proc/%d/status", h.Host().PID(), pid))
	if err != nil {
		h.t.Fatal(err)
	}
	field := func(name string) int {
		m := regexp.MustCompile(`(?m)^` + name + `:\s+(\d+) kB`).FindSubmatch(status)
		if m == nil {
			h.t.Fatalf("no %s in %s", name, status)
		}
		n, _ := strconv.Atoi(string(m[1]))
		return n
	}
	return field("VmRSS"), field("VmHWM")
}

// TestLongRunScale attaches beside ten thousand Services and a thousand slices, most of which are none of the daemon's business.
func TestLongRunScale(t *testing.T) {
	manyServices, manySlices := share(t, 10_000), share(t, 1_000)
	h, c := onCluster(t, cluster.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	if _, err := c.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "many"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	service := func(i int) *corev1.Service {
		return &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("s%d", i), Namespace: "many"},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}},
		}
	}
	const workers = 32
	failed := make(chan error, workers)
	for w := range workers {
		go func() {
			failed <- func() error {
				for i := w; i < manyServices; i += workers {
					s := service(i)
					if _, err := c.Client.CoreV1().Services("many").Create(ctx, s, metav1.CreateOptions{}); err != nil {
						return err
					}
					if i >= manySlices {
						continue
					}
					slice := cluster.NewSlice(s, s.Name+"-4", fmt.Sprintf("172.20.%d.%d", 100+i/250, 1+i%250))
					if _, err := c.Client.DiscoveryV1().EndpointSlices("many").Create(ctx, slice, metav1.CreateOptions{}); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	for range workers {
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
	}

	file := reader(t, c)
	r := h.run("attach", "--kubeconfig", file)
	if r.code != 0 {
		t.Fatal(r)
	}
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	report := h.healthy()
	asked := requests(t, c)
	// A list and a watch for each kind that is read, or one watch that begins with a list.
	if len(asked) > 2*len(readKinds) {
		t.Errorf("the daemon made %d requests: %q", len(asked), asked)
	}
	now, peak := h.resident(report.PID)
	t.Logf("%d Services, %d slices: attached in %s, %d requests, %.1f MiB resident, %.1f MiB at most",
		manyServices, manySlices, r.took.Round(time.Millisecond), len(asked), float64(now)/1024, float64(peak)/1024)
	if now > maxResident {
		t.Errorf("the daemon has %d KiB resident, want at most %d", now, maxResident)
	}
	// What goes on elsewhere in the cluster does not reach the daemon: it goes on following its own Service.
	for i := range 100 {
		if err := c.Client.CoreV1().Services("many").Delete(ctx, service(i).Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	setEndpoints(t, c, lab.CoreDNS1v4)
	h.follows(patience, lab.CoreDNS1v4)
}
