package forwarder

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

// answerMany answers with n TXT records, whatever the client's size.
func answerMany(n int) func(*peerQuery) {
	return func(q *peerQuery) {
		m := q.msg()
		r := new(dns.Msg).SetReply(m)
		for i := range n {
			r.Answer = append(r.Answer, txt(m.Question[0].Name, fmt.Sprintf("record %02d", i)))
		}
		if opt := m.IsEdns0(); opt != nil {
			r.SetEdns0(4096, opt.Do())
		}
		r.Compress = true
		q.replyMsg(r)
	}
}

func TestReplySize(t *testing.T) {
	out := newPeer(t, answerMany(100)) // about 2,300 octets
	r := external(out)
	r.Zones["cluster.local"] = r.Upstreams
	s := start(t, r)
	for _, name := range []string{"www.example.org.", "x.cluster.local."} {
		for _, tt := range []struct {
			size  int // -1: no OPT
			limit int
		}{{-1, 512}, {0, 512}, {512, 512}, {600, 600}, {1232, 1232}, {4096, 1232}, {65535, 1232}} {
			t.Run(fmt.Sprint(name, tt.size), func(t *testing.T) {
				m := query(name, false)
				if tt.size >= 0 {
					m.SetEdns0(uint16(tt.size), true)
				}
				raw := dial(t, s, "udp").ask(pack(t, m))
				r := unpack(t, raw)
				if len(raw) > tt.limit || len(raw) < tt.limit-64 || !r.Truncated {
					t.Errorf("%d octets, TC %v, want at most %d and not much less", len(raw), r.Truncated, tt.limit)
				}
				if opt := r.IsEdns0(); (opt != nil) != (tt.size >= 0) || opt != nil && !opt.Do() {
					t.Errorf("OPT %v", opt)
				}
				for i, rr := range r.Answer {
					if want := fmt.Sprintf("record %02d", i); rr.(*dns.TXT).Txt[0] != want {
						t.Fatalf("record %d is %v", i, rr)
					}
				}
				r = dial(t, s, "tcp").askMsg(m)
				if len(r.Answer) != 100 || r.Truncated {
					t.Errorf("by TCP: %d answers, TC %v", len(r.Answer), r.Truncated)
				}
			})
		}
	}
}

// TestExternalEDNS: OPT is hop-by-hop.
func TestExternalEDNS(t *testing.T) {
	got := make(chan *dns.Msg, 1)
	p := newPeer(t, func(q *peerQuery) {
		m := q.msg()
		got <- m
		r := new(dns.Msg).SetReply(m)
		r.AuthenticatedData = true
		r.SetEdns0(4096, true)
		r.IsEdns0().Option = []dns.EDNS0{
			&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "01020304050607081112131415161718"},
			&dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeStaleAnswer, ExtraText: "old"},
			&dns.EDNS0_NSID{Code: dns.EDNS0NSID, Nsid: "abcd"},
		}
		q.replyMsg(r)
	})
	s := start(t, external(p))

	m := query("www.example.org.", true)
	m.AuthenticatedData, m.CheckingDisabled, m.Zero = true, true, true
	opt := m.IsEdns0()
	opt.SetUDPSize(4096)
	opt.SetDo()
	opt.Option = []dns.EDNS0{
		&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"},
		&dns.EDNS0_LOCAL{Code: 100, Data: []byte{1}},
		&dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: []byte{192, 0, 2, 0}},
	}
	r := dial(t, s, "udp").askMsg(m)
	sent := <-got
	if !sent.RecursionDesired || !sent.AuthenticatedData || !sent.CheckingDisabled || sent.Zero {
		t.Errorf("flags of the query: %+v", sent.MsgHdr)
	}
	if o := sent.IsEdns0(); o == nil || o.UDPSize() != maxUDPSize || !o.Do() || len(o.Option) != 0 {
		t.Errorf("OPT of the query: %v", o)
	}
	if !r.AuthenticatedData {
		t.Error("AD of the reply is lost")
	}
	o := r.IsEdns0()
	if o == nil || o.UDPSize() != maxUDPSize || !o.Do() {
		t.Fatalf("OPT of the reply: %v", o)
	}
	if len(o.Option) != 1 || ede(t, r).ExtraText != "old" {
		t.Errorf("options of the reply: %v", o.Option)
	}

	r = ask(t, s, "www.example.org.")
	if (<-got).IsEdns0() != nil || r.IsEdns0() != nil {
		t.Error("OPT without the client's")
	}
}

