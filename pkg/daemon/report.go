//go:build linux

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/control"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/guardian"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/handover"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// Report implements control.Handler: what there is to say now. Files and the kernel are read by whoever asks, and hold up nobody else.
func (d *Daemon) Report() status.Report {
	seen := d.seen.Load()
	report := d.known(seen)
	fillResolver(&report, d.resolver, seen.config, d.keeper, "")
	host.ReportDatapath(&report, seen.config, d.journal)
	report.Datapath.Events = seen.events
	report.Healthy = len(report.Problems) == 0
	return report
}

// known is the part of the report that the daemon knows by itself.
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
	report.Forwarder = status.Forwarder{Queries: stats.UDPQueries + stats.TCPQueries, Failures: stats.Failures, Loops: stats.Loops}
	for _, address := range s.desired.Listen {
		report.Forwarder.Listen = append(report.Forwarder.Listen, address.String())
	}
	report.Problems = s.allProblems(report.Discovery)
	fillLoop(&report, stats.LastLoop)
	var problem string
	if report.Guardian, problem = d.guardian.Report(); problem != "" {
		report.Problems = append(report.Problems, problem)
	}
	report.Resolver.SteeredAt = texts(s.desired.SteeredAt)
	return report
}

// allProblems are those of the plan, those that were noted since, and those of discovery, by what they concern.
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
			entry.Severed, entry.Note = true, "the kernel's way to it over "+e.Way.Interface+" is broken"
		}
		if e.Dead {
			entry.Note = strings.TrimPrefix(entry.Note+"; does not answer", "; ")
		}
		entries = append(entries, entry)
	}
	return entries
}

// discovery says where the endpoints and zones are from, and how old the knowledge is.
func (s *attachment) discovery(now time.Time) *status.Discovery {
	newest, ok := s.source.Current()
	if !ok {
		newest = s.snapshot
	}
	report := &status.Discovery{
		Service: newest.Service, Updated: newest.Updated.UTC().Truncate(time.Second),
		Stale: newest.Stale, Reason: newest.Reason, Notes: slices.Concat(newest.Notes, s.desired.Notes),
	}
	if newest.Service != "" { // what the user has named does not age
		report.AgeSeconds = max(0, int64(now.Sub(newest.Updated)/time.Second))
	}
	return report
}

// fillResolver adds what the file system says, which is so with or without a daemon. The remedy is for a file that is not
// ours, without one.
func fillResolver(report *status.Report, manager *resolvconf.Manager, c config.Config, keeper *resolvconf.Keeper, remedy string) {
	report.Resolver.File = c.ResolvConf
	inspection, err := manager.Inspect()
	if err != nil {
		report.Problems = append(report.Problems, err.Error())
		return
	}
	report.Resolver.State = string(inspection.State)
	report.Resolver.Owner = string(inspection.Owner)
	report.Resolver.OwnerReasons = inspection.OwnerReasons
	report.Resolver.Search = append(report.Resolver.Search, inspection.File.Search...)
	for _, skip := range slices.Concat(inspection.File.Skipped, inspection.Dropped) {
		report.Resolver.Skipped = append(report.Resolver.Skipped, skip.String())
	}
	if !report.Attached {
		for _, upstream := range inspection.Upstreams {
			report.Resolver.Upstreams = append(report.Resolver.Upstreams, upstream.Addr.String())
		}
		return
	}
	if c.Resolver == config.ResolverTransparent {
		report.Resolver.State = string(c.Resolver)
		if report.Resolver.SteeredAt == nil { // the daemon knows better
			report.Resolver.SteeredAt = texts(plan.LoopbackOf(inspection.File.Nameservers))
		}
	}
	standing := resolvconf.StandingUnsettled
	if keeper != nil {
		standing = keeper.Standing()
		report.Resolver.Events = resolverEvents(keeper.Events())
	}
	judgeResolver(report, inspection, c, standing, remedy)
}

func texts(addresses []netip.Addr) (texts []string) {
	for _, address := range addresses {
		texts = append(texts, address.String())
	}
	return texts
}

