package kernel

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const (
	// inside is set in the process that has namespaces of its own.
	inside = "K2S_KERNEL_TEST_INSIDE"
	// nicsVariable names two network adapters, joined by a cable, that the tests may have.
	nicsVariable = "K2S_KERNEL_TEST_NICS"
)

// TestMain runs the tests in a second process with network, mounts and processes of its own: nothing of the machine is
// touched, and when it ends, however that is, the daemon that it attached ends with it.
func TestMain(m *testing.M) {
	if os.Geteuid() != 0 || os.Getenv(inside) != "" {
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID, Pdeathsig: unix.SIGKILL,
	}
	err := cmd.Start()
	if err == nil {
		giveNICs(cmd.Process.Pid)
		err = cmd.Wait()
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, "run the tests in namespaces of their own:", err)
		os.Exit(1)
	}
	os.Exit(max(cmd.ProcessState.ExitCode(), -cmd.ProcessState.ExitCode()))
}

// giveNICs moves the network adapters for the tests into the network of a process.
func giveNICs(pid int) {
	for name := range strings.SplitSeq(os.Getenv(nicsVariable), ",") {
		if nic, err := netlink.LinkByName(name); err == nil {
			err = netlink.LinkSetNsPid(nic, pid)
			if err != nil {
				fmt.Fprintf(os.Stderr, "move adapter %s: %v\n", name, err)
			}
		}
	}
}

const (
	inZone   = "backend.default.svc.cluster.local."
	external = "www.example.com."

	// Who answered shows in the answer.
	fromCluster = "10.9.9.1"
	fromOutside = "10.9.9.2"

	resolvConf = "# the site's own\nnameserver 192.0.2.53\n"
)

var (
	hostDNS   = netip.MustParseAddrPort("127.0.0.1:53")
	hostDNS6  = netip.MustParseAddrPort("[::1]:53")
	switchDNS = netip.MustParseAddrPort("172.19.1.1:53")
)

// host is the namespace that is attached, and its neighbours.
type host struct {
	t       *testing.T
	binary  string
	dir     string
	cluster *server
	worker  *node
}

// in is the same host for a subtest.
func (h *host) in(t *testing.T) *host {
	t.Helper()
	inner := *h
	inner.t = t
	return &inner
}

func (h *host) path(name string) string { return filepath.Join(h.dir, name) }

func newHost(t *testing.T) *host {
	t.Helper()
	if os.Getenv(inside) == "" {
		if os.Getenv("CI") != "" || os.Getenv("K2S_LAB_REQUIRED") != "" {
			t.Fatal("this run must not skip the kernel tests: run as root")
		}
		t.Skip("network namespaces and BPF need root")
	}
	binary, err := lab.Binary()
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, binary: binary, dir: t.TempDir()}
	check(t, "make mounts private", unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	check(t, "mount proc", unix.Mount("proc", "/proc", "proc", 0, ""))
	for _, name := range []string{"bpf", "etc"} {
		check(t, "make directory", os.Mkdir(h.path(name), 0o755))
	}
	check(t, "mount bpf", unix.Mount("bpf", h.path("bpf"), "bpf", 0, ""))
	t.Cleanup(func() { check(t, "unmount bpf", unix.Unmount(h.path("bpf"), unix.MNT_DETACH)) })
	check(t, "write resolv.conf", os.WriteFile(h.path("etc/resolv.conf"), []byte(resolvConf), 0o644))

	lo, err := netlink.LinkByName("lo")
	check(t, "find lo", err)
	check(t, "set lo up", netlink.LinkSetUp(lo))
	addBridge(t, "cni0", "172.20.0.1/16", "fd00:20::1/64")
	addBridge(t, "kubeswitch", "172.19.1.1/24")
	addBridge(t, "uplink", "192.0.2.2/24")
	h.cluster = serve(t, newNode(t, "cni0", "172.20.0.10/16", "fd00:20::10/64"), fromCluster)
	serve(t, newNode(t, "uplink", "192.0.2.53/24"), fromOutside)
	h.worker = newNode(t, "kubeswitch", "172.19.1.101/24")
	return h
}

