package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Interface is a network interface.
type Interface struct {
	Name  string
	Index int
	// Bridge is the index of the bridge that the interface is a port of, 0 if it is none.
	Bridge int
}

// ErrNoInterface is returned if no interface has the address that was asked for.
var ErrNoInterface = errors.New("no interface has this address")

// newInterface describes one of the devices. Which of them are bridges is known from the list: netlink tells nothing of a
// bridge's port but its master, which may as well be a bond or a VRF.
func newInterface(device netlink.Link, devices []netlink.Link) Interface {
	attributes := device.Attrs()
	found := Interface{Name: attributes.Name, Index: attributes.Index}
	if attributes.MasterIndex != 0 && slices.ContainsFunc(devices, func(other netlink.Link) bool {
		return other.Attrs().Index == attributes.MasterIndex && other.Type() == "bridge"
	}) {
		found.Bridge = attributes.MasterIndex
	}
	return found
}

// InterfaceOf returns the interface that has the address.
func InterfaceOf(address netip.Addr) (Interface, error) {
	address = address.Unmap()
	devices, err := retryInterrupted(netlink.LinkList)
	if err != nil {
		return Interface{}, fmt.Errorf("list interfaces: %w", err)
	}
	for _, device := range devices {
		prefixes, err := prefixesOf(device)
		if err != nil {
			return Interface{}, err
		}
		if slices.ContainsFunc(prefixes, func(own netip.Prefix) bool { return own.Addr() == address.WithZone("") }) {
			return newInterface(device, devices), nil
		}
	}
	return Interface{}, fmt.Errorf("%w: %s", ErrNoInterface, address)
}

// Exists reports whether there is an interface of this index, or that can't be told.
func Exists(ifindex int) bool {
	_, err := netlink.LinkByIndex(ifindex)
	return !errors.As(err, &netlink.LinkNotFoundError{})
}

// PrefixesOf returns the addresses of an interface with the lengths of their subnets.
func PrefixesOf(name string) ([]netip.Prefix, error) {
	device, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("look up interface %s: %w", name, err)
	}
	return prefixesOf(device)
}

// prefixesOf returns none for an interface that is gone since it was listed.
func prefixesOf(device netlink.Link) ([]netip.Prefix, error) {
	addresses, err := retryInterrupted(func() ([]netlink.Addr, error) {
		return netlink.AddrList(device, netlink.FAMILY_ALL)
	})
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", device.Attrs().Name, err)
	}
	prefixes := make([]netip.Prefix, 0, len(addresses))
	for _, address := range addresses {
		if prefix, ok := prefixOf(address); ok {
			prefixes = append(prefixes, prefix)
		}
	}
	return prefixes, nil
}

func prefixOf(address netlink.Addr) (prefix netip.Prefix, ok bool) {
	own, ok := netip.AddrFromSlice(address.IP)
	bits, _ := address.Mask.Size()
	return netip.PrefixFrom(own.Unmap(), bits), ok
}

// Addresses returns the addresses of all interfaces with the lengths of their subnets.
func Addresses() ([]netip.Prefix, error) {
	found, err := retryInterrupted(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	addresses := make([]netip.Prefix, 0, len(found))
	for _, address := range found {
		if prefix, ok := prefixOf(address); ok {
			addresses = append(addresses, prefix)
		}
	}
	return addresses, nil
}

// MatchInterfaces returns the interfaces, other than lo, whose names match one of the patterns (path.Match), by index.
// Those without an Ethernet header are left out.
func MatchInterfaces(patterns []string) ([]Interface, error) {
	if len(patterns) == 0 {
		return nil, nil
	}
	devices, err := retryInterrupted(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	var found []Interface
	for _, device := range devices {
		if device.Attrs().EncapType != "ether" {
			continue
		}
		for _, pattern := range patterns {
			matches, err := path.Match(pattern, device.Attrs().Name)
			if err != nil {
				return nil, fmt.Errorf("interface pattern %q: %w", pattern, err)
			}
			if matches {
				found = append(found, newInterface(device, devices))
				break
			}
		}
	}
	slices.SortFunc(found, func(a, b Interface) int { return a.Index - b.Index })
	return found, nil
}

// XDPMode says how the kernel runs the XDP program of an interface: "native", "generic", "offloaded", or "" without one.
func XDPMode(name string) (string, error) {
	device, err := netlink.LinkByName(name)
	if err != nil {
		return "", fmt.Errorf("look up interface %s: %w", name, err)
	}
	xdp := device.Attrs().Xdp
	if xdp == nil || !xdp.Attached {
		return "", nil
	}
	// linux/if_link.h: XDP_ATTACHED_DRV, XDP_ATTACHED_SKB.
	switch xdp.AttachMode {
	case 1:
		return "native", nil
	case 2:
		return "generic", nil
	}
	return "offloaded", nil
}

// XDPProgram returns the kernel's ID of the XDP program on an interface, 0 without one, or without the interface.
func XDPProgram(ifindex int) (id uint32, err error) {
	device, err := netlink.LinkByIndex(ifindex)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look up interface %d: %w", ifindex, err)
	}
	if xdp := device.Attrs().Xdp; xdp != nil && xdp.Attached {
		return xdp.ProgId, nil
	}
	return 0, nil
}
