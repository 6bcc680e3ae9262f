package lab_test

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// answer asks and returns the answer section, sorted, each record without its TTL.
func answer(t *testing.T, from *lab.Node, network string, server netip.AddrPort, name string, qtype uint16) []string {
	t.Helper()
	reply, err := from.Query(t.Context(), network, server, name, qtype)
	if err != nil {
		t.Fatal(err)
	}
	if reply.Rcode != dns.RcodeSuccess {
		return []string{dns.RcodeToString[reply.Rcode]}
	}
	var records []string
	for _, rr := range reply.Answer {
		rdata := strings.TrimPrefix(rr.String(), rr.Header().String())
		records = append(records, dns.TypeToString[rr.Header().Rrtype]+" "+rdata)
	}
	slices.Sort(records)
	return records
}

func TestServersAnswer(t *testing.T) {
	l := lab.Start(t, lab.Options{LogQueries: true})
	coredns, ext := l.CoreDNS(0).Addr4(), l.External(0).Addr4()
	for _, test := range []struct {
		server netip.AddrPort
		name   string
		qtype  uint16
		want   string
	}{
		{coredns, lab.Backend, dns.TypeA, "A " + lab.Backend4},
		{coredns, lab.Backend, dns.TypeAAAA, "AAAA " + lab.Backend6},
		{coredns, strings.ToUpper(lab.Kubernetes), dns.TypeA, "A " + lab.Kubernetes4},
		{coredns, lab.KubeDNS, dns.TypeA, "A " + lab.KubeDNS4},
		{coredns, lab.Headless, dns.TypeA, "A " + strings.Join(lab.Headless4, ",A ")},
		{coredns, "h1." + lab.Headless, dns.TypeA, "A " + lab.Headless4[1]},
		{coredns, "_http._tcp." + lab.Backend, dns.TypeSRV, "SRV 0 100 80 " + lab.Backend},
		{coredns, "20.0.21.172.in-addr.arpa.", dns.TypePTR, "PTR " + lab.Backend},
		{coredns, "11.1.20.172.in-addr.arpa.", dns.TypePTR, "PTR h1." + lab.Headless},
		{coredns, reverse(t, lab.Backend6), dns.TypePTR, "PTR " + lab.Backend},
		{coredns, "dns-version." + lab.Zone, dns.TypeTXT, `TXT "1.1.0"`},
		{coredns, "missing.default.svc." + lab.Zone, dns.TypeA, "NXDOMAIN"},
		{coredns, lab.Backend, dns.TypeTXT, ""},
		{coredns, "xcluster.local.", dns.TypeA, "REFUSED"},
		{coredns, lab.WWW, dns.TypeA, "REFUSED"},
		{l.CoreDNS(1).Addr6(), lab.Backend, dns.TypeA, "A " + lab.Backend4},
		{ext, lab.WWW, dns.TypeA, "A " + lab.WWW4},
		{ext, lab.WWW, dns.TypeAAAA, "AAAA " + lab.WWW6},
		{ext, "missing.example.com.", dns.TypeA, "NXDOMAIN"},
		{ext, "xcluster.local.", dns.TypeTXT, `TXT "outside"`},
		{ext, lab.Backend, dns.TypeA, "A " + lab.OutsideAnswer},
		{ext, "80.113.0.203.in-addr.arpa.", dns.TypePTR, "PTR " + lab.WWW},
		{l.External(1).Addr4(), "which.example.com.", dns.TypeTXT, `TXT "ext1"`},
		{l.External(1).Addr6(), "which.example.com.", dns.TypeTXT, `TXT "ext1"`},
	} {
		for _, from := range []*lab.Node{l.Host(), l.Worker(), l.Pod("app")} {
			for _, network := range []string{"udp", "tcp"} {
				got := strings.Join(answer(t, from, network, test.server, test.name, test.qtype), ",")
				if got != test.want {
					t.Errorf("%s asks %s over %s for %s %s: got %q, want %q", from.Name(), test.server, network,
						test.name, dns.TypeToString[test.qtype], got, test.want)
				}
			}
		}
	}
	want := lab.Query{Name: lab.Backend, Type: "A", Client: l.Worker().Addr4()}
	if !slices.Contains(l.CoreDNS(0).QueryLog(), want) {
		t.Errorf("the log of CoreDNS lacks %v:\n%v\n%s", want, l.CoreDNS(0).QueryLog(), l.CoreDNS(0).Log())
	}
	want = lab.Query{Name: lab.WWW, Type: "A", Client: netip.MustParseAddr(lab.Uplink4)}
	if !slices.Contains(l.External(0).QueryLog(), want) {
		t.Errorf("the log of unbound lacks %v:\n%v\n%s", want, l.External(0).QueryLog(), l.External(0).Log())
	}
}

