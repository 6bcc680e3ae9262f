package forwarder

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// cacheWorld is a server with a cache whose clock stands still, in front of an upstream server that counts what it is asked.
type cacheWorld struct {
	*Server
	t        *testing.T
	upstream *peer

	mu  sync.Mutex
	now time.Time
}

// answerWith answers each query with a record, in which %s stands for the name, by way of change.
func answerWith(text string, change func(*dns.Msg)) func(*peerQuery) {
	return func(q *peerQuery) {
		m := new(dns.Msg).SetReply(q.msg())
		m.RecursionAvailable = true
		rr, err := dns.NewRR(strings.ReplaceAll(text, "%s", m.Question[0].Name))
		if err != nil {
			panic(err)
		}
		m.Answer = []dns.RR{rr}
		if change != nil {
			change(m)
		}
		q.replyMsg(m)
	}
}

// queryA is query for an address.
func queryA(name string, edns bool) *dns.Msg {
	m := query(name, edns)
	m.Question[0].Qtype = dns.TypeA
	return m
}

func newCacheWorld(t *testing.T, handler func(*peerQuery)) *cacheWorld {
	t.Helper()
	w := &cacheWorld{t: t, now: time.Unix(1e9, 0), upstream: newPeer(t, handler)}
	w.Server = startTuned(t, external(w.upstream), func(s *Server) {
		s.cache.now = func() time.Time {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.now
		}
		s.SetCache(true)
	})
	return w
}

func (w *cacheWorld) pass(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now = w.now.Add(d)
}

// asked asks and returns the reply, and whether the upstream server was asked.
func (w *cacheWorld) asked(network string, m *dns.Msg) (reply *dns.Msg, sent bool) {
	w.t.Helper()
	before := w.upstream.udp.Load() + w.upstream.tcp.Load()
	reply = dial(w.t, w.Server, network).askMsg(m)
	return reply, w.upstream.udp.Load()+w.upstream.tcp.Load() > before
}

// TestCacheLives: an answer is given until its end and not beyond, with the TTL that is left.
func TestCacheLives(t *testing.T) {
	w := newCacheWorld(t, answerWith("%s 10 IN A 192.0.2.1", nil))
	for life := range 3 {
		for second := range 9 {
			for _, network := range []string{"udp", "tcp"} {
				reply, sent := w.asked(network, queryA("www.example.", second%2 == 0))
				if first := second == 0 && network == "udp"; sent != first {
					t.Errorf("life %d, second %d: asked %v", life, second, sent)
				}
				if ttl := reply.Answer[0].Header().Ttl; ttl != uint32(10-second) {
					t.Errorf("life %d, second %d: TTL %d", life, second, ttl)
				}
			}
			w.pass(time.Second)
		}
		w.pass(time.Second) // to its end, with nobody who asks shortly before
	}
}

// TestCacheRenews: shortly before its end an answer that is used is asked for anew, once, and nobody waits for that.
func TestCacheRenews(t *testing.T) {
	w := newCacheWorld(t, answerWith("%s 10 IN A 192.0.2.1", nil))
	w.asked("udp", queryA("www.example.", false))
	w.pass(9500 * time.Millisecond)
	if reply, _ := w.asked("udp", queryA("www.example.", false)); reply.Answer[0].Header().Ttl != 0 {
		t.Errorf("TTL %d", reply.Answer[0].Header().Ttl)
	}
	eventually(t, "the new answer is kept", func() bool {
		reply, _ := w.asked("udp", queryA("www.example.", false))
		return reply.Answer[0].Header().Ttl == 10
	})
	if n := w.upstream.udp.Load(); n != 2 {
		t.Errorf("the upstream server was asked %d times", n)
	}
}

