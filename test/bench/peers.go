package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// peers are the programs that a host could run instead. Each has a port 53 of its own and both the cluster zone and all
// other names, as ours has, and is set up as its documents advise for speed. Idle ones cost nothing, so all but
// systemd-resolved stay up for the whole run.
type peers struct {
	dnsmasq, dnsmasqLarge, unbound, coredns, nodeLocal, knot *peer
	resolved                                                 *peer
}

// peer is one of them.
type peer struct {
	name    string
	number  int         // the last part of its addresses
	address string      // the only one instead
	prepare preparation // for its turns only; may be nil

	argv   []string
	copies int // processes of it
	pids   []int
}

func (p *peer) processes() ([]int, error) { return p.pids, nil }

// corednsName is what the one with all that makes it fast is called.
const corednsName = "CoreDNS, cache and multisocket"

// nodeLocalAddress is the one of NodeLocal DNSCache's manifest.
const nodeLocalAddress = "169.254.20.10"

// at is the address for those who ask from a vantage.
func (p *peer) at(from *vantage) string {
	if p.address != "" {
		return p.address
	}
	return fmt.Sprintf("%s.%d", from.net, p.number)
}

func (b *bench) contestants(from *vantage, peers ...*peer) []*Contestant {
	var all []*Contestant
	for _, p := range peers {
		one := &Contestant{Name: p.name, Targets: []string{p.at(from)}, prepare: p.prepare, front: p.processes}
		if p == b.peers.nodeLocal && from == fromPod {
			one.prepare = b.untracked
		}
		all = append(all, one)
	}
	return all
}

// untracked exempts NodeLocal's address from connection tracking, as it does itself with iptables.
func (b *bench) untracked(ctx context.Context) (func() error, error) {
	const rules = `table ip node-local {
	chain prerouting {
		type filter hook prerouting priority raw;
		ip daddr ` + nodeLocalAddress + ` meta l4proto { tcp, udp } th dport 53 notrack
	}
	chain output {
		type filter hook output priority raw;
		ip saddr ` + nodeLocalAddress + ` meta l4proto { tcp, udp } th sport 53 notrack
	}
}`
	if err := b.lab.Host().Run(ctx, "nft", rules); err != nil {
		return nil, err
	}
	return func() error { return b.lab.Host().Run(context.WithoutCancel(ctx), "nft", "delete table ip node-local") }, nil
}

// As unbound's "Howto optimise" says: a thread for each CPU with a socket of its own, as many slabs, room in caches and
// socket buffers, many outgoing ports. The validator is left out, since nothing here is signed.
const unboundConfig = `server:
	interface: %[3]s
	interface: %[4]s
	interface: %[5]s
	access-control: 0.0.0.0/0 allow
	username: ""
	chroot: ""
	directory: "/run"
	pidfile: ""
	do-daemonize: no
	use-syslog: no
	logfile: ""
	module-config: "iterator"
	num-threads: 2
	so-reuseport: yes
	msg-cache-slabs: 2
	rrset-cache-slabs: 2
	infra-cache-slabs: 2
	key-cache-slabs: 2
	msg-cache-size: 50m
	rrset-cache-size: 100m
	outgoing-range: 8192
	num-queries-per-thread: 4096
	so-rcvbuf: 4m
	so-sndbuf: 4m
stub-zone:
	name: cluster.local
	stub-addr: %[1]s
forward-zone:
	name: .
	forward-addr: %[2]s
`

// With a socket for each CPU, as `multisocket` advises.
const corednsConfig = `cluster.local:53 {
	errors
	multisocket
	cache 30
	bind %[3]s %[4]s %[5]s
	forward . %[1]s
}
.:53 {
	errors
	multisocket
	cache 30
	bind %[3]s %[4]s %[5]s
	forward . %[2]s
}
`

// As in NodeLocal DNSCache's manifest: two caches, TCP to the cluster's server.
const nodeLocalConfig = `cluster.local:53 {
	errors
	cache {
		success 9984 30
		denial 9984 5
	}
	reload
	loop
	bind ` + nodeLocalAddress + `
	forward . %[1]s {
		force_tcp
	}
	prometheus :9253
}
.:53 {
	errors
	cache 30
	reload
	loop
	bind ` + nodeLocalAddress + `
	forward . %[2]s
	prometheus :9253
}
`

// As Knot Resolver's "Performance and resiliency" says: several processes with one cache in memory. Without validation.
const knotConfig = `for _, address in ipairs({'%[3]s', '%[4]s', '%[5]s'}) do net.listen(address, 53, { kind = 'dns' }) end
trust_anchors.remove('.')
modules = { 'hints > iterate' }
cache.open(100 * MB, 'lmdb://%[6]s')
policy.add(policy.suffix(policy.STUB('%[1]s'), policy.todnames({'cluster.local'})))
policy.add(policy.all(policy.STUB('%[2]s')))
`

