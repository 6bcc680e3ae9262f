package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// The Service that checks are about.
const (
	webName = "web.default.svc.cluster.local"
	webIP   = "172.21.0.30"
	webPort = 8080 // of the Pods; the Service's is 80

	podName = "172-20-0-20.default.pod.cluster.local" // of lab.App4
)

// web is a host of a real cluster with the Service web, and what it is made of.
type web struct {
	*host
	cluster *cluster.Cluster
	pods    []*lab.Node
	slice   *discoveryv1.EndpointSlice
}

func raiseWeb(t *testing.T) *web {
	t.Helper()
	ctx := t.Context()
	h := raise(t, lab.Options{})
	for _, server := range h.cluster() {
		if err := server.SetClusterRecords(ctx, webName+". 5 IN A "+webIP, podName+". 5 IN A "+lab.App4); err != nil {
			t.Fatal(err)
		}
	}
	w := &web{host: h, cluster: cluster.Start(t, h.Lab, cluster.Options{Proxy: cluster.ProxyNFTables}), pods: []*lab.Node{h.Pod("app"), h.Worker()}}
	if err := w.cluster.CreateDNS(ctx); err != nil {
		t.Fatal(err)
	}
	service, err := w.cluster.Client.CoreV1().Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{
			ClusterIP: webIP,
			Ports:     []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(webPort)}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.slice, err = w.cluster.Client.DiscoveryV1().EndpointSlices("default").Create(ctx,
		cluster.NewSlice(service, "web-1", lab.App4, lab.Worker4), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	h.attach(discovered, ranges)
	return w
}

// setReady says of both Pods whether they are ready.
func (w *web) setReady(ready bool) {
	w.t.Helper()
	for i := range w.slice.Endpoints {
		w.slice.Endpoints[i].Conditions.Ready = &ready
	}
	var err error
	w.slice, err = w.cluster.Client.DiscoveryV1().EndpointSlices("default").Update(w.t.Context(), w.slice, metav1.UpdateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

// awaitProxy waits until kube-proxy serves the Service, which it announces nowhere.
func (w *web) awaitProxy() {
	w.t.Helper()
	eventually(w.t, "kube-proxy serves "+webIP, func() error {
		return w.Host().Do(func() error {
			conn, err := net.DialTimeout("tcp", webIP+":80", time.Second)
			if err != nil {
				return err
			}
			return conn.Close()
		})
	})
}

// servePod runs the program in a Pod until the returned function is called.
func (w *web) servePod(pod int) (stop func()) {
	w.t.Helper()
	var listener net.Listener
	if err := w.pods[pod].Do(func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(w.pods[pod].Addr4(), webPort).String())
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	server := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: patience}
	go func() { _ = server.Serve(listener) }()
	stop = sync.OnceFunc(func() { _ = server.Close() })
	w.t.Cleanup(stop)
	return stop
}

// checked is the part of `check -o json` that tests look at.
type checked struct {
	Port    uint16 `json:"port"`
	Healthy bool   `json:"healthy"`
	Verdict string `json:"verdict"`
	Cause   string `json:"cause"`
	Steps   []struct {
		Question string `json:"question"`
		About    string `json:"about"`
		State    string `json:"state"`
		Text     string `json:"text"`
	} `json:"steps"`
}

// check runs a check, which must come to this cause and say all the texts in its verdict.
func (h *host) check(target, cause string, texts ...string) checked {
	h.t.Helper()
	r := h.run("check", target, "-o", "json")
	var c checked
	if err := json.Unmarshal([]byte(r.stdout), &c); err != nil {
		h.t.Fatalf("%v: %v", r, err)
	}
	if c.Cause != cause || c.Healthy != (cause == "none") || (r.code == 0) != c.Healthy || !c.Healthy && r.code != 3 {
		h.t.Errorf("want the cause %s: %v", cause, r)
	}
	for _, text := range texts {
		if !strings.Contains(c.Verdict, text) {
			h.t.Errorf("the verdict lacks %q: %v", text, r)
		}
	}
	return c
}

// step wants a step about something with a text.
func (c checked) step(t *testing.T, about, state, text string) {
	t.Helper()
	for _, s := range c.Steps {
		if s.About == about && s.State == state && strings.Contains(s.Text, text) {
			return
		}
	}
	t.Errorf("no step %s %s with %q in %+v", state, about, text, c.Steps)
}

// Each verdict about a Service, with the part that it names really broken.
func TestKubernetesCheck(t *testing.T) {
	w := raiseWeb(t)
	ctx := t.Context()
	stop0, stop1 := w.servePod(0), w.servePod(1)
	w.awaitProxy()

	c := w.check(webName, "none", "DNS is fine; the Service address "+webIP+":80 and its 2 endpoints answer")
	if c.Port != 80 {
		t.Errorf("port %d", c.Port)
	}
	c.step(t, "path", "ok", "the kernel steers it to CoreDNS, to 172.20.0.1")
	c.step(t, "path", "ok", "(steered)")
	c.step(t, "answer", "ok", webIP)
	c.step(t, "CoreDNS", "ok", lab.CoreDNS1v4+":53 asked directly: the same")
	c.step(t, "forwarder", "ok", "the same")
	c.step(t, "endpoints", "ok", "2 of 2 ready")
	w.check(webIP+":80", "none", "no DNS is needed; the Service address "+webIP+":80 and its 2 endpoints answer")
	w.check(lab.App4+":8080", "none", lab.App4+":8080 answers")
	w.check(podName, "none", "DNS is fine; "+lab.App4+":8080 answers")
	w.check(webName+":81", "no-such-port", "has no port 81, but 80/TCP")
	w.check("webb.default.svc.cluster.local", "no-such-name", "there is no Service default/webb, but there is default/web")

	w.setReady(false)
	w.check(webName, "no-ready-endpoint", "DNS is fine; the Service default/web has no ready endpoint of 2")
	w.setReady(true)

	noError(t, w.cluster.StopProxy(ctx))
	noError(t, w.cluster.FlushProxyRules(ctx))
	w.check(webName, "service-datapath", "DNS is fine; endpoints answer, but the Service address "+webIP+":80 does not",
		"the Service datapath (kube-proxy or eBPF) is broken")
	noError(t, w.cluster.StartProxy(ctx))
	w.awaitProxy()

	stop1()
	w.check(webName, "endpoint", "of 2 endpoints of the Service default/web, 1 does not answer, "+lab.Worker4+":8080 (connection refused)")
	stop0()
	w.check(webName, "not-listening", "nothing listens at the endpoints of the Service default/web")
	w.servePod(0)
	w.servePod(1)

	w.check(webName+":80", "none", "the Service address "+webIP+":80 and its 2 endpoints answer")
	denied := w.denied()
	r := w.run("check", webName+":80", "--kubeconfig", denied)
	if r.code != 0 || !strings.HasPrefix(r.stdout, "DNS is fine; "+webIP+":80 answers; what is behind is unknown: the apiserver forbids the request: services") {
		t.Errorf("without rights: %v", r)
	}
	noError(t, w.cluster.StopAPIServer(ctx))
	w.check(webName+":80", "apiserver", "DNS is fine; "+webIP+":80 answers; what is behind is unknown: the apiserver is unreachable")
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// denied returns the kubeconfig of an account that may do nothing.
func (w *web) denied() string {
	w.t.Helper()
	ctx := w.t.Context()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "nobody"}}
	if _, err := w.cluster.Client.CoreV1().ServiceAccounts("default").Create(ctx, account, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	token, err := w.cluster.Token(ctx, "default", account.Name)
	if err != nil {
		w.t.Fatal(err)
	}
	const file = cluster.Dir + "/nobody.kubeconfig"
	noError(w.t, w.cluster.WriteKubeconfig(w.Host(), file, lab.KubeSwitch4, &clientapi.AuthInfo{Token: token}))
	return file
}

// CoreDNS that is down, that hangs, and that can't be reached are three verdicts.
func TestCheckCoreDNS(t *testing.T) {
	h := raise(t, lab.Options{CoreDNSForwards: true})
	h.attach()
	ctx := t.Context()
	do := func(what func(s *lab.Server) error) {
		t.Helper()
		for _, s := range h.cluster() {
			if err := what(s); err != nil {
				t.Fatal(err)
			}
		}
	}
	do((*lab.Server).Pause)
	h.check(lab.Backend, "coredns-silent", "DNS is broken: CoreDNS does not answer; the datapath to it works (it takes connections, but does not reply)")
	do((*lab.Server).Resume)

	do(func(s *lab.Server) error { return s.Kill(ctx) })
	h.check(lab.Backend, "coredns-silent", "DNS is broken: CoreDNS does not answer; the datapath to it works (connection refused)")
	do(func(s *lab.Server) error { return s.Start(ctx) })

	must(t, h.Host(), "ip", "route", "del", lab.PodRange4)
	c := h.check(lab.Backend, "coredns-unreachable", "DNS is broken: CoreDNS does not answer; the datapath to it does not work (no reply)")
	c.step(t, "CoreDNS", "bad", "its route is over uplink")
	must(t, h.Host(), "ip", "route", "add", "unreachable", lab.PodRange4)
	c = h.check(lab.Backend, "coredns-unreachable", "the datapath to it does not work (no route to host)")
	c.step(t, "CoreDNS", "bad", "this host has no route to it")
}

// What happens to the resolver and to the servers for external names.
func TestCheckResolver(t *testing.T) {
	h := raise(t, lab.Options{CoreDNSForwards: true})
	h.attach()
	ctx := t.Context()
	c := h.check("mail", "none", "DNS is fine")
	c.step(t, "path", "ok", "mail.example.com: the forwarder takes it (passed_external)")
	h.check("www.example.com:443", "address", "DNS is fine; none of "+lab.WWW4+":443")
	h.check(lab.External, "none", "DNS is fine")
	h.check("nowhere.example.com.", "no-such-name", "the server for external names says so")

	for _, s := range h.outside() {
		if err := s.Kill(ctx); err != nil {
			t.Fatal(err)
		}
	}
	h.check("www.example.com.", "upstreams", "no upstream server of this host answers: 192.0.2.53:53, 192.0.2.54:53 (connection refused)")
	for _, s := range h.outside() {
		if err := s.Start(ctx); err != nil {
			t.Fatal(err)
		}
	}

	must(t, h.Host(), "sh", "-c", "printf 'nameserver 192.0.2.54\n' >/etc/resolv.conf")
	h.check(lab.Backend, "resolver-foreign", "programs do not ask k2s-dnsbpf: /etc/resolv.conf is foreign and names 192.0.2.54:53")
	h.detach()
	h.check(lab.Backend, "not-attached", "DNS is broken: k2s-dnsbpf is not attached: programs ask 192.0.2.54:53")
	h.check("www.example.com", "not-attached", "k2s-dnsbpf is not attached; DNS answers without it")
}

// With the daemon dead, and nobody there who puts the file back, the kernel goes on, and check says so.
func TestCheckDeadDaemon(t *testing.T) {
	h := raise(t, lab.Options{CoreDNSForwards: true})
	h.attach()
	h.killBoth()
	c := h.check(lab.Backend, "in-part", "DNS answers, but not all is well: the daemon is dead")
	c.step(t, "status", "bad", "the daemon is dead")
	eventually(t, "the kernel takes the daemon for dead", func() error {
		if r := h.run("check", "www.example.com"); !strings.Contains(r.stdout, "(steered_fallback)") {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
}

func TestCheckUsage(t *testing.T) {
	h := raise(t, lab.Options{NoServers: true})
	for _, args := range [][]string{{}, {"a", "b"}, {"a:b"}, {"http://a"}, {"a", "-o", "xml"}, {"a", "--kubeconfig"}} {
		if r := h.run(append([]string{"check"}, args...)...); r.code != 2 || strings.Count(r.stderr, "\n") != 1 || r.stdout != "" {
			t.Errorf("%v", r)
		}
	}
}

// TestKubernetesCheckAsKubeProxy: what kube-proxy delivers to is what check judges by, and what it does not by policy is no fault.
func TestKubernetesCheckAsKubeProxy(t *testing.T) {
	w := raiseWeb(t)
	ctx := t.Context()
	w.servePod(0)
	w.servePod(1)
	w.awaitProxy()
	services, endpointSlices := w.cluster.Client.CoreV1().Services("default"), w.cluster.Client.DiscoveryV1().EndpointSlices("default")
	setPolicy := func(policy corev1.ServiceInternalTrafficPolicy) {
		t.Helper()
		service, err := services.Get(ctx, "web", metav1.GetOptions{})
		noError(t, err)
		service.Spec.InternalTrafficPolicy = &policy
		_, err = services.Update(ctx, service, metav1.UpdateOptions{})
		noError(t, err)
	}
	set := func(change func(i int, e *discoveryv1.Endpoint)) {
		t.Helper()
		for i := range w.slice.Endpoints {
			change(i, &w.slice.Endpoints[i])
		}
		var err error
		w.slice, err = endpointSlices.Update(ctx, w.slice, metav1.UpdateOptions{})
		noError(t, err)
	}
	// The proxy takes a moment, in which check may find the Service in its old state.
	eventuallyCheck := func(healthy bool, texts ...string) {
		t.Helper()
		eventually(t, fmt.Sprintf("check says %q", texts), func() error {
			r := w.run("check", webName)
			for _, text := range texts {
				if (r.code == 0) != healthy || !strings.Contains(r.stdout, text) {
					return fmt.Errorf("%v", r)
				}
			}
			return nil
		})
	}

	setPolicy(corev1.ServiceInternalTrafficPolicyLocal)
	set(func(i int, e *discoveryv1.Endpoint) {
		if i == 1 {
			e.NodeName = new("elsewhere")
		}
	})
	eventuallyCheck(true, "the Service address "+webIP+":80 and its endpoint answer", "2 of 2 ready, 1 for clients on this Node, "+cluster.NodeName)
	set(func(_ int, e *discoveryv1.Endpoint) { e.NodeName = new("elsewhere") })
	eventuallyCheck(false, "DNS is fine; the Service default/web is for clients beside its endpoints only (internalTrafficPolicy: Local), and none is on this Node, "+cluster.NodeName)
	w.check(lab.App4+":8080", "none", lab.App4+":8080 answers")

	setPolicy(corev1.ServiceInternalTrafficPolicyCluster)
	set(func(i int, e *discoveryv1.Endpoint) {
		e.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(i == 0), Terminating: new(true)}
	})
	eventuallyCheck(true, "the Service address "+webIP+":80 and its endpoint answer", "0 of 2 ready, not "+lab.Worker4+", ending, but serving on "+lab.App4)
	set(func(_ int, e *discoveryv1.Endpoint) { e.Conditions.Serving = new(false) })
	eventuallyCheck(false, "the Service default/web has no ready endpoint of 2")
	set(func(_ int, e *discoveryv1.Endpoint) {
		e.Conditions = discoveryv1.EndpointConditions{Ready: new(true), Serving: new(false)}
	})
	eventuallyCheck(true, "its 2 endpoints answer", "2 of 2 ready, of these 2 only by publishNotReadyAddresses")

	noError(t, endpointSlices.Delete(ctx, "web-1", metav1.DeleteOptions{}))
	eventuallyCheck(false, "the Service default/web has no ready endpoint: it has no selector, so nobody makes its EndpointSlices but by hand")
}

// TestHangingPlugin: a command that gives no credentials is named, and holds nothing up.
func TestHangingPlugin(t *testing.T) {
	h := raise(t, lab.Options{})
	const command, file = "/run/get-token", "/run/kubeconfig"
	noError(t, h.Host().WriteFile(command, []byte("#!/bin/sh\nexec sleep 60\n"), 0o755))
	noError(t, h.Host().WriteFile(file, []byte(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:6443"}}]
users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: `+command+`, interactiveMode: Never}}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`), 0o600))
	r := h.run("attach", "--kubeconfig", file, "--wait", "1s")
	if r.code != 1 || !strings.Contains(r.stderr, command) || strings.Contains(r.stderr, "not answered") {
		t.Errorf("%v", r)
	}
	h.attach()
	r = h.run("check", lab.Backend, "--kubeconfig", file)
	if r.code != 3 || !strings.Contains(r.stdout, command) {
		t.Errorf("%v", r)
	}
}
