package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// Watcher follows the CoreDNS Service of a cluster. It implements [Source].
//
// One goroutine, Run's own, builds and publishes snapshots; informers and health
// only wake it. Bursts of events therefore become one snapshot, without a timer.
type Watcher struct {
	opts Options
	log  *zap.Logger

	timeouts timeouts
	health   *health
	wake     chan struct{} // holds one "look again"
	out      mailbox

	started atomic.Bool
	stopped chan struct{} // closed when Run returns
	synced  chan struct{} // closed when the first lists of Service and slices have been seen
	ready   chan struct{} // closed when a snapshot first has somebody to ask

	mu      sync.Mutex
	current *Snapshot // nil before the first sync
	ports   []uint16  // of the last endpoints that there were
	session           // what is followed now

	connection        // what it is followed by
	renewal    string // what keeps a changed kubeconfig from use, empty for nothing

	corefile readCorefile

	feed *feed
	told told // what the feed has told; for its followers, one each
}

// New finds the kubeconfig and prepares a Watcher. It reads files but does not
// use the network. Errors name the file and the remedy; [ErrNoCluster] if there
// is no kubeconfig anywhere.
func New(o Options) (*Watcher, error) { return newFromKubeconfig(o, defaultTimeouts) }

// newFromKubeconfig is New with given deadlines.
func newFromKubeconfig(o Options, t timeouts) (*Watcher, error) {
	o = o.withDefaults()
	k, err := findKubeconfig(o)
	if err != nil {
		return nil, err
	}
	c, err := connect(k)
	if err != nil {
		return nil, err
	}
	o.Logger.Info("cluster found", zap.String("kubeconfig", k.path), zap.String("reason", k.why), zap.String("from", c.where))
	w := newWatcher(c.api, o, c.where, t)
	w.connection = c
	return w, nil
}

// connection is a client of an apiserver.
type connection struct {
	api    kubernetes.Interface
	client *http.Client // nil with a fake clientset
	where  string       // the apiserver and how we came to it, for messages
	kube   kubeconfig
}

// connect makes a client of a kubeconfig, without using the network.
func connect(k kubeconfig) (c connection, err error) {
	fail := func(err error) (connection, error) {
		return c, fmt.Errorf("kubeconfig %s (%s): %w; repair it or name another one with --kubeconfig", k.path, k.why, oneLine(err))
	}
	cfg, err := k.rest()
	if err != nil {
		return fail(err)
	}
	cfg.UserAgent = "k2s-dnsbpf/discovery"
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = cfg.ContentType + ",application/json"
	cfg.Timeout = 0 // would end watches too; see timeouts
	c.kube, c.where = k, fmt.Sprintf("apiserver %s, kubeconfig %s", cfg.Host, k.path)
	if c.client, err = withPlugin(cfg, rest.HTTPClientFor); err != nil {
		return fail(err)
	}
	if c.api, err = kubernetes.NewForConfigAndClient(cfg, c.client); err != nil {
		return fail(err)
	}
	return c, nil
}

func (c connection) close() {
	if c.client != nil {
		utilnet.CloseIdleConnectionsFor(c.client.Transport)
	}
}

// newWatcher is New behind the search for a cluster.
func newWatcher(c kubernetes.Interface, o Options, where string, t timeouts) *Watcher {
	w := &Watcher{
		opts:     o,
		log:      o.Logger,
		timeouts: t,
		wake:     make(chan struct{}, 1),
		out:      newMailbox(),
		stopped:  make(chan struct{}),
		synced:   make(chan struct{}),
		ready:    make(chan struct{}),
		corefile: readCorefile{gone: make(map[string]bool)},

		connection: connection{api: c, where: where},
	}
	w.health = newHealth(w.log, w.look)
	w.feed, w.told = newFeed(o.Changes, o.Logger), newTold()
	return w
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
	defer func() {
		w.close()
		close(w.stopped)
	}()
	for service := w.opts.Service; service != ""; {
		var err error
		if service, err = w.follow(ctx, service); err != nil {
			return err
		}
	}
	return nil
}

