//go:build linux

package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// report is what there is to say now. Files and the kernel are read without d.mu, so that who asks holds nobody up.
func (d *Daemon) report() status.Report {
	report, c := d.known()
	fillResolver(&report, d.resolver, c, d.keeper, "")
	host.ReportDatapath(&report, c, d.journal)
	report.Healthy = len(report.Problems) == 0
	return report
}

// known is the part of the report that the daemon knows by itself, and the settings by which the rest is found.
func (d *Daemon) known() (status.Report, config.Config) {
	d.mu.Lock()
	defer d.mu.Unlock()
	since := d.started.UTC().Truncate(time.Second)
	report := status.Report{
		Attached:   true,
		Topology:   string(d.config.Topology),
		Since:      &since,
		Version:    d.version,
		PID:        os.Getpid(),
		Kubeconfig: d.routing.kubeconfig,
		Discovery:  d.discoveryReport(time.Now()),
	}
	for _, about := range []string{"resolver", "transparent", "endpoints", "zones", "guard", "kubeswitch"} {
		if problem, ok := d.problems[about]; ok {
			report.Problems = append(report.Problems, problem)
		}
	}
	newest, _ := d.routing.source.Current()
	report.Problems = append(report.Problems, newest.Problems...)
	if report.Discovery.Stale {
		report.Problems = append(report.Problems, fmt.Sprintf("endpoints can't be confirmed, the last good ones are %s old: %s",
			time.Duration(report.Discovery.AgeSeconds)*time.Second, report.Discovery.Reason))
	}
	for _, upstream := range d.upstreams() {
		report.Resolver.Upstreams = append(report.Resolver.Upstreams, upstream.String())
	}
	for _, zone := range d.network.zones {
		report.Zones = append(report.Zones, status.Zone{Name: zone.Name, Group: "cluster", Source: zone.Source})
	}
	stats := d.forwarder.Stats()
	report.Forwarder = status.Forwarder{Queries: stats.UDPQueries + stats.TCPQueries, Failures: stats.Failures, Loops: stats.Loops}
	for _, address := range d.listen {
		report.Forwarder.Listen = append(report.Forwarder.Listen, address.String())
	}
	for _, e := range d.network.endpoints {
		entry := status.Endpoint{Address: e.Address.String(), Healthy: !e.dead, Source: e.Source, Note: e.note}
		if e.steerable() && !e.severed {
			entry.Interface = e.route.Interface
		}
		if e.severed {
			entry.Severed, entry.Note = true, "the kernel's way to it over "+e.route.Interface+" is broken"
		}
		if e.dead {
			entry.Note = strings.TrimPrefix(entry.Note+"; does not answer", "; ")
		}
		report.Endpoints = append(report.Endpoints, entry)
	}
	if len(report.Endpoints) > 0 && !slices.ContainsFunc(report.Endpoints, func(e status.Endpoint) bool { return e.Healthy }) {
		report.Problems = append(report.Problems, "no endpoint answers: check that CoreDNS runs and that this host reaches it")
	}
	report.Problems = append(report.Problems, d.network.severed()...)
	if len(report.Endpoints) == 0 && !report.Discovery.Stale {
		report.Problems = append(report.Problems,
			cmp.Or(report.Discovery.Reason, "no endpoint that the cluster names can be asked")+": cluster names are answered SERVFAIL")
	}
	if d.kubeSwitch.IsValid() && d.network.clients.Index == 0 && !d.sharesKubeSwitch() {
		report.Problems = append(report.Problems, "no interface has the KubeSwitch address "+d.kubeSwitch.String()+": workers are not answered")
	}
	report.Shared = d.shared(d.network)
	report.Discovery.Notes = slices.Concat(report.Discovery.Notes, d.network.notes)
	if d.network.unsteered != "" {
		report.Discovery.Notes = append(report.Discovery.Notes, unsteeredNote(d.network.unsteered))
	}
	fillLoop(&report, stats.LastLoop)
	var problem string
	if report.Guardian, problem = d.guard.report(); problem != "" {
		report.Problems = append(report.Problems, problem)
	}
	report.Resolver.SteeredAt = texts(d.network.resolvers)
	return report, d.config
}

// discoveryReport says where the endpoints and zones are from, and how old the knowledge is. The caller holds d.mu.
func (d *Daemon) discoveryReport(now time.Time) *status.Discovery {
	newest, ok := d.routing.source.Current()
	if !ok {
		newest = d.snapshot
	}
	report := &status.Discovery{
		Service: newest.Service, Updated: newest.Updated.UTC().Truncate(time.Second),
		Stale: newest.Stale, Reason: newest.Reason, Notes: slices.Concat(newest.Notes, d.network.left),
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
			report.Resolver.SteeredAt = texts(loopbackResolvers(inspection.File))
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
	err := askDaemon(ctx, c, controlTimeout, http.MethodGet, "/status", nil, &report)
	if err == nil {
		return report, nil
	}
	var problem, remedy string
	switch {
	case ctx.Err() != nil:
		return status.Report{}, err
	case errors.Is(err, errNoDaemon):
		remedy = "run k2s-dnsbpf attach again, or detach"
		problem = "the daemon is dead: " + remedy
	case errors.Is(err, ErrNotServing):
		remedy = "ask again when it has ended"
		problem = "an attach or detach is at work: " + remedy
	default:
		remedy = "the daemon takes it over again when it goes on; k2s-dnsbpf detach ends that one"
		problem = fmt.Sprintf("%s: see %s, or end it with k2s-dnsbpf detach", err, filepath.Join(c.RunDir, LogFile))
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
		// The running attachment's paths count, not this command's.
		if err := json.Unmarshal(header.Params, &c); err != nil {
			return status.Report{}, fmt.Errorf("journal: settings: %w", err)
		}
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
		zones, err := configuredZones(c)
		if err != nil {
			return status.Report{}, err
		}
		for _, zone := range zones { // what was discovered, the daemon alone knew
			report.Zones = append(report.Zones, status.Zone{Name: zone.Name, Group: "cluster", Source: zone.Source})
		}
		report.Problems = append(report.Problems, problem)
	}
	fillGuardian(&report, c)
	fillLingering(&report, c)
	fillResolver(&report, manager, c, nil, remedy)
	host.ReportDatapath(&report, c, journal)
	slices.Sort(report.Problems)
	return report, nil
}

// fillGuardian adds what a guardian has done where the daemon does not answer.
func fillGuardian(report *status.Report, c config.Config) {
	record, err := readGuardianRecord(c)
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
