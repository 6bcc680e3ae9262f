package cluster

import (
	"net/netip"
	"time"
	"unique"
)

// Service is what the names of a Kubernetes Service and their answers depend on. It is immutable once delivered.
type Service struct {
	ClusterIPs   []netip.Addr // none for a headless one, and for an alias
	Headless     bool         // its name has the addresses of its endpoints
	ExternalName string       // of an alias (CNAME), else empty; as the API has it
	Ports        []Port
}

// Port is a named port of a Service or of an EndpointSlice; 0 stands for a number that is not given.
type Port struct {
	Name, Protocol string
	Number         uint16
}

// Slice is what names and answers depend on of an EndpointSlice. It is immutable once delivered.
type Slice struct {
	Service string // in the same namespace; empty for none
	Ports   []Port
	Members []Member

	// Opaque says that it has endpoints whose addresses are no IP addresses: they are not among the Members.
	Opaque bool
}

// Member is an address of an endpoint that is ready; of others no name tells, whether they end or are not ready yet.
// (For a Service that publishes those that are not ready the API itself calls them ready.) It is comparable.
type Member struct {
	Address  netip.Addr
	Hostname string                // empty for none
	Pod      string                // empty for none; CoreDNS may take it as the name
	Zone     unique.Handle[string] // topology; many share one
}

// Kind says what a [Change] is about.
type Kind uint8

// The kinds of changes.
const (
	// KindService: Service has a Service before and after.
	KindService Kind = iota + 1
	// KindSlice: Slice has an EndpointSlice before and after.
	KindSlice
	// KindNamespace: a namespace has come, or gone.
	KindNamespace
	// KindCorefile: what answers which names may be different now.
	KindCorefile
	// KindSynced: all objects that exist have been told, and each change will be from here on.
	KindSynced
	// KindLost: changes may be missed from here on, until the next KindSynced.
	KindLost
)

// Change is one change of the cluster's objects. After KindLost nothing that was told is to be relied upon; what was missed is
// told before the next KindSynced, as changes of what was told before.
type Change struct {
	Kind            Kind
	Namespace, Name string // of the object; a namespace has only a Name
	Version         string // of the object or, once it is gone, of its end; may be empty
	Gone            bool   // the object does not exist any more

	Service Pair[Service]
	Slice   Pair[Slice]
}

// Pair is an object before and after a change, nil where there was or is none.
type Pair[T any] struct{ Old, New *T }

// CoherenceState says whether changes of the cluster's objects are told.
type CoherenceState uint8

// The states of [Coherence].
const (
	CoherenceOff       CoherenceState = iota // nobody asked for it
	CoherenceLost                            // not, or not yet
	CoherenceForbidden                       // not, since the apiserver does not permit it
	Coherent                                 // each of them
)

func (s CoherenceState) String() string {
	return [...]string{"off", "lost", "forbidden", "coherent"}[s]
}

// Coherence is whether, since when and why the cluster's objects are known as they are.
type Coherence struct {
	State  CoherenceState
	Since  time.Time
	Reason string // one line, empty if coherent
}