func startPeers(ctx context.Context, l *lab.Lab, dir string) (*peers, error) {
	coredns, err := lab.Helper("coredns")
	if err != nil {
		return nil, err
	}
	p := &peers{
		dnsmasq:      &peer{name: "dnsmasq", number: 2, copies: 1},
		dnsmasqLarge: &peer{name: "dnsmasq", number: 3, copies: 1},
		unbound:      &peer{name: "unbound", number: 4, copies: 1},
		coredns:      &peer{name: corednsName, number: 5, copies: 1},
		nodeLocal:    &peer{name: "NodeLocal DNSCache's layout", address: nodeLocalAddress, copies: 1},
		knot:         &peer{name: "Knot Resolver", number: 6, copies: 2},
	}
	write := func(of *peer, text string) string {
		path := filepath.Join(dir, fmt.Sprintf("config%d", of.number))
		text = fmt.Sprintf(text, lab.CoreDNS0v4, lab.External0, of.at(fromHost), of.at(fromPod), of.at(fromWorker), dir+"/knot")
		err = errors.Join(err, os.WriteFile(path, []byte(text), 0o644))
		return path
	}
	// A large cache makes names that are asked once cost dnsmasq eight times as much, so it has one only where it helps.
	p.dnsmasq.argv = dnsmasqCommand(p.dnsmasq, 150)
	p.dnsmasqLarge.argv = dnsmasqCommand(p.dnsmasqLarge, 10_000)
	p.unbound.argv = []string{"unbound", "-d", "-p", "-c", write(p.unbound, unboundConfig)}
	p.coredns.argv = []string{coredns, "-conf", write(p.coredns, corednsConfig)}
	p.nodeLocal.argv = []string{coredns, "-conf", write(p.nodeLocal, nodeLocalConfig)}
	p.knot.argv = []string{"kresd", "-n", "-c", write(p.knot, knotConfig), dir}
	if err != nil {
		return nil, err
	}
	if err := addAddresses(ctx, l.Host(), p.dnsmasq, p.dnsmasqLarge, p.unbound, p.coredns, p.knot); err != nil {
		return nil, err
	}
	p.resolved = &peer{name: "systemd-resolved", address: lab.Stub}
	p.resolved.prepare = p.resolved.resolve(l)
	for _, one := range []*peer{p.dnsmasq, p.dnsmasqLarge, p.unbound, p.coredns, p.nodeLocal, p.knot} {
		if err := one.start(ctx, l.Host()); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func dnsmasqCommand(p *peer, names int) []string {
	argv := []string{
		"dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--pid-file=", "--user=root",
		"--log-facility=-", "--bind-interfaces", "--cache-size=" + strconv.Itoa(names), "--dns-forward-max=1000",
		"--server=/cluster.local/" + lab.CoreDNS0v4, "--server=" + lab.External0,
	}
	for _, from := range []*vantage{fromHost, fromPod, fromWorker} {
		argv = append(argv, "--listen-address="+p.at(from))
	}
	return argv
}

// start returns when the server answers. It ends with the lab.
func (p *peer) start(ctx context.Context, host *lab.Node) error {
	for range p.copies {
		cmd := host.Command(context.WithoutCancel(ctx), p.argv[0], p.argv[1:]...)
		if err := cmd.Start(); err != nil {
			return err
		}
		p.pids = append(p.pids, cmd.Process.Pid)
	}
	return p.await(ctx, host)
}

func (p *peer) await(ctx context.Context, host *lab.Node) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var last error
	for ctx.Err() == nil {
		// None of them tells when it is ready in a way that the others share.
		_, err := host.Query(ctx, "udp", netip.AddrPortFrom(netip.MustParseAddr(p.at(fromHost)), 53), lab.Backend, dns.TypeA)
		if err == nil {
			return nil
		}
		last = err
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("start %s: it does not answer: %w", p.name, last)
}

// resolve runs systemd-resolved for a while: it would notice what an attach does to the host.
func (p *peer) resolve(l *lab.Lab) preparation {
	var server *lab.Server
	return func(ctx context.Context) (func() error, error) {
		var err error
		if server == nil {
			server, err = l.ResolvedAtSpeed(ctx, lab.External0)
		} else {
			err = server.Start(ctx)
		}
		if err != nil {
			return nil, err
		}
		stop := func() error { return server.Stop(context.WithoutCancel(ctx)) }
		if err := splitDNS(ctx, l); err != nil {
			return nil, errors.Join(err, stop())
		}
		p.pids = []int{server.PID()}
		if err := p.await(ctx, l.Host()); err != nil {
			return nil, errors.Join(err, stop())
		}
		return stop, nil
	}
}

// splitDNS makes systemd-resolved ask CoreDNS for the cluster's names. It is on the bus a moment after it has said that it runs.
func splitDNS(ctx context.Context, l *lab.Lab) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, command := range [][]string{{"dns", "cni0", lab.CoreDNS0v4}, {"domain", "cni0", "~cluster.local"}} {
		for {
			_, err := l.Resolvectl(ctx, command...)
			if err == nil {
				break
			}
			if ctx.Err() != nil {
				return err
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}

// addAddresses gives the host what the peers listen on for others than itself.
func addAddresses(ctx context.Context, host *lab.Node, peers ...*peer) error {
	// NodeLocal has a dummy interface for it, which some kernels lack; for packets it makes no difference.
	commands := []string{"addr add " + nodeLocalAddress + "/32 dev lo"}
	for _, p := range peers {
		commands = append(commands, "addr add "+p.at(fromPod)+"/16 dev cni0", "addr add "+p.at(fromWorker)+"/24 dev kubeswitch")
	}
	for _, command := range commands {
		if err := host.Run(ctx, "ip", strings.Fields(command)...); err != nil {
			return err
		}
	}
	return nil
}
