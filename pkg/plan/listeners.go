package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

var (
	// Loopback4 and Loopback6 are the addresses that this host's programs ask.
	Loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	Loopback6 = netip.IPv6Loopback()
)

// IsTransparent reports whether the host's own resolver stays in charge.
func IsTransparent(c config.Config) bool { return c.Resolver == config.ResolverTransparent }

// KubeSwitchAddress returns this host's address on the KubeSwitch, or an invalid one if the settings want none.
func KubeSwitchAddress(c config.Config) netip.Addr {
	switch {
	case c.NoKubeSwitch:
		return netip.Addr{}
	case c.KubeSwitchAddress.IsValid():
		return c.KubeSwitchAddress
	}
	return config.DefaultKubeSwitchAddress
}

// listen returns the addresses that the forwarder serves: the loopback addresses, unless they belong to another resolver, and the
// KubeSwitch address, unless another server has its port.
func (in Input) listen() (listen []netip.AddrPort) {
	if !IsTransparent(in.Settings) {
		listen = append(listen, netip.AddrPortFrom(Loopback4, config.DNSPort))
		if in.Facts.Loopback6 {
			listen = append(listen, netip.AddrPortFrom(Loopback6, config.DNSPort))
		}
	}
	if address := KubeSwitchAddress(in.Settings); address.IsValid() && in.Facts.KubeSwitch.Interface.Index != 0 && in.Facts.KubeSwitch.Holder == "" {
		listen = append(listen, netip.AddrPortFrom(address, config.DNSPort))
	}
	return listen
}

// shared is the KubeSwitch address if another server has its port, or may get it.
func (in Input) shared() *status.Shared {
	f := in.Facts.KubeSwitch
	if f.Interface.Index == 0 || f.Holder == "" {
		return nil
	}
	return &status.Shared{
		Address: netip.AddrPortFrom(KubeSwitchAddress(in.Settings), config.DNSPort).String(), Interface: f.Interface.Name,
		Server: f.Holder, Steered: in.Settings.BPF,
	}
}

// listeners gives each intercepted address its scope.
func (in Input) listeners(d Desired, clusterDNS []netip.Addr) (listeners []Listener) {
	unsteered := in.Facts.KubeSwitch.Not != ""
	for _, address := range d.Listen {
		scope := ScopeKubeSwitch
		if address.Addr().IsLoopback() {
			scope = ScopeHost
		} else if unsteered {
			continue
		}
		listeners = append(listeners, Listener{address, scope})
	}
	if d.Shared != nil && !unsteered {
		listeners = append(listeners, Listener{netip.AddrPortFrom(KubeSwitchAddress(in.Settings), config.DNSPort), ScopeShared})
	}
	for _, address := range OnDNSPort(clusterDNS) {
		listeners = append(listeners, Listener{address, ScopePod})
	}
	for _, address := range OnDNSPort(d.SteeredAt) {
		listeners = append(listeners, Listener{address, ScopeTransparent})
	}
	return listeners
}

// clusterDNS returns the addresses at which queries of Pods are intercepted, with a note on each that is left out.
func (in Input) clusterDNS() (addresses []netip.Addr, notes []string) {
	if len(in.Facts.Pods) == 0 {
		return nil, nil
	}
	wanted := in.Settings.ClusterDNS
	if len(wanted) == 0 {
		wanted = in.Snapshot.ServiceIPs
	}
	for _, address := range wanted {
		if why := in.collides(address); why != "" {
			notes = append(notes, fmt.Sprintf("queries of pods at the cluster's DNS address %s are left alone: it is %s", address, why))
			continue
		}
		addresses = append(addresses, address)
	}
	return addresses, notes
}

// collides says why queries of Pods are not intercepted at an address; empty if they are. Their sources are not checked, so
// an address with such a check, or for this host alone, is not taken.
func (in Input) collides(address netip.Addr) string {
	ours := slices.ContainsFunc(in.listen(), func(l netip.AddrPort) bool { return l.Addr() == address })
	switch {
	case ours || address == KubeSwitchAddress(in.Settings) || slices.Contains(in.steeredAt(), address):
		return "intercepted for others already"
	case address.IsLoopback() || address.IsUnspecified() || address.IsMulticast() || address.Is6() && address.IsLinkLocalUnicast():
		return "no Service's address"
	}
	return ""
}

// steeredAt are the host's own resolvers, in transparent mode.
func (in Input) steeredAt() []netip.Addr {
	if !IsTransparent(in.Settings) {
		return nil
	}
	return in.Facts.Resolver.Loopback
}

// InterceptedBy returns an address of a family at which this host's own queries are steered.
func (d Desired) InterceptedBy(is4 bool) (netip.AddrPort, bool) {
	for _, address := range slices.Concat(d.Listen, OnDNSPort(d.SteeredAt)) {
		if address.Addr().Is4() == is4 {
			return address, true
		}
	}
	return netip.AddrPort{}, false
}

// LoopbackOf returns those of the servers that are on this host itself, in order. The unspecified address is
// one of them: packets sent there go to loopback (ip(7)).
func LoopbackOf(servers []netip.Addr) (resolvers []netip.Addr) {
	for _, address := range servers {
		address = address.Unmap()
		switch {
		case address.IsUnspecified() && address.Is4():
			address = Loopback4
		case address.IsUnspecified():
			address = Loopback6
		}
		if address.IsLoopback() && !slices.Contains(resolvers, address) {
			resolvers = append(resolvers, address)
		}
	}
	return resolvers
}
