// Package cluster runs a real Kubernetes in a lab: etcd, kube-apiserver and, where asked for, kube-controller-manager and
// kube-proxy on host0. Pods are network namespaces, in which a small kubelet runs a real CoreDNS, or servers of the test.
//
// It is a package of its own so that what needs the lab alone is built without client-go.
package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const (
	// NodeName is host0's name as a Node of the cluster.
	NodeName = "host0"

	// Dir is the directory, in host0, of certificates, kubeconfigs and logs.
	Dir = "/run/lab/kube"

	// AdminKubeconfig and HostKubeconfig are paths in host0. Both are an administrator's; the latter finds the apiserver at
	// the KubeSwitch address, so that what uses it can be cut off alone.
	AdminKubeconfig = Dir + "/admin.kubeconfig"
	HostKubeconfig  = Dir + "/host.kubeconfig"

	etcdDir      = Dir + "/etcd"
	apiPort      = "6443"
	certLifetime = 12 * time.Hour
)

// ProxyMode is how kube-proxy programs the kernel.
type ProxyMode string

// The modes of kube-proxy.
const (
	ProxyNone     ProxyMode = ""
	ProxyNFTables ProxyMode = "nftables"
	ProxyIPTables ProxyMode = "iptables"
)

// Options of a cluster. The zero value is an apiserver alone.
type Options struct {
	// Proxy runs kube-proxy on host0, which gives Service addresses a meaning there.
	Proxy ProxyMode
	// Controllers runs kube-controller-manager, so that Deployments make Pods and EndpointSlices follow them, and a kubelet
	// for the Pods that are bound to host0.
	Controllers bool
}

// Cluster is a running control plane. Its methods may be called from several goroutines.
type Cluster struct {
	*lab.Lab
	// Client is an administrator's, and works from the test's own process.
	Client kubernetes.Interface

	options   Options
	binary    string
	authority *authority
	admin     pair

	etcd, apiserver, controllers, proxy *process
	kubelet                             *kubelet
}

// Start runs a cluster in a lab for a test, until the test ends. By its name `make test` leaves the test to
// `make test-cluster` or `make test-long`: it runs where nobody has built Kubernetes.
func Start(tb testing.TB, l *lab.Lab, options Options) *Cluster {
	tb.Helper()
	if !strings.HasPrefix(tb.Name(), "TestKubernetes") && !strings.HasPrefix(tb.Name(), "TestLongRun") {
		tb.Fatal("a test that runs a real cluster must have a name that begins with TestKubernetes or TestLongRun")
	}
	ctx, cancel := context.WithTimeout(tb.Context(), 2*time.Minute)
	defer cancel()
	c, err := New(ctx, l, options)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(c.Close)
	return c
}

// New runs a cluster in a lab. Its processes end with the lab; Close ends what runs in this process.
func New(ctx context.Context, l *lab.Lab, options Options) (*Cluster, error) {
	binary, err := lab.Helper("kube")
	if err != nil {
		return nil, err
	}
	c := &Cluster{Lab: l, options: options, binary: binary}
	if err := c.start(ctx); err != nil {
		c.Close()
		return nil, fmt.Errorf("raise the cluster: %w", err)
	}
	return c, nil
}

// Close ends the kubelet. It may be called more than once.
func (c *Cluster) Close() {
	if c.kubelet != nil {
		c.kubelet.close()
	}
}

