package discovery

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
)

var (
	errRefused   = fmt.Errorf("dial tcp 192.0.2.1:6443: %w", syscall.ECONNREFUSED)
	errForbidden = apierrors.NewForbidden(schema.GroupResource{Group: "discovery.k8s.io", Resource: "endpointslices"}, "", errors.New("no"))
)

// want compares a snapshot's endpoints and staleness.
func want(t testing.TB, s Snapshot, stale bool, endpoints ...string) {
	t.Helper()
	if !slices.Equal(addresses(s), endpoints) || s.Stale != stale || (s.Reason != "") != stale {
		t.Errorf("got %v stale=%t reason=%q, want %v stale=%t", addresses(s), s.Stale, s.Reason, endpoints, stale)
	}
}

func TestFirstSnapshotIsWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10", "fd00:21::a"),
			slice("kube-dns-a", ready("172.20.0.2")),
			slice("kube-dns-b", ready("172.20.0.3"), unready("172.20.0.4")),
			withType(discoveryv1.AddressTypeIPv6, slice("kube-dns-6", ready("fd00::2"))))
		f := run(t, c)
		s := f.next(t)
		want(t, s, false, "172.20.0.2:53", "172.20.0.3:53", "[fd00::2]:53")
		if ips := []netip.Addr{netip.MustParseAddr("172.21.0.10"), netip.MustParseAddr("fd00:21::a")}; !slices.Equal(s.ServiceIPs, ips) {
			t.Errorf("Service addresses %v, want %v", s.ServiceIPs, ips)
		}
		if !s.Updated.Equal(time.Now()) { // the bubble's clock stands still
			t.Errorf("updated %v", s.Updated)
		}
		f.none(t)
		if got, err := f.WaitForSync(t.Context()); err != nil || !got.Equal(s) {
			t.Errorf("WaitForSync: %v, %v", got, err)
		}
		if cur, ok := f.Current(); !ok || !cur.Equal(s) {
			t.Errorf("current %v, %t", cur, ok)
		}
		if err := f.LastError(); err != nil {
			t.Errorf("last error %v", err)
		}
		if err := f.Run(t.Context()); err == nil {
			t.Error("second Run did not fail")
		}
	})
}

// TestOnlyWhatIsNeededIsAsked checks verbs, namespace and selectors.
func TestOnlyWhatIsNeededIsAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
		run(t, c)
		got := map[string]int{}
		for _, a := range c.Actions() {
			var r clienttesting.ListRestrictions
			switch a := a.(type) {
			case clienttesting.ListActionImpl:
				r = a.ListRestrictions
			case clienttesting.WatchActionImpl:
				r = clienttesting.ListRestrictions{Labels: a.WatchRestrictions.Labels, Fields: a.WatchRestrictions.Fields}
			default:
				t.Fatalf("unexpected request %v", a)
			}
			got[fmt.Sprintf("%s %s/%s %s%s", a.GetVerb(), a.GetNamespace(), a.GetResource().Resource, r.Fields, r.Labels)]++
		}
		for _, k := range []string{
			"list kube-system/services metadata.name=kube-dns", "watch kube-system/services metadata.name=kube-dns",
			"list kube-system/configmaps metadata.name=coredns", "watch kube-system/configmaps metadata.name=coredns",
			"list /servicecidrs ", "watch /servicecidrs ", "list /nodes ", "watch /nodes ",
			"list kube-system/endpointslices kubernetes.io/service-name=kube-dns", "watch kube-system/endpointslices kubernetes.io/service-name=kube-dns",
		} {
			if got[k] != 1 {
				t.Errorf("%d requests %q, want 1", got[k], k)
			}
			delete(got, k)
		}
		if len(got) > 0 {
			t.Errorf("further requests: %v", got)
		}
	})
}

func TestNothingBeforeSync(t *testing.T) {
	for _, late := range []string{resourceServices, resourceSlices} {
		t.Run(late+" last", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
				c.answer(func(a clienttesting.Action) error {
					if a.GetResource().Resource == late {
						return errRefused
					}
					return nil
				})
				f := run(t, c)
				f.none(t)
				if s, ok := f.Current(); ok {
					t.Errorf("current %v before sync", s)
				}
				c.answer(nil)
				time.Sleep(2 * time.Minute) // the reflector's longest pause, on the bubble's clock
				want(t, f.next(t), false, "172.20.0.2:53")
			})
		})
	}
}

func TestFollowsChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
		f := run(t, c)
		want(t, f.next(t), false, "172.20.0.2:53")

		time.Sleep(time.Minute)
		c.setSlice(slice("b", ready("172.20.0.3")))
		s := f.next(t)
		want(t, s, false, "172.20.0.2:53", "172.20.0.3:53")
		if !s.Updated.Equal(time.Now()) {
			t.Errorf("updated %v, now %v", s.Updated, time.Now())
		}

		c.setSlice(slice("a", draining("172.20.0.2")))
		want(t, f.next(t), false, "172.20.0.3:53")

		c.deleteSlice("a")
		f.none(t) // says nothing new

		// Another slice takes an endpoint over: the address stays, its source changes.
		c.setSlice(slice("c", ready("172.20.0.3")))
		f.none(t)
		c.deleteSlice("b")
		s = f.next(t)
		want(t, s, false, "172.20.0.3:53")
		if s.Endpoints[0].Source != "kube-system/c" {
			t.Errorf("source %s", s.Endpoints[0].Source)
		}

		// All on their way out: better than nobody, and fresh news.
		c.setSlice(slice("c", draining("172.20.0.3")))
		s = f.next(t)
		want(t, s, false, "172.20.0.3:53")
		if !s.Endpoints[0].Terminating {
			t.Error("not marked as terminating")
		}
	})
}

func TestEqualMeaningIsNotPublished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2"), ready("172.20.0.3")))
		f := run(t, c)
		f.next(t)
		c.setSlice(slice("a", ready("172.20.0.3"), ready("172.20.0.2")))                                           // order
		c.setSlice(slice("a", ready("172.20.0.3"), ready("172.20.0.2"), unready("172.20.0.9")))                    // one nobody may ask
		c.setSlice(with(slice("a", unset("172.20.0.3"), ready("172.20.0.2")), func(s *discoveryv1.EndpointSlice) { // nil for true
			s.Annotations = map[string]string{"x": "y"}
		}))
		c.setSlice(with(slice("other", ready("172.20.0.8")), func(s *discoveryv1.EndpointSlice) { // another Service's
			s.Labels[discoveryv1.LabelServiceName] = "other"
		}))
		c.createService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: "other"}})
		f.none(t)
	})
}

func TestSlowReaderSeesTheNewest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
		f := run(t, c)
		for i := range 100 {
			c.setSlice(slice("a", ready(fmt.Sprintf("172.20.1.%d", i))))
			synctest.Wait() // each one is published; nobody reads
		}
		want(t, f.next(t), false, "172.20.1.99:53")
		f.none(t)
	})
}

func TestLastGoodSetStays(t *testing.T) {
	tests := []struct {
		name    string
		lose    func(*fakeCluster)
		recover func(*fakeCluster)
		reason  string
		back    string // endpoint after recovery
		ip      string // Service address after recovery
	}{
		{"all slices deleted",
			func(c *fakeCluster) { c.deleteSlice("a") },
			func(c *fakeCluster) { c.setSlice(slice("b", ready("172.20.0.7"))) },
			"no ready endpoint", "172.20.0.7:53", "172.21.0.10"},
		{"port renamed",
			func(c *fakeCluster) {
				c.setSlice(with(slice("a", ready("172.20.0.2")), func(s *discoveryv1.EndpointSlice) { s.Ports = s.Ports[:1] }))
			},
			func(c *fakeCluster) { c.setSlice(slice("a", ready("172.20.0.2"))) },
			`UDP port named "dns"`, "172.20.0.2:53", "172.21.0.10"},
		{"Service deleted and made again with another address",
			func(c *fakeCluster) { c.deleteService() },
			func(c *fakeCluster) { c.createService(kubeDNS("172.21.0.77")) },
			"does not exist", "172.20.0.2:53", "172.21.0.77"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
				f := run(t, c)
				f.next(t)

				time.Sleep(time.Hour)
				lost := time.Now()
				tc.lose(c)
				s := f.next(t)
				want(t, s, true, "172.20.0.2:53")
				if !strings.Contains(s.Reason, tc.reason) || !strings.Contains(s.Reason, "kube-system/kube-dns") {
					t.Errorf("reason %q, want one with %q", s.Reason, tc.reason)
				}
				if len(s.ServiceIPs) != 1 || s.ServiceIPs[0].String() != "172.21.0.10" {
					t.Errorf("Service addresses %v", s.ServiceIPs)
				}

				time.Sleep(time.Hour)
				if cur, _ := f.Current(); !cur.Stale || !cur.Updated.Equal(lost) || !s.Updated.Equal(lost) {
					t.Errorf("updated %v and %v, want %v, when the set was last true", s.Updated, cur.Updated, lost)
				}
				if got, err := f.WaitForSync(t.Context()); err != nil || !got.Stale {
					t.Errorf("WaitForSync after a first good set: %v, %v", got, err)
				}

				tc.recover(c)
				s = f.next(t)
				want(t, s, false, tc.back)
				if len(s.ServiceIPs) != 1 || s.ServiceIPs[0].String() != tc.ip || !s.Updated.Equal(time.Now()) {
					t.Errorf("after recovery: Service addresses %v, updated %v", s.ServiceIPs, s.Updated)
				}
				f.none(t)
			})
		})
	}
}