// TestCacheKeeps: what is kept, and for whom.
func TestCacheKeeps(t *testing.T) {
	const soa = "example. 60 IN SOA ns. h. 1 1 1 1 60"
	address := "%s 60 IN A 192.0.2.1"
	negative := func(rcode int, withSOA bool) func(*dns.Msg) {
		return func(m *dns.Msg) {
			m.Answer, m.Rcode = nil, rcode
			if rr, _ := dns.NewRR(soa); withSOA {
				m.Ns = []dns.RR{rr}
			}
		}
	}
	for name, test := range map[string]struct {
		record string
		change func(*dns.Msg) // of the reply
		second func(*dns.Msg) // of the second query
		kept   bool
	}{
		"the same":            {record: address, kept: true},
		"in another spelling": {record: address, second: func(m *dns.Msg) { m.Question[0].Name = "WWW.Example." }, kept: true},
		"with EDNS":           {record: address, second: func(m *dns.Msg) { m.SetEdns0(1232, false) }, kept: true},
		"with DO":             {record: address, second: func(m *dns.Msg) { m.SetEdns0(1232, true) }},
		"with CD":             {record: address, second: func(m *dns.Msg) { m.CheckingDisabled = true }},
		"with AD":             {record: address, second: func(m *dns.Msg) { m.AuthenticatedData = true }},
		"RD=0":                {record: address, second: func(m *dns.Msg) { m.RecursionDesired = false }},
		"another type":        {record: address, second: func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA }},
		"an option": {record: address, second: func(m *dns.Msg) {
			m.SetEdns0(1232, false)
			m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_NSID{Code: dns.EDNS0NSID}}
		}},
		"NXDOMAIN":             {record: address, change: negative(dns.RcodeNameError, true), kept: true},
		"NODATA":               {record: address, change: negative(dns.RcodeSuccess, true), kept: true},
		"NXDOMAIN without SOA": {record: address, change: negative(dns.RcodeNameError, false)},
		"REFUSED":              {record: address, change: negative(dns.RcodeRefused, false)},
		"TTL 0":                {record: "%s 0 IN A 192.0.2.1"},
		"a foreign record":     {record: "bank.example. 60 IN A 192.0.2.66"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newCacheWorld(t, answerWith(test.record, test.change))
			first, sent := w.asked("udp", queryA("www.example.", false))
			if !sent {
				t.Fatal("the upstream server was not asked")
			}
			m := queryA("www.example.", false)
			if test.second != nil {
				test.second(m)
			}
			second, sent := w.asked("udp", m)
			if sent == test.kept {
				t.Errorf("asked again: %v", sent)
			}
			if test.kept && (second.Rcode != first.Rcode || second.Question[0] != m.Question[0] || len(second.Answer) != len(first.Answer)) {
				t.Errorf("got %v", second)
			}
		})
	}
}

// TestCacheForgets: with other upstream servers, when it is told to, and where it is not wanted.
func TestCacheForgets(t *testing.T) {
	for name, forget := range map[string]func(*cacheWorld){
		"other servers": func(w *cacheWorld) {
			if err := w.SetRoutes(external(newPeer(w.t, answerTXT("other")))); err != nil {
				w.t.Fatal(err)
			}
			if err := w.SetRoutes(external(w.upstream)); err != nil {
				w.t.Fatal(err)
			}
		},
		"flushed":        func(w *cacheWorld) { w.Flush("example") },
		"all flushed":    func(w *cacheWorld) { w.Flush("") },
		"off":            func(w *cacheWorld) { w.SetCache(false) },
		"off for a zone": func(w *cacheWorld) { w.SetCache(true, "Example.") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newCacheWorld(t, answerWith("%s 60 IN A 192.0.2.1", nil))
			w.asked("udp", queryA("www.example.", false))
			forget(w)
			if _, sent := w.asked("udp", queryA("www.example.", false)); !sent {
				t.Error("it is answered from the cache")
			}
			_, again := w.asked("udp", queryA("www.example.", false))
			if wanted := !strings.HasPrefix(name, "off"); again == wanted {
				t.Errorf("then it is kept: %v, want %v", !again, wanted)
			}
		})
	}
	w := newCacheWorld(t, answerWith("%s 60 IN A 192.0.2.1", nil))
	w.asked("udp", queryA("www.example.", false))
	if n := w.Flush("other.example"); n != 0 {
		t.Errorf("%d answers of another name are forgotten", n)
	}
	if n := w.Flush("EXAMPLE."); n != 1 {
		t.Errorf("%d answers are forgotten", n)
	}
}

// TestCacheClusterNames: what a zone's servers are to answer is asked of them, whatever upstream servers said before.
func TestCacheClusterNames(t *testing.T) {
	w := newCacheWorld(t, answerWith("%s 60 IN A 192.0.2.1", nil))
	w.asked("udp", queryA("backend.cluster.local.", false))
	routes := external(w.upstream)
	routes.Zones = cluster(newPeer(t, answerTXT("in the cluster"))).Zones
	if err := w.SetRoutes(routes); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		reply, _ := w.asked("udp", queryA("backend.cluster.local.", false))
		wantText(t, reply, "in the cluster")
	}
}

