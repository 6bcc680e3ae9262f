package diagnose

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// Errors that a ClusterView gives.
var (
	ErrNoCluster = errors.New("no kubeconfig was found")
	ErrNoService = errors.New("no such Service")
	ErrDown      = errors.New("the apiserver does not answer")
)

// KernelVerdict is the attached program's about one query.
type KernelVerdict struct {
	Reason   string // by its name in reasons.h; empty if it does not look at such packets
	Steered  bool
	Fallback bool // steered to an upstream server of the host
	Cached   bool // answered from the kernel
}

// KernelView asks the attached programs.
type KernelView interface {
	// Verdict runs the program on a query that this host would send, without sending it.
	Verdict(from, to netip.AddrPort, message []byte) (KernelVerdict, error)
	// SteeredTo returns where the query of a socket, with a DNS ID, went.
	SteeredTo(client netip.AddrPort, id uint16) (server netip.AddrPort, found bool, err error)
}

// ClusterView asks the apiserver. Its errors match ErrNoCluster, ErrNoService or ErrDown where they are one of these.
type ClusterView interface {
	Source() string
	Node() string // of this host
	Close()
	Service(ctx context.Context, namespace, name string) (Service, error)
	ServiceOf(ctx context.Context, address netip.Addr) (Service, error)
	ServiceNames(ctx context.Context, namespace string) ([]string, error)
}

// Checker gathers the evidence about a name. Every field is required but Kernel.
type Checker struct {
	Host   CheckedHost
	Kernel KernelView
	// KernelProblem says why there is no Kernel although programs are attached.
	KernelProblem error
	// Cluster finds the apiserver, when it is needed.
	Cluster func() (ClusterView, error)
	// Route says how this host reaches an address, in a few words.
	Route  func(netip.Addr) string
	Dialer Dialer
	// Patience bounds each query and each connection, and twice of it each question to the apiserver.
	Patience time.Duration
}

const (
	dnsPort = 53

	// resolverTries is how often a query is sent that gets no answer, as glibc, musl and Go have it.
	resolverTries = 2

	// maxConnections is how many endpoints are connected to at all, parallelConnections how many at the same time.
	maxConnections      = 32
	parallelConnections = 8

	// serviceRetries more connections are tried to a Service address of which one failed while an endpoint does not
	// answer: each is given to an endpoint at random, and one chance in 256 is left to meet one of a bad half only.
	serviceRetries = 8
)

// Gather asks everybody. It takes a few times the patience at the most.
func (c *Checker) Gather(ctx context.Context, target Target) Evidence {
	e := Evidence{Target: target, Host: c.Host, Decisive: -1}
	if _, isAddress := target.Address(); !isAddress {
		c.gatherNames(ctx, &e)
	}
	c.gatherCluster(ctx, &e)
	c.gatherConnections(ctx, &e)
	return e
}

func (c *Checker) gatherNames(ctx context.Context, e *Evidence) {
	for _, name := range candidates(e.Target.Name, c.Host.Search, c.Host.Dots) {
		query := c.query(ctx, name)
		e.Queries = append(e.Queries, query)
		if query.Reply.Failure != nil || len(query.Reply.Addresses) > 0 {
			break // as a resolver does
		}
	}
	e.Decisive = decisive(e.Queries)
	query := e.Queries[e.Decisive]
	if end := query.alias(); end != "" {
		alias := c.query(ctx, end)
		e.Alias = &alias
	}
	var group sync.WaitGroup
	if query.InZone {
		group.Go(func() { e.CoreDNS = c.askAll(ctx, c.Host.Endpoints, query.Name) })
	} else {
		group.Go(func() { e.Upstreams = c.askAll(ctx, c.Host.Upstreams, query.Name) })
	}
	if len(c.Host.Listen) > 0 {
		group.Go(func() {
			reply, _ := c.ask(ctx, "tcp", c.Host.Listen[0], query.Name)
			e.Forwarder = &reply
		})
	}
	group.Wait()
}

// alias is the name that a query ended at without an address, empty if it did not.
func (q Query) alias() string {
	if q.Reply.Failure != nil || len(q.Reply.Addresses) > 0 || len(q.Reply.Aliases) == 0 {
		return ""
	}
	return q.Reply.Aliases[len(q.Reply.Aliases)-1]
}

