package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
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
	// Group is set for a broadcast or multicast address.
	Group bool
	// Ethernet is set if frames on the interface have an Ethernet header.
	Ethernet bool
	// Network is the destination of the route: of no length for a default route.
	Network netip.Prefix
	// Bypass says what the stack does on this route that a redirect to the interface would not; empty if nothing is known.
	Bypass string
}

// RouteTo looks the route to an address up, as the kernel would for a packet without a source. A zone is an interface's name.
func RouteTo(address netip.Addr) (route Route, err error) {
	address = address.Unmap()
	found, err := lookUpRoute(address)
	switch {
	case errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH):
		return Route{}, fmt.Errorf("%w to %s: %w", ErrNoRoute, address, err)
	case err != nil:
		return Route{}, fmt.Errorf("look up the route to %s: %w", address, err)
	}
	device, err := netlink.LinkByIndex(found.ifindex)
	if err != nil {
		return Route{}, fmt.Errorf("look up interface %d on the route to %s: %w", found.ifindex, address, err)
	}
	route = Route{
		Interface: device.Attrs().Name,
		Ifindex:   found.ifindex,
		Source:    found.source,
		Local:     found.kind == unix.RTN_LOCAL,
		Group:     found.kind == unix.RTN_BROADCAST || found.kind == unix.RTN_MULTICAST,
		Ethernet:  device.Attrs().EncapType == "ether" || device.Attrs().EncapType == "loopback",
		Network:   netip.PrefixFrom(address.WithZone(""), found.bits).Masked(),
	}
	if !route.Source.IsValid() {
		return Route{}, fmt.Errorf("the route to %s over %s has no source address: give the interface one", address, route.Interface)
	}
	switch {
	case device.Type() == "vrf":
		route.Bypass = route.Interface + " is a VRF, which looks the route up again"
	case found.encapsulated:
		route.Bypass = "its route has an encapsulation (lwtunnel)"
	}
	return route, nil
}

type foundRoute struct {
	ifindex      int
	source       netip.Addr
	kind         uint8 // RTN_*
	encapsulated bool
	bits         int // of its destination
}

// lookUpRoute asks the kernel. netlink.RouteGet would leave out encapsulations that it does not know.
func lookUpRoute(address netip.Addr) (found foundRoute, err error) {
	reply, err := getRoute(address, unix.RTM_F_LOOKUP_TABLE)
	if err != nil {
		return found, err
	}
	found.kind = nl.DeserializeRtMsg(reply).Type
	attributes, err := nl.ParseRouteAttr(reply[unix.SizeofRtMsg:])
	if err != nil {
		return found, err
	}
	for _, attribute := range attributes {
		switch attribute.Attr.Type {
		case unix.RTA_OIF:
			found.ifindex = int(binary.NativeEndian.Uint32(attribute.Value))
		case unix.RTA_PREFSRC:
			source, _ := netip.AddrFromSlice(attribute.Value)
			found.source = source.Unmap()
		case unix.RTA_ENCAP_TYPE:
			found.encapsulated = true
		}
	}
	// The same again, as it stands in the table.
	entry, err := getRoute(address, unix.RTM_F_LOOKUP_TABLE|unix.RTM_F_FIB_MATCH)
	if err != nil {
		return found, err
	}
	found.bits = int(nl.DeserializeRtMsg(entry).Dst_len)
	return found, nil
}

// getRoute returns the kernel's one reply to RTM_GETROUTE (rtnetlink(7)).
func getRoute(address netip.Addr, flags uint32) ([]byte, error) {
	message := &nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET, Dst_len: uint8(address.BitLen()), Flags: flags}}
	if address.Is6() {
		message.Family = unix.AF_INET6
	}
	request := nl.NewNetlinkRequest(unix.RTM_GETROUTE, 0)
	request.AddData(message)
	request.AddData(nl.NewRtAttr(unix.RTA_DST, address.AsSlice()))
	if zone := address.Zone(); zone != "" {
		device, err := netlink.LinkByName(zone)
		if err != nil {
			return nil, err
		}
		request.AddData(nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(uint32(device.Attrs().Index))))
	}
	replies, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	if err != nil {
		return nil, err
	}
	if len(replies) != 1 || len(replies[0]) < unix.SizeofRtMsg {
		return nil, unix.EBADMSG
	}
	return replies[0], nil
}

// Network is a network that is behind an interface, without a router between.
type Network struct {
	Ifindex int
	Prefix  netip.Prefix
}

// Networks returns them by the main routing table: those that interfaces have addresses in, and single hosts behind one,
// such as the pods of a network without a bridge.
func Networks() (networks []Network, err error) {
	filter := &netlink.Route{Table: unix.RT_TABLE_MAIN, Type: unix.RTN_UNICAST}
	routes, err := retryInterrupted(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_ALL, filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	for _, route := range routes {
		if route.Dst == nil || route.Gw != nil || route.Via != nil || route.LinkIndex == 0 {
			continue
		}
		bits, _ := route.Dst.Mask.Size()
		if address, ok := netip.AddrFromSlice(route.Dst.IP); ok && bits > 0 {
			networks = append(networks, Network{route.LinkIndex, netip.PrefixFrom(address.Unmap(), bits).Masked()})
		}
	}
	return networks, nil
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
