package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// asker asks from somewhere.
type asker struct {
	name   string
	node   *lab.Node
	server netip.AddrPort
	scope  string
}

func (h *host) askers() []asker {
	return []asker{{"host", h.Host(), hostDNS, "host"}, {"worker", h.Worker(), switchDNS, "kubeswitch"}}
}

// askFor asks and returns the reply.
func (a asker) askFor(t *testing.T, name string, qtype uint16, edits ...func(*dns.Msg)) *dns.Msg {
	t.Helper()
	m := new(dns.Msg).SetQuestion(name, qtype)
	m.Id = dns.Id()
	for _, edit := range edits {
		edit(m)
	}
	query, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := ask(a.node, a.server, query, patience)
	if err != nil {
		t.Fatal(err)
	}
	var reply dns.Msg
	if err := reply.Unpack(raw); err != nil {
		t.Fatalf("%s asked for %s: %v", a.name, name, err)
	}
	if reply.Id != m.Id || len(reply.Question) != 1 || reply.Question[0] != m.Question[0] {
		t.Fatalf("%s asked %v, got %v", a.name, m, &reply)
	}
	return &reply
}

// warm asks until the kernel answers.
func (h *host) warm(t *testing.T, a asker, name string, qtype uint16, edits ...func(*dns.Msg)) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s is answered from the kernel for %s", a.name, name), func() error {
		before := h.answered().Reasons[a.scope]["answered_cached"]
		a.askFor(t, name, qtype, edits...)
		if h.answered().Reasons[a.scope]["answered_cached"] == before {
			return fmt.Errorf("it is not")
		}
		return nil
	})
}

// TestCache: what is asked again is answered from the kernel, equal to what the server said, and nobody else sees it.
func TestCache(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach([]string{"--dns-endpoint", lab.CoreDNS0v4}, ranges, cached) // one, since each has a SOA serial of its own
	names := []struct {
		name  string
		qtype uint16
	}{
		{lab.Backend, dns.TypeA}, {lab.Backend, dns.TypeAAAA}, {lab.Backend, dns.TypeMX}, {"no." + lab.Backend, dns.TypeA}, {lab.WWW, dns.TypeA}, {"no." + lab.WWW, dns.TypeA},
	}
	edns := func(m *dns.Msg) { m.SetEdns0(4096, false) }
	for _, a := range h.askers() {
		for _, q := range names {
			for _, edits := range [][]func(*dns.Msg){nil, {edns}} {
				cold := a.askFor(t, q.name, q.qtype, edits...)
				h.warm(t, a, q.name, q.qtype, edits...)
				servers := slices.Concat(h.cluster(), h.outside())
				var warm *dns.Msg
				eventually(t, "a query reaches no server", func() error { // that the daemon does not ask just then
					asked := queries(t, servers...)
					warm = a.askFor(t, strings.ToUpper(q.name), q.qtype, edits...)
					if now := queries(t, servers...); now != asked {
						return fmt.Errorf("%d for %s did", now-asked, q.name)
					}
					return nil
				})
				for _, m := range []*dns.Msg{cold, warm} {
					m.Id = 0
					m.Question[0].Name = q.name
					for _, rr := range slices.Concat(m.Answer, m.Ns, m.Extra) {
						if rr.Header().Rrtype != dns.TypeOPT {
							rr.Header().Ttl = 0
							rr.Header().Name = strings.ToLower(rr.Header().Name)
						}
					}
				}
				// The names of a SOA record may be spelled as the asker spelled the zone.
				if !strings.EqualFold(cold.String(), warm.String()) {
					t.Errorf("%s: cold\n%v\nwarm\n%v", a.name, cold, warm)
				}
			}
		}
	}
}

// TestCacheEnds: an answer is not given beyond its TTL, not when it is to be forgotten, not when the daemon is dead for some seconds, and
// not after a detach.
func TestCacheEnds(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoints, ranges, cached)
	a := h.askers()[0]
	h.warm(t, a, lab.Backend, dns.TypeA)
	if out := h.run("cache", "flush", "default.svc.cluster.local"); out.code != 0 || !strings.HasPrefix(out.stdout, "forgot ") || strings.HasPrefix(out.stdout, "forgot 0 ") {
		t.Errorf("flush: %v", out)
	}
	before := h.answered().Reasons["host"]
	a.askFor(t, lab.Backend, dns.TypeA)
	after := h.answered().Reasons["host"]
	if after["answered_cached"] != before["answered_cached"] || after["steered"] != before["steered"]+1 {
		t.Errorf("after a flush: before %v, after %v", before, after)
	}
	h.warm(t, a, lab.Backend, dns.TypeA)
	h.killBoth()
	eventually(t, "the kernel forgets what nobody vouches for", func() error {
		before := h.status().Reasons["host"]["answered_cached"]
		a.askFor(t, lab.Backend, dns.TypeA)
		if h.status().Reasons["host"]["answered_cached"] != before {
			return fmt.Errorf("it answers")
		}
		return nil
	})
	h.attach(endpoints, ranges, cached)
	h.warm(t, a, lab.Backend, dns.TypeA)
	h.detach()
}