// decisive is the index of the query that decides: one with an address, else one that failed, else one for a name that
// exists, else one for a cluster name, else the last.
func decisive(queries []Query) int {
	for _, counts := range []func(Query) bool{
		func(q Query) bool { return len(q.Reply.Addresses) > 0 },
		func(q Query) bool { return q.Reply.Failure != nil },
		func(q Query) bool { return q.Reply.Rcode != dns.RcodeSuccess && q.Reply.Rcode != dns.RcodeNameError },
		func(q Query) bool { return q.Reply.Rcode == dns.RcodeSuccess },
		func(q Query) bool { return q.InZone },
	} {
		if i := slices.IndexFunc(queries, counts); i >= 0 {
			return i
		}
	}
	return len(queries) - 1
}

// server is who programs of this host ask first. Without a file, or a server in it, they ask this host (resolv.conf(5)).
func (h CheckedHost) server() netip.AddrPort {
	if len(h.Servers) == 0 {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), dnsPort)
	}
	return netip.AddrPortFrom(h.Servers[0], dnsPort)
}

// query asks for a name as a program of this host would.
func (c *Checker) query(ctx context.Context, name string) Query {
	server := c.Host.server()
	q := Query{Name: name, Path: c.path(server, name)}
	_, q.InZone = inZone(name, c.Host.Zones)
	for try := 1; try <= resolverTries; try++ {
		reply, questions := c.ask(ctx, "udp", server, name)
		reply.Tries = try
		reply.Steered = c.steered(questions)
		q.Reply = reply
		if reply.Failure == nil {
			break
		}
	}
	return q
}

// path finds out who would take the query to a server, by the program itself where it can be asked.
func (c *Checker) path(server netip.AddrPort, name string) Path {
	_, in := inZone(name, c.Host.Zones)
	next := Direct
	if slices.Contains(c.Host.Listen, server) {
		next = Forwarder
	}
	if !c.Host.InKernel {
		return Path{Carrier: next}
	}
	problem := c.KernelProblem
	if problem == nil {
		verdict, err := c.verdict(server, name)
		switch {
		case err != nil:
			problem = err
		case verdict.Fallback:
			return Path{Carrier: Fallback, Reason: verdict.Reason}
		case verdict.Cached:
			return Path{Carrier: Cached, Reason: verdict.Reason}
		case verdict.Steered:
			return Path{Carrier: Kernel, Reason: verdict.Reason}
		default:
			return Path{Carrier: next, Reason: verdict.Reason}
		}
	}
	if in && next == Forwarder && len(c.Host.Endpoints) > 0 {
		next = Kernel
	}
	return Path{Carrier: next, Inferred: problem.Error()}
}

// someClientPort is the source port of the query that the program is asked about: which one makes no difference to it.
const someClientPort = 40000

func (c *Checker) verdict(server netip.AddrPort, name string) (KernelVerdict, error) {
	message, err := newQuestion(name, dns.TypeA).Pack()
	if err != nil {
		return KernelVerdict{}, err
	}
	from := netip.AddrPortFrom(server.Addr(), someClientPort)
	return c.Kernel.Verdict(from, server, message)
}

// steered returns where the kernel sent the question that failed, or any of them.
func (c *Checker) steered(questions []*question) netip.AddrPort {
	if c.Kernel == nil {
		return netip.AddrPort{}
	}
	var to netip.AddrPort
	for _, q := range questions {
		server, found, err := c.Kernel.SteeredTo(q.local, q.message.Id)
		if err == nil && found && (!to.IsValid() || q.err != nil) {
			to = server
		}
	}
	return to
}

// askAll asks servers without us. Of those that don't answer it finds out whether they can be reached.
func (c *Checker) askAll(ctx context.Context, servers []netip.AddrPort, name string) []Reply {
	replies := make([]Reply, len(servers))
	var group sync.WaitGroup
	for i, server := range servers {
		group.Go(func() {
			reply, _ := c.ask(ctx, "udp", server, name)
			if reply.Failure != nil {
				_, reply.TCP = c.connect(ctx, server)
				reply.Way = c.Route(server.Addr())
			}
			replies[i] = reply
		})
	}
	group.Wait()
	return replies
}

