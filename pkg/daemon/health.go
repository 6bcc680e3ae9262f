//go:build linux

package daemon

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
)

const (
	// healthTick is how often endpoints are checked; with healthTries of healthTimeout each, a dead one is out of
	// rotation well within a second.
	healthTick    = 200 * time.Millisecond
	healthTimeout = 250 * time.Millisecond
	healthTries   = 2
	// lastTries is healthTries for the last endpoint that is alive: a slow answer is better than none.
	lastTries = 4

	// suspectAfter is how long a steered query may wait before its endpoint is probed.
	suspectAfter = 100 * time.Millisecond

	// idleProbe is how often an endpoint without suspicion is probed: rarely, since every host of a cluster
	// does it.
	idleProbe = 5 * time.Second

	// doubtAfter is how long a steered query may wait at an endpoint that answers ordinary probes before the kernel's
	// path to it is tested by steered probes; trialEvery is how often that is done.
	doubtAfter = time.Second
	trialEvery = time.Second

	// A path on which probes succeed may still lose clients' queries, for example large replies. It counts as lossy if, within a lossWindow,
	// this many queries are lost, and this share of all.
	lossWindow = 15 * time.Second
	lossLeast  = 8
	lossPart   = 3

	// Such a path is retried after a time that doubles with each relapse and is reset after maxPause without one.
	minPause = time.Minute
	maxPause = time.Hour
)

// health tracks which endpoints do not answer, and which lose steered queries. Its methods may be called from
// several goroutines.
type health struct {
	mu     sync.Mutex
	states map[netip.AddrPort]*healthState
	heard  time.Time // when any endpoint is known to have answered a client
	window time.Time // since when losses are counted
	then   uint64    // replies at its begin
}

type healthState struct {
	dead    bool
	failed  int       // probes in a row
	since   time.Time // the first of them was sent
	asking  bool
	askedAt time.Time
	way     wayState
}

// wayState is what is known about the kernel's path to an endpoint.
type wayState struct {
	severed bool // steered queries are lost
	onTrial bool // steered probes should be sent
	failed  int  // steered probes in a row
	asking  bool
	askedAt time.Time
	lost    int // queries in this window
	// excused is until when a lost query may be one that was sent while the endpoint itself was silent.
	excused time.Time
	// until is when a path that lost queries although probes succeeded is retried; pause is how long that took.
	until time.Time
	pause time.Duration
}

func newHealth() *health { return &health{states: make(map[netip.AddrPort]*healthState)} }

// view returns what a plan needs.
func (h *health) view() map[netip.AddrPort]plan.Health {
	h.mu.Lock()
	defer h.mu.Unlock()
	view := make(map[netip.AddrPort]plan.Health, len(h.states))
	for address, state := range h.states {
		view[address] = plan.Health{Dead: state.dead, Severed: state.way.severed, OnTrial: state.way.onTrial}
	}
	return view
}

// due returns the endpoints that should be probed now, and marks them as being probed. Endpoints that no longer exist
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

// hear records that clients' queries are answered.
func (h *health) hear(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now.After(h.heard) {
		h.heard = now
	}
}

// learn takes the result of a probe and reports whether the endpoint has died or come back. The last endpoint that is
// alive does not die while clients get answers: a busy server may be too slow for a probe.
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
		if state.dead || state.failed > 0 {
			state.way.excused = state.askedAt.Add(datapath.DefaultFlowTimeout)
		}
		state.dead, state.failed = false, 0
		return was
	}
	if state.failed == 0 {
		state.since = state.askedAt
	}
	state.failed++
	switch {
	case state.failed < healthTries:
	case state.dead:
	case h.isLast(state) && state.failed < lastTries:
	case h.isLast(state) && h.heard.After(state.since):
		state.failed, state.since = lastTries-1, state.askedAt
	default:
		state.dead = true
	}
	return state.dead != was
}

func (h *health) isLast(alive *healthState) bool {
	for _, state := range h.states {
		if state != alive && !state.dead {
			return false
		}
	}
	return true
}

// cancelled reports whether ctx has ended, so that the result of a probe means nothing.
func (h *health) cancelled(ctx context.Context, address netip.AddrPort) bool {
	if ctx.Err() == nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if state := h.states[address]; state != nil {
		state.asking, state.way.asking = false, false
	}
	return true
}

