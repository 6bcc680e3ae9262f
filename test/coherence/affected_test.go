package coherence

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	kube "github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// world is a cluster whose Services change at random.
type world struct {
	t       *testing.T
	ctx     context.Context
	c       *kube.Cluster
	random  *rand.Rand
	dns     netip.AddrPort
	state   *coherence.State
	changes chan cluster.Change
	marks   int
}

var (
	worldNamespaces = []string{"default", "other", "third"}
	worldServices   = []string{"s0", "s1", "s2"}
	worldEndpoints  = []string{"10.9.0.1", "10.9.0.2", "10.9.0.3", "fd00:9::1", "fd00:9::2"}
	worldClusterIPs = []string{"172.21.5.1", "172.21.5.2", "172.21.5.3"}
)

// TestKubernetesAffected makes random changes in a real cluster. The names whose answers a real CoreDNS gives otherwise after a
// change must be among those that the change is said to affect, and what is expected of a Service's name be what it answers.
func TestKubernetesAffected(t *testing.T) {
	l := lab.Start(t, lab.Options{NoServers: true})
	c := kube.Start(t, l, kube.Options{Controllers: true})
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	if err := c.DeployCoreDNS(ctx, 1, kube.Corefile); err != nil {
		t.Fatal(err)
	}
	pods, err := c.CoreDNSPods(ctx)
	if err != nil || len(pods) != 1 {
		t.Fatalf("%d Pods of CoreDNS, %v", len(pods), err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	w := &world{t: t, ctx: ctx, c: c, random: rand.New(rand.NewPCG(seed, 0)), dns: pods[0].Addr4(), state: coherence.New(zone)}
	w.listen(kube.AdminKubeconfig)
	w.await(func(c cluster.Change) bool { return c.Kind == cluster.KindSynced })
	w.prepareMarks()
	w.settle()
	before := w.answers()
	changed, expected := 0, 0
	for i := range 120 {
		what := w.change()
		affected := w.settle()
		after := w.answers()
		for name, answer := range after {
			if answer == before[name] {
				continue
			}
			changed++
			has := func(a coherence.Affected) bool { return a.Has(strings.TrimSuffix(name, ".")) }
			if !slices.ContainsFunc(affected, has) {
				t.Errorf("change %d, %s: the answers of %s changed, which is not said:\nbefore %s\nafter  %s\nsaid: %+v", i, what, name, before[name], answer, affected)
			}
		}
		expected += w.compare(what)
		before = after
	}
	t.Logf("%d answers changed, %d were as expected", changed, expected)
	if changed == 0 || expected == 0 {
		t.Error("nothing was tried")
	}
}

// listen starts a follower with a kubeconfig of host0.
func (w *world) listen(kubeconfig string) {
	self, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := w.c.Host().Command(w.ctx, self)
	cmd.Env, cmd.Stderr = append(os.Environ(), modeEnv+"="+modePrint, configEnv+"="+kubeconfig), os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.changes = make(chan cluster.Change, 4096)
	go func() {
		defer close(w.changes)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var c cluster.Change
			if json.Unmarshal(lines.Bytes(), &c) == nil {
				w.changes <- c
			}
		}
		_ = cmd.Wait()
	}()
}

// await applies changes until done, and returns what they affect.
func (w *world) await(done func(cluster.Change) bool) (affected []coherence.Affected) {
	w.t.Helper()
	for {
		select {
		case c, open := <-w.changes:
			if !open {
				w.t.Fatal("the follower has ended")
			}
			affected = append(affected, w.state.Apply(c))
			if done(c) {
				return affected
			}
		case <-w.ctx.Done():
			w.t.Fatal("the follower does not hear of a change")
		}
	}
}

const marker = "marker"

func mark(i int) string { return fmt.Sprintf("m%d", i) }

func (w *world) prepareMarks() {
	w.must(w.c.Client.CoreV1().Services("default").Create(w.ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "alias" + marker},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "none.invalid"},
	}, metav1.CreateOptions{}))
	headless, err := w.c.Client.CoreV1().Services("default").Create(w.ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: marker}, Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone},
	}, metav1.CreateOptions{})
	w.must(headless, err)
	w.must(w.c.Client.DiscoveryV1().EndpointSlices("default").Create(w.ctx, kube.NewSlice(headless, marker, "10.9.9.9"), metav1.CreateOptions{}))
}

