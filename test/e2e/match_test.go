package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// silence is how long a reply that must not come is waited for. Nothing can announce that it won't.
const silence = 200 * time.Millisecond

// way is one way into the program.
type way struct {
	name   string
	from   *lab.Node
	server netip.AddrPort
	scope  string // of the kernel's counters, "" without a kernel part
}

// TestDifferential sends every stimulus straight to the server that is right for it, and then every way through the
// program: the client must not see a difference, and the wrong server must not see a query.
func TestDifferential(t *testing.T) {
	h := raise(t, lab.Options{LogQueries: true})
	// One endpoint: the serial numbers of the two CoreDNS differ, and show in negative answers.
	endpoint := []string{"--dns-endpoint", lab.CoreDNS0v4, "--dns-endpoint", lab.CoreDNS0v6}
	list := stimuli(t)
	right := make([][]byte, len(list))
	forEach(len(list), 16, func(i int) {
		s := list[i]
		if s.why != "" {
			return
		}
		server := h.CoreDNS(0).Addr4()
		if s.outside {
			server = h.External(0).Addr4()
		}
		payload, wait := s.payload, patience
		if s.straight != nil {
			payload = s.straight
		}
		if s.silent {
			wait = silence
		}
		var err error
		if right[i], err = ask(h.Host(), server, payload, wait); err != nil {
			t.Error(err)
		}
		if s.silent != (right[i] == nil) {
			t.Errorf("%s: the server itself was expected to be silent (%v), and said %x", s.name, s.silent, right[i])
		}
	})
	if t.Failed() {
		t.FailNow()
	}

	switch6 := netip.AddrPortFrom(netip.MustParseAddr(lab.KubeSwitch6), 53)
	for _, setup := range []struct {
		name string
		args []string
		ways []way
	}{
		{"kernel", nil, []way{
			{"host", h.Host(), hostDNS, "host"},
			{"host IPv6", h.Host(), hostDNS6, "host"},
			{"worker", h.Worker(), switchDNS, "kubeswitch"},
		}},
		{"kernel, KubeSwitch on IPv6", []string{"--kubeswitch-address", lab.KubeSwitch6}, []way{
			{"worker IPv6", h.Worker(), switch6, "kubeswitch"},
		}},
		{"no-bpf", []string{"--no-bpf"}, []way{
			{"host without bpf", h.Host(), hostDNS, ""},
			{"worker without bpf", h.Worker(), switchDNS, ""},
		}},
	} {
		h.attach(endpoint, ranges, ranges6, setup.args)
		for _, w := range setup.ways {
			t.Run(w.name, func(t *testing.T) { h.in(t).differential(w, list, right) })
		}
		h.detach()
	}
}

func (h *host) differential(w way, list []stimulus, right [][]byte) {
	before := h.healthy()
	for _, outside := range []bool{false, true} {
		wrong, seen := h.outside(), h.cluster()
		if outside {
			wrong, seen = seen, wrong
		}
		probed := 0
		for _, q := range slices.Concat(wrong[0].QueryLog(), wrong[1].QueryLog()) {
			if outside && q.Name == lab.Zone && q.Type == "SOA" {
				probed++
			}
		}
		count := queries(h.t, wrong...)
		seenBefore, seenCount := names(seen), queries(h.t, seen...)
		sent, all := make(map[string]int), uint64(0)
		for _, s := range list {
			if s.outside == outside && outside && !s.ours {
				sent[s.question()]++
				all++
			}
		}
		delete(sent, "")
		// Outside one after the other: the forwarder asks equal questions of the same moment once.
		parallel := 16
		if outside {
			parallel = 1
		}
		forEach(len(list), parallel, func(i int) {
			if s := list[i]; s.outside == outside {
				h.compare(w, s, right[i])
			}
		})
		eventually(h.t, "the wrong servers see nothing but what asks whether they live", func() error {
			log := slices.Concat(wrong[0].QueryLog(), wrong[1].QueryLog())
			probes := 0
			for _, q := range log {
				if outside && q.Name == lab.Zone && q.Type == "SOA" {
					probes++
				}
			}
			if n := int(queries(h.t, wrong...) - count); n != probes-probed {
				return fmt.Errorf("outside=%v: %d queries, of which %d are probes: %v", outside, n, probes-probed, log)
			}
			return nil
		})
		if n := queries(h.t, seen...) - seenCount; n < all {
			h.t.Errorf("%d names were asked outside, and the servers there saw %d", all, n)
		}
		// Silence of the wrong server could have other reasons: the right one must have seen each name.
		eventually(h.t, "the right server has logged all names", func() error {
			now := names(seen)
			for name, n := range sent {
				if got := now[name] - seenBefore[name]; got < n {
					return fmt.Errorf("%q was asked %d times, and the server saw it %d times", name, n, got)
				}
			}
			return nil
		})
	}
	after := h.healthy()
	if w.scope == "" {
		if len(after.Counters) != 0 && after.packets("host")+after.packets("kubeswitch") != 0 {
			h.t.Errorf("counters of the kernel without a kernel part: %+v", after.Reasons)
		}
		return
	}
	// Each packet has exactly one outcome, and none is a failure.
	if n := after.packets(w.scope) - before.packets(w.scope); n != uint64(len(list)) {
		h.t.Errorf("%d packets were counted, %d sent: %v, before: %v", n, len(list), after.Reasons[w.scope], before.Reasons[w.scope])
	}
	if n := after.Reasons[w.scope]["error_rewrite"]; n != 0 {
		h.t.Errorf("error_rewrite is %d", n)
	}
}

