package plan

import (
	"net/netip"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

// Input is all that a plan is made from.
type Input struct {
	Settings config.Config
	Facts    Facts
	Snapshot cluster.Snapshot
	// Health is what is known of endpoints by their address; nothing is known of those that are missing.
	Health map[netip.AddrPort]Health
}

// Facts are what a host is, as far as it matters for a plan.
type Facts struct {
	Loopback6  bool // an interface has ::1
	KubeSwitch KubeSwitch
	// Ways says how endpoints and upstreams are reached, by their address.
	Ways map[netip.Addr]Way
	// Pods are the interfaces that match the settings' patterns.
	Pods []Interface
	// Addresses are those of this host, with the lengths of their subnets; Networks are behind an interface without a router
	// between. Both are needed only where other hosts or pods may ask.
	Addresses []netip.Prefix
	Networks  []Network
	Resolver  Resolver
}

// Interface is a network interface.
type Interface struct {
	Name  string
	Index int
	// Bridge is the index of the bridge that the interface is a port of, 0 if it is none.
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
	// Source is the address of this host that a packet to there carries.
	Source netip.Addr
	// Group is set for a broadcast or multicast address, which is no host's.
	Group bool
	// Not says why the kernel programs can't steer there; empty if they can.
	Not string
	// Astray says why what answers there is not to be believed to be the endpoint; empty if it is.
	Astray string
}

// KubeSwitch is what a host has of the KubeSwitch.
type KubeSwitch struct {
	Interface Interface // which has the address; index 0 for none
	Subnets   []netip.Prefix
	// Not says why replies to its clients can't be sent by the kernel programs; empty if they can.
	Not string
	// Holder is the other server that has the DNS port of the address, or may come to have it; empty if the port is ours.
	Holder string
}

// HolderNobody is the [KubeSwitch.Holder] of a port that is left to a server which has not been seen yet.
const HolderNobody = "nobody"

// Resolver is what the host's resolver configuration said before it was taken over.
type Resolver struct {
	Upstreams []netip.Addr
	// Loopback are the servers that programs ask on this host itself, in the file's order.
	Loopback []netip.Addr
	Search   []string
	// Timeout, Attempts and Rotate are the options of resolv.conf(5).
	Timeout  time.Duration
	Attempts int
	Rotate   bool
}

// Health is what has been seen of an endpoint.
type Health struct {
	// Dead is set while it does not answer.
	Dead bool
	// Severed is set while queries that the kernel steers to it are lost, and OnTrial while that is tried.
	Severed, OnTrial bool
}
