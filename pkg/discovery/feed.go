package discovery

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

const resourceNamespaces = "namespaces"

const remedyForbidden = "; to keep answers for longer than a few seconds apply scripts/rbac-coherence.yaml"

// feed tells one consumer all changes of Services, EndpointSlices and namespaces, one at a time. It is not needed for
// following the cluster's DNS: what is wrong with it is wrong with nothing else.
type feed struct {
	tell func(cluster.Change) // nil if nobody asked
	log  *zap.Logger

	mu      sync.Mutex
	sources map[string]error // what keeps a source from being in step, nil if nothing does
	state   cluster.Coherence
}

// errBegins is what keeps a source from being in step that has not been read yet.
var errBegins = errors.New("the cluster's objects have not been read yet")

func newFeed(tell func(cluster.Change), log *zap.Logger) *feed {
	f := &feed{tell: tell, log: log, sources: make(map[string]error)}
	if tell != nil {
		for _, resource := range []string{resourceServices, resourceSlices, resourceNamespaces} {
			f.sources[resource] = errBegins
		}
		f.state = cluster.Coherence{State: cluster.CoherenceLost, Since: time.Now(), Reason: errBegins.Error()}
	}
	return f
}

// say hands a change to the consumer.
func (f *feed) say(c cluster.Change) {
	if f.tell == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tell(c)
}

// inStep notes that all of a resource has been told, and each change will be.
func (f *feed) inStep(resource string) { f.note(resource, nil) }

// behind notes that changes of a resource may be missed, and why.
func (f *feed) behind(resource string, err error) { f.note(resource, err) }

func (f *feed) note(resource string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sources[resource] = err
	next := cluster.Coherence{State: cluster.Coherent}
	for _, resource := range []string{resourceServices, resourceSlices, resourceNamespaces} {
		if err := f.sources[resource]; err != nil && next.State != cluster.CoherenceForbidden {
			next.State, next.Reason = cluster.CoherenceLost, resource+": "+err.Error()
			if apierrors.IsForbidden(err) {
				next.State, next.Reason = cluster.CoherenceForbidden, "not allowed to follow "+resource+" of all namespaces"+remedyForbidden
			}
		}
	}
	before := f.state
	if next.State == before.State {
		f.state.Reason = next.Reason
		return
	}
	next.Since = time.Now()
	f.state = next
	f.log.Info("changes of the cluster's objects", zap.Stringer("state", next.State), zap.String("reason", next.Reason))
	switch {
	case next.State == cluster.Coherent:
		f.tell(cluster.Change{Kind: cluster.KindSynced})
	case before.State == cluster.Coherent:
		f.tell(cluster.Change{Kind: cluster.KindLost})
	}
}

// coherence returns the state. It may be called from any goroutine but from within tell.
func (f *feed) coherence() cluster.Coherence {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state
}

// Coherence says whether each change of the cluster's objects is told to [Options.Changes].
func (w *Watcher) Coherence() cluster.Coherence { return w.feed.coherence() }

// followers are what the feed is made from, none if nobody asked. Each runs until its context ends.
func (w *Watcher) followers(api kubernetes.Interface) []func(context.Context) {
	if w.feed.tell == nil {
		return nil
	}
	services, endpoints, namespaces := api.CoreV1().Services(""), api.DiscoveryV1().EndpointSlices(""), api.CoreV1().Namespaces()
	return []func(context.Context){
		newFollower(w, resourceServices, compactService, w.told.services, lister(services.List), services.Watch,
			func(p cluster.Pair[cluster.Service]) cluster.Change {
				return cluster.Change{Kind: cluster.KindService, Service: p}
			}).run,
		newFollower(w, resourceSlices, compactSlice, w.told.slices, lister(endpoints.List), endpoints.Watch,
			func(p cluster.Pair[cluster.Slice]) cluster.Change {
				return cluster.Change{Kind: cluster.KindSlice, Slice: p}
			}).run,
		newFollower(w, resourceNamespaces, compactNamespace, w.told.namespaces, lister(namespaces.List), namespaces.Watch,
			func(cluster.Pair[struct{}]) cluster.Change { return cluster.Change{Kind: cluster.KindNamespace} }).run,
	}
}
