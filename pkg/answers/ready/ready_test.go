package ready

import (
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

var roomy = Limits{Octets: 1232, Records: 64}

const soa = "cluster.local. 5 IN SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5"

// ask returns a packed query and what it says.
func ask(t *testing.T, name string, qtype uint16, change ...func(*dns.Msg)) ([]byte, *Query) {
	t.Helper()
	m := new(dns.Msg).SetQuestion(name, qtype)
	for _, c := range change {
		c(m)
	}
	packed, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	q, ok := ParseQuery(packed)
	if !ok {
		t.Fatalf("%v is no plain query", m)
	}
	return packed, &q
}

// reply has records by section, separated by "-".
func reply(t *testing.T, query []byte, records ...string) *dns.Msg {
	t.Helper()
	var asked dns.Msg
	if err := asked.Unpack(query); err != nil {
		t.Fatal(err)
	}
	m := new(dns.Msg).SetReply(&asked)
	sections := []*[]dns.RR{&m.Answer, &m.Ns, &m.Extra}
	for _, text := range records {
		if text == "-" {
			sections = sections[1:]
			continue
		}
		rr, err := dns.NewRR(text)
		if err != nil {
			t.Fatal(err)
		}
		*sections[0] = append(*sections[0], rr)
	}
	return m
}

func pack(t *testing.T, m *dns.Msg) []byte {
	t.Helper()
	packed, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return packed
}

func edns(size uint16, do bool) func(*dns.Msg) {
	return func(m *dns.Msg) { m.SetEdns0(size, do) }
}

func TestMake(t *testing.T) {
	tests := []struct {
		name     string
		qname    string
		qtype    uint16
		rcode    int
		records  []string
		zone     string
		change   func(*dns.Msg)
		want     Refusal
		life     uint32
		negative bool
		run      int
	}{
		{name: "an address", records: []string{"a.cluster.local. 5 IN A 10.0.0.1"}, life: 5},
		{name: "another spelling of the owner", records: []string{"A.cluster.LOCAL. 5 IN A 10.0.0.1"}, life: 5},
		{name: "another spelling of the question", records: []string{"a.cluster.local. 5 IN A 10.0.0.1"}, change: func(m *dns.Msg) { m.Question[0].Name = "a.Cluster.local." }, want: Spelling},
		{name: "the smallest TTL", records: []string{"a.cluster.local. 30 IN CNAME b.cluster.local.", "b.cluster.local. 7 IN A 10.0.0.1", "-", "-", "x.cluster.local. 3 IN A 10.0.0.9"}, life: 3},
		{name: "several addresses", records: []string{"a.cluster.local. 5 IN A 10.0.0.1", "a.cluster.local. 5 IN A 10.0.0.2", "a.cluster.local. 5 IN A 10.0.0.3"}, life: 5, run: 3},
		{name: "several TTLs do not change places", records: []string{"a.cluster.local. 5 IN A 10.0.0.1", "a.cluster.local. 6 IN A 10.0.0.2"}, life: 5},
		{name: "behind a CNAME", zone: ".", records: []string{"a.cluster.local. 9 IN CNAME cdn.example.", "cdn.example. 9 IN A 10.0.0.1", "cdn.example. 9 IN A 10.0.0.2"}, life: 9, run: 2},
		{name: "NXDOMAIN", rcode: dns.RcodeNameError, records: []string{"-", soa}, life: 5, negative: true},
		{name: "NODATA", records: []string{"-", soa}, life: 5, negative: true},
		{name: "MINIMUM", records: []string{"-", strings.TrimSuffix(soa, "5") + "2"}, life: 2, negative: true},
		{name: "NXDOMAIN without SOA", rcode: dns.RcodeNameError, want: NoSOA},
		{name: "NODATA without SOA", want: NoSOA},
		{name: "SOA of another zone", zone: ".", records: []string{"-", "example. 5 IN SOA ns. h. 1 1 1 1 5"}, want: NoSOA},
		{name: "SOA in the answer section", records: []string{soa}, want: Foreign},
		{name: "CNAME only", zone: ".", records: []string{"a.cluster.local. 5 IN CNAME b.example."}, want: NoSOA},
		{name: "CNAME was asked", zone: ".", qtype: dns.TypeCNAME, records: []string{"a.cluster.local. 5 IN CNAME b.example."}, life: 5},
		{name: "DNAME", records: []string{"cluster.local. 9 IN DNAME local.", "a.cluster.local. 9 IN CNAME a.local.", "a.local. 9 IN A 10.0.0.1"}, zone: ".", life: 9},
		{name: "TTL 0", records: []string{"a.cluster.local. 0 IN A 10.0.0.1"}, want: TTL},
		{name: "TTL of 2^31", records: []string{"a.cluster.local. 2147483648 IN A 10.0.0.1"}, want: TTL},
		{name: "MINIMUM 0", records: []string{"-", strings.TrimSuffix(soa, "5") + "0"}, want: TTL},
		{name: "SERVFAIL", rcode: dns.RcodeServerFailure, want: Failure},
		{name: "REFUSED", rcode: dns.RcodeRefused, want: Failure},
		{name: "truncated", records: []string{"a.cluster.local. 5 IN A 10.0.0.1"}, change: func(m *dns.Msg) { m.Truncated = true }, want: Truncated},
		{name: "another question", records: []string{"b.cluster.local. 5 IN A 10.0.0.1"}, change: func(m *dns.Msg) { m.Question[0].Name = "b.cluster.local." }, want: Question},
		{name: "another type", change: func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA }, want: Question},
		{name: "another class", change: func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, want: Question},
		{name: "a query", change: func(m *dns.Msg) { m.Response = false }, want: Malformed},
		{name: "an owner that nothing leads to", zone: ".", records: []string{"a.cluster.local. 5 IN A 10.0.0.1", "bank.example. 5 IN A 10.6.6.6"}, want: Foreign},
		{name: "a name outside of the zone", records: []string{"a.cluster.local. 5 IN CNAME b.example.", "b.example. 5 IN A 10.0.0.1"}, want: Foreign},
		{name: "an address outside of the zone is left out", records: []string{"a.cluster.local. 5 IN A 10.0.0.1", "-", "-", "bank.example. 5 IN A 10.6.6.6"}, life: 5},
		{name: "ANY", qtype: dns.TypeANY, records: []string{"a.cluster.local. 5 IN A 10.0.0.1"}, want: Type},
		{name: "the probe of the loop plugin", qtype: dns.TypeHINFO, records: []string{"-", soa}, want: Type},
		{name: "an option", records: []string{"a.cluster.local. 5 IN A 10.0.0.1"}, change: func(m *dns.Msg) {
			m.SetEdns0(1232, false)
			m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: strings.Repeat("00", 16)}}
		}, want: Options},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			qtype := test.qtype
			if qtype == 0 {
				qtype = dns.TypeA
			}
			zone := test.zone
			if zone == "" {
				zone = "cluster.local."
			}
			query, q := ask(t, "a.cluster.local.", qtype)
			m := reply(t, query, test.records...)
			m.Rcode = test.rcode
			if test.change != nil {
				test.change(m)
			}
			a, got := Make(q, pack(t, m), zone, roomy)
			if got != test.want {
				t.Fatalf("refusal %q, want %q", got, test.want)
			}
			if a == nil {
				return
			}
			if a.Life != test.life || a.Negative != test.negative || int(a.Run.Count) != test.run {
				t.Errorf("life %d, negative %v, %d change places, want %d, %v, %d", a.Life, a.Negative, a.Run.Count, test.life, test.negative, test.run)
			}
		})
	}
}

