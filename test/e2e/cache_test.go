package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

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
				before := slices.Concat(h.cluster(), h.outside())
				asked := queries(t, before...)
				upper := strings.ToUpper(q.name)
				warm := a.askFor(t, upper, q.qtype, edits...)
				if queries(t, before...) != asked {
					t.Errorf("%s: a query for %s reached a server", a.name, q.name)
				}
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
				if cold.String() != warm.String() {
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
	if seen[5] == 0 || seen[2] == 0 {
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
