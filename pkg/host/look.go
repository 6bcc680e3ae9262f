//go:build linux

package host

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/netdev"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
)

// Looker finds out what this host is. It remembers which networks were behind an interface: what it finds an address of such
// a network behind later, by a default route, is another host that happens to have it. Its methods are for one goroutine at
// a time.
type Looker struct {
	behind []behind
	usual  map[netip.Addr]behind // where each endpoint was last
}

// Look gathers what a plan needs. The caller says who has the port of the KubeSwitch address.
func (l *Looker) Look(c config.Config, inspection resolvconf.Inspection, snapshot cluster.Snapshot) (f plan.Facts, err error) {
	if f, err = LookAtListeners(c); err != nil {
		return f, err
	}
	f.Resolver = resolverFacts(inspection)
	w, err := lookUpWays(c)
	if err != nil {
		return f, err
	}
	f.Ways = l.ways(w, c, f.Resolver, snapshot)
	pods, err := netdev.MatchInterfaces(c.Pods)
	if err != nil {
		return f, err
	}
	for _, i := range pods {
		f.Pods = append(f.Pods, plan.Interface(i))
	}
	if f.KubeSwitch.Interface.Index == 0 && len(f.Pods) == 0 {
		return f, nil
	}
	if k := &f.KubeSwitch; k.Interface.Index != 0 {
		clients := c.Allowed
		if len(clients) == 0 {
			clients = k.Subnets
		}
		k.Not = w.answers(plan.KubeSwitchAddress(c), k.Interface.Index, clients)
	}
	if f.Addresses, err = netdev.Addresses(); err != nil {
		return f, err
	}
	networks, err := netdev.Networks()
	for _, n := range networks {
		f.Networks = append(f.Networks, plan.Network(n))
	}
	return f, err
}

func resolverFacts(inspection resolvconf.Inspection) plan.Resolver {
	r := plan.Resolver{Loopback: plan.LoopbackOf(inspection.File.Nameservers), Search: inspection.File.Search}
	for _, upstream := range inspection.Upstreams {
		r.Upstreams = append(r.Upstreams, upstream.Addr)
	}
	r.Timeout, r.Attempts, r.Rotate = inspection.File.Retries()
	return r
}

// LookAtListeners finds out at which addresses queries can arrive: the part of Look that every user may see. A KubeSwitch
// address that is gone is looked for again with every change of interfaces.
func LookAtListeners(c config.Config) (f plan.Facts, err error) {
	_, err = netdev.InterfaceOf(plan.Loopback6)
	if f.Loopback6 = err == nil; err != nil && !errors.Is(err, netdev.ErrNoInterface) {
		return f, err
	}
	address := plan.KubeSwitchAddress(c)
	if !address.IsValid() {
		return f, nil
	}
	found, err := netdev.InterfaceOf(address)
	if errors.Is(err, netdev.ErrNoInterface) {
		return f, nil
	}
	if err != nil {
		return f, err
	}
	f.KubeSwitch.Interface = plan.Interface(found)
	prefixes, err := netdev.PrefixesOf(found.Name)
	for _, prefix := range prefixes {
		f.KubeSwitch.Subnets = append(f.KubeSwitch.Subnets, prefix.Masked())
	}
	return f, err
}

// ways is what decides, beside the routes, whether the kernel may steer.
type ways struct {
	ipsec netdev.IPsec
	ports netdev.PortRange // of steered queries
}

// lookUpWays needs what only who steers has: CAP_NET_ADMIN.
func lookUpWays(c config.Config) (w ways, err error) {
	if !c.BPF {
		return w, nil
	}
	if w.ipsec, err = netdev.LookUpIPsec(); err != nil {
		return w, err
	}
	w.ports, err = netdev.PortsOutsideEphemeral()
	return w, err
}

