package discovery

import (
	"fmt"
	"runtime"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// What is kept of a large cluster is small: this counts the heap, of which a process with Go's defaults has up to twice resident.
func TestChangesAreCompact(t *testing.T) {
	const services, perSlice, most = 10_000, 10, 30 << 20
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	known, state := newTold(), coherence.New("cluster.local")
	for i := range services {
		name := cache.ObjectName{Namespace: fmt.Sprintf("n%d", i%100), Name: fmt.Sprintf("service-%d", i)}
		s := compactService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name.Name}, Spec: corev1.ServiceSpec{
			ClusterIPs: []string{fmt.Sprintf("172.21.%d.%d", i>>8, i&0xff)}, Ports: []corev1.ServicePort{{Name: "http", Protocol: "TCP", Port: 80}},
		}})
		known.services[name] = s
		state.Apply(cluster.Change{Kind: cluster.KindService, Namespace: name.Namespace, Name: name.Name, Service: cluster.Pair[cluster.Service]{New: s}})
		from := slice(name.Name + "-abcde")
		from.Labels[discoveryv1.LabelServiceName] = name.Name
		for e := range perSlice {
			end := ready(fmt.Sprintf("10.%d.%d.%d", i>>8, i&0xff, e))
			end.TargetRef = &corev1.ObjectReference{Name: fmt.Sprintf("%s-7d4b9c6f5d-%05d", name.Name, e)}
			end.Zone = new(fmt.Sprintf("zone-%d", e%3))
			from.Endpoints = append(from.Endpoints, end)
		}
		name.Name = from.Name
		compact := compactSlice(from)
		known.slices[name] = compact
		state.Apply(cluster.Change{Kind: cluster.KindSlice, Namespace: name.Namespace, Name: name.Name, Slice: cluster.Pair[cluster.Slice]{New: compact}})
	}
	used := heap() - before
	t.Logf("%.1f MiB of heap", float64(used)/(1<<20))
	if used > most {
		t.Errorf("%d octets of heap for %d Services and %d endpoints, want at most %d", used, services, services*perSlice, most)
	}
	runtime.KeepAlive(known)
	runtime.KeepAlive(state)
}