// doubt judges the kernel's paths by pending steered queries and by the replies so far, which come evenly from the endpoints
// that are steered to. It reports whether the datapath needs an update.
func (h *health) doubt(now time.Time, steered []netip.AddrPort, waiting map[netip.AddrPort]datapath.Waiting, replied uint64) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	over := now.Sub(h.window) >= lossWindow
	if over {
		defer func() { h.window, h.then = now, replied }()
	}
	inRotation := 0
	for _, address := range steered {
		if state := h.states[address]; state != nil && !state.dead && !state.way.severed {
			inRotation++
		}
	}
	share := int(replied-h.then) / max(1, inRotation)
	for _, address := range steered {
		state := h.states[address]
		if state == nil {
			continue
		}
		way, before := &state.way, state.way
		lives := !state.dead && state.failed == 0
		if lives && now.After(way.excused) {
			way.lost += waiting[address].Lost
		}
		switch {
		case way.severed:
		case lives && way.lost >= lossLeast && way.lost*lossPart >= share:
			way.pause = min(max(2*way.pause, minPause), maxPause)
			way.severed, way.onTrial, way.failed, way.until = true, true, 0, now.Add(way.pause)
		default:
			way.onTrial = lives && waiting[address].Longest > doubtAfter
			if now.Sub(way.until) > maxPause {
				way.pause = 0
			}
		}
		if over || way.severed {
			way.lost = 0
		}
		changed = changed || way.severed != before.severed || way.onTrial != before.onTrial
	}
	return changed
}

// tryNow reports whether the path to an endpoint on trial should be tested now, and marks it as being tested.
func (h *health) tryNow(now time.Time, address netip.AddrPort) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	state := h.states[address]
	if state == nil {
		return false
	}
	way := &state.way
	again := way.failed > 0 && !way.severed // to be sure soon
	if !way.onTrial || way.asking || now.Before(way.until) || !again && now.Sub(way.askedAt) < trialEvery {
		return false
	}
	way.asking, way.askedAt = true, now
	return true
}

// learnWay takes the result of a steered probe and reports whether the path has become severed or has recovered. What a dead
// endpoint does not answer says nothing about the path.
func (h *health) learnWay(address netip.AddrPort, result trial) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	state := h.states[address]
	if state == nil {
		return false
	}
	way := &state.way
	way.asking = false
	was := way.severed
	switch {
	case result == trialAnswered:
		way.severed, way.failed = false, 0
	case result == trialLost && !state.dead && state.failed == 0:
		if way.failed++; way.failed >= healthTries {
			way.severed = true
		}
	}
	return way.severed != was
}

// watchHealth probes endpoints until ctx ends and calls changed after each change that affects the plan. An endpoint
// is probed when a steered query to it is pending, when it was silent before, and occasionally.
func (d *Daemon) watchHealth(ctx context.Context, changed func()) {
	tick := time.NewTicker(healthTick)
	defer tick.Stop()
	var probes sync.WaitGroup
	defer probes.Wait()
	var before uint64
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s := d.seen.Load()
			waiting, replied := d.unanswered(s.desired)
			if replied != before {
				d.health.hear(now)
			}
			before = replied
			d.hearForwarder(s.desired)
			d.probeDue(ctx, now, s.desired, waiting, &probes, changed)
			if d.datapath != nil {
				if !d.datapath.Intact() {
					changed()
				}
				d.judgeWays(ctx, now, s, waiting, replied, &probes, changed)
			}
		}
	}
}

// hearForwarder records which endpoints have answered the forwarder.
func (d *Daemon) hearForwarder(desired plan.Desired) {
	for _, server := range d.forwarder.Stats().Upstreams {
		if slices.ContainsFunc(desired.Endpoints, func(e plan.Endpoint) bool { return e.Address == server.Addr }) {
			d.health.hear(server.Heard)
		}
	}
}

// probeDue probes the endpoints that are due.
func (d *Daemon) probeDue(ctx context.Context, now time.Time, desired plan.Desired, waiting map[netip.AddrPort]datapath.Waiting,
	probes *sync.WaitGroup, changed func()) {
	suspects := make(map[netip.AddrPort]bool)
	for address, w := range waiting {
		suspects[address] = w.Longest > suspectAfter
	}
	for _, address := range d.health.due(now, desired.Addresses(plan.Endpoint.Asked), suspects) {
		probes.Go(func() {
			answered := lives(ctx, address, desired.Zones[0].Name)
			if d.health.cancelled(ctx, address) {
				return
			}
			if d.health.learn(address, answered) {
				d.log.Warn("endpoint's health changed", zap.Stringer("backend", address), zap.Bool("dead", !answered))
				changed()
			}
		})
	}
}

