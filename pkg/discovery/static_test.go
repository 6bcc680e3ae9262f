package discovery

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
)

func TestStatic(t *testing.T) {
	src := Static([]netip.AddrPort{
		netip.MustParseAddrPort("[fd00::10]:53"),
		netip.MustParseAddrPort("172.20.0.6:1053"),
		netip.MustParseAddrPort("172.20.0.5:53"),
		netip.MustParseAddrPort("[::ffff:172.20.0.5]:53"),
	})
	want := []string{"172.20.0.5:53", "172.20.0.6:1053", "[fd00::10]:53"}

	// A static source is ready before Run.
	snap, err := src.WaitForSync(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, addresses(snap)); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	if snap.Stale || snap.Reason != "" || snap.Updated.IsZero() || snap.Endpoints[0].Source != cluster.SourceStatic {
		t.Errorf("snapshot %+v", snap)
	}
	if got := <-src.Snapshots(); !got.Equal(snap) {
		t.Errorf("published %+v, want %+v", got, snap)
	}
	select {
	case got := <-src.Snapshots():
		t.Errorf("published twice: %+v", got)
	default:
	}
	if cur, ok := src.Current(); !ok || !cur.Equal(snap) {
		t.Errorf("current %+v, %t", cur, ok)
	}

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- src.Run(ctx) }()
	select {
	case err := <-done:
		t.Fatalf("Run returned %v before its context ended", err)
	default:
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}

func TestStaticInvalid(t *testing.T) {
	tests := []struct {
		name string
		in   []netip.AddrPort
		want string
		is   error
	}{
		{"none", nil, "--dns-endpoint", ErrNoEndpoints},
		{"zero value", []netip.AddrPort{{}}, "--dns-endpoint", nil},
		{"no port", []netip.AddrPort{netip.MustParseAddrPort("172.20.0.5:0")}, "172.20.0.5:0", nil},
		{"unspecified", []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:53")}, "0.0.0.0:53", nil},
		{"multicast", []netip.AddrPort{netip.MustParseAddrPort("224.0.0.1:53")}, "224.0.0.1:53", nil},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			src := Static(tc.in)
			_, err := src.WaitForSync(t.Context())
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
			if tc.is != nil && !errors.Is(err, tc.is) {
				t.Errorf("error %v is not %v", err, tc.is)
			}
			if s, ok := src.Current(); ok {
				t.Errorf("current %+v of an invalid source", s)
			}
			select {
			case s := <-src.Snapshots():
				t.Errorf("published %+v", s)
			default:
			}
		})
	}
}

// addresses returns the endpoints as text.
func addresses(s Snapshot) []string {
	out := make([]string, len(s.Endpoints))
	for i, e := range s.Endpoints {
		out[i] = e.Address.String()
	}
	return out
}
