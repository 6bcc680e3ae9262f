package forwarder

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"
)

// patience is how long a test waits for what has to come. It is no bar for speed.
const patience = 20 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// peer is a DNS server under the test's control, with UDP and TCP on one port.
type peer struct {
	addr     netip.AddrPort
	udp, tcp atomic.Int64 // messages received

	handler func(*peerQuery)
	conn    *net.UDPConn
	ln      *net.TCPListener
	wg      sync.WaitGroup
}

// peerQuery is a query that a peer got; reply may be called any number of times.
type peerQuery struct {
	raw   []byte
	tcp   bool
	from  netip.AddrPort
	reply func(raw []byte)
}

func (q *peerQuery) msg() *dns.Msg {
	m := new(dns.Msg)
	if err := m.Unpack(q.raw); err != nil {
		panic(err)
	}
	return m
}

func (q *peerQuery) replyMsg(m *dns.Msg) {
	raw, err := m.Pack()
	if err != nil {
		panic(err)
	}
	q.reply(raw)
}

func newPeer(t testing.TB, handler func(*peerQuery)) *peer {
	t.Helper()
	p := &peer{handler: handler}
	for {
		var err error
		if p.conn, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
			t.Fatal(err)
		}
		p.addr = p.conn.LocalAddr().(*net.UDPAddr).AddrPort()
		if p.ln, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(p.addr)); err == nil {
			break
		}
		p.conn.Close()
	}
	p.wg.Go(p.serveUDP)
	p.wg.Go(p.serveTCP)
	t.Cleanup(p.close)
	return p
}

func (p *peer) close() {
	p.conn.Close()
	p.ln.Close()
	p.wg.Wait()
}

func (p *peer) serveUDP() {
	buf := make([]byte, maxMessage)
	for {
		n, from, err := p.conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		p.udp.Add(1)
		q := &peerQuery{raw: append([]byte(nil), buf[:n]...), from: from}
		q.reply = func(raw []byte) { p.conn.WriteToUDPAddrPort(raw, from) }
		p.wg.Go(func() { p.handler(q) })
	}
}

func (p *peer) serveTCP() {
	for {
		conn, err := p.ln.AcceptTCP()
		if err != nil {
			return
		}
		p.wg.Go(func() {
			defer conn.Close()
			for {
				raw, err := readFrame(conn)
				if err != nil {
					return
				}
				p.tcp.Add(1)
				p.handler(&peerQuery{raw: raw, tcp: true, reply: func(raw []byte) { conn.Write(frame(raw)) }})
			}
		})
	}
}

func frame(raw []byte) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(raw))), raw...)
}

func readFrame(r io.Reader) ([]byte, error) {
	var n [2]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return nil, err
	}
	raw := make([]byte, binary.BigEndian.Uint16(n[:]))
	_, err := io.ReadFull(r, raw)
	return raw, err
}

// answerTXT answers every query with one TXT record, which tells peers apart.
func answerTXT(text string) func(*peerQuery) {
	return func(q *peerQuery) {
		m := q.msg()
		r := new(dns.Msg).SetReply(m)
		r.RecursionAvailable = true
		if len(m.Question) == 1 {
			r.Answer = append(r.Answer, txt(m.Question[0].Name, text))
		}
		if opt := m.IsEdns0(); opt != nil {
			r.SetEdns0(opt.UDPSize(), opt.Do())
		}
		q.replyMsg(r)
	}
}

func txt(name, text string) dns.RR {
	return &dns.TXT{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: 60}, Txt: []string{text}}
}

func answerRcode(rcode int) func(*peerQuery) {
	return func(q *peerQuery) {
		r := new(dns.Msg).SetRcode(q.msg(), rcode)
		if rcode > 0xF {
			r.SetEdns0(maxUDPSize, false)
		}
		q.replyMsg(r)
	}
}

func silent(*peerQuery) {}

// freeAddr returns an address that nobody listens on.
func freeAddr(t testing.TB) netip.AddrPort {
	p := newPeer(t, silent)
	p.close()
	return p.addr
}

// deadAddr is freeAddr for who waits to hear that nobody listens.
func deadAddr(t testing.TB) netip.AddrPort {
	if runtime.GOOS == "windows" {
		t.Skip("package net has Windows not report a closed UDP port")
	}
	return freeAddr(t)
}

// needsLoopback skips a test of more than one loopback address where there is none: Wine takes datagrams at 127.0.0.1 alone.
func needsLoopback(t testing.TB) {
	t.Helper()
	if runtime.GOOS == "windows" && os.Getenv("WINEPREFIX") != "" {
		t.Skip("Wine delivers no datagram to 127.0.0.2")
	}
}

// start returns a listening server with the given routes. Its times are out of
// reach if the routes name none, so that a busy machine does not change what
// happens.
func start(t testing.TB, r Routes, change ...func(*Options)) *Server {
	t.Helper()
	return startTuned(t, r, func(*Server) {}, change...)
}

