package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Addresses of the lab. The IPv4 ones are K2s's defaults and the documentation ranges of RFC 5737.
const (
	KubeSwitch4 = "172.19.1.1" // host0 on the bridge kubeswitch
	KubeSwitch6 = "fd00:19::1"
	Worker4     = "172.19.1.101"
	Worker6     = "fd00:19::101"

	PodGateway4 = "172.20.0.1" // host0 on the bridge cni0
	PodGateway6 = "fd00:20::1"
	CoreDNS0v4  = "172.20.0.10"
	CoreDNS0v6  = "fd00:20::10"
	CoreDNS1v4  = "172.20.0.11"
	CoreDNS1v6  = "fd00:20::11"
	App4        = "172.20.0.20"
	App6        = "fd00:20::20"

	Uplink4   = "192.0.2.2" // host0 towards the outside
	Uplink6   = "2001:db8:2::2"
	Outside4  = "192.0.2.1" // default gateway of host0
	Outside6  = "2001:db8:2::1"
	External0 = "192.0.2.53" // the first server of host0's resolv.conf
	External1 = "192.0.2.54" // the second
	Ext0v6    = "2001:db8:2::53"
	Ext1v6    = "2001:db8:2::54"

	ServiceRange4 = "172.21.0.0/16"
	ServiceRange6 = "fd00:21::/112"
	PodRange4     = "172.20.0.0/16"
	PodRange6     = "fd00:20::/64"
	KubeDNS4      = "172.21.0.10"
	KubeDNS6      = "fd00:21::10"
)

// HostResolvConf is what host0's /etc/resolv.conf says before anything takes it over.
const HostResolvConf = `# Written by the site's configuration management.
# Ask the network team before changing it.
nameserver 192.0.2.53
nameserver 192.0.2.54
search example.com
options timeout:2
`

const workerResolvConf = "nameserver " + KubeSwitch4 + "\n"

const podResolvConf = "nameserver " + KubeDNS4 + "\nsearch default.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n"

// nodeSpec says what a node is called and where it is connected.
type nodeSpec struct {
	name, resolv string
	ip4, ip6     string
	port         string // host0's end of the cable; the other is eth0
	bridge       string // which bridge of host0 the port belongs to; none is a routed link
	bits4        int
	gateway4     string
	gateway6     string
	extra        []string // more addresses of eth0
}

const hostName = "host0"

var nodeSpecs = []nodeSpec{
	{name: hostName, resolv: HostResolvConf, ip4: Uplink4, ip6: Uplink6},
	{
		name: "worker0", resolv: workerResolvConf, ip4: Worker4, ip6: Worker6, port: "vworker0",
		bridge: "kubeswitch", bits4: 24, gateway4: KubeSwitch4, gateway6: KubeSwitch6,
	},
	{
		name: "pod-coredns-0", resolv: HostResolvConf, ip4: CoreDNS0v4, ip6: CoreDNS0v6, port: "vcoredns0",
		bridge: "cni0", bits4: 16, gateway4: PodGateway4, gateway6: PodGateway6,
	},
	{
		name: "pod-coredns-1", resolv: HostResolvConf, ip4: CoreDNS1v4, ip6: CoreDNS1v6, port: "vcoredns1",
		bridge: "cni0", bits4: 16, gateway4: PodGateway4, gateway6: PodGateway6,
	},
	{
		name: "pod-app", resolv: podResolvConf, ip4: App4, ip6: App6, port: "vapp",
		bridge: "cni0", bits4: 16, gateway4: PodGateway4, gateway6: PodGateway6,
	},
	{
		name: "ext", resolv: "nameserver " + External0 + "\n", ip4: Outside4, ip6: Outside6, port: "uplink",
		bits4: 24, gateway4: Uplink4, gateway6: Uplink6,
		extra: []string{External0 + "/24", External1 + "/24", Ext0v6 + "/64", Ext1v6 + "/64"},
	},
}

// connect lays the cables between the nodes and gives out addresses and routes.
func (l *Lab) connect(ctx context.Context) error {
	host, err := openNet(l.Host())
	if err != nil {
		return err
	}
	defer host.Close()

	for _, bridge := range []struct {
		name  string
		mac   net.HardwareAddr
		addrs []string
	}{
		{"kubeswitch", net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}, []string{KubeSwitch4 + "/24", KubeSwitch6 + "/64"}},
		{"cni0", net.HardwareAddr{0x52, 0x54, 0, 0, 0, 2}, []string{PodGateway4 + "/16", PodGateway6 + "/64"}},
	} {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = bridge.name
		// As libvirt and the CNI plugin do: without, a bridge takes the lowest of its ports' addresses, another one whenever a
		// Pod comes or goes, and its neighbours send to the old one for a while.
		attrs.HardwareAddr = bridge.mac
		if err := host.addLink(&netlink.Bridge{LinkAttrs: attrs}, bridge.addrs...); err != nil {
			return err
		}
	}
	for _, spec := range nodeSpecs {
		if spec.port == "" {
			continue
		}
		if err := l.plug(host, spec); err != nil {
			return err
		}
	}
	if err := host.defaultRoutes(Outside4, Outside6); err != nil {
		return err
	}
	// A link counts as up a moment after both its ends are; a listing taken before would differ from a later one.
	for _, node := range l.nodes {
		if err := awaitLinks(ctx, node); err != nil {
			return err
		}
	}
	return nil
}

