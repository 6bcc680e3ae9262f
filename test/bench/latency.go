package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const latencyTitle = "latency of cluster names, one query at a time"

// Latency compares asking the endpoint directly with being steered to it, with one query in flight.
type Latency struct {
	Direct, Steered Percentiles
	// Medians over the batches of steered minus direct: neighbours in time, so that the machine's other work cancels out.
	DifferenceP50, DifferenceP99 time.Duration
}

// Percentiles over all queries of all batches.
type Percentiles struct {
	Queries       int
	P50, P90, P99 time.Duration
}

// latency asks in batches: direct, steered, steered, direct, and so on. Attached throughout: the direct queries' replies
// pass dns_from_backend, which finds no flow of its own for them.
func (b *bench) latency(ctx context.Context) (result *Latency, err error) {
	detach, err := b.attachWith("--dns-endpoint", lab.CoreDNS0v4)(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if detachErr := detach(); err == nil {
			err = detachErr
		}
	}()
	var times [2][]time.Duration
	var differences [2][]time.Duration
	err = b.lab.Host().Do(func() error {
		var clients [2]*client
		for i, server := range []string{lab.CoreDNS0v4, "127.0.0.1"} {
			c, err := newClient(server)
			if err != nil {
				return err
			}
			defer c.close()
			// What only the first queries pay: neighbour entries, flow table pages, the server's sleep.
			if _, err := c.batch(20); err != nil {
				return err
			}
			clients[i] = c
		}
		for n := range b.options.LatencyBatches {
			if err := ctx.Err(); err != nil {
				return err
			}
			var batch [2][]time.Duration
			for k := range clients {
				i := (k + n) % 2
				if batch[i], err = clients[i].batch(b.options.LatencyQueries); err != nil {
					return err
				}
				times[i] = append(times[i], batch[i]...)
			}
			for k, p := range []float64{0.5, 0.99} {
				differences[k] = append(differences[k], percentile(batch[1], p)-percentile(batch[0], p))
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &Latency{
		Direct: percentiles(times[0]), Steered: percentiles(times[1]),
		DifferenceP50: percentile(differences[0], 0.5), DifferenceP99: percentile(differences[1], 0.5),
	}, nil
}

// client has one query in flight. Its socket blocks the thread: Go's poller would add its own latency to each query.
type client struct {
	fd    int
	query []byte
	reply [4096]byte
}

func newClient(server string) (*client, error) {
	m := new(dns.Msg).SetQuestion(lab.Backend, dns.TypeA).SetEdns0(1232, false)
	query, err := m.Pack()
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	c := &client{fd: fd, query: query}
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: 53, Addr: netip.MustParseAddr(server).As4()})
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 2})
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("connect a socket to %s: %w", server, err)
	}
	return c, nil
}

func (c *client) close() { _ = unix.Close(c.fd) }

func (c *client) batch(queries int) ([]time.Duration, error) {
	times := make([]time.Duration, 0, queries)
	for range queries {
		id := binary.BigEndian.Uint16(c.query) + 1
		binary.BigEndian.PutUint16(c.query, id)
		start := time.Now()
		if _, err := unix.Write(c.fd, c.query); err != nil {
			return nil, fmt.Errorf("send a query: %w", err)
		}
		n, err := unix.Read(c.fd, c.reply[:])
		for err == unix.EINTR {
			n, err = unix.Read(c.fd, c.reply[:])
		}
		if err != nil {
			return nil, fmt.Errorf("wait for a reply: %w", err)
		}
		times = append(times, time.Since(start))
		// Flags: a reply without error; one question, one answer.
		r := c.reply[:n]
		if n < 12 || binary.BigEndian.Uint16(r) != id || r[2]&0x80 == 0 || r[3]&0x0f != 0 || binary.BigEndian.Uint16(r[6:]) != 1 {
			return nil, fmt.Errorf("wrong reply to query %d: % x", id, r)
		}
	}
	return times, nil
}

func percentiles(times []time.Duration) Percentiles {
	return Percentiles{
		Queries: len(times), P50: percentile(times, 0.5), P90: percentile(times, 0.9), P99: percentile(times, 0.99),
	}
}

// percentile is the smallest time that at least the given part of all is not above.
func percentile(times []time.Duration, part float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	return sorted[min(len(sorted)-1, int(part*float64(len(sorted))))]
}