// TestClusterEDNS: the client's OPT reaches the zone's server, and the
// server's the client.
func TestClusterEDNS(t *testing.T) {
	got := make(chan []byte, 1)
	p := newPeer(t, func(q *peerQuery) {
		got <- q.raw
		m := q.msg()
		r := new(dns.Msg).SetReply(m)
		r.Extra = m.Extra
		q.replyMsg(r)
	})
	s := start(t, cluster(p))
	m := query("x.cluster.local.", true)
	opt := m.IsEdns0()
	opt.SetUDPSize(4096)
	opt.Option = []dns.EDNS0{
		&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"},
		&dns.EDNS0_NSID{Code: dns.EDNS0NSID},
		&dns.EDNS0_LOCAL{Code: 100, Data: []byte{1}},
	}
	m.Zero = true
	raw := pack(t, m)

	r := dial(t, s, "udp").askMsg(m)
	want := unpack(t, raw)
	want.IsEdns0().SetUDPSize(maxUDPSize)
	if diff := cmp.Diff(pack(t, want)[2:], (<-got)[2:]); diff != "" {
		t.Errorf("query differs (-want +got):\n%s", diff)
	}
	if len(r.IsEdns0().Option) != 3 {
		t.Errorf("options of the reply: %v", r.IsEdns0())
	}
	dial(t, s, "tcp").askMsg(m)
	if sent := <-got; !bytes.Equal(sent[2:], raw[2:]) {
		t.Errorf("by TCP the query is\n%x, want\n%x", sent, raw)
	}
}

func TestBadVersion(t *testing.T) {
	in, out := newPeer(t, answerRcode(dns.RcodeBadVers)), newPeer(t, answerTXT("x"))
	r := cluster(in)
	r.Upstreams = external(out).Upstreams
	s := start(t, r)
	for _, name := range []string{"www.example.org.", "x.cluster.local."} {
		m := query(name, true)
		m.IsEdns0().SetVersion(1)
		r := dial(t, s, "udp").askMsg(m)
		wantRcode(t, r, dns.RcodeBadVers)
		if o := r.IsEdns0(); o.Version() != 0 {
			t.Errorf("OPT %v", o)
		}
	}
	if in.udp.Load() != 1 || out.udp.Load() != 0 {
		t.Errorf("the zone's server got %d queries, the upstream %d", in.udp.Load(), out.udp.Load())
	}
}

// TestRecordsUnchanged compares the answer's bytes: records that miekg/dns
// would pack differently, in a given order.
func TestRecordsUnchanged(t *testing.T) {
	// TYPE65280, an uncompressed owner in capitals, a record twice.
	rr := "03575757074558414d504c45034f524700" + "ff00" + "0001" + "00000005" + "0003" + "c00c01"
	records, err := hex.DecodeString(strings.Repeat(rr, 2))
	if err != nil {
		t.Fatal(err)
	}
	const (
		noOPT = iota
		optAtEnd
		optInFront // of another record
	)
	var form atomic.Int32 // of the server's reply
	p := newPeer(t, func(q *peerQuery) {
		var question question
		if err := question.parse(q.raw); err != nil {
			t.Error(err)
		}
		opt := appendOPT(nil, 0, false, nil)
		reply := append([]byte(nil), q.raw[:question.end]...)
		setFlags(reply, flagQR|flagRA)
		setCount(reply, sectionAnswer, 2)
		setCount(reply, sectionAdditional, 0)
		reply = append(reply, records...)
		switch form.Load() {
		case optAtEnd:
			setCount(reply, sectionAdditional, 1)
			reply = append(reply, opt...)
			reply = append(reply, "garbage"...)
		case optInFront:
			setCount(reply, sectionAdditional, 2)
			reply = append(reply, opt...)
			reply = append(reply, 0, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 192, 0, 2, 1)
		}
		q.reply(reply)
	})
	s := start(t, external(p))
	for _, edns := range []bool{false, true} {
		raw := pack(t, query("www.example.org.", edns))
		want := records
		if edns {
			want = append(append([]byte(nil), records...), appendOPT(nil, 0, false, nil)...)
		}
		for _, f := range []int32{noOPT, optAtEnd} {
			form.Store(f)
			got := dial(t, s, "udp").ask(raw)
			if end := headerLen + len("www.example.org.") + 1 + 4; !bytes.Equal(got[end:], want) {
				t.Errorf("EDNS %v, form %d: records\n%x, want\n%x", edns, f, got[end:], want)
			}
		}
		form.Store(optInFront)
		m := unpack(t, dial(t, s, "udp").ask(raw))
		if len(m.Answer) != 2 || (m.IsEdns0() != nil) != edns || m.Extra[0].Header().Rrtype != dns.TypeA {
			t.Errorf("with OPT in front, EDNS %v:\n%v", edns, m)
		}
	}
}

// TestSigned: RFC 8945 section 5.5.
func TestSigned(t *testing.T) {
	got := make(chan []byte, 1)
	p := newPeer(t, func(q *peerQuery) { got <- q.raw; answerTXT("x")(q) })
	s := start(t, external(p))
	m := query("www.example.org.", true)
	m.IsEdns0().SetUDPSize(4096)
	m.Extra = append(m.Extra, &dns.TSIG{
		Hdr:       dns.RR_Header{Name: "key.example.", Rrtype: dns.TypeTSIG, Class: dns.ClassANY},
		Algorithm: dns.HmacSHA256, MAC: "abcd", MACSize: 2, OrigId: m.Id,
	})
	raw := pack(t, m)
	dial(t, s, "udp").ask(raw)
	if sent := <-got; !bytes.Equal(sent[2:], raw[2:]) {
		t.Errorf("sent on\n%x, want\n%x", sent, raw)
	}
}
