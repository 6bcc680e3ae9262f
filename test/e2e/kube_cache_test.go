package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// withoutTTL is canonical, with what ages and what changes places taken out. It reports the largest TTL.
func withoutTTL(m *dns.Msg) (text string, largest uint32) {
	m = m.Copy()
	for _, rr := range slices.Concat(m.Answer, m.Ns, m.Extra) {
		if rr.Header().Rrtype != dns.TypeOPT {
			largest = max(largest, rr.Header().Ttl)
			rr.Header().Ttl = 0
		} else if rr.Header().Class > 1232 { // what is steered says no more
			rr.Header().Class = 1232
		}
	}
	return canonical(m), largest
}

// TestKubernetesCacheTruth: what the kernel answers is what CoreDNS answers, for the whole of the Kubernetes DNS specification, in every form
// of query that programs send.
func TestKubernetesCacheTruth(t *testing.T) {
	h := raise(t, lab.Options{})
	c := cluster.Start(t, h.Lab, cluster.Options{Controllers: true})
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	direct, questions := truthCluster(ctx, t, c)
	h.attach(discovered, ranges, ranges6, cached)
	before := h.dataplane()
	for form, edit := range map[string]func(*dns.Msg){
		"plain":       func(*dns.Msg) {},
		"EDNS":        func(m *dns.Msg) { m.SetEdns0(1232, false) },
		"EDNS, large": func(m *dns.Msg) { m.SetEdns0(4096, false) },
		"DO":          func(m *dns.Msg) { m.SetEdns0(1232, true) },
		"AD and CD":   func(m *dns.Msg) { m.AuthenticatedData, m.CheckingDisabled = true, true },
		"RD=0":        func(m *dns.Msg) { m.RecursionDesired = false },
		"0x20":        func(m *dns.Msg) { m.Question[0].Name = mixed(m.Question[0].Name) },
	} {
		for _, q := range questions {
			if form == "0x20" && q.Qtype == dns.TypeNS {
				continue // CoreDNS finds them only if the zone is spelled as in its Corefile
			}
			query := new(dns.Msg).SetQuestion(q.Name, q.Qtype)
			edit(query)
			exchange := func(server netip.AddrPort) *dns.Msg {
				t.Helper()
				query.Id = dns.Id()
				m, err := h.Host().Exchange(ctx, "udp", server, query)
				if err != nil {
					t.Fatalf("%s: %s %s: %v", form, q.Name, dns.TypeToString[q.Qtype], err)
				}
				return m
			}
			want, limit := withoutTTL(exchange(direct))
			for range 3 {
				reply := exchange(hostDNS)
				got, ttl := withoutTTL(reply)
				if form == "0x20" { // CoreDNS spells the zone in a SRV record's data as the asker does
					got, want = strings.ToLower(got), strings.ToLower(want)
				}
				if reply.Truncated { // from the kernel without any record
					continue
				}
				if ttl > limit {
					t.Errorf("%s: %s %s: TTL %d, CoreDNS gives %d", form, q.Name, dns.TypeToString[q.Qtype], ttl, limit)
				}
				if got != want {
					t.Errorf("%s: %s %s differs:\nCoreDNS %s\nhere    %s", form, q.Name, dns.TypeToString[q.Qtype], want, got)
				}
			}
		}
	}
	after := h.dataplane()
	answered, steered := after.rose(before, "host", "answered_cached"), after.rose(before, "host", "steered")
	t.Logf("%d questions: %d answered from the kernel, %d steered", len(questions), answered, steered)
	if answered < len(questions) {
		t.Errorf("only %d answers came from the kernel: %v", answered, h.run("cache"))
	}
}

// mixed is a name in a spelling of its own (draft-vixie-dnsext-dns0x20).
func mixed(name string) string {
	letters := []byte(strings.ToLower(name))
	for i, letter := range letters {
		if i%3 == 1 && 'a' <= letter && letter <= 'z' {
			letters[i] = letter - 'a' + 'A'
		}
	}
	return string(letters)
}

