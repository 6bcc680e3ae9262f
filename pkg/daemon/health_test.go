//go:build linux

package daemon

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/datapath"
)

var (
	endpointA = netip.MustParseAddrPort("172.20.0.10:53")
	endpointB = netip.MustParseAddrPort("172.20.0.11:53")
	endpointC = netip.MustParseAddrPort("[fd00:20::10]:5353")
)

// clock is the time that a test gives to health. Nothing waits for it.
type clock struct{ now time.Time }

func newClock() *clock { return &clock{time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)} }

func (c *clock) after(d time.Duration) time.Time {
	c.now = c.now.Add(d)
	return c.now
}

func wantDue(t *testing.T, h *health, now time.Time, endpoints []netip.AddrPort, suspects map[netip.AddrPort]bool, want ...netip.AddrPort) {
	t.Helper()
	if got := h.due(now, endpoints, suspects); !slices.Equal(got, want) {
		t.Errorf("due %v, want %v", got, want)
	}
}

// learn takes a probe's result, and requires whether it changes something.
func learn(t *testing.T, h *health, address netip.AddrPort, answered, wantChanged, wantDead bool) {
	t.Helper()
	if changed := h.learn(address, answered); changed != wantChanged {
		t.Errorf("%s, answered %v: changed %v, want %v", address, answered, changed, wantChanged)
	}
	if dead := h.view()[address].Dead; dead != wantDead {
		t.Errorf("%s, answered %v: dead %v, want %v", address, answered, dead, wantDead)
	}
}

// TestLostWhileSilent: what a dead endpoint did not answer is no fault of the path, though it is only later that it counts as lost.
func TestLostWhileSilent(t *testing.T) {
	h, now, all := newHealth(), newClock(), []netip.AddrPort{endpointA}
	lose := func(d time.Duration, wantSevered bool) {
		t.Helper()
		h.doubt(now.after(d), all, map[netip.AddrPort]datapath.Waiting{endpointA: {Lost: lossLeast}}, 0)
		if severed := h.view()[endpointA].Severed; severed != wantSevered {
			t.Errorf("severed %v, want %v", severed, wantSevered)
		}
	}
	for _, failures := range []int{1, lastTries} { // suspected, and dead
		for range failures {
			h.due(now.after(healthTick), all, nil)
			h.learn(endpointA, false)
		}
		h.due(now.after(healthTick), all, nil)
		h.learn(endpointA, true)
		lose(healthTick, false)
		lose(datapath.DefaultFlowTimeout-healthTick, false)
	}
	lose(healthTick, true) // these were sent since
}

func TestHealthDeadAfterTwoFailures(t *testing.T) {
	h, now, all := newHealth(), newClock(), []netip.AddrPort{endpointA, endpointB}
	wantDue(t, h, now.now, all, nil, all...) // new ones at once
	learn(t, h, endpointB, true, false, false)
	learn(t, h, endpointA, false, false, false)
	// It is asked again with the next tick, without a suspicion.
	wantDue(t, h, now.after(healthTick), all, nil, endpointA)
	learn(t, h, endpointA, false, true, true)
	// And for as long as it is dead.
	for range 5 {
		wantDue(t, h, now.after(healthTick), all, nil, endpointA)
		learn(t, h, endpointA, false, false, true)
	}
	// One answer brings it back, and clears what it had failed.
	wantDue(t, h, now.after(healthTick), all, nil, endpointA)
	learn(t, h, endpointA, true, true, false)
	wantDue(t, h, now.after(healthTick), all, nil)
	wantDue(t, h, now.after(idleProbe), all, nil, all...)
	learn(t, h, endpointB, true, false, false)
	learn(t, h, endpointA, false, false, false)
	wantDue(t, h, now.after(healthTick), all, nil, endpointA)
	learn(t, h, endpointA, false, true, true)
}

// TestHealthOfTheOnlyOne: nobody answers in its place, so it gets more time.
func TestHealthOfTheOnlyOne(t *testing.T) {
	h, now, all := newHealth(), newClock(), []netip.AddrPort{endpointA}
	for n := 1; n <= lastTries; n++ {
		wantDue(t, h, now.after(healthTick), all, nil, endpointA)
		last := n == lastTries
		learn(t, h, endpointA, false, last, last)
	}
	wantDue(t, h, now.after(healthTick), all, nil, endpointA)
	learn(t, h, endpointA, true, true, false)
}

