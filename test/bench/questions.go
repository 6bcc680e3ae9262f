package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

type question struct {
	name  string
	qtype uint16
}

// load is what is asked.
type load struct {
	name  string
	check []question // asked once before each turn
	// what lists the questions of a run that asks at most so many, in turn and from the first again when all were asked.
	what func(b *bench, most int) []question

	once     bool // some names are asked once only, so the list must not begin again
	many     bool // so many names that a moment does not suffice to ask each
	nxdomain bool // it is a right answer
}

// most queries a second: more than anything that has to ask somebody for each second one can answer here.
const most = 160_000

// A handful of names is kind to those with a cache: all their answers but the first in 5 seconds come from it.
var hotNames = []question{
	{lab.Backend, dns.TypeA},
	{lab.Backend, dns.TypeAAAA},
	{lab.Kubernetes, dns.TypeA},
	{lab.KubeDNS, dns.TypeA},
	{lab.Headless, dns.TypeA},
	{"_http._tcp." + lab.Backend, dns.TypeSRV},
}

var hot = &load{
	name: "hot names", check: hotNames,
	what: func(*bench, int) []question { return hotNames },
}

// Every second name has never been asked before. A wildcard answers it.
var halves = &load{
	name: "hits and misses by turns", check: hotNames, once: true,
	what: func(b *bench, most int) []question {
		var all []question
		for i := range most / 2 {
			all = append(all, hotNames[i%len(hotNames)], question{b.uniqueName() + wild, dns.TypeA})
		}
		return all
	},
}

// What a resolver with ndots:5 makes of names outside: five names that there are not, and the one that was meant.
var noise = &load{
	name: "ndots:5 noise", check: noiseNames(), nxdomain: true,
	what: func(*bench, int) []question { return noiseNames() },
}

func noiseNames() []question {
	search := []string{"default.svc.cluster.local.", "svc.cluster.local.", "cluster.local.", "example.com.", "lab.example.com.", ""}
	var all []question
	for i := range 10 {
		for _, suffix := range search {
			all = append(all, question{fmt.Sprintf("www%d.example.org.%s", i, suffix), dns.TypeA})
		}
	}
	return all
}

// zipf asks manyNames, the k-th of which is asked 1/k as often as the first. The draw is the same in each run.
var zipf = &load{
	name: fmt.Sprintf("%d names by Zipf", manyNames), many: true,
	check: []question{{manyName(0), dns.TypeA}, {manyName(manyNames - 1), dns.TypeA}},
	what: func(*bench, int) []question {
		var sum float64
		shares := make([]float64, manyNames)
		for i := range shares {
			sum += 1 / float64(i+1)
			shares[i] = sum
		}
		draw := rand.New(rand.NewPCG(1, 2))
		all := make([]question, 1<<17)
		for i := range all {
			all[i] = question{manyName(sort.SearchFloat64s(shares, draw.Float64()*sum)), dns.TypeA}
		}
		return all
	},
}

var outside = &load{
	name: "hot external names", check: outsideNames,
	what: func(*bench, int) []question { return outsideNames },
}

var outsideNames = []question{
	{lab.WWW, dns.TypeA},
	{lab.WWW, dns.TypeAAAA},
	{"example.com.", dns.TypeMX},
	{"_sip._tcp.example.com.", dns.TypeSRV},
	{"www.example.org.", dns.TypeA},
	{"www.example.net.", dns.TypeA},
}

var outsideOnce = &load{
	name: "external names, each only once", check: outsideNames[:1], once: true,
	what: func(b *bench, most int) []question {
		var all []question
		for range most {
			all = append(all, question{b.uniqueName() + ".example.org.", dns.TypeA})
		}
		return all
	},
}

func (b *bench) uniqueName() string {
	b.unique++
	return fmt.Sprintf("n%d", b.unique)
}

// The names that the lab's zone lacks.
const (
	manyNames = 10_000
	manyTTL   = 5 * time.Second
	wild      = ".wild.default.svc.cluster.local."
)

func manyName(i int) string { return fmt.Sprintf("svc-%d.default.svc.cluster.local.", i) }