func (w *world) must(_ any, err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// settle sets a mark behind the last change of each resource, and waits until both CoreDNS and the follower have come to it:
// within a resource changes keep their order.
func (w *world) settle() []coherence.Affected {
	w.t.Helper()
	w.marks++
	services, endpoints := w.c.Client.CoreV1().Services("default"), w.c.Client.DiscoveryV1().EndpointSlices("default")
	alias, err := services.Get(w.ctx, "alias"+marker, metav1.GetOptions{})
	w.must(alias, err)
	alias.Spec.ExternalName = mark(w.marks) + ".invalid"
	w.must(services.Update(w.ctx, alias, metav1.UpdateOptions{}))
	slice, err := endpoints.Get(w.ctx, marker, metav1.GetOptions{})
	w.must(slice, err)
	slice.Endpoints[0].Hostname = new(mark(w.marks))
	w.must(endpoints.Update(w.ctx, slice, metav1.UpdateOptions{}))
	w.must(w.c.Client.CoreV1().Namespaces().Create(w.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: mark(w.marks)}}, metav1.CreateOptions{}))
	left := 3
	affected := w.await(func(c cluster.Change) bool {
		switch {
		case c.Kind == cluster.KindService && c.Name == "alias"+marker && c.Service.New.ExternalName == alias.Spec.ExternalName,
			c.Kind == cluster.KindSlice && c.Name == marker && c.Slice.New.Members[0].Hostname == mark(w.marks),
			c.Kind == cluster.KindNamespace && c.Name == mark(w.marks):
			left--
		}
		return left == 0
	})
	w.must(nil, kube.Eventually(w.ctx, func(context.Context) error {
		name := ".svc." + zone + "."
		if answer := w.ask("alias"+marker+".default"+name, dns.TypeCNAME); !strings.Contains(answer, mark(w.marks)+".invalid") {
			return errors.New("CoreDNS does not know of the Services: " + answer)
		}
		if answer := w.ask(mark(w.marks)+"."+marker+".default"+name, dns.TypeA); !strings.Contains(answer, "10.9.9.9") {
			return errors.New("CoreDNS does not know of the slices: " + answer)
		}
		if answer := w.ask(mark(w.marks)+name, dns.TypeA); !strings.HasPrefix(answer, "NOERROR") {
			return errors.New("CoreDNS does not know of the namespaces: " + answer)
		}
		return nil
	}))
	return affected
}

// ask is CoreDNS's answer, without what changes by itself: order, TTL, and the SOA, which has a serial number.
func (w *world) ask(name string, qtype uint16) string {
	m := w.exchange(name, qtype)
	lines := []string{}
	for _, rr := range slices.Concat(m.Answer, m.Extra) {
		if rr.Header().Rrtype != dns.TypeSOA {
			rr.Header().Ttl = 0
			lines = append(lines, rr.String())
		}
	}
	slices.Sort(lines)
	return dns.RcodeToString[m.Rcode] + " " + strings.Join(lines, "; ")
}

func (w *world) exchange(name string, qtype uint16) *dns.Msg {
	w.t.Helper()
	query := new(dns.Msg)
	query.SetQuestion(name, qtype)
	m, err := w.c.Host().Exchange(w.ctx, "tcp", w.dns, query)
	w.must(m, err)
	return m
}

// answers are those of all names that a change may concern, all types of a name together.
func (w *world) answers() map[string]string {
	all := make(map[string]string)
	add := func(name string, types ...uint16) {
		for _, qtype := range types {
			all[name] += fmt.Sprintf("[%s %s] ", dns.TypeToString[qtype], w.ask(name, qtype))
		}
	}
	for _, namespace := range worldNamespaces {
		add(namespace+".svc."+zone+".", dns.TypeA)
		add("10-9-0-1."+namespace+".pod."+zone+".", dns.TypeA)
		add(namespace+".pod."+zone+".", dns.TypeA)
		for _, service := range worldServices {
			name := service + "." + namespace + ".svc." + zone + "."
			add(name, dns.TypeA, dns.TypeAAAA, dns.TypeSRV)
			for _, below := range []string{"_http._tcp", "_dns._udp", "h0", "h1", "10-9-0-1", "10-9-0-2"} {
				add(below+"."+name, dns.TypeA, dns.TypeSRV)
			}
		}
	}
	for _, address := range slices.Concat(worldEndpoints, worldClusterIPs) {
		reverse, err := dns.ReverseAddr(address)
		w.must(reverse, err)
		add(reverse, dns.TypePTR)
	}
	add(zone+".", dns.TypeNS, dns.TypeA)
	add("ns.dns."+zone+".", dns.TypeA)
	return all
}

