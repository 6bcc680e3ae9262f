//go:build linux

package datapath

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// replaceScope gives both listeners of the tests a scope.
func (h *harness) replaceScope(tb testing.TB, scope Scope) {
	tb.Helper()
	if err := h.ReplaceListeners([]Listener{{listener4, scope}, {listener6, scope}}); err != nil {
		tb.Fatal(err)
	}
}

// referenceFailure is a query's frame as its own SERVFAIL. Its OPT record begins at opt, 0 without one.
func referenceFailure(frame []byte, f family, opt int) []byte {
	want := rewritten(frame, f, f.listener, f.client)
	message := want[f.dnsOffset:]
	flags := binary.BigEndian.Uint16(message[2:])
	binary.BigEndian.PutUint16(message[2:], flags&0x0110|0x8082)
	if opt != 0 {
		if length := binary.BigEndian.Uint16(message[opt+9:]); length >= 4 {
			binary.BigEndian.PutUint16(message[opt+11:], dns.EDNS0PADDING)
			binary.BigEndian.PutUint16(message[opt+13:], length-4)
		}
	}
	return pktgen.RefreshChecksums(want)
}

var everyone = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

// Without an endpoint, a query to a server that is not ours is answered in place; in all other scopes it is passed.
func TestAnswerFailure(t *testing.T) {
	h := newHarness(t)
	h.replaceZones(t, []string{testZone})
	h.replaceAllowed(t, everyone...)
	bare := len(query(t, inZone))
	cookie := &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"}
	unknown := &dns.EDNS0_LOCAL{Code: 65001, Data: []byte{1, 2, 3}}
	for _, c := range []struct {
		name    string
		message []byte
		opt     int
	}{
		{"plain", query(t, inZone), 0},
		{"without recursion", query(t, inZone, func(m *dns.Msg) { m.RecursionDesired = false }), 0},
		{"AD and CD", query(t, inZone, func(m *dns.Msg) { m.AuthenticatedData, m.CheckingDisabled = true, true }), 0},
		{"EDNS", query(t, inZone, withOPT(4096)), bare},
		{"DNSSEC", query(t, inZone, withOPT(1232), func(m *dns.Msg) { m.IsEdns0().SetDo() }), bare},
		{"cookie", query(t, inZone, withOPT(1232, cookie)), bare},
		{"options at an odd offset", query(t, "odd.cluster.local", withOPT(1232, unknown, cookie)), len(query(t, "odd.cluster.local"))},
		{"options at an even offset", query(t, "even.cluster.local", withOPT(1232, unknown)), len(query(t, "even.cluster.local"))},
		{"the zone itself", query(t, "CLUSTER.local"), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, f := range families {
				frame := f.query(c.message)
				h.replaceScope(t, ScopeTransparent)
				outs := [][]byte{h.expectIn(t, FromHost, frame, ScopeTransparent, "answered_failure", nil)}
				h.replaceScope(t, ScopeShared)
				outs = append(outs, h.expectIn(t, FromHost, frame, ScopeShared, "answered_failure", nil), h.expectIn(t, FromClient, frame, ScopeShared, "answered_failure", nil))
				for _, out := range outs {
					if want := referenceFailure(frame, f, c.opt); !slices.Equal(out, want) {
						t.Errorf("%s:\ngot: %s\nwant: %s", f.name, pktgen.Dump(out), pktgen.Dump(want))
					}
					var reply dns.Msg
					if err := reply.Unpack(out[f.dnsOffset:]); err != nil || !reply.Response || reply.Rcode != dns.RcodeServerFailure || reply.Id != testID {
						t.Errorf("%s: no SERVFAIL: %v: %v", f.name, err, &reply)
					}
				}
				for _, scope := range []Scope{ScopeHost, ScopeKubeSwitch, ScopePod} {
					h.replaceScope(t, scope)
					h.expectIn(t, FromHost, frame, scope, "passed_no_backend", nil)
				}
			}
		})
	}
	h.wantInFlight(t, 0)
}

// A query to the host's own resolver for a cluster's name is steered as any other, and all else is the resolver's, also
// while the daemon is dead: the fallback is for servers that live in the daemon.
func TestTransparent(t *testing.T) {
	h := newHarness(t)
	h.replaceFallback(t, []string{testZone}, defaultBackends(), fallbackBackends())
	h.replaceScope(t, ScopeTransparent)
	for _, limit := range []time.Duration{0, time.Second} { // never taken for dead, and dead
		h.setSilence(t, time.Hour, limit)
		for _, f := range families {
			q := h.steerIn(t, FromHost, f, f.query(query(t, inZone)), ScopeTransparent, loIfindex)
			h.forget(t, q)
			h.expectIn(t, FromHost, f.query(query(t, "example.com")), ScopeTransparent, "passed_external", nil)
			h.expectIn(t, FromHost, f.query(query(t, inZone, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS })), ScopeTransparent, "passed_class", nil)
		}
	}
}

// At a KubeSwitch address where another server has the port, names in a zone are ours, whoever asks for them, and all else
// is that server's, whoever asks for it and whether the daemon lives or not.
func TestShared(t *testing.T) {
	h := newHarness(t)
	h.replaceFallback(t, []string{testZone}, defaultBackends(), fallbackBackends())
	h.replaceScope(t, ScopeShared)
	for _, limit := range []time.Duration{0, time.Second} { // never taken for dead, and dead
		h.setSilence(t, time.Hour, limit)
		for _, f := range families {
			inside, outside := f.query(query(t, inZone)), f.query(query(t, "example.com"))
			odd := f.query(query(t, inZone, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }))
			stray := f.query(put(query(t, inZone), 2, 0x81))
			h.replaceAllowed(t)
			h.expectIn(t, FromClient, inside, ScopeShared, "refused_source", nil)
			for _, allowed := range []bool{false, true} {
				if allowed {
					h.replaceAllowed(t, everyone...)
					h.forget(t, h.steerIn(t, FromClient, f, inside, ScopeShared, loIfindex))
				}
				for _, program := range queryPrograms {
					h.expectIn(t, program, outside, ScopeShared, "passed_external", nil)
					h.expectIn(t, program, odd, ScopeShared, "passed_class", nil)
					h.expectIn(t, program, stray, ScopeShared, "passed_response", nil)
				}
				h.forget(t, h.steerIn(t, FromHost, f, inside, ScopeShared, loIfindex))
				for _, frame := range [][]byte{inside, outside, odd, stray} {
					h.expectFilter(t, frame, notOurs)
				}
			}
		}
	}
}

// With every NAT port taken there is nowhere to send a query to.
func TestAnswerFailureWithoutSlot(t *testing.T) {
	h := newHarness(t)
	h.replaceScope(t, ScopeTransparent)
	h.setNATPorts(t, PortRange{First: 1024, Last: 1024})
	f := families[0]
	frame := f.query(query(t, inZone))
	q := h.steerIn(t, FromHost, f, frame, ScopeTransparent, loIfindex)
	out := h.expectIn(t, FromHost, frame, ScopeTransparent, "answered_failure", nil)
	if want := referenceFailure(frame, f, 0); !slices.Equal(out, want) {
		t.Errorf("got: %s\nwant: %s", pktgen.Dump(out), pktgen.Dump(want))
	}
	h.forget(t, q)
}
