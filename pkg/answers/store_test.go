package answers

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// fakeKernel keeps what it is given. Real programs are for the tests of pkg/datapath and the end-to-end tests: here every rule is tried
// at a clock of its own.
type fakeKernel struct {
	mu         sync.Mutex
	room       int
	given      map[ready.Key]Given
	answers    map[ready.Key]*ready.Answer
	uses       map[ready.Key]uint64
	on         bool
	generation uint32
}

func (k *fakeKernel) Put(a *ready.Answer, g Given) (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, old := k.given[a.Key]; !old && len(k.given) >= k.room {
		return false, nil
	}
	k.given[a.Key], k.answers[a.Key] = g, a
	return true, nil
}

func (k *fakeKernel) Drop(key ready.Key) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.given, key)
	return nil
}

func (k *fakeKernel) Uses(key ready.Key) uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := k.uses[key]
	k.uses[key] = 0
	return n
}

func (k *fakeKernel) Switch(on bool, generation uint32) error {
	k.on, k.generation = on, generation
	return nil
}

// world is a store with a clock that stands still.
type world struct {
	*Store
	t      *testing.T
	kernel *fakeKernel
	now    time.Duration
	asked  chan string // names that are asked for anew
	answer func(name string) []string
}

const testZone = "cluster.local"

func newWorld(t *testing.T, room int) *world {
	t.Helper()
	w := &world{
		t: t, now: time.Hour, asked: make(chan string, 1000),
		kernel: &fakeKernel{room: room, given: make(map[ready.Key]Given), answers: make(map[ready.Key]*ready.Answer), uses: make(map[ready.Key]uint64)},
	}
	w.Store = New(Options{
		Kernel: w.kernel, Now: func() time.Duration { return w.now }, Entries: room, Small: 288, Limits: ready.Limits{Octets: 1232, Records: 64},
		Ask: func(_ context.Context, query []byte) []byte {
			q, _ := ready.ParseQuery(query)
			defer func() { w.asked <- q.Text() }()
			if w.answer == nil {
				return nil
			}
			return w.reply(q.Text(), q.Type, w.answer(q.Text())...)
		},
	})
	w.SetZones([]Zone{{Name: testZone}})
	w.SetExternal("192.0.2.53")
	if err := w.Switch(true); err != nil {
		t.Fatal(err)
	}
	w.now += holdFor
	return w
}

const soa = "cluster.local. 30 IN SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 30"

// reply answers a question with records: NXDOMAIN for none, and only authority for those of a SOA.
func (w *world) reply(name string, qtype uint16, records ...string) []byte {
	w.t.Helper()
	m := new(dns.Msg).SetQuestion(name+".", qtype)
	m.Response = true
	if len(records) == 0 {
		m.Rcode = dns.RcodeNameError
		records = []string{soa}
	}
	for _, text := range records {
		rr, err := dns.NewRR(text)
		if err != nil {
			w.t.Fatal(err)
		}
		if rr.Header().Rrtype == dns.TypeSOA {
			m.Ns = append(m.Ns, rr)
		} else {
			m.Answer = append(m.Answer, rr)
		}
	}
	packed, err := m.Pack()
	if err != nil {
		w.t.Fatal(err)
	}
	return packed
}

// offer offers the reply to a query for A, asked at the present generation.
func (w *world) offer(name string, records ...string) {
	w.t.Helper()
	w.OfferRaw(ready.RecursionDesired, w.reply(name, dns.TypeA, records...), w.now, w.generation)
}

func (w *world) key(name string) ready.Key {
	key, _ := ready.ReplyKey(w.reply(name, dns.TypeA), ready.RecursionDesired)
	return key
}

// life is for how long a name's answer is given, 0 for none.
func (w *world) life(name string) time.Duration { return w.kernel.given[w.key(name)].Life }

func address(name, ip string, ttl int) string { return fmt.Sprintf("%s. %d IN A %s", name, ttl, ip) }

func service(name, ip string) *cluster.Service {
	return &cluster.Service{ClusterIPs: []netip.Addr{netip.MustParseAddr(ip)}}
}

const web = "web.default.svc.cluster.local"

