//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"
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

// Status reports on this host: the daemon's report if it answers, otherwise what can be seen without it.
func Status(ctx context.Context, c config.Config) (status.Report, error) {
	var report status.Report
	report, err := control.Status(ctx, c)
	if err == nil {
		return report, nil
	}
	if ctx.Err() != nil {
		return status.Report{}, err
	}
	return withoutDaemon(c, err)
}

// withoutDaemon reports what can be seen if the daemon can't be asked, for whatever reason.
func withoutDaemon(c config.Config, silence error) (status.Report, error) {
	problem, remedy := explainSilence(c, silence)
	report := status.Report{Resolver: status.Resolver{File: c.ResolvConf}}
	journal, err := state.Open(c.StateDir)
	if errors.Is(err, os.ErrPermission) {
		// There is a journal, so this host is attached.
		report.Attached, report.Resolver.State = true, "unknown"
		report.Problems = []string{problem, "the journal is readable by root only: run sudo k2s-dnsbpf status"}
		return report, nil
	}
	if errors.Is(err, state.ErrNewer) {
		report.Attached, report.Resolver.State = true, "unknown"
		report.Problems = []string{problem, err.Error()}
		return report, nil
	}
	if err != nil {
		return status.Report{}, err
	}
	header := journal.Header()
	if len(header.Params) > 0 {
		// The running attachment's paths count, not this command's.
		if c, err = config.FromJournal(header.Params); err != nil {
			return status.Report{}, err
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
		zones, err := plan.ConfiguredZones(c)
		if err != nil {
			return status.Report{}, err
		}
		for _, zone := range zones { // only the daemon knew what was discovered
			report.Zones = append(report.Zones, status.Zone{Name: zone.Name, Group: "cluster", Source: zone.Source})
		}
		report.Problems = append(report.Problems, problem)
	}
	fillGuardian(&report, c)
	handover.Report(&report, c)
	host.ReportResolver(&report, manager, c, nil, remedy)
	host.ReportDatapath(&report, c, journal)
	slices.Sort(report.Problems)
	return report, nil
}

// explainSilence says why a daemon does not answer, and what to do.
func explainSilence(c config.Config, silence error) (problem, remedy string) {
	switch {
	case errors.Is(silence, control.ErrNoDaemon):
		remedy = "run k2s-dnsbpf attach again, or detach"
		problem = "the daemon is dead: " + remedy
		if pid := rundir.Orphan(c); pid != 0 {
			remedy = "run k2s-dnsbpf detach, which finds it, and attach again"
			problem = fmt.Sprintf("the daemon, process %d, can't be asked: its run or state directory is a different one or has been removed: %s", pid, remedy)
		}
	case errors.Is(silence, control.ErrNotServing):
		remedy = "ask again when it has finished"
		problem = "an attach or detach is in progress: " + remedy
	default:
		remedy = "the daemon takes it over again when it continues; k2s-dnsbpf detach ends the daemon"
		problem = fmt.Sprintf("%s: see %s, or end it with k2s-dnsbpf detach", silence, filepath.Join(c.RunDir, rundir.LogFile))
	}
	return problem, remedy
}

// fillGuardian adds what a guardian has done if the daemon does not answer.
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

// AttachedPaths returns c with the directories and the resolver file of the attachment that the journal in c's state
// directory records, if there is one and it can be read.
func AttachedPaths(c config.Config) config.Config {
	journal, err := state.Open(c.StateDir)
	if err != nil || journal.Empty() {
		return c
	}
	attached, err := config.FromJournal(journal.Header().Params)
	if err != nil {
		return c
	}
	c.RunDir, c.BPFFS, c.ResolvConf = attached.RunDir, attached.BPFFS, attached.ResolvConf
	return c
}