// staleness says for how long after a change a server gave the former answer.
type staleness []time.Duration

func (s staleness) String() string {
	sorted := slices.Sorted(slices.Values(s))
	return fmt.Sprintf("median %v, worst %v of %d", sorted[len(sorted)/2].Round(time.Microsecond), sorted[len(sorted)-1].Round(time.Microsecond), len(sorted))
}

// TestKubernetesCoherence: Services come and go while their names are answered from the kernel. No answer is staler than CoreDNS's own for
// longer than the change takes to get here.
func TestKubernetesCoherence(t *testing.T) {
	h := raise(t, lab.Options{})
	c := cluster.Start(t, h.Lab, cluster.Options{Controllers: true})
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	if err := c.DeployCoreDNS(ctx, 1, cluster.Corefile); err != nil {
		t.Fatal(err)
	}
	pods, err := c.CoreDNSPods(ctx)
	if err != nil || len(pods) != 1 {
		t.Fatalf("%d Pods of CoreDNS, %v", len(pods), err)
	}
	h.attach(discovered, ranges, cached)
	eventually(t, "changes of the cluster are told", func() error {
		if out := h.run("cache"); !strings.Contains(out.stdout, "changes of the cluster end them at once") {
			return fmt.Errorf("%v", out)
		}
		return nil
	})
	direct, name := pods[0].Addr4(), "coherent.default.svc.cluster.local."
	query := new(dns.Msg).SetQuestion(name, dns.TypeA)
	address := func(server netip.AddrPort) string {
		t.Helper()
		m, err := h.Host().Exchange(ctx, "udp", server, query)
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Answer) == 0 {
			return dns.RcodeToString[m.Rcode]
		}
		return m.Answer[0].(*dns.A).A.String()
	}
	services := c.Client.CoreV1().Services("default")
	var ours, theirs, more staleness
	before := h.dataplane()
	const changes = 100
	for i := range changes {
		for range 20 { // until it is kept
			address(hostDNS)
		}
		want := "NXDOMAIN"
		if i%2 == 1 {
			if err := services.Delete(ctx, "coherent", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		} else {
			s, err := services.Create(ctx, &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Name: "coherent"},
				Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
			}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			want = s.Spec.ClusterIP
		}
		changed := time.Now()
		stale := make(map[netip.AddrPort]time.Duration)
		for fresh := 0; fresh < 50; fresh++ { // in a row, by both
			for _, server := range []netip.AddrPort{direct, hostDNS} {
				if address(server) != want {
					stale[server], fresh = time.Since(changed), 0
				}
			}
			if time.Since(changed) > patience {
				t.Fatalf("change %d: %s is not what the name leads to after %v: CoreDNS says %s, we say %s", i, want, patience, address(direct), address(hostDNS))
			}
		}
		ours, theirs = append(ours, stale[hostDNS]), append(theirs, stale[direct])
		more = append(more, stale[hostDNS]-stale[direct])
	}
	t.Logf("stale after the API had acknowledged: here %v; CoreDNS %v; difference %v", ours, theirs, more)
	if n := h.dataplane().rose(before, "host", "answered_cached"); n < changes {
		t.Errorf("only %d answers came from the kernel: %v", n, h.run("cache"))
	}
}

// coherentHost is a host that follows a cluster with one CoreDNS, in whose Corefile there is more.
func coherentHost(t *testing.T, more string) (*host, *cluster.Cluster, netip.AddrPort) {
	t.Helper()
	h := raise(t, lab.Options{})
	c := cluster.Start(t, h.Lab, cluster.Options{Controllers: true})
	if err := c.DeployCoreDNS(t.Context(), 1, strings.Replace(cluster.Corefile, "kubernetes ", more+"\nkubernetes ", 1)); err != nil {
		t.Fatal(err)
	}
	pods, err := c.CoreDNSPods(t.Context())
	if err != nil || len(pods) != 1 {
		t.Fatalf("%d Pods of CoreDNS, %v", len(pods), err)
	}
	h.attach(discovered, ranges, cached)
	h.awaitCoherence("changes of the cluster end them at once")
	return h, c, pods[0].Addr4()
}

