//go:build linux

package datapath

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// A queryCase is one DNS message and what becomes of it.
type queryCase struct {
	name    string
	message []byte
	reason  string
}

// testQueries runs each case on both query programs and over both address families.
func testQueries(t *testing.T, h *harness, cases []queryCase) {
	t.Helper()
	for _, f := range families {
		for _, program := range queryPrograms {
			for _, c := range cases {
				t.Run(fmt.Sprintf("%s/%s/%s", c.name, f.name, program), func(t *testing.T) {
					frame := f.query(c.message)
					if c.reason == "steered" {
						h.forget(t, h.steer(t, program, f, frame))
						return
					}
					h.expect(t, program, frame, c.reason)
				})
			}
		}
	}
	h.wantInFlight(t, 0)
}

func names(t *testing.T, reason string, names ...string) (cases []queryCase) {
	t.Helper()
	for _, name := range names {
		cases = append(cases, queryCase{"name " + name, query(t, name), reason})
	}
	return cases
}

func TestNames(t *testing.T) {
	h := newHarness(t)
	cases := slices.Concat(
		names(t, "steered", "cluster.local", "svc.cluster.local", "a.b.cluster.local", inZone,
			"_dns._udp.kube-dns.kube-system.svc.cluster.local", "*.cluster.local", "cluster.local.cluster.local",
			"kUbErNeTeS.DeFaUlT.sVc.ClUsTeR.LoCaL", "CLUSTER.LOCAL", "@[`{.Cluster.Local"),
		names(t, "passed_external", "notcluster.local", "xcluster.local", "my-cluster.local", "cluster.localx",
			"cluster.local.example.com", "local", "cluster", "example.com", ".", "a", "xluster.local", "clustes.local",
			"cluster.locam", "cluster.loca", "luster.local", "svc.cluster", "local.cluster",
			// One bit from a letter's other case, or from a letter.
			"clus\\020er.local", "\\003luster.local", "c\\228uster.local"),
		[]queryCase{
			{"raw tail is the zone's", rawQuery(labels("\x07cluster\x05local")), "passed_external"},
			{"raw tail is the zone's, after a label", rawQuery(labels("a", "\x07cluster\x05local")), "passed_external"},
			{"one label with a dot in it", rawQuery(labels("cluster.local")), "passed_external"},
			{"one label with a leading dot", rawQuery(labels(".cluster.local")), "passed_external"},
			{"dot at the end of a label", rawQuery(labels("cluster.", "local")), "passed_external"},
			{"dot in front of a label", rawQuery(labels("x.cluster", "local")), "passed_external"},
			{"what a dot in a label becomes", rawQuery(labels("x\xaecluster", "local")), "passed_external"},
			{"dots below the zone", rawQuery(labels("a.b..", "cluster", "local")), "steered"},
			{"all octets below the zone", rawQuery(labels("\x00\x01\x1f \x7f\x80\xae\xff", "cluster", "local")), "steered"},
			{"zero octets for the zone", rawQuery(labels("\x00\x00\x00\x00\x00\x00\x00", "local")), "passed_external"},
			{"label of 46 octets, a dot", rawQuery(labels(strings.Repeat("x", 46), "cluster", "local")), "steered"},
			{"zone behind its root", slices.Concat(rawQuery("\x00")[:13], []byte(labels("cluster", "local"))), "passed_class"},
		},
	)
	testQueries(t, h, cases)
}

// many is a name with so many one-octet labels below the zone.
func many(count int) string {
	return strings.Repeat("\x01a", count) + labels("cluster", "local")
}

func TestLengths(t *testing.T) {
	long := strings.Repeat("x", 63)
	cases := []queryCase{
		{"label of 63", rawQuery(labels(long, "cluster", "local")), "steered"},
		{"name of 255", rawQuery(many(120)), "steered"},
		{"name of 254", rawQuery("\x02bb" + many(118)), "steered"},
		{"name of 256", rawQuery("\x02bb" + many(119)), "passed_name_length"},
		{"name of 257", rawQuery(many(121)), "passed_name_length"},
		{"name of 299", rawQuery(many(142)), "passed_name_length"},
		{"127 labels outside", rawQuery(strings.Repeat("\x01a", 127) + "\x00"), "passed_external"},
		{"128 labels", rawQuery(strings.Repeat("\x01a", 128) + "\x00"), "passed_name_length"},
		{"3 of 63 and one of 61 outside", rawQuery(labels(long, long, long, long[:61])), "passed_external"},
		{"4 of 63 outside", rawQuery(labels(long, long, long, long)), "passed_name_length"},
		{"label byte 0x40", rawQuery("\x40" + long + "x" + labels("cluster", "local")), "passed_label"},
		{"label byte 0x80", rawQuery("\x01a\x80" + labels("cluster", "local")), "passed_label"},
		{"label byte 0xc0", rawQuery("\x01a\xc0" + labels("cluster", "local")), "passed_label"},
		{"label byte 0xff", rawQuery("\xff" + labels("cluster", "local")), "passed_label"},
		{"pointer to itself", rawQuery("\xc0\x0c"), "passed_label"},
		{"pointer to the label before", rawQuery("\x01a\xc0\x0c"), "passed_label"},
		{"pointer into the header", rawQuery("\xc0\x00"), "passed_label"},
		{"pointer behind the zone's first label", rawQuery("\x07cluster\xc0\x0c"), "passed_label"},
		{"pointer at the end of 255", rawQuery(strings.Repeat("\x01a", 126) + "\xc0\x0c"), "passed_label"},
		{"name without end", rawQuery(many(3)[:10])[:22], "passed_malformed"},
	}
	// The cases say the length on the wire: keep them honest.
	for _, c := range cases {
		var length int
		if _, err := fmt.Sscanf(c.name, "name of %d", &length); err == nil && len(c.message) != 12+length+4 {
			t.Errorf("%q has %d octets", c.name, len(c.message)-16)
		}
	}
	testQueries(t, newHarness(t), cases)
}