// gatherCluster asks the apiserver what the name or the address is, where it may be of the cluster.
func (c *Checker) gatherCluster(ctx context.Context, e *Evidence) {
	address, isAddress := e.Target.Address()
	if !isAddress && !e.Queries[e.Decisive].InZone {
		return
	}
	view, err := c.Cluster()
	if err != nil {
		e.Cluster.Problem, e.Cluster.Down = err.Error(), !errors.Is(err, ErrNoCluster)
		return
	}
	defer view.Close()
	e.Cluster.Source, e.Cluster.Node = view.Source(), view.Node()
	ctx, cancel := context.WithTimeout(ctx, 2*c.Patience)
	defer cancel()
	if isAddress {
		err = e.Cluster.take(view.ServiceOf(ctx, address))
	} else if err = c.gatherNamed(ctx, view, e); errors.Is(err, ErrNoService) {
		err = nil
	}
	if err != nil && !errors.Is(err, ErrNoService) {
		e.Cluster.Problem, e.Cluster.Down = err.Error(), errors.Is(err, ErrDown)
	}
	if e.Cluster.Service == nil {
		return
	}
	e.Cluster.Port = e.Cluster.Service.port(e.Target.Port)
	if e.Cluster.Port == nil && !e.translated() {
		e.Cluster.Port = e.Cluster.Service.port(0)
	}
}

func (a *ClusterAnswer) take(service Service, err error) error {
	if err == nil {
		a.Service = &service
	}
	return err
}

// gatherNamed looks the Service of a name up, by the name where it has the form of a Service's.
func (c *Checker) gatherNamed(ctx context.Context, view ClusterView, e *Evidence) error {
	query := e.Queries[e.Decisive]
	namespace, name, ok := serviceOf(query.Name, c.Host.Zones)
	if !ok {
		if len(query.Reply.Addresses) == 0 {
			return nil
		}
		return e.Cluster.take(view.ServiceOf(ctx, query.Reply.Addresses[0]))
	}
	err := e.Cluster.take(view.Service(ctx, namespace, name))
	if s := e.Cluster.Service; err == nil && s.ExternalName != "" {
		if namespace, name, ok = serviceOf(dns.Fqdn(s.ExternalName), c.Host.Zones); !ok {
			return nil
		}
		err = e.Cluster.take(view.Service(ctx, namespace, name))
	}
	if !errors.Is(err, ErrNoService) {
		return err
	}
	e.Cluster.Missing = namespace + "/" + name
	e.Cluster.Others, err = view.ServiceNames(ctx, namespace)
	return err
}

// port is the Service's port with a number, TCP before others; without a number its first for TCP, or the only one.
func (s Service) port(number uint16) *ServicePort {
	matches := slices.DeleteFunc(slices.Clone(s.Ports), func(p ServicePort) bool { return number != 0 && p.Port != number })
	if i := slices.IndexFunc(matches, func(p ServicePort) bool { return p.Protocol == "TCP" }); i >= 0 {
		return &matches[i]
	}
	if len(matches) > 0 {
		return &matches[0]
	}
	return nil
}

// gatherConnections connects to whom the name leads, and past the Service address to each endpoint.
func (c *Checker) gatherConnections(ctx context.Context, e *Evidence) {
	e.Connections = c.plan(e)
	var toService []*Connection
	c.tryAll(ctx, e.Connections)
	badEndpoint := false
	for i := range e.Connections {
		connection := &e.Connections[i]
		if connection.Role == RoleService && !connection.works() {
			toService = append(toService, connection)
		}
		badEndpoint = badEndpoint || connection.Role == RoleEndpoint && !connection.works()
	}
	if !badEndpoint || e.Cluster.Service.Sticky { // then all go to the same
		return
	}
	for _, connection := range toService {
		again := make([]Connection, serviceRetries)
		for i := range again {
			again[i] = *connection
			again[i].Tries, again[i].Good = 0, 0
		}
		c.tryAll(ctx, again)
		for _, try := range again {
			connection.Tries += try.Tries
			connection.Good += try.Good
		}
	}
}

// plan lists the connections to be tried. What speaks UDP only is not: its silence says nothing.
func (c *Checker) plan(e *Evidence) (connections []Connection) {
	service, port := e.Cluster.Service, e.Cluster.Port
	if service == nil || service.ExternalName != "" {
		return toEach(e.addresses(), RoleAddress, e.Target.Port)
	}
	if endpoints := e.targetEndpoints(); len(endpoints) > 0 {
		for _, endpoint := range endpoints {
			if number, ok := service.reached(endpoint, port, e.Target.Port); ok {
				connections = append(connections, endpoint.connection(number))
			}
		}
		return connections
	}
	if port != nil && port.Protocol == "TCP" && len(service.IPs) > 0 {
		connections = toEach(e.addresses(), RoleService, port.Port)
	}
	for _, endpoint := range e.delivered() {
		given := e.Target.Port
		if len(service.IPs) > 0 {
			given = 0 // it is the Service's and not the endpoint's
		}
		number, ok := service.reached(endpoint, port, given)
		if !ok {
			continue
		}
		if len(connections) == maxConnections {
			e.Untried++
			continue
		}
		connections = append(connections, endpoint.connection(number))
	}
	return connections
}

