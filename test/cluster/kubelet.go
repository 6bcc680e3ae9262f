package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// HelloImage is an image whose container accepts TCP connections on each of its container ports and writes the name of
// its Pod to each.
const HelloImage = "hello"

// accountDir is where a client in a Pod looks for its ServiceAccount.
const accountDir = "/run/secrets/kubernetes.io/serviceaccount"

// podDeadline bounds the start and the end of a Pod.
const podDeadline = time.Minute

// container is what runs in a Pod.
type container interface {
	// stop ends it as a kubelet does, and returns when it is gone.
	stop(ctx context.Context) error
}

// kubelet does a kubelet's part for the Pods that are bound to host0: it makes a network namespace on the bridge cni0 for
// each, starts its container, reports it ready, and takes all away when the Pod is deleted.
type kubelet struct {
	cluster *Cluster
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu       sync.Mutex
	pods     map[types.UID]*pod
	next     int    // number of the next Pod
	overflow uint64 // datagrams that Pods which are gone had no room for
}

// pod is one that this kubelet has begun to run.
type pod struct {
	node      *lab.Node
	server    *lab.Server // of a CoreDNS
	container container
	started   chan struct{} // closed when node and container are set, or failed
	err       error
	stopping  bool
}

func startKubelet(c *Cluster) (*kubelet, error) {
	ctx, cancel := context.WithCancel(context.Background())
	k := &kubelet{cluster: c, cancel: cancel, pods: make(map[types.UID]*pod)}
	factory := informers.NewSharedInformerFactoryWithOptions(c.Client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", NodeName).String()
	}))
	informer := factory.Core().V1().Pods().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { k.see(ctx, object) },
		UpdateFunc: func(_, object any) { k.see(ctx, object) },
	}); err != nil {
		cancel()
		return nil, err
	}
	k.running.Go(func() { informer.RunWithContext(ctx) })
	return k, nil
}

func (k *kubelet) close() {
	k.cancel()
	k.running.Wait()
}

// see begins to run a Pod, or to end it.
func (k *kubelet) see(ctx context.Context, object any) {
	p, ok := object.(*corev1.Pod)
	if !ok {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	known, ok := k.pods[p.UID]
	switch {
	case !ok && p.DeletionTimestamp == nil:
		known = &pod{started: make(chan struct{})}
		k.pods[p.UID] = known
		number := k.next
		k.next++
		k.running.Go(func() { k.run(ctx, p, known, number) })
	case ok && p.DeletionTimestamp != nil && !known.stopping:
		known.stopping = true
		k.running.Go(func() { k.end(ctx, p, known) })
	}
}

// run starts a Pod; a failure shows in its status.
func (k *kubelet) run(ctx context.Context, p *corev1.Pod, known *pod, number int) {
	ctx, cancel := context.WithTimeout(ctx, podDeadline)
	defer cancel()
	known.err = k.begin(ctx, p, known, number)
	close(known.started)
	status := corev1.PodStatus{Phase: corev1.PodRunning, StartTime: new(metav1.Now())}
	if known.node != nil {
		ip4, ip6 := known.node.Addr4().String(), known.node.Addr6().String()
		status.PodIP, status.PodIPs = ip4, []corev1.PodIP{{IP: ip4}, {IP: ip6}}
	}
	ready := corev1.ConditionTrue
	if known.err != nil {
		ready, status.Phase, status.Message = corev1.ConditionFalse, corev1.PodFailed, known.err.Error()
	}
	for _, kind := range []corev1.PodConditionType{corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{Type: kind, Status: ready, LastTransitionTime: metav1.Now()})
	}
	p = p.DeepCopy()
	p.ResourceVersion, p.Status = "", status // whatever has become of it, this is how it is
	_, err := k.cluster.Client.CoreV1().Pods(p.Namespace).UpdateStatus(ctx, p, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
		fmt.Fprintf(os.Stderr, "kubelet: status of %s: %v\n", p.Name, err)
	}
}