func (c *Cluster) start(ctx context.Context) error {
	if err := c.writeFiles(); err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(c.restConfig())
	if err != nil {
		return err
	}
	c.Client = client
	c.etcd = c.newProcess("etcd", "--data-dir="+etcdDir, "--log-level=error", "--unsafe-no-fsync",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=default=http://127.0.0.1:2380")
	if err := c.startEtcd(ctx); err != nil {
		return err
	}
	c.apiserver = c.newProcess("kube-apiserver",
		"--etcd-servers=http://127.0.0.1:2379", "--secure-port="+apiPort, "--bind-address=0.0.0.0",
		"--advertise-address="+lab.KubeSwitch4, "--endpoint-reconciler-type=none",
		"--tls-cert-file="+Dir+"/server.crt", "--tls-private-key-file="+Dir+"/server.key", "--client-ca-file="+Dir+"/ca.crt",
		"--cert-dir="+Dir, "--service-cluster-ip-range="+lab.ServiceRange4+","+lab.ServiceRange6,
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file="+Dir+"/accounts.key", "--service-account-key-file="+Dir+"/accounts.key",
		"--authorization-mode=RBAC", "--anonymous-auth=false", "--allow-privileged=true",
		// Without it every Pod would have to wait for its ServiceAccount.
		"--disable-admission-plugins=ServiceAccount",
		"--audit-policy-file="+Dir+"/audit.yaml", "--audit-log-path="+auditLog, "--audit-log-mode=blocking",
		// A stop would otherwise wait a minute for the watches of its clients.
		"--shutdown-send-retry-after=true", "--shutdown-watch-termination-grace-period=1s")
	if err := c.StartAPIServer(ctx); err != nil {
		return err
	}
	if err := c.createNode(ctx); err != nil {
		return err
	}
	if c.options.Controllers {
		c.controllers = c.newProcess("kube-controller-manager", "--kubeconfig="+AdminKubeconfig,
			"--controllers=endpointslice-controller,serviceaccount-controller,namespace-controller,deployment-controller,replicaset-controller",
			"--leader-elect=false", "--bind-address=127.0.0.1", "--cert-dir="+Dir, "--service-account-private-key-file="+Dir+"/accounts.key")
		if err := c.controllers.start(ctx, func(ctx context.Context) error {
			// One of the things that it makes by itself.
			_, err := c.Client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
			return err
		}); err != nil {
			return err
		}
		if c.kubelet, err = startKubelet(c); err != nil {
			return err
		}
	}
	if c.options.Proxy != ProxyNone {
		c.proxy = c.newProcess("kube-proxy", "--kubeconfig="+Dir+"/proxy.kubeconfig", "--proxy-mode="+string(c.options.Proxy),
			"--hostname-override="+NodeName, "--cluster-cidr="+lab.PodRange4+","+lab.PodRange6,
			// This machine's own limits are none of the lab's business.
			"--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
			"--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249")
		if err := c.StartProxy(ctx); err != nil {
			return err
		}
	}
	return nil
}

// newProcess describes a program of the control plane. It gives way to what is under test: on this machine they share the
// processors, which they would not in a real cluster.
func (c *Cluster) newProcess(role string, flags ...string) *process {
	return &process{name: role, node: c.Host(), argv: append([]string{"nice", c.binary, role}, flags...), log: path.Join(Dir, role+".log")}
}

// writeFiles makes certificates, keys and kubeconfigs.
func (c *Cluster) writeFiles() (err error) {
	if c.authority, err = newAuthority("lab"); err != nil {
		return err
	}
	if c.admin, err = c.authority.client(certLifetime, "admin", "system:masters"); err != nil {
		return err
	}
	proxy, err := c.authority.client(certLifetime, "system:kube-proxy")
	if err != nil {
		return err
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	accountsKey, err := encodeKey(accounts)
	if err != nil {
		return err
	}
	if err := c.Host().Do(func() error { return os.MkdirAll(Dir, 0o700) }); err != nil {
		return err
	}
	for name, content := range map[string][]byte{"ca.crt": c.authority.pem, "accounts.key": accountsKey, "audit.yaml": []byte(auditPolicy)} {
		if err := c.Host().WriteFile(path.Join(Dir, name), content, 0o600); err != nil {
			return err
		}
	}
	if err := c.RenewServerCertificate(certLifetime); err != nil {
		return err
	}
	for _, k := range []struct {
		file, address string
		user          pair
	}{
		{AdminKubeconfig, "127.0.0.1", c.admin},
		{HostKubeconfig, lab.KubeSwitch4, c.admin},
		{Dir + "/proxy.kubeconfig", "127.0.0.1", proxy},
	} {
		if err := c.WriteKubeconfig(c.Host(), k.file, k.address, &clientapi.AuthInfo{
			ClientCertificateData: k.user.certificate, ClientKeyData: k.user.key,
		}); err != nil {
			return err
		}
	}
	return nil
}

// RenewServerCertificate gives the apiserver another certificate of the same authority, which a running one notices.
func (c *Cluster) RenewServerCertificate(lifetime time.Duration) error {
	server, err := c.authority.server(lifetime, "127.0.0.1", lab.PodGateway4, lab.KubeSwitch4, lab.Kubernetes4)
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{"server.crt": server.certificate, "server.key": server.key} {
		// Not in place: the apiserver must never read one half.
		if err := c.Host().WriteFile(path.Join(Dir, name+".new"), content, 0o600); err != nil {
			return err
		}
		if err := c.Host().Do(func() error { return os.Rename(path.Join(Dir, name+".new"), path.Join(Dir, name)) }); err != nil {
			return err
		}
	}
	return nil
}

// WriteKubeconfig writes a kubeconfig into a node, from which the apiserver is at the address.
func (c *Cluster) WriteKubeconfig(node *lab.Node, file, address string, user *clientapi.AuthInfo) error {
	config := clientapi.NewConfig()
	config.Clusters["lab"] = &clientapi.Cluster{
		Server: "https://" + net.JoinHostPort(address, apiPort), CertificateAuthorityData: c.authority.pem,
	}
	config.AuthInfos["user"] = user
	config.Contexts["lab"] = &clientapi.Context{Cluster: "lab", AuthInfo: "user"}
	config.CurrentContext = "lab"
	content, err := clientcmd.Write(*config)
	if err != nil {
		return err
	}
	return node.WriteFile(file, content, 0o600)
}

// restConfig is for clients in this process, whose connections are host0's.
func (c *Cluster) restConfig() *rest.Config {
	return &rest.Config{
		Host: "https://" + net.JoinHostPort("127.0.0.1", apiPort),
		TLSClientConfig: rest.TLSClientConfig{
			CAData: c.authority.pem, CertData: c.admin.certificate, KeyData: c.admin.key,
		},
		Dial:          dialFrom(c.Host()),
		ContentConfig: rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf"},
		// A test is in a hurry, and the apiserver its own.
		QPS: 1000, Burst: 2000,
	}
}

// dialFrom dials from inside a node.
func dialFrom(node *lab.Node) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = node.Do(func() error {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
}

// answers is a check that a URL, as seen from host0, answers 200.
func (c *Cluster) answers(url string) func(context.Context) error { return answersFrom(c.Host(), url) }

func answersFrom(node *lab.Node, url string) func(context.Context) error {
	client := &http.Client{Transport: &http.Transport{DialContext: dialFrom(node), DisableKeepAlives: true}, Timeout: time.Second}
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			body, _ := io.ReadAll(io.LimitReader(response.Body, 512))
			return fmt.Errorf("%s: %s: %s", url, response.Status, strings.TrimSpace(string(body)))
		}
		return nil
	}
}

func (c *Cluster) startEtcd(ctx context.Context) error {
	return c.etcd.start(ctx, c.answers("http://127.0.0.1:2379/health"))
}

// APIServerCPU is what the running apiserver has used since it began.
func (c *Cluster) APIServerCPU() (time.Duration, error) {
	c.apiserver.mu.Lock()
	defer c.apiserver.mu.Unlock()
	if c.apiserver.cmd == nil {
		return 0, errors.New("the apiserver does not run")
	}
	return lab.CPUTime(c.apiserver.cmd.Process.Pid)
}

// StartAPIServer starts the apiserver, again if it was stopped, and returns when it is ready. Its objects are etcd's.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	return c.apiserver.start(ctx, func(ctx context.Context) error {
		_, err := c.Client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
}