// awaitCoherence waits until the cache says of changes that they are told, or not.
func (h *host) awaitCoherence(want string) {
	h.t.Helper()
	eventually(h.t, "the cache says: "+want, func() error {
		if out := h.run("cache"); !strings.Contains(out.stdout, want) {
			return fmt.Errorf("%v", out)
		}
		return nil
	})
}

// listed is what the cache says of a name, its first answer.
func (h *host) listed(name string) (ttl, left uint32, ok bool) {
	h.t.Helper()
	var list []struct {
		TTL  uint32 `json:"ttl"`
		Left uint32 `json:"ttl_left"`
	}
	out := h.run("cache", "ls", "-o", "json", name)
	if err := json.Unmarshal([]byte(out.stdout), &list); err != nil {
		h.t.Fatalf("%v: %v", out, err)
	}
	if len(list) == 0 {
		return 0, 0, false
	}
	return list[0].TTL, list[0].Left, true
}

// TestKubernetesCacheWithoutWatch: while the apiserver is away answers of the cluster live for five seconds at most; once it is back what has
// changed meanwhile is known, and they live as long as CoreDNS says.
func TestKubernetesCacheWithoutWatch(t *testing.T) {
	h, c, _ := coherentHost(t, "")
	const name = "kubernetes.default.svc.cluster.local"
	a := h.askers()[0]
	long := func() {
		t.Helper()
		eventually(t, "the answer is kept for long", func() error {
			a.askFor(t, name+".", dns.TypeA)
			if ttl, left, ok := h.listed(name); !ok || left < 10 {
				return fmt.Errorf("TTL %d, %d s left, %v", ttl, left, ok)
			}
			return nil
		})
	}
	long()
	if err := c.KillAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.awaitCoherence("those of the cluster live for 5 s at most")
	h.warm(t, a, name+".", dns.TypeA)
	if ttl, left, ok := h.listed(name); ok && left > 5 {
		t.Errorf("without a watch: TTL %d, %d s left", ttl, left)
	}
	if err := c.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.awaitCoherence("changes of the cluster end them at once")
	long()
}

// TestKubernetesCacheOfOtherPlugins: a name of a plugin before that of the cluster's, as K2s has etcd with fallthrough, may change with
// nobody who tells. It lives for five seconds at most.
func TestKubernetesCacheOfOtherPlugins(t *testing.T) {
	h, c, direct := coherentHost(t, "hosts {\n 172.19.1.77 ingress.cluster.local\n ttl 300\n fallthrough\n}")
	a := h.askers()[0]
	h.warm(t, a, "ingress.cluster.local.", dns.TypeA)
	if ttl, left, ok := h.listed("ingress.cluster.local"); ok && (ttl != 300 || left > 5) {
		t.Errorf("TTL %d, %d s left", ttl, left)
	}
	// CoreDNS is restarted, and others come to answer while names are asked for.
	if err := c.RestartCoreDNS(t.Context(), "again"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new CoreDNS is known", func() error {
		r := h.answered()
		for _, e := range h.dataplane().Endpoints {
			if e.Address == direct.String() {
				return fmt.Errorf("endpoints %v, problems %v", e, r.Problems)
			}
		}
		return nil
	})
	h.warm(t, a, "kubernetes.default.svc.cluster.local.", dns.TypeA)
	if reply := a.askFor(t, "kubernetes.default.svc.cluster.local.", dns.TypeA); len(reply.Answer) != 1 {
		t.Errorf("got %v", reply)
	}
}
