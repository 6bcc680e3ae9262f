package discovery

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/watchlist"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

const (
	objectsPerPage = 500
	watchLifetime  = 5 * time.Minute // at least, and up to twice as long, so that nodes do not come back together
)

// objects are what was told of one resource. It outlives a connection: what changed in between is told by difference.
type objects[T any] map[cache.ObjectName]*T

// told is what the consumer of the feed knows.
type told struct {
	services   objects[cluster.Service]
	slices     objects[cluster.Slice]
	namespaces objects[struct{}]
}

func newTold() told {
	return told{make(objects[cluster.Service]), make(objects[cluster.Slice]), make(objects[struct{}])}
}

// follower tells all changes of one resource. A shared informer would keep whole objects while it lists, and would not say
// when it is in step. One goroutine uses it.
type follower[T any] struct {
	*request
	feed    *feed
	known   objects[T]
	compact func(runtime.Object) *T
	change  func(cluster.Pair[T]) cluster.Change
	streams bool // the client can begin with a stream
}

func lister[L runtime.Object](list func(context.Context, metav1.ListOptions) (L, error)) func(context.Context, metav1.ListOptions) (runtime.Object, error) {
	return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) }
}

func newFollower[T any](w *Watcher, resource string, compact func(runtime.Object) *T, known objects[T],
	list func(context.Context, metav1.ListOptions) (runtime.Object, error),
	open func(context.Context, metav1.ListOptions) (watch.Interface, error), change func(cluster.Pair[T]) cluster.Change) *follower[T] {
	return &follower[T]{
		request: newRequest(resource, w.timeouts, w.health, func(*metav1.ListOptions) {}, list, open),
		feed:    w.feed, known: known, compact: compact, change: change,
		streams: !watchlist.DoesClientNotSupportWatchListSemantics(w.api),
	}
}

// retries are the delays between tries. Whoever is refused, or has to read everything again, waits too: all nodes do at the
// same time.
func retries() wait.Backoff {
	return wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 1, Steps: 30, Cap: time.Minute}
}

// pause waits, and reports whether it may go on.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// run follows until ctx ends. All nodes begin together, and after a restart of the apiserver, whose memory of changes begins
// anew, they have to read everything again together: both are spread.
func (f *follower[T]) run(ctx context.Context) {
	delays := retries()
	for wait := f.spread(); pause(ctx, wait); {
		began := time.Now()
		err := f.session(ctx)
		f.feed.behind(f.resource, oneLine(err))
		if time.Since(began) > watchLifetime {
			delays = retries()
		}
		if wait = delays.Step(); isExpired(err) {
			wait = f.spread()
		}
	}
	f.feed.behind(f.resource, context.Canceled)
}

func (f *follower[T]) spread() time.Duration { return rand.N(f.timeouts.spread + time.Nanosecond) }