// startTuned does so after tune has changed what is no option. It may change the pace.
func startTuned(t testing.TB, r Routes, tune func(*Server), change ...func(*Options)) *Server {
	t.Helper()
	opts := Options{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}}
	for _, c := range change {
		c(&opts)
	}
	s, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	setDefault(&r.Timeout, 24*time.Hour)
	if err := s.SetRoutes(r); err != nil {
		t.Fatal(err)
	}
	tune(s)
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shutdown(t, s) })
	return s
}

func external(peers ...*peer) Routes {
	r := Routes{Zones: map[string][]netip.AddrPort{"cluster.local": nil}}
	for _, p := range peers {
		r.Upstreams = append(r.Upstreams, p.addr)
	}
	return r
}

func cluster(peers ...*peer) Routes {
	r := Routes{Zones: map[string][]netip.AddrPort{}}
	for _, p := range peers {
		r.Zones["cluster.local"] = append(r.Zones["cluster.local"], p.addr)
	}
	return r
}

// client is a connected UDP socket or a TCP connection to a server.
type client struct {
	t    testing.TB
	conn net.Conn
	tcp  bool
}

func dial(t testing.TB, s *Server, network string) *client {
	t.Helper()
	return dialFrom(t, s, network, "127.0.0.1")
}

// dialFrom does so from an address of 127.0.0.0/8.
func dialFrom(t testing.TB, s *Server, network, from string) *client {
	t.Helper()
	var local net.Addr = &net.UDPAddr{IP: net.ParseIP(from)}
	if network == "tcp" {
		local = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	conn, err := (&net.Dialer{LocalAddr: local}).Dial(network, s.Addrs()[0].String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(patience))
	return &client{t: t, conn: conn, tcp: network == "tcp"}
}

func (c *client) send(raw []byte) {
	c.t.Helper()
	if c.tcp {
		raw = frame(raw)
	}
	if _, err := c.conn.Write(raw); err != nil {
		c.t.Fatal(err)
	}
}

func (c *client) receive() []byte {
	c.t.Helper()
	if c.tcp {
		raw, err := readFrame(c.conn)
		if err != nil {
			c.t.Fatal("no answer:", err)
		}
		return raw
	}
	buf := make([]byte, bufferSize)
	n, err := c.conn.Read(buf)
	if err != nil {
		c.t.Fatal("no answer:", err)
	}
	return buf[:n]
}

func (c *client) ask(raw []byte) []byte {
	c.t.Helper()
	c.send(raw)
	return c.receive()
}

func (c *client) askMsg(m *dns.Msg) *dns.Msg {
	c.t.Helper()
	r := unpack(c.t, c.ask(pack(c.t, m)))
	if r.Id != m.Id || !r.Response {
		c.t.Fatalf("ID %d, QR %v, want ID %d and a response", r.Id, r.Response, m.Id)
	}
	return r
}

// ask asks for a TXT record by UDP.
func ask(t testing.TB, s *Server, name string) *dns.Msg {
	t.Helper()
	return dial(t, s, "udp").askMsg(query(name, false))
}

// query returns a query for TXT, with OPT or without.
func query(name string, edns bool) *dns.Msg {
	m := new(dns.Msg).SetQuestion(name, dns.TypeTXT)
	if edns {
		m.SetEdns0(maxUDPSize, false)
	}
	return m
}

func pack(t testing.TB, m *dns.Msg) []byte {
	t.Helper()
	raw, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func unpack(t testing.TB, raw []byte) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	if err := m.Unpack(raw); err != nil {
		t.Fatalf("answer %x: %v", raw, err)
	}
	return m
}

// text returns the first TXT string of the answer, or "".
func text(m *dns.Msg) string {
	if len(m.Answer) == 0 {
		return ""
	}
	return m.Answer[0].(*dns.TXT).Txt[0]
}

// ede returns the extended error of m, or fails.
func ede(t testing.TB, m *dns.Msg) *dns.EDNS0_EDE {
	t.Helper()
	if opt := m.IsEdns0(); opt != nil {
		for _, o := range opt.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				return e
			}
		}
	}
	t.Fatalf("no extended error in\n%v", m)
	return nil
}

func wantRcode(t testing.TB, m *dns.Msg, rcode int) {
	t.Helper()
	if m.Rcode != rcode {
		t.Fatalf("rcode %s, want %s", dns.RcodeToString[m.Rcode], dns.RcodeToString[rcode])
	}
}

func wantText(t testing.TB, m *dns.Msg, want string) {
	t.Helper()
	if got := text(m); got != want {
		t.Fatalf("answer %q, want %q; message:\n%v", got, want, m)
	}
}

func shutdown(t testing.TB, s *Server) {
	t.Helper()
	ctx, cancel := contextWithPatience()
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}

// wantClosed checks that the server closes the connection.
func (c *client) wantClosed() {
	c.t.Helper()
	_, err := c.conn.Read(make([]byte, 1))
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatalf("connection not closed: %v", err)
	}
}

// eventually polls a condition that the test can't be told about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never came true:", what)
		}
	}
}

func contextWithPatience() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}