// ways finds the way to each endpoint and upstream.
func (l *Looker) ways(w ways, c config.Config, r plan.Resolver, snapshot cluster.Snapshot) map[netip.Addr]plan.Way {
	found := make(map[netip.Addr]plan.Way)
	outside := make(map[string]bool) // the interfaces towards upstreams
	for _, upstream := range slices.Concat(c.Upstreams, plan.OnDNSPort(r.Upstreams)) {
		way, _ := w.to(upstream)
		found[upstream.Addr()], outside[way.Interface] = way, true
	}
	if l.usual == nil {
		l.usual = make(map[netip.Addr]behind)
	}
	node := nodeName(c)
	for _, e := range snapshot.Endpoints {
		way, network := w.to(e.Address)
		way.Astray = l.astray(e, way, network, outside, node)
		found[e.Address.Addr()] = way
	}
	return found
}

func nodeName(c config.Config) string {
	name, _ := os.Hostname() // without a name no endpoint is on this node
	return cmp.Or(c.NodeName, strings.ToLower(name))
}

// behind is a network that endpoints were found in, and the interface that it was behind.
type behind struct {
	network netip.Prefix
	iface   string
}

// defaultBits bounds the length of a default route: a VPN may have one in two halves.
const defaultBits = 1

// astray says why an endpoint is not to be asked where its route leads: by the way to everywhere, though its network was
// behind an interface of this host before, or it runs on this host. Where the route was such a one from the beginning, as
// in a cluster whose pods are behind the default gateway altogether, it is fine.
func (l *Looker) astray(e cluster.Endpoint, way plan.Way, network netip.Prefix, outside map[string]bool, node string) string {
	if way.Ifindex == 0 {
		return ""
	}
	address, now := e.Address.Addr().WithZone(""), behind{network, way.Interface}
	isDefault := network.Bits() <= defaultBits
	if isDefault && e.Node != "" && e.Node == node {
		return fmt.Sprintf("it runs on this host, and only the default route over %s leads there: the interface to its network is gone", way.Interface)
	}
	if (isDefault || outside[way.Interface]) && l.usual[address] != now {
		for _, b := range l.behind {
			if b.network.Contains(address) && b.network.Bits() > network.Bits() && (isDefault || b.iface != way.Interface) {
				return fmt.Sprintf("its network %s is behind %s no more: only the default route over %s leads there", b.network, b.iface, way.Interface)
			}
		}
	}
	l.usual[address] = now
	if !isDefault && !slices.Contains(l.behind, now) {
		l.behind = append(l.behind, now)
	}
	return ""
}

// to finds the way to a server, and the network that its route is to.
func (w ways) to(server netip.AddrPort) (way plan.Way, network netip.Prefix) {
	route, err := netdev.RouteTo(server.Addr())
	if err != nil {
		return plan.Way{Not: err.Error()}, network
	}
	way = plan.Way{Interface: route.Interface, Ifindex: route.Ifindex, Source: route.Source, Group: route.Group}
	switch {
	case route.Local:
		way.Not = "on this host"
	case !route.Ethernet:
		way.Not = route.Interface + " has no Ethernet header"
	case route.Bypass != "":
		way.Not = route.Bypass
	default:
		query := netdev.Flow{
			From: plan.Single(route.Source), To: plan.Single(server.Addr()), Ifindex: route.Ifindex,
			FromPorts: w.ports, ToPorts: netdev.PortRange{First: server.Port(), Last: server.Port()},
		}
		way.Not = cmp.Or(w.ipsec.Sends(query), w.ipsec.Accepts(query.Reverse()))
	}
	return way, route.Network
}

// answers says why what the kernel sends from an address back to clients would go past what the stack does with it; empty if
// it does not.
func (w ways) answers(from netip.Addr, ifindex int, clients []netip.Prefix) (not string) {
	dns := netdev.PortRange{First: config.DNSPort, Last: config.DNSPort}
	for _, prefix := range clients {
		if prefix.Addr().Is4() != from.Is4() {
			continue
		}
		reply := netdev.Flow{
			From: plan.Single(from), To: prefix, Ifindex: ifindex,
			FromPorts: dns, ToPorts: netdev.PortRange{First: 1, Last: 1<<16 - 1},
		}
		if not = cmp.Or(w.ipsec.Sends(reply), w.ipsec.Accepts(reply.Reverse())); not != "" {
			return fmt.Sprintf("%s: %s", prefix, not)
		}
	}
	return ""
}