// session reads everything, and follows it for as long as nothing is missed. Its error is never nil.
func (f *follower[T]) session(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(f.health.past(), func() { cancel(errRestored) })()
	open, version, err := f.begin(ctx)
	for delays := retries(); err == nil; {
		began := time.Now()
		if open != nil {
			version, err = f.read(ctx, open, version, nil)
			open.stop()
			if err != nil {
				break
			}
			if time.Since(began) < time.Second { // a proxy that breaks off
				f.feed.behind(f.resource, errNoWatch)
				if !pause(ctx, delays.Step()) {
					break
				}
			} else {
				delays = retries()
			}
		}
		open, err = f.reopen(ctx, version)
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// reopen opens a watch where the last one ended. For as long as that is not done, changes are missed; after it they are told, so
// that nothing has to be read again when an apiserver was away.
func (f *follower[T]) reopen(ctx context.Context, version string) (*stream, error) {
	for delays := retries(); ; {
		late := make(chan struct{})
		timer := time.AfterFunc(f.timeouts.gap, func() {
			f.feed.behind(f.resource, errTooLate)
			close(late)
		})
		open, err := f.open(ctx, metav1.ListOptions{ResourceVersion: version})
		if !timer.Stop() {
			<-late
		}
		if err == nil {
			f.feed.inStep(f.resource)
			return open, nil
		}
		if isExpired(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || ctx.Err() != nil {
			return nil, err
		}
		f.feed.behind(f.resource, diagnose(err))
		if !pause(ctx, delays.Step()) {
			return nil, ctx.Err()
		}
	}
}

// begin tells all that is there now: as a stream where the server has it, which costs it a fraction of the memory, else
// in pages. Without a stream there is no watch yet.
func (f *follower[T]) begin(ctx context.Context) (*stream, string, error) {
	fresh := make(objects[T])
	if f.streams {
		open, err := f.open(ctx, metav1.ListOptions{SendInitialEvents: new(true), ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan})
		if err == nil {
			var version string
			if version, err = f.read(ctx, open, "", fresh); err != nil {
				open.stop()
				return nil, "", err
			}
			f.replace(fresh)
			return open, version, nil
		}
		if !apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) {
			return nil, "", err
		}
	}
	version, err := f.pages(ctx, fresh)
	if err != nil {
		return nil, "", err
	}
	f.replace(fresh)
	return nil, version, nil
}

// pages lists into fresh.
func (f *follower[T]) pages(ctx context.Context, fresh objects[T]) (version string, err error) {
	for o := (metav1.ListOptions{Limit: objectsPerPage}); ; {
		pageCtx, cancel := context.WithTimeoutCause(ctx, f.timeouts.list, errTooLate)
		list, err := f.list(pageCtx, o)
		if err != nil {
			err = overdue(pageCtx, err)
			cancel()
			return "", err
		}
		cancel()
		if err := meta.EachListItem(list, func(object runtime.Object) error {
			name, err := cache.ObjectToName(object)
			fresh[name] = f.compact(object)
			return err
		}); err != nil {
			return "", err
		}
		about, err := meta.ListAccessor(list)
		if err != nil {
			return "", err
		}
		if o.Continue = about.GetContinue(); o.Continue == "" {
			return about.GetResourceVersion(), nil
		}
	}
}

// replace tells how what is there now differs from what was told.
func (f *follower[T]) replace(fresh objects[T]) {
	for name := range f.known {
		if fresh[name] == nil {
			f.set(name, nil, "")
		}
	}
	for name, now := range fresh {
		f.set(name, now, "")
	}
	f.feed.inStep(f.resource)
}

// set tells what an object is now, unless that means the same. now is nil if it is gone.
func (f *follower[T]) set(name cache.ObjectName, now *T, version string) {
	before := f.known[name]
	if (before == nil) == (now == nil) && (now == nil || reflect.DeepEqual(before, now)) {
		return
	}
	if f.known[name] = now; now == nil {
		delete(f.known, name)
	}
	c := f.change(cluster.Pair[T]{Old: before, New: now})
	c.Namespace, c.Name, c.Version, c.Gone = name.Namespace, name.Name, version, now == nil
	f.feed.say(c)
}

// read tells what a watch says until it ends. With fresh it keeps all that is there now in it, and returns when that is all.
func (f *follower[T]) read(ctx context.Context, s *stream, version string, fresh objects[T]) (string, error) {
	for {
		var e watch.Event
		var open bool
		select {
		case e, open = <-s.ResultChan():
		case <-ctx.Done():
			return version, ctx.Err()
		}
		switch {
		case !open && fresh != nil:
			return version, fmt.Errorf("the stream of all %s ends too early: %w", f.resource, errNoWatch)
		case !open:
			return version, ctx.Err()
		case e.Type == watch.Error:
			return version, apierrors.FromObject(e.Object)
		}
		about, err := meta.Accessor(e.Object)
		if err != nil {
			return version, err
		}
		version = about.GetResourceVersion()
		if e.Type == watch.Bookmark {
			if fresh != nil && about.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
				s.began()
				return version, nil
			}
			continue
		}
		f.take(cache.MetaObjectToName(about), e, version, fresh)
	}
}

// take notes one event, in fresh for as long as not all is known.
func (f *follower[T]) take(name cache.ObjectName, e watch.Event, version string, fresh objects[T]) {
	var now *T
	if e.Type != watch.Deleted {
		now = f.compact(e.Object)
	}
	switch {
	case fresh == nil:
		f.set(name, now, version)
	case now == nil:
		delete(fresh, name)
	default:
		fresh[name] = now
	}
}

// stream is an open watch with a deadline.
type stream struct {
	watch.Interface
	began func() // it has its whole life from here on
	stop  func()
}

// open opens a watch.
func (f *follower[T]) open(parent context.Context, o metav1.ListOptions) (*stream, error) {
	ctx, cancel := context.WithCancelCause(parent)
	life := watchLifetime + rand.N(watchLifetime)
	o.AllowWatchBookmarks, o.TimeoutSeconds = true, new(int64(life/time.Second))
	timer := time.AfterFunc(f.timeouts.open, func() { cancel(errTooLate) })
	w, err := f.watch(ctx, o)
	if err == nil && reflect.TypeOf(w) == emptyWatch {
		err = errNoWatch
	}
	if err != nil {
		timer.Stop()
		err = overdue(ctx, err)
		cancel(nil)
		return nil, err
	}
	s := &stream{Interface: w, began: func() { timer.Reset(life + f.timeouts.grace) }}
	s.stop = func() {
		timer.Stop()
		cancel(nil)
		w.Stop()
	}
	if o.SendInitialEvents == nil {
		s.began()
	}
	return s, nil
}