// update builds a snapshot from what the informers hold and publishes it if it
// means something new. Only Run's goroutine calls it.
func (w *Watcher) update() {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.corefile.input
	next := w.build()
	if w.corefile.input != before {
		w.feed.say(cluster.Change{Kind: cluster.KindCorefile})
	}
	if w.current != nil && w.current.Equal(next) {
		return
	}
	w.current = &next
	w.out.put(next)
	level := zap.DebugLevel
	if next.Reason != "" && w.health.problem() == nil { // else health has said so
		level = zap.WarnLevel
	}
	w.log.Log(level, "endpoints", zap.Any("endpoints", next.Addresses()), zap.Any("serviceIPs", next.ServiceIPs), zap.String("reason", next.Reason))
	if len(next.Endpoints) > 0 && !w.isReady() {
		close(w.ready)
	}
}

// unconfirm marks the current snapshot while there is a problem and nothing to build
// another one from. Only Run's goroutine calls it.
func (w *Watcher) unconfirm() {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.health.problem()
	if w.current == nil || p == nil {
		return
	}
	next := w.confirmLocked()
	next.Stale, next.Reason = true, p.why
	if !w.current.Equal(next) {
		w.current = &next
		w.out.put(next)
	}
}

// isReady reports whether there has been somebody to ask.
func (w *Watcher) isReady() bool {
	select {
	case <-w.ready:
		return true
	default:
		return false
	}
}

// build applies the rule that a good set stays until there is another one, or the
// apiserver says that there is none.
// w.mu is held.
func (w *Watcher) build() Snapshot {
	var last Snapshot
	if w.current != nil {
		last = w.confirmLocked()
	}
	service := w.service()
	endpoints, empty, notes := w.endpoints()
	all := len(endpoints)
	endpoints = endpoints[:min(all, maxEndpoints)]
	if len(endpoints) > 0 {
		w.ports = portsOf(endpoints)
	}
	zones := w.zones(w.ports)
	if all > maxEndpoints {
		zones.note("the Service %s/%s has %d endpoints: the first %d by address are asked; choose with --endpoint-preference node or zone",
			w.opts.Namespace, w.name, all, maxEndpoints)
	}
	if w.renewal != "" {
		zones.problem("the kubeconfig has changed and can't be used, the old one stays in use: %s", w.renewal)
	}
	next := Snapshot{
		Endpoints: endpoints, Updated: w.health.confirmedAt(),
		Zones: zones.zones, Notes: append(notes, zones.notes...), Problems: zones.problems, Service: w.opts.Namespace + "/" + w.name,
	}
	switch {
	case service == nil:
		next.Reason = fmt.Sprintf("the Service %s/%s does not exist", w.opts.Namespace, w.name)
		next.ServiceIPs = last.ServiceIPs
	case len(endpoints) == 0:
		next.Reason = fmt.Sprintf("the Service %s/%s has %s", w.opts.Namespace, w.name, lacks(service))
		next.ServiceIPs = serviceIPs(service)
	default:
		next.ServiceIPs = serviceIPs(service)
	}
	problem := w.health.problem()
	if confirmed := empty && w.isReady() && problem == nil; len(next.Endpoints) == 0 && !confirmed {
		next.Stale = true
		next.Endpoints = last.Endpoints
		if !last.Updated.IsZero() {
			next.Updated = last.Updated
		}
	}
	if problem != nil {
		next.Stale, next.Reason = true, problem.why
	}
	return next
}

// lacks says what a Service has not that has nobody to ask.
func lacks(s *corev1.Service) string {
	switch port := dnsPortsOf(s).udp; {
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		return "no endpoints: it is an alias of an external name"
	case port == nil:
		return "no UDP port that is DNS's: none with the number 53, and not a single one"
	case port.Name == "":
		return fmt.Sprintf("no ready endpoint with its UDP port %d", port.Port)
	default:
		return fmt.Sprintf("no ready endpoint with a UDP port named %q", port.Name)
	}
}

