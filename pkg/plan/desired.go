package plan

import (
	"net/netip"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// Desired is what shall be true of a host. It is a value: nobody changes one that has been made.
type Desired struct {
	// Listen are the addresses that the forwarder serves, by UDP and TCP.
	Listen []netip.AddrPort
	// Zones are what the endpoints answer, the cluster's domain first.
	Zones []cluster.Zone
	// Endpoints answer the zones. Fallback are the upstreams, for the time that the daemon is dead.
	Endpoints, Fallback []Endpoint
	// Forward is the forwarder's routing.
	Forward Routes
	// Permits say who may ask at an address; everybody may ask at addresses without one.
	Permits map[netip.Addr][]Permit
	// Kernel is the desired state of the kernel. Nil if everything is done in user space.
	Kernel *Kernel
	// KubeSwitch is the interface that has its address; index 0 for none. Allowed may ask there.
	KubeSwitch Interface
	Allowed    []netip.Prefix
	// Shared is the KubeSwitch address if another server has it: the kernel steers cluster names past that server.
	Shared *status.Shared
	// SteeredAt are the host's own resolvers that cluster names are steered past.
	SteeredAt []netip.Addr
	// Notes are sentences that say what is left out and why; Problems say what prevents names from being resolved.
	Notes    []string
	Problems []Problem
}

// LoopbackSysctls are the settings of lo that redirected replies need: without route_localnet such a reply is a "martian
// destination", and without accept_local a "martian source".
func LoopbackSysctls() []string {
	return []string{"net.ipv4.conf.lo.route_localnet", "net.ipv4.conf.lo.accept_local"}
}

// Kernel is the desired state of the kernel.
type Kernel struct {
	// Sysctls are set to 1.
	Sysctls []string
	// Hooks are in the order in which they must be attached: those for replies before those for queries.
	Hooks []Hook
	// IngressFilter is the interface where packets are refused before the stack sees them; index 0 for none.
	IngressFilter Interface
	Listeners     []Listener
	Sources       []Source
	// ReplyVia maps each Pod interface that is a bridge port to the bridge, by index.
	ReplyVia map[uint32]uint32
	// Zones are steered to Backends; other names to Fallback while the daemon is dead. Each of Trials is a zone with
	// one backend, with which the path to that backend is tested.
	Zones              []string
	Backends, Fallback []Backend
	Trials             map[string]Backend
}

// Hook is where a program is attached.
type Hook struct {
	Kind      HookKind
	Interface string
	Ifindex   int
}

// String names the hook in logs and plans.
func (h Hook) String() string {
	what := [...]string{"dns_from_backend on ingress", "dns_from_host on egress", "dns_from_client on ingress"}[h.Kind]
	return what + " of " + h.Interface
}

// HookKind says what the program at a hook does.
type HookKind int

// The kinds of hooks.
const (
	FromBackend HookKind = iota // receives replies, at the ingress of an interface towards endpoints
	FromHost                    // receives the host's own queries, at the egress of lo
	FromClient                  // receives queries from others, at the ingress of the interface that they are behind
)

// Scope says where a query enters.
type Scope int

// The scopes.
const (
	ScopeHost Scope = iota
	ScopeKubeSwitch
	ScopePod
	ScopeTransparent
	ScopeShared
)

// Listener is an address at which queries are intercepted.
type Listener struct {
	Address netip.AddrPort
	Scope   Scope
}

// Backend is an endpoint that queries are steered to.
type Backend struct {
	Address    netip.AddrPort
	NATAddress netip.Addr // of this host, of the same family
	Ifindex    uint32     // towards it
}

// AnyInterface is the [Source.Ifindex] for all interfaces.
const AnyInterface = 0xffffffff

// Source is a range of source addresses. If an address is in several, the longest prefix counts.
type Source struct {
	Prefix netip.Prefix
	// Ifindex is the interface on which packets from there arrive, or AnyInterface; 0 is for addresses that nobody else may
	// have.
	Ifindex uint32
	// Allowed sources may ask at the KubeSwitch address.
	Allowed bool
}

// Permit allows the clients of a prefix to ask, over UDP only if they arrive on the interface, 0 for any.
type Permit struct {
	Prefix    netip.Prefix
	Interface int
}

// Routes say which servers the forwarder asks for which names.
type Routes struct {
	// Zones maps a zone to the servers that answer it; one without servers is answered SERVFAIL.
	Zones map[string][]netip.AddrPort
	// TCP maps a server of Zones to its address for TCP, if that differs from the one for UDP.
	TCP map[netip.AddrPort]netip.AddrPort
	// Unserved says why zones have no servers.
	Unserved string
	// Upstreams answer all other names.
	Upstreams []netip.AddrPort
	// Forbidden servers are not asked even for queries in flight.
	Forbidden []netip.AddrPort
	// Timeout, Attempts and Rotate are the options of resolv.conf(5); 0 stands for the default.
	Timeout  time.Duration
	Attempts int
	Rotate   bool
}

// ProblemKind says what a problem concerns. There is at most one of each kind that a part of the program watches.
type ProblemKind int

// The kinds of problems, in the order in which they are reported.
const (
	ProblemResolver      ProblemKind = iota // the resolver file is not what it should be
	ProblemTransparent                      // the host's own resolver can't be followed
	ProblemUpdate                           // a change could not be applied
	ProblemZones                            // the kernel has no room for some zones
	ProblemIngressFilter                    // the ingress filter can't be attached
	ProblemKubeSwitch                       // the KubeSwitch address is not served
	ProblemKernel                           // something is missing from the kernel
	ProblemEndpoints                        // cluster names are not answered
	ProblemWay                              // the kernel's path to an endpoint is broken
	ProblemDiscovery                        // information from the cluster is old or wrong
)

// Problem is a sentence: what is wrong, why, and what to do.
type Problem struct {
	Kind ProblemKind
	Text string
}
