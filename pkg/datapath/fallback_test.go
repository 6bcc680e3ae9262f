//go:build linux

package datapath

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// fallbackOf is a family whose queries go to the host's upstream servers.
func fallbackOf(f family) family {
	f.backend, f.nat = netip.MustParseAddrPort("192.0.2.53:53"), netip.MustParseAddr("192.0.2.1")
	if f.client.Addr().Is6() {
		f.backend, f.nat = netip.MustParseAddrPort("[2001:db8::53]:53"), netip.MustParseAddr("2001:db8::1")
	}
	return f
}

func fallbackBackends() []Backend {
	var backends []Backend
	for _, f := range families {
		f = fallbackOf(f)
		backends = append(backends, Backend{Address: f.backend, NATAddress: f.nat, Ifindex: loIfindex})
	}
	return backends
}

func (h *harness) replaceFallback(tb testing.TB, zones []string, backends, fallback []Backend) {
	tb.Helper()
	if err := h.ReplaceZones(zones, backends, fallback, nil); err != nil {
		tb.Fatal(err)
	}
}

// setSilence makes the daemon's last sign of life so old.
func (h *harness) setSilence(tb testing.TB, silence, limit time.Duration) {
	tb.Helper()
	config, err := h.readConfig()
	if err != nil {
		tb.Fatal(err)
	}
	config.HeartbeatNs = monotonic(tb) - uint64(silence.Nanoseconds())
	config.HeartbeatLimitNs = uint64(limit.Nanoseconds())
	if err := h.writeConfig(config); err != nil {
		tb.Fatal(err)
	}
}

func (h *harness) beat(tb testing.TB, limit time.Duration) {
	tb.Helper()
	if err := h.Heartbeat(limit); err != nil {
		tb.Fatal(err)
	}
}

// All that the daemon's life changes, and what it does not change.
func TestFallback(t *testing.T) {
	const limit = time.Hour // of which no test's run takes a part that counts
	h := newHarness(t)
	h.replaceFallback(t, []string{testZone}, defaultBackends(), fallbackBackends())
	external := []string{"example.com", ".", "a", "notcluster.local", "cluster.local.example.com", "local"}
	eachPath(t, h, func(t *testing.T, program Program, f family) {
		t.Helper()
		wantPassed := func(t *testing.T) {
			t.Helper()
			for _, name := range external {
				h.expect(t, program, f.query(query(t, name)), "passed_external")
			}
			h.forget(t, h.steer(t, program, f, f.query(query(t, inZone))))
		}
		wantFallback := func(t *testing.T) {
			t.Helper()
			for _, name := range external {
				former, frame := fallbackOf(f), f.query(query(t, name, withOPT(4096)))
				q := h.steerAs(t, program, former, frame, steering{testScope, "steered_fallback", loIfindex, loIfindex})
				h.deliver(t, program, f, q, replyFrame(q, answer(t, q)))
			}
			for _, name := range []string{"cluster.local", inZone, "CLUSTER.local"} {
				h.forget(t, h.steer(t, program, f, f.query(query(t, name))))
			}
			// What is not a plain query has nobody to go to.
			h.expect(t, program, f.query(put(query(t, "example.com"), 2, 0x81)), "passed_response")
			h.expect(t, program, f.query(rawQuery("\xc0\x0c")), "passed_label")
		}
		for _, c := range []struct {
			name string
			set  func(*testing.T)
			want func(*testing.T)
		}{
			{"never heard of", func(t *testing.T) { t.Helper(); h.setSilence(t, 0, 0) }, wantPassed},
			{"fresh", func(t *testing.T) { t.Helper(); h.beat(t, limit) }, wantPassed},
			{"a minute below the limit", func(t *testing.T) { t.Helper(); h.setSilence(t, limit-time.Minute, limit) }, wantPassed},
			{"just over the limit", func(t *testing.T) { t.Helper(); h.setSilence(t, limit+1, limit) }, wantFallback},
			{"far over the limit", func(t *testing.T) { t.Helper(); h.setSilence(t, limit+1, 1) }, wantFallback},
			{"back", func(t *testing.T) { t.Helper(); h.beat(t, limit) }, wantPassed},
			{"dead again", func(t *testing.T) { t.Helper(); h.setSilence(t, 2*limit, limit) }, wantFallback},
			{"goodbye", func(t *testing.T) { t.Helper(); h.beat(t, 0) }, wantPassed},
			{"long after goodbye", func(t *testing.T) { t.Helper(); h.setSilence(t, 2*limit, 0) }, wantPassed},
		} {
			t.Run(c.name, func(t *testing.T) {
				c.set(t)
				c.want(t)
			})
		}
	})
}

