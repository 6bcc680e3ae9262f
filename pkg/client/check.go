//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/diagnose"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/safefile"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// checkPatience limits each query and each connection of a check, because a person is waiting.
const checkPatience = 2 * time.Second

// Check finds out where a name leads and whether it can be reached. It works without a daemon and without a cluster, and
// then says what it could not find out. It changes nothing, and takes a few seconds if something does not answer.
func Check(ctx context.Context, c config.Config, target diagnose.Target) (diagnose.CheckReport, error) {
	report, err := Status(ctx, c)
	if err != nil {
		return diagnose.CheckReport{}, err
	}
	checker := diagnose.Checker{
		Cluster:  func() (diagnose.ClusterView, error) { return newClusterView(c, report.Kubeconfig) },
		Route:    describeRoute,
		Dialer:   new(net.Dialer),
		Patience: checkPatience,
	}
	checker.Host = checkedHost(ctx, c, report)
	if checker.Host.InKernel {
		kernel, err := newKernelView(report.Datapath)
		if err != nil {
			checker.KernelProblem = err
		} else {
			defer kernel.prober.Close()
			checker.Kernel = kernel
		}
	}
	return diagnose.Conclude(checker.Gather(ctx, target)), nil
}

// checkedHost combines the status with what programs now read in the resolver file.
func checkedHost(ctx context.Context, c config.Config, report status.Report) diagnose.CheckedHost {
	host := diagnose.CheckedHost{
		Attached: report.Attached,
		Problems: report.Problems,
		File:     report.Resolver.File,
		State:    report.Resolver.State,
		Owner:    report.Resolver.Owner,
		Zones:    c.Zones,
		InKernel: hasQueryProgram(report.Datapath),
	}
	content, err := safefile.ReadFile(ctx, report.Resolver.File, resolvconf.MaxSize)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		host.Problems = append(host.Problems, fmt.Sprintf("%s can't be read: %s", report.Resolver.File, err))
	}
	file := resolvconf.Parse(content)
	host.Servers, host.Search, host.Dots = file.Nameservers, file.Search, ndots(file.Options)
	if report.Attached {
		host.Zones = nil
		for _, zone := range report.Zones {
			host.Zones = append(host.Zones, zone.Name)
		}
	}
	if report.Discovery != nil {
		host.Unconfirmed = report.Discovery.Reason
	}
	if len(host.Zones) == 0 {
		host.Zones = []string{config.DefaultZone}
	}
	var endpoints, severed []string
	for _, e := range report.Endpoints {
		endpoints = append(endpoints, e.Address)
		if e.Severed {
			severed = append(severed, e.Address)
		}
	}
	host.Severed = servers(severed)
	host.Endpoints, host.Upstreams, host.Listen = servers(endpoints), servers(report.Resolver.Upstreams), servers(report.Forwarder.Listen)
	return host
}

// servers parses addresses from a report, with or without a port.
func servers(texts []string) (addresses []netip.AddrPort) {
	for _, text := range texts {
		if address, err := config.ParseServer(text); err == nil {
			addresses = append(addresses, address)
		}
	}
	return addresses
}

// Limits of the option ndots in glibc: RES_MAXNDOTS and its default (resolv.conf(5)).
const (
	maxDots     = 15
	defaultDots = 1
)

// ndots is the number of dots from which a name is first asked for as it is, before the search list is tried.
func ndots(options []string) int {
	dots := defaultDots
	for _, option := range options {
		if text, ok := strings.CutPrefix(option, "ndots:"); ok {
			if n, err := strconv.Atoi(text); err == nil && n >= 0 {
				dots = min(n, maxDots)
			}
		}
	}
	return dots
}

func isQueryProgram(p status.Program) bool { return datapath.Program(p.Name) == datapath.FromHost }

func hasQueryProgram(d status.Datapath) bool { return slices.ContainsFunc(d.Programs, isQueryProgram) }

// kernelView is what diagnose sees of the datapath.
type kernelView struct {
	prober *datapath.Prober
	pinDir string
}

func newKernelView(d status.Datapath) (*kernelView, error) {
	attached := d.Programs[slices.IndexFunc(d.Programs, isQueryProgram)]
	prober, err := datapath.NewProber(d.Pinned, attached.KernelID)
	if errors.Is(err, os.ErrPermission) {
		return nil, errors.New("this requires root")
	}
	if err != nil {
		return nil, err
	}
	return &kernelView{prober: prober, pinDir: d.Pinned}, nil
}

