package lab

import (
	"context"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// AddNode adds a machine to a raised lab, connected to nothing. It is not for several goroutines at once.
func (l *Lab) AddNode(name, ip4, ip6 string) (*Node, error) {
	node, err := newNode(name, podResolvConf, mustAddr(ip4), mustAddr(ip6))
	if err != nil {
		return nil, fmt.Errorf("add node %s: %w", name, err)
	}
	l.nodes = append(l.nodes, node) // closed with the others, whatever fails below
	network, err := openNet(node)
	if err != nil {
		return nil, fmt.Errorf("add node %s: %w", name, err)
	}
	network.Close()
	return node, nil
}

// Cable connects two nodes by a veth pair of the given names, both ends up and without addresses, and returns when the
// links of both nodes carry.
func (l *Lab) Cable(ctx context.Context, near *Node, nearPort string, far *Node, farPort string) error {
	// Not openNet: that sets up a new node, and this one may have settings of its own by now.
	handle, err := netlink.NewHandleAt(netns.NsHandle(near.ns["net"].Fd()))
	if err != nil {
		return fmt.Errorf("open netlink in %s: %w", near.name, err)
	}
	defer handle.Close()
	farHandle, err := netlink.NewHandleAt(netns.NsHandle(far.ns["net"].Fd()))
	if err != nil {
		return fmt.Errorf("open netlink in %s: %w", far.name, err)
	}
	defer farHandle.Close()

	attrs := netlink.NewLinkAttrs()
	attrs.Name = nearPort
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: farPort, PeerNamespace: netlink.NsFd(far.ns["net"].Fd())}
	h := &netOf{Handle: handle, name: near.name}
	if err := h.addLink(veth); err != nil {
		return err
	}
	port, err := farHandle.LinkByName(farPort)
	if err != nil {
		return fmt.Errorf("find %s of %s: %w", farPort, far.name, err)
	}
	if err := (&netOf{Handle: farHandle, name: far.name}).setUp(port); err != nil {
		return err
	}
	if err := awaitLinks(ctx, near); err != nil {
		return err
	}
	return awaitLinks(ctx, far)
}