// A heartbeat changes the heartbeat, and the zones do not change it.
func TestHeartbeatConfig(t *testing.T) {
	h := newHarness(t)
	before, err := h.readConfig()
	if err != nil {
		t.Fatal(err)
	}
	earliest := monotonic(t)
	h.beat(t, 3*time.Second)
	latest := monotonic(t)
	h.replaceFallback(t, []string{testZone}, defaultBackends(), fallbackBackends())
	after, err := h.readConfig()
	if err != nil {
		t.Fatal(err)
	}
	if at := after.HeartbeatNs; at < earliest || at > latest {
		t.Errorf("heartbeat at %d, it was between %d and %d", at, earliest, latest)
	}
	want := before
	want.HeartbeatNs, want.HeartbeatLimitNs = after.HeartbeatNs, 3_000_000_000
	if after != want {
		t.Errorf("config %+v, want %+v", after, want)
	}
}

func TestFallbackEndpoints(t *testing.T) {
	h := newHarness(t)
	h.setSilence(t, time.Hour, time.Second)
	asFallback := steering{testScope, "steered_fallback", loIfindex, loIfindex}
	eachPath(t, h, func(t *testing.T, program Program, f family) {
		t.Helper()
		external, cluster := f.query(query(t, "example.com")), f.query(query(t, inZone))
		var ofFamily, ofOther []Backend
		for i, backend := range fallbackBackends() {
			if families[i].name == f.name {
				ofFamily = append(ofFamily, backend)
			} else {
				ofOther = append(ofOther, backend)
			}
		}

		h.replaceFallback(t, []string{testZone}, defaultBackends(), nil)
		h.expect(t, program, external, "passed_external")
		h.replaceFallback(t, []string{testZone}, defaultBackends(), ofFamily)
		h.forget(t, h.steerAs(t, program, fallbackOf(f), external, asFallback))
		h.replaceFallback(t, []string{testZone}, defaultBackends(), ofOther)
		h.expect(t, program, external, "passed_no_backend")
		// Taken away again.
		h.replaceFallback(t, []string{testZone}, defaultBackends(), nil)
		h.expect(t, program, external, "passed_external")

		// The cluster's names are never sent to a server outside.
		h.replaceFallback(t, []string{testZone}, nil, fallbackBackends())
		h.expect(t, program, cluster, "passed_no_backend")
		h.expect(t, program, f.query(query(t, testZone)), "passed_no_backend")
		h.forget(t, h.steerAs(t, program, fallbackOf(f), external, asFallback))

		// A name of a zone that is gone is any other's. Without zones all names are.
		h.replaceFallback(t, []string{"other.zone"}, defaultBackends(), fallbackBackends())
		h.forget(t, h.steerAs(t, program, fallbackOf(f), cluster, asFallback))
		h.replaceFallback(t, nil, nil, fallbackBackends())
		h.forget(t, h.steerAs(t, program, fallbackOf(f), cluster, asFallback))
		h.forget(t, h.steerAs(t, program, fallbackOf(f), external, asFallback))
	})
}

// A pod asks CoreDNS, and where another server has the port it is that one that is asked: they live on without the daemon,
// and know names that the host's upstream servers do not.
func TestFallbackScopes(t *testing.T) {
	h := newHarness(t)
	h.replaceFallback(t, []string{testZone}, defaultBackends(), fallbackBackends())
	h.setSilence(t, time.Hour, time.Second)
	h.replaceAllowed(t, everyone...)
	for scope := range scopeMax {
		err := h.ReplaceListeners([]Listener{{Address: listener4, Scope: scope}, {Address: listener6, Scope: scope}})
		if err != nil {
			t.Fatal(err)
		}
		needed := scope == ScopeHost || scope == ScopeKubeSwitch
		for _, f := range families {
			for _, program := range queryPrograms {
				if program == FromClient && (scope == ScopeHost || scope == ScopeTransparent) {
					continue // see TestLocalOnly
				}
				t.Run(fmt.Sprintf("%s/%s/%s", scope, f.name, program), func(t *testing.T) {
					// The second one is of the zone's shape, and only its name tells that it is not in it.
					for _, name := range []string{"example.com", "x.clustex.local", "."} {
						frame := f.query(query(t, name))
						if !needed {
							h.expectIn(t, program, frame, scope, "passed_external", nil)
							continue
						}
						h.forget(t, h.steerAs(t, program, fallbackOf(f), frame, steering{scope, "steered_fallback", loIfindex, loIfindex}))
					}
					h.forget(t, h.steerIn(t, program, f, f.query(query(t, inZone)), scope, loIfindex))
				})
			}
		}
	}
	h.wantInFlight(t, 0)
}

// The zone of all names is a zone as any other.
func TestFallbackBesideRootZone(t *testing.T) {
	h := newHarness(t)
	h.replaceFallback(t, []string{"."}, defaultBackends(), fallbackBackends())
	for _, silence := range []time.Duration{0, time.Hour} {
		h.setSilence(t, silence, time.Minute)
		for _, f := range families {
			h.forget(t, h.steer(t, FromHost, f, f.query(query(t, "example.com"))))
		}
	}
}
