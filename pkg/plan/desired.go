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
	// Forward is how the forwarder answers.
	Forward Routes
	// Permits say who may ask at an address; all may at the others.
	Permits map[netip.Addr][]Permit
	// Kernel is what shall be in the kernel. Nil where all is done in user space.
	Kernel *Kernel
	// KubeSwitch is the interface that has its address; index 0 for none. Allowed may ask there.
	KubeSwitch Interface
	Allowed    []netip.Prefix
	// Shared is the KubeSwitch address if another server has it: the kernel steers cluster names past that one.
	Shared *status.Shared
	// SteeredAt are the host's own resolvers that cluster names are steered past.
	SteeredAt []netip.Addr
	// Notes say, each in a sentence for a person, what is left out and why; Problems what keeps names from being resolved.
	Notes    []string
	Problems []Problem
}

// LoopbackSysctls are those of lo that a reply needs which is redirected there: without route_localnet it is a "martian
// destination", and without accept_local a "martian source".
func LoopbackSysctls() []string {
	return []string{"net.ipv4.conf.lo.route_localnet", "net.ipv4.conf.lo.accept_local"}
}

// Kernel is what shall be in the kernel.
type Kernel struct {
	// Sysctls are set to 1.
	Sysctls []string
	// Hooks are in the order in which they must be attached: where replies come in, then where queries do.
	Hooks []Hook
	// IngressFilter is the interface where packets are refused before the stack sees them; index 0 for none.
	IngressFilter Interface
	Listeners     []Listener
	Sources       []Source
	// ReplyVia names the bridge for each interface of a pod that is a port of one, by index.
	ReplyVia map[uint32]uint32
	// Zones are steered to Backends; names outside of them to Fallback, while the daemon is dead. Each of Trials is a zone with
	// one backend, by which the way to that one is tried.
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

// HookKind says what a program at a hook does.
type HookKind int

// The kinds of hooks.
const (
	FromBackend HookKind = iota // takes replies, at the ingress of an interface towards endpoints
	FromHost                    // takes the host's own queries, at the egress of lo
	FromClient                  // takes queries of others, at the ingress of an interface that they are behind
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

// AnyInterface is the [Source.Ifindex] that stands for each interface.
const AnyInterface = 0xffffffff

// Source is where queries come from. Of two that an address is in, the one with the longer prefix counts.
type Source struct {
	Prefix netip.Prefix
	// Ifindex is the interface that packets from there come in on, or AnyInterface; 0 is for addresses that nobody else may
	// have.
	Ifindex uint32
	// Allowed sources may ask at the KubeSwitch address.
	Allowed bool
}

// Permit lets the clients of a prefix ask, by UDP if they come in on an interface, 0 for any.
type Permit struct {
	Prefix    netip.Prefix
	Interface int
}

// Routes say how the forwarder answers names.
type Routes struct {
	// Zones maps a zone to the servers that answer it; one without servers is answered SERVFAIL.
	Zones map[string][]netip.AddrPort
	// TCP says where a server of Zones is asked over TCP, if that is not where it is asked over UDP.
	TCP map[netip.AddrPort]netip.AddrPort
	// Unserved says why a zone has no servers.
	Unserved string
	// Upstreams answer all other names.
	Upstreams []netip.AddrPort
	// Forbidden servers are not asked by queries in flight either.
	Forbidden []netip.AddrPort
	// Timeout, Attempts and Rotate are the options of resolv.conf(5); 0 stands for the default.
	Timeout  time.Duration
	Attempts int
	Rotate   bool
}

// ProblemKind says what a problem concerns. Of each kind that a part of the program watches, there is one at most.
type ProblemKind int

// The kinds of problems, in the order in which they are told.
const (
	ProblemResolver      ProblemKind = iota // the resolver file is not as it should be
	ProblemTransparent                      // the host's own resolver can't be followed
	ProblemUpdate                           // a change could not be put into effect
	ProblemZones                            // zones that the kernel has no room for
	ProblemIngressFilter                    // the ingress filter can't be attached
	ProblemKubeSwitch                       // the KubeSwitch address is not served
	ProblemKernel                           // what was put into the kernel is not there
	ProblemEndpoints                        // cluster names are not answered
	ProblemWay                              // the kernel's way to an endpoint is broken
	ProblemDiscovery                        // what the cluster says is old, or wrong
)

// Problem is a sentence for a person: what is wrong, why, and what to do.
type Problem struct {
	Kind ProblemKind
	Text string
}
