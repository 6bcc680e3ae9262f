package kernel

import (
	"errors"
	"net"
	"net/netip"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// node is a network namespace that a cable leads to.
type node struct {
	handle    netns.NsHandle
	addresses []netip.Prefix
}

// do calls f in the node's namespace, on a thread that no other goroutine gets meanwhile. Without a node it is the
// host's.
func (n *node) do(t *testing.T, f func()) {
	t.Helper()
	if n == nil {
		f()
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := netns.Get()
	check(t, "open the host's namespace", err)
	defer home.Close()
	check(t, "enter a namespace", netns.Set(n.handle))
	defer func() { check(t, "return to the host's namespace", netns.Set(home)) }()
	f()
}

func newNamespace(t *testing.T) netns.NsHandle {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := netns.Get()
	check(t, "open the host's namespace", err)
	defer home.Close()
	handle, err := netns.New()
	check(t, "make a namespace", err)
	t.Cleanup(func() { _ = handle.Close() })
	check(t, "return to the host's namespace", netns.Set(home))
	return handle
}

// newNode makes a namespace with one interface, eth0, the other end of which is a port of the bridge.
func newNode(t *testing.T, bridge string, addresses ...string) *node {
	t.Helper()
	n := &node{handle: newNamespace(t)}
	master, err := netlink.LinkByName(bridge)
	check(t, "find bridge", err)
	port := netlink.NewLinkAttrs()
	port.Name, port.MasterIndex = "v"+bridge, master.Attrs().Index
	cable := &netlink.Veth{LinkAttrs: port, PeerName: "eth0", PeerNamespace: netlink.NsFd(n.handle)}
	check(t, "make a veth pair", netlink.LinkAdd(cable))
	removeAfterwards(t, cable)
	check(t, "set up", netlink.LinkSetUp(cable))
	n.do(t, func() {
		eth0, err := netlink.LinkByName("eth0")
		check(t, "find eth0", err)
		for _, text := range addresses {
			n.addresses = append(n.addresses, netip.MustParsePrefix(text))
			addAddress(t, eth0, text)
		}
		check(t, "set eth0 up", netlink.LinkSetUp(eth0))
	})
	return n
}

func addBridge(t *testing.T, name string, addresses ...string) {
	t.Helper()
	attributes := netlink.NewLinkAttrs()
	attributes.Name = name
	bridge := &netlink.Bridge{LinkAttrs: attributes}
	check(t, "make a bridge", netlink.LinkAdd(bridge))
	removeAfterwards(t, bridge)
	for _, text := range addresses {
		addAddress(t, bridge, text)
	}
	check(t, "set up", netlink.LinkSetUp(bridge))
}

// removeAfterwards makes room for another run of the test in this process.
func removeAfterwards(t *testing.T, device netlink.Link) {
	t.Helper()
	t.Cleanup(func() {
		if err := netlink.LinkDel(device); !errors.Is(err, unix.ENODEV) { // the test itself may have removed it
			check(t, "remove "+device.Attrs().Name, err)
		}
	})
}

func addRoute(t *testing.T, to, via netip.Addr) {
	t.Helper()
	check(t, "add route", netlink.RouteAdd(&netlink.Route{
		Dst: &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(to.BitLen(), to.BitLen())}, Gw: via.AsSlice(),
	}))
}

// addAddress adds an address that can be used at once: without the search for a duplicate that IPv6 begins with.
func addAddress(t *testing.T, device netlink.Link, text string) {
	t.Helper()
	address, subnet, err := net.ParseCIDR(text)
	check(t, "parse address", err)
	subnet.IP = address
	check(t, "add address", netlink.AddrAdd(device, &netlink.Addr{IPNet: subnet, Flags: unix.IFA_F_NODAD}))
}
