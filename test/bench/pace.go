package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// pace sends queries at a fixed rate, whether or not earlier ones have been answered, and measures each from when it was
// due. It never sleeps, since a wake-up would be the largest part of what it measures; so it takes one CPU, from everybody
// alike, and CPU times mean nothing here.
func (b *bench) pace(ctx context.Context, contest *Contest, one *Contestant) (Turn, error) {
	var queries [][]byte
	for _, q := range contest.Load.what(b, int(float64(b.options.Pace)*b.options.Time.Seconds())) {
		packed, err := new(dns.Msg).SetQuestion(q.name, q.qtype).SetEdns0(4096, false).Pack()
		if err != nil {
			return Turn{}, err
		}
		queries = append(queries, packed)
	}
	return b.measured(ctx, one, func() (turn Turn, err error) {
		err = contest.From.node(b.lab).Do(func() error {
			fd, err := dial(one.Targets[0], unix.SOCK_NONBLOCK)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			p := pacer{fd: fd, queries: queries, interval: time.Second / time.Duration(b.options.Pace), nxdomain: contest.Load.nxdomain}
			turn, err = p.run(int(b.options.Time / p.interval))
			return err
		})
		return turn, err
	})
}

// pacer is one socket.
type pacer struct {
	fd       int
	queries  [][]byte
	interval time.Duration
	nxdomain bool

	due   [1 << 16]time.Time // of the query with an ID that is not answered; zero if there is none
	reply [4096]byte
	times []time.Duration
	wrong int
}

// patience is how long the last replies are waited for.
const patience = time.Second

// run sends so many queries. One that is lost took as long as the patience: left out, the slowest would count as fast.
func (p *pacer) run(queries int) (Turn, error) {
	p.times = make([]time.Duration, 0, queries)
	began := time.Now()
	end := began.Add(time.Duration(queries)*p.interval + patience)
	for sent := 0; len(p.times) < queries; {
		now := time.Now()
		if sent == queries && now.After(end) {
			break
		}
		if due := began.Add(time.Duration(sent) * p.interval); sent < queries && !now.Before(due) {
			query := p.queries[sent%len(p.queries)]
			binary.BigEndian.PutUint16(query, uint16(sent))
			p.due[uint16(sent)] = due
			sent++
			// What does not fit into the socket's buffer is lost as on any full queue.
			if _, err := unix.Write(p.fd, query); err != nil && !errors.Is(err, unix.EAGAIN) {
				return Turn{}, fmt.Errorf("send a query: %w", err)
			}
		}
		if err := p.receive(); err != nil {
			return Turn{}, err
		}
	}
	turn := Turn{
		Rate: float64(len(p.times)) / time.Since(began).Seconds(), Completed: len(p.times), Lost: queries - len(p.times), Wrong: p.wrong,
	}
	for range turn.Lost {
		p.times = append(p.times, patience)
	}
	turn.P50, turn.P99, turn.P999 = percentile(p.times, 0.5), percentile(p.times, 0.99), percentile(p.times, 0.999)
	return turn, nil
}

// receive takes one reply if there is one.
func (p *pacer) receive() error {
	n, err := unix.Read(p.fd, p.reply[:])
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("wait for a reply: %w", err)
	}
	id := binary.BigEndian.Uint16(p.reply[:])
	if n < 12 || p.due[id].IsZero() {
		return nil // of an ID that has come round again meanwhile
	}
	p.times = append(p.times, time.Since(p.due[id]))
	p.due[id] = time.Time{}
	if rcode := p.reply[3] & 0x0f; rcode != dns.RcodeSuccess && (rcode != dns.RcodeNameError || !p.nxdomain) {
		p.wrong++
	}
	return nil
}

// dial makes a socket in the thread's network namespace that is connected to a server's port 53.
func dial(server string, flags int) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|flags, 0)
	if err != nil {
		return -1, err
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: 53, Addr: netip.MustParseAddr(server).As4()})
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 2})
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("connect a socket to %s: %w", server, err)
	}
	return fd, nil
}