// coherent makes the store follow a cluster with the Service web.
func (w *world) coherent() *coherence.State {
	w.t.Helper()
	state := coherence.New(testZone)
	w.SetState(state)
	w.Change(state, cluster.Change{Kind: cluster.KindNamespace, Name: "default"})
	w.change(state, "web", nil, service("web", "10.0.0.1"))
	w.Change(state, cluster.Change{Kind: cluster.KindSynced})
	w.now += holdFor
	w.Tick(w.t.Context())
	return state
}

func (w *world) change(state *coherence.State, name string, old, now *cluster.Service) {
	w.t.Helper()
	w.Change(state, cluster.Change{
		Kind: cluster.KindService, Namespace: "default", Name: name, Gone: now == nil, Service: cluster.Pair[cluster.Service]{Old: old, New: now},
	})
}

// TestLife: for how long an answer of the cluster may be given.
func TestLife(t *testing.T) {
	for name, test := range map[string]struct {
		name     string
		records  []string
		coherent bool
		want     time.Duration
	}{
		"as the API says":                      {web, []string{address(web, "10.0.0.1", 30)}, true, 30 * time.Second},
		"not as the API says":                  {web, []string{address(web, "10.0.0.9", 30)}, true, unvouchedLife},
		"nobody tells of changes":              {web, []string{address(web, "10.0.0.1", 30)}, false, unvouchedLife},
		"no longer than its TTL":               {web, []string{address(web, "10.0.0.1", 3)}, false, 3 * time.Second},
		"a name below a Service":               {"a." + web, []string{address("a."+web, "10.0.0.7", 30)}, true, 30 * time.Second},
		"a name that no Service has":           {"ingress.cluster.local", []string{address("ingress.cluster.local", "10.0.0.7", 30)}, true, unvouchedLife},
		"NXDOMAIN of a Service":                {"no.default.svc.cluster.local", nil, true, unvouchedLife},
		"NXDOMAIN of any name":                 {"no.cluster.local", nil, true, unvouchedLife},
		"NXDOMAIN, and nobody tells":           {"no.default.svc.cluster.local", nil, false, unvouchedLife},
		"NODATA of a Service, as it should be": {web, []string{soa}, true, unvouchedLife},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 10)
			if test.coherent {
				w.coherent()
			}
			w.offer(test.name, test.records...)
			if got := w.life(test.name); got != test.want {
				t.Errorf("lives for %v, want %v; %v", got, test.want, w.counters.refused)
			}
		})
	}
}

// TestChangeEnds: what a change can have made wrong is gone when the call returns, and nothing else is.
func TestChangeEnds(t *testing.T) {
	w := newWorld(t, 100)
	state := w.coherent()
	names := []string{web, "a." + web, "other.default.svc.cluster.local", "1.0.0.10.in-addr.arpa"}
	w.SetZones([]Zone{{Name: testZone}, {Name: "10.in-addr.arpa"}})
	w.now += holdFor
	for _, name := range names {
		w.offer(name, address(name, "10.0.0.1", 30))
	}
	w.change(state, "web", service("web", "10.0.0.1"), service("web", "10.0.0.2"))
	for name, want := range map[string]bool{
		web: false, "a." + web: false, "1.0.0.10.in-addr.arpa": false, "other.default.svc.cluster.local": true,
	} {
		if _, got := w.kernel.given[w.key(name)]; got != want {
			t.Errorf("%s is given: %v, want %v", name, got, want)
		}
	}
}

// TestHold: what CoreDNS said before it knew of a change is not taken in again.
func TestHold(t *testing.T) {
	w := newWorld(t, 100)
	state := w.coherent()
	before := w.generation
	w.change(state, "web", service("web", "10.0.0.1"), service("web", "10.0.0.2"))

	refused := func(want ready.Refusal, what string) {
		t.Helper()
		if _, given := w.kernel.given[w.key(web)]; given || w.counters.refused[want] == 0 {
			t.Errorf("%s: given %v, refused %v", what, given, w.counters.refused)
		}
		clear(w.counters.refused)
	}
	w.OfferRaw(ready.RecursionDesired, w.reply(web, dns.TypeA, address(web, "10.0.0.2", 30)), w.now, before)
	refused(refusedStale, "asked before the change")
	w.offer(web, address(web, "10.0.0.1", 30))
	refused(refusedHeld, "the old address after the change")
	w.offer(web, address(web, "10.0.0.2", 30))
	if got := w.life(web); got != 30*time.Second {
		t.Errorf("the new address lives for %v; %v", got, w.counters.refused)
	}
	// Of names below nobody knows what they should be: they wait.
	w.offer("a."+web, address("a."+web, "10.0.0.7", 30))
	if w.life("a."+web) != 0 {
		t.Error("a name below is given at once")
	}
	w.now += holdFor
	w.Tick(t.Context())
	w.offer("a."+web, address("a."+web, "10.0.0.7", 30))
	if got := w.life("a." + web); got != 30*time.Second {
		t.Errorf("later it lives for %v", got)
	}
	if len(w.holds.below)+len(w.holds.exact) > 0 {
		t.Errorf("holds are left: %v, %v", w.holds.below, w.holds.exact)
	}
}

