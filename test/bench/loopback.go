package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const loopbackTitle = "TCP over loopback, which is no DNS"

// Loopback is what other programs of a host pay: the throughput of one TCP connection over lo.
type Loopback struct {
	Without, With float64 // bytes per second, medians
	Ratio         float64 // median over the pairs of with over without: neighbours in time
}

// loopback measures in pairs, without and with the programs attached, and the other way round in every second pair.
func (b *bench) loopback(ctx context.Context) (*Loopback, error) {
	// An attach costs more than a turn here is long, so the pairs are many and the turns short.
	pairs := 2 * b.options.Rounds
	var rates [2][]float64
	var ratios []float64
	for pair := range pairs {
		b.options.Progress(fmt.Sprintf("%s: %d of %d", loopbackTitle, pair+1, pairs))
		var now [2]float64
		for k := range now {
			attached := (k + pair) % 2
			rate, err := b.loopbackTurn(ctx, attached == 1)
			if err != nil {
				return nil, err
			}
			now[attached] = rate
			rates[attached] = append(rates[attached], rate)
		}
		ratios = append(ratios, now[1]/now[0])
	}
	return &Loopback{Without: middle(rates[0]), With: middle(rates[1]), Ratio: middle(ratios)}, nil
}

func middle(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

func (b *bench) loopbackTurn(ctx context.Context, attached bool) (rate float64, err error) {
	if attached {
		detach, err := b.attachWith("--dns-endpoint", lab.CoreDNS0v4)(ctx)
		if err != nil {
			return 0, err
		}
		defer func() {
			if detachErr := detach(); err == nil {
				err = detachErr
			}
		}()
	}
	var listener net.Listener
	var conn net.Conn
	err = b.lab.Host().Do(func() (err error) {
		// A socket stays in the namespace that it was made in, so only these calls need be made there.
		if listener, err = net.Listen("tcp4", "127.0.0.1:0"); err != nil {
			return err
		}
		conn, err = net.Dial("tcp4", listener.Addr().String())
		return err
	})
	if listener != nil {
		defer listener.Close()
	}
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	peer, err := listener.Accept()
	if err != nil {
		return 0, err
	}
	defer peer.Close()
	received := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(io.Discard, onlyReader{peer})
		received <- n
	}()
	buffer := make([]byte, 64<<10)
	began := time.Now()
	for time.Since(began) < b.options.Time {
		if _, err := conn.Write(buffer); err != nil {
			return 0, err
		}
	}
	if err := conn.Close(); err != nil {
		return 0, err
	}
	n := <-received
	return float64(n) / time.Since(began).Seconds(), nil
}

// onlyReader hides a connection's own ways to copy, so that the octets are really read.
type onlyReader struct{ io.Reader }
