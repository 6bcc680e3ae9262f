package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// noReply is how long no reply is waited for before there is none. All that answers here does so in a few milliseconds.
const noReply = 700 * time.Millisecond

var clusterDNS = netip.AddrPortFrom(netip.MustParseAddr(lab.KubeDNS4), 53)

// dataplane is the part of `status -o json` that tells of programs, endpoints and refusals.
type dataplane struct {
	report
	Datapath struct {
		Programs []struct {
			Name      string `json:"name"`
			Attach    string `json:"attach"`
			Interface string `json:"interface"`
			KernelID  int    `json:"kernel_id"`
		} `json:"programs"`
	} `json:"datapath"`
	Endpoints []struct {
		Address   string `json:"address"`
		Interface string `json:"interface"`
		Healthy   bool   `json:"healthy"`
		Note      string `json:"note"`
	} `json:"endpoints"`
	Refusals map[string]struct {
		Refused uint64 `json:"refused"`
	} `json:"counters"`
}

func (h *host) dataplane() dataplane {
	h.t.Helper()
	out := h.run("status", "-o", "json")
	var d dataplane
	// Twice, since the embedded report has a field for the same key.
	if err := errors.Join(json.Unmarshal([]byte(out.stdout), &d), json.Unmarshal([]byte(out.stdout), &d.report)); err != nil {
		h.t.Fatalf("%v: %v", out, err)
	}
	return d
}

// rose is by how much a reason's counter is over an earlier report's.
func (d dataplane) rose(since dataplane, scope, reason string) int {
	return int(d.Reasons[scope][reason]) - int(since.Reasons[scope][reason])
}

// programs on an interface, as "name hook".
func (d dataplane) programs(iface string) (list []string) {
	for _, p := range d.Datapath.Programs {
		if p.Interface == iface {
			list = append(list, p.Name+" "+p.Attach)
		}
	}
	slices.Sort(list)
	return list
}

func (d dataplane) endpoint(address string) (iface, note string, healthy bool) {
	for _, e := range d.Endpoints {
		if e.Address == address {
			return e.Interface, e.Note, e.Healthy
		}
	}
	return "", "not in status", false
}

// forwarded is how many queries the forwarder has seen since an earlier report.
func (d dataplane) forwarded(since dataplane) int {
	return int(d.Forwarder.Queries) - int(since.Forwarder.Queries)
}

// sh runs a script in a node; it must succeed.
func sh(t *testing.T, node *lab.Node, script string) string {
	t.Helper()
	return must(t, node, "sh", "-ec", script)
}

// cable connects two nodes with a veth pair.
func (h *host) cable(near *lab.Node, nearPort string, far *lab.Node, farPort string) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := h.Cable(ctx, near, nearPort, far, farPort); err != nil {
		h.t.Fatal(err)
	}
}

// bigSocket opens an unconnected UDP socket with room for tens of thousands of small datagrams.
func bigSocket(node *lab.Node, address string) (*net.UDPConn, error) {
	var conn *net.UDPConn
	err := node.Do(func() error {
		control := func(_, _ string, raw syscall.RawConn) error {
			var failed error
			err := raw.Control(func(fd uintptr) {
				failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 128<<20)
			})
			return errors.Join(err, failed)
		}
		packet, err := (&net.ListenConfig{Control: control}).ListenPacket(context.Background(), "udp", address)
		if err == nil {
			conn = packet.(*net.UDPConn)
		}
		return err
	})
	return conn, err
}

// askAs is ask from a given address of the node.
func askAs(from *lab.Node, local string, server netip.AddrPort, payload []byte, wait time.Duration) ([]byte, error) {
	conn, err := listenUDP(from, net.JoinHostPort(local, "0"))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if _, err := conn.WriteToUDPAddrPort(payload, server); err != nil {
		return nil, err
	}
	if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return nil, err
	}
	buf := make([]byte, 65535)
	n, source, err := conn.ReadFromUDPAddrPort(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if source = netip.AddrPortFrom(source.Addr().Unmap(), source.Port()); source != server {
		return nil, fmt.Errorf("the reply came from %s, and %s was asked", source, server)
	}
	return buf[:n], nil
}

