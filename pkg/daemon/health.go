//go:build linux

package daemon

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/zap"
)

const (
	// healthTick is how often endpoints are looked at; with healthTries of healthTimeout each a dead one is out of
	// rotation well within a second.
	healthTick    = 200 * time.Millisecond
	healthTimeout = 250 * time.Millisecond
	healthTries   = 2

	// suspectAfter is how long a steered query may wait until its endpoint is asked whether it lives.
	suspectAfter = 100 * time.Millisecond

	// idleProbe is how often an endpoint is asked that nothing speaks against: seldom, since every host of a cluster
	// does it.
	idleProbe = 5 * time.Second
)

// health knows which endpoints do not answer. Its methods may be called from several goroutines.
type health struct {
	mu     sync.Mutex
	states map[netip.AddrPort]*healthState
}

type healthState struct {
	dead    bool
	failed  int // probes in a row
	asking  bool
	askedAt time.Time
}

func newHealth() *health { return &health{states: make(map[netip.AddrPort]*healthState)} }

func (h *health) isDead(address netip.AddrPort) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	state := h.states[address]
	return state != nil && state.dead
}

// due returns the endpoints that should be asked now, and marks them as being asked. Endpoints that are no longer there
// are forgotten.
func (h *health) due(now time.Time, endpoints []netip.AddrPort, suspects map[netip.AddrPort]bool) (due []netip.AddrPort) {
	h.mu.Lock()
	defer h.mu.Unlock()
	states := make(map[netip.AddrPort]*healthState, len(endpoints))
	for _, address := range endpoints {
		state := h.states[address]
		if state == nil {
			state = new(healthState)
		}
		states[address] = state
		if !state.asking && (state.dead || state.failed > 0 || suspects[address] || now.Sub(state.askedAt) >= idleProbe) {
			state.asking, state.askedAt = true, now
			due = append(due, address)
		}
	}
	h.states = states
	return due
}

// learn takes the result of a probe. It reports whether the endpoint has died or come back to life by it.
func (h *health) learn(address netip.AddrPort, answered bool) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	state := h.states[address]
	if state == nil {
		return false
	}
	state.asking = false
	was := state.dead
	if answered {
		state.dead, state.failed = false, 0
	} else if state.failed++; state.failed >= healthTries {
		state.dead = true
	}
	return state.dead != was
}

// watchHealth asks endpoints until ctx ends and calls changed after each that died or came back. An endpoint is asked
// when a steered query to it waits, when it was silent before, and once in a while.
func (d *Daemon) watchHealth(ctx context.Context, changed func()) {
	tick := time.NewTicker(healthTick)
	defer tick.Stop()
	var probes sync.WaitGroup
	defer probes.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			d.mu.Lock()
			addresses, zone := d.snapshot.Addresses(), d.network.zones[0].Name
			d.mu.Unlock()
			for _, address := range d.health.due(now, addresses, d.suspects()) {
				probes.Go(func() {
					answered := lives(ctx, address, zone)
					if ctx.Err() == nil && d.health.learn(address, answered) {
						d.log.Warn("endpoint's health changed", zap.Stringer("backend", address), zap.Bool("dead", !answered))
						changed()
					}
				})
			}
		}
	}
}

// suspects returns the endpoints that a steered query waits for.
func (d *Daemon) suspects() map[netip.AddrPort]bool {
	if d.datapath == nil {
		return nil
	}
	suspects, err := d.datapath.Waiting(suspectAfter)
	if err != nil {
		d.log.Error("steered queries in flight not read", zap.Error(err))
	}
	return suspects
}

// lives asks an endpoint for the zone's SOA. Any reply is a sign of life, but one that says that it can't serve.
func lives(ctx context.Context, server netip.AddrPort, zone string) bool {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	message := new(dns.Msg)
	message.SetQuestion(dns.Fqdn(zone), dns.TypeSOA)
	client := dns.Client{Timeout: healthTimeout}
	reply, _, err := client.ExchangeContext(ctx, message, server.String())
	return err == nil && reply.Rcode != dns.RcodeServerFailure
}