// While clients are answered, the last one that lives is only slow.
func TestHealthOfTheLast(t *testing.T) {
	h, now, all := newHealth(), newClock(), []netip.AddrPort{endpointA, endpointB}
	ask := func() {
		t.Helper()
		for _, address := range h.due(now.after(idleProbe), all, nil) {
			if address == endpointA {
				h.learn(endpointA, false)
			}
		}
	}
	wantDue(t, h, now.now, all, nil, all...)
	learn(t, h, endpointA, false, false, false)
	learn(t, h, endpointB, false, false, false)
	h.hear(now.after(healthTick)) // from whom is not known
	wantDue(t, h, now.after(healthTick), all, nil, all...)
	learn(t, h, endpointB, false, true, true)
	learn(t, h, endpointA, false, false, false)
	for range 5 {
		h.hear(now.after(healthTick))
		ask()
		if h.view()[endpointA].Dead {
			t.Fatal("dead, while clients are answered")
		}
	}
	ask()
	ask()
	if !h.view()[endpointA].Dead {
		t.Error("alive, and nobody has answered since it was asked first")
	}
}

// Failures count in a row.
func TestHealthFailureBetweenAnswers(t *testing.T) {
	h, now, all := newHealth(), newClock(), []netip.AddrPort{endpointA}
	for range 10 {
		wantDue(t, h, now.after(idleProbe), all, nil, endpointA)
		learn(t, h, endpointA, false, false, false)
		wantDue(t, h, now.after(healthTick), all, nil, endpointA)
		learn(t, h, endpointA, true, false, false)
	}
}

func TestHealthIdleProbe(t *testing.T) {
	h, now, all := newHealth(), newClock(), []netip.AddrPort{endpointA, endpointB}
	wantDue(t, h, now.now, all, nil, endpointA, endpointB)
	learn(t, h, endpointA, true, false, false)
	// B's probe is on its way for long: it is not asked a second time meanwhile, by any reason.
	suspects := map[netip.AddrPort]bool{endpointB: true}
	wantDue(t, h, now.after(idleProbe-1), all, suspects)
	wantDue(t, h, now.after(1), all, suspects, endpointA)
	learn(t, h, endpointB, true, false, false)
	learn(t, h, endpointA, true, false, false)
	// The interval counts from the question, not from the answer.
	wantDue(t, h, now.after(0), all, nil, endpointB)
	wantDue(t, h, now.after(idleProbe-1), all, nil)
	wantDue(t, h, now.after(1), all, nil, endpointA)
}

func TestHealthSuspects(t *testing.T) {
	h, now, all := newHealth(), newClock(), []netip.AddrPort{endpointA, endpointB, endpointC}
	wantDue(t, h, now.now, all, nil, endpointA, endpointB, endpointC)
	for _, address := range all {
		learn(t, h, address, true, false, false)
	}
	stranger := netip.MustParseAddrPort("192.0.2.1:53")
	suspects := map[netip.AddrPort]bool{endpointC: true, endpointA: true, endpointB: false, stranger: true}
	// At once, in the order of the endpoints; one that is no endpoint is nobody's.
	wantDue(t, h, now.after(1), all, suspects, endpointA, endpointC)
	learn(t, h, endpointA, true, false, false)
	learn(t, h, endpointC, false, false, false)
	wantDue(t, h, now.after(1), all, suspects, endpointA, endpointC)
	if h.view()[stranger].Dead || h.learn(stranger, false) {
		t.Error("an address that is no endpoint has a health")
	}
}

func TestHealthForgets(t *testing.T) {
	h, now := newHealth(), newClock()
	kill := func() {
		t.Helper()
		for i := range lastTries {
			wantDue(t, h, now.after(healthTick), []netip.AddrPort{endpointA}, nil, endpointA)
			learn(t, h, endpointA, false, i == lastTries-1, i == lastTries-1)
		}
	}
	kill()
	// It is gone from the cluster, and its probe comes too late.
	wantDue(t, h, now.after(healthTick), []netip.AddrPort{endpointB}, nil, endpointB)
	learn(t, h, endpointA, false, false, false)
	if len(h.states) != 1 {
		t.Errorf("%d endpoints are remembered, want 1", len(h.states))
	}
	// Another one with its address is as good as any.
	learn(t, h, endpointB, true, false, false)
	wantDue(t, h, now.after(healthTick), []netip.AddrPort{endpointB, endpointA}, nil, endpointA)
	learn(t, h, endpointA, false, false, false)
	wantDue(t, h, now.after(healthTick), nil, nil)
	if len(h.states) != 0 {
		t.Errorf("%d endpoints are remembered, want none", len(h.states))
	}
}