// Not a single octet may be missing or too many, wherever the message ends.
func TestMakeCutShort(t *testing.T) {
	query, q := ask(t, "a.cluster.local.", dns.TypeA, edns(1232, false))
	m := reply(t, query, "a.cluster.local. 5 IN A 10.0.0.1", "-", soa)
	m.SetEdns0(1232, false)
	whole := pack(t, m)
	for length := range whole {
		if a, _ := Make(q, whole[:length], ".", roomy); a != nil {
			t.Errorf("%d of %d octets are kept", length, len(whole))
		}
	}
	if a, refusal := Make(q, append(whole, 0), ".", roomy); a != nil {
		t.Errorf("a trailing octet is kept: %s", refusal)
	}
	if a, refusal := Make(q, whole, ".", roomy); a == nil {
		t.Errorf("the whole is refused: %s", refusal)
	}
}

func TestMakeLarge(t *testing.T) {
	query, q := ask(t, "a.cluster.local.", dns.TypeA)
	var records []string
	for i := range 65 {
		records = append(records, fmt.Sprintf("a.cluster.local. 5 IN A 10.0.0.%d", i))
	}
	whole := pack(t, reply(t, query, records...))
	if _, refusal := Make(q, whole, ".", roomy); refusal != Large {
		t.Errorf("65 records: %q", refusal)
	}
	if _, refusal := Make(q, whole, ".", Limits{Octets: 1000, Records: 65}); refusal != Large {
		t.Errorf("more than 1000 octets: %q", refusal)
	}
	if a, refusal := Make(q, whole, ".", Limits{Octets: 2000, Records: 65}); a == nil {
		t.Errorf("with room enough: %q", refusal)
	}
}