// TestCacheTTL: the TTL that is told never leads beyond the end, whenever it is asked.
func TestCacheTTL(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoints, ranges, cached)
	a := h.askers()[0]
	h.warm(t, a, lab.Backend, dns.TypeA)
	begin := time.Now()
	seen := make(map[uint32]int)
	for time.Since(begin) < 12*time.Second {
		reply := a.askFor(t, lab.Backend, dns.TypeA)
		if len(reply.Answer) != 1 || reply.Answer[0].Header().Ttl > 5 {
			t.Fatalf("got %v", reply)
		}
		seen[reply.Answer[0].Header().Ttl]++
	}
	if seen[4] == 0 || seen[2] == 0 {
		t.Errorf("by TTL: %v", seen)
	}
	var list []struct {
		Name string `json:"name"`
		Uses uint64 `json:"uses"`
		Left uint32 `json:"ttl_left"`
	}
	out := h.run("cache", "ls", "-o", "json", "backend.default.svc.cluster.local")
	if err := json.Unmarshal([]byte(out.stdout), &list); err != nil || len(list) != 1 || list[0].Uses == 0 || list[0].Left > 5 {
		t.Errorf("cache ls: %v, %v", out, err)
	}
	if out := h.run("cache"); out.code != 0 || !strings.Contains(out.stdout, "1 answer of ") {
		t.Errorf("cache: %v", out)
	}
}

