package e2e

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// stimulus is one message that a client might send, and what is special about its way through the program. The T
// numbers are those of the collected public failures.
type stimulus struct {
	name    string
	payload []byte

	// outside: unbound is the right server; CoreDNS must never hear of it. Otherwise CoreDNS is, and unbound must not.
	outside bool
	// silent: the right answer is none.
	silent bool
	// ours: the forwarder answers by itself, and asks nobody.
	ours bool
	// straight replaces payload where the program changes a query on its way, as it says it does.
	straight []byte
	// rcode is the answer where the program deliberately differs from the right server; why says so.
	why   string
	rcode int
}

// question in text, as servers log it; "" if it has bytes that unbound and this library write differently, or is longer
// than unbound's log takes.
func (s stimulus) question() string {
	var m dns.Msg
	if err := m.Unpack(s.payload); err != nil || len(m.Question) == 0 {
		return ""
	}
	name := strings.ToLower(m.Question[0].Name)
	if len(name) > 200 || strings.Contains(name, "\\") {
		return ""
	}
	return name
}

const stimulusID = 0x4b32

// message puts a message together from anything, also from what no library would write.
func message(flags uint16, counts [4]uint16, sections ...[]byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, stimulusID)
	b = binary.BigEndian.AppendUint16(b, flags)
	for _, n := range counts {
		b = binary.BigEndian.AppendUint16(b, n)
	}
	return append(b, slices.Concat(sections...)...)
}

// labels is a name in wire form, of labels that may contain any byte.
func labels(list ...string) []byte {
	var b []byte
	for _, l := range list {
		b = append(append(b, byte(len(l))), l...)
	}
	return append(b, 0)
}

func question(name []byte, qtype, class uint16) []byte {
	b := binary.BigEndian.AppendUint16(slices.Clone(name), qtype)
	return binary.BigEndian.AppendUint16(b, class)
}

// record is a resource record without data.
func record(name []byte, rtype uint16) []byte {
	return append(question(name, rtype, dns.ClassINET), 0, 0, 0, 5, 0, 0)
}

var one = [4]uint16{1, 0, 0, 0}

const rd = 0x0100

func plain(name string, qtype uint16, change ...func(*dns.Msg)) []byte {
	m := new(dns.Msg).SetQuestion(name, qtype)
	m.Id = stimulusID
	for _, f := range change {
		f(m)
	}
	b, err := m.Pack()
	if err != nil {
		panic(fmt.Sprintf("pack the stimulus for %s: %v", name, err))
	}
	return b
}

func edns(size uint16, options ...dns.EDNS0) func(*dns.Msg) {
	return func(m *dns.Msg) {
		m.SetEdns0(size, false)
		m.IsEdns0().Option = options
	}
}

