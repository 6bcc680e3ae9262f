package discovery

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// session is what is followed of one Service. The zero value follows nothing.
// Watcher.mu guards it: Run's goroutine writes, and errors are made elsewhere.
type session struct {
	name     string // of the Service
	services informer
	slices   informer
	labelled informer // other Services, once this one is missing or of no use
	optional optional
	several  string // a note if there is more than one Service to choose from
}

// follow follows one Service until ctx ends, or until there is another one to
// follow in its place, or another kubeconfig to follow it with, and returns the next
// one. It waits for every goroutine that it started.
func (w *Watcher) follow(ctx context.Context, name string) (next string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	run := func(i informer) { wg.Go(func() { i.RunWithContext(ctx) }) }

	if err := w.begin(name); err != nil {
		return "", err
	}
	for _, follower := range w.followers(w.api) {
		wg.Go(func() { follower(ctx) })
	}
	run(w.services)
	run(w.slices)
	renew := time.NewTicker(w.timeouts.renew)
	defer renew.Stop()
	for _, i := range []informer{w.services, w.slices} {
		for waits := true; waits; {
			select {
			case <-i.synced:
				waits = false
			case <-w.wake:
				w.unconfirm()
				if w.health.refused() && w.renew() {
					return name, nil
				}
			case <-renew.C:
				if w.renew() {
					return name, nil
				}
			case <-ctx.Done():
				return "", nil
			}
		}
	}
	w.announceSync()
	var until time.Time // what is not needed is waited for
	for {
		started, err := w.enrich(run)
		if err != nil {
			return "", err
		}
		if len(started) > 0 {
			if until.IsZero() {
				until = time.Now().Add(w.timeouts.settle)
			}
			settle(ctx, until, started)
			continue // what they say may need more
		}
		until = time.Time{}
		if next := w.successor(); next != "" {
			return next, nil
		}
		w.update()
		select {
		case <-w.wake:
			if w.health.refused() && w.renew() {
				return name, nil
			}
		case <-renew.C:
			if w.renew() {
				return name, nil
			}
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
	w.session = session{name: name, several: several, optional: optional{configMaps: make(map[string]*informer)}}
	w.health.forgetOptional()
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

// searches reports whether this session looks for another Service by its label
// when its own is missing or of no use.
func (w *Watcher) searches() bool { return w.opts.search && w.name == w.opts.Service }

// candidates are the Services to choose from: those with the label, and the one that is followed if it can be asked.
func (w *Watcher) candidates() (all []*corev1.Service) {
	for _, s := range append(stored[*corev1.Service](w.labelled), w.service()) {
		if s != nil && s.Namespace == w.opts.Namespace && rankOf(s, nil) > rankNone &&
			!slices.ContainsFunc(all, func(o *corev1.Service) bool { return o.Name == s.Name }) {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *corev1.Service) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// rank says how likely a Service is the one that Pods ask.
type rank int

const (
	rankNone      rank = iota // it has no endpoints, or no port for DNS
	rankHeadless              // no address that a kubelet could hand out
	rankAddress               // an address
	rankNamed                 // a ConfigMap of its name has a Corefile
	rankHandedOut             // the address that kubelets hand out
	rankBoth                  // both
)

// rankOf ranks a Service, which may be nil. The Services' ranges may be unknown.
func rankOf(s *corev1.Service, ranges []netip.Prefix) rank {
	switch {
	case s == nil || s.Spec.Type == corev1.ServiceTypeExternalName || dnsPortsOf(s).udp == nil:
		return rankNone
	case len(serviceIPs(s)) == 0:
		return rankHeadless
	case slices.ContainsFunc(serviceIPs(s), func(ip netip.Addr) bool { return isTenth(ip, ranges) }):
		return rankHandedOut
	}
	return rankAddress
}

// isTenth reports whether an address is the tenth of a range of Services: kubeadm, and almost everybody after it, gives it to
// the cluster's DNS, and to kubelets as its address. Without a range, one that ends like it is.
func isTenth(ip netip.Addr, ranges []netip.Prefix) bool {
	for _, r := range ranges {
		if r.Contains(ip) {
			first := r.Masked().Addr().AsSlice()
			last := len(first) - 1
			first[last] += 10 // ranges that end beyond the last octet have no tenth address
			tenth, _ := netip.AddrFromSlice(first)
			return ip == tenth
		}
	}
	octets := ip.AsSlice()
	return len(ranges) == 0 && octets[len(octets)-1] == 10
}

// successor returns the Service to follow in place of one that is missing or of no use, empty for none: the best with the
// label, and the default one again when that has gone.
func (w *Watcher) successor() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.searches() {
		if rankOf(w.service(), nil) >= rankAddress {
			return ""
		}
	} else {
		if w.service() == nil && w.opts.search {
			w.several = ""
			return w.opts.Service
		}
		return ""
	}
	var ranges []netip.Prefix
	for _, c := range stored[*networkingv1.ServiceCIDR](w.optional.serviceCIDRs) {
		ranges = append(ranges, parsedPrefixes(c.Spec.CIDRs)...)
	}
	var names []string
	var best *corev1.Service
	var bestRank rank
	for _, s := range w.candidates() {
		names = append(names, s.Name)
		r := rankOf(s, ranges)
		if r >= rankAddress && w.hasCorefile(s.Name) {
			r++
		}
		if r > bestRank {
			best, bestRank = s, r
		}
	}
	w.several = ""
	if len(names) > 1 {
		why := map[rank]string{
			rankHeadless: "as the first by name", rankAddress: "as the first by name of those with an address",
			rankNamed:     "since a ConfigMap of its name has a Corefile",
			rankHandedOut: "since its address is the one that kubelets hand out (the tenth of the Services')",
			rankBoth:      "since its address is the one that kubelets hand out (the tenth of the Services'), and a ConfigMap of its name has a Corefile",
		}[bestRank]
		w.several = fmt.Sprintf("several Services have the label %s=%s (%s): %s is followed, %s; name one with --dns-service",
			dnsLabel, dnsLabelValue, strings.Join(names, ", "), best.Name, why)
	}
	if best == nil || best.Name == w.name {
		return ""
	}
	w.log.Info("DNS Service found by its label", zap.String("service", w.opts.Namespace+"/"+best.Name), zap.Strings("candidates", names))
	return best.Name
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
// as opposed to nobody who is understood; notes say who is left out.
func (w *Watcher) endpoints() (endpoints []Endpoint, empty bool, notes []string) {
	service := w.service()
	if service == nil {
		return nil, false, nil
	}
	all := stored[*discoveryv1.EndpointSlice](w.slices)
	return merge(all, w.opts.Namespace, w.name, dnsPortsOf(service), w.placement()),
		isEmpty(all, w.opts.Namespace, w.name), leftOut(all, w.opts.Namespace, w.name)
}
