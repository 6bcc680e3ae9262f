package forwarder

import (
	"encoding/binary"
	"net"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// TestHostileServers: whatever an upstream server sends, the client gets an answer of the next one, or a failure, in time,
// and the server that lies costs no more than its turn.
func TestHostileServers(t *testing.T) {
	counts := func(section int, n uint16) func(*peerQuery) {
		return func(q *peerQuery) {
			raw := pack(t, new(dns.Msg).SetReply(q.msg()))
			binary.BigEndian.PutUint16(raw[4+2*section:], n)
			q.reply(raw)
		}
	}
	raw := func(make func(q *peerQuery) []byte) func(*peerQuery) {
		return func(q *peerQuery) { q.reply(make(q)) }
	}
	for _, tt := range []struct {
		name    string
		rcode   int // without another server
		handler func(*peerQuery)
	}{
		{"nothing in it", dns.RcodeServerFailure, raw(func(*peerQuery) []byte { return nil })},
		{"one octet", dns.RcodeServerFailure, raw(func(*peerQuery) []byte { return []byte{0} })},
		{"a header cut short", dns.RcodeServerFailure, raw(func(q *peerQuery) []byte { return q.raw[:11] })},
		{"zeros", dns.RcodeServerFailure, raw(func(*peerQuery) []byte { return make([]byte, 512) })},
		{"the query itself", dns.RcodeServerFailure, raw(func(q *peerQuery) []byte { return q.raw })},
		{"giant", dns.RcodeSuccess, raw(func(q *peerQuery) []byte {
			return append(pack(t, new(dns.Msg).SetReply(q.msg())), make([]byte, 60000)...)
		})},
		{"answers that are not there", dns.RcodeServerFailure, counts(1, 65535)},
		{"authorities that are not there", dns.RcodeServerFailure, counts(2, 65535)},
		{"additional records that are not there", dns.RcodeServerFailure, counts(3, 65535)},
		{"no question", dns.RcodeServerFailure, counts(0, 0)},
		{"65535 questions", dns.RcodeServerFailure, counts(0, 65535)},
		{"without end", dns.RcodeServerFailure, func(q *peerQuery) {
			for range 2000 {
				q.reply(make([]byte, 512))
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel() // it waits more than it works
			liar, honest := newPeer(t, tt.handler), newPeer(t, answerTXT("x"))
			for _, network := range []string{"udp", "tcp"} {
				r := external(liar)
				if tt.rcode != dns.RcodeSuccess {
					r.Timeout = 50 * time.Millisecond
				}
				s := start(t, r)
				m := dial(t, s, network).askMsg(query("www.example.org.", true))
				if len(m.Answer) != 0 || m.Rcode != tt.rcode {
					t.Errorf("%s: %v", network, m)
				}
				r = external(liar, honest)
				r.Timeout = 2 * time.Second
				s = start(t, r)
				m = dial(t, s, network).askMsg(query("www.example.org.", false))
				if tt.rcode != dns.RcodeSuccess {
					wantText(t, m, "x")
				}
				eventually(t, "nothing is left", func() bool { return s.Stats().InFlight == 0 })
			}
		})
	}
}

// TestEndlessTCP: a server that sends over TCP a message's length and then an octet now and then, for ever.
func TestEndlessTCP(t *testing.T) {
	drip := newPeer(t, func(q *peerQuery) {
		if !q.tcp {
			r := new(dns.Msg).SetReply(q.msg())
			r.Truncated = true
			q.replyMsg(r)
		}
	})
	ends := make(chan struct{})
	drip.ln.Close()
	ln, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(drip.addr))
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(ends)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				octets := []byte{0xff, 0xff}
				for {
					if _, err := conn.Write(octets); err != nil {
						return
					}
					octets = []byte{0}
					time.Sleep(time.Millisecond)
				}
			}()
		}
	}()
	t.Cleanup(func() { ln.Close(); <-ends })
	r := external(drip)
	r.Timeout = 200 * time.Millisecond
	s := start(t, r)
	m := dial(t, s, "udp").askMsg(query("www.example.org.", true))
	if !m.Truncated && m.Rcode != dns.RcodeServerFailure {
		t.Errorf("%v", m)
	}
	eventually(t, "nothing is left", func() bool { return s.Stats().InFlight == 0 })
}
