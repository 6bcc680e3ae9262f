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
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// truthObjects are Services of every kind that the Kubernetes DNS specification 1.1.0 knows.
func truthObjects() (services []*corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) {
	policy := corev1.IPFamilyPolicyPreferDualStack
	port := func(name string, number int32, protocol corev1.Protocol) corev1.ServicePort {
		return corev1.ServicePort{Name: name, Port: number, Protocol: protocol}
	}
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name, Namespace: "default"} }
	for i := range 20 { // 2.3: a ClusterIP each, both families, several named ports
		services = append(services, &corev1.Service{ObjectMeta: meta(fmt.Sprintf("web%d", i)), Spec: corev1.ServiceSpec{
			IPFamilyPolicy: &policy,
			Ports:          []corev1.ServicePort{port("http", 80, corev1.ProtocolTCP), port("metrics", 9100, corev1.ProtocolTCP), port("dns", 53, corev1.ProtocolUDP)},
		}})
	}
	named := &corev1.Service{ObjectMeta: meta("named"), Spec: corev1.ServiceSpec{
		ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{port("http", 80, corev1.ProtocolTCP)},
	}}
	unnamed := &corev1.Service{ObjectMeta: meta("unnamed"), Spec: corev1.ServiceSpec{
		ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{port("grpc", 9000, corev1.ProtocolTCP)},
	}}
	services = append(
		services, named, unnamed,
		&corev1.Service{ObjectMeta: meta("empty"), Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone}},
		&corev1.Service{ObjectMeta: meta("outside"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "www.example.com"}},
		&corev1.Service{ObjectMeta: meta("alias"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "web0.default.svc.cluster.local"}},
	)
	hosts := cluster.NewSlice(named, "named-4", "172.20.30.1", "172.20.30.2", "172.20.30.3")
	for i := range hosts.Endpoints {
		hosts.Endpoints[i].Hostname = new(fmt.Sprintf("h%d", i))
	}
	hosts6 := cluster.NewSlice(named, "named-6", "fd00:20::30:1")
	hosts6.Endpoints[0].Hostname = new("h0")
	endpointSlices = append(endpointSlices, hosts, hosts6, cluster.NewSlice(unnamed, "unnamed-4", "172.20.31.1", "172.20.31.2"))
	return services, endpointSlices
}

// truthQuestions are at least two hundred names and what is asked of them.
func truthQuestions(services []corev1.Service) (list []dns.Question) {
	ask := func(name string, types ...uint16) {
		for _, qtype := range types {
			list = append(list, dns.Question{Name: dns.Fqdn(name), Qtype: qtype, Qclass: dns.ClassINET})
		}
	}
	const svc = ".default.svc.cluster.local"
	long := strings.Repeat(strings.Repeat("a", 63)+".", 3) // 192 octets of labels
	room := 253 - len(long) - len(svc)
	for _, s := range services {
		name := s.Name + "." + s.Namespace + ".svc.cluster.local"
		ask(name, dns.TypeA, dns.TypeAAAA, dns.TypeSRV, dns.TypeTXT, dns.TypeMX)
		ask("sub."+name, dns.TypeA)
		ask("*."+name, dns.TypeA)
		for _, p := range s.Spec.Ports {
			ask("_"+p.Name+"._"+strings.ToLower(string(p.Protocol))+"."+name, dns.TypeSRV)
		}
		ask("_nothing._tcp."+name, dns.TypeSRV)
		for _, address := range s.Spec.ClusterIPs {
			if reverse, err := dns.ReverseAddr(address); err == nil {
				ask(reverse, dns.TypePTR)
			}
		}
	}
	for i := range 4 {
		ask(fmt.Sprintf("h%d.named", i)+svc, dns.TypeA, dns.TypeAAAA)
	}
	for _, address := range []string{"172.20.30.1", "172.20.30.2", "172.20.31.1", "172.21.255.254", "172.20.99.99", "fd00:20::30:1"} {
		reverse, err := dns.ReverseAddr(address)
		if err != nil {
			panic(err) // constants
		}
		ask(reverse, dns.TypePTR)
	}
	ask("172-20-31-1.unnamed"+svc, dns.TypeA, dns.TypeSRV)
	ask("172-20-0-20.default.pod.cluster.local", dns.TypeA, dns.TypeAAAA)
	ask("fd00-20--20.default.pod.cluster.local", dns.TypeA, dns.TypeAAAA)
	ask("dns-version.cluster.local", dns.TypeTXT, dns.TypeA)
	ask("cluster.local", dns.TypeSOA, dns.TypeNS, dns.TypeA)
	ask("svc.cluster.local", dns.TypeA)
	ask("pod.cluster.local", dns.TypeA)
	ask("default.svc.cluster.local", dns.TypeA)
	ask("nosuchns.svc.cluster.local", dns.TypeA)
	ask("nothing.nosuchns.svc.cluster.local", dns.TypeA)
	for i := range 20 {
		ask(fmt.Sprintf("missing%d", i)+svc, dns.TypeA, dns.TypeAAAA)
	}
	ask("WEB0.Default.SVC.Cluster.LOCAL", dns.TypeA, dns.TypeAAAA)
	ask("wEb1.dEfAuLt.sVc.cLuStEr.lOcAl", dns.TypeA)
	ask("_HTTP._tcp.web0"+svc, dns.TypeSRV)
	ask(long+strings.Repeat("b", room)+svc, dns.TypeA) // 253 octets, the longest
	ask("web0.default.svc.cluster.local.cluster.local", dns.TypeA)
	ask("*.default.svc.cluster.local", dns.TypeA)
	ask("any.any.svc.cluster.local", dns.TypeA)
	return list
}