// wayCase is a health of which both endpoints live.
type wayCase struct {
	*testing.T
	*clock
	h   *health
	all []netip.AddrPort
}

func newWayCase(t *testing.T) wayCase {
	c := wayCase{t, newClock(), newHealth(), []netip.AddrPort{endpointA, endpointB}}
	wantDue(t, c.h, c.now, c.all, nil, c.all...)
	for _, address := range c.all {
		learn(t, c.h, address, true, false, false)
	}
	return c
}

// doubt passes a time and shows what waits at the first endpoint then.
func (c wayCase) doubt(d time.Duration, w datapath.Waiting, replied uint64, wantChanged, wantSevered, wantTrial bool) {
	c.Helper()
	changed := c.h.doubt(c.after(d), c.all, map[netip.AddrPort]datapath.Waiting{endpointA: w}, replied)
	way := c.h.view()[endpointA]
	if changed != wantChanged || way.Severed != wantSevered || way.OnTrial != wantTrial {
		c.Errorf("%+v: changed %v, severed %v, on trial %v; want %v, %v, %v", w, changed, way.Severed, way.OnTrial, wantChanged, wantSevered, wantTrial)
	}
	if way := c.h.view()[endpointB]; way.Severed || way.OnTrial {
		c.Errorf("the other endpoint: %+v", way)
	}
}

// try passes a time, wants the way to be tried then, and takes the result.
func (c wayCase) try(d time.Duration, result trial, wantChanged, wantSevered bool) {
	c.Helper()
	if !c.h.tryNow(c.after(d), endpointA) {
		c.Fatal("not tried")
	}
	if c.h.tryNow(c.now, endpointA) {
		c.Error("tried twice at once")
	}
	changed := c.h.learnWay(endpointA, result)
	if severed := c.h.view()[endpointA].Severed; changed != wantChanged || severed != wantSevered {
		c.Errorf("changed %v, severed %v; want %v, %v", changed, severed, wantChanged, wantSevered)
	}
}

// Two steered probes in a row decide, after a query that waited too long; one brings the way back.
func TestWaySevered(t *testing.T) {
	c := newWayCase(t)
	c.doubt(healthTick, datapath.Waiting{Longest: doubtAfter}, 0, false, false, false)
	if c.h.tryNow(c.now, endpointA) {
		t.Error("tried without a doubt")
	}
	late := datapath.Waiting{Longest: doubtAfter + 1}
	c.doubt(healthTick, late, 0, true, false, true)
	c.try(healthTick, trialLost, false, false)
	c.try(healthTick, trialUnclear, false, false)
	c.try(healthTick, trialAnswered, false, false)
	c.try(trialEvery, trialLost, false, false)
	c.try(healthTick, trialLost, true, true)
	// It stays on trial when nothing waits any more.
	c.doubt(healthTick, datapath.Waiting{}, 0, false, true, true)
	if c.h.tryNow(c.now, endpointA) {
		t.Error("tried again at once")
	}
	c.try(trialEvery, trialLost, false, true)
	c.try(trialEvery, trialAnswered, true, false)
	c.doubt(healthTick, datapath.Waiting{}, 0, true, false, false)
}

// What a dead endpoint does not answer says nothing of the way to it.
func TestWayOfTheDead(t *testing.T) {
	c := newWayCase(t)
	c.doubt(healthTick, datapath.Waiting{Longest: doubtAfter + 1}, 0, true, false, true)
	if !c.h.tryNow(c.after(healthTick), endpointA) {
		t.Fatal("not tried")
	}
	for range healthTries {
		c.h.due(c.after(idleProbe), c.all, nil)
		c.h.learn(endpointA, false)
		if c.h.learnWay(endpointA, trialLost) {
			t.Error("a way is judged by what the dead do not answer")
		}
	}
	c.doubt(healthTick, datapath.Waiting{Longest: doubtAfter + 1, Lost: 100}, 0, true, false, false)
}

