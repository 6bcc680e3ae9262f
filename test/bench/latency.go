package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const latencyTitle = "latency of cluster names, one query at a time"

// Latency compares asking endpoints directly with being steered to them, with one query in flight.
type Latency struct {
	Endpoints       int
	Direct, Steered Percentiles
	// Medians over the batches of steered minus direct: neighbours in time, so that the machine's other work cancels out.
	DifferenceP50, DifferenceP99 time.Duration
}

// Percentiles over all queries of all batches.
type Percentiles struct {
	Queries       int
	P50, P90, P99 time.Duration
}

func (b *bench) latencies(ctx context.Context) ([]*Latency, error) {
	var all []*Latency
	for _, endpoints := range [][]string{{lab.CoreDNS0v4}, {lab.CoreDNS0v4, lab.CoreDNS1v4}} {
		b.options.Progress(fmt.Sprintf("%s: endpoints: %d", latencyTitle, len(endpoints)))
		settings := []string{noCache}
		for _, endpoint := range endpoints {
			settings = append(settings, "--dns-endpoint", endpoint)
		}
		// Attached throughout: the direct queries' replies pass dns_from_backend, which finds no flow of its own for them.
		err := b.attachWith(settings...).with(ctx, func() error {
			one, err := b.latency(ctx, endpoints)
			all = append(all, one)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// latency asks in batches: direct, steered, steered, direct, and so on.
func (b *bench) latency(ctx context.Context, endpoints []string) (*Latency, error) {
	var times [2][]time.Duration
	var differences [2][]float64
	ours := make([]string, len(endpoints))
	for i := range ours {
		ours[i] = fromHost.ours
	}
	err := b.lab.Host().Do(func() error {
		var clients [2]*client
		for i, servers := range [][]string{endpoints, ours} {
			c, err := newClient(servers)
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
				var err error
				if batch[i], err = clients[i].batch(b.options.LatencyQueries); err != nil {
					return err
				}
				times[i] = append(times[i], batch[i]...)
			}
			for k, p := range []float64{0.5, 0.99} {
				differences[k] = append(differences[k], float64(percentile(batch[1], p)-percentile(batch[0], p)))
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &Latency{
		Endpoints: len(endpoints), Direct: percentiles(times[0]), Steered: percentiles(times[1]),
		DifferenceP50: time.Duration(median(differences[0])), DifferenceP99: time.Duration(median(differences[1])),
	}, nil
}

// client has one query in flight, from each of its sockets in turn. They block the thread: Go's poller would add its own
// latency to each query.
type client struct {
	fds   []int
	query []byte
	reply [4096]byte
}

func newClient(servers []string) (*client, error) {
	query, err := new(dns.Msg).SetQuestion(lab.Backend, dns.TypeA).SetEdns0(1232, false).Pack()
	if err != nil {
		return nil, err
	}
	c := &client{query: query}
	for _, server := range servers {
		fd, err := dial(server, 0)
		if err != nil {
			c.close()
			return nil, err
		}
		c.fds = append(c.fds, fd)
	}
	return c, nil
}

func (c *client) close() {
	for _, fd := range c.fds {
		_ = unix.Close(fd)
	}
}

func (c *client) batch(queries int) ([]time.Duration, error) {
	times := make([]time.Duration, 0, queries)
	for i := range queries {
		fd := c.fds[i%len(c.fds)]
		id := binary.BigEndian.Uint16(c.query) + 1
		binary.BigEndian.PutUint16(c.query, id)
		start := time.Now()
		if _, err := unix.Write(fd, c.query); err != nil {
			return nil, fmt.Errorf("send a query: %w", err)
		}
		n, err := unix.Read(fd, c.reply[:])
		for errors.Is(err, unix.EINTR) {
			n, err = unix.Read(fd, c.reply[:])
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