// canonical is a reply without what may differ: its ID, and the order of records and of an OPT's options.
func canonical(m *dns.Msg) string {
	section := func(records []dns.RR) string {
		lines := make([]string, 0, len(records))
		for _, rr := range records {
			lines = append(lines, rr.String())
		}
		slices.Sort(lines)
		return strings.Join(lines, "\n")
	}
	header := m.MsgHdr
	header.Id = 0
	return fmt.Sprintf("%+v\n%v\nanswer\n%s\nauthority\n%s\nadditional\n%s", header, m.Question, section(m.Answer), section(m.Ns), section(m.Extra))
}

// truthCluster makes the objects of the comparison and one CoreDNS, and returns that and what to ask. One, since the serial number in a
// SOA record is its own.
func truthCluster(ctx context.Context, t *testing.T, c *cluster.Cluster) (direct netip.AddrPort, questions []dns.Question) {
	t.Helper()
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
	if err := c.DeployCoreDNS(ctx, 1, cluster.Corefile); err != nil {
		t.Fatal(err)
	}
	pods, err := c.CoreDNSPods(ctx)
	if err != nil || len(pods) != 1 {
		t.Fatalf("%d Pods of CoreDNS, %v", len(pods), err)
	}
	list, err := c.Client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pods[0].Addr4(), truthQuestions(list.Items)
}

// TestKubernetesTruth compares what this host is answered with what CoreDNS answers who asks it directly, for the whole of the
// Kubernetes DNS specification, by UDP and TCP.
func TestKubernetesTruth(t *testing.T) {
	h := raise(t, lab.Options{})
	c := cluster.Start(t, h.Lab, cluster.Options{Controllers: true})
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	direct, questions := truthCluster(ctx, t, c)
	h.attach(discovered, ranges, ranges6)
	names := make(map[string]bool)
	for _, q := range questions {
		names[q.Name] = true
	}
	if len(names) < 200 {
		t.Fatalf("only %d names, want at least 200", len(names))
	}
	before := h.dataplane()
	kinds := make(map[string]int)
	for _, network := range []string{"udp", "tcp"} {
		for _, q := range questions {
			query := new(dns.Msg)
			query.SetQuestion(q.Name, q.Qtype)
			query.SetEdns0(1232, false)
			exchange := func(server netip.AddrPort) *dns.Msg {
				t.Helper()
				m, err := h.Host().Exchange(ctx, network, server, query)
				if err != nil {
					t.Fatalf("%s %s %s: %v", network, q.Name, dns.TypeToString[q.Qtype], err)
				}
				return m
			}
			want, got := exchange(direct), exchange(hostDNS)
			if canonical(want) != canonical(got) {
				t.Errorf("%s %s %s differs:\nCoreDNS %s\nhere    %s", network, q.Name, dns.TypeToString[q.Qtype], canonical(want), canonical(got))
			}
			kinds[dns.RcodeToString[got.Rcode]]++
			if got.Rcode == dns.RcodeSuccess && len(got.Answer) == 0 {
				kinds["NODATA"]++
			}
		}
	}
	t.Logf("%d names, %d questions by UDP and TCP: %v", len(names), len(questions), kinds)
	for _, kind := range []string{"NOERROR", "NXDOMAIN", "NODATA"} {
		if kinds[kind] == 0 {
			t.Errorf("no answer was %s: %v", kind, kinds)
		}
	}
	if n := h.dataplane().rose(before, "host", "steered"); n != len(questions) {
		t.Errorf("%d of %d questions by UDP were steered: %v", n, len(questions), h.dataplane().Reasons["host"])
	}
}
