package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

type question struct {
	name  string
	qtype uint16
}

// A handful of names is kind to those with a cache: all their answers but the first in 5 seconds come from it.
var clusterQuestions = []question{
	{lab.Backend, dns.TypeA},
	{lab.Backend, dns.TypeAAAA},
	{lab.Kubernetes, dns.TypeA},
	{lab.KubeDNS, dns.TypeA},
	{lab.Headless, dns.TypeA},
	{"_http._tcp." + lab.Backend, dns.TypeSRV},
}

var externalQuestions = []question{
	{lab.WWW, dns.TypeA},
	{lab.WWW, dns.TypeAAAA},
	{"example.com.", dns.TypeMX},
	{"_sip._tcp.example.com.", dns.TypeSRV},
	{"www.example.org.", dns.TypeA},
	{"www.example.net.", dns.TypeA},
}

const ours = "k2s-dnsbpf"

func (b *bench) contests(p *peers) []*Contest {
	const oursAt = "127.0.0.1"
	coredns := func(count int) func(context.Context) []*lab.Server {
		return func(context.Context) []*lab.Server {
			return []*lab.Server{b.lab.CoreDNS(0), b.lab.CoreDNS(1)}[:count]
		}
	}
	external := func(context.Context) []*lab.Server { return []*lab.Server{b.lab.External(0)} }
	none := func() ([]int, error) { return nil, nil }
	attachOne := b.attachWith("--dns-endpoint", lab.CoreDNS0v4)

	// peer makes the contestants that are other programs on the host.
	peer := func(back func(context.Context) []*lab.Server) []*Contestant {
		var all []*Contestant
		for _, server := range []*peerServer{p.dnsmasq, p.unbound, p.coredns} {
			all = append(all, &Contestant{Name: server.name, Targets: []string{server.addr}, front: server.pids, back: back})
		}
		return all
	}
	outside := func() []*Contestant {
		return append([]*Contestant{
			{Name: "direct", Targets: []string{lab.External0}, front: none, back: external},
			{Name: ours + ", forwarder", Ours: true, Targets: []string{oursAt}, prepare: attachOne, front: b.daemons, back: external},
		}, peer(external)...)
	}
	return []*Contest{
		{
			Title: "cluster names, one CoreDNS", questions: clusterQuestions,
			Note: "direct: the generator asks the CoreDNS pod itself",
			Contestants: append([]*Contestant{
				{Name: "direct", Targets: []string{lab.CoreDNS0v4}, front: none, back: coredns(1)},
				{Name: ours + ", steered", Ours: true, Targets: []string{oursAt}, prepare: attachOne, front: b.daemons, back: coredns(1)},
				{Name: ours + " --no-bpf", Targets: []string{oursAt}, prepare: b.attachWith("--dns-endpoint", lab.CoreDNS0v4, "--no-bpf"), front: b.daemons, back: coredns(1)},
			}, peer(coredns(1))...),
		},
		{
			Title: "cluster names, two CoreDNS", questions: clusterQuestions,
			Note: "two generators: direct, each asks a pod of its own; otherwise both ask the Service address, or 127.0.0.1",
			Contestants: []*Contestant{
				{Name: "direct", Targets: []string{lab.CoreDNS0v4, lab.CoreDNS1v4}, front: none, back: coredns(2)},
				{Name: "kube-proxy's rules", Targets: []string{lab.KubeDNS4, lab.KubeDNS4}, prepare: b.kubeProxy, front: none, back: coredns(2)},
				{Name: ours + ", steered", Ours: true, Targets: []string{oursAt, oursAt}, prepare: b.attachWith("--dns-endpoint", lab.CoreDNS0v4, "--dns-endpoint", lab.CoreDNS1v4), front: b.daemons, back: coredns(2)},
			},
		},
		{
			Title: "external names, repeated", coarse: true, questions: externalQuestions, Contestants: outside(),
			Note: "direct: the generator asks the external unbound itself, which the others forward to",
		},
		{
			Title: "external names, each only once", coarse: true, unique: true, Contestants: outside(),
			Note: "no cache can help, so each query is forwarded",
		},
	}
}

// daemons are the processes of k2s-dnsbpf in host0. The pid that it gives itself means nothing outside.
func (b *bench) daemons() ([]int, error) {
	node, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", b.lab.Host().PID()))
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
		ns, err := os.Readlink(link)
		if err != nil || ns != node { // or it has ended
			continue
		}
		var pid int
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil || exe != b.binary {
			continue
		}
		if _, err := fmt.Sscanf(filepath.Base(dir), "%d", &pid); err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	if len(pids) == 0 {
		return nil, fmt.Errorf("find the daemon: no process of host0 runs %s", b.binary)
	}
	return pids, nil
}

// verify asks each question once, as the generator will, and compares with what the first contestant said to it.
func (b *bench) verify(ctx context.Context, contest *Contest, one *Contestant) error {
	questions := contest.questions
	if contest.unique {
		questions = []question{b.uniqueQuestion()}
	}
	for _, target := range slices.Compact(slices.Clone(one.Targets)) {
		for i, q := range questions {
			got, err := b.ask(ctx, target, q)
			if err != nil {
				return err
			}
			switch {
			case contest.unique:
				if got != "A "+lab.OutsideAnswer {
					return fmt.Errorf("%s answers %q for %s: want the address %s", target, got, q.name, lab.OutsideAnswer)
				}
			case len(contest.expectations) <= i:
				contest.expectations = append(contest.expectations, got)
			case got != contest.expectations[i]:
				return fmt.Errorf("%s answers %q for %s: want %q as from the server itself", target, got, q.name, contest.expectations[i])
			}
		}
	}
	return nil
}

// ask returns the answer section, sorted and without TTLs.
func (b *bench) ask(ctx context.Context, server string, q question) (string, error) {
	m := new(dns.Msg).SetQuestion(q.name, q.qtype).SetEdns0(4096, false) // what dnsperf -e sends
	reply, err := b.lab.Host().Exchange(ctx, "udp", netip.AddrPortFrom(netip.MustParseAddr(server), 53), m)
	if err != nil {
		return "", err
	}
	if reply.Rcode != dns.RcodeSuccess || len(reply.Answer) == 0 || reply.IsEdns0() == nil {
		return "", fmt.Errorf("%s answers %s with %d records for %s, EDNS %t: want NOERROR, some records, and EDNS",
			server, dns.RcodeToString[reply.Rcode], len(reply.Answer), q.name, reply.IsEdns0() != nil)
	}
	var records []string
	for _, rr := range reply.Answer {
		rdata := strings.TrimPrefix(rr.String(), rr.Header().String())
		records = append(records, dns.TypeToString[rr.Header().Rrtype]+" "+rdata)
	}
	slices.Sort(records)
	return strings.Join(records, ", "), nil
}

func (b *bench) uniqueQuestion() question {
	b.unique++
	return question{fmt.Sprintf("n%d.example.org.", b.unique), dns.TypeA}
}

// queryFile writes what dnsperf asks: unique names for more time than it has at any rate that is to be expected.
func (b *bench) queryFile(contest *Contest) (string, error) {
	questions := contest.questions
	if contest.unique {
		const most = 80_000 // queries a second
		for range int(most*b.options.Time.Seconds()) + 1 {
			questions = append(questions, b.uniqueQuestion())
		}
	}
	var text strings.Builder
	for _, q := range questions {
		fmt.Fprintf(&text, "%s %s\n", q.name, dns.TypeToString[q.qtype])
	}
	path := filepath.Join(b.dir, "queries")
	return path, os.WriteFile(path, []byte(text.String()), 0o644)
}
