package discovery

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// timeouts bound the requests to the apiserver.
type timeouts struct {
	// list bounds a whole list, of nodes a page. Ours hold a handful of objects.
	list time.Duration

	// open bounds the time until a watch's response header. An apiserver sends it
	// at once, but some proxies hold it back until the first event, which is a
	// bookmark after about a minute.
	open time.Duration

	// grace is how much longer than agreed a watch may live. The server ends it
	// after the TimeoutSeconds that the reflector asks for, 5 to 10 minutes. (A
	// connection that died in silence is found sooner, in about 45 s, by the
	// HTTP/2 pings of client-go's transport.)
	grace time.Duration

	// settle is how long the first snapshot waits for what it does not need.
	settle time.Duration

	// relist is the least time between two lists of nodes, which are many. Of all
	// else there is one before each watch.
	relist time.Duration

	// spread is the longest time that reading all objects of the cluster waits: nodes that start together do not ask together.
	spread time.Duration

	// gap is how long a watch of all objects may take to open again until changes count as missed.
	gap time.Duration

	// renew is how often the kubeconfig, and what it names, is read again; beside
	// that whenever the apiserver refuses us.
	renew time.Duration
}

var defaultTimeouts = timeouts{
	list: 15 * time.Second, open: 90 * time.Second, grace: 30 * time.Second, settle: 5 * time.Second, relist: time.Hour, spread: 10 * time.Second, gap: time.Second, renew: 10 * time.Second,
}

// errRestored is the cause with which watches are cancelled that began in another past.
var errRestored = errors.New("the cluster's data went back to an earlier state")

// errTooLate is the cause with which an overdue request is cancelled.
var errTooLate = fmt.Errorf("no answer: %w", context.DeadlineExceeded)

// client-go hides a timeout or a closed connection at the opening of a watch
// behind a watch that is over at once. Taken for what it seems, it would count as
// an apiserver that answers.
var (
	emptyWatch = reflect.TypeOf(watch.NewEmptyWatch())
	errNoWatch = &problem{
		kind:   ErrUnreachable,
		why:    "the apiserver is unreachable: it does not open a watch",
		remedy: remedyUnreachable,
		err:    errors.New("connection closed or timed out while opening a watch"),
	}
)

// request is the ListerWatcher of one resource: it limits what is asked for,
// sets deadlines and reports to health how it went.
//
// The informer's own WatchErrorHandler is not enough for that: client-go retries
// a watch that is refused (connection refused, 429) without calling it, and
// never says when a watch is open again.
type request struct {
	resource string // plural, for messages
	selector func(*metav1.ListOptions)
	list     func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch    func(context.Context, metav1.ListOptions) (watch.Interface, error)
	timeouts timeouts
	health   *health
	optional bool // what it asks for is not needed
	many     bool // so many that they are not listed before each watch

	once   sync.Once
	failed chan struct{} // closed with the first failure

	mu      sync.Mutex
	known   map[cache.ObjectName]any // what the informer has been told, trimmed
	listed  time.Time                // when it was last told all
	version string                   // of what it knows: the reflector's is from before a restore until an event comes
	past    context.Context          // that this is from
	watched bool                     // since listed
}

// fail reports an error of a request.
func (r *request) fail(err error) {
	r.health.failed(r.resource, err)
	r.once.Do(func() { close(r.failed) })
}

// List implements cache.ListerWatcher; informers call ListWithContext.
func (r *request) List(o metav1.ListOptions) (runtime.Object, error) {
	return r.ListWithContext(context.Background(), o)
}

// Watch implements cache.ListerWatcher; informers call WatchWithContext.
func (r *request) Watch(o metav1.ListOptions) (watch.Interface, error) {
	return r.WatchWithContext(context.Background(), o)
}

// IsWatchListSemanticsUnSupported keeps the reflector to list-then-watch. What we
// ask for is tiny, so streaming the list gains nothing; and client-go's
// streaming waits between tries, up to a minute, without looking at its context,
// which would delay every stop while the apiserver is gone.
func (r *request) IsWatchListSemanticsUnSupported() bool { return true }

// ListWithContext implements cache.ListerWatcherWithContext. Its errors reach
// health through the informer's WatchErrorHandler.
func (r *request) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	past := r.health.past()
	list, err := r.page(ctx, o)
	if err != nil {
		return nil, err
	}
	about, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if o.Continue == "" {
		r.known, r.watched = make(map[cache.ObjectName]any), false
		r.told(about.GetResourceVersion(), past)
	}
	err = meta.EachListItem(list, func(o runtime.Object) error { return r.note(watch.Added, o) })
	if err != nil {
		return nil, err
	}
	return list, nil
}

// told notes that the informer is told all of a version, and in which past that was asked for. r.mu is held.
func (r *request) told(version string, past context.Context) {
	if isBefore(version, r.version) && r.past.Err() == nil { // else that past is known to have ended
		past = r.health.restored(past)
	}
	r.version, r.listed, r.past = version, time.Now(), past
}

// page asks for a list, or a page of it. It is always the newest state: what a
// cache of the apiserver has may be older than a restore of etcd.
func (r *request) page(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	r.selector(&o)
	o.ResourceVersion, o.ResourceVersionMatch = "", ""
	ctx, cancel := context.WithTimeoutCause(ctx, r.timeouts.list, errTooLate)
	defer cancel()
	list, err := r.list(ctx, o)
	if err != nil {
		return nil, overdue(ctx, err)
	}
	r.health.confirmed(r.resource)
	return list, nil
}

