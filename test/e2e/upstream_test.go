package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestClusterNamesNeverLeave: without any CoreDNS a name in the cluster fails, soon and with the reason; the external
// servers never hear of it.
func TestClusterNamesNeverLeave(t *testing.T) {
	h := raise(t, lab.Options{LogQueries: true})
	names := []string{lab.Backend, "cluster.local.", "missing.default.svc.cluster.local.", "20.0.21.172.in-addr.arpa.", strings.ToUpper(lab.Kubernetes)}
	for _, mode := range [][]string{nil, {"--no-bpf"}} {
		t.Run(fmt.Sprint("mode", mode), func(t *testing.T) {
			h := h.in(t)
			h.attach(endpoints, ranges, mode)
			for _, s := range h.cluster() {
				if err := s.Kill(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			outside := queries(t, h.outside()...)
			type question struct {
				node                    *lab.Node
				server, transport, name string
			}
			var list []question
			for _, name := range names {
				for _, transport := range []string{"+tcp", "+notcp"} {
					list = append(list, question{h.Host(), "@127.0.0.1", transport, name}, question{h.Host(), "@::1", transport, name},
						question{h.Worker(), "@" + lab.KubeSwitch4, transport, name})
				}
			}
			forEach(len(list), 16, func(i int) {
				q := list[i]
				// TCP is the forwarder's; so is UDP over IPv6 here, where no endpoint is, and all of it without BPF. It gives up
				// before a client does, by default after five seconds.
				steered := q.transport == "+notcp" && mode == nil && q.server != "@::1"
				patience := "+time=5"
				if steered {
					patience = "+time=1" // nobody answers, unless it leaks
				}
				r := command(t, q.node, "dig", q.server, q.transport, "+tries=1", patience, q.name, "A")
				if strings.Contains(r.stdout, lab.OutsideAnswer) {
					t.Errorf("it was asked outside: %v", r)
				}
				if !steered && (!strings.Contains(r.stdout, "status: SERVFAIL") || !strings.Contains(r.stdout, "; EDE: 22")) {
					t.Errorf("want SERVFAIL with EDE 22 (no reachable authority): %v", r)
				}
			})
			if n := queries(t, h.outside()...) - outside; n != 0 {
				t.Errorf("the external servers saw %d queries: %v %v", n, h.External(0).QueryLog(), h.External(1).QueryLog())
			}
			resolve(t, h.Host(), hostDNS, lab.WWW, lab.WWW4)
			resolve(t, h.Worker(), switchDNS, lab.WWW, lab.WWW4)
			for _, s := range h.cluster() {
				if err := s.Start(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "the forwarder asks CoreDNS again", func() error {
				m, err := h.Host().Query(t.Context(), "tcp", hostDNS, lab.Backend, dns.TypeA)
				if err == nil && m.Rcode != dns.RcodeSuccess {
					err = fmt.Errorf("rcode %d", m.Rcode)
				}
				return err
			})
			h.detach()
		})
	}
	for _, s := range h.outside() {
		for _, q := range s.QueryLog() {
			if strings.Contains(strings.ToLower(q.Name), "cluster.local") || strings.HasSuffix(q.Name, "21.172.in-addr.arpa.") {
				t.Errorf("an external server saw %v", q)
			}
		}
	}
}

// TestOneCoreDNSDead: a client that tries again gets its answer, and TCP needs no second try.
func TestOneCoreDNSDead(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	if err := h.CoreDNS(1).Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	outside := queries(t, h.outside()...)
	forEach(20, 16, func(int) {
		// Half of the tries go to the dead one: eight in a row are its in one run of many thousands.
		r := command(t, h.Host(), "dig", "+short", "+tries=8", "+time=1", "@127.0.0.1", lab.Backend)
		if lines := strings.Split(strings.TrimSpace(r.stdout), "\n"); lines[len(lines)-1] != lab.Backend4 {
			t.Errorf("no answer with one CoreDNS alive: %v", r)
		}
	})
	for range 20 {
		m, err := h.Host().Query(t.Context(), "tcp", hostDNS, lab.Backend, dns.TypeA)
		if err != nil || len(m.Answer) != 1 {
			t.Errorf("over TCP: %v: %v", err, m)
		}
	}
	if n := queries(t, h.outside()...) - outside; n != 0 {
		t.Errorf("the external servers saw %d queries", n)
	}
}

// TestUpstreams: names outside are asked of the upstream servers, in their order, and of the next when one is silent or
// gone.
func TestUpstreams(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	which := func(node *lab.Node, server netip.AddrPort) string {
		t.Helper()
		m, err := node.Query(t.Context(), "udp", server, "which.example.com.", dns.TypeTXT)
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Answer) != 1 {
			t.Fatalf("who answers? %v", m)
		}
		return m.Answer[0].(*dns.TXT).Txt[0]
	}
	for range 5 {
		if got := which(h.Host(), hostDNS); got != "ext0" {
			t.Errorf("%s answered, the first in resolv.conf is ext0", got)
		}
	}
	for _, fault := range []struct {
		name         string
		begin, mend  func() error
		mayWaitFirst time.Duration
	}{
		{"stopped", func() error { return h.External(0).Stop(t.Context()) }, func() error { return h.External(0).Start(t.Context()) }, time.Second},
		{"hung", h.External(0).Pause, h.External(0).Resume, 2 * time.Second},
	} {
		if err := fault.begin(); err != nil {
			t.Fatal(err)
		}
		for i := range 5 {
			begin := time.Now()
			if got := which(h.Host(), hostDNS); got != "ext1" {
				t.Errorf("%s: %s answered, want ext1", fault.name, got)
			}
			if took := time.Since(begin); took > fault.mayWaitFirst {
				t.Errorf("%s: query %d took %s, want at most %s", fault.name, i, took, fault.mayWaitFirst)
			}
			if got := which(h.Worker(), switchDNS); got != "ext1" {
				t.Errorf("%s: worker: %s answered, want ext1", fault.name, got)
			}
		}
		resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
		if err := fault.mend(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the first server is the first again", func() error {
			if got := which(h.Host(), hostDNS); got != "ext0" {
				return fmt.Errorf("it is %s", got)
			}
			return nil
		})
	}

	// With all of them gone the client hears so, and why.
	for _, s := range h.outside() {
		if err := s.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	out := must(t, h.Host(), "dig", "@127.0.0.1", "+tries=1", lab.WWW)
	if !strings.Contains(out, "status: SERVFAIL") || !strings.Contains(out, "; EDE: 2") {
		t.Errorf("want SERVFAIL and the reason: %s", out)
	}
	resolve(t, h.Host(), hostDNS, lab.Backend, lab.Backend4)
}

// TestTCP: what a client may do with a connection.
func TestTCP(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	for _, from := range []struct {
		node   *lab.Node
		server netip.AddrPort
	}{{h.Host(), hostDNS}, {h.Host(), hostDNS6}, {h.Worker(), switchDNS}} {
		for _, test := range []struct {
			name  string
			qtype uint16
			right netip.AddrPort
			want  int
		}{
			{lab.Backend, dns.TypeA, h.CoreDNS(0).Addr4(), 1}, {lab.Big, dns.TypeA, h.CoreDNS(0).Addr4(), lab.BigCount},
			{lab.WWW, dns.TypeA, h.External(0).Addr4(), 1}, {lab.BigExternal, dns.TypeTXT, h.External(0).Addr4(), 20},
		} {
			straight, err := from.node.Query(t.Context(), "tcp", test.right, test.name, test.qtype)
			if err != nil {
				t.Fatal(err)
			}
			got, err := from.node.Query(t.Context(), "tcp", from.server, test.name, test.qtype)
			if err != nil {
				t.Errorf("%s asks %s over TCP: %v", from.node.Name(), from.server, err)
				continue
			}
			straight.Id, got.Id = 0, 0
			a, _ := straight.Pack()
			b, _ := got.Pack()
			q, _ := new(dns.Msg).SetQuestion(test.name, test.qtype).Pack()
			if err := sameOutside(q, a, b); err != nil || len(got.Answer) != test.want {
				t.Errorf("%s %s: %d answers, want %d: %v", from.server, test.name, len(got.Answer), test.want, err)
			}
		}
		h.pipeline(from.node, from.server)
	}
}

// pipeline sends two queries at once, with the length of the second cut into two writes.
func (h *host) pipeline(from *lab.Node, server netip.AddrPort) {
	h.t.Helper()
	var conn *dns.Conn
	if err := from.Do(func() (err error) {
		conn, err = dns.Dial("tcp", server.String())
		return err
	}); err != nil {
		h.t.Error(err)
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	frame := func(id uint16, name string) []byte {
		b := pack(h.t, id, name, dns.TypeA)
		return append([]byte{byte(len(b) >> 8), byte(len(b))}, b...)
	}
	stream := append(frame(1, lab.Backend), frame(2, lab.WWW)...)
	cut := len(frame(1, lab.Backend)) + 1
	for _, part := range [][]byte{stream[:cut], stream[cut:]} {
		if _, err := conn.Conn.Write(part); err != nil {
			h.t.Error(err)
			return
		}
	}
	want := map[uint16]string{1: lab.Backend4, 2: lab.WWW4}
	for range want {
		m, err := conn.ReadMsg()
		if err != nil || len(m.Answer) != 1 || m.Answer[0].(*dns.A).A.String() != want[m.Id] {
			h.t.Errorf("%s: pipelined: %v: %v", server, err, m)
			return
		}
	}
}

// TestResolvConfIsCarriedOver: search list and options mean the same while attached.
func TestResolvConfIsCarriedOver(t *testing.T) {
	const original = "# by hand\nnameserver 192.0.2.54\noptions ndots:3 timeout:1 attempts:4 rotate no-reload\nsearch a.example.com example.com\nnameserver 192.0.2.53\n"
	h := raise(t, lab.Options{HostResolvConf: original})
	h.attach()
	content, err := h.Host().ReadFile("/etc/resolv.conf")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(content)) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	if got := strings.Join(lines, "\n"); got != "nameserver 127.0.0.1\nsearch a.example.com example.com\noptions ndots:3 timeout:1 attempts:4 rotate" {
		t.Errorf("taken over as %q", got)
	}
	r := h.healthy()
	if got := strings.Join(r.Resolver.Upstreams, " "); got != "192.0.2.54:53 192.0.2.53:53" {
		t.Errorf("upstreams %q, want them in the file's order", got)
	}
	kubelet, err := h.Host().ReadFile(kubeletFile)
	if err != nil || strings.Contains(string(kubelet), "127.0.0.1") || !strings.Contains(string(kubelet), "nameserver 192.0.2.54\nnameserver 192.0.2.53\n") {
		t.Errorf("the file for pods: %v: %s", err, kubelet)
	}
	if out := must(t, h.Host(), "getent", "ahostsv4", "www"); !strings.HasPrefix(out, lab.WWW4+" ") {
		t.Errorf("www by way of the search list: %q", out)
	}
	h.detach()
	content, err = h.Host().ReadFile("/etc/resolv.conf")
	if err != nil || string(content) != original {
		t.Errorf("after detach: %v: %q", err, content)
	}
}

// TestLookupLoop: programs that look names up all the time notice neither attach nor detach.
func TestLookupLoop(t *testing.T) {
	// musl divides the time by the attempts.
	h := raise(t, lab.Options{HostResolvConf: strings.Replace(lab.HostResolvConf, "timeout:2", "timeout:30", 1)})
	const retry = 15 * time.Second
	goresolve, err := lab.Helper("goresolve")
	if err != nil {
		t.Fatal(err)
	}
	musl, err := lab.Helper("muslresolve")
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var group sync.WaitGroup
	loops := [][]string{{"getent", "ahostsv4", lab.WWW}, {goresolve, "a", lab.WWW}, {musl, "a", lab.WWW}}
	counts := make([]atomic.Int64, len(loops))
	for i, argv := range loops {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				r := command(t, h.Host(), argv...)
				if r.code != 0 || !strings.HasPrefix(r.stdout, lab.WWW4) {
					t.Errorf("a lookup failed: %v", r)
				}
				if r.took >= retry {
					t.Errorf("a lookup took a retry: %v", r)
				}
				counts[i].Add(1)
			}
		})
	}
	// some lookups in the present state, by each of the programs
	some := func() {
		for i := range loops {
			from := counts[i].Load()
			eventually(t, "some lookups are done", func() error {
				if done := counts[i].Load() - from; done < 5 {
					return fmt.Errorf("%d", done)
				}
				return nil
			})
		}
	}
	for range 5 {
		some()
		h.attach()
		some()
		h.detach()
	}
	close(stop)
	group.Wait()
	t.Logf("lookups: getent %d, Go %d, musl %d", counts[0].Load(), counts[1].Load(), counts[2].Load())
}

