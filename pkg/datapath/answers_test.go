//go:build linux

package datapath

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// everywhere are the scopes in which an answer of a test may be given.
var everywhere = []Scope{ScopeHost, ScopeKubeSwitch, ScopePod, ScopeTransparent, ScopeShared}

// made is what a server's reply to a query becomes. Records are by section, separated by "-".
func made(tb testing.TB, message []byte, records ...string) *ready.Answer {
	tb.Helper()
	q, ok := ready.ParseQuery(message)
	if !ok {
		tb.Fatalf("%x is no plain query", message)
	}
	var asked dns.Msg
	if err := asked.Unpack(message); err != nil {
		tb.Fatal(err)
	}
	asked.Question[0].Name = strings.ToLower(asked.Question[0].Name)
	reply := new(dns.Msg).SetReply(&asked)
	reply.Authoritative = true
	sections := []*[]dns.RR{&reply.Answer, &reply.Ns, &reply.Extra}
	for _, text := range records {
		if text == "-" {
			sections = sections[1:]
			continue
		}
		rr, err := dns.NewRR(text)
		if err != nil {
			tb.Fatal(err)
		}
		*sections[0] = append(*sections[0], rr)
	}
	a, refusal := ready.Make(&q, pack(tb, reply), ".", AnswersLimits())
	if a == nil {
		tb.Fatalf("refused: %s", refusal)
	}
	return a
}

// give puts an answer into the kernel, given now for an hour.
func (h *harness) give(tb testing.TB, a *ready.Answer, changes ...func(*Given)) {
	tb.Helper()
	now, err := h.Now()
	if err != nil {
		tb.Fatal(err)
	}
	given := Given{Scopes: everywhere, Stored: now, Life: time.Hour}
	for _, change := range changes {
		change(&given)
	}
	if err := h.AnswerQueries(true, 0); err != nil {
		tb.Fatal(err)
	}
	if err := h.answers.Put(a, given); err != nil {
		tb.Fatal(err)
	}
}

const inZoneAddress = inZone + ". 5 IN A 172.21.0.10"

// addresses are records of a name.
func addresses(name string, count int) (records []string) {
	for i := range count {
		records = append(records, fmt.Sprintf("%s. 30 IN A 10.0.%d.%d", name, i/256, i%256))
	}
	return records
}