func check(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// run runs the program and returns its standard output. An error has what it said on the other one.
func (h *host) run(command string, args ...string) (string, error) {
	args = append([]string{
		command, "--resolv-conf", h.path("etc/resolv.conf"), "--state-dir", h.path("state"), "--run-dir", h.path("run"),
		"--bpffs", h.path("bpf/k2s-dnsbpf"),
	}, args...)
	cmd := exec.Command(h.binary, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	begin := time.Now()
	err := cmd.Run()
	h.t.Logf("%s: %s", command, time.Since(begin).Round(time.Millisecond))
	if err != nil {
		log, _ := os.ReadFile(h.path("run/daemon.log"))
		err = fmt.Errorf("%s: %w\n%s%s\nlog: %s", command, err, stdout.String(), stderr.String(), log)
	}
	return stdout.String(), err
}

func (h *host) must(command string, args ...string) string {
	h.t.Helper()
	out, err := h.run(command, args...)
	check(h.t, "run", err)
	return out
}

type report struct {
	Attached, Healthy bool
	Problems          []string
	PID               int
	Datapath          struct {
		Programs []struct {
			Name, Attach, Interface string
			KernelID                int `json:"kernel_id"`
		}
	}
	Counters map[string]struct{ Steered, Answered, Passed, Refused int }
}

func (h *host) status() (r report) {
	h.t.Helper()
	// Its exit status is of no interest: what it says is compared.
	out, err := h.run("status", "-o", "json")
	if json.Unmarshal([]byte(out), &r) != nil {
		h.t.Fatal(err)
	}
	return r
}

// hooks lists the attached programs as "name hook interface".
func (r report) hooks() (hooks []string) {
	for _, p := range r.Datapath.Programs {
		hooks = append(hooks, p.Name+" "+p.Attach+" "+p.Interface)
	}
	slices.Sort(hooks)
	return hooks
}

// ask asks for the address of a name by UDP and returns it.
func ask(server netip.AddrPort, name string) (string, error) {
	query := new(dns.Msg).SetQuestion(name, dns.TypeA)
	client := dns.Client{Timeout: 5 * time.Second}
	reply, _, err := client.Exchange(query, server.String())
	if err != nil {
		return "", err
	}
	if len(reply.Answer) != 1 {
		return "", fmt.Errorf("answer to %s: %v", name, reply)
	}
	return reply.Answer[0].(*dns.A).A.String(), nil
}

func wantAnswer(t *testing.T, server netip.AddrPort, name, want string) {
	t.Helper()
	if got, err := ask(server, name); err != nil || got != want {
		t.Errorf("%s asked for %s: %s, %v; want %s", server, name, got, err, want)
	}
}

// wantSteered asks some times, and wants each answer from the cluster, each query counted as steered, and none
// to come from a port that the host itself may use.
func (h *host) wantSteered(scope string, in *node, server netip.AddrPort) {
	h.t.Helper()
	const times = 20
	before := h.status().Counters[scope].Steered
	h.cluster.lowPorts.Store(0)
	in.do(h.t, func() {
		for range times {
			wantAnswer(h.t, server, inZone, fromCluster)
		}
	})
	if got := h.status().Counters[scope].Steered - before; got != times {
		h.t.Errorf("%s: %d queries to %s steered, want %d", scope, got, server, times)
	}
	if got := h.cluster.lowPorts.Load(); got < times {
		h.t.Errorf("%s: %d queries to %s came from a port below the ephemeral ones, want %d", scope, got, server, times)
	}
}

// wantAnswered asks until the kernel answers. Each answer has to be the right one.
func (h *host) wantAnswered(scope string, in *node, server netip.AddrPort, name string) {
	h.t.Helper()
	want := fromCluster
	if name == external {
		want = fromOutside
	}
	waitFor(h.t, "an answer to "+name+" from the kernel", func() bool {
		before := h.status().Counters[scope].Answered
		in.do(h.t, func() { wantAnswer(h.t, server, name, want) })
		return h.status().Counters[scope].Answered > before
	})
}

// hasTCX tells from the kernel's version what it must have; to probe for it would hide that the program does so wrongly.
func hasTCX(t *testing.T) bool {
	t.Helper()
	var name unix.Utsname
	check(t, "uname", unix.Uname(&name))
	release := unix.ByteSliceToString(name.Release[:])
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		t.Fatalf("kernel version %q: %v", release, err)
	}
	return major > 6 || major == 6 && minor >= 6
}

func TestAttachDetach(t *testing.T) {
	h := newHost(t)
	tcx := hasTCX(t)
	// A qdisc that was there before us must be there after us.
	theirs, err := netlink.LinkByName("cni0")
	check(t, "find cni0", err)
	check(t, "add a qdisc", netlink.QdiscAdd(&netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: theirs.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		},
		QdiscType: "clsact",
	}))
	sysctls := readSysctls(t)

	attach := []string{"--dns-endpoint", "172.20.0.10", "--dns-endpoint", "fd00:20::10", "--wait", "60s", "--no-cache"}
	t.Log(h.must("attach", attach...))
	kind := "clsact"
	if tcx {
		kind = "tcx"
	}
	want := []string{
		"dns_filter xdp/generic kubeswitch",
		"dns_from_backend " + kind + "/ingress cni0",
		"dns_from_backend " + kind + "/ingress uplink", // of names outside, for the time that the daemon is dead
		"dns_from_client " + kind + "/ingress kubeswitch",
		"dns_from_host " + kind + "/egress lo",
	}
	attached := h.status()
	if got := attached.hooks(); !attached.Healthy || !slices.Equal(got, want) {
		t.Errorf("status: healthy %v, problems %q, programs\n%s\nwant\n%s",
			attached.Healthy, attached.Problems, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	logVerified(t, attached)
	wantFilters(t, !tcx)
	if content := readFile(t, h.path("etc/resolv.conf")); !strings.Contains(content, "nameserver 127.0.0.1\n") {
		t.Errorf("resolv.conf while attached: %q", content)
	}

	h.wantSteered("host", nil, hostDNS)
	h.wantSteered("host", nil, hostDNS6)
	h.wantSteered("kubeswitch", h.worker, switchDNS)
	wantAnswer(t, hostDNS, external, fromOutside)
	h.worker.do(t, func() { wantAnswer(t, switchDNS, external, fromOutside) })

	// New settings: programs are replaced while queries are under way, and none is lost.
	stop, asked := make(chan struct{}), make(chan int)
	go func() {
		count := 0
		defer func() { asked <- count }()
		for {
			select {
			case <-stop:
				return
			default:
				count++
				wantAnswer(t, hostDNS, inZone, fromCluster)
			}
		}
	}()
	t.Log(h.must("attach", append(attach, "--service-cidr", "172.21.0.0/16")...))
	close(stop)
	t.Logf("%d queries while settings changed", <-asked)
	if got := h.status().hooks(); !slices.Equal(got, want) {
		t.Errorf("programs after new settings: %q", got)
	}

	// An interface that is another one now, with the name and the addresses of the old.
	for _, name := range []string{"vkubeswitch", "kubeswitch"} {
		old, err := netlink.LinkByName(name)
		check(t, "find "+name, err)
		check(t, "remove "+name, netlink.LinkDel(old))
	}
	addBridge(t, "kubeswitch", "172.19.1.1/24")
	h.worker = newNode(t, "kubeswitch", "172.19.1.101/24")
	waitFor(t, "the program on the new kubeswitch", func() bool { return slices.Equal(h.status().hooks(), want) })
	h.wantSteered("kubeswitch", h.worker, switchDNS)

	// A daemon that was killed: steering goes on, the next one takes it over, and what that does not need goes.
	check(t, "kill the daemon", unix.Kill(attached.PID, unix.SIGKILL))
	h.wantSteered("host", nil, hostDNS)
	dead := h.status()
	if got := dead.hooks(); !dead.Attached || dead.Healthy || !slices.Equal(got, want) {
		t.Errorf("status of a dead daemon: %+v", dead)
	}
	t.Log(h.must("attach", append(attach, "--upstream", "172.20.0.11")...))
	want = slices.DeleteFunc(want, func(hook string) bool { return strings.HasSuffix(hook, " uplink") })
	if now := h.status(); !now.Healthy || !slices.Equal(now.hooks(), want) {
		t.Errorf("status after the next attach: %+v", now)
	}
	h.wantSteered("host", nil, hostDNS)
	h.wantSteered("kubeswitch", h.worker, switchDNS)

	// What is asked again is answered by the programs themselves.
	t.Log(h.must("attach", append(attach, "--no-cache=false")...))
	for _, name := range []string{inZone, external} {
		h.wantAnswered("host", nil, hostDNS, name)
		h.wantAnswered("host", nil, hostDNS6, name)
		h.wantAnswered("kubeswitch", h.worker, switchDNS, name)
	}

	t.Log(h.must("detach", "--linger", "0"))
	if content := readFile(t, h.path("etc/resolv.conf")); content != resolvConf {
		t.Errorf("resolv.conf after detach: %q", content)
	}
	if _, err := ask(hostDNS, inZone); err == nil {
		t.Error("somebody answers after detach")
	}
	if now := readSysctls(t); !maps.Equal(now, sysctls) {
		t.Errorf("sysctls after detach: %v, before: %v", now, sysctls)
	}
	if _, err := os.Stat(h.path("bpf/k2s-dnsbpf")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins after detach: %v", err)
	}
	wantFilters(t, false)
	for name, want := range map[string]bool{"lo": false, "kubeswitch": false, "cni0": true} {
		if got := hasClsact(t, name); got != want {
			t.Errorf("clsact qdisc on %s after detach: %v, want %v", name, got, want)
		}
	}
	if after := h.status(); after.Attached || len(after.Datapath.Programs) != 0 {
		t.Errorf("status after detach: %+v", after)
	}
}

func waitFor(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !condition(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not there after 20 s", what)
		}
	}
}

