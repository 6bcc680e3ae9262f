package discovery

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Watcher follows the CoreDNS Service of a cluster. It implements [Source].
//
// One goroutine, Run's own, builds and publishes snapshots; informers and health
// only wake it. Bursts of events therefore become one snapshot, without a timer.
type Watcher struct {
	opts   Options
	where  string // the apiserver and how we came to it, for messages
	log    *zap.Logger
	client *http.Client // nil with a fake clientset

	health   *health
	services informer
	slices   informer
	wake     chan struct{} // holds one "look again"
	out      mailbox

	started atomic.Bool
	stopped chan struct{} // closed when Run returns
	synced  chan struct{} // closed when both first lists have been seen
	ready   chan struct{} // closed when a snapshot first has somebody to ask

	mu      sync.Mutex
	current *Snapshot // nil before the first sync
}

// New finds the kubeconfig and prepares a Watcher. It reads files but does not
// use the network. Errors name the file and the remedy; [ErrNoCluster] if there
// is no kubeconfig anywhere.
func New(o Options) (*Watcher, error) { return newFromKubeconfig(o, defaultTimeouts) }

// newFromKubeconfig is New with deadlines of one's own.
func newFromKubeconfig(o Options, t timeouts) (*Watcher, error) {
	o = o.withDefaults()
	path, why, kube, err := findKubeconfig(o)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*Watcher, error) {
		return nil, fmt.Errorf("kubeconfig %s (%s): %w; repair it or name another one with --kubeconfig", path, why, oneLine(err))
	}
	cfg, err := restConfig(kube)
	if err != nil {
		return fail(err)
	}
	cfg.UserAgent = "k2s-dnsbpf/discovery"
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = cfg.ContentType + ",application/json"
	cfg.Timeout = 0 // would end watches too; see timeouts
	hc, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return fail(err)
	}
	cs, err := kubernetes.NewForConfigAndClient(cfg, hc)
	if err != nil {
		return fail(err)
	}
	o.Logger.Info("cluster found", zap.String("kubeconfig", path), zap.String("reason", why), zap.String("apiserver", cfg.Host))
	w, err := newWatcher(cs, o, fmt.Sprintf("apiserver %s, kubeconfig %s", cfg.Host, path), t)
	if err != nil {
		return nil, err
	}
	w.client = hc
	return w, nil
}

// newWatcher is New behind the search for a cluster.
func newWatcher(c kubernetes.Interface, o Options, where string, t timeouts) (*Watcher, error) {
	w := &Watcher{
		opts:    o,
		where:   where,
		log:     o.Logger,
		wake:    make(chan struct{}, 1),
		out:     newMailbox(),
		stopped: make(chan struct{}),
		synced:  make(chan struct{}),
		ready:   make(chan struct{}),
	}
	w.health = newHealth(w.log, w.look, resourceServices, resourceSlices)
	var err error
	if w.services, err = newInformer(serviceRequest(c, o, t, w.health), &corev1.Service{}, w.look); err != nil {
		return nil, err
	}
	if w.slices, err = newInformer(sliceRequest(c, o, t, w.health), &discoveryv1.EndpointSlice{}, w.look); err != nil {
		return nil, err
	}
	return w, nil
}