// What is answered is what the server answered, but for ID, spelling, TTL and order.
func TestReply(t *testing.T) {
	records := map[string][]string{
		"an address": {"a.cluster.local. 5 IN A 10.0.0.1"},
		"a chain":    {"a.cluster.local. 30 IN CNAME cdn.Example.", "cdn.Example. 20 IN CNAME x.cdn.example.", "x.cdn.example. 9 IN A 10.0.0.1", "x.cdn.example. 9 IN A 10.0.0.2"},
		"all sections": {"a.cluster.local. 30 IN MX 10 mail.a.cluster.local.", "-", "cluster.local. 9 IN NS ns.cluster.local.", "-",
			"mail.a.cluster.local. 7 IN A 10.0.0.1", "mail.a.cluster.local. 7 IN AAAA fd00::1"},
		"NODATA":       {"-", soa},
		"text":         {`a.cluster.local. 5 IN TXT "some" "text"`},
		"unknown type": {`a.cluster.local. 5 IN TYPE65300 \# 4 0a000001`},
	}
	for name, texts := range records {
		for _, compress := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, compressed %v", name, compress), func(t *testing.T) {
				qtype := dns.TypeA
				if !strings.HasPrefix(texts[0], "-") && name != "a chain" {
					rr, _ := dns.NewRR(texts[0])
					qtype = rr.Header().Rrtype
				}
				query, q := ask(t, "a.cluster.local.", qtype)
				m := reply(t, query, texts...)
				m.Compress = compress
				a, refusal := Make(q, pack(t, m), ".", roomy)
				if a == nil {
					t.Fatal(refusal)
				}
				asker, asked := ask(t, "A.Cluster.locaL.", qtype, edns(4096, false))
				var got dns.Msg
				if err := got.Unpack(a.Reply(nil, asker, asked, 0, 0, 1232, 0)); err != nil {
					t.Fatal(err)
				}
				want := reply(t, asker, texts...)
				want.SetEdns0(4096, false)
				for _, rr := range append(append(want.Answer, want.Ns...), want.Extra...) {
					if rr.Header().Name == "a.cluster.local." {
						rr.Header().Name = "A.Cluster.locaL."
					}
					if soa, is := rr.(*dns.SOA); is {
						for _, name := range []*string{&soa.Hdr.Name, &soa.Ns, &soa.Mbox} {
							*name = strings.Replace(*name, "cluster.local.", "Cluster.locaL.", 1)
						}
					}
				}
				if diff := cmp.Diff(want.String(), got.String()); diff != "" {
					t.Errorf("(-want +got)\n%s", diff)
				}
			})
		}
	}
}

// A TTL is never above what the source gave, never beyond the end, and never negative.
func TestReplyAges(t *testing.T) {
	query, q := ask(t, "a.cluster.local.", dns.TypeA)
	a, _ := Make(q, pack(t, reply(t, query, "a.cluster.local. 5 IN CNAME b.cluster.local.", "b.cluster.local. 3 IN A 10.0.0.1")), ".", roomy)
	for age, want := range map[time.Duration][2]uint32{
		-time.Millisecond: {5, 3}, 0: {5, 3}, time.Millisecond: {4, 2}, time.Second: {4, 2}, 1001 * time.Millisecond: {3, 1},
		3 * time.Second: {2, 0}, time.Minute: {0, 0},
	} {
		var got dns.Msg
		if err := got.Unpack(a.Reply(nil, query, q, age, 0, 512, 0)); err != nil {
			t.Fatal(err)
		}
		if ttls := [2]uint32{got.Answer[0].Header().Ttl, got.Answer[1].Header().Ttl}; ttls != want {
			t.Errorf("at the age of %v: %v, want %v", age, ttls, want)
		}
	}
}

// Each address is first once in so many turns, behind the CNAME record.
func TestReplyTakesTurns(t *testing.T) {
	query, q := ask(t, "a.cluster.local.", dns.TypeA)
	a, _ := Make(q, pack(t, reply(t, query, "a.cluster.local. 5 IN CNAME b.cluster.local.",
		"b.cluster.local. 3 IN A 10.0.0.0", "b.cluster.local. 3 IN A 10.0.0.1", "b.cluster.local. 3 IN A 10.0.0.2", "-", soa)), ".", roomy)
	for turn := range uint32(7) {
		var got dns.Msg
		if err := got.Unpack(a.Reply(nil, query, q, 0, turn, 512, 0)); err != nil {
			t.Fatal(err)
		}
		for i, rr := range got.Answer[1:] {
			if address := rr.(*dns.A).A.String(); address != fmt.Sprintf("10.0.0.%d", (turn+uint32(i))%3) {
				t.Errorf("turn %d: %s is at %d", turn, address, i)
			}
		}
		if len(got.Answer) != 4 || len(got.Ns) != 1 {
			t.Errorf("turn %d: %v", turn, &got)
		}
	}
}