// wantFilters looks at the filters of each hook with netlink, or for none: what status says comes from the journal.
func wantFilters(t *testing.T, want bool) {
	t.Helper()
	for _, hook := range []struct {
		link, program string
		parent        uint32
	}{
		{"lo", "dns_from_host", netlink.HANDLE_MIN_EGRESS},
		{"cni0", "dns_from_backend", netlink.HANDLE_MIN_INGRESS},
		{"uplink", "dns_from_backend", netlink.HANDLE_MIN_INGRESS},
		{"kubeswitch", "dns_from_client", netlink.HANDLE_MIN_INGRESS},
	} {
		device, err := netlink.LinkByName(hook.link)
		check(t, "find "+hook.link, err)
		filters, err := netlink.FilterList(device, hook.parent) //nolint:forbidigo // nothing else changes this namespace
		check(t, "list filters", err)
		var names []string
		for _, filter := range filters {
			names = append(names, filter.(*netlink.BpfFilter).Name)
		}
		var wanted []string
		if want {
			wanted = []string{hook.program}
		}
		if !slices.Equal(names, wanted) {
			t.Errorf("filters on %s: %q, want %q", hook.link, names, wanted)
		}
	}
}

func hasClsact(t *testing.T, name string) bool {
	t.Helper()
	device, err := netlink.LinkByName(name)
	check(t, "find "+name, err)
	qdiscs, err := netlink.QdiscList(device) //nolint:forbidigo // nothing else changes this namespace
	check(t, "list qdiscs", err)
	return slices.ContainsFunc(qdiscs, func(q netlink.Qdisc) bool { return q.Type() == "clsact" })
}

