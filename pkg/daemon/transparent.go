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
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
)

var (
	// ErrNoLoopbackResolver is returned by a transparent attach to a host whose programs ask no server on loopback.
	ErrNoLoopbackResolver = errors.New("no resolver on loopback is named")

	errNotSteered = errors.New("the host's resolver itself answers: something redirects queries before they leave through lo")
)

// loopbackResolvers are the servers that programs which read the file ask on this host itself, in the file's order. The
// unspecified address is one: what is sent there goes to loopback (ip(7)).
func loopbackResolvers(file resolvconf.File) (resolvers []netip.Addr) {
	for _, address := range file.Nameservers {
		address = address.Unmap()
		switch {
		case address.IsUnspecified() && address.Is4():
			address = loopback4
		case address.IsUnspecified():
			address = loopback6
		}
		if address.IsLoopback() && !slices.Contains(resolvers, address) {
			resolvers = append(resolvers, address)
		}
	}
	return resolvers
}

// findResolvers decides whose queries a transparent attach steers.
func (d *Daemon) findResolvers() error {
	d.resolvers = loopbackResolvers(d.inspection.File)
	if len(d.resolvers) > 0 {
		return nil
	}
	return fmt.Errorf("%s: %w: its servers are %v: use --resolver takeover, which puts one there",
		d.config.ResolvConf, ErrNoLoopbackResolver, d.inspection.File.Nameservers)
}

// isTransparent is a setting that can't change while attached.
func (d *Daemon) isTransparent() bool { return d.config.Resolver == config.ResolverTransparent }

// followResolver has the kernel steer queries to the host's resolver where it is now. A file that names none, half
// written perhaps, changes nothing.
func (d *Daemon) followResolver() {
	if !d.isTransparent() {
		return
	}
	inspection, err := d.resolver.Inspect()
	found := loopbackResolvers(inspection.File)
	d.mu.Lock()
	switch {
	case err != nil:
		d.problems["transparent"] = err.Error()
	case len(found) == 0:
		d.problems["transparent"] = fmt.Sprintf("%s: %s any more: programs ask %v, which is not steered: detach, and attach with --resolver takeover",
			d.config.ResolvConf, ErrNoLoopbackResolver, inspection.File.Nameservers)
	default:
		delete(d.problems, "transparent")
		if !slices.Equal(found, d.resolvers) {
			d.log.Info("the host's resolver has moved", zap.Stringers("from", d.resolvers), zap.Stringers("to", found))
			d.resolvers = found
		}
	}
	// Also if it moved before, and could not be followed then.
	same := slices.Equal(d.resolvers, d.network.resolvers)
	d.mu.Unlock()
	if !same {
		d.reroute()
	}
}

// upstreams are the servers that the forwarder asks. In transparent mode that is the host's resolver, wherever it is
// now: it does not ask us, and it knows which names go where. The caller holds d.mu or is alone.
func (d *Daemon) upstreams() []netip.AddrPort {
	if !d.isTransparent() || len(d.config.Upstreams) > 0 {
		return d.routing.upstreams
	}
	return onDNSPort(d.resolvers)
}

func onDNSPort(addresses []netip.Addr) []netip.AddrPort {
	servers := make([]netip.AddrPort, 0, len(addresses))
	for _, address := range addresses {
		servers = append(servers, netip.AddrPortFrom(address, config.DNSPort))
	}
	return servers
}

// testTransparent asks each of the host's resolvers that an endpoint can be steered to for. The answer must not be the
// resolver's own.
func (d *Daemon) testTransparent(ctx context.Context, n network) error {
	targets := backends(n.endpoints)
	tested := false
	for _, server := range onDNSPort(n.resolvers) {
		sameFamily := func(b datapath.Backend) bool { return b.Address.Addr().Is4() == server.Addr().Is4() }
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
			n.resolvers)
	}
	return nil
}

// testSteered wants an answer from an address, and an endpoint's reply to have been delivered meanwhile.
func (d *Daemon) testSteered(ctx context.Context, server netip.AddrPort, n network) error {
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