// note keeps what the informer is told. r.mu is held.
func (r *request) note(kind watch.EventType, o runtime.Object) error {
	name, err := cache.ObjectToName(o)
	if err != nil {
		return err
	}
	if kind == watch.Deleted {
		delete(r.known, name)
		return nil
	}
	r.known[name], err = trim(o)
	return err
}

// mustList reports whether a watch may only begin with what it has missed: a watch from a resource version that an
// apiserver has not reached, or that is of another past, is silent about that.
func (r *request) mustList() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.watched && (!r.many || time.Since(r.listed) >= r.timeouts.relist) || r.past != nil && r.past.Err() != nil
}

// missed lists again, and returns what the informer does not know.
func (r *request) missed(ctx context.Context) (events []watch.Event, err error) {
	version := ""
	past, found := r.health.past(), make(map[cache.ObjectName]struct{})
	for o := (metav1.ListOptions{}); ; {
		list, err := r.page(ctx, o)
		if err != nil {
			return nil, err
		}
		r.mu.Lock()
		err = meta.EachListItem(list, func(o runtime.Object) error {
			name, err := cache.ObjectToName(o)
			if err != nil {
				return err
			}
			found[name] = struct{}{}
			now, err := trim(o)
			if before, ok := r.known[name]; !ok {
				events = append(events, watch.Event{Type: watch.Added, Object: o.DeepCopyObject()})
			} else if !reflect.DeepEqual(before, now) {
				events = append(events, watch.Event{Type: watch.Modified, Object: o.DeepCopyObject()})
			}
			return err
		})
		r.mu.Unlock()
		if err != nil {
			return nil, err
		}
		about, err := meta.ListAccessor(list)
		if err != nil {
			return nil, err
		}
		if o.Continue = about.GetContinue(); o.Continue != "" {
			continue
		}
		version = about.GetResourceVersion()
		break
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, o := range r.known {
		if _, ok := found[name]; !ok {
			events = append(events, watch.Event{Type: watch.Deleted, Object: o.(runtime.Object)})
		}
	}
	r.told(version, past)
	return events, nil
}

// WatchWithContext implements cache.ListerWatcherWithContext.
func (r *request) WatchWithContext(parent context.Context, o metav1.ListOptions) (watch.Interface, error) {
	r.selector(&o)
	ctx, cancel := context.WithCancelCause(parent)
	timer := time.AfterFunc(r.timeouts.open, func() { cancel(errTooLate) })
	var missed []watch.Event
	var err error
	if r.mustList() {
		missed, err = r.missed(ctx)
	}
	var w watch.Interface
	if err == nil {
		r.mu.Lock()
		o.ResourceVersion = r.version
		r.mu.Unlock()
		w, err = r.watch(ctx, o)
	}
	if err == nil && reflect.TypeOf(w) == emptyWatch {
		err = errNoWatch
	}
	if err != nil {
		timer.Stop()
		err = overdue(ctx, err)
		cancel(nil)
		if parent.Err() == nil && !isExpired(err) {
			r.fail(err)
		}
		return nil, err
	}
	life := r.timeouts.grace
	if o.TimeoutSeconds != nil {
		life += time.Duration(*o.TimeoutSeconds) * time.Second
	}
	timer.Reset(life)
	r.mu.Lock()
	past := r.past
	r.watched = true
	r.mu.Unlock()
	keep := context.AfterFunc(past, func() { cancel(errRestored) })
	r.health.watching(r.resource)
	open := &openWatch{inner: w, events: make(chan watch.Event), done: make(chan struct{}), ended: make(chan struct{})}
	open.stop = sync.OnceFunc(func() {
		keep()
		timer.Stop()
		cancel(nil)
		w.Stop()
		close(open.done)
		<-open.ended // what was handed on is noted
		if parent.Err() == nil {
			r.health.ended(r.resource)
		}
	})
	go open.relay(missed, func(e watch.Event, isNews bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		switch e.Type {
		case watch.Added, watch.Modified, watch.Deleted:
			_ = r.note(e.Type, e.Object) // what has no name is refused by the reflector
		}
		if about, err := meta.Accessor(e.Object); err == nil && isNews { // a bookmark too
			r.version = about.GetResourceVersion()
		}
	})
	return open, nil
}

// isExpired reports whether err is the protocol's way to say "list again" (410
// Gone), which is no failure.
func isExpired(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err)
}

// overdue replaces "context canceled" by the deadline that caused it, unless
// something else is known to be the cause.
func overdue(ctx context.Context, err error) error {
	if _, known := errors.AsType[*problem](err); known {
		return err
	}
	if cause := context.Cause(ctx); errors.Is(cause, errTooLate) {
		return cause
	}
	return err
}

// openWatch is a watch that begins with what was missed and tells when it ends. The reflector always stops it.
type openWatch struct {
	inner  watch.Interface
	events chan watch.Event
	done   chan struct{} // closed by stop
	ended  chan struct{} // closed by relay
	stop   func()
}

// relay hands events on until the watch ends.
func (w *openWatch) relay(missed []watch.Event, note func(e watch.Event, isNews bool)) {
	defer close(w.ended)
	defer close(w.events)
	send := func(e watch.Event, isNews bool) bool {
		select {
		case w.events <- e:
			note(e, isNews)
			return true
		case <-w.done:
			return false
		}
	}
	for _, e := range missed {
		if !send(e, false) {
			return
		}
	}
	for e := range w.inner.ResultChan() {
		if !send(e, true) {
			return
		}
	}
}

// ResultChan implements watch.Interface.
func (w *openWatch) ResultChan() <-chan watch.Event { return w.events }

// Stop implements watch.Interface.
func (w *openWatch) Stop() { w.stop() }
