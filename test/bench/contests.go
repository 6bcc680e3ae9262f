package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// vantage is where the queries come from.
type vantage struct {
	name string
	node func(*lab.Lab) *lab.Node
	port string // the interface of the host that they come in by
	net  string // peers of the host are asked at this, with a number of their own
	ours string // and we at this
}

var (
	fromHost   = &vantage{"host", (*lab.Lab).Host, "lo", "127.0.0", "127.0.0.1"}
	fromPod    = &vantage{"pod", func(l *lab.Lab) *lab.Node { return l.Pod("app") }, "vapp", "172.20.0", lab.KubeDNS4}
	fromWorker = &vantage{"worker", (*lab.Lab).Worker, "vworker0", "172.19.1", lab.KubeSwitch4}
)

// The contestants that are told apart. Others go by their own name.
const (
	directly  = "direct"
	theFloor  = "floor"
	answered  = "k2s-dnsbpf, answered"
	steered   = "k2s-dnsbpf, steered"
	forwarded = "k2s-dnsbpf, forwarded"
	userSpace = "k2s-dnsbpf --no-bpf"
	byTurns   = "by turns, without a state"
)

func (b *bench) contests() []*Contest {
	all := []*Contest{
		{Load: hot, From: fromHost, Threads: 1, Contestants: slices.Concat(b.inCluster(fromHost), b.userSpace(noCache), b.everyPeer(hot, fromHost))},
		{Load: hot, From: fromHost, Threads: 2, Contestants: slices.Concat(b.inCluster(fromHost), b.everyPeer(hot, fromHost))},
	}
	for _, from := range []*vantage{fromPod, fromWorker} {
		for threads := 1; threads <= 2; threads++ {
			all = append(all, &Contest{Load: hot, From: from, Threads: threads, full: true, Contestants: b.away(from)})
		}
	}
	for _, l := range []*load{noise, halves, zipf} {
		all = append(all, &Contest{
			Load: l, From: fromHost, Threads: 1, full: l != noise, Contestants: slices.Concat(b.inCluster(fromHost), b.everyPeer(l, fromHost)),
		})
	}
	all = append(all, &Contest{Load: noise, From: fromPod, Threads: 1, full: true, Contestants: b.away(fromPod)})
	for _, l := range []*load{outside, outsideOnce} {
		all = append(all, &Contest{Load: l, From: fromHost, Threads: 1, Contestants: slices.Concat(b.outCluster(), b.everyPeer(l, fromHost))})
	}
	all = append(all,
		b.twoEndpoints(),
		&Contest{Load: hot, From: fromHost, Threads: 1, Paced: true, Contestants: slices.Concat(b.inCluster(fromHost), b.everyPeer(hot, fromHost))},
		&Contest{Load: hot, From: fromPod, Threads: 1, Paced: true, full: true, Contestants: b.away(fromPod)},
	)
	for _, contest := range all {
		contest.Title = contest.title(b.options.Pace)
		if contest.From == fromPod {
			contest.setup = b.kubeProxy
			contest.Note = "kube-proxy's rules are loaded throughout, as on any node"
		}
	}
	return all
}

func (c *Contest) title(pace int) string {
	if c.Paced {
		return fmt.Sprintf("latency at %d queries a second, %s, from the %s", pace, c.Load.name, c.From.name)
	}
	title := fmt.Sprintf("%s, from the %s, generator threads: %d", c.Load.name, c.From.name, c.Threads)
	if c.endpoints > 1 {
		title += fmt.Sprintf(", CoreDNS: %d", c.endpoints)
	}
	return title
}

func nobody() ([]int, error) { return nil, nil }

// inCluster are CoreDNS itself, the floor, and ourselves with answers from the kernel and without.
func (b *bench) inCluster(from *vantage) []*Contestant {
	settings := []string{"--dns-endpoint", lab.CoreDNS0v4}
	if from == fromPod {
		settings = append(settings, "--pods", from.port, "--cluster-dns", lab.KubeDNS4)
	}
	return slices.Concat([]*Contestant{
		{Name: directly, Targets: []string{lab.CoreDNS0v4}, front: nobody},
		{Name: theFloor, Targets: []string{from.ours}, blind: true, prepare: b.floor(from), front: nobody},
	}, b.ourselves(answered, steered, from, settings...))
}

// outCluster are the same for names outside the cluster: what is asked directly is the server that the others forward to.
func (b *bench) outCluster() []*Contestant {
	return slices.Concat([]*Contestant{
		{Name: directly, Targets: []string{lab.External0}, front: nobody},
		{Name: theFloor, Targets: []string{fromHost.ours}, blind: true, prepare: b.floor(fromHost), front: nobody},
	}, b.ourselves(answered, forwarded, fromHost, "--dns-endpoint", lab.CoreDNS0v4), b.userSpace())
}

// noCache makes us ask for each query.
const noCache = "--no-cache"