func TestReplyTruncated(t *testing.T) {
	query, q := ask(t, "a.cluster.local.", dns.TypeA, edns(512, true))
	var records []string
	for i := range 40 {
		records = append(records, fmt.Sprintf("a.cluster.local. 5 IN A 10.0.0.%d", i))
	}
	a, refusal := Make(q, pack(t, reply(t, query, records...)), ".", roomy)
	if a == nil {
		t.Fatal(refusal)
	}
	var got dns.Msg
	if err := got.Unpack(a.Reply(nil, query, q, 0, 0, q.Limit(), 0)); err != nil {
		t.Fatal(err)
	}
	if !got.Truncated || len(got.Answer) != 0 || got.IsEdns0() == nil || !got.IsEdns0().Do() {
		t.Errorf("got %v", &got)
	}
}

func TestParseQuery(t *testing.T) {
	plain := func() *dns.Msg { return new(dns.Msg).SetQuestion("A.b.", dns.TypeA) }
	tests := map[string]struct {
		change func(*dns.Msg)
		asked  Asked
		refuse bool
	}{
		"plain":          {asked: RecursionDesired},
		"RD=0":           {change: func(m *dns.Msg) { m.RecursionDesired = false }},
		"AD":             {change: func(m *dns.Msg) { m.AuthenticatedData = true }, asked: RecursionDesired | AuthenticData},
		"CD":             {change: func(m *dns.Msg) { m.CheckingDisabled = true }, asked: RecursionDesired | CheckingDisabled},
		"DO":             {change: edns(1232, true), asked: RecursionDesired | DNSSECOK},
		"EDNS":           {change: edns(1232, false), asked: RecursionDesired},
		"Z":              {change: func(m *dns.Msg) { m.Zero = true }, refuse: true},
		"TC":             {change: func(m *dns.Msg) { m.Truncated = true }, refuse: true},
		"AA":             {change: func(m *dns.Msg) { m.Authoritative = true }, refuse: true},
		"a reply":        {change: func(m *dns.Msg) { m.Response = true }, refuse: true},
		"an update":      {change: func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }, refuse: true},
		"CHAOS":          {change: func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, refuse: true},
		"EDNS version 1": {change: func(m *dns.Msg) { m.SetEdns0(1232, false); m.IsEdns0().SetVersion(1) }, refuse: true},
		"an option": {change: func(m *dns.Msg) {
			m.SetEdns0(1232, false)
			m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_NSID{Code: dns.EDNS0NSID}}
		}, refuse: true},
		"two questions": {change: func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }, refuse: true},
	}
	for name, test := range tests {
		m := plain()
		if test.change != nil {
			test.change(m)
		}
		q, ok := ParseQuery(pack(t, m))
		if ok == test.refuse || ok && (q.Asked != test.asked || q.Name != "\x01a\x01b\x00") {
			t.Errorf("%s: %+v, %v", name, q, ok)
		}
	}
}

// Whatever a server sends, what is made of it can be read, and only what was asked is in it.
func FuzzMake(f *testing.F) {
	for _, seed := range []string{
		"000181800001000100000000016107636c7573746572056c6f63616c0000010001c00c0001000100000005000" + "40a000001",
	} {
		data, err := hex.DecodeString(seed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	query := new(dns.Msg).SetQuestion("a.cluster.local.", dns.TypeA)
	packed, err := query.Pack()
	if err != nil {
		f.Fatal(err)
	}
	q, _ := ParseQuery(packed)
	f.Fuzz(func(t *testing.T, data []byte) {
		a, refusal := Make(&q, data, ".", roomy)
		if (a == nil) == (refusal == notRefused) {
			t.Fatalf("answer %v, refusal %q", a, refusal)
		}
		if a == nil {
			return
		}
		var got, source dns.Msg
		made := a.Reply(nil, packed, &q, time.Second, 1, 1232, 0)
		if err := got.Unpack(made); err != nil {
			t.Fatalf("%x became %x: %v", data, made, err)
		}
		if err := source.Unpack(data); err == nil && len(source.Answer) != len(got.Answer) {
			t.Errorf("%v became %v", &source, &got)
		}
	})
}
