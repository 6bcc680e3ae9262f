//go:build linux

package host

import (
	"errors"
	"fmt"
	"os"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// ReportDatapath adds what is pinned or attached as a filter, which is so with or without a daemon.
func ReportDatapath(report *status.Report, c config.Config, journal *state.Journal) {
	if !c.BPF {
		return
	}
	programs, unseen, err := attachedPrograms(c)
	report.Datapath.Unseen = unseen
	if errors.Is(err, os.ErrPermission) {
		// Not everybody may look into the kernel; the daemon, where it answers, has looked for us.
		report.Datapath.Unseen = fmt.Sprintf("programs can't be seen: %s: ask as root", err)
		return
	}
	if err != nil {
		report.Problems = append(report.Problems, err.Error())
		return
	}
	fillFilters(report, journal)
	if len(programs)+len(report.Datapath.Programs) == 0 {
		return
	}
	if pinned, err := datapath.PinnedPrograms(c.BPFFS); err == nil && len(pinned) > 0 {
		report.Datapath.Pinned = c.BPFFS
	}
	if !report.Attached {
		report.Problems = append(report.Problems, "programs of an earlier attachment are still attached: run k2s-dnsbpf detach")
	}
	for _, program := range programs {
		if datapath.Program(program.Name) == datapath.IngressFilter {
			if mode, err := netdev.XDPMode(program.Interface); err == nil && mode != "" {
				program.Attach += "/" + mode
			}
		}
		report.Datapath.Programs = append(report.Datapath.Programs, status.Program{
			Name: program.Name, Attach: program.Attach, Interface: program.Interface, KernelID: program.KernelID,
		})
		if program.Ifindex == 0 {
			report.Problems = append(report.Problems, program.Name+" is no longer attached: interface "+program.Interface+" is gone")
		}
	}
	if report.Datapath.Pinned != "" { // else who attached them may know the counters
		fillCounters(report, c)
	}
}

func fillCounters(report *status.Report, c config.Config) {
	counters, err := datapath.PinnedCounters(c.BPFFS)
	if err != nil {
		report.Problems = append(report.Problems, err.Error())
		return
	}
	report.Counters = make(map[string]status.Counters, len(counters))
	report.Reasons = make(map[string]status.Reasons, len(counters))
	for scope, scopeCounters := range counters {
		report.Counters[scope.String()] = status.Counters{
			Steered: scopeCounters.Steered(), Replied: scopeCounters.ByReason["replied"], Answered: scopeCounters.Answered(), Passed: scopeCounters.Passed(), Refused: scopeCounters.Refused(),
		}
		reasons := make(status.Reasons)
		for reason, count := range scopeCounters.ByReason {
			if count > 0 {
				reasons[reason] = count
			}
		}
		if len(reasons) > 0 {
			report.Reasons[scope.String()] = reasons
		}
	}
}

// attachedPrograms lists what is attached by the kernel's own lists, and what is pinned and was attached to an interface that
// is gone. Who may not see those lists sees the pins, and why they may not be all.
func attachedPrograms(c config.Config) (programs []datapath.AttachedProgram, unseen string, err error) {
	programs, err = datapath.Attached(netdev.XDPProgram)
	if errors.Is(err, os.ErrPermission) {
		unseen = fmt.Sprintf("programs that are not pinned can't be seen: %s", err)
		programs, err = datapath.PinnedPrograms(c.BPFFS)
		return programs, unseen, err
	}
	if err != nil {
		return nil, "", err
	}
	pinned, err := datapath.PinnedPrograms(c.BPFFS)
	for _, p := range pinned {
		if p.Ifindex == 0 {
			programs = append(programs, p)
		}
	}
	return programs, "", err
}

// fillFilters adds the programs that the journal says are attached as filters, as the kernel has them.
func fillFilters(report *status.Report, journal *state.Journal) {
	for _, change := range journal.Changes() {
		if change.Kind != changeFilter {
			continue
		}
		data, err := recorded[filterChange](change)
		if err != nil {
			report.Problems = append(report.Problems, err.Error())
			continue
		}
		id, ifname, err := netdev.FilterProgram(data.Filter)
		switch {
		case err != nil:
			report.Problems = append(report.Problems, err.Error())
			continue
		case ifname == "":
			report.Problems = append(report.Problems, change.Name+" is no longer attached: the interface is gone")
			continue
		case id == 0:
			remedy := "run k2s-dnsbpf detach and attach again"
			if report.PID == 0 {
				remedy = "run k2s-dnsbpf attach again"
			}
			report.Problems = append(report.Problems, change.Name+" is no longer attached: somebody removed the filter: "+remedy)
			continue
		}
		hook := "clsact/ingress"
		if data.Filter.Egress {
			hook = "clsact/egress"
		}
		report.Datapath.Programs = append(report.Datapath.Programs, status.Program{
			Name: data.Filter.Name, Attach: hook, Interface: ifname, KernelID: id,
		})
	}
}