// delivered are the endpoints that a connection to the Service is given to, as kube-proxy chooses them: the ready ones, and
// without any those that serve on while they end; of these, with internalTrafficPolicy Local, the ones on this host's Node.
// A headless Service's are those that DNS answers with, the ready ones.
func (e Evidence) delivered() []ServiceEndpoint {
	s := e.Cluster.Service
	local := s.LocalOnly && len(s.IPs) > 0 && slices.ContainsFunc(e.addresses(), func(a netip.Addr) bool { return slices.Contains(s.IPs, a) })
	return s.deliverable(func(endpoint ServiceEndpoint) bool { return !local || endpoint.Node == e.Cluster.Node })
}

func (s Service) deliverable(where func(ServiceEndpoint) bool) (ready []ServiceEndpoint) {
	var ending []ServiceEndpoint
	for _, endpoint := range s.Endpoints {
		switch {
		case !where(endpoint):
		case endpoint.Ready:
			ready = append(ready, endpoint)
		case endpoint.Serving && endpoint.Terminating && len(s.IPs) > 0:
			ending = append(ending, endpoint)
		}
	}
	if len(ready) == 0 {
		return ending
	}
	return ready
}

func anywhere(ServiceEndpoint) bool { return true }

// targetEndpoints are those that the target is the address or the name of, and not that of their Service. A Pod's names are
// 172-20-1-10.NAMESPACE.pod.ZONE and, below a Service's, its hostname or the same form of its address.
func (e Evidence) targetEndpoints() (found []ServiceEndpoint) {
	service := e.Cluster.Service
	if service == nil || service.ExternalName != "" || e.isOfService(service) {
		return nil
	}
	for _, address := range e.addresses() {
		i := slices.IndexFunc(service.Endpoints, func(e ServiceEndpoint) bool { return e.Address == address })
		if i < 0 || slices.Contains(service.IPs, address) {
			return nil
		}
		found = append(found, service.Endpoints[i])
	}
	return found
}

// isOfService is whether the target is a name of a Service as a whole.
func (e Evidence) isOfService(s *Service) bool {
	if _, isAddress := e.Target.Address(); isAddress {
		return false
	}
	name := strings.ToLower(e.Queries[e.Decisive].Name)
	return strings.HasPrefix(name, s.Name+"."+s.Namespace+".svc.") || strings.HasPrefix(name, "_")
}

// translated is whether the port that a program connects to is the Service's. A Pod's own address, which is all that a
// headless Service has, is connected to at the Pod's own port.
func (e Evidence) translated() bool {
	return len(e.targetEndpoints()) == 0 && len(e.Cluster.Service.IPs) > 0
}

// reached is the port at which an endpoint is reached: the one that was given for the endpoint itself, else the one
// that is behind the Service's port.
func (s Service) reached(e ServiceEndpoint, port *ServicePort, given uint16) (uint16, bool) {
	if given != 0 {
		return given, true
	}
	if port == nil || port.Protocol != "TCP" {
		return 0, false
	}
	number, ok := e.Ports[port.Name]
	return number, ok
}

func (e ServiceEndpoint) connection(port uint16) Connection {
	return Connection{Role: RoleEndpoint, To: netip.AddrPortFrom(e.Address, port), Pod: e.Pod}
}

// addresses are what the target leads to.
func (e Evidence) addresses() []netip.Addr {
	if address, isAddress := e.Target.Address(); isAddress {
		return []netip.Addr{address}
	}
	if e.Alias != nil {
		return e.Alias.Reply.Addresses
	}
	return e.Queries[e.Decisive].Reply.Addresses
}

func toEach(addresses []netip.Addr, role Role, port uint16) (connections []Connection) {
	if port == 0 {
		return nil
	}
	for _, address := range addresses[:min(len(addresses), maxConnections)] {
		connections = append(connections, Connection{Role: role, To: netip.AddrPortFrom(address, port)})
	}
	return connections
}

// tryAll tries each connection once, a few at the same time.
func (c *Checker) tryAll(ctx context.Context, connections []Connection) {
	slots := make(chan struct{}, parallelConnections)
	var group sync.WaitGroup
	for i := range connections {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			connection := &connections[i]
			took, failure := c.connect(ctx, connection.To)
			connection.Tries++
			if failure != nil {
				connection.Failure = failure
				return
			}
			connection.Good++
			connection.Took = took
		})
	}
	group.Wait()
}
