package forwarder

import (
	"bytes"
	"context"
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// FuzzHandle feeds any bytes as a query: the answer is none, or one to that ID
// that can be read to its end. The server asked repeats the question in
// another case and gives the rest of the query back as its answer, so replies
// are odd as well. Run it with -fuzzminimizetime 1x: what a concurrent server
// covers differs from run to run, and minimizing would take all the time.
func FuzzHandle(f *testing.F) {
	seeds := []*dns.Msg{
		query("www.example.org.", false),
		query("www.example.org.", true),
		query("x.cluster.local.", true),
		query(".", true),
		new(dns.Msg).SetAxfr("example.org."),
		new(dns.Msg).SetNotify("example.org."),
		new(dns.Msg).SetUpdate("example.org."),
	}
	seeds[1].IsEdns0().SetVersion(1)
	for _, m := range seeds {
		f.Add(pack(f, m), false)
	}
	f.Add([]byte{}, true)
	p := newPeer(f, func(q *peerQuery) {
		reply := bytes.Clone(q.raw)
		for i, b := range reply[headerLen:] {
			if 'a' <= b && b <= 'z' {
				reply[headerLen+i] = b - 'a' + 'A'
			}
		}
		setFlags(reply, flags(reply)|flagQR)
		q.reply(reply)
	})
	r := external(p)
	r.Zones["cluster.local"] = r.Upstreams
	r.Timeout = 100 * time.Millisecond
	s := start(f, r)
	from := netip.MustParseAddrPort("192.0.2.1:53")
	f.Fuzz(func(t *testing.T, raw []byte, tcp bool) {
		if len(raw) > maxMessage {
			return
		}
		before := bytes.Clone(raw)
		reply := s.handle(context.Background(), &clientQuery{raw: raw, from: from, tcp: tcp})
		if !bytes.Equal(raw, before) {
			t.Error("the query was changed")
		}
		if reply == nil {
			return
		}
		if len(reply) < headerLen || messageID(reply) != messageID(raw) || flags(reply)&flagQR == 0 {
			t.Fatalf("answer %x to %x", reply, raw)
		}
		if !tcp && len(reply) > maxUDPSize {
			t.Fatalf("answer of %d octets", len(reply))
		}
		if count(reply, sectionQuestion) == 0 {
			return
		}
		var q question
		if err := q.parse(reply); err != nil || !bytes.Equal(reply[headerLen:q.end], raw[headerLen:q.end]) {
			t.Fatalf("answer %x to %x does not repeat the question", reply, raw)
		}
		if _, err := scanRecords(reply, q.end); err != nil {
			t.Fatalf("answer %x to %x: %v", reply, raw, err)
		}
	})
}

// FuzzTCPFraming feeds any bytes as what a client sends: each message is what its prefix says, in order, and reading
// takes no more steps than there are prefixes, and no more memory than was sent but for the message that was cut.
func FuzzTCPFraming(f *testing.F) {
	whole := frame(pack(f, query("www.example.org.", true)))
	f.Add(whole)
	f.Add(append(bytes.Clone(whole), whole[:9]...))
	f.Add(make([]byte, 1000))                   // empty messages
	f.Add(append([]byte{0xff, 0xff}, whole...)) // a long one that is cut
	f.Add(frame(make([]byte, bufferSize+1)))    // the first that is no longer one of a buffer
	f.Add(append(frame(nil), frame(whole)...))
	s, err := New(Options{})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { shutdown(f, s) })
	f.Fuzz(func(t *testing.T, stream []byte) {
		c := &clientConn{s: s, from: netip.MustParseAddrPort("192.0.2.1:53")}
		r := bytes.NewReader(stream)
		rest := stream
		steps := 0
		for ; ; steps++ {
			msg, done, err := c.read(r)
			if err != nil {
				break
			}
			if n := int(binary.BigEndian.Uint16(rest)); len(msg) != n || !bytes.Equal(msg, rest[2:2+n]) {
				t.Fatalf("message %x of %x", msg, rest)
			}
			if held := s.octets.inUse(); len(msg) > bufferSize && held != len(msg) || len(msg) <= bufferSize && held != 0 {
				t.Fatalf("%d octets counted for a message of %d", held, len(msg))
			}
			rest = rest[2+len(msg):]
			done()
		}
		if steps > len(stream)/2 {
			t.Fatalf("%d messages in %d octets", steps, len(stream))
		}
		if len(rest) >= 2 && len(rest) >= 2+int(binary.BigEndian.Uint16(rest)) {
			t.Fatalf("stopped before the message %x", rest)
		}
		if held := s.octets.inUse(); held != 0 {
			t.Fatalf("%d octets still counted", held)
		}
	})
}

// FuzzClientReply feeds any bytes as a server's records.
func FuzzClientReply(f *testing.F) {
	m := new(dns.Msg).SetReply(query("www.example.org.", true))
	m.Answer = []dns.RR{txt("www.example.org.", "x")}
	m.SetEdns0(4096, true)
	raw := pack(f, m)
	f.Add(raw[headerLen+21:], uint16(1), uint16(0), uint16(1), true)
	f.Add([]byte("\x00\x00\x29\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00"), uint16(0), uint16(0), uint16(2), false)
	f.Add([]byte("\x00\x00)000000\x00\x00\x00\x00!000000\x00\x00"), uint16(0), uint16(0), uint16(2), false)
	f.Fuzz(func(t *testing.T, rest []byte, an, ns, ar uint16, edns bool) {
		c := &clientQuery{raw: pack(t, query("www.example.org.", edns))}
		if err := c.question.parse(c.raw); err != nil {
			t.Fatal(err)
		}
		c.recs, _ = scanRecords(c.raw, c.question.end)
		msg := append(bytes.Clone(c.raw[:c.question.end]), rest...)
		setFlags(msg, flagQR)
		setCount(msg, sectionAnswer, int(an))
		setCount(msg, sectionAuthority, int(ns))
		setCount(msg, sectionAdditional, int(ar))
		res, err := newOutgoing(c, 0).read(msg)
		if err != nil {
			return
		}
		reply, err := clientReply(c, res)
		if err != nil {
			return
		}
		recs, err := scanRecords(reply, c.question.end)
		if err != nil || recs.end != len(reply) || len(reply) > c.sizeLimit() || recs.hasOPT != edns {
			t.Fatalf("reply %x of %d octets, OPT %v, %v", reply, len(reply), recs.hasOPT, err)
		}
	})
}