// ourselves are we with the answer cache and without.
func (b *bench) ourselves(with, without string, from *vantage, settings ...string) []*Contestant {
	contestant := func(name string, settings ...string) *Contestant {
		return &Contestant{Name: name, Targets: []string{from.ours}, prepare: b.attachWith(settings...), front: b.daemons}
	}
	return []*Contestant{contestant(with, settings...), contestant(without, append(settings, noCache)...)}
}

func (b *bench) userSpace(settings ...string) []*Contestant {
	attach := b.attachWith(append(settings, "--dns-endpoint", lab.CoreDNS0v4, "--no-bpf")...)
	return []*Contestant{{Name: userSpace, Targets: []string{fromHost.ours}, prepare: attach, front: b.daemons}}
}

// everyPeer are all programs that a host could run instead, as they are best for a load.
func (b *bench) everyPeer(l *load, from *vantage) []*Contestant {
	p := b.peers
	dnsmasq := p.dnsmasq
	if l.many {
		dnsmasq = p.dnsmasqLarge
	}
	return b.contestants(from, dnsmasq, p.unbound, p.coredns, p.nodeLocal, p.knot, p.resolved)
}

// away are those whom others than the host ask.
func (b *bench) away(from *vantage) []*Contestant {
	p := b.peers
	all := slices.Concat(b.inCluster(from), b.contestants(from, p.dnsmasq, p.unbound, p.coredns, p.knot))
	if from == fromPod {
		all = slices.Concat(all, b.contestants(from, p.nodeLocal),
			[]*Contestant{{Name: "kube-proxy's rules, two CoreDNS", Targets: []string{lab.KubeDNS4}, front: nobody}})
	}
	return all
}

// twoEndpoints compares steering with asking two endpoints directly, by a generator each.
func (b *bench) twoEndpoints() *Contest {
	ours, service := fromHost.ours, lab.KubeDNS4
	attach := b.attachWith("--dns-endpoint", lab.CoreDNS0v4, "--dns-endpoint", lab.CoreDNS1v4, noCache)
	return &Contest{
		Load: hot, From: fromHost, Threads: 1, endpoints: 2,
		Note: "two generators: direct, each asks a pod of its own; otherwise both ask the Service address, or 127.0.0.1",
		Contestants: []*Contestant{
			{Name: directly, Targets: []string{lab.CoreDNS0v4, lab.CoreDNS1v4}, front: nobody},
			{Name: "kube-proxy's rules", Targets: []string{service, service}, prepare: b.kubeProxy, front: nobody},
			{Name: byTurns, Targets: []string{service, service}, prepare: b.turnByTurn, front: nobody},
			{Name: steered, Targets: []string{ours, ours}, prepare: attach, front: b.daemons},
		},
	}
}

// kubeProxy loads the rules that translate the kube-dns Service address. They cost every packet of the host something.
func (b *bench) kubeProxy(ctx context.Context) (func() error, error) {
	if err := b.lab.LoadKubeProxyLikeRules(ctx); err != nil {
		return nil, err
	}
	return func() error {
		return b.lab.Host().Run(context.WithoutCancel(ctx), "nft", "delete table ip kube-proxy; delete table ip6 kube-proxy")
	}, nil
}

// turnByTurn loads rules that give one query to each endpoint in turn, and no more: what that alone costs, since a server that
// gets every second query of a burst is woken as often as one that gets them all.
func (b *bench) turnByTurn(ctx context.Context) (func() error, error) {
	const rules = `table ip by-turns {
	chain output {
		type route hook output priority mangle;
		ip daddr ` + lab.KubeDNS4 + ` udp dport 53 ip daddr set numgen inc mod 2 map { 0 : ` + lab.CoreDNS0v4 + `, 1 : ` + lab.CoreDNS1v4 + ` }
	}
	chain prerouting {
		type filter hook prerouting priority mangle;
		ip saddr { ` + lab.CoreDNS0v4 + `, ` + lab.CoreDNS1v4 + ` } udp sport 53 ip saddr set ` + lab.KubeDNS4 + `
	}
}`
	if err := b.lab.Host().Run(ctx, "nft", rules); err != nil {
		return nil, err
	}
	return func() error { return b.lab.Host().Run(context.WithoutCancel(ctx), "nft", "delete table ip by-turns") }, nil
}

// daemons are the processes of k2s-dnsbpf in host0. The pid that it gives itself means nothing outside.
func (b *bench) daemons() ([]int, error) {
	pids, err := processes(b.lab.Host(), b.binary)
	if err == nil && len(pids) == 0 {
		err = fmt.Errorf("find the daemon: no process of host0 runs %s", b.binary)
	}
	return pids, err
}

// processes of a node that run a program.
func processes(node *lab.Node, program string) ([]int, error) {
	ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", node.PID()))
	if err != nil {
		return nil, err
	}
	links, err := filepath.Glob("/proc/[0-9]*/ns/pid")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, link := range links {
		dir := filepath.Dir(filepath.Dir(link))
		itsNS, err := os.Readlink(link)
		if err != nil || itsNS != ns { // or it has ended
			continue
		}
		var pid int
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil || exe != program {
			continue
		}
		if _, err := fmt.Sscanf(filepath.Base(dir), "%d", &pid); err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