// TestDeletedService: NXDOMAIN is taken in when the API agrees, and the address never.
func TestDeletedService(t *testing.T) {
	w := newWorld(t, 100)
	state := w.coherent()
	w.change(state, "web", service("web", "10.0.0.1"), nil)
	w.offer(web, address(web, "10.0.0.1", 30))
	if w.life(web) != 0 {
		t.Error("an address of a Service that is gone is given")
	}
	w.offer(web)
	if w.life(web) == 0 {
		t.Errorf("NXDOMAIN is not given: %v", w.counters.refused)
	}
	w.change(state, "web", nil, service("web", "10.0.0.3"))
	if w.life(web) != 0 {
		t.Error("NXDOMAIN is given though the Service is back")
	}
}

// TestWatchLost: all of the cluster ends, and lives for a short time from then on.
func TestWatchLost(t *testing.T) {
	w := newWorld(t, 100)
	state := w.coherent()
	w.offer(web, address(web, "10.0.0.1", 30))
	w.Change(state, cluster.Change{Kind: cluster.KindLost})
	if w.life(web) != 0 || w.Summary().Coherent {
		t.Errorf("lives for %v, %+v", w.life(web), w.Summary())
	}
	w.offer(web, address(web, "10.0.0.1", 30))
	if got := w.life(web); got != unvouchedLife {
		t.Errorf("then it lives for %v: %v", got, w.counters.refused)
	}
	// Changes of a source that is not in use are noted, and end nothing.
	other := coherence.New(testZone)
	w.Change(other, cluster.Change{Kind: cluster.KindLost})
	if w.life(web) == 0 {
		t.Error("another source ended it")
	}
}

// TestZones: what is kept of a zone ends with it, with its source, and when it is switched off.
func TestZones(t *testing.T) {
	for name, zones := range map[string][]Zone{
		"gone": nil, "another source": {{Name: testZone, Source: "another"}}, "off": {{Name: testZone, Off: "acl"}},
		"a part of it is off": {{Name: testZone}, {Name: "svc.cluster.local", Off: "setting"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 100)
			w.offer(web, address(web, "10.0.0.1", 30))
			if w.life(web) == 0 {
				t.Fatal("it is not kept at all")
			}
			w.SetZones(zones)
			if w.life(web) != 0 {
				t.Error("it is kept")
			}
			w.now += holdFor
			w.offer(web, address(web, "10.0.0.1", 30))
			if kept := w.life(web) != 0; kept != (name == "another source") {
				t.Errorf("kept anew: %v", kept)
			}
		})
	}
}

// external uses an answer of the resolver twice: what is used once is not kept.
func (w *world) external(name string, records ...string) {
	w.t.Helper()
	for range 2 {
		w.OfferExternal(w.kept(name, records...))
	}
}

// kept is an answer that the resolver keeps, given by its server a second ago.
func (w *world) kept(name string, records ...string) External {
	w.t.Helper()
	reply := w.reply(name, dns.TypeA, records...)
	key, _ := ready.ReplyKey(reply, ready.RecursionDesired)
	a, refusal := ready.Make(&ready.Query{Key: key}, reply, ".", ready.Limits{Octets: dns.MaxMsgSize, Records: 1000})
	if a == nil {
		w.t.Fatal(refusal)
	}
	return External{Answer: a, Age: time.Second, Life: time.Duration(a.Life) * time.Second, Current: func() bool { return true }}
}

