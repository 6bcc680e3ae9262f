package discovery

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

// static is a Source whose answer is known from the start.
type static struct {
	snap Snapshot
	err  error
	out  mailbox
}

// Static returns a Source with the endpoints that the user named, for hosts that
// can't or shouldn't ask an apiserver. The set is sorted and deduplicated and
// never changes. An empty list, or an endpoint without address or port, makes
// WaitForSync fail; such a source publishes nothing.
func Static(endpoints []netip.AddrPort) Source {
	s := &static{out: newMailbox()}
	if len(endpoints) == 0 {
		s.err = fmt.Errorf("static endpoints: %w; name one with --dns-endpoint IP[:PORT]", ErrNoEndpoints)
		return s
	}
	eps := make([]Endpoint, 0, len(endpoints))
	for _, ap := range endpoints {
		ap = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
		if !ap.IsValid() || ap.Addr().IsUnspecified() || ap.Addr().IsMulticast() || ap.Port() == 0 {
			s.err = fmt.Errorf("static endpoint %s: not an address and port that can be asked; use --dns-endpoint IP[:PORT]", ap)
			return s
		}
		eps = append(eps, Endpoint{Address: ap, Source: cluster.SourceStatic})
	}
	s.snap = Snapshot{Endpoints: cluster.SortEndpoints(eps), Updated: time.Now()}
	s.out.put(s.snap)
	return s
}

// Run implements [Source]: there is nothing to follow.
func (s *static) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// WaitForSync implements [Source]; it never waits.
func (s *static) WaitForSync(context.Context) (Snapshot, error) { return s.snap, s.err }

// Snapshots implements [Source]; it delivers the one snapshot once.
func (s *static) Snapshots() <-chan Snapshot { return s.out }

// Outdated implements [Source].
func (s *static) Outdated() bool { return false }

// Current implements [Source].
func (s *static) Current() (Snapshot, bool) { return s.snap, s.err == nil }