// compare holds what is expected to what is answered, and returns how often something was.
func (w *world) compare(what string) (n int) {
	w.t.Helper()
	for _, namespace := range worldNamespaces {
		for _, service := range append(worldServices, "never") {
			name := service + "." + namespace + ".svc." + zone + "."
			for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
				want, known := w.state.Expect(name, qtype)
				if !known {
					continue
				}
				n++
				m := w.exchange(name, qtype)
				got := coherence.Expected{NoName: m.Rcode == dns.RcodeNameError}
				for _, rr := range m.Answer {
					switch rr := rr.(type) {
					case *dns.A:
						address, _ := netip.AddrFromSlice(rr.A.To4())
						got.Addresses = append(got.Addresses, address)
					case *dns.AAAA:
						address, _ := netip.AddrFromSlice(rr.AAAA)
						got.Addresses = append(got.Addresses, address)
					}
				}
				slices.SortFunc(got.Addresses, netip.Addr.Compare)
				if got.NoName != want.NoName || !slices.Equal(got.Addresses, want.Addresses) {
					w.t.Errorf("%s: %s %s is %+v, want %+v", what, name, dns.TypeToString[qtype], got, want)
				}
			}
		}
	}
	return n
}

func pick[T any](w *world, from []T) T { return from[w.random.IntN(len(from))] }

// change makes one change, which may be none, and says what it was.
func (w *world) change() string {
	w.t.Helper()
	namespace, name := pick(w, worldNamespaces), pick(w, worldServices)
	if w.random.IntN(8) == 0 {
		return w.changeNamespace(namespace)
	}
	if _, err := w.c.Client.CoreV1().Namespaces().Get(w.ctx, namespace, metav1.GetOptions{}); apierrors.IsNotFound(err) {
		return w.changeNamespace(namespace)
	}
	if w.random.IntN(2) == 0 {
		return w.changeSlice(namespace, name)
	}
	return w.changeService(namespace, name)
}

// changeNamespace only makes one: an empty one is ended by a controller that needs time.
func (w *world) changeNamespace(name string) string {
	_, err := w.c.Client.CoreV1().Namespaces().Create(w.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Fatal(err)
	}
	return "namespace " + name
}

func (w *world) changeService(namespace, name string) string {
	api := w.c.Client.CoreV1().Services(namespace)
	err := api.Delete(w.ctx, name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		w.t.Fatal(err)
	}
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}}
	what := ""
	switch w.random.IntN(6) {
	case 0:
		return fmt.Sprintf("Service %s/%s deleted", namespace, name)
	case 1:
		what, s.Spec.ClusterIP = "ClusterIP", pick(w, worldClusterIPs)
	case 2:
		what, s.Spec.IPFamilyPolicy = "dual stack", new(corev1.IPFamilyPolicyPreferDualStack)
	case 3:
		what, s.Spec.ClusterIP, s.Spec.PublishNotReadyAddresses = "headless", corev1.ClusterIPNone, w.random.IntN(2) == 0
	case 4:
		target := pick(w, worldServices) + "." + pick(w, worldNamespaces) + ".svc." + zone
		what, s.Spec.Type, s.Spec.ExternalName = "alias of "+target, corev1.ServiceTypeExternalName, target
	case 5:
		what, s.Spec.Type, s.Spec.ExternalName = "alias of outside", corev1.ServiceTypeExternalName, "www.example.invalid"
	}
	ports := []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}, {Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}}
	s.Spec.Ports = ports[:1+w.random.IntN(2)]
	if _, err := api.Create(w.ctx, s, metav1.CreateOptions{}); err != nil && !apierrors.IsInvalid(err) { // the address may be taken
		w.t.Fatal(err)
	}
	return fmt.Sprintf("Service %s/%s: %s", namespace, name, what)
}

func (w *world) changeSlice(namespace, service string) string {
	api := w.c.Client.DiscoveryV1().EndpointSlices(namespace)
	name := service + pick(w, []string{"-a", "-b"})
	err := api.Delete(w.ctx, name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		w.t.Fatal(err)
	}
	if w.random.IntN(5) == 0 {
		return fmt.Sprintf("slice %s/%s deleted", namespace, name)
	}
	of := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: service}}
	of.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}
	addresses := worldEndpoints[:3]
	if w.random.IntN(3) == 0 {
		addresses = worldEndpoints[3:]
	}
	slice := kube.NewSlice(of, name, addresses[:1+w.random.IntN(len(addresses))]...)
	for i := range slice.Endpoints {
		e := &slice.Endpoints[i]
		if w.random.IntN(2) == 0 {
			e.Hostname = new(pick(w, []string{"h0", "h1"}))
		}
		switch w.random.IntN(4) {
		case 0:
			e.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
		case 1:
			e.Conditions = discoveryv1.EndpointConditions{Ready: new(false)}
		}
	}
	w.must(api.Create(w.ctx, slice, metav1.CreateOptions{}))
	return fmt.Sprintf("slice %s/%s with %d endpoints", namespace, name, len(slice.Endpoints))
}