func TestExternal(t *testing.T) {
	w := newWorld(t, 100)
	const name = "www.example.com"
	w.external(name, address(name, "203.0.113.1", 300))
	if got, want := w.kernel.given[w.key(name)], (Given{Stored: w.now - time.Second, Life: 300 * time.Second, OPTSize: resolverSize}); got != want {
		t.Errorf("given %+v, want %+v; %v", got, want, w.counters.refused)
	}
	w.OfferExternal(w.kept("once.example.com", address("once.example.com", "203.0.113.1", 300)))
	if w.life("once.example.com") != 0 {
		t.Error("what is used once is kept")
	}
	// The resolver's answer to a cluster name is no offer of the kernel's.
	w.external(web, address(web, "203.0.113.66", 300))
	if w.life(web) != 0 {
		t.Error("a cluster name is kept from the resolver")
	}
	var many []string
	for i := range 100 {
		many = append(many, address("many.example.com", fmt.Sprintf("203.0.113.%d", i), 300))
	}
	w.external("many.example.com", many...)
	if w.life("many.example.com") != 0 || w.counters.refused[ready.Large] == 0 {
		t.Errorf("what is too large is kept: %v", w.counters.refused)
	}
	w.SetExternal("192.0.2.54")
	if w.life(name) != 0 {
		t.Error("another server's answer is kept")
	}
	former := w.kept(name, address(name, "203.0.113.1", 300))
	former.Current = func() bool { return false }
	w.OfferExternal(former)
	if w.life(name) != 0 {
		t.Error("a former server's answer is kept")
	}
	w.SetExternal("")
	w.external(name, address(name, "203.0.113.1", 300))
	if w.life(name) != 0 {
		t.Error("it is kept without a server")
	}
}

// TestNegativeLife: an answer that was kept for a while by the resolver has the rest of its life only.
func TestNegativeLife(t *testing.T) {
	w := newWorld(t, 100)
	o := w.kept("no.example.com", "example.com. 3600 IN SOA ns. h. 1 1 1 1 60")
	o.Age = 55 * time.Second
	w.OfferExternal(o)
	w.OfferExternal(o)
	if got := w.entries[o.Key]; got == nil || got.end() != w.now+5*time.Second {
		t.Errorf("%+v", got)
	}
}

// TestRefresh: what was used is asked for anew before its end, once; what was not goes at its end.
func TestRefresh(t *testing.T) {
	w := newWorld(t, 100)
	w.coherent()
	w.answer = func(string) []string { return []string{address(web, "10.0.0.1", 30)} }
	other := "a." + web
	w.offer(web, address(web, "10.0.0.1", 30))
	w.offer(other, address(other, "10.0.0.7", 30))
	begun := w.now
	w.kernel.uses[w.key(web)] = 1
	w.now = begun + 26*time.Second
	w.Tick(t.Context())
	w.now = begun + 27*time.Second
	w.Tick(t.Context())
	if name := <-w.asked; name != web {
		t.Fatalf("%s is asked for", name)
	}
	w.asking.Wait()
	if got := w.kernel.given[w.key(web)].Stored; got != w.now {
		t.Errorf("stored at %v, want %v", got, w.now)
	}
	w.now = begun + 30*time.Second
	w.Tick(t.Context())
	if w.life(other) != 0 || w.life(web) == 0 {
		t.Errorf("at the end: %v", slices.Collect(maps.Keys(w.kernel.given)))
	}
	select {
	case name := <-w.asked:
		t.Errorf("%s is asked for, too", name)
	default:
	}
}

// TestDisplaced: without room, what is asked for more often stays.
func TestDisplaced(t *testing.T) {
	const room, hot = 64, 16
	w := newWorld(t, room)
	name := func(i int) string { return fmt.Sprintf("n%d.default.svc.cluster.local", i) }
	for i := range hot {
		w.offer(name(i), address(name(i), "10.0.0.1", 3600))
		w.kernel.uses[w.key(name(i))] = 100
	}
	for i := range 5000 { // asked for twice each
		flood := fmt.Sprintf("f%d.cluster.local", i)
		w.offer(flood, address(flood, "10.0.0.1", 3600))
		w.offer(flood, address(flood, "10.0.0.1", 3600))
		if len(w.kernel.given) > room {
			t.Fatalf("%d answers", len(w.kernel.given))
		}
	}
	kept := 0
	for i := range hot {
		if w.life(name(i)) != 0 {
			kept++
		}
	}
	if kept != hot {
		t.Errorf("%d of %d that are used are kept", kept, hot)
	}
	if got := len(w.due.items); got > 4*room {
		t.Errorf("%d appointments for %d answers", got, room)
	}
	if got := len(w.below); got > room*6 {
		t.Errorf("%d suffixes of %d names are remembered", got, room)
	}
}

