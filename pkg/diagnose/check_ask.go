package diagnose

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/errno"
)

// Dialer opens connections from this host; net.Dialer is one.
type Dialer interface {
	DialContext(ctx context.Context, network, address string) (net.Conn, error)
}

// question is a query for one type, as it was sent.
type question struct {
	message *dns.Msg
	local   netip.AddrPort
	reply   *dns.Msg
	took    time.Duration
	err     error
}

func newQuestion(name string, qtype uint16) *dns.Msg {
	message := new(dns.Msg)
	message.SetQuestion(name, qtype)
	message.SetEdns0(1232, false) // as DNS flag day 2020 has it; with it a server may say why it fails
	return message
}

// ask asks one server for both kinds of addresses of a name, in the way of a resolver: at the same time, and by TCP
// what was cut off.
func (c *Checker) ask(ctx context.Context, network string, server netip.AddrPort, name string) (Reply, []*question) {
	questions := []*question{{message: newQuestion(name, dns.TypeA)}, {message: newQuestion(name, dns.TypeAAAA)}}
	var group sync.WaitGroup
	for _, q := range questions {
		group.Go(func() {
			c.exchange(ctx, network, server, q)
			if q.err == nil && q.reply.Truncated && network == "udp" {
				c.exchange(ctx, "tcp", server, q)
			}
		})
	}
	group.Wait()
	reply := Reply{Server: server, Tries: 1}
	for _, q := range questions {
		reply.Took = max(reply.Took, q.took)
	}
	answered := slices.DeleteFunc(slices.Clone(questions), func(q *question) bool { return q.err != nil })
	if len(answered) == 0 {
		reply.Failure = classify(questions[0].err)
		return reply, questions
	}
	for _, q := range answered {
		reply.add(q.reply)
	}
	return reply, questions
}

func (c *Checker) exchange(ctx context.Context, network string, server netip.AddrPort, q *question) {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()
	begin := time.Now()
	defer func() { q.took = time.Since(begin) }()
	conn, err := c.Dialer.DialContext(ctx, network, server.String())
	if err != nil {
		q.err = err
		return
	}
	defer conn.Close()
	q.local = addrPort(conn.LocalAddr())
	client := dns.Client{Net: network, Timeout: c.Patience}
	q.reply, _, q.err = client.ExchangeWithConnContext(ctx, q.message, &dns.Conn{Conn: conn})
}

func addrPort(address net.Addr) netip.AddrPort {
	parsed, _ := netip.ParseAddrPort(address.String()) // a zero value matches no flow
	return netip.AddrPortFrom(parsed.Addr().Unmap(), parsed.Port())
}

// add takes one server's answer for one type in.
func (r *Reply) add(message *dns.Msg) {
	r.Rcode = max(r.Rcode, message.Rcode)
	for _, record := range message.Answer {
		ttl := time.Duration(record.Header().Ttl) * time.Second
		if len(r.Addresses)+len(r.Aliases) == 0 || ttl < r.TTL {
			r.TTL = ttl
		}
		switch record := record.(type) {
		case *dns.A:
			r.addAddress(record.A)
		case *dns.AAAA:
			r.addAddress(record.AAAA)
		case *dns.CNAME:
			if !slices.Contains(r.Aliases, record.Target) {
				r.Aliases = append(r.Aliases, record.Target)
			}
		}
	}
	if opt := message.IsEdns0(); opt != nil {
		for _, option := range opt.Option {
			if ede, ok := option.(*dns.EDNS0_EDE); ok {
				r.Extended = cmp.Or(ede.ExtraText, dns.ExtendedErrorCodeToString[ede.InfoCode])
			}
		}
	}
}

func (r *Reply) addAddress(ip net.IP) {
	if address, ok := netip.AddrFromSlice(ip); ok && !slices.Contains(r.Addresses, address.Unmap()) {
		r.Addresses = append(r.Addresses, address.Unmap())
	}
}

// connect says why a TCP connection fails, nil if it does not.
func (c *Checker) connect(ctx context.Context, to netip.AddrPort) (time.Duration, *Failure) {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()
	begin := time.Now()
	conn, err := c.Dialer.DialContext(ctx, "tcp", to.String())
	took := time.Since(begin)
	if err != nil {
		return took, classify(err)
	}
	_ = conn.Close()
	return took, nil
}

// classify tells failures apart by what the kernel knows about them.
func classify(err error) *Failure {
	if number, ok := errno.Of(err); ok {
		switch number {
		case syscall.ECONNREFUSED:
			return &Failure{Refused, "connection refused"}
		case syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EACCES, syscall.EINVAL, syscall.EADDRNOTAVAIL:
			// The last three are what routes of type prohibit and blackhole, and a host without the family, make of it.
			return &Failure{Unreachable, number.Error()}
		case syscall.ETIMEDOUT:
			return &Failure{Silent, "no reply"}
		}
		return &Failure{Broken, number.Error()}
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() || errors.Is(err, context.DeadlineExceeded) {
		return &Failure{Silent, "no reply"}
	}
	return &Failure{Broken, err.Error()}
}
