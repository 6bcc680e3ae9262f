package coherence

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kube "github.com/k2s-dnsbpf/k2s-dnsbpf/test/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const (
	perSlice     = 10
	fleet        = 5 // followers at once, so that what one costs the apiserver stands out of its own work
	maxMore      = 60 << 10
	costInterval = 5 * time.Second
)

// TestLongRunWatchCost measures what following all Services costs a node in memory, and a real apiserver in octets and CPU,
// beside followers of whole objects. The figures in docs/scale.md are its output.
func TestLongRunWatchCost(t *testing.T) {
	l := lab.Start(t, lab.Options{NoServers: true})
	c := kube.Start(t, l, kube.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	if err := c.CreateDNS(ctx); err != nil {
		t.Fatal(err)
	}
	slices := populate(ctx, t, c, share(t, 10_000))
	t.Logf("%d Services, %d endpoints", len(slices), len(slices)*perSlice)
	resident := make(map[string]int)
	idle := make(map[int]time.Duration)
	for _, mode := range []string{modeNone, modeCompact, modeFull} {
		began, cpu := time.Now(), apiserverCPU(t, c)
		var all []*follower
		for range fleet {
			all = append(all, newFollower(ctx, t, c, mode))
		}
		for _, f := range all {
			f.await(t)
		}
		octets := sum(all)
		now, peak := all[0].resident(t)
		resident[mode] = now
		t.Logf("%s: start of %d: %s with the spread of starts, each %d octets and %s of the apiserver's CPU; %.1f MiB resident, %.1f at most",
			mode, fleet, time.Since(began).Round(time.Millisecond), octets/fleet, ((apiserverCPU(t, c) - cpu) / fleet).Round(time.Millisecond), mib(now), mib(peak))
		for _, rate := range []int{0, 10, 100} {
			octets, cpu := sum(all), apiserverCPU(t, c)
			made := churn(ctx, t, c, slices, rate)
			used := (apiserverCPU(t, c) - cpu) / time.Duration(costInterval/time.Second)
			if mode == modeNone {
				idle[rate] = used
			}
			t.Logf("%s: %d changes a second (%d made): each %d octets/s; apiserver %s CPU/s, %s more for each follower", mode, rate, made,
				(sum(all)-octets)/fleet/int64(costInterval/time.Second), used, (used-idle[rate])/fleet)
		}
		octets, cpu = sum(all), apiserverCPU(t, c)
		for _, f := range all {
			f.cut()
		}
		churn(ctx, t, c, slices, 0)
		t.Logf("%s: all connections cut: each %d octets, %s of the apiserver's CPU in %s", mode, (sum(all)-octets)/fleet, ((apiserverCPU(t, c) - cpu) / fleet).Round(time.Millisecond), costInterval)
		now, peak = all[0].resident(t)
		t.Logf("%s: at the end %.1f MiB resident, %.1f at most", mode, mib(now), mib(peak))
		resident[mode] = max(now, resident[mode])
		for _, f := range all {
			f.stop()
		}
	}
	more := resident[modeCompact] - resident[modeNone]
	t.Logf("%.1f MiB more resident; whole objects %.1f", mib(more), mib(resident[modeFull]-resident[modeNone]))
	if more > maxMore {
		t.Errorf("%d KiB more resident, want at most %d", more, maxMore)
	}
}

// share is how many Services there are: all, or one in K2S_SAMPLE where there is less time.
func share(t *testing.T, all int) int {
	t.Helper()
	text := os.Getenv("K2S_SAMPLE")
	if text == "" {
		return all
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("K2S_SAMPLE is %q: want a number from 1", text)
	}
	return max(1, all/n)
}

func mib(kib int) float64 { return float64(kib) / 1024 }

func apiserverCPU(t *testing.T, c *kube.Cluster) time.Duration {
	t.Helper()
	used, err := c.APIServerCPU()
	if err != nil {
		t.Fatal(err)
	}
	return used
}

// populate makes the Services, each with one slice as a controller makes it.
func populate(ctx context.Context, t *testing.T, c *kube.Cluster, many int) []*discoveryv1.EndpointSlice {
	t.Helper()
	const workers, namespaces = 32, 100
	for i := range namespaces {
		if _, err := c.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i)}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	slices := make([]*discoveryv1.EndpointSlice, many)
	failed := make(chan error, workers)
	for w := range workers {
		go func() {
			failed <- func() error {
				for i := w; i < many; i += workers {
					s := &corev1.Service{
						ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("service-%d", i), Namespace: fmt.Sprintf("n%d", i%namespaces), Labels: map[string]string{"app.kubernetes.io/name": fmt.Sprintf("service-%d", i)}},
						Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}},
					}
					var err error
					if _, err = c.Client.CoreV1().Services(s.Namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
						return err
					}
					if slices[i], err = c.Client.DiscoveryV1().EndpointSlices(s.Namespace).Create(ctx, sliceWithPods(s, i), metav1.CreateOptions{}); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	for range workers {
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
	}
	return slices
}

func sliceWithPods(s *corev1.Service, i int) *discoveryv1.EndpointSlice {
	var addresses []string
	for e := range perSlice {
		n := i*perSlice + e
		addresses = append(addresses, fmt.Sprintf("10.%d.%d.%d", 100+n>>16, n>>8&0xff, n&0xff))
	}
	slice := kube.NewSlice(s, s.Name+"-abcde", addresses...)
	for e := range slice.Endpoints {
		slice.Endpoints[e].TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: s.Namespace, Name: fmt.Sprintf("%s-7d4b9c6f5d-%05d", s.Name, e), UID: "6ba7b810-9dad-11d1-80b4-00c04fd430c8"}
		slice.Endpoints[e].Zone = new("zone-a")
		slice.Endpoints[e].NodeName = new(fmt.Sprintf("node-%d", i%5000))
		slice.Endpoints[e].Conditions = discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)}
	}
	return slice
}

