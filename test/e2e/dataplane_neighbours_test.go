package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const (
	tcNext = -1 // TCX_NEXT, TC_ACT_UNSPEC
	tcOK   = 0  // ends the walk
)

// tcx attaches a program to a hook of host0.
func (h *host) tcx(iface string, hook ebpf.AttachType, program *ebpf.Program, anchor link.Anchor) {
	h.t.Helper()
	err := h.Host().Do(func() error {
		found, err := net.InterfaceByName(iface)
		if err != nil {
			return err
		}
		attached, err := link.AttachTCX(link.TCXOptions{Interface: found.Index, Program: program, Attach: hook, Anchor: anchor})
		if err == nil {
			h.t.Cleanup(func() { _ = attached.Close() })
		}
		return err
	})
	if err != nil {
		h.t.Fatalf("attach a neighbour to %s: %v", iface, err)
	}
}

// clsact attaches a program to a hook of host0 as tc does, and as networks for pods did before there was TCX.
func (h *host) clsact(iface string, hook ebpf.AttachType, program *ebpf.Program) {
	h.t.Helper()
	err := h.Host().Do(func() error {
		found, err := netlink.LinkByName(iface)
		if err != nil {
			return err
		}
		index, parent := found.Attrs().Index, uint32(netlink.HANDLE_MIN_INGRESS)
		if hook == ebpf.AttachTCXEgress {
			parent = netlink.HANDLE_MIN_EGRESS
		}
		if err := netlink.QdiscAdd(&netlink.GenericQdisc{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
			QdiscType:  "clsact",
		}); err != nil {
			return fmt.Errorf("add clsact: %w", err)
		}
		return netlink.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: parent, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1},
			Fd:          program.FD(), Name: "neighbour", DirectAction: true,
		})
	})
	if err != nil {
		h.t.Fatalf("attach a filter to %s: %v", iface, err)
	}
}

// TestNeighbours: programs of others on the hooks that ours are on see every packet that is not ours.
func TestNeighbours(t *testing.T) {
	h := raise(t, lab.Options{})
	hooks := []struct {
		iface string
		hook  ebpf.AttachType
		from  *lab.Node
		to    string
	}{
		{"lo", ebpf.AttachTCXEgress, h.Host(), "127.0.0.1:9999"},
		{"kubeswitch", ebpf.AttachTCXIngress, h.Worker(), lab.KubeSwitch4 + ":9999"},
		{"cni0", ebpf.AttachTCXIngress, h.Pod("app"), lab.PodGateway4 + ":9999"},
	}
	type neighbour struct {
		name string
		*counter
	}
	neighbours := make([][]neighbour, len(hooks))
	for i, hook := range hooks {
		h.echo(hook.to)
		older, filter := newCounter(t, ebpf.SchedCLS, tcNext), newCounter(t, ebpf.SchedCLS, tcOK)
		h.tcx(hook.iface, hook.hook, older.program, nil)
		h.clsact(hook.iface, hook.hook, filter.program)
		neighbours[i] = []neighbour{{"older TCX", older}, {"clsact", filter}}
	}
	before := h.snapshot()
	h.attach(endpoints, ranges, pods("cni0"))
	for i, hook := range hooks {
		newer := newCounter(t, ebpf.SchedCLS, tcNext)
		h.tcx(hook.iface, hook.hook, newer.program, link.Head())
		neighbours[i] = append(neighbours[i], neighbour{"newer TCX, before ours", newer})
	}
	const packets = 25
	allSee := func(when string) {
		t.Helper()
		for i, hook := range hooks {
			first := make([]uint64, len(neighbours[i]))
			for j, n := range neighbours[i] {
				first[j] = n.value(t)
			}
			for range packets {
				if raw, err := ask(hook.from, netip.MustParseAddrPort(hook.to), []byte("hello"), patience); string(raw) != "hello" {
					t.Fatalf("%s: %s: %q %v", when, hook.to, raw, err)
				}
			}
			for j, n := range neighbours[i] {
				if rose := n.value(t) - first[j]; rose < packets {
					t.Errorf("%s: %s on %s has seen %d of %d packets", when, n.name, hook.iface, rose, packets)
				}
			}
		}
	}
	steered := func(when string) {
		t.Helper()
		before := h.dataplane()
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
		resolve(t, h.Pod("app"), clusterDNS, lab.Backend, lab.Backend4)
		after := h.dataplane()
		for _, scope := range []string{"host", "kubeswitch", "pod"} {
			if n := after.rose(before, scope, "replied"); n != 1 {
				t.Errorf("%s: %s: replied rose by %d", when, scope, n)
			}
		}
	}
	allSee("attached")
	steered("attached")
	h.kill()
	h.attach(endpoints, ranges, pods("cni0"))
	allSee("after a restart")
	steered("after a restart")
	h.detach()
	allSee("detached")
	// The newer ones are still there and were not before; bpftool lists them.
	for line := range strings.Lines(lab.Diff(before, h.snapshot())) {
		if !strings.Contains(line, "bpftool net") && !strings.Contains(line, "/var/lib/k2s-dnsbpf") {
			t.Errorf("the host is not as before: %s", line)
		}
	}
}

// TestNeighbourEndsTheWalk: a program that was there first and lets nobody look after it, as a CNI's may, does not hide
// queries from ours.
func TestNeighbourEndsTheWalk(t *testing.T) {
	h := raise(t, lab.Options{})
	for iface, hook := range map[string]ebpf.AttachType{
		"lo": ebpf.AttachTCXEgress, "kubeswitch": ebpf.AttachTCXIngress, "cni0": ebpf.AttachTCXIngress,
	} {
		h.tcx(iface, hook, newCounter(t, ebpf.SchedCLS, tcOK).program, nil)
	}
	h.attach()
	before := h.dataplane()
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
	resolve(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4)
	after := h.dataplane()
	if after.rose(before, "host", "replied") != 1 || after.rose(before, "kubeswitch", "replied") != 1 {
		t.Errorf("not steered: %v", after.Reasons)
	}
}

