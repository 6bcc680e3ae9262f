package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// createBackend makes the Service that most tests ask for.
func createBackend(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "backend", Namespace: "default"},
		Spec:       corev1.ServiceSpec{ClusterIP: lab.Backend4, Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}},
	}
	if _, err := c.Client.CoreV1().Services("default").Create(t.Context(), service, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// dnsperf is a load that runs until it is told to stop.
type dnsperf struct {
	from *lab.Node
	cmd  *lab.Cmd
	out  bytes.Buffer
}

func startDNSPerf(t *testing.T, from *lab.Node, server string, rate int) *dnsperf {
	t.Helper()
	if err := from.WriteFile("/run/lab/queries", []byte(lab.Backend+" A\n"+lab.Kubernetes+" A\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	d := &dnsperf{from: from, cmd: from.Command(context.Background(), "dnsperf", "-s", server, "-d", "/run/lab/queries",
		"-Q", strconv.Itoa(rate), "-c", "4", "-T", "1", "-l", "300", "-t", "5", "-q", "2000")}
	d.cmd.Stdout, d.cmd.Stderr, d.cmd.Dir = &d.out, &d.out, "/"
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.cmd.Process.Kill(); _ = d.cmd.Wait() })
	return d
}

// finish ends the load and returns how many queries it sent, and how many of them got no answer or SERVFAIL; none may get
// any other answer than the right one.
func (d *dnsperf) finish(t *testing.T) (sent, failed int) {
	t.Helper()
	if err := d.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	_ = d.cmd.Wait() // an interrupted dnsperf says so by its status
	number := func(what string) int {
		m := regexp.MustCompile(what).FindSubmatch(d.out.Bytes())
		if m == nil {
			t.Fatalf("%s: dnsperf does not say %q:\n%s", d.from.Name(), what, &d.out)
		}
		n, err := strconv.Atoi(string(m[1]))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	sent = number(`Queries sent: +(\d+)`)
	// What was under way when it was interrupted counts as interrupted, not as lost.
	lost, completed, right := number(`Queries lost: +(\d+)`), number(`Queries completed: +(\d+)`), number(`NOERROR (\d+)`)
	servfail := 0
	if bytes.Contains(d.out.Bytes(), []byte("SERVFAIL")) {
		servfail = number(`SERVFAIL (\d+)`)
	}
	if right+servfail != completed {
		t.Errorf("%s: %d answers are neither right nor SERVFAIL:\n%s", d.from.Name(), completed-right-servfail, &d.out)
	}
	latency := regexp.MustCompile(`Average Latency.*`).Find(d.out.Bytes())
	t.Logf("%s: %d queries, %d lost, %d SERVFAIL, %s", d.from.Name(), sent, lost, servfail, latency)
	return sent, lost + servfail
}

// TestKubernetesRollingRestart: a Deployment of CoreDNS is restarted, twice, under 5,000 queries a second from the host, the worker
// and a pod. The EndpointSlices are the real controller's. Each query that CoreDNS had room for is answered.
func TestKubernetesRollingRestart(t *testing.T) {
	for _, replicas := range []int32{2, 1} {
		t.Run(fmt.Sprintf("%d replicas", replicas), func(t *testing.T) { rollingRestart(t, replicas) })
	}
}

func rollingRestart(t *testing.T, replicas int32) {
	h := raise(t, lab.Options{NoServers: true})
	c := cluster.Start(t, h.Lab, cluster.Options{Controllers: true})
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	for _, s := range h.outside() {
		if err := s.Start(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.DeployCoreDNS(ctx, replicas, cluster.Corefile); err != nil {
		t.Fatal(err)
	}
	createBackend(t, c)
	h.attach(discovered, ranges, []string{"--pods", "cni0"})
	eventually(t, "the Service is known to CoreDNS", func() error {
		raw, err := ask(h.Host(), hostDNS, pack(t, 1, lab.Backend, dns.TypeA), noReply)
		if err != nil {
			return err
		}
		return isAddress(raw, lab.Backend4)
	})
	before := h.dataplane()
	lookers := h.lookers()
	loads := []*dnsperf{
		startDNSPerf(t, h.Host(), "127.0.0.1", 2500),
		startDNSPerf(t, h.Worker(), lab.KubeSwitch4, 1500),
		startDNSPerf(t, h.Pod("app"), lab.KubeDNS4, 1000),
	}
	begin := time.Now()
	const restarts = 2
	for i := range restarts {
		old := h.endpoints4()
		if err := c.RestartCoreDNS(ctx, strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the endpoints are the new Pods", func() error {
			now := h.endpoints4()
			for _, address := range now {
				for _, gone := range old {
					if address == gone {
						return fmt.Errorf("endpoints are %v, and were %v", now, old)
					}
				}
			}
			if len(now) != int(replicas) {
				return fmt.Errorf("endpoints are %v", now)
			}
			return nil
		})
	}
	took := time.Since(begin)
	lookups, missed, longest := endLookers(t, lookers)
	sum, failed := 0, 0
	for _, load := range loads {
		s, f := load.finish(t)
		sum, failed = sum+s, failed+f
	}
	loaded := time.Since(begin)
	// A CoreDNS that gets no processor for a while has no room for queries in its socket: those it never saw. How many that
	// were in a Pod that is ending is known when it has ended.
	var overflowed uint64
	var after dataplane
	var steered int
	eventuallyIn(t, time.Minute, "each query that CoreDNS had room for is answered", func() (err error) {
		if overflowed, err = c.Overflowed(); err != nil {
			return err
		}
		after = h.dataplane()
		steered = 0
		replied := 0
		for _, scope := range []string{"host", "kubeswitch", "pod"} {
			steered += after.rose(before, scope, "steered")
			replied += after.rose(before, scope, "replied")
		}
		if steered-replied > int(overflowed) {
			return fmt.Errorf("%d queries were steered and not answered, %d of them for want of room in CoreDNS's sockets", steered-replied, overflowed)
		}
		return nil
	})
	t.Logf("%d rolling restarts in %s under %.0f queries a second: %d failed, %d overflowed", restarts, took.Round(time.Millisecond),
		float64(sum)/loaded.Seconds(), failed, overflowed)
	t.Logf("%d lookups beside it: %d failed, the longest took %s", lookups, missed, longest)
	if overflowed == 0 && missed > 0 {
		t.Errorf("%d of %d lookups failed", missed, lookups)
	}
	// Servers that starve are taken out of rotation, for which no rollout is to blame.
	// A query that finds its NAT ports taken is the forwarder's, which may happen to a few.
	if overflowed == 0 && (failed > 0 || steered*1000 < sum*999) {
		t.Errorf("of %d queries %d failed and %d were steered: %v", sum, failed, steered, after.Reasons)
	}
}