func (k *kubelet) begin(ctx context.Context, p *corev1.Pod, known *pod, number int) (err error) {
	known.node, err = k.cluster.AddPod(ctx, p.Name, "vpod"+strconv.Itoa(number),
		fmt.Sprintf("172.20.10.%d", number+1), fmt.Sprintf("fd00:20::a:%d", number+1))
	if err != nil {
		return err
	}
	switch image := p.Spec.Containers[0].Image; image {
	case coreDNS:
		known.server, err = k.startCoreDNS(ctx, p, known.node)
		known.container = coreDNSContainer{known.server}
	case HelloImage:
		known.container, err = startHello(p, known.node)
	default:
		err = fmt.Errorf("no image %q here", image)
	}
	return err
}

// end ends a Pod, with the container's grace, and then removes it.
func (k *kubelet) end(ctx context.Context, p *corev1.Pod, known *pod) {
	ctx, cancel := context.WithTimeout(ctx, podDeadline)
	defer cancel()
	<-known.started
	var errs []error
	if known.container != nil && known.err == nil {
		errs = append(errs, known.container.stop(ctx))
	}
	if known.node != nil {
		overflow, err := overflowed(known.node)
		k.mu.Lock()
		k.overflow += overflow
		k.mu.Unlock()
		errs = append(errs, err, k.cluster.RemoveNode(known.node))
	}
	errs = append(errs, k.cluster.Client.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64(0)), Preconditions: metav1.NewUIDPreconditions(string(p.UID)),
	}))
	if err := errors.Join(errs...); err != nil && ctx.Err() == nil {
		fmt.Fprintf(os.Stderr, "kubelet: end of %s: %v\n", p.Name, err)
	}
	k.mu.Lock()
	delete(k.pods, p.UID)
	k.mu.Unlock()
}

// coreDNSContainer is a CoreDNS as its Deployment describes it.
type coreDNSContainer struct{ server *lab.Server }

func (c coreDNSContainer) stop(ctx context.Context) error { return c.server.Stop(ctx) }

func (k *kubelet) startCoreDNS(ctx context.Context, p *corev1.Pod, node *lab.Node) (*lab.Server, error) {
	binary, err := lab.Helper("coredns-kubernetes")
	if err != nil {
		return nil, err
	}
	config, err := k.cluster.Client.CoreV1().ConfigMaps(p.Namespace).Get(ctx, coreDNS, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	if err := k.mountAccount(ctx, p, node); err != nil {
		return nil, err
	}
	// dnsPolicy: Default gives the Pod the host's servers.
	if err := node.WriteFile("/etc/resolv.conf", []byte(lab.HostResolvConf), 0o644); err != nil {
		return nil, err
	}
	server, err := k.cluster.NewCoreDNS(node, binary, config.Data["Corefile"],
		"KUBERNETES_SERVICE_HOST="+lab.PodGateway4, "KUBERNETES_SERVICE_PORT="+apiPort)
	if err != nil {
		return nil, err
	}
	if err := server.Start(ctx); err != nil {
		return nil, err
	}
	// It reads the whole cluster now. On another machine of a real cluster that would not take the processors from the
	// servers that answer meanwhile.
	const low, usual = 19, 0
	if err := setNice(server.PID(), low); err != nil {
		return nil, err
	}
	if err := Eventually(ctx, answersFrom(node, "http://127.0.0.1:8181/ready")); err != nil {
		return nil, err
	}
	return server, setNice(server.PID(), usual)
}

// setNice sets the priority of each thread of a process.
func setNice(pid, nice int) error {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return err
	}
	for _, thread := range threads {
		id, err := strconv.Atoi(thread.Name())
		if err != nil {
			return err
		}
		if err := unix.Setpriority(unix.PRIO_PROCESS, id, nice); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("set the priority of process %d: %w", pid, err)
		}
	}
	return nil
}

// overflowed is how many datagrams the sockets of a node had no room for: what its server was too slow to read.
func overflowed(node *lab.Node) (uint64, error) {
	counters, err := node.Counters()
	return counters["UdpRcvbufErrors"] + counters["Udp6RcvbufErrors"], err
}