// The kernel's reply is, octet by octet, the one that user space makes.
func TestAnswers(t *testing.T) {
	h := newHarness(t)
	const soa = "cluster.local. 5 IN SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5"
	long := strings.TrimSuffix(strings.Repeat("abcdefg.", 29), ".") + ".svc." + testZone
	answers := map[string]struct {
		name    string
		records []string
	}{
		"an address":         {inZone, []string{inZoneAddress}},
		"an odd name":        {"b." + testZone, []string{"b." + testZone + ". 5 IN A 172.21.0.10"}},
		"a long name":        {long, []string{long + ". 5 IN A 172.21.0.10"}},
		"several TTLs":       {"c." + testZone, []string{"c." + testZone + ". 70000 IN CNAME x.example.", "x.example. 7 IN CNAME y.example.", "y.example. 5 IN A 10.0.0.1"}},
		"an odd body":        {"t." + testZone, []string{"t." + testZone + `. 5 IN CNAME abc.example.`, "abc.example. 70000 IN A 10.0.0.1"}},
		"no such name":       {"n." + testZone, []string{"-", soa}},
		"other sections":     {"s." + testZone, []string{"s." + testZone + ". 5 IN A 10.0.0.1", "-", soa, "-", "x." + testZone + ". 5 IN AAAA fd00::1"}},
		"the root":           {".", []string{". 5 IN A 10.0.0.1"}},
		"as many as fit":     {"m." + testZone, addresses("m."+testZone, 64)},
		"the name in a text": {"x." + testZone, []string{"x." + testZone + ". 5 IN A 10.0.0.1", "-", "-", "x." + testZone + `. 4000000 IN TXT "odd"`}},
	}
	askers := map[string][]func(*dns.Msg){
		"plain": nil, "EDNS": {withOPT(4096)}, "a small buffer": {withOPT(512)}, "a tiny one": {withOPT(100)}, "an odd one": {withOPT(701)},
		"DO": {func(m *dns.Msg) { m.SetEdns0(1232, true) }}, "CD and AD": {func(m *dns.Msg) { m.CheckingDisabled, m.AuthenticatedData = true, true }},
		"RD=0": {func(m *dns.Msg) { m.RecursionDesired = false }},
		"another spelling": {withOPT(1232), func(m *dns.Msg) {
			m.Question[0].Name = strings.ToUpper(m.Question[0].Name)
		}},
	}
	for what, test := range answers {
		for who, edits := range askers {
			message := query(t, test.name, edits...)
			a := made(t, message, test.records...)
			q, _ := ready.ParseQuery(message)
			for _, f := range families {
				for _, program := range queryPrograms {
					for _, without := range []bool{false, true} {
						if without && f.client.Addr().Is6() {
							continue
						}
						h.give(t, a)
						frame := f.query(message, func(f *pktgen.Frame) { f.NoUDPChecksum = without })
						out := h.expect(t, program, frame, "answered_cached")
						got, err := pktgen.Parse(out)
						if err != nil {
							t.Fatalf("%s, %s, %s, %s: %v\n%s", what, who, f.name, program, err, pktgen.Dump(out))
						}
						if check := binary.BigEndian.Uint16(out[f.dnsOffset-2:]); (check == 0) != without {
							t.Errorf("checksum %#x, without one: %v", check, without)
						}
						if got.Source != f.listener || got.Destination != f.client {
							t.Errorf("from %v to %v", got.Source, got.Destination)
						}
						if macs := slices.Concat(frame[6:12], frame[:6]); program == FromClient && !slices.Equal(out[:12], macs) {
							t.Errorf("MACs %x, want %x", out[:12], macs)
						}
						var wants [][]byte
						for turn := range max(1, uint32(a.Run.Count)) {
							wants = append(wants, a.Reply(nil, message, &q, 0, turn, min(1232, q.Limit()), 0))
							wants = append(wants, a.Reply(nil, message, &q, time.Second, turn, min(1232, q.Limit()), 0))
						}
						if !slices.ContainsFunc(wants, func(want []byte) bool { return slices.Equal(want, got.Payload) }) {
							t.Fatalf("%s, %s, %s, %s:\ngot  %x\nwant %x", what, who, f.name, program, got.Payload, wants[0])
						}
					}
				}
			}
		}
	}
}

// What is not answered is steered, as without a cache.
func TestAnswersNot(t *testing.T) {
	message := query(t, inZone)
	steered := map[string]struct {
		change func(*Given)
		asker  func(*dns.Msg)
		forged bool // its checksum is wrong
	}{
		"its end is over":            {change: func(g *Given) { g.Stored -= 2 * time.Second; g.Life = 2 * time.Second }},
		"not in this scope":          {change: func(g *Given) { g.Scopes = []Scope{ScopeHost, ScopePod} }},
		"nowhere":                    {change: func(g *Given) { g.Scopes = nil }},
		"the daemon never said":      {change: func(g *Given) { g.Vouched = true }},
		"another type":               {asker: func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA }},
		"DO":                         {asker: func(m *dns.Msg) { m.SetEdns0(1232, true) }},
		"CD":                         {asker: func(m *dns.Msg) { m.CheckingDisabled = true }},
		"AD":                         {asker: func(m *dns.Msg) { m.AuthenticatedData = true }},
		"RD=0":                       {asker: func(m *dns.Msg) { m.RecursionDesired = false }},
		"Z":                          {asker: func(m *dns.Msg) { m.Zero = true }},
		"a cookie":                   {asker: withOPT(1232, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"})},
		"client subnet":              {asker: withOPT(1232, &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, Address: netip.IPv4Unspecified().AsSlice()})},
		"a wrong checksum":           {forged: true},
		"wrong, with an odd payload": {asker: func(m *dns.Msg) { m.SetEdns0(1232, false) }, forged: true},
	}
	for name, test := range steered {
		h := newHarness(t)
		asked := message
		if test.asker != nil {
			asked = query(t, inZone, test.asker)
		}
		var changes []func(*Given)
		if test.change != nil {
			changes = append(changes, test.change)
		}
		h.give(t, made(t, message, inZoneAddress), changes...)
		for _, f := range families {
			for _, program := range queryPrograms {
				frame := f.query(asked)
				if test.forged {
					frame[f.dnsOffset-1] ^= 0x40
				}
				verdict, _ := h.run(t, program, frame, nil)
				if got := h.countedSince(t); verdict != "redirect" || got["kubeswitch:steered"] != 1 {
					t.Errorf("%s, %s, %s: verdict %s, counted %v", name, f.name, program, verdict, got)
				}
			}
		}
	}
}