func stimuli(t *testing.T) []stimulus {
	t.Helper()
	backend := labels("backend", "default", "svc", "cluster", "local")
	var list []stimulus
	in := func(name string, payload []byte) *stimulus {
		list = append(list, stimulus{name: name, payload: payload})
		return &list[len(list)-1]
	}
	out := func(name string, payload []byte) *stimulus {
		list = append(list, stimulus{name: name, payload: payload, outside: true})
		return &list[len(list)-1]
	}

	for _, name := range []string{"cluster.local.", "svc.cluster.local.", "a.b.cluster.local.", lab.Backend} {
		in("name "+name, plain(name, dns.TypeA))
	}
	for _, name := range []string{
		"notcluster.local.", "xcluster.local.", "my-cluster.local.", "cluster.localx.", "cluster.local.example.com.",
		"local.", "cluster.", "cluster.loca.", "luster.local.", "backend.default.svc.xcluster.local.", "cluster-local.",
		"cluster.local.cluster.", "172.in-addr.arpa.", "1.121.172.in-addr.arpa.", "1.22.172.in-addr.arpa.",
		lab.WWW, "missing.example.com.",
	} {
		out("look-alike "+name, plain(name, dns.TypeA))
	}
	out("the zone's bytes in one label", message(rd, one, question(labels("\x07cluster\x05local"), dns.TypeA, 1)))
	out("the zone's bytes in one label below another", message(rd, one, question(labels("x", "\x07cluster\x05local"), dns.TypeA, 1)))
	out("the zone's text in one label", message(rd, one, question(labels("cluster.local"), dns.TypeA, 1)))
	out("a dot in the zone's first label", message(rd, one, question(labels("backend", "x.cluster", "local"), dns.TypeA, 1)))
	for _, name := range []string{"bAcKeNd.DeFaUlT.sVc.ClUsTeR.LoCaL.", strings.ToUpper(lab.Backend), lab.Backend} {
		in("capitals "+name, plain(name, dns.TypeA))
	}
	in("capitals, NXDOMAIN", plain("MiSsInG.cluster.LOCAL.", dns.TypeA))
	// Bytes that differ from a letter's in the one bit that folding clears.
	out("capitals, no letters", message(rd, one, question(labels("CLUSTER", "LOC\x01L"), dns.TypeA, 1)))
	out("capitals, over 0x7f", message(rd, one, question(labels("cluster", "loc\xe1l"), dns.TypeA, 1)))
	out("root", plain(".", dns.TypeNS))

	in("label of 63", plain(strings.Repeat("a", 63)+".cluster.local.", dns.TypeA))
	var longest []string
	for range 120 {
		longest = append(longest, "a")
	}
	in("name of 255", message(rd, one, question(labels(append(slices.Clone(longest), "cluster", "local")...), dns.TypeA, 1)))
	long := strings.Repeat("b", 63)
	out("longest name outside", message(rd, one, question(labels(long, long, long, long[:61]), dns.TypeA, 1)))
	longest[0] = "aa"
	in("name of 256", message(rd, one, question(labels(append(longest, "cluster", "local")...), dns.TypeA, 1)))
	for _, kind := range []byte{0x40, 0x80} {
		name := slices.Clone(backend)
		name[0] = kind
		in(fmt.Sprintf("label type %#x", kind), message(rd, one, question(name, dns.TypeA, 1)))
	}

	in("pointer to itself", message(rd, one, []byte{0xC0, 12, 0, 1, 0, 1}))
	in("label and pointer to it", message(rd, one, []byte{1, 'a', 0xC0, 12, 0, 1, 0, 1}))
	// CoreDNS reads what no client may send; the forwarder says what RFC 1035 wants.
	strict := func(s *stimulus) { s.why, s.rcode = "CoreDNS is lenient with broken questions", dns.RcodeFormatError }
	strict(in("pointer into the header", message(rd, one, []byte{0xC0, 4, 0, 1, 0, 1})))
	strict(in("pointer behind the question", message(rd, one, []byte{0xC0, 18, 0, 1, 0, 1}, backend)))

	q := question(backend, dns.TypeA, 1)
	for _, test := range []struct {
		counts [4]uint16
		rest   []byte
	}{
		{[4]uint16{0, 0, 0, 0}, q},
		{[4]uint16{2, 0, 0, 0}, slices.Concat(q, q)},
		{[4]uint16{2, 0, 0, 0}, q},
		{[4]uint16{1, 1, 0, 0}, slices.Concat(q, record(backend, dns.TypeA))},
		{[4]uint16{1, 2, 0, 0}, slices.Concat(q, record(backend, dns.TypeNULL), record(backend, dns.TypeNULL))},
		{[4]uint16{1, 0, 1, 0}, slices.Concat(q, record(backend, dns.TypeNULL))},
		{[4]uint16{1, 0, 2, 0}, slices.Concat(q, record(backend, dns.TypeNULL), record(backend, dns.TypeNULL))},
		{[4]uint16{1, 0, 0, 1}, slices.Concat(q, record(backend, dns.TypeNULL))},
		{[4]uint16{1, 0, 0, 2}, slices.Concat(q, record(labels(), dns.TypeNULL), record(labels(), dns.TypeNULL))},
		{[4]uint16{1, 0, 0, 3}, q},
		{[4]uint16{1, 0, 0, 65535}, q},
		{[4]uint16{65535, 0, 0, 0}, q},
	} {
		in(fmt.Sprintf("counts %v and %d bytes", test.counts, len(test.rest)), message(rd, test.counts, test.rest))
	}
	for _, opcode := range []uint16{dns.OpcodeIQuery, dns.OpcodeStatus, 3, dns.OpcodeNotify, dns.OpcodeUpdate, 6, 15} {
		s := in(fmt.Sprintf("opcode %d", opcode), message(rd|opcode<<11, one, q))
		if opcode == dns.OpcodeNotify {
			s.why, s.rcode = "CoreDNS may take NOTIFY for a query, and its file plugin is silent; the forwarder is nobody's secondary", dns.RcodeNotImplemented
		}
	}
	in("a reply", message(rd|0x8000, one, q)).silent = true
	in("a reply with a record", message(rd|0x8000, [4]uint16{1, 1, 0, 0}, q, record(backend, dns.TypeA))).silent = true

	whole := message(rd, one, q)
	for n := range whole {
		s := in(fmt.Sprintf("first %d bytes", n), whole[:n])
		switch n {
		case 12, len(whole) - 4, len(whole) - 2: // CoreDNS forgives an end between two fields
			strict(s)
		default:
			s.silent = n < 12
		}
	}
	in("bytes behind the question", append(slices.Clone(whole), "more"...))

	for _, qtype := range []uint16{
		dns.TypeA, dns.TypeAAAA, dns.TypeTXT, dns.TypeSRV, dns.TypeMX, dns.TypeNS, dns.TypeSOA, dns.TypeCNAME, dns.TypePTR,
		dns.TypeANY, dns.TypeHTTPS, dns.TypeDS, dns.TypeAXFR, 0, 65535,
	} {
		in("type "+dns.Type(qtype).String(), message(rd, one, question(backend, qtype, 1)))
	}
	for _, test := range []struct {
		name  string
		qtype uint16
	}{
		{lab.Headless, dns.TypeA}, {"h1." + lab.Headless, dns.TypeA}, {"_http._tcp." + lab.Headless, dns.TypeSRV},
		{"dns-version.cluster.local.", dns.TypeTXT}, {lab.External, dns.TypeCNAME},
		{"20.0.21.172.in-addr.arpa.", dns.TypePTR}, {"11.1.20.172.in-addr.arpa.", dns.TypePTR},
		{"99.0.21.172.in-addr.arpa.", dns.TypePTR},
		{"0.2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.2.0.0.0.0.d.f.ip6.arpa.", dns.TypePTR},
	} {
		in("type "+dns.Type(test.qtype).String()+" of "+test.name, plain(test.name, test.qtype))
	}
	out("PTR outside", plain("80.113.0.203.in-addr.arpa.", dns.TypePTR))
	for _, class := range []uint16{0, dns.ClassCHAOS, dns.ClassANY, 254} {
		in(fmt.Sprintf("class %d", class), message(rd, one, question(backend, dns.TypeTXT, class)))
	}

	cookie := func(hex string) dns.EDNS0 { return &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: hex} }
	subnet4 := &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: []byte{192, 0, 2, 0}}
	subnet6 := &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 2, SourceNetmask: 32, Address: append([]byte{0x20, 1, 0xd, 0xb8}, make([]byte, 12)...)}
	for _, test := range []struct {
		name   string
		change func(*dns.Msg)
	}{
		{"as dig does", func(m *dns.Msg) { m.AuthenticatedData = true; edns(1232, cookie("24a5ac0011223344"))(m) }},
		{"AD without", func(m *dns.Msg) { m.AuthenticatedData = true }},
		{"CD", func(m *dns.Msg) { m.CheckingDisabled = true }},
		{"no RD", func(m *dns.Msg) { m.RecursionDesired = false }},
		{"size 512", edns(512)}, {"size 0", edns(0)}, {"size 511", edns(511)}, {"size 1231", edns(1231)}, {"size 1232", edns(1232)},
		{"DO", func(m *dns.Msg) { m.SetEdns0(1232, true) }},
		{"flag 0x40", func(m *dns.Msg) { edns(1232)(m); m.IsEdns0().Hdr.Ttl |= 0x40 }},
		{"option 100", edns(1232, &dns.EDNS0_LOCAL{Code: 100, Data: []byte("x")})},
		{"ECS v4", edns(1232, subnet4)}, {"ECS v6", edns(1232, subnet6)},
		{"NSID", edns(1232, &dns.EDNS0_NSID{Code: dns.EDNS0NSID})},
		{"padding", edns(1232, &dns.EDNS0_PADDING{Padding: make([]byte, 128)})},
		{"cookie", edns(1232, cookie("0102030405060708"))},
		{"other cookie, ECS v4", edns(1232, cookie("0807060504030201"), subnet4)},
	} {
		in("EDNS "+test.name, plain(lab.Backend, dns.TypeA, test.change))
		out("EDNS outside, "+test.name, plain(lab.WWW, dns.TypeA, test.change))
	}
	for _, size := range []uint16{1233, 4096, 65535} {
		in(fmt.Sprintf("EDNS size %d", size), plain(lab.Backend, dns.TypeA, edns(size))).straight = plain(lab.Backend, dns.TypeA, edns(1232))
		in(fmt.Sprintf("big, size %d", size), plain(lab.Big, dns.TypeA, edns(size))).straight = plain(lab.Big, dns.TypeA, edns(1232))
	}
	in("EDNS over 512 bytes", plain(lab.Backend, dns.TypeA, edns(1232, &dns.EDNS0_PADDING{Padding: make([]byte, 500)})))
	twoOPT := plain(lab.Backend, dns.TypeA, edns(1232))
	twoOPT = append(twoOPT, twoOPT[len(twoOPT)-11:]...)
	twoOPT[11] = 2
	in("EDNS two OPT", twoOPT)
	cutOPT := plain(lab.Backend, dns.TypeA, edns(1232))
	in("EDNS cut OPT", cutOPT[:len(cutOPT)-3])
	longOPT := slices.Clone(cutOPT)
	longOPT[len(longOPT)-1] = 9
	in("EDNS OPT that claims more than there is", longOPT)
	version := func(m *dns.Msg) { edns(1232)(m); m.IsEdns0().SetVersion(1) }
	in("EDNS version 1", plain(lab.Backend, dns.TypeA, version))
	out("EDNS outside, version 1", plain(lab.WWW, dns.TypeA, version)).ours = true

	in("big", plain(lab.Big, dns.TypeA))
	in("big, size 512", plain(lab.Big, dns.TypeA, edns(512)))
	in("big, size 1232", plain(lab.Big, dns.TypeA, edns(1232)))
	return list
}