// Where probes come through and a large part of the queries does not, it is these that count. A relapse takes longer.
func TestWayLosesAPart(t *testing.T) {
	c := newWayCase(t)
	c.doubt(healthTick, datapath.Waiting{Lost: lossLeast - 1}, 0, false, false, false)
	c.doubt(lossWindow, datapath.Waiting{}, 0, false, false, false) // forgotten with the window
	c.doubt(healthTick, datapath.Waiting{Lost: lossLeast}, 2*(lossPart*lossLeast+lossPart), false, false, false)
	c.doubt(lossWindow, datapath.Waiting{}, 1000, false, false, false)
	for _, pause := range []time.Duration{minPause, 2 * minPause, 4 * minPause} {
		c.doubt(healthTick, datapath.Waiting{Lost: lossLeast}, 1000+2*lossPart*lossLeast, true, true, true)
		if c.h.tryNow(c.after(pause-1), endpointA) {
			t.Errorf("tried before %s are over", pause)
		}
		c.try(1, trialAnswered, true, false)
		c.doubt(lossWindow, datapath.Waiting{}, 1000, true, false, false)
	}
	c.doubt(maxPause+1, datapath.Waiting{}, 1000, false, false, false)
	c.doubt(healthTick, datapath.Waiting{Lost: lossLeast}, 1000, true, true, true)
	c.try(minPause, trialAnswered, true, false)
}

// Probes learn while others ask.
func TestHealthConcurrent(t *testing.T) {
	h, all := newHealth(), []netip.AddrPort{endpointA, endpointB, endpointC}
	start := newClock().now
	asked := make(map[netip.AddrPort]int) // of probes under way
	var mu sync.Mutex
	var running sync.WaitGroup
	for worker := range 4 {
		running.Go(func() {
			for i := range 500 {
				now := start.Add(time.Duration(i) * idleProbe)
				for _, address := range h.due(now, all, map[netip.AddrPort]bool{endpointB: worker == 0}) {
					mu.Lock()
					asked[address]++
					if asked[address] > 1 {
						t.Errorf("%s is asked twice at once", address)
					}
					mu.Unlock()
					h.view()
					mu.Lock()
					asked[address]--
					mu.Unlock()
					h.learn(address, i%3 > 0)
				}
			}
		})
	}
	running.Wait()
}

// Within a second: what the design promises follows from the constants.
func TestHealthWithinASecond(t *testing.T) {
	if worst := suspectAfter + healthTries*(healthTick+healthTimeout); worst > time.Second {
		t.Errorf("a dead endpoint is out of rotation after %s at worst", worst)
	}
}

// serve answers every query on a loopback address in the same way, or not at all.
func serve(t *testing.T, reply func(*dns.Msg) *dns.Msg) netip.AddrPort {
	t.Helper()
	socket, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	server := &dns.Server{PacketConn: socket, NotifyStartedFunc: func() { close(ready) }, Handler: dns.HandlerFunc(
		func(w dns.ResponseWriter, asked *dns.Msg) {
			if message := reply(asked); message != nil {
				_ = w.WriteMsg(message)
			}
		})}
	ended := make(chan error, 1)
	go func() { ended <- server.ActivateAndServe() }()
	<-ready
	t.Cleanup(func() {
		if err := server.Shutdown(); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return socket.LocalAddr().(*net.UDPAddr).AddrPort()
}

func TestLives(t *testing.T) {
	withCode := func(code int) func(*dns.Msg) *dns.Msg {
		return func(asked *dns.Msg) *dns.Msg { return new(dns.Msg).SetRcode(asked, code) }
	}
	for name, c := range map[string]struct {
		reply func(*dns.Msg) *dns.Msg
		want  bool
	}{
		"NOERROR":  {withCode(dns.RcodeSuccess), true},
		"NXDOMAIN": {withCode(dns.RcodeNameError), true},
		"REFUSED":  {withCode(dns.RcodeRefused), true},
		"SERVFAIL": {withCode(dns.RcodeServerFailure), false},
		"silence":  {func(*dns.Msg) *dns.Msg { return nil }, false},
		"other question": {func(asked *dns.Msg) *dns.Msg {
			asked.Id++
			return new(dns.Msg).SetReply(asked)
		}, false},
		"the zone's SOA": {func(asked *dns.Msg) *dns.Msg {
			if q := asked.Question[0]; q.Name != "cluster.local." || q.Qtype != dns.TypeSOA {
				return nil
			}
			return new(dns.Msg).SetReply(asked)
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := lives(context.Background(), serve(t, c.reply), "cluster.local"); got != c.want {
				t.Errorf("lives %v, want %v", got, c.want)
			}
		})
	}
	t.Run("stopping", func(t *testing.T) {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		if lives(ended, serve(t, withCode(dns.RcodeSuccess)), "cluster.local") {
			t.Error("lives after the end of its context")
		}
	})
}
