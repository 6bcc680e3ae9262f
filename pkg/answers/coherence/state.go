package coherence

import (
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// DNS types that [State.Expect] knows (RFC 1035, 3596).
const (
	typeA    = 1
	typeAAAA = 28
)

// State is what the API says about names, as told by changes. It shares the changes' objects. Its methods may be called from
// any goroutine.
type State struct {
	mu         sync.RWMutex
	zones      []string // of the cluster, lower case
	synced     bool
	namespaces map[string]*namespace
	aliases    map[string]string // of ExternalName Services in the zones: the name, without the zone, to what it leads to
}

// namespace is one that has been told of, or has a Service or a slice.
type namespace struct {
	exists   bool
	services map[string]*service
}

// service is a Service's name: either part may be told first, and may be gone first.
type service struct {
	object *cluster.Service
	slices map[string]*cluster.Slice
}

// New returns a State for the cluster's zones, which knows nothing yet.
func New(zones ...string) *State {
	s := &State{namespaces: make(map[string]*namespace), aliases: make(map[string]string)}
	s.SetZones(zones...)
	return s
}

// SetZones replaces the cluster's zones. What is affected by that the caller knows.
func (s *State) SetZones(zones ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.zones = nil
	for _, zone := range zones {
		s.zones = append(s.zones, strings.ToLower(strings.TrimSuffix(zone, ".")))
	}
	clear(s.aliases)
	for name, n := range s.namespaces {
		for service, at := range n.services {
			if at.object != nil {
				s.alias(service, name, at.object)
			}
		}
	}
}

// Synced reports whether the State is in step with the cluster.
func (s *State) Synced() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.synced
}

// Apply notes a change and returns all that it affects.
func (s *State) Apply(c cluster.Change) Affected {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := Of(c, s.zones...)
	switch c.Kind {
	case cluster.KindSynced, cluster.KindLost:
		s.synced = c.Kind == cluster.KindSynced
	case cluster.KindNamespace:
		s.in(c.Name).exists = !c.Gone
		s.tidy(c.Name)
	case cluster.KindService:
		before := s.hasServices(c.Namespace)
		s.at(c.Namespace, c.Name).object = c.Service.New
		s.alias(c.Name, c.Namespace, c.Service.New)
		s.tidy(c.Namespace, c.Name)
		if before != s.hasServices(c.Namespace) {
			for _, zone := range s.zones {
				a.Exact = append(a.Exact, join(c.Namespace, "svc", zone))
			}
		}
	case cluster.KindSlice:
		s.slice(c)
	}
	if !a.All {
		s.follow(&a)
	}
	return a
}

func (s *State) slice(c cluster.Change) {
	if old := c.Slice.Old; old != nil {
		delete(s.at(c.Namespace, old.Service).slices, c.Name)
		s.tidy(c.Namespace, old.Service)
	}
	if now := c.Slice.New; now != nil {
		at := s.at(c.Namespace, now.Service)
		if at.slices == nil {
			at.slices = make(map[string]*cluster.Slice, 1)
		}
		at.slices[c.Name] = now
	}
}

// alias notes where the name of an ExternalName Service leads to. Only what leads to other names of the cluster is of interest.
func (s *State) alias(service, namespace string, now *cluster.Service) {
	name := join(service, namespace, "svc")
	delete(s.aliases, name)
	if now == nil {
		return
	}
	target := strings.ToLower(strings.TrimSuffix(now.ExternalName, "."))
	if slices.ContainsFunc(s.zones, func(zone string) bool { return isBelow(target, zone) }) {
		s.aliases[name] = target
	}
}

// follow adds the aliases of what is affected, and theirs.
func (s *State) follow(a *Affected) {
	for more := true; more; {
		more = false
		for name, target := range s.aliases {
			if !a.Has(target) {
				continue
			}
			for _, zone := range s.zones {
				if full := join(name, zone); !a.Has(full) {
					a.Exact, more = append(a.Exact, full), true
				}
			}
		}
	}
}

func (s *State) in(name string) *namespace {
	n := s.namespaces[name]
	if n == nil {
		n = &namespace{services: make(map[string]*service)}
		s.namespaces[name] = n
	}
	return n
}

func (s *State) at(namespace, name string) *service {
	n := s.in(namespace)
	if n.services[name] == nil {
		n.services[name] = new(service)
	}
	return n.services[name]
}

// tidy forgets what has nothing in it any more.
func (s *State) tidy(namespace string, services ...string) {
	n := s.namespaces[namespace]
	for _, name := range services {
		if at := n.services[name]; at.object == nil && len(at.slices) == 0 {
			delete(n.services, name)
		}
	}
	if !n.exists && len(n.services) == 0 {
		delete(s.namespaces, namespace)
	}
}

func (s *State) hasServices(namespace string) bool {
	n := s.namespaces[namespace]
	if n == nil {
		return false
	}
	for _, at := range n.services {
		if at.object != nil {
			return true
		}
	}
	return false
}

// Expected is what the API says that an answer is.
type Expected struct {
	NoName    bool         // the name does not exist: NXDOMAIN, unless another plugin of CoreDNS knows it
	Addresses []netip.Addr // sorted; none for NODATA
}

// Expect says what the answer to a question of type A (1) or AAAA (28) is for a name of the form service.namespace.svc.zone in
// one of the zones, without regard to case and to a dot at the end. It is not known for other names and types, for aliases, and
// while the State is not in step with the cluster.
func (s *State) Expect(name string, qtype uint16) (e Expected, known bool) {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	s.mu.RLock()
	defer s.mu.RUnlock()
	i := slices.IndexFunc(s.zones, func(zone string) bool { return strings.HasSuffix(name, ".svc."+zone) })
	if i < 0 || !s.synced || qtype != typeA && qtype != typeAAAA {
		return e, false
	}
	labels := strings.Split(strings.TrimSuffix(name, ".svc."+s.zones[i]), ".")
	if len(labels) != 2 {
		return e, false
	}
	n := s.namespaces[labels[1]]
	if n == nil || !n.exists {
		return Expected{NoName: true}, true
	}
	at := n.services[labels[0]]
	if at == nil || at.object == nil {
		return Expected{NoName: true}, true
	}
	return at.expect(qtype)
}

func (s *service) expect(qtype uint16) (e Expected, known bool) {
	all := s.object.ClusterIPs
	switch {
	case s.object.ExternalName != "":
		return e, false
	case s.object.Headless:
		all = nil
		for _, slice := range s.slices {
			if slice.Opaque {
				return e, false
			}
			for _, m := range slice.Members {
				all = append(all, m.Address)
			}
		}
		e.NoName = len(all) == 0 // that is how CoreDNS has it
	case len(all) == 0:
		return e, false // it has no address yet
	}
	for _, address := range all {
		if address.Is4() == (qtype == typeA) {
			e.Addresses = append(e.Addresses, address)
		}
	}
	slices.SortFunc(e.Addresses, netip.Addr.Compare)
	e.Addresses = slices.Compact(e.Addresses)
	return e, true
}