// A query that was sent to all is answered by the server: no frame may come from all.
func TestAnswersToOne(t *testing.T) {
	h := newHarness(t)
	message := query(t, inZone)
	h.give(t, made(t, message, inZoneAddress))
	for program, want := range map[Program]string{FromHost: "answered_cached", FromClient: "steered"} {
		frame := families[0].query(message)
		frame[0] |= 1
		h.run(t, program, frame, nil)
		if got := h.countedSince(t); got["kubeswitch:"+want] != 1 {
			t.Errorf("%s: counted %v, want %s", program, got, want)
		}
	}
}

// A new load gives no answers, and no program of a former one does, until it is told to.
func TestAnswersAreOffAtFirst(t *testing.T) {
	h := newHarness(t)
	message := query(t, inZone)
	h.give(t, made(t, message, inZoneAddress))
	if err := h.configure(); err != nil {
		t.Fatal(err)
	}
	h.run(t, FromHost, families[0].query(message), nil)
	if got := h.countedSince(t); got["kubeswitch:steered"] != 1 {
		t.Errorf("counted %v", got)
	}
}

// A hash is never trusted alone: here the index leads to another question's answer.
func TestAnswersOfAnotherName(t *testing.T) {
	h := newHarness(t)
	other := query(t, "other.default.svc.cluster.local")
	h.give(t, made(t, other, "other.default.svc.cluster.local. 5 IN A 172.21.0.66"))
	for _, name := range []string{inZone, "Xther.default.svc.cluster.local", "other.default.svc.cluster.loca", "o.other.default.svc.cluster.local"} {
		message := query(t, name)
		q, _ := ready.ParseQuery(message)
		if err := h.objects.DnsAnswersIndex.Put(h.answers.index(q.Key), uint32(0)); err != nil {
			t.Fatal(err)
		}
		for _, program := range queryPrograms {
			verdict, _ := h.run(t, program, families[0].query(message), nil)
			if got := h.countedSince(t); got["kubeswitch:answered_cached"] != 0 {
				t.Errorf("%s, %s: verdict %s, counted %v", name, program, verdict, got)
			}
		}
	}
}