// StopAPIServer stops the apiserver in order: its clients see their watches end.
func (c *Cluster) StopAPIServer(ctx context.Context) error {
	return c.apiserver.stop(ctx, unix.SIGTERM)
}

// KillAPIServer ends the apiserver at once.
func (c *Cluster) KillAPIServer(ctx context.Context) error {
	return c.apiserver.stop(ctx, unix.SIGKILL)
}

// PauseAPIServer stops the apiserver in its tracks: it accepts connections and answers nothing.
func (c *Cluster) PauseAPIServer() error { return c.apiserver.signal(unix.SIGSTOP) }

// ResumeAPIServer lets a paused apiserver go on.
func (c *Cluster) ResumeAPIServer() error { return c.apiserver.signal(unix.SIGCONT) }

// StartProxy starts kube-proxy, again if it was stopped.
func (c *Cluster) StartProxy(ctx context.Context) error {
	return c.proxy.start(ctx, c.answers("http://127.0.0.1:10256/healthz"))
}

// StopProxy ends kube-proxy; its rules stay.
func (c *Cluster) StopProxy(ctx context.Context) error { return c.proxy.stop(ctx, unix.SIGTERM) }

// FlushProxyRules removes the rules of a kube-proxy that is stopped, as its own --cleanup does.
func (c *Cluster) FlushProxyRules(ctx context.Context) error {
	return c.Host().Run(ctx, c.binary, "kube-proxy", "--cleanup")
}

// createNode makes host0 a Node, for which kube-proxy waits.
func (c *Cluster) createNode(ctx context.Context) error {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: NodeName},
		Spec:       corev1.NodeSpec{PodCIDR: lab.PodRange4, PodCIDRs: []string{lab.PodRange4, lab.PodRange6}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: lab.KubeSwitch4}, {Type: corev1.NodeInternalIP, Address: lab.KubeSwitch6},
		}},
	}
	created, err := c.Client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	created.Status = node.Status
	_, err = c.Client.CoreV1().Nodes().UpdateStatus(ctx, created, metav1.UpdateOptions{})
	return err
}

// Eventually waits until check has no complaint, and fails with the last one when ctx ends.
func Eventually(ctx context.Context, check func(context.Context) error) error {
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		case <-poll.C:
		}
	}
}

// ignoreExists is for objects that may have been created before.
func ignoreExists(err error) error {
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}