func reverse(t *testing.T, addr string) string {
	t.Helper()
	name, err := dns.ReverseAddr(addr)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func TestTruncation(t *testing.T) {
	l := lab.Start(t, lab.Options{})
	for _, test := range []struct {
		server netip.AddrPort
		name   string
		qtype  uint16
		want   int
	}{
		{l.CoreDNS(0).Addr4(), lab.Big, dns.TypeA, lab.BigCount},
		{l.External(0).Addr4(), lab.BigExternal, dns.TypeTXT, 20},
	} {
		ask := new(dns.Msg).SetQuestion(test.name, test.qtype).SetEdns0(1232, false)
		reply, err := l.Host().Exchange(t.Context(), "udp", test.server, ask)
		if err != nil {
			t.Fatal(err)
		}
		if !reply.Truncated {
			t.Errorf("%s in 1232 bytes over UDP: %d records, not truncated", test.name, len(reply.Answer))
		}
		if reply, err = l.Host().Exchange(t.Context(), "tcp", test.server, ask); err != nil {
			t.Fatal(err)
		}
		if len(reply.Answer) != test.want || reply.Truncated {
			t.Errorf("%s over TCP: %d records, want %d", test.name, len(reply.Answer), test.want)
		}
	}
}

func TestServerControl(t *testing.T) {
	l := lab.Start(t, lab.Options{})
	for _, s := range []*lab.Server{l.CoreDNS(0), l.External(1)} {
		before, err := s.Queries(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		const asked = 7
		for range asked {
			answer(t, l.Host(), "udp", s.Addr4(), lab.Backend, dns.TypeA)
		}
		after, err := s.Queries(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if after-before != asked {
			t.Errorf("asked %d times, the server counted %d", asked, after-before)
		}
		if err := s.Pause(); err != nil {
			t.Fatal(err)
		}
		if reply, err := l.Host().Query(t.Context(), "udp", s.Addr4(), lab.Backend, dns.TypeA); err == nil {
			t.Errorf("a paused server answered: %v", reply)
		}
		if err := s.Resume(); err != nil {
			t.Fatal(err)
		}
		answer(t, l.Host(), "udp", s.Addr4(), lab.Backend, dns.TypeA)
		if err := s.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if reply, err := l.Host().Query(t.Context(), "udp", s.Addr4(), lab.Backend, dns.TypeA); err == nil {
			t.Errorf("a stopped server answered: %v", reply)
		}
		if err := s.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		answer(t, l.Host(), "udp", s.Addr4(), lab.Backend, dns.TypeA)
	}
}

func TestSetClusterRecords(t *testing.T) {
	l := lab.Start(t, lab.Options{})
	const name = "new.default.svc." + lab.Zone
	if err := l.CoreDNS(1).SetClusterRecords(t.Context(), name+" 5 IN A 172.21.0.99"); err != nil {
		t.Fatal(err)
	}
	if got := answer(t, l.Host(), "udp", l.CoreDNS(1).Addr4(), name, dns.TypeA); !slices.Equal(got, []string{"A 172.21.0.99"}) {
		t.Errorf("the new record resolves to %v", got)
	}
	if got := answer(t, l.Host(), "udp", l.CoreDNS(0).Addr4(), name, dns.TypeA); !slices.Equal(got, []string{"NXDOMAIN"}) {
		t.Errorf("the other server has it too: %v", got)
	}
}

func TestKubeProxyLikeRules(t *testing.T) {
	l := lab.Start(t, lab.Options{})
	if err := l.LoadKubeProxyLikeRules(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, from := range []*lab.Node{l.Host(), l.Worker(), l.Pod("app")} {
		for _, service := range []string{lab.KubeDNS4, lab.KubeDNS6} {
			server := netip.AddrPortFrom(netip.MustParseAddr(service), 53)
			for _, network := range []string{"udp", "tcp"} {
				if got := answer(t, from, network, server, lab.Backend, dns.TypeA); !slices.Equal(got, []string{"A " + lab.Backend4}) {
					t.Errorf("%s asks %s over %s: got %v", from.Name(), server, network, got)
				}
			}
		}
	}
	tracked, err := l.Conntrack(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(tracked.Matching("udp", "src="+lab.Worker4, "dst="+lab.KubeDNS4, "dport=53")) == 0 {
		t.Errorf("no entry for the worker's query:\n%s", strings.Join(tracked.Entries, "\n"))
	}
	if _, ok := tracked.Stats["insert_failed"]; !ok {
		t.Errorf("no insert_failed counter in %v", tracked.Stats)
	}
}

func TestNodesArePrivate(t *testing.T) {
	const path = "/etc/resolv.conf"
	machine, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	l := lab.Start(t, lab.Options{NoServers: true})
	host := l.Host()
	// Replaced the way a careful program does it: written beside, then renamed over.
	if err := host.Run(t.Context(), "sh", "-c", `echo "nameserver 127.0.0.1" > /etc/resolv.conf.new && mv /etc/resolv.conf.new /etc/resolv.conf`); err != nil {
		t.Fatal(err)
	}
	if got, err := host.ReadFile(path); err != nil || string(got) != "nameserver 127.0.0.1\n" {
		t.Errorf("host0 reads %q, %v", got, err)
	}
	if got, err := l.Worker().ReadFile(path); err != nil || string(got) != "nameserver 172.19.1.1\n" {
		t.Errorf("the worker reads %q, %v", got, err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != string(machine) {
		t.Errorf("the machine's own file has become %q, %v", got, err)
	}
	if out, err := host.Output(t.Context(), "hostname"); err != nil || out != "host0\n" {
		t.Errorf("hostname: %q, %v", out, err)
	}
	if err := host.Run(t.Context(), "bpftool", "map", "create", "/sys/fs/bpf/dns_test", "type", "array", "key", "4", "value", "4", "entries", "1", "name", "dns_test"); err != nil {
		t.Error(err)
	}
	if entries, err := l.Worker().Output(t.Context(), "ls", "/sys/fs/bpf"); err != nil || strings.Contains(entries, "dns_test") {
		t.Errorf("the worker sees host0's pins: %q, %v", entries, err)
	}
	counters, err := host.Counters()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"UdpInCsumErrors", "Udp6InCsumErrors", "IpInReceives", "TcpExtListenDrops"} {
		if _, ok := counters[name]; !ok {
			t.Errorf("no counter %s", name)
		}
	}
}

func TestSnapshot(t *testing.T) {
	l := lab.Start(t, lab.Options{})
	snapshot := func() string {
		t.Helper()
		text, err := l.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	before := snapshot()
	answer(t, l.Host(), "udp", l.CoreDNS(0).Addr4(), lab.Backend, dns.TypeA)
	if diff := lab.Diff(before, snapshot()); diff != "" {
		t.Fatalf("nothing was done, yet the snapshot has changed:\n%s", diff)
	}
	host := l.Host()
	for _, test := range []struct{ name, do, undo, want string }{
		{"setting", "echo 1 > /proc/sys/net/ipv4/conf/lo/route_localnet", "echo 0 > /proc/sys/net/ipv4/conf/lo/route_localnet", "net/ipv4/conf/lo/route_localnet"},
		{"file", "cp -p /etc/resolv.conf /etc/saved && echo x >> /etc/resolv.conf", "mv /etc/saved /etc/resolv.conf", "/etc/resolv.conf"},
		{"filter", "tc qdisc add dev lo clsact", "tc qdisc del dev lo clsact", "clsact"},
		{"pin", "bpftool map create /sys/fs/bpf/dns_x type array key 4 value 4 entries 1 name dns_x", "rm /sys/fs/bpf/dns_x", "/sys/fs/bpf/dns_x"},
		{"route", "ip route add 172.21.0.0/16 dev cni0", "ip route del 172.21.0.0/16", "172.21.0.0/16"},
	} {
		if err := host.Run(t.Context(), "sh", "-c", test.do); err != nil {
			t.Fatal(err)
		}
		if diff := lab.Diff(before, snapshot()); !strings.Contains(diff, test.want) {
			t.Errorf("a changed %s does not show:\n%s", test.name, diff)
		}
		if err := host.Run(t.Context(), "sh", "-c", test.undo); err != nil {
			t.Fatal(err)
		}
		if diff := lab.Diff(before, snapshot()); diff != "" {
			t.Errorf("a %s that was put back still shows:\n%s", test.name, diff)
		}
	}
	// A daemon leaves its session and its parent; it must be listed all the same.
	if err := host.Run(t.Context(), "sh", "-c", "setsid --fork sleep 1000 >/dev/null 2>&1"); err != nil {
		t.Fatal(err)
	}
	if diff := lab.Diff(before, snapshot()); !strings.Contains(diff, "+ host0 | process | sleep 1000") {
		t.Errorf("a daemon does not show:\n%s", diff)
	}
}

// inNamespaces lists the processes of this machine that are in one of the network namespaces.
func inNamespaces(t *testing.T, pins []*os.File) []string {
	t.Helper()
	var namespaces []string
	for _, f := range pins {
		var stat unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
			t.Fatal(err)
		}
		namespaces = append(namespaces, fmt.Sprintf("net:[%d]", stat.Ino))
	}
	links, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, link := range links {
		if ns, err := os.Readlink(link); err == nil && slices.Contains(namespaces, ns) {
			found = append(found, link)
		}
	}
	return found
}

// pin keeps a process's network namespace, so that its number is not given to another one while a test looks for
// processes that are still in it.
func pin(t *testing.T, pid int) *os.File {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestCloseLeavesNothing(t *testing.T) {
	lab.Start(t, lab.Options{NoServers: true}) // opens what the runtime opens once, and a second lab beside the other
	before := openFiles(t)
	l, err := lab.New(t.Context(), lab.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Host().Run(t.Context(), "sh", "-c", "setsid --fork sleep 1000 >/dev/null 2>&1"); err != nil {
		t.Error(err)
	}
	// One that nobody waits for must not keep the lab from closing.
	if err := l.Worker().Command(context.Background(), "sleep", "1000").Start(); err != nil {
		t.Error(err)
	}
	if err := l.CoreDNS(0).Pause(); err != nil {
		t.Error(err)
	}
	var namespaces []*os.File
	for _, n := range l.Nodes() {
		namespaces = append(namespaces, pin(t, n.PID()))
	}
	if got := len(inNamespaces(t, namespaces)); got < len(namespaces) {
		t.Errorf("%d processes in %d nodes", got, len(namespaces))
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if left := inNamespaces(t, namespaces); len(left) != 0 {
		t.Errorf("processes are left: %v", left)
	}
	if after := openFiles(t) - len(namespaces); after != before {
		t.Errorf("%d files were open before, %d are now", before, after)
	}
	if err := l.Host().Run(t.Context(), "true"); err == nil {
		t.Error("a command ran in a closed lab")
	}
}

const killedEnv = "K2S_LAB_TEST_KILLED"

// TestMain turns this binary into the process that TestKilledLeavesNothing kills.
func TestMain(m *testing.M) {
	if os.Getenv(killedEnv) == "" {
		os.Exit(m.Run())
	}
	if err := raiseAndWait(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func raiseAndWait() error {
	ctx := context.Background()
	l, err := lab.New(ctx, lab.Options{})
	if err != nil {
		return err
	}
	if err := l.Host().Run(ctx, "sh", "-c", "setsid --fork sleep 1000 >/dev/null 2>&1"); err != nil {
		return err
	}
	for _, n := range l.Nodes() {
		fmt.Println("node", n.PID())
	}
	fmt.Println("up")
	select {}
}

func TestKilledLeavesNothing(t *testing.T) {
	for _, signal := range []syscall.Signal{unix.SIGKILL, unix.SIGINT} {
		t.Run(unix.SignalName(signal), func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
			cmd.Env = append(os.Environ(), killedEnv+"=1")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var namespaces []*os.File
			var holders []unix.PollFd
			for scanner := bufio.NewScanner(out); scanner.Scan() && scanner.Text() != "up"; {
				var pid int
				if _, err := fmt.Sscanf(scanner.Text(), "node %d", &pid); err != nil {
					t.Log(scanner.Text()) // what went wrong there
					continue
				}
				namespaces = append(namespaces, pin(t, pid))
				fd, err := unix.PidfdOpen(pid, 0)
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Close(fd)
				holders = append(holders, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
			}
			if len(inNamespaces(t, namespaces)) == 0 {
				t.Fatal("the other process has raised no lab")
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // of course it fails
			deadline := time.Now().Add(10 * time.Second)
			for _, holder := range holders { // a pidfd is readable once its process has ended
				wait := max(0, time.Until(deadline).Milliseconds())
				if n, err := unix.Poll([]unix.PollFd{holder}, int(wait)); n != 1 {
					t.Errorf("a holder is still there: %v", err)
				}
			}
			if left := inNamespaces(t, namespaces); len(left) != 0 {
				t.Errorf("processes are left: %v", left)
			}
		})
	}
}

func BenchmarkRaiseAndClose(b *testing.B) {
	var raise, closing time.Duration
	for b.Loop() {
		start := time.Now()
		l, err := lab.New(b.Context(), lab.Options{})
		if err != nil {
			b.Fatal(err)
		}
		raise += time.Since(start)
		start = time.Now()
		if err := l.Close(); err != nil {
			b.Fatal(err)
		}
		closing += time.Since(start)
	}
	b.ReportMetric(raise.Seconds()*1000/float64(b.N), "ms/raise")
	b.ReportMetric(closing.Seconds()*1000/float64(b.N), "ms/close")
}
