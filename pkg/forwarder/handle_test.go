package forwarder

import (
	"encoding/hex"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// unhex decodes s, spaces allowed.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// oddMessage is what is no proper query, and the answer, in hexadecimal. An
// empty want means no answer.
type oddMessage struct{ name, in, want string }

func oddMessages() []oddMessage {
	const (
		name  = "03777777 076578616d706c65 036f7267 00"
		q     = name + "0010 0001"
		inQ   = "0178 07636c7573746572 056c6f63616c 00 0010 0001"
		short = "1234 0120 0001 0000 0000 0000"
	)
	return []oddMessage{
		{"empty", "", ""},
		{"one octet", "12", ""},
		{"11 octets", "1234 0120 0001 0000 0000 00", ""},
		{"response", "1234 8120 0001 0000 0000 0000" + q, ""},
		{"response in zone", "1234 8120 0001 0000 0000 0000" + inQ, ""},

		{"IQUERY", "1234 0920 0001 0000 0000 0000" + q, "1234 8924 0000 0000 0000 0000"},
		{"STATUS", "1234 1100 0001 0000 0000 0000" + q, "1234 9104 0000 0000 0000 0000"},
		{"NOTIFY", "1234 2000 0001 0000 0000 0000" + inQ, "1234 a004 0000 0000 0000 0000"},
		{"UPDATE", "1234 2800 0001 0000 0000 0000" + inQ, "1234 a804 0000 0000 0000 0000"},
		{"DSO", "1234 3000 0000 0000 0000 0000", "1234 b004 0000 0000 0000 0000"},
		{"opcode 15", "1234 7800 0001 0000 0000 0000" + q, "1234 f804 0000 0000 0000 0000"},

		{"QDCOUNT 0", "1234 0120 0000 0000 0000 0000", "1234 8121 0000 0000 0000 0000"},
		{"QDCOUNT 2", "1234 0120 0002 0000 0000 0000" + q + q, "1234 8121 0000 0000 0000 0000"},
		{"ANCOUNT 2", "1234 0120 0001 0002 0000 0000" + inQ, "1234 8121 0000 0000 0000 0000"},
		{"NSCOUNT 2", "1234 0120 0001 0000 0002 0000" + q, "1234 8121 0000 0000 0000 0000"},
		{"ARCOUNT 3", "1234 0120 0001 0000 0000 0003" + q, "1234 8121 0000 0000 0000 0000"},
		{"ARCOUNT 65535", "1234 0120 0001 0000 0000 ffff" + q, "1234 8121 0000 0000 0000 0000"},

		{"no question", short, "1234 8121 0000 0000 0000 0000"},
		{"no root", short + "03777777", "1234 8121 0000 0000 0000 0000"},
		{"no type", short + name, "1234 8121 0000 0000 0000 0000"},
		{"no class", short + name + "0001", "1234 8121 0000 0000 0000 0000"},
		{"label type 01", short + "41" + q, "1234 8121 0000 0000 0000 0000"},
		{"label type 10", short + "81" + q, "1234 8121 0000 0000 0000 0000"},
		{"pointer to itself", short + "c00c 0001 0001", "1234 8121 0000 0000 0000 0000"},
		{"label and pointer", short + "0161c00c 0001 0001", "1234 8121 0000 0000 0000 0000"},
		{"pointer into the header", short + "c004 0001 0001", "1234 8121 0000 0000 0000 0000"},
		{"256 octets", short + strings.Repeat("0161", 121) + inQ[4:], "1234 8121 0000 0000 0000 0000"},

		{"ANCOUNT 1 without", "1234 0120 0001 0001 0000 0000" + q, "1234 8121 0001 0000 0000 0000" + q},
		{"broken OPT", "1234 0120 0001 0000 0000 0001" + q + "00 0029 1000 00000000 0005 0001", "1234 8121 0001 0000 0000 0000" + q},
		{"broken option", "1234 0120 0001 0000 0000 0001" + q + "00 0029 1000 00000000 0003 000100", "1234 8121 0001 0000 0000 0000" + q},
		{"option too long", "1234 0120 0001 0000 0000 0001" + q + "00 0029 1000 00000000 0004 00010001", "1234 8121 0001 0000 0000 0000" + q},
		{"OPT twice", "1234 0120 0001 0000 0000 0002" + q + strings.Repeat("00 0029 1000 00000000 0000", 2), "1234 8121 0001 0000 0000 0000" + q},
		{"OPT in answer", "1234 0120 0001 0001 0000 0000" + q + "00 0029 1000 00000000 0000", "1234 8121 0001 0000 0000 0000" + q},
		{"OPT with a name", "1234 0120 0001 0000 0000 0001" + q + "0161 00 0029 1000 00000000 0000", "1234 8121 0001 0000 0000 0000" + q},
	}
}

// TestOddMessages: where no answer is due, the next query's is the first.
func TestOddMessages(t *testing.T) {
	s := start(t, external(newPeer(t, answerTXT("asked"))))
	for _, tt := range oddMessages() {
		t.Run(tt.name, func(t *testing.T) {
			for _, network := range []string{"udp", "tcp"} {
				before := s.Stats().Malformed
				c := dial(t, s, network)
				c.send(unhex(t, tt.in))
				if tt.want == "" {
					wantText(t, c.askMsg(query("www.example.org.", false)), "asked")
				} else if got := hex.EncodeToString(c.receive()); got != strings.ReplaceAll(tt.want, " ", "") {
					t.Errorf("%s: answer\n%s, want\n%s", network, got, tt.want)
				}
				// The next query's answer may overtake the counting.
				eventually(t, "counted once", func() bool { return s.Stats().Malformed == before+1 })
			}
		})
	}
}

// TestOddMessagesLikeMiekg runs the same through the server of miekg/dns, which
// is CoreDNS' own. Where we differ on purpose, the reason is given.
func TestOddMessagesLikeMiekg(t *testing.T) {
	const lenient = "miekg/dns reads on; a message that is not what its header says is malformed"
	differs := map[string]string{
		"NOTIFY":                  "no secondary here",
		"no question":             lenient,
		"no type":                 lenient,
		"no class":                lenient,
		"pointer into the header": lenient,
		"ANCOUNT 1 without":       lenient,
		"OPT twice":               "RFC 6891 section 6.1.1",
		"OPT in answer":           "RFC 6891 section 6.1.1",
		"OPT with a name":         "RFC 6891 section 6.1.2",
	}
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	started, stopped := make(chan struct{}), make(chan struct{})
	server := &dns.Server{
		PacketConn:        conn,
		NotifyStartedFunc: func() { close(started) },
		Handler: dns.HandlerFunc(func(w dns.ResponseWriter, m *dns.Msg) {
			w.WriteMsg(new(dns.Msg).SetReply(m))
		}),
	}
	go func() { defer close(stopped); server.ActivateAndServe() }()
	<-started
	defer func() { server.Shutdown(); <-stopped }()

	probe := pack(t, query("www.example.org.", false))
	for _, tt := range oddMessages() {
		t.Run(tt.name, func(t *testing.T) {
			udp, err := net.Dial("udp", conn.LocalAddr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer udp.Close()
			udp.SetDeadline(time.Now().Add(patience))
			c := &client{t: t, conn: udp}
			c.send(unhex(t, tt.in))
			if tt.want == "" {
				c.send(probe)
			}
			want := strings.ReplaceAll(tt.want, " ", "")
			got := hex.EncodeToString(c.receive())
			if tt.want == "" && got[:4] == hex.EncodeToString(probe[:2]) {
				got = ""
			}
			if why := differs[tt.name]; (got == want) != (why == "") {
				t.Errorf("miekg/dns answers\n%s, we\n%s; on purpose: %q", got, want, why)
			}
		})
	}
}

// TestEveryPrefix cuts a query everywhere; only the whole is answered well.
func TestEveryPrefix(t *testing.T) {
	p := newPeer(t, answerTXT("asked"))
	s := start(t, external(p))
	m := query("www.example.org.", true)
	m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"}}
	raw := pack(t, m)
	for n := range raw {
		reply := s.handle(t.Context(), &clientQuery{raw: raw[:n], from: s.Addrs()[0]})
		switch {
		case n < headerLen && reply != nil:
			t.Errorf("%d octets are answered", n)
		case n >= headerLen && (messageID(reply) != m.Id || headerRcode(reply) != dns.RcodeFormatError):
			t.Errorf("%d octets: answer %x", n, reply)
		}
	}
	if p.udp.Load() != 0 {
		t.Error("a broken query was sent on")
	}
	wantText(t, unpack(t, s.handle(t.Context(), &clientQuery{raw: append(raw, "behind"...), from: s.Addrs()[0]})), "asked")
}

// TestClusterOddities: the zone's server judges what the question is followed
// by, and its class.
func TestClusterOddities(t *testing.T) {
	const q = "0178 07636c7573746572 056c6f63616c 00"
	for _, tt := range []struct{ name, in string }{
		{"broken OPT", "1234 0120 0001 0000 0000 0001" + q + "0001 0001 00 0029 1000 00000000 0005 0001"},
		{"records missing", "1234 0120 0001 0001 0000 0002" + q + "0001 0001"},
		{"class CH", "1234 0120 0001 0000 0000 0000" + q + "0010 0003"},
		{"class ANY", "1234 0120 0001 0000 0000 0000" + q + "0010 00ff"},
		{"AXFR", "1234 0120 0001 0000 0000 0000" + q + "00fc 0001"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := make(chan []byte, 2)
			p := newPeer(t, func(q *peerQuery) {
				got <- q.raw
				var question question
				if err := question.parse(q.raw); err != nil {
					t.Error(err)
				}
				q.reply(rejectReply(q.raw, &question, dns.RcodeFormatError))
			})
			s := start(t, cluster(p))
			for _, network := range []string{"udp", "tcp"} {
				raw := unhex(t, tt.in)
				reply := dial(t, s, network).ask(raw)
				if sent := <-got; string(sent[2:]) != string(raw[2:]) {
					t.Errorf("sent on\n%x, want\n%x", sent, raw)
				}
				if headerRcode(reply) != dns.RcodeFormatError || messageID(reply) != 0x1234 {
					t.Errorf("answer %x", reply)
				}
			}
		})
	}
}

func TestTransferRefused(t *testing.T) {
	p := newPeer(t, answerTXT("x"))
	s := start(t, external(p))
	for _, qtype := range []uint16{dns.TypeAXFR, dns.TypeIXFR} {
		m := query("example.org.", true)
		m.Question[0].Qtype = qtype
		r := dial(t, s, "tcp").askMsg(m)
		wantRcode(t, r, dns.RcodeRefused)
		if e := ede(t, r); e.InfoCode != dns.ExtendedErrorCodeNotSupported {
			t.Errorf("EDE %v", e)
		}
	}
	if p.tcp.Load() != 0 {
		t.Error("a transfer was sent on")
	}
}

func TestExternalClass(t *testing.T) {
	got := make(chan *dns.Msg, 1)
	p := newPeer(t, func(q *peerQuery) { got <- q.msg(); answerTXT("x")(q) })
	s := start(t, external(p))
	m := query("version.bind.", false)
	m.Question[0].Qclass = dns.ClassCHAOS
	dial(t, s, "udp").askMsg(m)
	if sent := <-got; sent.Question[0].Qclass != dns.ClassCHAOS {
		t.Errorf("sent on as %v", sent.Question)
	}
}