// TestNegativeShare: names that do not exist have a part of the room only.
func TestNegativeShare(t *testing.T) {
	w := newWorld(t, 100)
	for i := range 1000 {
		w.offer(fmt.Sprintf("n%d.cluster.local", i))
	}
	if got := w.Summary(); got.Negative != 25 || got.Refused[string(refusedNegative)] == 0 {
		t.Errorf("%+v", got)
	}
	for range 50 { // one that is asked for more often than those has a place
		w.offer("popular.cluster.local")
	}
	if got := w.Summary(); w.life("popular.cluster.local") == 0 || got.Negative != 25 {
		t.Errorf("%+v", got)
	}
}

func TestFlushAndList(t *testing.T) {
	w := newWorld(t, 100)
	for _, name := range []string{web, "a." + web, "web.other.svc.cluster.local"} {
		w.offer(name, address(name, "10.0.0.1", 30))
	}
	w.kernel.uses[w.key(web)] = 7
	list := w.List("Default.svc.cluster.local.")
	if len(list) != 2 || list[0].Name != web || list[0].Uses != 7 || list[0].Type != "A" || list[0].TTLLeft != 5 || !strings.Contains(list[0].Why, "nobody tells") {
		t.Errorf("%+v", list)
	}
	if n := w.Flush("web.default.svc.cluster.local"); n != 2 || len(w.kernel.given) != 1 {
		t.Errorf("%d are flushed, %d left", n, len(w.kernel.given))
	}
	before := w.generation
	if n := w.Flush(""); n != 1 || len(w.kernel.given)+len(w.entries)+len(w.below) != 0 {
		t.Errorf("%d are flushed; %v, %v", n, w.entries, w.below)
	}
	w.OfferRaw(ready.RecursionDesired, w.reply(web, dns.TypeA, address(web, "10.0.0.1", 30)), w.now, before)
	if w.life(web) != 0 {
		t.Error("what was asked before a flush is kept after it")
	}
	w.OfferRaw(ready.RecursionDesired, w.reply(web, dns.TypeA, address(web, "10.0.0.1", 30)), w.now-2*time.Second, w.generation)
	if w.life(web) != 0 {
		t.Error("what was answered long ago is kept")
	}
}

func TestSwitchedOff(t *testing.T) {
	w := newWorld(t, 100)
	w.offer(web, address(web, "10.0.0.1", 30))
	if err := w.Switch(false); err != nil || w.kernel.on || len(w.kernel.given) != 0 {
		t.Errorf("%v, on %v, %d answers", err, w.kernel.on, len(w.kernel.given))
	}
	w.offer(web, address(web, "10.0.0.1", 30))
	if w.life(web) != 0 {
		t.Error("off, it keeps")
	}
}

// TestSpelling: an answer to a question in a spelling of its own is nobody else's; the store asks for its own.
func TestSpelling(t *testing.T) {
	w := newWorld(t, 100)
	w.answer = func(string) []string { return []string{address(web, "10.0.0.1", 30)} }
	w.OfferRaw(ready.RecursionDesired, w.reply(strings.ToUpper(web), dns.TypeA, soa), w.now, w.generation)
	w.asking.Wait()
	if a := w.kernel.answers[w.key(web)]; a == nil || a.Negative {
		t.Errorf("%+v; %v", a, w.counters.refused)
	}
}

// TestOthersAnswer: what other servers may say otherwise ends, and what they have said before is not taken in.
func TestOthersAnswer(t *testing.T) {
	w := newWorld(t, 100)
	w.offer(web, address(web, "10.0.0.1", 30))
	w.external("www.example.com", address("www.example.com", "203.0.113.1", 300))
	before := w.generation
	w.ForgetCluster()
	if w.life(web) != 0 || w.life("www.example.com") == 0 {
		t.Errorf("%v", w.kernel.given)
	}
	w.OfferRaw(ready.RecursionDesired, w.reply(web, dns.TypeA, address(web, "10.0.0.1", 30)), w.now, before)
	if w.life(web) != 0 {
		t.Error("a reply of a former server is kept")
	}
}