var perfFigure = regexp.MustCompile(`Queries (sent|completed|lost): +(\d+)`)

// TestReplacedUnderLoad: new settings, a daemon that is killed and one that takes over from it cost no steered query.
func TestReplacedUnderLoad(t *testing.T) {
	h := raise(t, lab.Options{})
	start := h.snapshot()
	h.attach(endpoints, ranges, pods("cni0"))
	list := fmt.Sprintf("%s A\n%s AAAA\n%s A\n%s A\n", lab.Backend, lab.Backend, lab.Kubernetes, lab.KubeDNS)
	if err := h.Host().WriteFile("/run/queries", []byte(list), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	perf := h.Host().Command(ctx, "dnsperf", "-s", "127.0.0.1", "-d", "/run/queries", "-c", "4", "-T", "1", "-l", "10", "-Q", "5000", "-q", "100")
	perf.Dir = "/"
	var out bytes.Buffer
	perf.Stdout, perf.Stderr = &out, &out
	if err := perf.Start(); err != nil {
		t.Fatal(err)
	}
	loads := map[string]*load{
		"worker": startLoad(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4, 2*time.Millisecond),
		"pod":    startLoad(t, h.Pod("app"), clusterDNS, lab.Backend, lab.Backend4, 2*time.Millisecond),
	}
	type step struct {
		name string
		at   time.Time
	}
	var steps []step // to tell which of them lost a query
	begins := func(name string) { steps = append(steps, step{name, time.Now()}) }
	running := func() {
		t.Helper()
		begins("nothing")
		for _, l := range loads {
			l.more(t, 100)
		}
	}
	running()
	// Live changes: zones, endpoints, patterns, prefixes.
	changes := [][]string{
		append(append([]string{"--zone", "cluster.local", "--zone", "k8s.example"}, ranges...), append(endpoint(lab.CoreDNS0v4), pods("cni0")...)...),
		append(append([]string{"--allow", "172.19.0.0/16"}, ranges...), append(endpoint(lab.CoreDNS1v4), pods("cni0", "vworker*")...)...),
		append(append([]string{}, ranges...), append(endpoint(lab.CoreDNS1v4, lab.CoreDNS0v4), pods("v*", "cni0")...)...),
		append(append([]string{}, ranges...), append(endpoint(lab.CoreDNS1v4, lab.CoreDNS0v4), pods("cni0")...)...),
	}
	for _, args := range changes {
		begins(strings.Join(args, " "))
		r := h.run(append([]string{"attach"}, args...)...)
		if r.code != 0 || !strings.Contains(r.stdout, "new settings") {
			t.Errorf("want a change to new settings: %v", r)
		}
		running()
	}
	for range 2 {
		begins("kill")
		h.kill()
		running() // with no daemon
		begins("attach after kill")
		h.attach(endpoints, ranges, pods("cni0"))
		running()
	}
	if err := perf.Wait(); err != nil {
		t.Fatalf("%v: %s", err, &out)
	}
	figures := make(map[string]string)
	for _, m := range perfFigure.FindAllStringSubmatch(out.String(), -1) {
		figures[m[1]] = m[2]
	}
	t.Logf("dnsperf on the host: %v", figures)
	if figures["lost"] != "0" || figures["sent"] == "" || figures["sent"] != figures["completed"] || strings.Contains(out.String(), "SERVFAIL") {
		t.Errorf("dnsperf: %s", &out)
	}
	for name, l := range loads {
		sent, lost, failed := l.finish()
		t.Logf("%s: %d sent, %d lost", name, sent, len(lost))
		if len(lost) > 0 || failed > 0 {
			t.Errorf("%s: %d of %d lost, %d wrong", name, len(lost), sent, failed)
			for _, at := range lost {
				during := "before all steps"
				for _, s := range steps {
					if s.at.Before(at) {
						during = s.name
					}
				}
				t.Logf("%s: lost during: %s", name, during)
			}
		}
	}
	h.healthy()
	h.detach()
	h.unchangedBut(start, kubeletFile, "/var/lib/k2s-dnsbpf", "/run/queries")
}

// TestAdoptedByOthers: a dead daemon's attachment whose settings differ is taken over too, and nothing of it is left.
func TestAdoptedByOthers(t *testing.T) {
	h := raise(t, lab.Options{})
	start := h.snapshot()
	h.attach(endpoint(lab.CoreDNS0v4), ranges, pods("v*"))
	h.kill()
	h.attach(endpoint(lab.CoreDNS1v4), ranges)
	h.steers(hostDNS, lab.Backend4)
	if got := h.dataplane().programs("vapp"); len(got) > 0 {
		t.Errorf("left on a pod's interface: %v", got)
	}
	if n := queries(t, h.CoreDNS(1)); n == 0 {
		t.Error("the new endpoint has got nothing")
	}
	resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
	h.healthy()
	h.detach()
	h.unchanged(start)
}

// TestKilledAndDetached: what a dead daemon left is undone without another attach.
func TestKilledAndDetached(t *testing.T) {
	h := raise(t, lab.Options{})
	start := h.snapshot()
	h.attach(endpoints, ranges, pods("v*"))
	h.kill()
	h.detach()
	h.unchanged(start)
}