// What is given and what goes again, in one place and in many.
func TestAnswersPutAndDrop(t *testing.T) {
	h := newHarness(t)
	message := query(t, inZone)
	key := made(t, message, inZoneAddress).Key
	asked := func(want string) pktgen.Datagram {
		t.Helper()
		_, out := h.run(t, FromHost, families[0].query(message), nil)
		if got := h.countedSince(t); got["kubeswitch:"+want] != 1 {
			t.Fatalf("counted %v, want %s", got, want)
		}
		got, err := pktgen.Parse(out)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	asked("steered")
	for _, count := range []int{1, 2, 40, 1, 64, 3} { // small and large ones take turns
		h.give(t, made(t, message, addresses(inZone, count)...))
		var got dns.Msg
		if err := got.Unpack(asked("answered_cached").Payload); err != nil {
			t.Fatal(err)
		}
		if len(got.Answer) != count && !got.Truncated {
			t.Errorf("%d records, want %d", len(got.Answer), count)
		}
	}
	if uses := h.answers.Uses(key); uses == 0 {
		t.Error("the answer was not used")
	}
	if uses := h.answers.Uses(key); uses != 0 {
		t.Errorf("used %d times since", uses)
	}
	if err := h.answers.Drop(key); err != nil {
		t.Fatal(err)
	}
	asked("steered")
	if err := h.answers.Drop(key); err != nil {
		t.Errorf("a second time: %v", err)
	}
	h.give(t, made(t, message, inZoneAddress))
	if err := h.AnswerQueries(false, 0); err != nil {
		t.Fatal(err)
	}
	asked("steered")
}

func TestAnswersNoRoom(t *testing.T) {
	h := newHarness(t)
	h.answers.small.free = h.answers.small.free[:2]
	first, second, third := query(t, "1."+testZone), query(t, "2."+testZone), query(t, "3."+testZone)
	h.give(t, made(t, first, "1.cluster.local. 5 IN A 10.0.0.1"))
	h.give(t, made(t, second, "2.cluster.local. 5 IN A 10.0.0.1"))
	a := made(t, third, "3.cluster.local. 5 IN A 10.0.0.1")
	if err := h.answers.Put(a, Given{}); !errors.Is(err, ErrNoRoom) {
		t.Fatalf("got %v", err)
	}
	q, _ := ready.ParseQuery(first)
	if err := h.answers.Drop(q.Key); err != nil {
		t.Fatal(err)
	}
	if err := h.answers.Put(a, Given{}); err != nil {
		t.Error(err)
	}
}

// One that the daemon vouches for ends when it is silent, whenever its TTL does.
func TestAnswersVouched(t *testing.T) {
	h := newHarness(t)
	message := query(t, inZone)
	for silence, want := range map[time.Duration]string{0: "answered_cached", 4 * time.Second: "answered_cached", 6 * time.Second: "steered"} {
		h.setSilence(t, silence, time.Hour)
		h.give(t, made(t, message, inZoneAddress), func(g *Given) { g.Vouched = true })
		h.run(t, FromHost, families[0].query(message), nil)
		if got := h.countedSince(t); got["kubeswitch:"+want] != 1 {
			t.Errorf("silent for %v: counted %v, want %s", silence, got, want)
		}
	}
}

// Who is refused is refused before the cache is looked at.
func TestAnswersAreRefused(t *testing.T) {
	h := newHarness(t)
	h.replaceAllowed(t, netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32"))
	message := query(t, inZone)
	h.give(t, made(t, message, inZoneAddress))
	for scope, reason := range map[Scope]string{ScopeKubeSwitch: "refused_source", ScopeShared: "refused_source", ScopeHost: notOurs, ScopeTransparent: notOurs} {
		h.replaceScope(t, scope)
		for _, f := range families {
			h.expectIn(t, FromClient, f.query(message), scope, reason, nil)
		}
	}
}

// While the daemon rewrites an answer, a program gives the former or the new one, and never something between.
func TestAnswersWhileWritten(t *testing.T) {
	h := newHarness(t)
	message := query(t, inZone)
	versions := []*ready.Answer{made(t, message, addresses(inZone, 8)...), made(t, message, inZone+". 5 IN A 172.21.0.10", "-", "cluster.local. 5 IN SOA ns. h. 1 1 1 1 5")}
	for _, a := range versions {
		if len(answerData(a)) > smallSize-headSize {
			t.Fatal("both have to be in one place")
		}
	}
	h.give(t, versions[0])
	now, err := h.Now()
	if err != nil {
		t.Fatal(err)
	}
	var done atomic.Bool
	var writer sync.WaitGroup
	writer.Go(func() {
		for i := 0; !done.Load(); i++ {
			if err := h.answers.Put(versions[i%2], Given{Scopes: everywhere, Stored: now, Life: time.Hour}); err != nil {
				t.Error(err)
				return
			}
		}
	})
	f, answered, counts := families[0], 0, make(map[int]int)
	for range 20000 {
		verdict, out := h.run(t, FromHost, f.query(message), nil)
		if verdict != "ok" {
			continue // it was being written
		}
		answered++
		got, err := pktgen.Parse(out)
		if err != nil {
			t.Fatalf("%v: %s", err, pktgen.Dump(out))
		}
		var reply dns.Msg
		if err := reply.Unpack(got.Payload); err != nil {
			t.Fatal(err)
		}
		counts[len(reply.Answer)]++
		if len(reply.Answer) != 8 && (len(reply.Answer) != 1 || len(reply.Ns) != 1) {
			t.Fatalf("something between: %v", &reply)
		}
	}
	done.Store(true)
	writer.Wait()
	if answered == 0 || counts[8] == 0 || counts[1] == 0 {
		t.Errorf("%d answered, by the number of records: %v", answered, counts)
	}
}

// Every record is the first about as often.
func TestAnswersTakeTurns(t *testing.T) {
	h := newHarness(t)
	message := query(t, inZone)
	h.give(t, made(t, message, addresses(inZone, 5)...))
	firsts := make(map[string]int)
	const asked = 1000
	for range asked {
		got, err := pktgen.Parse(h.expect(t, FromHost, families[0].query(message), "answered_cached"))
		if err != nil {
			t.Fatal(err)
		}
		var reply dns.Msg
		if err := reply.Unpack(got.Payload); err != nil {
			t.Fatal(err)
		}
		firsts[reply.Answer[0].(*dns.A).A.String()]++
	}
	for address, count := range firsts {
		if count < asked/10 || len(firsts) != 5 {
			t.Errorf("%s was first %d of %d times: %v", address, count, asked, firsts)
		}
	}
}

// A reply that was delivered is offered from the second time on that it is asked for, with what was asked.
func TestOffers(t *testing.T) {
	h := newHarness(t)
	f := families[0]
	const generation = 7
	if err := h.AnswerQueries(true, generation); err != nil {
		t.Fatal(err)
	}
	ask := func(edits ...func(*dns.Msg)) []byte {
		q := h.steer(t, FromHost, f, f.query(query(t, inZone, edits...)))
		payload := answer(t, q)
		h.deliver(t, FromHost, f, q, replyFrame(q, payload))
		return payload
	}
	ask()
	want := ask(withOPT(1232), func(m *dns.Msg) { m.CheckingDisabled = true })
	ask(func(m *dns.Msg) { m.Zero = true }) // odd: for nobody else
	late := h.steer(t, FromHost, f, f.query(query(t, inZone)))
	if err := h.AnswerQueries(true, generation+1); err != nil {
		t.Fatal(err)
	}
	h.deliver(t, FromHost, f, late, replyFrame(late, answer(t, late)))
	h.steer(t, FromHost, f, f.query(query(t, inZone)))
	forged := h.steer(t, FromHost, f, f.query(query(t, inZone)))
	h.expect(t, FromBackend, replyFrame(forged, answer(t, forged, func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA })), "reply_question")

	ctx, stop := context.WithCancel(t.Context())
	var got []Offer
	if err := h.Offers(ctx, func(o Offer) {
		o.Message = slices.Clone(o.Message)
		if got = append(got, o); len(got) == 2 {
			stop()
		}
	}); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || !slices.Equal(got[0].Message, want) || got[0].Generation != generation ||
		got[0].Asked != ready.RecursionDesired|ready.CheckingDisabled || got[1].Asked != ready.RecursionDesired || got[1].Generation != generation {
		t.Errorf("got %+v", got)
	}
	now, err := h.Now()
	if err != nil || now < got[0].Replied || now-got[0].Replied > time.Hour {
		t.Errorf("replied at %v, now %v, %v", got[0].Replied, now, err)
	}
}

// When nobody reads, replies are delivered all the same, and what was not offered is counted.
func TestOffersLost(t *testing.T) {
	h := newHarness(t)
	f := families[0]
	if err := h.AnswerQueries(true, 0); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		q := h.steer(t, FromHost, f, f.query(query(t, inZone, withOPT(1232))))
		h.deliver(t, FromHost, f, q, replyFrame(q, answer(t, q, paddedTo(t, 1200))))
	}
	lost, err := h.Lost()
	if err != nil {
		t.Fatal(err)
	}
	if lost < 100 || lost > 300 { // 1 MiB holds about 850
		t.Errorf("%d of 1000 offers were lost", lost)
	}
}

func TestAnswersSize(t *testing.T) {
	spec, err := loadDnsbpf()
	if err != nil {
		t.Fatal(err)
	}
	if got := SizeOfAnswers(16384); got.Small != int(spec.Maps[dnsbpfMapDnsAnswersSmall].MaxEntries) || got.Large != int(spec.Maps[dnsbpfMapDnsAnswersLarge].MaxEntries) {
		t.Errorf("the default, %+v, is not the object's", got)
	}
	needKernel(t)
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	if err := (AnswersSize{Small: 10, Large: 2}).size(spec); err != nil {
		t.Fatal(err)
	}
	objects, err := loadSpec(spec, nil)
	if err != nil {
		t.Fatal(describeLoadError(err))
	}
	defer objects.Close()
	a, err := newAnswers(&objects)
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	if len(a.small.free) != 10 || len(a.large.free) != 2 || a.large.first != 10 {
		t.Errorf("%d small and %d large ones, those from %d on", len(a.small.free), len(a.large.free), a.large.first)
	}
	if err := (AnswersSize{Small: 10}).size(spec); err == nil {
		t.Error("no large ones are accepted")
	}
}