func TestHeaders(t *testing.T) {
	good := query(t, inZone)
	cases := []queryCase{
		{"QDCOUNT 0", put(good, 4, 0, 0), "passed_counts"},
		{"QDCOUNT 2", put(good, 4, 0, 2), "passed_counts"},
		{"QDCOUNT 256", put(good, 4, 1, 0), "passed_counts"},
		{"QDCOUNT 257", put(good, 4, 1, 1), "passed_counts"},
		{"ANCOUNT 1", put(good, 6, 0, 1), "passed_counts"},
		{"ANCOUNT 256", put(good, 6, 1, 0), "passed_counts"},
		{"NSCOUNT 1", put(good, 8, 0, 1), "passed_counts"},
		{"NSCOUNT 65535", put(good, 8, 0xff, 0xff), "passed_counts"},
		{"ARCOUNT 1 of nothing", put(good, 10, 0, 1), "passed_malformed"},
		{"ARCOUNT 2", put(good, 10, 0, 2), "passed_counts"},
		{"ARCOUNT 3", put(good, 10, 0, 3), "passed_counts"},
		{"ARCOUNT 256", put(good, 10, 1, 0), "passed_counts"},
		{"ARCOUNT 65535", put(good, 10, 0xff, 0xff), "passed_counts"},
		{"QR", put(good, 2, 0x81), "passed_response"},
		{"octet behind the question", append(slices.Clone(good), 0), "passed_malformed"},
	}
	for opcode := 1; opcode < 16; opcode++ {
		cases = append(cases, queryCase{fmt.Sprint("opcode ", opcode), put(good, 2, byte(opcode<<3)|1), "passed_opcode"})
	}
	// AA, TC, RD, RA, Z, AD, CD and RCODE say nothing in a query.
	for bit := range 16 {
		if mask := uint16(1) << bit; mask&0xf800 == 0 {
			flags := binary.BigEndian.Uint16(good[2:]) ^ mask
			cases = append(cases, queryCase{fmt.Sprintf("flag %#x", mask), put(good, 2, byte(flags>>8), byte(flags)), "steered"})
		}
	}
	for _, id := range []byte{0, 0xff} {
		cases = append(cases, queryCase{fmt.Sprint("ID of ", id), put(good, 0, id, id), "steered"})
	}
	reply := new(dns.Msg).SetReply(&dns.Msg{MsgHdr: dns.MsgHdr{Id: testID}, Question: []dns.Question{{
		Name: dns.Fqdn(inZone), Qtype: dns.TypeA, Qclass: dns.ClassINET,
	}}})
	reply.Answer = []dns.RR{&dns.A{
		Hdr: dns.RR_Header{Name: dns.Fqdn(inZone), Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}, A: nat4.AsSlice(),
	}}
	cases = append(cases, queryCase{"reply with an answer", pack(t, reply), "passed_response"})
	testQueries(t, newHarness(t), cases)
}

func TestClassesAndTypes(t *testing.T) {
	var cases []queryCase
	for _, class := range []uint16{0, dns.ClassCSNET, dns.ClassCHAOS, dns.ClassHESIOD, dns.ClassNONE, dns.ClassANY, 256, 257, 0x8001} {
		message := query(t, inZone, func(m *dns.Msg) { m.Question[0].Qclass = class })
		cases = append(cases, queryCase{fmt.Sprint("class ", class), message, "passed_class"})
	}
	for _, qtype := range []uint16{
		0, dns.TypeA, dns.TypeNS, dns.TypeCNAME, dns.TypeSOA, dns.TypePTR, dns.TypeMX, dns.TypeTXT, dns.TypeAAAA, dns.TypeSRV,
		dns.TypeOPT, dns.TypeDS, dns.TypeHTTPS, dns.TypeIXFR, dns.TypeAXFR, dns.TypeANY, 256, 65535,
	} {
		message := query(t, inZone, func(m *dns.Msg) { m.Question[0].Qtype = qtype })
		cases = append(cases, queryCase{fmt.Sprint("type ", qtype), message, "steered"})
	}
	testQueries(t, newHarness(t), cases)
}