// What the apiserver says is believed, also that there is nobody; and then that this is so while it can't be asked.
func TestEmptySet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		six := func(e ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
			return withType(discoveryv1.AddressTypeIPv6, slice("6", e...))
		}
		c := newCluster(t, kubeDNS("172.21.0.10", "fd00:21::a"), slice("a", ready("172.20.0.2")), six(ready("fd00::2")))
		f := run(t, c)
		f.next(t)
		c.setSlice(slice("a", gone("172.20.0.2")))
		want(t, f.next(t), false, "[fd00::2]:53")
		c.setSlice(six()) // as a controller leaves it after a scale to zero
		s := f.next(t)
		if len(s.Endpoints) > 0 || s.Stale || !strings.Contains(s.Reason, "no ready endpoint") || !s.Updated.Equal(time.Now()) {
			t.Errorf("nobody is there: %+v", s)
		}
		if len(s.ServiceIPs) != 2 {
			t.Errorf("Service addresses %v", s.ServiceIPs)
		}
		c.answer(always(errRefused))
		c.cut()
		if s = f.next(t); len(s.Endpoints) > 0 || !s.Stale || !strings.Contains(s.Reason, "unreachable") {
			t.Errorf("nobody was there, and the apiserver is gone: %+v", s)
		}
	})
}

func TestNeverGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, slice("a", ready("172.20.0.2"))) // slices of a Service that is gone
		f := run(t, c)
		want(t, f.next(t), true)

		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		start := time.Now()
		s, err := f.WaitForSync(ctx)
		if time.Since(start) != 30*time.Second {
			t.Errorf("waited %v", time.Since(start))
		}
		if !errors.Is(err, ErrServiceNotFound) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		checkLine(t, err, "kube-system/kube-dns", "apiserver fake", "no such Service", "--dns-endpoint")
		want(t, s, true)

		c.setSlice(slice("a", unready("172.20.0.2")))
		synctest.Wait() // or the Service, by another watch, may be seen first
		c.createService(kubeDNS("172.21.0.10"))
		want(t, f.next(t), true)
		ctx2, cancel2 := context.WithTimeout(t.Context(), time.Second)
		defer cancel2()
		s, err = f.WaitForSync(ctx2)
		if !errors.Is(err, ErrNoEndpoints) {
			t.Errorf("error %v", err)
		}
		checkLine(t, err, "no ready endpoint", "kubectl -n kube-system get pods")
		if len(s.ServiceIPs) != 1 {
			t.Errorf("Service addresses %v", s.ServiceIPs)
		}

		// The one who waits is woken by the first good set.
		got := make(chan error)
		go func() {
			_, err := f.WaitForSync(t.Context())
			got <- err
		}()
		c.setSlice(slice("a", ready("172.20.0.2")))
		if err := <-got; err != nil {
			t.Error(err)
		}
		want(t, f.next(t), false, "172.20.0.2:53")
	})
}

func TestApiserverGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")), slice("b", ready("172.20.0.3")))
		f := run(t, c)
		f.next(t)

		// A watch that ends is normal: the next one opens, nobody hears of it.
		time.Sleep(7 * time.Minute)
		c.cut()
		time.Sleep(2 * time.Minute)
		f.none(t)

		lost := time.Now()
		c.answer(always(errRefused))
		c.cut()
		s := f.next(t)
		want(t, s, true, "172.20.0.2:53", "172.20.0.3:53")
		if !strings.Contains(s.Reason, "unreachable: connection refused") {
			t.Errorf("reason %q", s.Reason)
		}
		if !errors.Is(f.LastError(), ErrUnreachable) || !errors.Is(f.LastError(), syscall.ECONNREFUSED) {
			t.Errorf("last error %v", f.LastError())
		}

		// Ten minutes of it: published once, logged once, Updated stands still.
		time.Sleep(10 * time.Minute)
		f.none(t)
		if n := f.logs.FilterMessage("can't follow the cluster").Len(); n != 1 {
			t.Errorf("logged %d times, want once", n)
		}
		if n := f.logs.FilterMessage("still can't follow the cluster").Len(); n < 10 {
			t.Errorf("only %d tries in ten minutes", n)
		}
		if cur, _ := f.Current(); !cur.Updated.Equal(lost) {
			t.Errorf("updated %v, want %v", cur.Updated, lost)
		}

		// Another error is another reason, and another line.
		c.answer(always(errForbidden))
		time.Sleep(3 * time.Minute)
		if s = f.next(t); !strings.Contains(s.Reason, "forbids") {
			t.Errorf("reason %q", s.Reason)
		}
		if n := f.logs.FilterMessage("can't follow the cluster").Len(); n != 2 {
			t.Errorf("logged %d times, want twice", n)
		}

		// Meanwhile slice b went and a changed. Both deletes and updates were
		// missed, so the relist brings a tombstone.
		c.deleteSlice("b")
		c.setSlice(slice("a", ready("172.20.0.9")))
		f.none(t)
		c.answer(nil)
		time.Sleep(3 * time.Minute)
		want(t, f.next(t), false, "172.20.0.9:53")
		f.none(t)
		if n := f.logs.FilterMessage("apiserver answers again").Len(); n != 1 {
			t.Errorf("recovery logged %d times", n)
		}
		if f.LastError() == nil {
			t.Error("last error forgotten on recovery")
		}
		if cur, _ := f.Current(); !cur.Updated.Equal(time.Now()) {
			t.Errorf("updated %v, now %v", cur.Updated, time.Now())
		}
	})
}

// TestOneResourceLost: slices alone become unreadable, as when a role is changed.
func TestOneResourceLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
		f := run(t, c)
		f.next(t)
		c.answer(func(a clienttesting.Action) error {
			if a.GetResource().Resource == resourceSlices {
				return errForbidden
			}
			return nil
		})
		c.cut()
		time.Sleep(time.Minute)
		want(t, f.next(t), true, "172.20.0.2:53")
		if !errors.Is(f.LastError(), ErrForbidden) {
			t.Errorf("last error %v", f.LastError())
		}
		c.answer(nil)
		time.Sleep(2 * time.Minute)
		want(t, f.next(t), false, "172.20.0.2:53")
	})
}

// TestExpired: 410 Gone on opening a watch means "list again", not "gone away".
func TestExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
		f := run(t, c)
		f.next(t)
		c.answer(func(a clienttesting.Action) error {
			if a.GetVerb() == "watch" {
				return apierrors.NewResourceExpired("too old resource version")
			}
			return nil
		})
		c.cut()
		time.Sleep(time.Minute)
		f.none(t)
		c.setSlice(slice("a", ready("172.20.0.3")))
		c.answer(nil)
		time.Sleep(2 * time.Minute)
		want(t, f.next(t), false, "172.20.0.3:53")
		if err := f.LastError(); err != nil {
			t.Errorf("last error %v", err)
		}
	})
}

func TestStopIsPrompt(t *testing.T) {
	for name, fail := range map[string]error{"answers": nil, "refuses": errRefused, "too many requests": apierrors.NewTooManyRequests("busy", 1)} {
		for _, first := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, from the start %t", name, first), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
					if fail != nil && first {
						c.answer(always(fail))
					}
					f := run(t, c)
					if fail != nil && !first {
						c.answer(always(fail))
						c.cut()
					}
					time.Sleep(5 * time.Minute) // deep in the longest pauses
					start := time.Now()
					f.stop()
					if d := time.Since(start); d > 0 {
						t.Errorf("stopping took %v", d)
					}
					if _, err := f.WaitForSync(t.Context()); (err == nil) == (fail != nil && first) {
						t.Errorf("WaitForSync after stop: %v", err)
					} else if err != nil {
						checkLine(t, err, "apiserver", "--dns-endpoint")
					}
				})
			})
		}
	}
}

func TestWaitForSyncWithoutRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWatcher(newCluster(t), Options{}.withDefaults(), "apiserver fake", defaultTimeouts)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := w.WaitForSync(ctx)
		if !errors.Is(err, ErrUnreachable) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		checkLine(t, err, "has not answered yet", "--wait")
	})
}