// judgeWays checks the kernel's paths to endpoints, and tests those in doubt.
func (d *Daemon) judgeWays(ctx context.Context, now time.Time, s *attachment, waiting map[netip.AddrPort]datapath.Waiting, replied uint64,
	probes *sync.WaitGroup, changed func()) {
	if plan.IsTransparent(s.config) {
		// No forwarder takes over there, so a lossy path is better than none.
		for address, w := range waiting {
			waiting[address] = datapath.Waiting{Longest: w.Longest}
		}
	}
	if d.health.doubt(now, s.desired.Addresses(plan.Endpoint.Steerable), waiting, replied) {
		changed()
	}
	for zone, e := range s.desired.Trials() {
		if !d.health.tryNow(now, e.Address) {
			continue
		}
		server, ok := s.desired.InterceptedBy(e.Address.Addr().Is4())
		probes.Go(func() {
			// If this host itself can't ask, clients' queries are the test.
			result, err := trialAnswered, error(nil)
			if ok {
				result, err = d.try(ctx, server, zone, e.Address)
			}
			if d.health.cancelled(ctx, e.Address) {
				return
			}
			if d.health.learnWay(e.Address, result) {
				d.log.Warn("the kernel's path to an endpoint changed", zap.Stringer("backend", e.Address),
					zap.String("iface", e.Way.Interface), zap.Bool("severed", result == trialLost), zap.Error(err))
				changed()
			}
		})
	}
}

// greet asks servers for a zone's SOA, all at once, and judges nothing.
func (h *health) greet(ctx context.Context, servers []netip.AddrPort, zone string) {
	var probes sync.WaitGroup
	for _, server := range servers {
		probes.Go(func() { lives(ctx, server, zone) })
	}
	probes.Wait()
}

// unanswered returns the pending steered queries, and how many have been answered so far.
func (d *Daemon) unanswered(desired plan.Desired) (waiting map[netip.AddrPort]datapath.Waiting, replied uint64) {
	if d.datapath == nil {
		return nil, 0
	}
	inKernel, err := d.datapath.Waiting()
	if err != nil {
		d.log.Error("steered queries in flight could not be read", zap.Error(err))
	}
	waiting = make(map[netip.AddrPort]datapath.Waiting)
	for _, e := range desired.Endpoints {
		if w, ok := inKernel[unzoned(e.Address)]; ok {
			waiting[e.Address] = w
		}
	}
	counters, err := d.datapath.Counters()
	if err != nil {
		d.log.Error("counters could not be read", zap.Error(err))
	}
	for _, c := range counters {
		replied += c.ByReason["replied"]
	}
	return waiting, replied
}

// unzoned is an endpoint as the kernel programs know it: by address and interface.
func unzoned(address netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(address.Addr().WithZone(""), address.Port())
}

// trial is the result of a steered probe.
type trial int

const (
	trialUnclear  trial = iota // it was not steered to the intended endpoint
	trialAnswered              // the reply was delivered by the kernel
	trialLost
)

// try sends a query to an address where it is steered to the only endpoint of the trial zone. Whoever else might
// answer, only a reply that the kernel has delivered counts.
func (d *Daemon) try(ctx context.Context, server netip.AddrPort, zone string, endpoint netip.AddrPort) (trial, error) {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	message := new(dns.Msg)
	message.SetQuestion(dns.Fqdn(zone), dns.TypeSOA)
	notCached(message)
	conn, err := (&dns.Client{Timeout: healthTimeout}).DialContext(ctx, server.String())
	if err != nil {
		return trialUnclear, err
	}
	defer conn.Close()
	client := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	deadline, _ := ctx.Deadline()
	if err := errors.Join(conn.SetDeadline(deadline), conn.WriteMsg(message)); err != nil {
		return trialUnclear, err
	}
	_, unanswered := conn.ReadMsg()
	steered, replied, found, err := d.datapath.Steered(client, message.Id)
	switch {
	case err != nil || !found || steered != unzoned(endpoint):
		return trialUnclear, err
	case replied && unanswered == nil:
		return trialAnswered, nil
	}
	return trialLost, unanswered
}

// lives asks an endpoint for the zone's SOA. Any reply is a sign of life, except one that says that it can't serve.
func lives(ctx context.Context, server netip.AddrPort, zone string) bool {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	message := new(dns.Msg)
	message.SetQuestion(dns.Fqdn(zone), dns.TypeSOA)
	client := dns.Client{Timeout: healthTimeout}
	reply, _, err := client.ExchangeContext(ctx, message, server.String())
	return err == nil && reply.Rcode != dns.RcodeServerFailure
}
