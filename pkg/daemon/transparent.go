//go:build linux

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
)

var (
	// ErrNoLoopbackResolver is returned by a transparent attach if the host's programs ask no server on loopback.
	ErrNoLoopbackResolver = errors.New("no resolver on loopback is named")

	errNotSteered = errors.New("the host's resolver itself answers: something redirects queries before they leave through lo")
)

// findResolvers decides whose queries a transparent attach steers.
func (d *Daemon) findResolvers() error {
	file := d.now.inspection.File
	d.now.resolvers = plan.LoopbackOf(file.Nameservers)
	if len(d.now.resolvers) > 0 {
		return nil
	}
	return fmt.Errorf("%s: %w: its servers are %v: use --resolver takeover, which puts one there",
		d.now.config.ResolvConf, ErrNoLoopbackResolver, file.Nameservers)
}

// followResolver makes the kernel steer queries to the host's resolver at its current address. A file that names none, perhaps half
// written, changes nothing.
func (d *Daemon) followResolver() {
	if !plan.IsTransparent(d.now.config) {
		return
	}
	inspection, err := d.resolver.Inspect()
	found := plan.LoopbackOf(inspection.File.Nameservers)
	switch {
	case err != nil:
		d.note(plan.ProblemTransparent, err.Error())
	case len(found) == 0:
		d.note(plan.ProblemTransparent, fmt.Sprintf("%s: %s any more: programs ask %v, which is not steered: detach, and attach with --resolver takeover",
			d.now.config.ResolvConf, ErrNoLoopbackResolver, inspection.File.Nameservers))
	default:
		d.note(plan.ProblemTransparent, "")
		if !slices.Equal(found, d.now.resolvers) {
			d.log.Info("the host's resolver has moved", zap.Stringers("from", d.now.resolvers), zap.Stringers("to", found))
			next := d.now.clone()
			next.resolvers = found
			d.update(next)
		}
	}
}

// testTransparent asks each of the host's resolvers for which there is an endpoint to steer to. The answer must not be the
// resolver's own.
func (d *Daemon) testTransparent(ctx context.Context, n plan.Desired) error {
	targets := n.Kernel.Backends
	tested := false
	for _, server := range plan.OnDNSPort(n.SteeredAt) {
		sameFamily := func(b plan.Backend) bool { return b.Address.Addr().Is4() == server.Addr().Is4() }
		if !slices.ContainsFunc(targets, sameFamily) {
			continue
		}
		if err := d.testSteered(ctx, server, n); err != nil {
			return err
		}
		tested = true
	}
	if !tested {
		return fmt.Errorf("self-test: no endpoint can be steered to from %v: attach with one of the same address family, behind an interface with an Ethernet header, or with --resolver takeover",
			n.SteeredAt)
	}
	return nil
}

// testSteered requires an answer from an address, and that an endpoint's reply was delivered meanwhile.
func (d *Daemon) testSteered(ctx context.Context, server netip.AddrPort, n plan.Desired) error {
	before, err := d.datapath.Counters()
	if err != nil {
		return err
	}
	if err := d.awaitAnswer(ctx, server, n); err != nil {
		return err
	}
	after, err := d.datapath.Counters()
	if err != nil {
		return err
	}
	const scope, reason = datapath.ScopeTransparent, "replied"
	if after[scope].ByReason[reason] == before[scope].ByReason[reason] {
		return fmt.Errorf("self-test: %s: %w: look for a rule of nftables or iptables for port %d, or use --resolver takeover",
			server, errNotSteered, config.DNSPort)
	}
	return nil
}
