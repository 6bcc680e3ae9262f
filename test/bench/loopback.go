package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const loopbackTitle = "TCP over loopback, which is no DNS"

// Loopback is what other programs of a host pay: the throughput of one TCP connection over lo.
type Loopback struct {
	Without, With float64 // octets a second, medians
	// Of each two blocks that follow each other, attached over detached.
	Ratios []float64
}

// loopback lets a connection on the host and one on another node take turns, in blocks: without the programs on the host,
// with them, and so on. The machine's other work changes a rate by much more than the programs, but both connections alike;
// so the host's is counted in the other's, and that ratio is compared between blocks.
func (b *bench) loopback(ctx context.Context) (*Loopback, error) {
	var streams [2]*stream
	for i, node := range []*lab.Node{b.lab.Host(), b.lab.Worker()} {
		s, err := newStream(node)
		if err != nil {
			return nil, err
		}
		defer s.close()
		streams[i] = s
	}
	attach := b.attachWith("--dns-endpoint", lab.CoreDNS0v4)
	result := &Loopback{}
	var rates, ratios [2][]float64
	for n := range b.options.Blocks {
		b.options.Progress(fmt.Sprintf("%s: block %d of %d", loopbackTitle, n+1, b.options.Blocks))
		attached := n % 2
		err := []preparation{nil, attach}[attached].with(ctx, func() error {
			rate, ratio, err := block(streams)
			rates[attached], ratios[attached] = append(rates[attached], rate), append(ratios[attached], ratio)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	result.Without, result.With = median(rates[0]), median(rates[1])
	result.Ratios = quotients(ratios[1], ratios[0])
	return result, nil
}

// block is the first stream's median rate, and the median of what it is of the other's, which goes before it every second time.
func block(streams [2]*stream) (rate, ratio float64, err error) {
	var rates, ratios []float64
	for n := range 40 {
		var now [2]float64
		for k := range now {
			i := (k + n) % 2
			if now[i], err = streams[i].transfer(); err != nil {
				return 0, 0, err
			}
		}
		rates, ratios = append(rates, now[0]), append(ratios, now[0]/now[1])
	}
	return median(rates), median(ratios), nil
}

// stream is a TCP connection over a node's lo. Each end has a CPU of its own: which of them share one is the scheduler's
// choice otherwise, and makes the larger difference.
type stream struct {
	from, to net.Conn
	orders   chan int // octets to send
	results  chan error
}

func newStream(node *lab.Node) (*stream, error) {
	s := &stream{orders: make(chan int), results: make(chan error, 2)}
	var listener net.Listener
	err := node.Do(func() (err error) {
		// A socket stays in the namespace that it was made in, so only these calls need be made there.
		if listener, err = net.Listen("tcp4", "127.0.0.1:0"); err != nil {
			return err
		}
		s.from, err = net.Dial("tcp4", listener.Addr().String())
		return err
	})
	if listener != nil {
		defer listener.Close()
	}
	if err != nil {
		return nil, err
	}
	if s.to, err = listener.Accept(); err != nil {
		_ = s.from.Close()
		return nil, err
	}
	received := make(chan int)
	go onCPU(1, func() {
		for n := range received {
			_, err := io.CopyN(io.Discard, onlyReader{s.to}, int64(n))
			s.results <- err
		}
	})
	go onCPU(0, func() {
		defer close(received)
		buffer := make([]byte, 64<<10)
		for n := range s.orders {
			received <- n
			var err error
			for ; n > 0 && err == nil; n -= len(buffer) {
				_, err = s.from.Write(buffer)
			}
			s.results <- err
		}
	})
	return s, nil
}

func (s *stream) close() {
	close(s.orders)
	_ = s.from.Close()
	_ = s.to.Close()
}

// transfer returns octets a second.
func (s *stream) transfer() (rate float64, err error) {
	const octets = 512 * 64 << 10 // some ten milliseconds
	began := time.Now()
	s.orders <- octets
	for range 2 { // sent, and received
		if err := <-s.results; err != nil {
			return 0, err
		}
	}
	return octets / time.Since(began).Seconds(), nil
}

// onCPU runs f on a thread that stays on one CPU, if there are so many, and ends with it.
func onCPU(cpu int, f func()) {
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(cpu)
	_ = unix.SchedSetaffinity(0, &set)
	f()
}

// onlyReader hides a connection's own ways to copy, so that the octets are really read.
type onlyReader struct{ io.Reader }