// churn changes as many slices a second for the interval: one endpoint becomes ready or ceases to be. It returns how many.
func churn(ctx context.Context, t *testing.T, c *kube.Cluster, slices []*discoveryv1.EndpointSlice, rate int) (made int) {
	t.Helper()
	end := time.After(costInterval)
	var tick <-chan time.Time
	if rate > 0 {
		ticker := time.NewTicker(time.Second / time.Duration(rate))
		defer ticker.Stop()
		tick = ticker.C
	}
	for {
		select {
		case <-tick:
			i := made % len(slices)
			s := slices[i].DeepCopy()
			s.Endpoints[0].Conditions.Ready = new(!*s.Endpoints[0].Conditions.Ready)
			var err error
			if slices[i], err = c.Client.DiscoveryV1().EndpointSlices(s.Namespace).Update(ctx, s, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			made++
		case <-end:
			return made
		}
	}
}

// follower is a process that follows the cluster, through a relay that counts.
type follower struct {
	cmd      *lab.Cmd
	relay    net.Listener
	received atomic.Int64 // octets from the apiserver, TLS included
	synced   chan struct{}

	mu    sync.Mutex
	conns []net.Conn
}

func newFollower(ctx context.Context, t *testing.T, c *kube.Cluster, mode string) *follower {
	t.Helper()
	f := &follower{synced: make(chan struct{}, 64)}
	if err := c.Host().Do(func() (err error) { f.relay, err = net.Listen("tcp", "127.0.0.1:0"); return err }); err != nil {
		t.Fatal(err)
	}
	go f.serve(c)
	content, err := c.Host().ReadFile(kube.AdminKubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf("%s/relay-%d.kubeconfig", kube.Dir, f.relay.Addr().(*net.TCPAddr).Port)
	text := strings.ReplaceAll(string(content), "127.0.0.1:6443", f.relay.Addr().String())
	if err := c.Host().WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f.cmd = c.Host().Command(ctx, self)
	f.cmd.Env, f.cmd.Stderr = append(os.Environ(), modeEnv+"="+mode, configEnv+"="+config), os.Stderr
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := f.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			f.synced <- struct{}{}
		}
		close(f.synced)
	}()
	t.Cleanup(f.stop)
	return f
}

func (f *follower) serve(c *kube.Cluster) {
	for {
		client, err := f.relay.Accept()
		if err != nil {
			return
		}
		var server net.Conn
		if err := c.Host().Do(func() (err error) { server, err = net.Dial("tcp", "127.0.0.1:6443"); return err }); err != nil {
			client.Close()
			continue
		}
		f.mu.Lock()
		f.conns = append(f.conns, client, server)
		f.mu.Unlock()
		both := func() { client.Close(); server.Close() }
		go func() { defer both(); _, _ = io.Copy(server, client) }()
		go func() { defer both(); _, _ = io.Copy(counting{client, &f.received}, server) }()
	}
}

type counting struct {
	io.Writer
	n *atomic.Int64
}

func (c counting) Write(p []byte) (int, error) {
	n, err := c.Writer.Write(p)
	c.n.Add(int64(n))
	return n, err
}

func (f *follower) await(t *testing.T) {
	t.Helper()
	if _, open := <-f.synced; !open {
		t.Fatal("the follower has ended")
	}
}

// cut ends all connections.
func (f *follower) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.Close()
	}
	f.conns = nil
}

func (f *follower) stop() {
	_ = f.cmd.Process.Kill()
	_ = f.cmd.Wait()
	f.relay.Close()
	f.cut()
}

// resident is the memory of the process, in KiB, now and at its highest.
func (f *follower) resident(t *testing.T) (now, peak int) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", f.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	field := func(name string) int {
		m := regexp.MustCompile(`(?m)^` + name + `:\s+(\d+) kB`).FindSubmatch(status)
		n, err := strconv.Atoi(string(m[1]))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return field("VmRSS"), field("VmHWM")
}

func sum(all []*follower) (octets int64) {
	for _, f := range all {
		octets += f.received.Load()
	}
	return octets
}
