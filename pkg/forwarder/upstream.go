package forwarder

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// healthPolicy says when a server is put aside and when it is tried again.
type healthPolicy struct {
	strikes   int           // silent or unreachable so often in a row: put aside
	minPause  time.Duration // first pause before a probe
	maxPause  time.Duration // the pause doubles up to this
	patience  time.Duration // wait for a proven server before asking the next also
	headStart time.Duration // the same for a server that did not answer lately
}

// newHealthPolicy derives the delays from the bound of a whole exchange. The
// head start is what a dead first server costs a query, until it is put aside.
func newHealthPolicy(timeout time.Duration) healthPolicy {
	return healthPolicy{
		strikes:   3,
		minPause:  5 * time.Second,
		maxPause:  time.Minute,
		patience:  timeout / 5,
		headStart: timeout / 20,
	}
}

// upstream is one server that is asked, with its health. Any reply, even an
// error, is a sign of life.
type upstream struct {
	addr    netip.AddrPort
	tcp     netip.AddrPort // the same but for the port
	udpAddr *net.UDPAddr
	policy  *healthPolicy

	queries  atomic.Uint64
	failures atomic.Uint64

	mu       sync.Mutex
	proven   bool      // answered, and has not failed since
	heard    time.Time // last reply
	failed   int       // strikes in a row
	aside    bool
	pause    time.Duration
	probeDue time.Time
}

func newUpstream(addr netip.AddrPort, policy *healthPolicy) *upstream {
	return &upstream{addr: addr, tcp: addr, udpAddr: net.UDPAddrFromAddrPort(addr), policy: policy}
}

// answered notes a reply.
func (u *upstream) answered() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.proven = true
	u.heard = time.Now()
	u.failed = 0
	u.aside = false
	u.pause = 0
}

// strike notes that a query sent at the given time failed, or is without an
// answer for longer than the patience with this server. It does not count
// against a server that has answered another query since: then a packet was
// lost, or the name is hard to resolve. It reports whether the server was put
// aside for it.
func (u *upstream) strike(sent time.Time) (out bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.heard.After(sent) {
		return false
	}
	u.failures.Add(1)
	u.proven = false
	u.failed++
	if u.failed < u.policy.strikes || u.aside {
		return false
	}
	u.putAside()
	return true
}

// putAside is called with mu held.
func (u *upstream) putAside() {
	u.aside = true
	u.pause = min(max(2*u.pause, u.policy.minPause), u.policy.maxPause)
	u.probeDue = time.Now().Add(u.pause)
}

// probeFailed keeps the server aside for a longer pause.
func (u *upstream) probeFailed() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.aside {
		u.putAside()
	}
}

// state returns whether the server is in use, and whether the caller should
// probe it. Only one caller at a time is told to.
func (u *upstream) state(now time.Time) (usable, probe bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.aside {
		return true, false
	}
	if now.Before(u.probeDue) {
		return false, false
	}
	u.probeDue = now.Add(u.policy.maxPause) // until the probe has reported
	return false, true
}

// wait returns how long to wait for this server before the next is asked too.
func (u *upstream) wait() time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.proven {
		return u.policy.patience
	}
	return u.policy.headStart
}

// order returns the group's servers in the order in which to ask them: those
// put aside last, but never left out. Servers that are due for a probe are
// given to the probe function. alive is false if all are put aside.
func (g *group) order(now time.Time, probe func(*upstream)) (order []*upstream, alive bool) {
	n := len(g.servers)
	first := 0
	if g.spread && n > 1 {
		first = int(g.turn.Add(1) % uint32(n))
	}
	order = make([]*upstream, 0, n)
	var aside []*upstream
	for i := range n {
		u := g.servers[(first+i)%n]
		usable, due := u.state(now)
		if due {
			probe(u)
		}
		if usable {
			order = append(order, u)
		} else {
			aside = append(aside, u)
		}
	}
	return append(order, aside...), len(order) > 0
}