func addNames(ctx context.Context, l *lab.Lab) error {
	records := []string{fmt.Sprintf("*%s 5 IN A 172.21.1.1", wild)}
	for i := range manyNames {
		records = append(records, fmt.Sprintf("%s %.0f IN A 172.21.%d.%d", manyName(i), manyTTL.Seconds(), 100+i/250, 1+i%250))
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for i := range 2 {
		if err := l.CoreDNS(i).SetClusterRecords(ctx, records...); err != nil {
			return err
		}
	}
	return nil
}

// verify asks as the generator will and compares with what the first contestant said. As a stub resolver does, it asks again
// when there is no answer, and tells how often.
func (b *bench) verify(ctx context.Context, contest *Contest, one *Contestant) (lost int, err error) {
	for _, target := range slices.Compact(slices.Clone(one.Targets)) {
		for i, q := range contest.Load.check {
			got, err := b.ask(ctx, contest.From.node(b.lab), target, q)
			for ; errors.Is(err, os.ErrDeadlineExceeded) && lost < 3; lost++ {
				got, err = b.ask(ctx, contest.From.node(b.lab), target, q)
			}
			if err != nil {
				return lost, err
			}
			if len(contest.expectations) <= i {
				contest.expectations = append(contest.expectations, got)
			}
			if want := contest.expectations[i]; got != want {
				return lost, fmt.Errorf("%s answers %q for %s: want %q as from the server itself", target, got, q.name, want)
			}
		}
	}
	return lost, nil
}

// ask returns rcode and answer section, sorted and without TTLs.
func (b *bench) ask(ctx context.Context, from *lab.Node, server string, q question) (string, error) {
	m := new(dns.Msg).SetQuestion(q.name, q.qtype).SetEdns0(4096, false) // what dnsperf -e sends
	reply, err := from.Exchange(ctx, "udp", netip.AddrPortFrom(netip.MustParseAddr(server), 53), m)
	if err != nil {
		return "", err
	}
	if reply.IsEdns0() == nil {
		return "", fmt.Errorf("%s answers %s without EDNS: it was asked with", server, q.name)
	}
	records := make([]string, 0, len(reply.Answer))
	for _, rr := range reply.Answer {
		rdata := strings.TrimPrefix(rr.String(), rr.Header().String())
		records = append(records, dns.TypeToString[rr.Header().Rrtype]+" "+rdata)
	}
	slices.Sort(records)
	return dns.RcodeToString[reply.Rcode] + " " + strings.Join(records, ", "), nil
}

// queryFile writes what dnsperf asks for a time.
func (b *bench) queryFile(l *load, runs time.Duration) (string, error) {
	var text strings.Builder
	for _, q := range l.what(b, int(most*runs.Seconds())+1) {
		fmt.Fprintf(&text, "%s %s\n", q.name, dns.TypeToString[q.qtype])
	}
	path := filepath.Join(b.dir, "queries")
	return path, os.WriteFile(path, []byte(text.String()), 0o644)
}

// idealHits is the share of queries that the best cache of a size could answer by itself, the second time that a list is
// asked at a rate: it knows which names will be asked most often, keeps those, and loses each at the end of its TTL only.
func idealHits(asked []question, size int, ttl, warm, measured time.Duration, rate float64) float64 {
	counts := make(map[question]int)
	for _, q := range asked {
		counts[q]++
	}
	names := make([]question, 0, len(counts))
	for q := range counts {
		names = append(names, q)
	}
	slices.SortFunc(names, func(a, b question) int { return counts[b] - counts[a] })
	ends := make(map[question]float64) // when what is kept is lost, in seconds
	for _, q := range names[:min(size, len(names))] {
		ends[q] = -1
	}
	hits, queries := 0, 0
	for _, run := range []struct{ begin, length float64 }{{0, warm.Seconds()}, {warm.Seconds(), measured.Seconds()}} {
		hits, queries = 0, int(rate*run.length)
		for i := range queries {
			q, now := asked[i%len(asked)], run.begin+float64(i)/rate
			end, kept := ends[q]
			switch {
			case kept && now < end:
				hits++
			case kept:
				ends[q] = now + ttl.Seconds()
			}
		}
	}
	return float64(hits) / float64(max(1, queries))
}