// look wakes Run's goroutine; it never blocks.
func (w *Watcher) look() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Run implements [Source]: it follows the cluster until ctx ends, then waits for
// every goroutine that it started and returns nil. A second call is an error.
func (w *Watcher) Run(ctx context.Context) error {
	if w.started.Swap(true) {
		return errors.New("discovery: Run called twice; make a new Watcher")
	}
	var wg sync.WaitGroup
	defer func() {
		wg.Wait()
		if w.client != nil {
			utilnet.CloseIdleConnectionsFor(w.client.Transport)
		}
		close(w.stopped)
	}()
	wg.Go(func() { w.services.RunWithContext(ctx) })
	wg.Go(func() { w.slices.RunWithContext(ctx) })

	for _, synced := range []<-chan struct{}{w.services.synced, w.slices.synced} {
		select {
		case <-synced:
		case <-ctx.Done():
			return nil
		}
	}
	close(w.synced)
	for {
		w.update()
		select {
		case <-w.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// update builds a snapshot from what the informers hold and publishes it if it
// means something new. Only Run's goroutine calls it.
func (w *Watcher) update() {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := w.build()
	if w.current != nil && w.current.Equal(next) {
		return
	}
	w.current = &next
	w.out.put(next)
	level := zap.DebugLevel
	if next.Stale && w.health.problem() == nil { // else health has said so
		level = zap.WarnLevel
	}
	w.log.Log(level, "endpoints", zap.Any("endpoints", next.Addresses()), zap.Any("serviceIPs", next.ServiceIPs), zap.String("reason", next.Reason))
	if len(next.Endpoints) > 0 {
		select {
		case <-w.ready:
		default:
			close(w.ready)
		}
	}
}

// build applies the rule that a good set stays until there is another one.
// w.mu is held.
func (w *Watcher) build() Snapshot {
	var last Snapshot
	if w.current != nil {
		last = w.confirmLocked()
	}
	service := w.service()
	endpoints := w.endpoints()
	next := Snapshot{Endpoints: endpoints, Updated: w.health.confirmedAt()}
	switch {
	case service == nil:
		next.Reason = fmt.Sprintf("the Service %s/%s does not exist", w.opts.Namespace, w.opts.Service)
		next.ServiceIPs = last.ServiceIPs
		next.Endpoints = nil
	case len(endpoints) == 0:
		next.Reason = fmt.Sprintf("the Service %s/%s has no ready endpoint with a UDP port named %q", w.opts.Namespace, w.opts.Service, w.opts.PortName)
		next.ServiceIPs = serviceIPs(service)
	default:
		next.ServiceIPs = serviceIPs(service)
	}
	if len(next.Endpoints) == 0 {
		next.Stale = true
		next.Endpoints = last.Endpoints
		if !last.Updated.IsZero() {
			next.Updated = last.Updated
		}
	}
	if p := w.health.problem(); p != nil {
		next.Stale, next.Reason = true, p.why
	}
	return next
}

// service returns the Service as the informer knows it, nil if it doesn't.
func (w *Watcher) service() *corev1.Service {
	obj, ok, err := w.services.GetStore().GetByKey(w.opts.Namespace + "/" + w.opts.Service)
	if err != nil || !ok {
		return nil
	}
	s, _ := obj.(*corev1.Service)
	return s
}

// endpoints returns the merged set of all slices.
func (w *Watcher) endpoints() []Endpoint {
	var all []*discoveryv1.EndpointSlice
	for _, obj := range w.slices.GetStore().List() {
		if s, ok := obj.(*discoveryv1.EndpointSlice); ok {
			all = append(all, s)
		}
	}
	return merge(all, w.opts.Namespace, w.opts.Service, w.opts.PortName)
}

// confirmLocked returns the current snapshot, which must exist, with Updated
// brought to the present if it is being confirmed all the time. w.mu is held.
func (w *Watcher) confirmLocked() Snapshot {
	s := *w.current
	if at := w.health.confirmedAt(); !s.Stale && at.After(s.Updated) {
		s.Updated = at
	}
	return s
}

// WaitForSync implements [Source]. The error matches one of the package's
// sentinels where the cause is known (ErrUnreachable, ErrUnauthorized,
// ErrForbidden, ErrCertificate, ErrServiceNotFound, ErrNoEndpoints), and the
// error of ctx.
func (w *Watcher) WaitForSync(ctx context.Context) (Snapshot, error) {
	var cause error
	select {
	case <-w.ready:
	case <-ctx.Done():
		cause = ctx.Err()
	case <-w.stopped:
		cause = errors.New("discovery was stopped")
	}
	s, _ := w.Current()
	select {
	case <-w.ready: // counts, whatever else has happened by now
		return s, nil
	default:
		return s, w.syncError(cause)
	}
}

// syncError says why there is no good snapshot yet.
func (w *Watcher) syncError(cause error) error {
	p := w.health.problem()
	if p == nil {
		p = w.missing()
	}
	return &problem{
		kind:   p.kind,
		why:    fmt.Sprintf("find Service %s/%s (%s): %s", w.opts.Namespace, w.opts.Service, w.where, p.why),
		remedy: p.remedy,
		err:    errors.Join(p.err, cause),
	}
}

// missing describes what there is no error of a request for.
func (w *Watcher) missing() *problem {
	select {
	case <-w.synced:
	default:
		return &problem{
			kind:   ErrUnreachable,
			why:    "the apiserver has not answered yet",
			remedy: "wait longer with --wait, check the kubeconfig's server address, or name a CoreDNS with --dns-endpoint",
		}
	}
	if w.service() == nil {
		return &problem{
			kind:   ErrServiceNotFound,
			why:    "the cluster has no such Service",
			remedy: "install CoreDNS, or name its endpoint with --dns-endpoint",
		}
	}
	return &problem{
		kind:   ErrNoEndpoints,
		why:    fmt.Sprintf("the Service has no ready endpoint with a UDP port named %q", w.opts.PortName),
		remedy: "look at the CoreDNS pods (kubectl -n " + w.opts.Namespace + " get pods,endpointslices), or name an endpoint with --dns-endpoint",
	}
}

// Snapshots implements [Source].
func (w *Watcher) Snapshots() <-chan Snapshot { return w.out }

// Current implements [Source]. While the watches are open, Updated is the time
// of the call.
func (w *Watcher) Current() (Snapshot, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil {
		return Snapshot{}, false
	}
	return w.confirmLocked(), true
}

// LastError returns the newest error of a request, in one line with its remedy,
// also when all has been well since; nil if there never was one.
func (w *Watcher) LastError() error { return w.health.lastError() }
