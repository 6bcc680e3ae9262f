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
	strikes  int           // silent or unreachable so often in a row: put aside
	minPause time.Duration // first pause before a client's query is let through
	maxPause time.Duration // the pause doubles up to this
}

var defaultHealthPolicy = healthPolicy{strikes: 3, minPause: time.Second, maxPause: 15 * time.Second}

// standing is what a server is thought of, before it is asked.
type standing int

const (
	trusted standing = iota // has answered, or was never asked
	suspect                 // has been silent since its last answer
	onTrial                 // put aside, and let through with this query to see whether it is back
	aside                   // put aside
)

// upstream is one server that is asked, with its health. Any reply, even an
// error, is a sign of life.
type upstream struct {
	addr    netip.AddrPort
	tcp     netip.AddrPort // the same but for the port
	udpAddr *net.UDPAddr
	policy  *healthPolicy

	forbidden atomic.Bool // see Routes.Forbidden

	queries  atomic.Uint64
	failures atomic.Uint64

	mu       sync.Mutex
	suspect  bool      // silent or unreachable since it was heard
	heard    time.Time // last reply
	failed   int       // strikes in a row
	aside    bool
	pause    time.Duration
	trialDue time.Time
}

func newUpstream(addr netip.AddrPort, policy *healthPolicy) *upstream {
	return &upstream{addr: addr, tcp: addr, udpAddr: net.UDPAddrFromAddrPort(addr), policy: policy}
}

// answered notes a reply. It reports whether the server was aside.
func (u *upstream) answered() (back bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	back = u.aside
	u.suspect = false
	u.heard = time.Now()
	u.failed = 0
	u.aside = false
	u.pause = 0
	return back
}

// strike notes that a query sent at the given time failed, or that it has no
// answer in the time in which a stub resolver takes one. It does not count
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
	u.suspect = true
	u.failed++
	if u.failed < u.policy.strikes {
		return false
	}
	out = !u.aside
	u.aside = true
	u.pause = min(max(2*u.pause, u.policy.minPause), u.policy.maxPause)
	u.trialDue = time.Now().Add(u.pause)
	return out
}

// overtaken notes that another server's answer was taken while this one, asked
// at the given time, was silent. It is not waited for so long the next time.
func (u *upstream) overtaken(sent time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.heard.After(sent) {
		u.suspect = true
	}
}

// standing returns what the server is thought of. Of a server that is aside
// one query at a time is told that it is a trial.
func (u *upstream) standing(now time.Time) standing {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.aside && now.Before(u.trialDue):
		return aside
	case u.aside:
		u.trialDue = now.Add(u.policy.maxPause) // until the trial has come out
		return onTrial
	case u.suspect:
		return suspect
	}
	return trusted
}

// order returns the group's servers in the order in which to ask them: those
// put aside last, but never left out, and those on trial where they belong. If
// all are aside, alive is false and the order is that of the group.
func (g *group) order(now time.Time) (order []contender, alive bool) {
	n := len(g.servers)
	first := 0
	if g.spread && n > 1 {
		first = int(g.turn.Add(1) % uint32(n))
	}
	order = make([]contender, 0, n)
	var last []contender
	for i := range n {
		u := g.servers[(first+i)%n]
		c := contender{upstream: u, standing: u.standing(now)}
		alive = alive || c.standing < onTrial
		if c.standing == aside {
			last = append(last, c)
		} else {
			order = append(order, c)
		}
	}
	return append(order, last...), alive
}