func names(servers []*lab.Server) map[string]int {
	seen := make(map[string]int)
	for _, s := range servers {
		for _, q := range s.QueryLog() {
			seen[strings.ToLower(q.Name)]++
		}
	}
	return seen
}

func (h *host) compare(w way, s stimulus, right []byte) {
	wait := patience
	if s.silent {
		wait = silence
	}
	got, err := ask(w.from, w.server, s.payload, wait)
	switch {
	case err != nil:
	case s.silent && got != nil:
		err = fmt.Errorf("want no reply, got %x", got)
	case s.silent:
	case got == nil:
		err = errors.New("no reply")
	case s.why != "":
		if rcode := int(got[3] & 0xF); rcode != s.rcode {
			err = fmt.Errorf("rcode %d, want %d (%s)", rcode, s.rcode, s.why)
		}
	case s.outside:
		err = sameOutside(s.payload, right, got)
	default:
		err = sameBytes(right, got)
	}
	if err != nil {
		h.t.Errorf("%s: %v\nsent  %x", s.name, err, s.payload)
	}
}

// sameBytes is for names in the cluster: neither the kernel nor the forwarder has any business with the content. No
// record ages on the way, since nothing caches yet, so not even the TTL may differ.
func sameBytes(want, got []byte) error {
	if !bytes.Equal(want, got) {
		return fmt.Errorf("not the reply of the server itself\nwant  %x\n%s\ngot   %x\n%s", want, text(want), got, text(got))
	}
	return nil
}

// sameOutside is for names outside. There the forwarder speaks EDNS for itself (RFC 6891 section 6.1.1: OPT is between
// neighbours), so the OPT record may differ, but not whether there is one. unbound gives records in any order.
func sameOutside(query, want, got []byte) error {
	var q, w, g dns.Msg
	for _, m := range []struct {
		msg  *dns.Msg
		wire []byte
	}{{&q, query}, {&w, want}, {&g, got}} {
		if err := m.msg.Unpack(m.wire); err != nil {
			return fmt.Errorf("%x: %w", m.wire, err)
		}
	}
	if (q.IsEdns0() != nil) != (g.IsEdns0() != nil) {
		return fmt.Errorf("the query's OPT is %v, the reply's %v", q.IsEdns0(), g.IsEdns0())
	}
	for _, m := range []*dns.Msg{&w, &g} {
		m.Extra = slices.DeleteFunc(m.Extra, func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
		for _, section := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
			slices.SortFunc(section, func(a, b dns.RR) int { return strings.Compare(a.String(), b.String()) })
		}
	}
	if w.String() != g.String() {
		return fmt.Errorf("want %v\ngot  %v", &w, &g)
	}
	return nil
}

func text(wire []byte) string {
	var m dns.Msg
	if err := m.Unpack(wire); err != nil {
		return err.Error()
	}
	return m.String()
}

// forEach runs f for 0 to n-1, as many at a time as parallel says.
func forEach(n, parallel int, f func(int)) {
	var group sync.WaitGroup
	slots := make(chan struct{}, parallel)
	for i := range n {
		slots <- struct{}{}
		group.Go(func() {
			f(i)
			<-slots
		})
	}
	group.Wait()
}
