package plan

import (
	"net/netip"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

// Input is everything that a plan is made from.
type Input struct {
	Settings config.Config
	Facts    Facts
	Snapshot cluster.Snapshot
	// Health is what is known about endpoints, by address; nothing is known about missing ones.
	Health map[netip.AddrPort]Health
}

// Facts describe a host as far as it matters for a plan.
type Facts struct {
	Loopback6  bool // an interface has ::1
	KubeSwitch KubeSwitch
	// Ways says how endpoints and upstreams are reached, by address.
	Ways map[netip.Addr]Way
	// Pods are the interfaces that match the settings' patterns.
	Pods []Interface
	// Addresses are those of this host, with their subnet lengths; Networks are directly behind an interface, without a router
	// in between. Both are needed only if other hosts or Pods may ask.
	Addresses []netip.Prefix
	Networks  []Network
	Resolver  Resolver
}

// Interface is a network interface.
type Interface struct {
	Name  string
	Index int
	// Bridge is the index of the bridge that the interface is a port of, 0 if it is not a port.
	Bridge int
}

// Network is a network that is behind an interface.
type Network struct {
	Ifindex int
	Prefix  netip.Prefix
}

// Way is how a host reaches an address.
type Way struct {
	Interface string
	Ifindex   int
	// Source is the source address of packets sent there.
	Source netip.Addr
	// Group is set for a broadcast or multicast address.
	Group bool
	// Not says why the kernel programs can't steer there; empty if they can.
	Not string
	// Astray says why whatever answers there can't be assumed to be the endpoint; empty if it can.
	Astray string
}

// KubeSwitch is the host's side of the KubeSwitch.
type KubeSwitch struct {
	Interface Interface // which has the address; index 0 for none
	Subnets   []netip.Prefix
	// Not says why replies to its clients can't be sent by the kernel programs; empty if they can.
	Not string
	// Holder is the other server that has the DNS port of the address, or may get it; empty if the port is ours.
	Holder string
}

// HolderNobody is the [KubeSwitch.Holder] of a port that is reserved for a server that has not appeared yet.
const HolderNobody = "nobody"

// Resolver is the content of the host's resolver configuration before it was taken over.
type Resolver struct {
	Upstreams []netip.Addr
	// Loopback are the servers on this host itself, in the file's order.
	Loopback []netip.Addr
	Search   []string
	// Timeout, Attempts and Rotate are the options of resolv.conf(5).
	Timeout  time.Duration
	Attempts int
	Rotate   bool
}

// Health is the observed state of an endpoint.
type Health struct {
	// Dead is set while it does not answer.
	Dead bool
	// Severed is set while queries that the kernel steers to it are lost, and OnTrial while that is tested.
	Severed, OnTrial bool
}
