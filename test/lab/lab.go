// Package lab raises a small K2s installation out of network namespaces: a host, a worker, pods with a real CoreDNS
// and an outside world with a real unbound. Tests, the demo and the benchmarks use the same one.
//
//	             ext   192.0.2.1, unbound on .53 and .54
//	              |
//	            uplink 192.0.2.2
//	            host0
//	kubeswitch 172.19.1.1   cni0 172.20.0.1
//	     |                   |        |        |
//	  worker0        pod-coredns-0  -1       pod-app
//	172.19.1.101         .0.10     .0.11      .0.20
//
// Nothing of it has a name on the machine or a file on its disk: the namespaces belong to processes that end with the
// process that raised the lab, whatever ends that. Any number of labs can be up at once.
package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"
)

// Options of a lab. The zero value is the usual one.
type Options struct {
	// CoreDNS is the binary for the CoreDNS pods; by default test/bin/coredns.
	CoreDNS string
	// LogQueries makes each server log its queries, for Server.QueryLog. It costs a server a part of its rate.
	LogQueries bool
	// CoreDNSForwards makes CoreDNS send names outside its zones to the external server, as a real cluster's does. By
	// default it refuses them, so that a name which was steered there by mistake shows.
	CoreDNSForwards bool
	// CoreDNSCache gives each CoreDNS its `cache` plugin. Off by default: a count of its queries then counts them all.
	CoreDNSCache bool
	// NoServers leaves CoreDNS and unbound stopped; Server.Start starts one.
	NoServers bool
	// HostResolvConf replaces the content of host0's /etc/resolv.conf.
	HostResolvConf string
	// HostSysctls are set in host0 when all links are up, for example "net.ipv4.conf.all.rp_filter": "1".
	HostSysctls map[string]string
}

// Lab is a raised lab. Its methods may be called from several goroutines.
type Lab struct {
	options Options
	coredns []*Server
	ext     []*Server

	mu    sync.Mutex
	nodes []*Node

	close struct {
		sync.Once
		err error
	}
}

// New raises a lab. The caller must Close it, but may as well be killed.
func New(ctx context.Context, options Options) (*Lab, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("the lab makes network namespaces, which needs root: run it with sudo")
	}
	l := &Lab{options: options}
	if err := l.raise(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("raise the lab: %w", err), l.Close())
	}
	return l, nil
}

func (l *Lab) raise(ctx context.Context) error {
	l.nodes = make([]*Node, len(nodeSpecs))
	if err := inParallel(len(nodeSpecs), func(i int) (err error) {
		spec := nodeSpecs[i]
		resolv := spec.resolv
		if spec.name == hostName && l.options.HostResolvConf != "" {
			resolv = l.options.HostResolvConf
		}
		l.nodes[i], err = newNode(spec.name, resolv, mustAddr(spec.ip4), mustAddr(spec.ip6))
		return err
	}); err != nil {
		return err
	}
	if err := l.connect(ctx); err != nil {
		return err
	}
	for name, value := range l.options.HostSysctls {
		if err := l.Host().SetSysctl(name, value); err != nil {
			return err
		}
	}
	if err := l.prepareServers(); err != nil {
		return err
	}
	if l.options.NoServers {
		return nil
	}
	servers := append(append([]*Server(nil), l.coredns...), l.ext...)
	return inParallel(len(servers), func(i int) error { return servers[i].Start(ctx) })
}

// Start raises a lab for a test and closes it when the test ends. Without root the test is skipped, but fails where
// K2S_LAB_REQUIRED is set, as it is in CI: there a skipped test would go unseen.
func Start(tb testing.TB, options Options) *Lab {
	tb.Helper()
	if os.Geteuid() != 0 && os.Getenv("K2S_LAB_REQUIRED") == "" {
		tb.Skip("needs root for network namespaces; run `make test` as root, or set K2S_LAB_REQUIRED to fail instead")
	}
	ctx, cancel := context.WithTimeout(tb.Context(), time.Minute)
	defer cancel()
	l, err := New(ctx, options)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := l.Close(); err != nil {
			tb.Error(err)
		}
	})
	return l
}

// Host is host0, the Linux host on which the program under test runs.
func (l *Lab) Host() *Node { return l.Node(hostName) }

// Worker is worker0, a worker on KubeSwitch.
func (l *Lab) Worker() *Node { return l.Node("worker0") }

// Pod is a pod: "coredns-0", "coredns-1" or "app".
func (l *Lab) Pod(name string) *Node { return l.Node("pod-" + name) }

// Ext is the outside world.
func (l *Lab) Ext() *Node { return l.Node("ext") }

// Nodes are all nodes of the lab.
func (l *Lab) Nodes() []*Node {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.nodes)
}

// Node finds a node by its full name. An unknown name is a mistake in the test, so it panics.
func (l *Lab) Node(name string) *Node {
	for _, n := range l.Nodes() {
		if n.name == name {
			return n
		}
	}
	panic("the lab has no node " + name)
}

// CoreDNS is the CoreDNS in pod-coredns-<i>, 0 or 1.
func (l *Lab) CoreDNS(i int) *Server { return l.coredns[i] }

// External is the unbound on External0 or External1, 0 or 1.
func (l *Lab) External(i int) *Server { return l.ext[i] }

// Close ends every process in the lab and with them all else that it is made of.
func (l *Lab) Close() error {
	l.close.Do(func() {
		nodes := l.Nodes()
		l.close.err = inParallel(len(nodes), func(i int) error {
			if nodes[i] == nil { // raising it had failed
				return nil
			}
			return nodes[i].close()
		})
	})
	return l.close.err
}

// inParallel runs f(0) to f(n-1) at the same time and joins their errors.
func inParallel(n int, f func(i int) error) error {
	errs := make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { errs[i] = f(i) })
	}
	group.Wait()
	return errors.Join(errs...)
}
