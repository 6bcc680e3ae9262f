package discovery

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// fakeCluster is a fake apiserver whose requests can be made to fail. It must be made
// inside the test's synctest bubble.
type fakeCluster struct {
	*fake.Clientset
	t testing.TB

	mu    sync.Mutex
	fail  func(clienttesting.Action) error // nil: answers
	opens []watch.Interface
}

func newCluster(t testing.TB, objects ...runtime.Object) *fakeCluster {
	t.Helper()
	c := &fakeCluster{Clientset: fake.NewClientset(objects...), t: t}
	c.PrependReactor("list", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		err := c.failure(a)
		return err != nil, nil, err
	})
	c.PrependWatchReactor("*", func(a clienttesting.Action) (bool, watch.Interface, error) {
		if err := c.failure(a); err != nil {
			return true, nil, err
		}
		wa := a.(clienttesting.WatchActionImpl)
		w, err := c.Tracker().Watch(a.GetResource(), a.GetNamespace(), wa.ListOptions)
		if err == nil {
			c.mu.Lock()
			c.opens = append(c.opens, w)
			c.mu.Unlock()
		}
		return true, w, err
	})
	return c
}

func (c *fakeCluster) failure(a clienttesting.Action) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail == nil {
		return nil
	}
	return c.fail(a)
}

// answer sets how requests fail, nil for not at all.
func (c *fakeCluster) answer(fail func(clienttesting.Action) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = fail
}

// cut ends all open watches, as an apiserver does that stops.
func (c *fakeCluster) cut() {
	c.mu.Lock()
	opens := c.opens
	c.opens = nil
	c.mu.Unlock()
	for _, w := range opens {
		w.Stop()
	}
}

// always fails every request with err.
func always(err error) func(clienttesting.Action) error {
	return func(clienttesting.Action) error { return err }
}

func (c *fakeCluster) setSlice(s *discoveryv1.EndpointSlice) {
	c.t.Helper()
	api := c.DiscoveryV1().EndpointSlices(s.Namespace)
	_, err := api.Get(context.Background(), s.Name, metav1.GetOptions{})
	if err != nil {
		_, err = api.Create(context.Background(), s, metav1.CreateOptions{})
	} else {
		_, err = api.Update(context.Background(), s, metav1.UpdateOptions{})
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *fakeCluster) deleteSlice(name string) {
	c.t.Helper()
	if err := c.DiscoveryV1().EndpointSlices(DefaultNamespace).Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *fakeCluster) createService(s *corev1.Service) {
	c.t.Helper()
	if _, err := c.CoreV1().Services(s.Namespace).Create(context.Background(), s, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *fakeCluster) deleteService() {
	c.t.Helper()
	if err := c.CoreV1().Services(DefaultNamespace).Delete(context.Background(), DefaultService, metav1.DeleteOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// kubeDNS is the Service with these cluster addresses.
func kubeDNS(ips ...string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: DefaultService}}
	s.Spec.Ports = servicePorts("dns", "dns-tcp")
	if len(ips) > 0 {
		s.Spec.ClusterIP, s.Spec.ClusterIPs = ips[0], ips
	}
	return s
}

// servicePorts are those of CoreDNS: UDP, TCP and its metrics.
func servicePorts(udp, tcp string) []corev1.ServicePort {
	return []corev1.ServicePort{
		{Name: "metrics", Protocol: corev1.ProtocolTCP, Port: 9153},
		{Name: tcp, Protocol: corev1.ProtocolTCP, Port: 53},
		{Name: udp, Protocol: corev1.ProtocolUDP, Port: 53},
	}
}

// follow is a Watcher that runs until the test's bubble ends.
type follow struct {
	*Watcher
	logs *observer.ObservedLogs
	stop func()
}

// run starts a Watcher on c and returns once nothing moves any more.
func run(t testing.TB, c *fakeCluster) *follow {
	t.Helper()
	return runWith(t, c, Options{})
}

// runWith is run with options.
func runWith(t testing.TB, c *fakeCluster, o Options) *follow {
	t.Helper()
	core, logs := observer.New(zapcore.DebugLevel)
	o.Logger = zap.New(core)
	w := newWatcher(c, o.withDefaults(), "apiserver fake", defaultTimeouts)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	synctest.Wait()
	return &follow{w, logs, stop}
}

// next returns the snapshot that waits to be read; there must be one.
func (f *follow) next(t testing.TB) Snapshot {
	t.Helper()
	synctest.Wait()
	select {
	case s := <-f.Snapshots():
		return s
	default:
		t.Fatal("nothing published")
		return Snapshot{}
	}
}

// none wants that nothing has been published since the last read.
func (f *follow) none(t testing.TB) {
	t.Helper()
	synctest.Wait()
	select {
	case s := <-f.Snapshots():
		t.Errorf("published %v stale=%t %s", addresses(s), s.Stale, s.Reason)
	default:
	}
}
