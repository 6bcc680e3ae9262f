//go:build linux

package daemon

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// Report implements control.Handler: the current state. Files and the kernel are read in the caller's goroutine and delay nobody else.
func (d *Daemon) Report() status.Report {
	seen := d.seen.Load()
	report := d.known(seen)
	host.ReportResolver(&report, d.resolver, seen.config, d.keeper, "")
	host.ReportDatapath(&report, seen.config, d.journal)
	report.Datapath.Events = seen.events
	report.Cache = d.cacheReport(seen)
	report.Healthy = len(report.Problems) == 0
	return report
}

// known is the part of the report that needs no I/O.
func (d *Daemon) known(s *attachment) status.Report {
	since := s.started.UTC().Truncate(time.Second)
	report := status.Report{
		Attached:   true,
		Topology:   string(s.config.Topology),
		Since:      &since,
		Version:    d.version,
		PID:        os.Getpid(),
		Kubeconfig: s.source.kubeconfig,
		Discovery:  s.discovery(time.Now()),
		Shared:     s.desired.Shared,
		Endpoints:  endpoints(s.desired),
	}
	for _, upstream := range s.desired.Forward.Upstreams {
		report.Resolver.Upstreams = append(report.Resolver.Upstreams, upstream.String())
	}
	for _, zone := range s.desired.Zones {
		report.Zones = append(report.Zones, status.Zone{Name: zone.Name, Group: "cluster", Source: zone.Source})
	}
	stats := d.forwarder.Stats()
	report.Forwarder = status.Forwarder{Queries: stats.UDPQueries + stats.TCPQueries, Failures: stats.Failures, Cached: stats.Cached, Loops: stats.Loops}
	for _, address := range s.desired.Listen {
		report.Forwarder.Listen = append(report.Forwarder.Listen, address.String())
	}
	report.Problems = s.allProblems(report.Discovery)
	fillLoop(&report, stats.LastLoop)
	var problem string
	if report.Guardian, problem = d.guardian.Report(); problem != "" {
		report.Problems = append(report.Problems, problem)
	}
	for _, address := range s.desired.SteeredAt {
		report.Resolver.SteeredAt = append(report.Resolver.SteeredAt, address.String())
	}
	return report
}

// allProblems are those of the plan, those noted since, and those of discovery, ordered by kind.
func (s *attachment) allProblems(found *status.Discovery) (texts []string) {
	problems := slices.Clone(s.desired.Problems)
	for kind, text := range s.problems {
		problems = append(problems, plan.Problem{Kind: kind, Text: text})
	}
	newest, _ := s.source.Current()
	for _, text := range newest.Problems {
		problems = append(problems, plan.Problem{Kind: plan.ProblemDiscovery, Text: text})
	}
	if found.Stale {
		problems = append(problems, plan.Problem{Kind: plan.ProblemDiscovery, Text: fmt.Sprintf("endpoints can't be confirmed, the last good ones are %s old: %s",
			time.Duration(found.AgeSeconds)*time.Second, found.Reason)})
	}
	slices.SortStableFunc(problems, func(a, b plan.Problem) int { return int(a.Kind) - int(b.Kind) })
	for _, p := range problems {
		texts = append(texts, p.Text)
	}
	return texts
}

func endpoints(desired plan.Desired) (entries []status.Endpoint) {
	for _, e := range desired.Endpoints {
		entry := status.Endpoint{Address: e.Address.String(), Healthy: e.Lives(), Source: e.Source, Note: e.Note}
		if e.Steerable() && !e.Severed {
			entry.Interface = e.Way.Interface
		}
		if e.Severed {
			entry.Severed, entry.Note = true, "the kernel's path to it over "+e.Way.Interface+" is broken"
		}
		if e.Dead {
			entry.Note = strings.TrimPrefix(entry.Note+"; does not answer", "; ")
		}
		entries = append(entries, entry)
	}
	return entries
}

// discovery says where endpoints and zones come from, and how old that information is.
func (s *attachment) discovery(now time.Time) *status.Discovery {
	newest, ok := s.source.Current()
	if !ok {
		newest = s.snapshot
	}
	report := &status.Discovery{
		Service: newest.Service, Updated: newest.Updated.UTC().Truncate(time.Second),
		Stale: newest.Stale, Reason: newest.Reason, Notes: slices.Concat(newest.Notes, s.desired.Notes),
	}
	if newest.Service != "" { // what the user has given does not age
		report.AgeSeconds = max(0, int64(now.Sub(newest.Updated)/time.Second))
	}
	return report
}

// loopMemory is how long a query that came back makes an attachment unhealthy. A loop that persists is detected again
// within that time: unknown names are queried all the time.
const loopMemory = 5 * time.Minute

// fillLoop says who forwards to us, if one of our queries came back recently.
func fillLoop(report *status.Report, loop *forwarder.Loop) {
	if loop == nil || time.Since(loop.At) > loopMemory {
		return
	}
	report.Forwarder.Loop = fmt.Sprintf("%s asked us for %s, which we had asked it for, at %s", loop.From, loop.Name, loop.At.UTC().Format(time.RFC3339))
	who, remedy := "an upstream", "name other servers with --upstream"
	if loop.Zone != "" {
		who, remedy = "cluster DNS", "let its Corefile forward to the host's upstream servers"
	}
	report.Problems = append(report.Problems, fmt.Sprintf("%s forwards to us: %s: %s", who, report.Forwarder.Loop, remedy))
}