// plug connects one node to host0.
func (l *Lab) plug(host *netOf, spec nodeSpec) error {
	node := l.Node(spec.name)
	far, err := openNet(node)
	if err != nil {
		return err
	}
	defer far.Close()

	attrs := netlink.NewLinkAttrs()
	attrs.Name = spec.port
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(node.ns["net"].Fd())}
	var addrs []string
	if spec.bridge == "" {
		addrs = []string{Uplink4 + "/24", Uplink6 + "/64"}
	}
	if err := host.addLink(veth, addrs...); err != nil {
		return err
	}
	if spec.bridge != "" {
		bridge, err := host.LinkByName(spec.bridge)
		if err != nil {
			return fmt.Errorf("find bridge %s: %w", spec.bridge, err)
		}
		if err := host.LinkSetMaster(veth, bridge); err != nil {
			return fmt.Errorf("plug %s into %s: %w", spec.port, spec.bridge, err)
		}
	}
	eth0, err := far.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("find eth0 of %s: %w", spec.name, err)
	}
	addrs = append([]string{fmt.Sprintf("%s/%d", spec.ip4, spec.bits4), spec.ip6 + "/64"}, spec.extra...)
	if err := far.setUp(eth0, addrs...); err != nil {
		return err
	}
	return far.defaultRoutes(spec.gateway4, spec.gateway6)
}

// netOf is the network side of one node.
type netOf struct {
	*netlink.Handle
	name string
}

// openNet prepares a node's network: settings that later links inherit, and its loopback.
func openNet(node *Node) (*netOf, error) {
	// Without these a listing would change by itself: addresses are tentative at first, and routers are looked for.
	settings := map[string]string{
		"net.ipv6.conf.default.accept_dad": "0", "net.ipv6.conf.all.accept_dad": "0",
		"net.ipv6.conf.default.accept_ra": "0", "net.ipv6.conf.all.accept_ra": "0",
	}
	if node.name == hostName {
		settings["net.ipv4.ip_forward"] = "1"
		settings["net.ipv6.conf.all.forwarding"] = "1"
	}
	for name, value := range settings {
		if err := node.SetSysctl(name, value); err != nil {
			return nil, err
		}
	}
	handle, err := netlink.NewHandleAt(netns.NsHandle(node.ns["net"].Fd()))
	if err != nil {
		return nil, fmt.Errorf("open netlink in %s: %w", node.name, err)
	}
	h := &netOf{Handle: handle, name: node.name}
	lo, err := h.LinkByName("lo")
	if err == nil {
		err = h.LinkSetUp(lo)
	}
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("set lo of %s up: %w", node.name, err)
	}
	return h, nil
}

func (h *netOf) addLink(link netlink.Link, addrs ...string) error {
	if err := h.LinkAdd(link); err != nil {
		return fmt.Errorf("add link %s in %s: %w", link.Attrs().Name, h.name, err)
	}
	return h.setUp(link, addrs...)
}

func (h *netOf) setUp(link netlink.Link, addrs ...string) error {
	for _, a := range addrs {
		addr, err := netlink.ParseAddr(a)
		if err == nil {
			if addr.IP.To4() == nil {
				// Even with accept_dad=0 an address is tentative for a moment, in which no server can bind it.
				addr.Flags = unix.IFA_F_NODAD
			}
			err = h.AddrAdd(link, addr)
		}
		if err != nil {
			return fmt.Errorf("add address %s to %s of %s: %w", a, link.Attrs().Name, h.name, err)
		}
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s of %s up: %w", link.Attrs().Name, h.name, err)
	}
	return nil
}

func (h *netOf) defaultRoutes(gateways ...string) error {
	for _, gw := range gateways {
		if err := h.RouteAdd(&netlink.Route{Gw: net.ParseIP(gw)}); err != nil {
			return fmt.Errorf("add default route by %s in %s: %w", gw, h.name, err)
		}
	}
	return nil
}

// awaitLinks waits until every link of the node but lo, which has no such state, reports that it is up.
func awaitLinks(ctx context.Context, node *Node) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	changes := make(chan netlink.LinkUpdate, 64)
	done := make(chan struct{})
	defer close(done)
	ns := netns.NsHandle(node.ns["net"].Fd())
	// Subscribed before the first look, so that no change is missed between look and wait.
	if err := netlink.LinkSubscribeWithOptions(changes, done, netlink.LinkSubscribeOptions{Namespace: &ns}); err != nil {
		return fmt.Errorf("watch the links of %s: %w", node.name, err)
	}
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return err
	}
	defer h.Close()
	for {
		links, err := h.LinkList()
		if errors.Is(err, netlink.ErrDumpInterrupted) {
			continue // something changed meanwhile: look again
		}
		if err != nil {
			return fmt.Errorf("list the links of %s: %w", node.name, err)
		}
		waiting := ""
		for _, link := range links {
			a := link.Attrs()
			if a.Flags&net.FlagLoopback != 0 || a.OperState == netlink.OperUp {
				continue
			}
			// The kernel reports a bridge's new state up to a second late, but newer ones at once to who asks for it by
			// itself, which a list does not.
			if link, err = h.LinkByIndex(a.Index); err != nil {
				return fmt.Errorf("look at %s of %s: %w", a.Name, node.name, err)
			}
			if a = link.Attrs(); a.OperState != netlink.OperUp {
				waiting = a.Name + " is " + a.OperState.String()
			}
		}
		if waiting == "" {
			return nil
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return fmt.Errorf("wait for the links of %s: %s: %w", node.name, waiting, ctx.Err())
		}
	}
}

func mustAddr(s string) netip.Addr { return netip.MustParseAddr(s) }
