//go:build linux

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// controlTimeout bounds a request to the daemon: one that is stopped must not hang its asker.
const controlTimeout = time.Second

// listenControl serves the report on a socket that every user may read: it holds no secret and takes no order.
func (d *Daemon) listenControl() (*http.Server, error) {
	path := filepath.Join(d.config.RunDir, controlFile)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove stale control socket: %w", err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on control socket: %w", err)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(fmt.Errorf("open control socket to all users: %w", err), listener.Close())
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(d.report()); err != nil {
			d.log.Debug("status not sent", zap.Error(err))
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: controlTimeout}
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			d.log.Error("control socket failed", zap.Error(err))
		}
	}()
	return server, nil
}

func (d *Daemon) report() status.Report {
	d.mu.Lock()
	defer d.mu.Unlock()
	since := d.started.UTC().Truncate(time.Second)
	report := status.Report{
		Attached:   true,
		Topology:   string(d.config.Topology),
		Since:      &since,
		Version:    d.version,
		PID:        os.Getpid(),
		Kubeconfig: d.kubeconfig,
		Discovery:  &status.Discovery{Updated: d.snapshot.Updated, Stale: d.snapshot.Stale, Reason: d.snapshot.Reason},
	}
	for _, about := range []string{"resolver", "endpoints"} {
		if problem, ok := d.problems[about]; ok {
			report.Problems = append(report.Problems, problem)
		}
	}
	if d.snapshot.Stale {
		report.Problems = append(report.Problems, "endpoints can't be confirmed: "+d.snapshot.Reason)
	}
	report.Counters = map[string]status.Counters{}
	report.Datapath.Programs = []status.Program{}
	report.Resolver.Upstreams = make([]string, 0, len(d.upstreams))
	for _, upstream := range d.upstreams {
		report.Resolver.Upstreams = append(report.Resolver.Upstreams, upstream.String())
	}
	for _, zone := range d.zones {
		report.Zones = append(report.Zones, status.Zone{Name: zone, Group: "cluster"})
	}
	stats := d.forwarder.Stats()
	report.Forwarder = status.Forwarder{Queries: stats.UDPQueries + stats.TCPQueries, Failures: stats.Failures}
	for _, address := range d.listen {
		report.Forwarder.Listen = append(report.Forwarder.Listen, address.String())
	}
	for _, e := range d.endpoints {
		// Asked by the forwarder only, an endpoint's health is what that saw; the kernel's steering is not probed yet.
		healthy := true
		for _, server := range stats.Upstreams {
			if server.Addr == e.Address {
				healthy = server.Healthy
			}
		}
		entry := status.Endpoint{Address: e.Address.String(), Healthy: healthy, Source: e.Source, Note: e.note}
		if e.steerable() {
			entry.Interface = e.route.Interface
		}
		report.Endpoints = append(report.Endpoints, entry)
	}
	fillResolver(&report, d.resolver, d.config)
	fillDatapath(&report, d.config)
	report.Healthy = len(report.Problems) == 0
	return report
}

// fillResolver adds what the file system says, which is so with or without a daemon.
func fillResolver(report *status.Report, manager *resolvconf.Manager, c config.Config) {
	report.Resolver.File, report.Resolver.Search = c.ResolvConf, []string{}
	inspection, err := manager.Inspect()
	if err != nil {
		report.Problems = append(report.Problems, err.Error())
		return
	}
	report.Resolver.State = string(inspection.State)
	report.Resolver.Owner = string(inspection.Owner)
	report.Resolver.Search = append(report.Resolver.Search, inspection.File.Search...)
	if !report.Attached {
		for _, upstream := range inspection.Upstreams {
			report.Resolver.Upstreams = append(report.Resolver.Upstreams, upstream.Addr.String())
		}
		return
	}
	if c.Resolver == config.ResolverTakeover && inspection.State != resolvconf.StateOurs {
		report.Problems = append(report.Problems,
			fmt.Sprintf("%s is %s: programs do not ask k2s-dnsbpf: run k2s-dnsbpf detach and attach again", c.ResolvConf, inspection.State))
	}
}

// fillDatapath adds what is pinned, which is so with or without a daemon.
func fillDatapath(report *status.Report, c config.Config) {
	if !c.BPF {
		return
	}
	programs, err := datapath.PinnedPrograms(c.BPFFS)
	if err != nil {
		report.Problems = append(report.Problems, err.Error())
		return
	}
	if len(programs) == 0 {
		return
	}
	report.Datapath.Pinned = c.BPFFS
	for _, program := range programs {
		report.Datapath.Programs = append(report.Datapath.Programs, status.Program{
			Name: program.Name, Attach: program.Attach, Interface: program.Interface, KernelID: program.KernelID,
		})
		if program.Ifindex == 0 {
			report.Problems = append(report.Problems, program.Name+" is no longer attached: interface "+program.Interface+" is gone")
		}
	}
	counters, err := datapath.PinnedCounters(c.BPFFS)
	if err != nil {
		report.Problems = append(report.Problems, err.Error())
		return
	}
	report.Counters = make(map[string]status.Counters, len(counters))
	report.Reasons = make(map[string]status.Reasons, len(counters))
	for scope, scopeCounters := range counters {
		report.Counters[scope.String()] = status.Counters{Steered: scopeCounters.Steered(), Passed: scopeCounters.Passed()}
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

// Status reports on this host: what the daemon says if it answers, else what can be seen without it.
func Status(ctx context.Context, c config.Config) (status.Report, error) {
	report, err := askDaemon(ctx, filepath.Join(c.RunDir, controlFile))
	if err == nil {
		return report, nil
	}
	problem := "the daemon does not answer: what follows is what can be seen without it"
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) { // killed, it leaves its socket behind
		problem = "the daemon is dead: run k2s-dnsbpf detach, or attach again"
	}
	report = status.Report{Zones: []status.Zone{}, Endpoints: []status.Endpoint{}}
	report.Resolver.File, report.Resolver.Upstreams, report.Resolver.Search = c.ResolvConf, []string{}, []string{}
	report.Counters = map[string]status.Counters{}
	report.Datapath.Programs = []status.Program{}
	report.Forwarder.Listen = []string{}

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
	report.Attached = !journal.Empty()
	if report.Attached {
		report.Topology, report.Version = string(c.Topology), header.Version
		since := header.Since.UTC().Truncate(time.Second)
		report.Since = &since
		for _, zone := range c.Zones {
			report.Zones = append(report.Zones, status.Zone{Name: zone, Group: "cluster"})
		}
		report.Problems = append(report.Problems, problem)
	}
	fillResolver(&report, manager, c)
	fillDatapath(&report, c)
	slices.Sort(report.Problems)
	return report, nil
}

func askDaemon(ctx context.Context, socket string) (report status.Report, err error) {
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://k2s-dnsbpf/status", nil)
	if err != nil {
		return report, err
	}
	response, err := client.Do(request)
	if err != nil {
		return report, fmt.Errorf("ask the daemon: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return report, fmt.Errorf("ask the daemon: %s", response.Status)
	}
	if err := json.NewDecoder(response.Body).Decode(&report); err != nil {
		return report, fmt.Errorf("ask the daemon: %w", err)
	}
	return report, nil
}
