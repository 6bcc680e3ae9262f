//go:build linux

package host

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// ReportResolver adds what the file system says, which is so with or without a daemon. The remedy is for a file that is not
// ours, without one.
func ReportResolver(report *status.Report, manager *resolvconf.Manager, c config.Config, keeper *resolvconf.Keeper, remedy string) {
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

func resolverEvents(events []resolvconf.Event) []status.ResolverEvent {
	out := make([]status.ResolverEvent, 0, len(events))
	for _, e := range events {
		event := status.ResolverEvent{Time: e.Time.UTC().Truncate(time.Millisecond), What: e.What, By: e.By, Action: e.Action, Count: e.Count}
		if e.Count > 1 {
			last := e.Last.UTC().Truncate(time.Millisecond)
			event.Last = &last
		}
		out = append(out, event)
	}
	return out
}

// judgeResolver says what it means that the file is not ours. The host's programs then ask others, who know nothing of
// the cluster.
func judgeResolver(report *status.Report, inspection resolvconf.Inspection, c config.Config, standing resolvconf.Standing, remedy string) {
	if c.Resolver != config.ResolverTakeover {
		return
	}
	problem := func(remedy string) {
		report.Problems = append(report.Problems,
			fmt.Sprintf("%s is %s: programs do not ask k2s-dnsbpf: %s", c.ResolvConf, report.Resolver.State, remedy))
	}
	covered := inspection.Type == resolvconf.TypeBindMount && inspection.State != resolvconf.StateOurs
	switch {
	case standing == resolvconf.StandingContended:
		report.Resolver.State = string(resolvconf.StandingContended)
		problem("others keep rewriting it: it is taken over again once they are quiet: stop them, or attach with --on-foreign-change yield")
	case covered:
		report.Resolver.State = string(resolvconf.StateForeign)
		problem("a mount covers it: unmount it")
	case inspection.State == resolvconf.StateOurs:
	case standing == resolvconf.StandingYielded:
		report.Resolver.Note = "left in place, as onForeignChange says"
	case report.PID != 0:
		problem("it is taken over again as soon as it is complete")
	default:
		problem(remedy)
	}
}

// TakeOver returns the parameters for taking over the resolver file.
func TakeOver(c config.Config) resolvconf.TakeOver {
	return resolvconf.TakeOver{
		Nameservers:    []netip.Addr{plan.Loopback4},
		UpstreamsGiven: len(c.Upstreams) > 0,
		InPlace:        c.InPlace, OverrideImmutable: c.OverrideImmutable,
	}
}