// connectAs opens a TCP connection from a given address of the node and closes it.
func connectAs(from *lab.Node, local string, server netip.AddrPort, wait time.Duration) error {
	return from.Do(func() error {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}, Timeout: wait}
		conn, err := dialer.Dial("tcp", server.String())
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

// isAddress checks that a reply carries exactly one address.
func isAddress(raw []byte, want string) error {
	if raw == nil {
		return errors.New("no reply")
	}
	var m dns.Msg
	if err := m.Unpack(raw); err != nil {
		return err
	}
	if len(m.Answer) == 1 && m.Rcode == dns.RcodeSuccess {
		if a, ok := m.Answer[0].(*dns.A); ok && a.A.String() == want {
			return nil
		}
	}
	return fmt.Errorf("want %s, got %v", want, &m)
}

// seen is a query as a responder saw it.
type seen struct {
	from netip.AddrPort
	name string
	id   uint16
	size uint16 // of EDNS, 0 without
}

// responder is a DNS server for every name, of which tests know what it sees and decide when it answers. SOA queries,
// with which endpoints are probed, it answers at once unless it is mute.
type responder struct {
	address string // what it answers A queries with
	udp     *net.UDPConn

	mu   sync.Mutex
	log  []seen
	hold bool
	mute bool
	busy bool // does not answer probes
	held []func()
}

// respond starts a responder on UDP and TCP.
func respond(t *testing.T, node *lab.Node, listen, address string) *responder {
	t.Helper()
	r := &responder{address: address}
	var tcp net.Listener
	var err error
	if r.udp, err = bigSocket(node, listen); err == nil {
		err = node.Do(func() error { tcp, err = net.Listen("tcp", listen); return err })
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, server := range []*dns.Server{
		{PacketConn: r.udp, Handler: dns.HandlerFunc(r.serve)},
		{Listener: tcp, Handler: dns.HandlerFunc(r.serve)},
	} {
		started := make(chan struct{})
		server.NotifyStartedFunc = func() { close(started) }
		go func() { _ = server.ActivateAndServe() }()
		<-started
		t.Cleanup(func() { _ = server.Shutdown() })
	}
	return r
}

func (r *responder) serve(w dns.ResponseWriter, q *dns.Msg) {
	if len(q.Question) != 1 {
		return
	}
	reply := new(dns.Msg).SetReply(q)
	reply.Authoritative = true
	name := q.Question[0].Name
	size := uint16(0)
	if opt := q.IsEdns0(); opt != nil {
		size = opt.UDPSize()
		reply.SetEdns0(1232, false)
	}
	probe := q.Question[0].Qtype == dns.TypeSOA
	switch {
	case probe:
		reply.Answer = append(reply.Answer, &dns.SOA{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeSOA, Class: dns.ClassINET}, Ns: ".", Mbox: "."})
	case name == lab.Big:
		for i := range lab.BigCount {
			reply.Answer = append(reply.Answer, &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}, A: net.IPv4(172, 20, 2, byte(i+1))})
		}
	default:
		reply.Answer = append(reply.Answer, &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}, A: net.ParseIP(r.address)})
	}
	if w.LocalAddr().Network() == "udp" {
		reply.Truncate(max(512, int(size)))
	}
	send := func() { _ = w.WriteMsg(reply) }

	r.mu.Lock()
	defer r.mu.Unlock()
	if !probe {
		from, _ := netip.ParseAddrPort(w.RemoteAddr().String())
		r.log = append(r.log, seen{netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), name, q.Id, size})
	}
	switch {
	case r.mute, r.busy && probe:
	case r.hold && !probe:
		r.held = append(r.held, send)
	default:
		send()
	}
}

// sees is all that it has seen so far.
func (r *responder) sees() []seen {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.log)
}

func (r *responder) setHold(hold bool) {
	r.mu.Lock()
	held := r.held
	r.hold = hold
	if !hold {
		r.held = nil
	}
	r.mu.Unlock()
	if !hold {
		for _, send := range held {
			send()
		}
	}
}

func (r *responder) setMute(mute bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mute = mute
}

func (r *responder) setBusy(busy bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy = busy
}

// load asks for one name at a steady rate and knows which queries got no answer.
type load struct {
	conn           *net.UDPConn
	stop           chan struct{}
	sender, reader sync.WaitGroup

	mu      sync.Mutex
	sent    []time.Time
	replied map[uint16]time.Time
	failed  int // answers that are not the wanted one
}

// startLoad begins; the caller must call finish.
func startLoad(t *testing.T, node *lab.Node, server netip.AddrPort, name, want string, every time.Duration) *load {
	t.Helper()
	local := "0.0.0.0:0"
	if server.Addr().Is6() {
		local = "[::]:0"
	}
	conn, err := bigSocket(node, local)
	if err != nil {
		t.Fatal(err)
	}
	l := &load{conn: conn, stop: make(chan struct{}), replied: make(map[uint16]time.Time)}
	l.reader.Go(func() {
		buf := make([]byte, 4096)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				return
			}
			bad := isAddress(buf[:n], want) != nil
			l.mu.Lock()
			if bad {
				l.failed++
			} else {
				l.replied[uint16(buf[0])<<8|uint16(buf[1])] = time.Now()
			}
			l.mu.Unlock()
		}
	})
	payload := pack(t, 0, name, dns.TypeA)
	l.sender.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for id := uint16(0); id < 65535; id++ {
			payload[0], payload[1] = byte(id>>8), byte(id)
			l.mu.Lock()
			l.sent = append(l.sent, time.Now())
			l.mu.Unlock()
			_, _ = conn.WriteToUDPAddrPort(payload, server)
			select {
			case <-tick.C:
			case <-l.stop:
				return
			}
		}
	})
	return l
}

// answered is how many queries have got their answer.
func (l *load) answered() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.replied)
}

// more waits until n more queries have been answered.
func (l *load) more(t *testing.T, n int) {
	t.Helper()
	target := l.answered() + n
	eventually(t, fmt.Sprintf("%d more answers under load", n), func() error {
		if got := l.answered(); got < target {
			return fmt.Errorf("%d of %d", got, target)
		}
		return nil
	})
}

// finish stops asking, gives what is under way its time, and returns the times at which lost queries were sent.
func (l *load) finish() (sent int, lost []time.Time, failed int) {
	close(l.stop)
	l.sender.Wait()           // it may send one more
	const quiet = 4 * noReply // after the last answer
	last := 0
	for begin := time.Now(); time.Since(begin) < quiet; time.Sleep(5 * time.Millisecond) {
		l.mu.Lock()
		now, all := len(l.replied)+l.failed, len(l.sent)
		l.mu.Unlock()
		if now >= all {
			break
		}
		if now > last {
			last, begin = now, time.Now()
		}
	}
	_ = l.conn.Close()
	l.reader.Wait()
	for id, at := range l.sent {
		if _, ok := l.replied[uint16(id)]; !ok {
			lost = append(lost, at)
		}
	}
	return len(l.sent), lost, l.failed
}