// Status reports on this host: what the daemon says if it answers, else what can be seen without it.
func Status(ctx context.Context, c config.Config) (status.Report, error) {
	var report status.Report
	report, err := control.Status(ctx, c)
	if err == nil {
		return report, nil
	}
	var problem, remedy string
	switch {
	case ctx.Err() != nil:
		return status.Report{}, err
	case errors.Is(err, control.ErrNoDaemon) && rundir.Orphan(c) != 0:
		remedy = "run k2s-dnsbpf detach, which finds it, and attach again"
		problem = fmt.Sprintf("the daemon, process %d, can't be asked: its run or state directory is another one or was removed: %s", rundir.Orphan(c), remedy)
	case errors.Is(err, control.ErrNoDaemon):
		remedy = "run k2s-dnsbpf attach again, or detach"
		problem = "the daemon is dead: " + remedy
	case errors.Is(err, control.ErrNotServing):
		remedy = "ask again when it has ended"
		problem = "an attach or detach is at work: " + remedy
	default:
		remedy = "the daemon takes it over again when it goes on; k2s-dnsbpf detach ends that one"
		problem = fmt.Sprintf("%s: see %s, or end it with k2s-dnsbpf detach", err, filepath.Join(c.RunDir, rundir.LogFile))
	}
	report = status.Report{Resolver: status.Resolver{File: c.ResolvConf}}

	journal, err := state.Open(c.StateDir)
	if errors.Is(err, os.ErrPermission) {
		// There is a journal, so this host is attached.
		report.Attached, report.Resolver.State = true, "unknown"
		report.Problems = []string{problem, "the journal is readable by root only: run sudo k2s-dnsbpf status"}
		return report, nil
	}
	if err != nil {
		return status.Report{}, err
	}
	header := journal.Header()
	if len(header.Params) > 0 {
		// The running attachment's paths count, not this command's, into whose slices decoding would write: doctor asks while
		// others read them.
		attached := config.Default()
		if err := json.Unmarshal(header.Params, &attached); err != nil {
			return status.Report{}, fmt.Errorf("journal: settings: %w", err)
		}
		c = attached
	}
	manager, err := resolvconf.New(resolvconf.Options{Path: c.ResolvConf, StateDir: c.StateDir, Journal: journal})
	if err != nil {
		return status.Report{}, err
	}
	report.Attached = host.IsAttached(journal, manager)
	if report.Attached {
		report.Topology, report.Version, report.Kubeconfig = string(c.Topology), header.Version, c.Kubeconfig
		since := header.Since.UTC().Truncate(time.Second)
		report.Since = &since
		zones, err := plan.ConfiguredZones(c)
		if err != nil {
			return status.Report{}, err
		}
		for _, zone := range zones { // what was discovered, the daemon alone knew
			report.Zones = append(report.Zones, status.Zone{Name: zone.Name, Group: "cluster", Source: zone.Source})
		}
		report.Problems = append(report.Problems, problem)
	}
	fillGuardian(&report, c)
	handover.Report(&report, c)
	fillResolver(&report, manager, c, nil, remedy)
	host.ReportDatapath(&report, c, journal)
	slices.Sort(report.Problems)
	return report, nil
}

// fillGuardian adds what a guardian has done where the daemon does not answer.
func fillGuardian(report *status.Report, c config.Config) {
	record, err := guardian.ReadRecord(c)
	if err != nil || record.Restored == nil {
		return
	}
	report.Guardian = &status.Guardian{PID: record.PID, Restored: record.Restored, Outcome: record.Outcome}
	what := "daemon dead"
	if record.Hangs {
		what = "daemon hangs"
	} else {
		report.Guardian.PID = 0 // it has ended
	}
	when := record.Restored.Format(time.RFC3339)
	switch {
	case len(record.Outcome) == 0:
		what += "; the guardian found nothing to restore at " + when
	case strings.Contains(record.Outcome[0], string(resolvconf.Restored)):
		what += "; resolver restored by the guardian at " + when
	default:
		what += "; the guardian looked at the resolver at " + when + ": " + strings.Join(record.Outcome, "; ")
	}
	report.Problems = append(report.Problems, what)
}
