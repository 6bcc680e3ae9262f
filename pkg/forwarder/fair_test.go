package forwarder

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
)

var (
	hostAddr = netip.MustParseAddr("127.0.0.1")
	addrA    = netip.MustParseAddr("192.0.2.1")
	addrB    = netip.MustParseAddr("192.0.2.2")
)

func TestFair(t *testing.T) {
	six1, six2, six3 := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2:1"), netip.MustParseAddr("2001:db8:0:1::1")
	for _, tt := range []struct {
		name string
		from []netip.Addr
		want []int // indices of those evicted, in their order
	}{
		{"all fit", []netip.Addr{addrA, addrA, addrA, hostAddr}, nil},
		{"one source evicts its own oldest, and leaves the host its part", []netip.Addr{addrA, addrA, addrA, addrA, addrA}, []int{0, 1}},
		{"a newcomer is served", []netip.Addr{addrA, addrA, addrA, addrB, addrB}, []int{0, 1}},
		{"the host is, too", []netip.Addr{hostAddr, addrA, addrA, addrA, hostAddr, hostAddr}, []int{1, 2}},
		{"the host may have all, but not against others", []netip.Addr{hostAddr, hostAddr, hostAddr, hostAddr, hostAddr, addrA}, []int{0, 1}},
		{"a /64 is one source", []netip.Addr{six1, six2, six3, six3}, []int{0}},
		{"a mapped address is the same", []netip.Addr{addrA, netip.MustParseAddr("::ffff:192.0.2.1"), addrB, addrB}, []int{0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFair(4, netip.Addr.IsLoopback)
			var evicted []int
			for i, a := range tt.from {
				f.take(a, 1, func() { evicted = append(evicted, i) })
			}
			if !slices.Equal(evicted, tt.want) {
				t.Errorf("evicted %v, want %v", evicted, tt.want)
			}
		})
	}
}

func TestFairRenew(t *testing.T) {
	f := newFair(4, netip.Addr.IsLoopback)
	var evicted []string
	take := func(name string) *place { return f.take(addrA, 1, func() { evicted = append(evicted, name) }) }
	first := take("first")
	take("second")
	take("third")
	f.renew(first)
	take("fourth")
	if fmt.Sprint(evicted) != "[second]" {
		t.Errorf("evicted %v, want the one that was idle longest", evicted)
	}
	f.giveBack(first)
	f.giveBack(first)
	if f.inUse() != 2 {
		t.Errorf("%d in use", f.inUse())
	}
}

// TestFairBooks: whatever is taken and given back by many at a time, the limits hold and the books balance.
func TestFairBooks(t *testing.T) {
	f := newFair(100, netip.Addr.IsLoopback)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			var held []*place
			for i := range 2000 {
				from := hostAddr
				if n := rand.IntN(20); n > 0 {
					from = netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})
				}
				held = append(held, f.take(from, 1+rand.IntN(10), func() {}))
				if i%3 > 0 {
					k := rand.IntN(len(held))
					f.giveBack(held[k])
					held = slices.Delete(held, k, k+1)
				}
				f.mu.Lock()
				sum := f.host.taken
				for _, s := range f.sources {
					sum += s.taken
				}
				if sum != f.taken || f.taken > f.limit || f.taken-f.host.taken > f.others || len(f.sources) != len(f.ranking) {
					t.Errorf("%d taken, the books say %d; %d sources, %d ranked", f.taken, sum, len(f.sources), len(f.ranking))
				}
				f.mu.Unlock()
			}
			for _, p := range held {
				f.giveBack(p)
			}
		})
	}
	group.Wait()
	if f.taken != 0 || len(f.sources) != 0 || f.host.held.Len() != 0 {
		t.Errorf("left over: %d taken, %d sources", f.taken, len(f.sources))
	}
}
