package diagnose

import (
	"net/netip"
	"time"
)

// Evidence is all that was gathered about a name. The verdict depends on nothing else.
type Evidence struct {
	Target Target
	Host   CheckedHost

	// Queries are those that a resolver makes for the name, in their order; Decisive is the one that counts, -1 where
	// the target is an address. Alias is the query for the name that it turned out to be an alias of, where no address
	// came with it.
	Queries  []Query
	Decisive int
	Alias    *Query
	// CoreDNS and Upstreams are the servers' replies to the decisive query, asked without us.
	CoreDNS, Upstreams []Reply
	// Forwarder is its reply by TCP, which the kernel always leaves to it. Nil where there is none.
	Forwarder *Reply

	Cluster     ClusterAnswer
	Connections []Connection
	Untried     int // endpoints that were not connected to, since there are so many
}

// CheckedHost is how names are resolved on this host.
type CheckedHost struct {
	Attached bool
	Problems []string // as status has them

	File  string // the resolver file
	State string // as status has it: ours, original, foreign, missing
	Owner string
	// Servers, Search and Dots (ndots) are what the file says now.
	Servers []netip.Addr
	Search  []string
	Dots    int

	Zones     []string         // the cluster's
	Endpoints []netip.AddrPort // CoreDNS
	Severed   []netip.AddrPort // of them, to which what the kernel steers is lost
	Upstreams []netip.AddrPort
	Listen    []netip.AddrPort // the forwarder's
	InKernel  bool             // programs are attached
	// Unconfirmed is why Endpoints are only the last that were known, or none; empty if they are those of now.
	Unconfirmed string
}

// Carrier says what carries a query to a server.
type Carrier string

// The carriers.
const (
	Kernel    Carrier = "kernel"    // steered to CoreDNS
	Cached    Carrier = "cache"     // answered from the kernel
	Fallback  Carrier = "fallback"  // steered to an upstream server of the host, since the daemon is dead
	Forwarder Carrier = "forwarder" // ours, in user space
	Direct    Carrier = "direct"    // nobody: it goes to the server that the resolver file names
)

// Path is what becomes of a query that a program of this host sends to the first server of its resolver file.
type Path struct {
	Carrier Carrier
	Reason  string // the kernel program's own, by its name in reasons.h; empty where it does not look at such packets
	// Inferred says why the kernel program could not be asked. The carrier is then what the settings let expect.
	Inferred string
}

// Query is one name that was asked for.
type Query struct {
	Name   string // with the final dot
	InZone bool
	Path   Path
	Reply  Reply
}

// Reply is what a server said about a name: its IPv4 and IPv6 addresses together.
type Reply struct {
	Server    netip.AddrPort // that was asked
	Steered   netip.AddrPort // to which the kernel steered the query; not valid if it did not, or nobody can tell
	Rcode     int
	Addresses []netip.Addr
	Aliases   []string // the CNAMEs, in their order
	TTL       time.Duration
	Extended  string // the Extended DNS Error (RFC 8914)
	Tries     int
	Took      time.Duration // of the last try
	Failure   *Failure      // nil if there was an answer, of whatever kind
	// TCP is why a connection fails to a server that was asked directly and did not answer by UDP; nil if it succeeds. Way is
	// what the routes of this host say about the server.
	TCP *Failure
	Way string
}

// FailureKind tells apart what can be told apart from here.
type FailureKind string

// The kinds of failures.
const (
	Refused     FailureKind = "refused"     // the host is there and says that nobody listens
	Unreachable FailureKind = "unreachable" // no route, or nobody has the address
	Silent      FailureKind = "silent"      // nothing came back
	Broken      FailureKind = "broken"      // something else
)

// Failure is why there is no answer.
type Failure struct {
	Kind FailureKind
	Text string
}

// ClusterAnswer is what the apiserver says.
type ClusterAnswer struct {
	// Source names the apiserver; empty if it was not asked.
	Source string
	// Problem is why it could not say more, one line; Down is set if that is its fault and not that of our rights.
	Problem string
	Down    bool
	// Service is what the name or the address belongs to; nil if unknown, or Missing.
	Service *Service
	// Missing is the namespace/name of a Service that the name is for and that does not exist; Others are those that
	// its namespace has.
	Missing string
	Others  []string
	// Port is the Service's port that counts, nil if it has no such one.
	Port *ServicePort
	// Node is the name of this host's Node.
	Node string
}

// Service is a Service with all that is behind it.
type Service struct {
	Namespace, Name string
	ExternalName    string
	IPs             []netip.Addr // none: headless
	Ports           []ServicePort
	Endpoints       []ServiceEndpoint
	LocalOnly       bool // internalTrafficPolicy: Local
	Sticky          bool // sessionAffinity: ClientIP
	Selectorless    bool // its EndpointSlices are made by hand
}

// ServicePort is one port of a Service.
type ServicePort struct {
	Name     string
	Protocol string
	Port     uint16
}

// ServiceEndpoint is one address behind a Service, with its ports by the names of the Service's.
type ServiceEndpoint struct {
	Address                     netip.Addr
	Ready, Serving, Terminating bool // as its EndpointSlice has them
	Pod, Node                   string
	Ports                       map[string]uint16
}

// Role is what an address is to a target.
type Role string

// The roles.
const (
	RoleService  Role = "Service"  // its cluster address
	RoleEndpoint Role = "endpoint" // behind a Service
	RoleAddress  Role = "address"  // none of both, as far as is known
)

// Connection is how connecting went.
type Connection struct {
	Role    Role
	To      netip.AddrPort
	Pod     string
	Tries   int
	Good    int // of these
	Took    time.Duration
	Failure *Failure // of a try that failed; nil if none did
}

// works is whether any try succeeded.
func (c Connection) works() bool { return c.Good > 0 }
