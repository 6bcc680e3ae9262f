// Command goloop looks names up at a steady rate, in one process, until its standard input ends: a program that runs for
// long, and sees the resolver configuration change. It prints a line for each lookup that fails or has an answer other
// than those given, and one at the end: how many lookups, how many of them failed, the longest in microseconds.
//
//	goloop go|go-tcp|udp|tcp RATE NAME=ADDRESS[,ADDRESS]...
//
// go and go-tcp are Go's own resolver, which looks at /etc/resolv.conf every five seconds; udp and tcp ask the first
// server of it, as it is at that moment, once.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// timeout of a lookup by hand: that of the stub resolvers.
const timeout = 5 * time.Second

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "usage: goloop go|go-tcp|udp|tcp RATE NAME=ADDRESS[,ADDRESS]...")
		os.Exit(2)
	}
	lookUp := map[string]lookUp{"go": goResolver("udp"), "go-tcp": goResolver("tcp"), "udp": byHand("udp"), "tcp": byHand("tcp")}[os.Args[1]]
	rate, err := strconv.Atoi(os.Args[2])
	if lookUp == nil || err != nil || rate <= 0 {
		fmt.Fprintln(os.Stderr, "goloop: unknown kind or rate")
		os.Exit(2)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	var l loop
	pace := time.NewTicker(time.Second / time.Duration(rate))
	for i := 0; ; i++ {
		select {
		case <-ended:
			l.pending.Wait()
			fmt.Printf("%d %d %d\n", l.lookups, l.failures, l.longest.Microseconds())
			return
		case <-pace.C:
			name, want, _ := strings.Cut(os.Args[3+i%(len(os.Args)-3)], "=")
			l.pending.Go(func() { l.once(lookUp, name, strings.Split(want, ",")) })
		}
	}
}

// lookUp returns the IPv4 addresses of a name.
type lookUp func(name string) ([]netip.Addr, error)

type loop struct {
	pending sync.WaitGroup

	mu                sync.Mutex
	lookups, failures int
	longest           time.Duration
}

func (l *loop) once(lookUp lookUp, name string, want []string) {
	begin := time.Now()
	got, err := lookUp(name)
	took := time.Since(begin)
	if err == nil && !known(got, want) {
		err = fmt.Errorf("answer %v", got)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lookups++
	l.longest = max(l.longest, took)
	if err != nil {
		l.failures++
		fmt.Printf("%s: after %s: %s: %v\n", begin.Format(time.StampMicro), took, name, err)
	}
}

func known(got []netip.Addr, want []string) bool {
	for _, text := range want {
		if len(got) == 1 && got[0].String() == text {
			return true
		}
	}
	return false
}

func goResolver(network string) lookUp {
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, address)
	}}
	return func(name string) ([]netip.Addr, error) {
		return resolver.LookupNetIP(context.Background(), "ip4", name)
	}
}

func byHand(network string) lookUp {
	client := dns.Client{Net: network, Timeout: timeout}
	return func(name string) (addresses []netip.Addr, err error) {
		config, err := dns.ClientConfigFromFile("/etc/resolv.conf")
		if err != nil {
			return nil, err
		}
		if len(config.Servers) == 0 {
			return nil, errors.New("/etc/resolv.conf names no server")
		}
		query := new(dns.Msg)
		query.SetQuestion(name, dns.TypeA)
		server := net.JoinHostPort(config.Servers[0], config.Port)
		reply, _, err := client.Exchange(query, server)
		if err != nil {
			return nil, fmt.Errorf("ask %s: %w", server, err)
		}
		for _, rr := range reply.Answer {
			if a, ok := rr.(*dns.A); ok {
				address, _ := netip.AddrFromSlice(a.A.To4())
				addresses = append(addresses, address)
			}
		}
		if len(addresses) == 0 {
			return nil, fmt.Errorf("no address, rcode %s", dns.RcodeToString[reply.Rcode])
		}
		return addresses, nil
	}
}
