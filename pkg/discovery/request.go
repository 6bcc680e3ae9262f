package discovery

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
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
}

var defaultTimeouts = timeouts{list: 15 * time.Second, open: 90 * time.Second, grace: 30 * time.Second, settle: 5 * time.Second}

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

	once   sync.Once
	failed chan struct{} // closed with the first failure
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
// which would hold up every stop while the apiserver is gone.
func (r *request) IsWatchListSemanticsUnSupported() bool { return true }

// ListWithContext implements cache.ListerWatcherWithContext. Its errors reach
// health through the informer's WatchErrorHandler.
func (r *request) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	r.selector(&o)
	ctx, cancel := context.WithTimeoutCause(ctx, r.timeouts.list, errTooLate)
	defer cancel()
	list, err := r.list(ctx, o)
	if err != nil {
		return nil, overdue(ctx, err)
	}
	r.health.confirmed(r.resource)
	return list, nil
}

// WatchWithContext implements cache.ListerWatcherWithContext.
func (r *request) WatchWithContext(parent context.Context, o metav1.ListOptions) (watch.Interface, error) {
	r.selector(&o)
	ctx, cancel := context.WithCancelCause(parent)
	timer := time.AfterFunc(r.timeouts.open, func() { cancel(errTooLate) })
	w, err := r.watch(ctx, o)
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
	r.health.watching(r.resource)
	return &openWatch{Interface: w, stop: sync.OnceFunc(func() {
		timer.Stop()
		cancel(nil)
		if parent.Err() == nil {
			r.health.ended(r.resource)
		}
	})}, nil
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

// openWatch is a watch that tells when it ends. The reflector always stops it.
type openWatch struct {
	watch.Interface
	stop func()
}

// Stop implements watch.Interface.
func (w *openWatch) Stop() {
	w.Interface.Stop()
	w.stop()
}
