package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// peers are the programs that a host could run instead. Each has an address of 127/8 of its own, with port 53, and has
// both the cluster zone and all other names, as ours has. Idle ones cost nothing, so they stay up for the whole run.
type peers struct{ dnsmasq, unbound, coredns *peerServer }

type peerServer struct {
	name, addr string
	cmd        *lab.Cmd
	output     bytes.Buffer
}

func (s *peerServer) pids() ([]int, error) { return []int{s.cmd.Process.Pid}, nil }

// One thread is unbound's default, as dnsmasq has one always. The validator is left out, since nothing here is signed.
const unboundConfig = `server:
	interface: 127.0.0.3
	access-control: 127.0.0.0/8 allow
	username: ""
	chroot: ""
	directory: "/run"
	pidfile: ""
	do-daemonize: no
	use-syslog: no
	logfile: ""
	module-config: "iterator"
stub-zone:
	name: cluster.local
	stub-addr: %[1]s
forward-zone:
	name: .
	forward-addr: %[2]s
`

// As in NodeLocal DNSCache's manifest: cached, and TCP to the cluster's server.
const corednsConfig = `cluster.local:53 {
	errors
	cache {
		success 9984 30
		denial 9984 5
	}
	bind 127.0.0.4
	forward . %[1]s {
		force_tcp
	}
	prometheus 127.0.0.4:9253
}
.:53 {
	errors
	cache 30
	bind 127.0.0.4
	forward . %[2]s
	prometheus 127.0.0.4:9253
}
`

func startPeers(ctx context.Context, l *lab.Lab, dir string) (*peers, error) {
	coredns, err := lab.Helper("coredns")
	if err != nil {
		return nil, err
	}
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		err = errors.Join(err, os.WriteFile(path, fmt.Appendf(nil, text, lab.CoreDNS0v4, lab.External0), 0o644))
		return path
	}
	unboundConf, corefile := write("unbound.conf", unboundConfig), write("Corefile", corednsConfig)
	if err != nil {
		return nil, err
	}
	p := &peers{
		dnsmasq: &peerServer{name: "dnsmasq", addr: "127.0.0.2"},
		unbound: &peerServer{name: "unbound", addr: "127.0.0.3"},
		coredns: &peerServer{name: "CoreDNS with cache", addr: "127.0.0.4"},
	}
	// dnsmasq keeps its default of 150 cached names: with 10000, names that are asked only once cost it eight times as much.
	for server, argv := range map[*peerServer][]string{
		p.dnsmasq: {
			"dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--pid-file=", "--user=root",
			"--log-facility=-", "--bind-interfaces", "--listen-address=" + p.dnsmasq.addr,
			"--server=/cluster.local/" + lab.CoreDNS0v4, "--server=" + lab.External0,
		},
		p.unbound: {"unbound", "-d", "-p", "-c", unboundConf},
		p.coredns: {coredns, "-conf", corefile},
	} {
		if err := server.start(ctx, l.Host(), argv); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// start returns when the server answers. It ends with the lab.
func (s *peerServer) start(ctx context.Context, host *lab.Node, argv []string) error {
	s.cmd = host.Command(context.WithoutCancel(ctx), argv[0], argv[1:]...)
	s.cmd.Stdout, s.cmd.Stderr = &s.output, &s.output
	if err := s.cmd.Start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var last error
	for ctx.Err() == nil {
		// None of them tells when it is ready in a way that the others share.
		_, err := host.Query(ctx, "udp", netip.AddrPortFrom(netip.MustParseAddr(s.addr), 53), lab.Backend, dns.TypeA)
		if err == nil {
			return nil
		}
		last = err
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("start %s: it does not answer: %w", s.name, last)
}
