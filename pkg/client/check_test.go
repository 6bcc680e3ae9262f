//go:build linux

package client

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/diagnose"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

func TestNdots(t *testing.T) {
	for _, test := range []struct {
		options []string
		want    int
	}{
		{nil, 1},
		{[]string{"timeout:2", "ndots:5"}, 5},
		{[]string{"ndots:5", "ndots:0"}, 0},
		{[]string{"ndots:99"}, 15},
		{[]string{"ndots:x"}, 1},
	} {
		if got := ndots(test.options); got != test.want {
			t.Errorf("%v: %d, want %d", test.options, got, test.want)
		}
	}
}

func TestCheckedHost(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("nameserver 127.0.0.1\nsearch example.com\noptions ndots:2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	report := status.Report{
		Attached:  true,
		Resolver:  status.Resolver{File: file, State: "ours", Owner: "plain file", Upstreams: []string{"192.0.2.53:53"}},
		Zones:     []status.Zone{{Name: "k8s.example"}},
		Endpoints: []status.Endpoint{{Address: "172.20.0.10:53"}},
		Forwarder: status.Forwarder{Listen: []string{"127.0.0.1:53"}},
		Datapath:  status.Datapath{Programs: []status.Program{{Name: "dns_from_backend"}, {Name: "dns_from_host"}}},
	}
	got := checkedHost(t.Context(), config.Default(), report)
	want := diagnose.CheckedHost{
		Attached: true, File: file, State: "ours", Owner: "plain file",
		Servers: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, Search: []string{"example.com"}, Dots: 2,
		Zones:     []string{"k8s.example"},
		Endpoints: []netip.AddrPort{netip.MustParseAddrPort("172.20.0.10:53")},
		Upstreams: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")},
		Listen:    []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53")},
		InKernel:  true,
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); diff != "" {
		t.Error(diff)
	}

	report.Attached, report.Resolver.File, report.Datapath.Programs = false, file+".missing", nil
	got = checkedHost(t.Context(), config.Default(), report)
	if len(got.Servers) > 0 || got.InKernel || got.Dots != 1 || len(got.Problems) > 0 {
		t.Errorf("without a file: %+v", got)
	}
	report.Resolver.File = "/dev/zero"
	if got := checkedHost(t.Context(), config.Default(), report); len(got.Problems) != 1 {
		t.Errorf("a file that can't be read: %q", got.Problems)
	}
	if diff := cmp.Diff([]string{config.DefaultZone}, got.Zones); diff != "" {
		t.Error(diff)
	}
}

func TestViewError(t *testing.T) {
	for _, test := range []struct {
		err               error
		noService, isDown bool
	}{
		{discovery.ErrServiceNotFound, true, false},
		{discovery.ErrForbidden, false, false},
		{discovery.ErrUnreachable, false, true},
		{discovery.ErrUnauthorized, false, true},
	} {
		got := viewError(test.err)
		if errors.Is(got, diagnose.ErrNoService) != test.noService || errors.Is(got, diagnose.ErrDown) != test.isDown {
			t.Errorf("%v: %v", test.err, got)
		}
	}
	if viewError(nil) != nil {
		t.Error("no error is one")
	}
}