// Each shorter message, in a datagram of that length, is passed.
func TestCutMessages(t *testing.T) {
	h := newHarness(t)
	messages := [][]byte{query(t, "cluster.local"), query(t, inZone, withOPT(1232, &dns.EDNS0_COOKIE{Cookie: "0102030405060708"}))}
	count := 0
	for _, f := range families {
		for _, program := range queryPrograms {
			for _, message := range messages {
				for length := range message {
					h.expect(t, program, f.query(message[:length]), "passed_malformed")
					count++
				}
			}
		}
	}
	t.Logf("%d cut messages", count)
}

// What Ethernet pads a short frame with is no part of the message.
func TestFramePadding(t *testing.T) {
	h := newHarness(t, testZone, "example")
	padding := func(octets string) pktgen.Option {
		return func(frame *pktgen.Frame) { frame.Padding = []byte(octets) }
	}
	for _, f := range families {
		for _, program := range queryPrograms {
			// 59 octets over IPv4, padded to 60 as Ethernet does.
			h.expect(t, program, f.query(rawQuery("\x00"), padding("\x07")), "passed_external")
			for _, octets := range []string{"\x00", "\x01", strings.Repeat("\xff", 7), strings.Repeat("\x00", 300), "\x07example\x00\x00\x01\x00\x01"} {
				h.expect(t, program, f.query(rawQuery("\x00"), padding(octets)), "passed_external")
				h.forget(t, h.steer(t, program, f, f.query(query(t, "example"), padding(octets))))
				h.forget(t, h.steer(t, program, f, f.query(query(t, inZone), padding(octets))))
			}
			// The name's end is in the padding only.
			whole := query(t, "cluster.local")
			for cut := 1; cut <= 20; cut++ {
				at := len(whole) - cut
				h.expect(t, program, f.query(whole[:at], padding(string(whole[at:]))), "passed_malformed")
			}
		}
	}
	h.wantInFlight(t, 0)
}

// A scratch area that is used again must not let a long name show through a shorter one.
func TestNoLeftovers(t *testing.T) {
	h := newHarness(t)
	for _, f := range families {
		for length := 1; length <= 40; length++ {
			h.forget(t, h.steer(t, FromHost, f, f.query(rawQuery(many(120)))))
			h.expect(t, FromHost, f.query(rawQuery(labels(strings.Repeat("l", length)))), "passed_external")
			h.forget(t, h.steer(t, FromHost, f, f.query(rawQuery(labels(strings.Repeat("l", length), "cluster", "local")))))
		}
	}
}

// The largest query is of 512 octets; longer ones go to user space, whatever they ask.
func TestOversize(t *testing.T) {
	sized := func(size int) []byte {
		empty := len(query(t, inZone, withOPT(4096, &dns.EDNS0_PADDING{})))
		return query(t, inZone, withOPT(4096, &dns.EDNS0_PADDING{Padding: make([]byte, size-empty)}))
	}
	testQueries(t, newHarness(t), []queryCase{
		{"511", sized(511), "steered"},
		{"512", sized(512), "steered"},
		{"513", sized(513), "passed_oversize"},
		{"1232", sized(1232), "passed_oversize"},
		{"3000", sized(3000), "passed_oversize"},
	})
}

func TestScopes(t *testing.T) {
	h := newHarness(t)
	kubeSwitch := netip.MustParseAddrPort("172.19.1.1:53")
	err := h.ReplaceListeners([]Listener{
		{Address: listener4, Scope: ScopeHost}, {Address: kubeSwitch, Scope: ScopeKubeSwitch},
		{Address: listener6, Scope: ScopePod},
	})
	if err != nil {
		t.Fatal(err)
	}
	h.replaceAllowed(t, netip.MustParsePrefix("172.19.1.0/24"))
	worker := families[0]
	worker.client, worker.listener = netip.MustParseAddrPort("172.19.1.100:53"), kubeSwitch
	frame := worker.query(query(t, inZone))
	h.forget(t, h.steerIn(t, FromClient, worker, frame, ScopeKubeSwitch, loIfindex))
	h.expectIn(t, FromClient, worker.query(query(t, "example.com")), ScopeKubeSwitch, "passed_external", nil)
	// Who may not ask is refused here too, but what this host's own programs ask never is.
	stranger := worker
	stranger.client = netip.MustParseAddrPort("172.19.2.100:53")
	h.expectIn(t, FromClient, stranger.query(query(t, inZone)), ScopeKubeSwitch, "refused_source", nil)
	h.expectIn(t, FromHost, stranger.query(query(t, "example.com")), ScopeKubeSwitch, "passed_external", nil)
	h.forget(t, h.steerIn(t, FromClient, families[1], families[1].query(query(t, inZone)), ScopePod, loIfindex))

	// An address that is no longer a listener's is left alone.
	if err := h.ReplaceListeners([]Listener{{Address: listener4, Scope: testScope}}); err != nil {
		t.Fatal(err)
	}
	h.replaceAllowed(t, everyone...)
	h.expect(t, FromClient, frame, notOurs)
	h.expect(t, FromClient, families[1].query(query(t, inZone)), notOurs)
	h.forget(t, h.steer(t, FromClient, families[0], families[0].query(query(t, inZone))))
	h.wantInFlight(t, 0)
}