// TestIdleConnections: a worker that holds more connections than there are leaves TCP to the host, and to itself.
func TestIdleConnections(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	const n = 600
	if err := h.Worker().Do(func() error {
		for range n {
			conn, err := net.Dial("tcp4", switchDNS.String())
			if err != nil {
				return err
			}
			t.Cleanup(func() { conn.Close() })
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, from := range []struct {
		node   *lab.Node
		server netip.AddrPort
	}{{h.Host(), hostDNS}, {h.Host(), hostDNS6}, {h.Host(), switchDNS}, {h.Worker(), switchDNS}} {
		for _, name := range []string{lab.WWW, lab.Backend} {
			if m, err := from.node.Query(t.Context(), "tcp", from.server, name, dns.TypeA); err != nil || len(m.Answer) != 1 {
				t.Errorf("%s asks %s for %s beside %d idle connections: %v %v", from.node.Name(), from.server, name, n, err, m)
			}
		}
	}
}

// TestLongMessagesFromAWorker: what one sends by TCP and nobody wants makes the daemon no bigger.
func TestLongMessagesFromAWorker(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach()
	pid := h.healthy().PID
	message := make([]byte, 2+65535)
	message[0], message[1] = 0xff, 0xff
	copy(message[2:], pack(t, 1, lab.WWW, dns.TypeA))
	message[2+11] = 1 // an additional record, which takes the rest
	record := message[2+len(pack(t, 1, lab.WWW, dns.TypeA)):]
	copy(record, []byte{0, 0xff, 0, 0, 1, 0, 0, 0, 0, byte((len(record) - 11) >> 8), byte(len(record) - 11)})
	const conns, each = 100, 64
	var group sync.WaitGroup
	for range conns {
		var conn net.Conn
		if err := h.Worker().Do(func() (err error) {
			conn, err = net.Dial("tcp4", switchDNS.String())
			return err
		}); err != nil {
			t.Fatal(err)
		}
		group.Go(func() {
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(patience))
			for range each {
				if _, err := conn.Write(message); err != nil {
					return // it had to make room
				}
			}
		})
	}
	group.Wait()
	if m, err := h.Host().Query(t.Context(), "tcp", hostDNS, lab.WWW, dns.TypeA); err != nil || len(m.Answer) != 1 {
		t.Errorf("the host asks: %v %v", err, m)
	}
	most := memory(t, h.Host(), pid)
	t.Logf("at most %d MB", most>>20)
	if most > 200<<20 {
		t.Errorf("the daemon took %d MB", most>>20)
	}
}

// memory is the most that a process of a node has had resident, in octets.
func memory(t *testing.T, node *lab.Node, pid int) (octets int) {
	t.Helper()
	content, err := node.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(content)) {
		if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &octets); err == nil {
			return octets << 10
		}
	}
	t.Fatalf("no VmHWM in %s", content)
	return 0
}