// logVerified writes what the verifier looked at for each program, from what the kernel says of the daemon's
// descriptors (from 5.16 on).
func logVerified(t *testing.T, r report) {
	t.Helper()
	names := make(map[string]string)
	for _, p := range r.Datapath.Programs {
		names[strconv.Itoa(p.KernelID)] = p.Name
	}
	infos, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", r.PID))
	check(t, "list descriptors", err)
	verified := make(map[string]string)
	for _, info := range infos {
		content, err := os.ReadFile(info)
		if err != nil {
			continue // closed meanwhile
		}
		fields := make(map[string]string)
		for line := range strings.Lines(string(content)) {
			key, value, _ := strings.Cut(line, ":")
			fields[key] = strings.TrimSpace(value)
		}
		if name, known := names[fields["prog_id"]]; known {
			verified[name] = fields["verified_insns"]
		}
	}
	for _, name := range slices.Sorted(maps.Keys(verified)) {
		t.Logf("verified instructions: %s %s", name, verified[name])
	}
	if len(verified) != len(names) {
		t.Errorf("verified instructions of %d programs, want %d", len(verified), len(names))
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	check(t, "read", err)
	return string(content)
}

func readSysctls(t *testing.T) map[string]string {
	t.Helper()
	values := make(map[string]string)
	for _, name := range []string{"route_localnet", "accept_local"} {
		values[name] = readFile(t, "/proc/sys/net/ipv4/conf/lo/"+name)
	}
	return values
}

// server answers every query for an address with the same one.
type server struct {
	// lowPorts counts queries from ports below 32768, where Linux's ephemeral ports begin.
	lowPorts atomic.Int64
}

func serve(t *testing.T, on *node, answer string) *server {
	t.Helper()
	s := &server{}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
		if from, ok := w.RemoteAddr().(*net.UDPAddr); ok && from.Port < 32768 {
			s.lowPorts.Add(1)
		}
		reply := new(dns.Msg).SetReply(query)
		if query.Question[0].Qtype == dns.TypeA {
			reply.Answer = []dns.RR{&dns.A{
				Hdr: dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5},
				A:   net.ParseIP(answer),
			}}
		}
		sized(query, reply)
		_ = w.WriteMsg(reply)
	})
	for _, address := range on.addresses {
		var packets net.PacketConn
		on.do(t, func() {
			var err error
			packets, err = net.ListenPacket("udp", netip.AddrPortFrom(address.Addr(), 53).String())
			check(t, "listen", err)
		})
		// A socket stays in the namespace that it was made in, whatever thread serves it.
		udp := &dns.Server{PacketConn: packets, Handler: handler}
		go func() { _ = udp.ActivateAndServe() }()
		t.Cleanup(func() { _ = udp.Shutdown() })
	}
	return s
}