func TestHandler(t *testing.T) {
	n := 0
	h := handler(func() { n++ })
	v := func(version, uid string) *discoveryv1.EndpointSlice {
		s := slice("a")
		s.ResourceVersion, s.UID = version, "u"
		if uid != "" {
			s.UID = "other"
		}
		return s
	}
	steps := []struct {
		name string
		do   func()
		want int
	}{
		{"add", func() { h.OnAdd(v("1", ""), true) }, 1},
		{"update", func() { h.OnUpdate(v("1", ""), v("2", "")) }, 1},
		{"same version, as another object may have after a restore", func() { h.OnUpdate(v("2", ""), v("2", "")) }, 1},
		{"same version of another object", func() { h.OnUpdate(v("2", ""), v("2", "x")) }, 1},
		{"no version", func() { h.OnUpdate(v("", ""), v("", "")) }, 1},
		{"delete", func() { h.OnDelete(v("2", "")) }, 1},
		{"tombstone", func() { h.OnDelete(cache.DeletedFinalStateUnknown{Key: "kube-system/a", Obj: v("2", "")}) }, 1},
		{"tombstone without object", func() { h.OnDelete(cache.DeletedFinalStateUnknown{Key: "kube-system/a"}) }, 1},
		{"something else", func() { h.OnUpdate("x", 7) }, 1},
	}
	for _, s := range steps {
		n = 0
		s.do()
		if n != s.want {
			t.Errorf("%s: woken %d times, want %d", s.name, n, s.want)
		}
	}
}

func TestTrim(t *testing.T) {
	s := slice("a", ready("172.20.0.2"))
	s.Labels["endpointslice.kubernetes.io/managed-by"] = "x"
	s.Annotations = map[string]string{"a": "b"}
	s.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "m"}}
	s.OwnerReferences = []metav1.OwnerReference{{Name: "o"}}
	s.Endpoints[0].TargetRef = &corev1.ObjectReference{Name: "pod"}
	s.Endpoints[0].Hostname = new("h")
	s.ResourceVersion, s.UID = "7", "u"
	obj, err := trim(s)
	if err != nil {
		t.Fatal(err)
	}
	got := obj.(*discoveryv1.EndpointSlice)
	if len(got.Labels) != 1 || got.Annotations != nil || got.ManagedFields != nil || got.OwnerReferences != nil ||
		got.Endpoints[0].TargetRef != nil || got.Endpoints[0].Hostname != nil {
		t.Errorf("too much kept: %+v", got)
	}
	if got.ResourceVersion != "7" || got.UID != "u" || got.Name != "a" || got.Endpoints[0].Addresses[0] != "172.20.0.2" {
		t.Errorf("too little kept: %+v", got)
	}
	if s.Annotations == nil || s.Endpoints[0].Hostname == nil {
		t.Error("the original was changed")
	}
	tomb := cache.DeletedFinalStateUnknown{Key: "k"}
	if obj, err := trim(tomb); err != nil || obj != tomb {
		t.Errorf("tombstone became %v, %v", obj, err)
	}
	svc := kubeDNS("172.21.0.10")
	svc.Spec.Selector = map[string]string{"k8s-app": "kube-dns"}
	svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	if obj, err := trim(svc); err != nil || obj.(*corev1.Service).Spec.SessionAffinity != "" || obj.(*corev1.Service).Spec.ClusterIPs[0] != "172.21.0.10" {
		t.Errorf("Service became %v, %v", obj, err)
	}
}

// TestErrorsAreBounded: errors that all read differently don't fill the log, nor make snapshots without end. Those that
// differ in numbers only are one.
func TestErrorsAreBounded(t *testing.T) {
	letters := func(n int) string {
		return strings.Map(func(r rune) rune { return r - '0' + 'a' }, fmt.Sprint(n))
	}
	for name, tc := range map[string]struct {
		text func(n int) string
		want int
	}{
		"numbers": {func(n int) string {
			return fmt.Sprintf("request %d at 2026-12-01T00:00:%02dZ from 10.0.0.1:%d, id %x-f%d", n, n%60, 40000+n, n, n)
		}, 1},
		"words": {letters, maxDistinctErrors},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, kubeDNS("172.21.0.10"), slice("a", ready("172.20.0.2")))
				f := run(t, c)
				f.next(t)
				n := 0
				c.answer(func(clienttesting.Action) error {
					n++
					return apierrors.NewGenericServerResponse(http.StatusInternalServerError, "list", schema.GroupResource{}, "", tc.text(n), 0, true)
				})
				c.cut()
				snapshots := 0
				for range 3600 {
					time.Sleep(time.Second)
					synctest.Wait()
					select {
					case <-f.Snapshots():
						snapshots++
					default:
					}
				}
				if n < 100 {
					t.Errorf("only %d tries", n)
				}
				if got := f.logs.FilterMessage("can't follow the cluster").Len(); got != tc.want {
					t.Errorf("%d warnings, want %d", got, tc.want)
				}
				if limit := tc.want * 2 * 5; snapshots > limit {
					t.Errorf("%d snapshots, want %d at most", snapshots, limit)
				}
			})
		})
	}
}
