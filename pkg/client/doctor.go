//go:build linux

package client

import (
	"context"
	"crypto/rand"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/diagnose"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/forwarder"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/host"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// Doctor examines this host, attached or not. It changes nothing, works for every user as far as permissions allow, and
// takes a few seconds at most.
func Doctor(ctx context.Context, c config.Config) diagnose.Examination {
	if journal, err := state.Open(c.StateDir); err == nil && len(journal.Header().Params) > 0 {
		// The settings of the attachment count, as in Status. If they can't be read, the command's do.
		if attached, err := config.FromJournal(journal.Header().Params); err == nil {
			c = attached
		}
	}
	host := diagnose.Host{
		ResolvConf: c.ResolvConf, PodFile: filepath.Join(c.StateDir, resolvconf.KubeletFile),
		Servers: func(content []byte) []netip.Addr { return resolvconf.Parse(content).Nameservers },
		Ours:    rundir.IsOurs,
	}
	looks := append(host.Looks(),
		diagnose.Look{Name: "the daemon and the resolver file", Do: func(ctx context.Context) func(*diagnose.Facts) { return lookAtAttachment(ctx, c) }},
		diagnose.Look{Name: "the kernel's settings", Do: func(context.Context) func(*diagnose.Facts) { return lookAtKernel(c) }},
		diagnose.Look{Name: "CoreDNS", Do: func(ctx context.Context) func(*diagnose.Facts) { return probeEndpoints(ctx, c) }},
	)
	return diagnose.Examine(diagnose.Gather(ctx, looks))
}

func lookAtKernel(c config.Config) func(*diagnose.Facts) {
	sysctls := make(map[string]string)
	for _, name := range plan.LoopbackSysctls() {
		if value, err := netdev.Sysctl(name); err == nil {
			sysctls[name] = value
		}
	}
	var lacks []string
	if os.Geteuid() == 0 {
		for _, err := range host.Lacks(c) {
			lacks = append(lacks, err.Error())
		}
	}
	return func(f *diagnose.Facts) { f.System.Sysctls, f.System.Lacks = sysctls, lacks }
}

func lookAtAttachment(ctx context.Context, c config.Config) func(*diagnose.Facts) {
	report, err := Status(ctx, c)
	attachment := diagnose.Attachment{
		Attached: report.Attached, Alive: report.PID != 0, PID: report.PID, Problems: report.Problems, Loop: report.Forwarder.Loop,
		Takeover: c.Resolver == config.ResolverTakeover, BPF: c.BPF,
	}
	for _, address := range report.Forwarder.Listen {
		if parsed, err := netip.ParseAddrPort(address); err == nil {
			attachment.Served = append(attachment.Served, parsed)
		}
	}
	if report.Shared != nil {
		attachment.KubeSwitch, _ = netip.ParseAddrPort(report.Shared.Address)
	}
	var unseen []string
	if len(attachment.Served) == 0 {
		facts, err := host.LookAtListeners(c)
		if err != nil {
			unseen = append(unseen, err.Error())
		}
		if desired, err := plan.Make(plan.Input{Settings: c, Facts: facts}); err == nil {
			attachment.Served = desired.Listen
		}
		if address := plan.KubeSwitchAddress(c); address.IsValid() {
			attachment.KubeSwitch = netip.AddrPortFrom(address, config.DNSPort)
		}
	}
	journal, resolver := lookAtResolver(c, report, attachment.Served)
	if err != nil && journal.Err == "" {
		unseen = append(unseen, err.Error())
	}
	return func(f *diagnose.Facts) {
		f.Attachment, f.Journal, f.Resolver = attachment, journal, resolver
		f.Unseen = append(f.Unseen, unseen...)
	}
}

// lookAtResolver inspects the file and the journal. If this user may not read the journal, the report has to suffice.
func lookAtResolver(c config.Config, report status.Report, served []netip.AddrPort) (diagnose.JournalFacts, diagnose.ResolverFile) {
	facts := diagnose.JournalFacts{Path: filepath.Join(c.StateDir, state.FileName)}
	file := diagnose.ResolverFile{Path: c.ResolvConf, Note: report.Resolver.Note}
	parked := filepath.Join(filepath.Dir(c.ResolvConf), resolvconf.ParkedName)
	if _, err := os.Lstat(parked); err == nil {
		file.Parked = parked
	}
	journal, err := state.Open(c.StateDir)
	if err != nil {
		facts.Denied = errors.Is(err, os.ErrPermission)
		if !facts.Denied {
			facts.Err = err.Error()
		}
		file.State, file.Owner, file.Reasons = report.Resolver.State, report.Resolver.Owner, report.Resolver.OwnerReasons
		return facts, file
	}
	facts.Changes, facts.Knows = len(journal.Changes()), slices.Contains(resolvconf.RecordedPaths(journal), c.ResolvConf)
	if reason := journal.Recovered(); reason != nil {
		facts.Repair = reason.Error()
	}
	own := make([]netip.Addr, 0, len(served))
	for _, address := range served {
		own = append(own, address.Addr())
	}
	manager, err := resolvconf.New(resolvconf.Options{Path: c.ResolvConf, StateDir: c.StateDir, Journal: journal, Listen: own})
	if err != nil {
		file.Refusals = []string{err.Error()}
		return facts, file
	}
	inspection, err := manager.Inspect()
	if err != nil {
		file.Refusals = []string{err.Error()}
		return facts, file
	}
	file.Type, file.State = string(inspection.Type), string(inspection.State)
	file.Owner, file.Reasons = string(inspection.Owner), inspection.OwnerReasons
	file.Servers = inspection.File.Nameservers
	if os.Geteuid() == 0 { // others may not change anything
		file.Refusals = refusals(c, inspection)
	}
	return facts, file
}

// refusals are those that this configuration does not override.
func refusals(c config.Config, inspection resolvconf.Inspection) (out []string) {
	t := host.TakeOver(c)
	for _, refusal := range inspection.Refusals {
		if t.Refused(resolvconf.Inspection{Refusals: []error{refusal}}) != nil {
			out = append(out, refusal.Error())
		}
	}
	return out
}

// probeEndpoints asks each endpoint for a name that only our own forwarder can answer: an endpoint that answers it has
// asked us.
func probeEndpoints(ctx context.Context, c config.Config) func(*diagnose.Facts) {
	report, err := Status(ctx, c)
	if err != nil || report.PID == 0 || len(report.Forwarder.Listen) == 0 {
		return func(*diagnose.Facts) {}
	}
	id := askProbe(ctx, report.Forwarder.Listen[0])
	if id == "" {
		return func(f *diagnose.Facts) {
			f.Unseen = append(f.Unseen, "the forwarder does not answer at "+report.Forwarder.Listen[0])
		}
	}
	asked := make([]diagnose.CoreDNS, len(report.Endpoints))
	var group sync.WaitGroup
	for i, endpoint := range report.Endpoints {
		group.Go(func() {
			asked[i] = diagnose.CoreDNS{Endpoint: endpoint.Address, AsksUs: askProbe(ctx, endpoint.Address) == id}
		})
	}
	group.Wait()
	return func(f *diagnose.Facts) { f.CoreDNS = append(f.CoreDNS, asked...) }
}

// probeTimeout leaves time to report a probe's result within the time limit of a look.
const probeTimeout = time.Second

// askProbe asks a server who it is, or whom it forwards to, and returns "" if that is not us.
func askProbe(ctx context.Context, server string) string {
	message := new(dns.Msg)
	message.SetQuestion(rand.Text()+"."+forwarder.ProbeZone, dns.TypeTXT)
	client := dns.Client{Timeout: probeTimeout}
	reply, _, err := client.ExchangeContext(ctx, message, server)
	if err != nil || len(reply.Answer) != 1 {
		return ""
	}
	text, ok := reply.Answer[0].(*dns.TXT)
	if !ok || len(text.Txt) != 1 {
		return ""
	}
	return text.Txt[0]
}
