package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ErrNoRoute is returned if the host has no route to an address.
var ErrNoRoute = errors.New("no route")

// Route is how this host reaches an address.
type Route struct {
	Interface string
	Ifindex   int
	// Source is the address of this host that a packet to there carries.
	Source netip.Addr
	// Local is set for an address of this host: its packets go through lo.
	Local bool
	// Ethernet is set if frames on the interface have an Ethernet header.
	Ethernet bool
}

// RouteTo looks the route to an address up, as the kernel would for a packet without a source.
func RouteTo(address netip.Addr) (Route, error) {
	address = address.Unmap()
	routes, err := netlink.RouteGet(net.IP(address.AsSlice()))
	switch {
	case errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH):
		return Route{}, fmt.Errorf("%w to %s: %w", ErrNoRoute, address, err)
	case err != nil:
		return Route{}, fmt.Errorf("look up the route to %s: %w", address, err)
	case len(routes) == 0:
		return Route{}, fmt.Errorf("%w to %s", ErrNoRoute, address)
	}
	found := routes[0]
	device, err := netlink.LinkByIndex(found.LinkIndex)
	if err != nil {
		return Route{}, fmt.Errorf("look up interface %d on the route to %s: %w", found.LinkIndex, address, err)
	}
	source, ok := netip.AddrFromSlice(found.Src)
	if !ok {
		return Route{}, fmt.Errorf("the route to %s over %s has no source address: give the interface one", address, device.Attrs().Name)
	}
	return Route{
		Interface: device.Attrs().Name,
		Ifindex:   found.LinkIndex,
		Source:    source.Unmap(),
		Local:     found.Type == unix.RTN_LOCAL,
		Ethernet:  device.Attrs().EncapType == "ether" || device.Attrs().EncapType == "loopback",
	}, nil
}

// retryInterrupted repeats a dump that the kernel says may be inconsistent, since something changed while it ran.
func retryInterrupted[T any](dump func() (T, error)) (result T, err error) {
	const attempts = 5
	for range attempts {
		if result, err = dump(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return result, err
}