// Overflowed is how many datagrams all Pods so far, those that are gone too, had no room for.
func (c *Cluster) Overflowed() (sum uint64, err error) {
	c.kubelet.mu.Lock()
	defer c.kubelet.mu.Unlock()
	sum = c.kubelet.overflow
	for _, p := range c.kubelet.pods {
		select {
		case <-p.started:
		default:
			continue
		}
		if p.stopping || p.node == nil {
			continue
		}
		n, err := overflowed(p.node)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// mountAccount gives a Pod the token of its ServiceAccount.
func (k *kubelet) mountAccount(ctx context.Context, p *corev1.Pod, node *lab.Node) error {
	token, err := k.cluster.Token(ctx, p.Namespace, p.Spec.ServiceAccountName)
	if err != nil {
		return err
	}
	if err := node.Do(func() error { return os.MkdirAll(accountDir, 0o700) }); err != nil {
		return err
	}
	for name, content := range map[string]string{
		"token": token, "ca.crt": string(k.cluster.authority.pem), "namespace": p.Namespace,
	} {
		if err := node.WriteFile(path.Join(accountDir, name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// Token is a new token of a ServiceAccount, for an hour.
func (c *Cluster) Token(ctx context.Context, namespace, account string) (string, error) {
	answer, err := c.Client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account,
		&authv1.TokenRequest{Spec: authv1.TokenRequestSpec{ExpirationSeconds: new(int64(3600))}}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token of %s/%s: %w", namespace, account, err)
	}
	return answer.Status.Token, nil
}

// hello listens in a Pod on behalf of its container. The sockets are this process's, in the Pod's namespace.
type hello struct{ listeners []net.Listener }

func startHello(p *corev1.Pod, node *lab.Node) (*hello, error) {
	h := &hello{}
	for _, port := range p.Spec.Containers[0].Ports {
		err := node.Do(func() error {
			listener, err := net.Listen("tcp", ":"+strconv.Itoa(int(port.ContainerPort)))
			if err == nil {
				h.listeners = append(h.listeners, listener)
			}
			return err
		})
		if err != nil {
			return nil, errors.Join(err, h.stop(context.Background()))
		}
	}
	for _, listener := range h.listeners {
		go func() {
			for {
				connection, err := listener.Accept()
				if err != nil {
					return
				}
				_, _ = connection.Write([]byte(p.Name + "\n"))
				_ = connection.Close()
			}
		}()
	}
	return h, nil
}

func (h *hello) stop(context.Context) error {
	var errs []error
	for _, listener := range h.listeners {
		errs = append(errs, listener.Close())
	}
	h.listeners = nil
	return errors.Join(errs...)
}

// running finds a Pod that the kubelet has started.
func (c *Cluster) running(ctx context.Context, namespace, name string) (*pod, error) {
	p, err := c.Client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	c.kubelet.mu.Lock()
	known := c.kubelet.pods[p.UID]
	c.kubelet.mu.Unlock()
	if known == nil {
		return nil, fmt.Errorf("the kubelet does not run %s/%s", namespace, name)
	}
	select {
	case <-known.started:
		return known, known.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// PodNode is the machine that a Pod is.
func (c *Cluster) PodNode(ctx context.Context, namespace, name string) (*lab.Node, error) {
	known, err := c.running(ctx, namespace, name)
	if err != nil {
		return nil, err
	}
	return known.node, nil
}

// CoreDNSPods are the servers of all Pods of CoreDNS that run.
func (c *Cluster) CoreDNSPods(ctx context.Context) ([]*lab.Server, error) {
	list, err := c.Client.CoreV1().Pods(System).List(ctx, metav1.ListOptions{LabelSelector: "k8s-app=kube-dns"})
	if err != nil {
		return nil, err
	}
	var servers []*lab.Server
	for _, p := range list.Items {
		known, err := c.running(ctx, System, p.Name)
		if err != nil {
			return nil, err
		}
		servers = append(servers, known.server)
	}
	return servers, nil
}

// CrashContainer ends what runs in a Pod, which stays as it is and is still said to be ready: a process that has hung or
// died before any probe has noticed.
func (c *Cluster) CrashContainer(ctx context.Context, namespace, name string) error {
	known, err := c.running(ctx, namespace, name)
	if err != nil {
		return err
	}
	return known.container.stop(ctx)
}