// TestCacheFromPods: Pods that ask the cluster's DNS address are answered at their interface, by names of the cluster only.
func TestCacheFromPods(t *testing.T) {
	h := raise(t, lab.Options{})
	if err := h.LoadKubeProxyLikeRules(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.attach(endpoints, ranges, pods("vapp"), []string{"--cluster-dns", lab.KubeDNS4}, cached)
	pod := asker{"pod", h.Pod("app"), clusterDNS, "pod"}
	h.warm(t, pod, lab.Backend, dns.TypeA)
	// What the host's resolver says of other names is not what CoreDNS would tell a Pod.
	h.warm(t, h.askers()[0], lab.WWW, dns.TypeA)
	before := h.answered().Reasons["pod"]
	pod.askFor(t, lab.WWW, dns.TypeA)
	if after := h.answered().Reasons["pod"]; after["answered_cached"] != before["answered_cached"] || after["passed_external"] != before["passed_external"]+1 {
		t.Errorf("before %v, after %v", before, after)
	}
}

// TestCacheNodeLocal: the address that NodeLocal DNSCache gives to Pods can be one that they are answered at.
func TestCacheNodeLocal(t *testing.T) {
	const nodeLocal = "169.254.20.10"
	h := raise(t, lab.Options{})
	h.attach(endpoints, ranges, pods("vapp"), []string{"--cluster-dns", nodeLocal}, cached)
	h.warm(t, asker{"pod", h.Pod("app"), netip.MustParseAddrPort(nodeLocal + ":53"), "pod"}, lab.Backend, dns.TypeA)
}

// TestCacheTransparent: past another server, names of the cluster only are answered.
func TestCacheTransparent(t *testing.T) {
	h := raise(t, lab.Options{})
	h.startDnsmasq("127.0.0.1")
	h.attach(endpoints, ranges, transparent, cached)
	host := asker{"host", h.Host(), hostDNS, "transparent"}
	h.warm(t, host, lab.Backend, dns.TypeA)
	for range 5 {
		host.askFor(t, lab.WWW, dns.TypeA)
	}
	if r := h.answered().Reasons["transparent"]; r["passed_external"] < 5 {
		t.Errorf("counted %v", r)
	}
}

// TestCacheOverIPv6 asks the same by the other protocol: an answer is for both.
func TestCacheOverIPv6(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(slices.Concat(endpoints, endpoints6), ranges, cached)
	h.warm(t, asker{"host over IPv6", h.Host(), hostDNS6, "host"}, lab.Backend, dns.TypeA)
	before := h.answered().Reasons["host"]["answered_cached"]
	h.askers()[0].askFor(t, lab.Backend, dns.TypeA)
	if n := h.answered().Reasons["host"]["answered_cached"] - before; n != 1 {
		t.Errorf("answered_cached rose by %d", n)
	}
}

// oneHotName has 16 askers of one name, each with IDs, spellings and EDNS of its own. Nobody gets what is another's.
func oneHotName(t *testing.T, queries int) {
	h := raiseAlone(t, lab.Options{})
	h.attach(endpoints, ranges, cached)
	h.warm(t, h.askers()[0], lab.Backend, dns.TypeA)
	const askers = 16
	group, ctx := errgroup.WithContext(t.Context())
	for i := range askers {
		conn, err := listenUDP(h.Host(), "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		group.Go(func() error { return askHotName(ctx, conn, i, queries/askers) })
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	reasons := h.answered().Reasons["host"]
	t.Logf("%d queries: %v", queries, reasons)
	if reasons["answered_cached"] < uint64(queries/2) {
		t.Errorf("only %d of %d were answered from the kernel", reasons["answered_cached"], queries)
	}
}

// askHotName asks so often, one query after the other. One that is lost under this load is asked again.
func askHotName(ctx context.Context, conn *net.UDPConn, asker, queries int) error {
	random := rand.New(rand.NewPCG(uint64(asker), 1))
	buffer := make([]byte, 4096)
	for i := 0; i < queries && ctx.Err() == nil; i++ {
		m := new(dns.Msg).SetQuestion(spelled(random, lab.Backend), dns.TypeA)
		if asker%3 > 0 {
			m.SetEdns0(uint16(1232+16*asker), asker%3 == 2)
		}
		m.CheckingDisabled = asker%4 == 3
		query, err := m.Pack()
		if err != nil {
			return err
		}
		if _, err := conn.WriteToUDPAddrPort(query, hostDNS); err != nil {
			return err
		}
		if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		n, _, err := conn.ReadFromUDPAddrPort(buffer)
		if err != nil {
			return err
		}
		var reply dns.Msg
		if err := reply.Unpack(buffer[:n]); err != nil {
			return err
		}
		opt, asked := reply.IsEdns0(), m.IsEdns0()
		switch {
		case reply.Id != m.Id, reply.Question[0] != m.Question[0], reply.CheckingDisabled != m.CheckingDisabled,
			len(reply.Answer) != 1, !strings.EqualFold(reply.Answer[0].Header().Name, lab.Backend), reply.Answer[0].(*dns.A).A.String() != lab.Backend4,
			(opt == nil) != (asked == nil), opt != nil && (opt.Do() != asked.Do() || opt.UDPSize() != asked.UDPSize() && opt.UDPSize() != 1232):
			return fmt.Errorf("asker %d asked\n%v\nand got\n%v", asker, m, &reply)
		}
	}
	return nil
}

// spelled is a name in a random spelling.
func spelled(random *rand.Rand, name string) string {
	letters := []byte(name)
	for i, letter := range letters {
		if 'a' <= letter && letter <= 'z' && random.IntN(2) == 0 {
			letters[i] = letter - 'a' + 'A'
		}
	}
	return string(letters)
}

func TestCacheHotName(t *testing.T)        { oneHotName(t, 100_000) }
func TestLongRunCacheHotName(t *testing.T) { oneHotName(t, share(t, 10_000_000)) }

// TestCacheFlood: names that nobody else asks for, by a worker and each of them twice, leave what others ask for where it is.
func TestCacheFlood(t *testing.T) {
	h := raiseAlone(t, lab.Options{})
	h.attach(endpoints, ranges, cached)
	host, worker := h.askers()[0], h.askers()[1]
	h.warm(t, host, lab.Backend, dns.TypeA)
	h.warm(t, host, lab.WWW, dns.TypeA)
	const names = 3000
	conn, err := listenUDP(h.Worker(), "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	steeredBefore := h.answered().Reasons["host"]["steered"]
	hits := h.answered().Reasons["host"]["answered_cached"]
	for i := range names {
		query := pack(t, uint16(i), fmt.Sprintf("flood%d.default.svc.cluster.local.", i), dns.TypeA)
		for range 2 {
			if _, err := conn.WriteToUDPAddrPort(query, worker.server); err != nil {
				t.Fatal(err)
			}
		}
		if i%10 == 0 {
			host.askFor(t, lab.Backend, dns.TypeA)
		}
	}
	after := h.answered().Reasons["host"]
	if missed := after["steered"] - steeredBefore; missed > names/10/100 {
		t.Errorf("%d of %d queries for a name in use were not answered from the kernel, %d were", missed, names/10, after["answered_cached"]-hits)
	}
}

// TestCheckCached: check says what is answered from the kernel, and asks CoreDNS all the same.
func TestCheckCached(t *testing.T) {
	h := raise(t, lab.Options{})
	h.attach(endpoints, ranges, cached)
	h.warm(t, h.askers()[0], lab.Backend, dns.TypeA)
	out := h.run("check", lab.Backend)
	if !strings.Contains(out.stdout, "answered from the kernel, TTL ") || !strings.Contains(out.stdout, "asked directly: the same") {
		t.Error(out)
	}
}
