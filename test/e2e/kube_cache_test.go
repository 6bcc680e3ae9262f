package e2e

import (
	"context"
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
	services, endpointSlices := truthObjects()
	for _, s := range services {
		if _, err := c.Client.CoreV1().Services(s.Namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range endpointSlices {
		if _, err := c.Client.DiscoveryV1().EndpointSlices(s.Namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// Longer than the test takes: what is answered from the kernel stays there.
	if err := c.DeployCoreDNS(ctx, 1, strings.Replace(cluster.Corefile, "pods insecure", "pods insecure\n ttl 300", 1)); err != nil {
		t.Fatal(err)
	}
	pods, err := c.CoreDNSPods(ctx)
	if err != nil || len(pods) != 1 {
		t.Fatalf("%d Pods of CoreDNS, %v", len(pods), err)
	}
	h.attach(discovered, ranges, ranges6, cached)
	list, err := c.Client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	questions := truthQuestions(list.Items)
	direct := pods[0].Addr4()
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
	if err := c.DeployCoreDNS(ctx, 1, strings.Replace(cluster.Corefile, "pods insecure", "pods insecure\n ttl 300", 1)); err != nil {
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