// TestCacheLarge: what does not fit a UDP client is cut for it, and whole for others.
func TestCacheLarge(t *testing.T) {
	w := newCacheWorld(t, answerWith("%s 60 IN A 192.0.2.1", func(m *dns.Msg) {
		for i := range 200 {
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: m.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: []byte{10, 0, 0, byte(i)}})
		}
		m.Truncate(dns.MaxMsgSize)
	}))
	if reply, _ := w.asked("tcp", queryA("www.example.", false)); len(reply.Answer) != 201 {
		t.Fatalf("%d records", len(reply.Answer))
	}
	for network, want := range map[string]int{"tcp": 201, "udp": 0} {
		reply, sent := w.asked(network, queryA("www.example.", false))
		if sent || len(reply.Answer) != want || reply.Truncated != (want == 0) {
			t.Errorf("%s: asked %v, %d records, TC %v", network, sent, len(reply.Answer), reply.Truncated)
		}
	}
}

// TestCacheOfOneName: of many who ask for one name nobody gets another's ID, spelling or EDNS.
func TestCacheOfOneName(t *testing.T) {
	w := newCacheWorld(t, answerWith("%s 60 IN A 192.0.2.1", nil))
	w.asked("udp", queryA("www.example.", false))
	var group sync.WaitGroup
	for i := range 16 {
		c := dial(t, w.Server, "udp")
		group.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 1))
			for range 200 {
				name := []byte("www.example.")
				name[random.IntN(3)] = 'W'
				m := queryA(string(name), i%2 == 0)
				reply := c.askMsg(m)
				if reply.Question[0] != m.Question[0] || reply.Answer[0].Header().Name != m.Question[0].Name || (reply.IsEdns0() != nil) != (i%2 == 0) {
					t.Errorf("asked %v, got %v", m, reply)
				}
			}
		})
	}
	group.Wait()
	if n := w.Stats().Cached; n != 16*200 {
		t.Errorf("%d were answered from the cache", n)
	}
}

// TestCacheBound: however many names there are, what is kept has a bound, and a name in use stays.
func TestCacheBound(t *testing.T) {
	w := newCacheWorld(t, answerWith("%s 3600 IN A 192.0.2.1", nil))
	res := func(m *dns.Msg) *response {
		raw := pack(t, m)
		recs, err := scanRecords(raw, headerLen+len(m.Question[0].Name)+1+4)
		if err != nil {
			t.Fatal(err)
		}
		return &response{msg: raw, recs: recs}
	}
	keep := func(name string) {
		q := new(dns.Msg).SetQuestion(name, dns.TypeA)
		m := new(dns.Msg).SetReply(q)
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 3600}, A: []byte{192, 0, 2, 1}}}
		w.keep(pack(t, q), res(m), w.cache.epoch.Load())
	}
	keep("hot.example.")
	hot := pack(t, new(dns.Msg).SetQuestion("hot.example.", dns.TypeA))
	misses := 0
	for i := range 200_000 {
		keep(fmt.Sprintf("n%d.flood.example.", i))
		if i%100 == 0 {
			if w.fromCache(&clientQuery{raw: hot}) == nil {
				misses++
				keep("hot.example.")
			}
		}
	}
	w.cache.kept.CleanUp()
	if got := w.cache.kept.WeightedSize(); got > cacheOctets {
		t.Errorf("%d octets are kept", got)
	}
	if misses > 20 {
		t.Errorf("a name in use was missed %d of 2000 times", misses)
	}
}

// TestCacheOfManySpellings: what was asked in a spelling of its own (0x20) is kept for others, too, who get their own.
func TestCacheOfManySpellings(t *testing.T) {
	w := newCacheWorld(t, answerWith("%s 60 IN A 192.0.2.1", func(m *dns.Msg) { m.Compress = true }))
	for i, name := range []string{"wWw.exAMple.", "www.example.", "WWW.EXAMPLE.", "Www.Example."} {
		reply, sent := w.asked("udp", queryA(name, false))
		if sent != (i == 0) {
			t.Errorf("%s: asked %v", name, sent)
		}
		if reply.Question[0].Name != name || reply.Answer[0].Header().Name != name {
			t.Errorf("%s: got %v", name, reply)
		}
	}
}

// TestCacheRefusesMoreThanAMessage: a reply that goes on behind its last record is not one to keep.
func TestCacheRefusesMoreThanAMessage(t *testing.T) {
	w := newCacheWorld(t, func(q *peerQuery) {
		m := new(dns.Msg).SetReply(q.msg())
		rr, _ := dns.NewRR("www.example. 60 IN A 192.0.2.1")
		m.Answer = []dns.RR{rr}
		raw, err := m.Pack()
		if err != nil {
			panic(err)
		}
		q.reply(append(raw, 0))
	})
	for range 2 {
		if _, sent := w.asked("udp", queryA("www.example.", false)); !sent {
			t.Error("it is answered from the cache")
		}
	}
}

