package lab

import (
	"context"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// AddNode adds a machine to a raised lab, connected to nothing.
func (l *Lab) AddNode(name, ip4, ip6 string) (*Node, error) {
	node, err := newNode(name, podResolvConf, mustAddr(ip4), mustAddr(ip6))
	if err != nil {
		return nil, fmt.Errorf("add node %s: %w", name, err)
	}
	l.mu.Lock()
	l.nodes = append(l.nodes, node) // closed with the others, whatever fails below
	l.mu.Unlock()
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

// AddPod adds a pod on the bridge cni0, behind an interface of host0 whose name is port. It returns when it can be reached.
func (l *Lab) AddPod(ctx context.Context, name, port, ip4, ip6 string) (*Node, error) {
	node, err := l.AddNode(name, ip4, ip6)
	if err != nil {
		return nil, err
	}
	// Not openNet: host0 may have settings of its own by now.
	handle, err := netlink.NewHandleAt(netns.NsHandle(l.Host().ns["net"].Fd()))
	if err != nil {
		return nil, fmt.Errorf("open netlink in %s: %w", hostName, err)
	}
	defer handle.Close()
	if err := l.plug(&netOf{Handle: handle, name: hostName}, nodeSpec{
		name: name, ip4: ip4, ip6: ip6, port: port, bridge: "cni0", bits4: 16, gateway4: PodGateway4, gateway6: PodGateway6,
	}); err != nil {
		return nil, err
	}
	return node, awaitLinks(ctx, node)
}

// RemoveNode ends a node that was added, with all that runs in it and its interfaces.
func (l *Lab) RemoveNode(node *Node) error {
	l.mu.Lock()
	l.nodes = slices.DeleteFunc(l.nodes, func(n *Node) bool { return n == node })
	l.mu.Unlock()
	return node.close()
}

// NewCoreDNS prepares a CoreDNS in a node that was added, with variables of its environment; Server.Start starts it. Its
// queries are counted by the plugin prometheus, which must listen at 127.0.0.1:9153.
func (l *Lab) NewCoreDNS(node *Node, binary, corefile string, environment ...string) (*Server, error) {
	if err := node.WriteFile(corefilePath, []byte(corefile), 0o644); err != nil {
		return nil, err
	}
	server := newCoreDNS(binary, node.name, node)
	server.argv = slices.Concat([]string{"env"}, environment, server.argv)
	return server, nil
}