// portsOf returns the ports of the endpoints: of CoreDNS itself, which the Service
// may hide.
func portsOf(endpoints []Endpoint) (ports []uint16) {
	for _, e := range endpoints {
		ports = append(ports, e.Address.Port())
	}
	slices.Sort(ports)
	return slices.Compact(ports)
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
	if w.isReady() { // counts, whatever else has happened by now
		return s, nil
	}
	return s, w.syncError(cause)
}

// syncError says why there is no good snapshot yet.
func (w *Watcher) syncError(cause error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.health.problem()
	if p == nil {
		p = w.missing()
	}
	return &problem{
		kind:   p.kind,
		why:    fmt.Sprintf("find Service %s/%s (%s): %s", w.opts.Namespace, cmp.Or(w.name, w.opts.Service), w.where, p.why),
		remedy: p.remedy,
		err:    errors.Join(p.err, cause),
	}
}

// missing describes what there is no error of a request for. w.mu is held.
func (w *Watcher) missing() *problem {
	select {
	case <-w.synced:
	default:
		if p := pluginOf(w.client).problem(); p != nil {
			return p
		}
		return &problem{
			kind:   ErrUnreachable,
			why:    "the apiserver has not answered yet",
			remedy: "wait longer with --wait, check the kubeconfig's server address, or name a CoreDNS with --dns-endpoint",
		}
	}
	if w.service() == nil {
		why := "the cluster has no such Service"
		if w.opts.search {
			why += ", and none with the label " + dnsLabel + "=" + dnsLabelValue
			if note := w.health.note(resourceLabelled); note != "" {
				why = "the cluster has no such Service, and " + note
			}
		}
		return &problem{
			kind:   ErrServiceNotFound,
			why:    why,
			remedy: "install CoreDNS, name its Service with --dns-service, or its endpoint with --dns-endpoint",
		}
	}
	return &problem{
		kind:   ErrNoEndpoints,
		why:    "the Service has " + lacks(w.service()),
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

// Kubeconfig returns the path of the kubeconfig in use and why it is that one, as [FindKubeconfig] does.
func (w *Watcher) Kubeconfig() (path, why string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.kube.path, w.kube.why
}

// Outdated implements [Source]. It reads the kubeconfig.
func (w *Watcher) Outdated() bool {
	w.mu.Lock()
	k, told := w.kube, w.current != nil && len(w.current.Problems) > 0
	w.mu.Unlock()
	now, err := k.again()
	return err != nil || now.sum != k.sum || told
}

// renew connects with what the kubeconfig holds now, and reports whether that is
// something new. A kubeconfig that can't be used leaves the connection as it is.
func (w *Watcher) renew() bool {
	w.mu.Lock()
	old, before := w.connection, w.renewal
	w.mu.Unlock()
	if old.kube.path == "" {
		return false
	}
	k, err := old.kube.again()
	if err == nil && k.sum == old.kube.sum {
		w.setRenewal("")
		return false
	}
	c := old
	if err == nil {
		c, err = connect(k)
	}
	if err != nil {
		if err.Error() != before {
			w.log.Warn("the kubeconfig has changed and can't be used", zap.Error(err))
			w.setRenewal(err.Error())
			w.look()
		}
		return false
	}
	w.log.Info("the kubeconfig has changed", zap.String("from", c.where))
	w.setRenewal("")
	w.mu.Lock()
	w.connection = c
	w.mu.Unlock()
	old.close()
	return true
}

func (w *Watcher) setRenewal(problem string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.renewal = problem
}

// LastError returns the newest error of a request, in one line with its remedy,
// also when all has been well since; nil if there never was one.
func (w *Watcher) LastError() error { return w.health.lastError() }
