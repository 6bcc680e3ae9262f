//go:build linux

package datapath

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/pktgen"
)

// kernelID of a program of a loaded object, as status has it of an attached one.
func kernelID(t *testing.T, d *Datapath, name Program) uint32 {
	t.Helper()
	program, err := d.program(name)
	if err != nil {
		t.Fatal(err)
	}
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return uint32(id)
}

// probed is a loaded object with its pins and a prober of it.
func probed(t *testing.T) (*Datapath, *Prober) {
	t.Helper()
	pinDir := newNamespace(t)
	d := load(t, Options{PinDir: pinDir})
	listeners := []Listener{{Address: listener4, Scope: ScopeHost}, {Address: listener6, Scope: ScopeHost}}
	if err := d.ReplaceListeners(listeners); err != nil {
		t.Fatal(err)
	}
	if err := d.ReplaceZones([]string{testZone}, defaultBackends(), nil, nil); err != nil {
		t.Fatal(err)
	}
	p, err := NewProber(pinDir, kernelID(t, d, FromHost))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return d, p
}

func TestProber(t *testing.T) {
	d, p := probed(t)
	elsewhere := netip.MustParseAddrPort("192.0.2.53:53")
	before, err := d.Counters()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		from, to netip.AddrPort
		message  []byte
		want     Verdict
	}{
		{client4, listener4, query(t, inZone), Verdict{ReasonSteered, backend4}},
		{client6, listener6, query(t, inZone), Verdict{ReasonSteered, backend6}},
		{client4, listener4, query(t, "www.example.com"), Verdict{Reason: "passed_external"}},
		{client4, listener4, query(t, inZone)[:pktgen.DNSLength+3], Verdict{Reason: "passed_malformed"}},
		{client4, elsewhere, query(t, inZone), Verdict{Reason: ReasonNotIntercepted}},
	} {
		got, err := p.Query(test.from, test.to, test.message)
		if err != nil || got != test.want {
			t.Errorf("%s: %+v, %v; want %+v", test.to, got, err, test.want)
		}
	}
	// The zones are the attached program's, as they are now.
	if err := d.ReplaceZones([]string{"example.com"}, defaultBackends(), nil, nil); err != nil {
		t.Fatal(err)
	}
	if got, err := p.Query(client4, listener4, query(t, inZone)); err != nil || got.Reason != "passed_external" {
		t.Errorf("a zone that has gone: %+v, %v", got, err)
	}

	after, err := d.Counters()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("probing counts as traffic:\n%s", diff)
	}
	if inFlight, err := d.InFlight(); err != nil || inFlight != 0 {
		t.Errorf("probing left %d queries in flight: %v", inFlight, err)
	}
}

func TestProberOtherVersion(t *testing.T) {
	d, _ := probed(t)
	if _, err := NewProber(d.options.PinDir, kernelID(t, d, FromClient)); !errors.Is(err, ErrOtherVersion) {
		t.Errorf("another program's ID: %v, want %v", err, ErrOtherVersion)
	}
}

func TestPinnedFlow(t *testing.T) {
	pinDir := newNamespace(t)
	h := &harness{Datapath: load(t, Options{PinDir: pinDir})}
	h.replaceScope(t, testScope)
	if err := h.ReplaceZones([]string{testZone}, defaultBackends(), nil, nil); err != nil {
		t.Fatal(err)
	}
	h.countedSince(t)
	for _, f := range families {
		wantFlow := func(when string) {
			t.Helper()
			server, found, err := PinnedFlow(pinDir, f.client, testID)
			if err != nil || !found || server != f.backend {
				t.Errorf("%s, %s: %s, %t, %v; want %s", f.name, when, server, found, err, f.backend)
			}
		}
		q := h.steer(t, FromHost, f, f.query(query(t, inZone)))
		wantFlow("in flight")
		h.deliver(t, FromHost, f, q, replyFrame(q, answer(t, q)))
		wantFlow("answered")
		otherPort := netip.AddrPortFrom(f.client.Addr(), f.client.Port()+1)
		if server, found, err := PinnedFlow(pinDir, otherPort, testID); err != nil || found {
			t.Errorf("%s, another port: %s, %t, %v", f.name, server, found, err)
		}
		if server, found, err := PinnedFlow(pinDir, f.client, testID+1); err != nil || found {
			t.Errorf("%s, another ID: %s, %t, %v", f.name, server, found, err)
		}
	}
}
