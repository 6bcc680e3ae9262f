package discovery

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// session is what is followed of one Service. The zero value follows nothing.
// Watcher.mu guards it: Run's goroutine writes, and errors are made elsewhere.
type session struct {
	name     string // of the Service
	services informer
	slices   informer
	labelled informer // other Services, once this one is missing
	optional optional
	several  string // a note if there is more than one Service to choose from
}

// follow follows one Service until ctx ends, or until there is another one to
// follow in its place, which it returns. It waits for every goroutine that it
// started.
func (w *Watcher) follow(ctx context.Context, name string) (next string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	run := func(i informer) { wg.Go(func() { i.RunWithContext(ctx) }) }

	if err := w.begin(name); err != nil {
		return "", err
	}
	run(w.services)
	run(w.slices)
	for _, i := range []informer{w.services, w.slices} {
		select {
		case <-i.synced:
		case <-ctx.Done():
			return "", nil
		}
	}
	w.announceSync()
	for {
		started, err := w.enrich(w.service() != nil, run)
		if err != nil {
			return "", err
		}
		if started {
			w.optional.settle(ctx, w.timeouts.settle)
		}
		if next := w.successor(); next != "" {
			return next, nil
		}
		w.update()
		select {
		case <-w.wake:
		case <-ctx.Done():
			return "", nil
		}
	}
}

// begin makes the informers that every session has.
func (w *Watcher) begin(name string) (err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	several := ""
	if w.name != "" {
		several = w.several // why this one was chosen
	}
	w.session = session{name: name, several: several}
	w.health.forget(resourceLabelled)
	if w.services, err = newInformer(serviceRequest(w.api, w.opts.Namespace, name, w.timeouts, w.health), &corev1.Service{}, w.look); err != nil {
		return err
	}
	w.slices, err = newInformer(sliceRequest(w.api, w.opts.Namespace, name, w.timeouts, w.health), &discoveryv1.EndpointSlice{}, w.look)
	return err
}

func (w *Watcher) announceSync() {
	select {
	case <-w.synced:
	default:
		close(w.synced)
	}
}

// enrich starts, once, what is to be known beside the endpoints if the Service is
// there, and the search for another one if it is not. It reports whether there is
// something to settle.
func (w *Watcher) enrich(exists bool, run func(informer)) (started bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case exists && w.optional.configMap == "":
		if w.optional, err = w.newOptionals(w.name); err != nil {
			return false, err
		}
		for _, i := range w.optional.informers() {
			run(i)
		}
		return true, nil
	case !exists && w.searches() && w.labelled.SharedIndexInformer == nil:
		if w.labelled, err = newOptional(labelledRequest(w.api, w.opts, w.timeouts, w.health), &corev1.Service{}, w.look); err != nil {
			return false, err
		}
		run(w.labelled)
	}
	return false, nil
}

// searches reports whether this session looks for another Service by its label
// when its own is missing.
func (w *Watcher) searches() bool { return w.opts.search && w.name == w.opts.Service }

// successor returns the Service to follow in place of a missing one, empty for
// none: the first by name that has the label, and the default one again when that
// has gone.
func (w *Watcher) successor() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.service() != nil || !w.opts.search {
		return ""
	}
	if !w.searches() {
		w.several = ""
		return w.opts.Service
	}
	var names []string
	for _, s := range stored[*corev1.Service](w.labelled) {
		if s.Namespace == w.opts.Namespace && s.Labels[dnsLabel] == dnsLabelValue && s.Name != w.name {
			names = append(names, s.Name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	slices.Sort(names)
	w.several = ""
	if len(names) > 1 {
		w.several = fmt.Sprintf("several Services have the label %s=%s (%s): %s is followed; name one with --dns-service",
			dnsLabel, dnsLabelValue, strings.Join(names, ", "), names[0])
	}
	w.log.Info("DNS Service found by its label", zap.String("service", w.opts.Namespace+"/"+names[0]), zap.Strings("candidates", names))
	return names[0]
}

// serviceIn returns the Service as the informer knows it, nil if it doesn't.
func (s session) serviceIn(namespace string) *corev1.Service {
	if s.services.SharedIndexInformer == nil {
		return nil
	}
	obj, ok, err := s.services.GetStore().GetByKey(namespace + "/" + s.name)
	if err != nil || !ok {
		return nil
	}
	found, _ := obj.(*corev1.Service)
	return found
}

func (w *Watcher) service() *corev1.Service { return w.serviceIn(w.opts.Namespace) }

// endpoints returns the merged set of all slices. empty says that there is nobody,
// as opposed to nobody who is understood.
func (w *Watcher) endpoints() (endpoints []Endpoint, empty bool) {
	service := w.service()
	if service == nil {
		return nil, false
	}
	all := stored[*discoveryv1.EndpointSlice](w.slices)
	return merge(all, w.opts.Namespace, w.name, dnsPortsOf(service), w.placement()), isEmpty(all, w.opts.Namespace, w.name)
}
