package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// TestManyQueries: of many steered queries none is lost and none gets an answer of another kind.
func TestManyQueries(t *testing.T) { manyQueries(t, 20_000) }

// TestLongRunManyQueries is TestManyQueries with a million.
func TestLongRunManyQueries(t *testing.T) { manyQueries(t, share(t, 1_000_000)) }

func manyQueries(t *testing.T, want int) {
	t.Helper()
	h := raiseAlone(t, lab.Options{})
	h.attach()
	// Ten names, one of which does not exist: a share of answers to tell apart by their rcode.
	list := fmt.Sprintf("%s A\n%s AAAA\n%s A\n%s A\nh1.%s A\n_http._tcp.%s SRV\n20.0.21.172.in-addr.arpa. PTR\ndns-version.cluster.local. TXT\n%s A\nmissing.default.svc.cluster.local. A\n",
		lab.Backend, lab.Backend, lab.Kubernetes, lab.Headless, lab.Headless, lab.Backend, lab.KubeDNS)
	if err := h.Host().WriteFile("/run/queries", []byte(list), 0o644); err != nil {
		t.Fatal(err)
	}
	lines := strings.Count(list, "\n")
	before, outside := h.healthy(), queries(t, h.outside()...)
	counters, err := h.Host().Counters()
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	out := must(t, h.Host(), "dnsperf", "-s", "127.0.0.1", "-d", "/run/queries", "-c", "4", "-T", "1", "-n", strconv.Itoa(want/lines), "-q", "100")
	took := time.Since(begin)
	after := h.healthy()
	t.Logf("%d queries in %s, %.0f a second", want, took.Round(time.Millisecond), float64(want)/took.Seconds())

	n := want / lines * lines
	for what, value := range map[string]int{
		`Queries sent: +(\d+)`: n, `Queries completed: +(\d+)`: n, `Queries lost: +(\d+)`: 0,
		`NOERROR (\d+)`: n / 10 * 9, `NXDOMAIN (\d+)`: n / 10,
	} {
		m := regexp.MustCompile(what).FindStringSubmatch(out)
		if m == nil || m[1] != strconv.Itoa(value) {
			t.Errorf("%s: want %d: %s", what, value, out)
		}
	}
	for _, bad := range []string{"SERVFAIL", "REFUSED", "FORMERR", "Warning", "Error"} {
		if strings.Contains(out, bad) {
			t.Errorf("%s: %s", bad, out)
		}
	}
	moved := func(reason string) int { return int(after.Reasons["host"][reason] - before.Reasons["host"][reason]) }
	if moved("steered") != n || moved("replied") != n {
		t.Errorf("steered %d and replied %d, want %d", moved("steered"), moved("replied"), n)
	}
	for reason := range after.Reasons["host"] {
		if reason != "steered" && reason != "replied" && moved(reason) != 0 {
			t.Errorf("%s rose by %d", reason, moved(reason))
		}
	}
	if after.Forwarder.Queries != before.Forwarder.Queries {
		t.Errorf("the forwarder saw %d queries", after.Forwarder.Queries-before.Forwarder.Queries)
	}
	if q := queries(t, h.outside()...) - outside; q != 0 {
		t.Errorf("the external servers saw %d queries", q)
	}
	now, err := h.Host().Counters()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"UdpInCsumErrors", "UdpRcvbufErrors"} {
		if now[name] != counters[name] {
			t.Errorf("%s rose by %d", name, now[name]-counters[name])
		}
	}
}

// TestPairs: A and AAAA at once from one socket, as glibc asks, 10,000 times, beside connection tracking and
// NAT rules. There each of the pairs that lose the race for a conntrack entry costs five seconds.
func TestPairs(t *testing.T) {
	h := raiseAlone(t, lab.Options{})
	if err := h.LoadKubeProxyLikeRules(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.attach()
	const pairs = 10_000
	before := h.conntrack().Stats["insert_failed"]
	for _, from := range []struct {
		node   *lab.Node
		server netip.AddrPort
	}{{h.Host(), hostDNS}, {h.Worker(), switchDNS}} {
		conn, err := listenUDP(from.node, "0.0.0.0:0")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var slowest time.Duration
		for i := range pairs {
			begin := time.Now()
			if err := pair(t, conn, from.server, uint16(2*i)); err != nil {
				t.Fatalf("%s, pair %d: %v", from.node.Name(), i, err)
			}
			slowest = max(slowest, time.Since(begin))
		}
		t.Logf("%s: the slowest of %d pairs took %s", from.node.Name(), pairs, slowest)
	}
	if n := h.conntrack().Stats["insert_failed"] - before; n != 0 {
		t.Errorf("insert_failed rose by %d", n)
	}
}

// pair asks for both addresses and checks both replies, in whatever order they come.
func pair(t *testing.T, conn *net.UDPConn, server netip.AddrPort, id uint16) error {
	t.Helper()
	want := map[uint16]string{id: lab.Backend4, id + 1: lab.Backend6}
	for i, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
		if _, err := conn.WriteToUDPAddrPort(pack(t, id+uint16(i), lab.Backend, qtype), server); err != nil {
			return err
		}
	}
	for range 2 {
		m, err := receive(conn, server, patience)
		if err != nil {
			return err
		}
		var got string
		if len(m.Answer) == 1 {
			switch rr := m.Answer[0].(type) {
			case *dns.A:
				got = rr.A.String()
			case *dns.AAAA:
				got = rr.AAAA.String()
			}
		}
		if got == "" || want[m.Id] != got {
			return fmt.Errorf("want one of %v, got %v", want, m)
		}
		delete(want, m.Id)
	}
	return nil
}