// Verdict implements diagnose.KernelView.
func (k *kernelView) Verdict(from, to netip.AddrPort, message []byte) (diagnose.KernelVerdict, error) {
	verdict, err := k.prober.Query(from, to, message)
	return diagnose.KernelVerdict{
		Reason:   verdict.Reason,
		Steered:  verdict.Reason == datapath.ReasonSteered,
		Fallback: verdict.Reason == datapath.ReasonSteeredFallback,
		Cached:   verdict.Reason == datapath.ReasonCached,
	}, err
}

// SteeredTo implements diagnose.KernelView.
func (k *kernelView) SteeredTo(client netip.AddrPort, id uint16) (netip.AddrPort, bool, error) {
	return datapath.PinnedFlow(k.pinDir, client, id)
}

// clusterView is what diagnose sees of the apiserver.
type clusterView struct{ lookup *discovery.Lookup }

// newClusterView uses the kubeconfig given by the user, or else the daemon's, or else the one that the daemon would find.
func newClusterView(c config.Config, daemons string) (diagnose.ClusterView, error) {
	options := discovery.Options{Kubeconfig: c.Kubeconfig, NodeName: c.NodeName}
	if isFile := daemons != discovery.InCluster && !strings.ContainsRune(daemons, filepath.ListSeparator); c.Kubeconfig == "" && isFile {
		options.Kubeconfig = daemons
	}
	lookup, err := discovery.NewLookup(options)
	if errors.Is(err, discovery.ErrNoCluster) {
		return nil, fmt.Errorf("%w: name one with --kubeconfig", diagnose.ErrNoCluster)
	}
	if err != nil {
		return nil, err
	}
	return clusterView{lookup}, nil
}

// Source implements diagnose.ClusterView.
func (v clusterView) Source() string { return v.lookup.Source }

// Service implements diagnose.ClusterView.
func (v clusterView) Service(ctx context.Context, namespace, name string) (diagnose.Service, error) {
	return viewService(v.lookup.Service(ctx, namespace, name))
}

// ServiceOf implements diagnose.ClusterView.
func (v clusterView) ServiceOf(ctx context.Context, address netip.Addr) (diagnose.Service, error) {
	return viewService(v.lookup.ServiceOf(ctx, address))
}

// ServiceNames implements diagnose.ClusterView.
func (v clusterView) ServiceNames(ctx context.Context, namespace string) ([]string, error) {
	names, err := v.lookup.ServiceNames(ctx, namespace)
	return names, viewError(err)
}

// Node implements diagnose.ClusterView.
func (v clusterView) Node() string { return v.lookup.Node }

// Close implements diagnose.ClusterView.
func (v clusterView) Close() { v.lookup.Close() }

func viewService(s discovery.Service, err error) (diagnose.Service, error) {
	if err != nil {
		return diagnose.Service{}, viewError(err)
	}
	view := diagnose.Service{
		Namespace: s.Namespace, Name: s.Name, ExternalName: s.ExternalName, IPs: s.IPs,
		LocalOnly: s.LocalOnly, Sticky: s.Sticky, Selectorless: s.Selectorless,
	}
	for _, p := range s.Ports {
		view.Ports = append(view.Ports, diagnose.ServicePort(p))
	}
	for _, e := range s.Endpoints {
		view.Endpoints = append(view.Endpoints, diagnose.ServiceEndpoint(e))
	}
	return view, nil
}

// viewError lets diagnose distinguish what does not exist from what can't be asked.
func viewError(err error) error {
	switch {
	case errors.Is(err, discovery.ErrServiceNotFound):
		return fmt.Errorf("%w: %w", diagnose.ErrNoService, err)
	case errors.Is(err, discovery.ErrForbidden), err == nil:
		return err
	}
	return apiserverDown{err}
}

// apiserverDown is an error of the apiserver itself, with its text.
type apiserverDown struct{ error }

// Unwrap lets errors.Is see that the apiserver is down.
func (apiserverDown) Unwrap() error { return diagnose.ErrDown }

// describeRoute says how this host reaches an address.
func describeRoute(address netip.Addr) string {
	route, err := netdev.RouteTo(address)
	switch {
	case errors.Is(err, netdev.ErrNoRoute):
		return "this host has no route to it"
	case err != nil:
		return err.Error()
	case route.Local:
		return "it is this host itself"
	}
	return fmt.Sprintf("its route is over %s from %s", route.Interface, route.Source)
}