// TestCacheRenewsOnce: an answer that can't be had anew is given to its end, and not asked for again and again.
func TestCacheRenewsOnce(t *testing.T) {
	var fails atomic.Bool
	w := newCacheWorld(t, answerWith("%s 100 IN A 192.0.2.1", func(m *dns.Msg) {
		if fails.Load() {
			m.Answer, m.Rcode = nil, dns.RcodeServerFailure
		}
	}))
	w.asked("udp", queryA("www.example.", false))
	fails.Store(true)
	w.pass(95 * time.Second)
	for range 20 {
		reply, _ := w.asked("udp", queryA("www.example.", false))
		wantRcode(t, reply, dns.RcodeSuccess)
		eventually(t, "it has failed", func() bool { return w.upstream.udp.Load() == 2 && w.Stats().InFlight == 0 })
	}
	if n := w.upstream.udp.Load(); n != 2 {
		t.Errorf("the upstream server was asked %d times, want 2", n)
	}
	w.pass(5 * time.Second)
	reply, _ := w.asked("udp", queryA("www.example.", false))
	wantRcode(t, reply, dns.RcodeServerFailure)
}

// TestCacheRenewsWithinBounds: what is asked for anew has a place among the queries in flight, as what its asker asks has.
func TestCacheRenewsWithinBounds(t *testing.T) {
	var silent atomic.Bool
	answer := answerWith("%s 100 IN A 192.0.2.1", nil)
	w := newCacheWorld(t, func(q *peerQuery) {
		if !silent.Load() {
			answer(q)
		}
	})
	const names = 8
	for i := range names {
		w.asked("udp", queryA(fmt.Sprintf("n%d.example.", i), false))
	}
	silent.Store(true)
	w.pass(95 * time.Second)
	for i := range names {
		w.asked("udp", queryA(fmt.Sprintf("n%d.example.", i), false))
	}
	if n := w.Stats().InFlight; n != names {
		t.Errorf("%d queries in flight, want %d", n, names)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // they have no answer
	_ = w.Shutdown(ctx)
}

// TestCacheOfServersThatWent: what a server said that has been replaced meanwhile is for those only who were waiting for it.
func TestCacheOfServersThatWent(t *testing.T) {
	asked, reply := make(chan struct{}), make(chan struct{})
	answer := answerWith("%s 60 IN A 192.0.2.1", nil)
	w := newCacheWorld(t, func(q *peerQuery) {
		asked <- struct{}{}
		<-reply
		answer(q)
	})
	c := dial(t, w.Server, "udp")
	c.send(pack(t, queryA("www.example.", false)))
	<-asked
	other := newPeer(t, answerWith("%s 60 IN A 192.0.2.2", nil))
	routes := external(other)
	routes.Timeout = 24 * time.Hour
	if err := w.SetRoutes(routes); err != nil {
		t.Fatal(err)
	}
	close(reply)
	c.receive()
	if again := c.askMsg(queryA("www.example.", false)); again.Answer[0].(*dns.A).A[3] != 2 {
		t.Errorf("got %v", again)
	}
}

// TestCacheOutlastsAFlood: half a million names that are asked once do not displace a thousand that are asked again and again, not even
// when the cache fills up for the first time.
func TestCacheOutlastsAFlood(t *testing.T) {
	const hot, names, each = 1000, 500_000, 500
	w := newCacheWorld(t, answerWith("%s 3600 IN A 192.0.2.1", nil))
	model := pack(t, queryA("n0000000.example.", false))
	record := pack(t, func() *dns.Msg {
		m := new(dns.Msg).SetReply(queryA("n0000000.example.", false))
		rr, _ := dns.NewRR("n0000000.example. 3600 IN A 192.0.2.1")
		m.Answer, m.Compress = []dns.RR{rr}, true
		return m
	}())
	ask := func(number int) bool {
		label := fmt.Sprintf("n%07d", number)
		copy(model[headerLen+1:], label)
		if w.fromCache(&clientQuery{raw: model}) != nil {
			return true
		}
		copy(record[headerLen+1:], label)
		w.keep(model, &response{msg: record, recs: records{end: len(record)}}, w.cache.epoch.Load())
		return false
	}
	for range 3 {
		for i := range hot {
			ask(i)
		}
	}
	asks, hits := 0, 0
	for i := range names {
		ask(hot + i)
		if i%each == 0 {
			for j := range 10 {
				asks++
				if ask((i/each*10 + j) % hot) {
					hits++
				}
			}
		}
	}
	w.cache.kept.CleanUp()
	if got := w.cache.kept.WeightedSize(); got > cacheOctets {
		t.Errorf("%d octets are kept", got)
	}
	if hits < asks*99/100 {
		t.Errorf("%d of %d were answered from the cache", hits, asks)
	}
}
