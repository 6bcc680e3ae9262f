//go:build linux

package daemon

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/resolvconf"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

func TestLoopbackResolvers(t *testing.T) {
	for _, c := range []struct {
		name, file string
		want       []string
	}{
		{"stub", "nameserver 127.0.0.53\noptions edns0\n", []string{"127.0.0.53"}},
		{"both families, in order", "nameserver ::1\nnameserver 127.0.0.1\n", []string{"::1", "127.0.0.1"}},
		{"among others", "nameserver 192.0.2.53\nnameserver 127.255.255.254\nnameserver 2001:db8::53\n", []string{"127.255.255.254"}},
		{"twice", "nameserver 127.0.0.1\nnameserver 127.0.0.1\nnameserver ::ffff:127.0.0.1\n", []string{"127.0.0.1"}},
		// What is sent to the unspecified address arrives on loopback.
		{"unspecified", "nameserver 0.0.0.0\nnameserver ::\n", []string{"127.0.0.1", "::1"}},
		{"none", "nameserver 192.0.2.53\nnameserver fe80::1%eth0\n", nil},
		{"commented out", "#nameserver 127.0.0.53\n", nil},
		{"empty", "", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := texts(loopbackResolvers(resolvconf.Parse([]byte(c.file)))); !slices.Equal(got, c.want) {
				t.Errorf("resolvers %v, want %v", got, c.want)
			}
		})
	}
}

// transparentDaemon is one that has a resolver file and is attached to nothing.
func transparentDaemon(t *testing.T, file string) *Daemon {
	t.Helper()
	c := config.Default()
	c.Resolver, c.StateDir, c.ResolvConf = config.ResolverTransparent, t.TempDir(), filepath.Join(t.TempDir(), "resolv.conf")
	d := New(c, "", zap.NewNop())
	var err error
	if d.journal, err = state.Open(c.StateDir); err != nil {
		t.Fatal(err)
	}
	writeResolv(t, d, file)
	return d
}

func writeResolv(t *testing.T, d *Daemon, file string) {
	t.Helper()
	if err := os.WriteFile(d.config.ResolvConf, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
}

// The forwarder asks the host's resolver, unless it was told whom to ask; what leads outside without it is for the time
// that the daemon is dead.
func TestTransparentUpstreams(t *testing.T) {
	d := transparentDaemon(t, "nameserver 127.0.0.1\nnameserver 192.0.2.53\n")
	if err := d.inspectResolver(); err != nil {
		t.Fatal(err)
	}
	d.routing.upstreams = []netip.AddrPort{endpointA}
	if got, want := d.upstreams(), []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53")}; !slices.Equal(got, want) {
		t.Errorf("upstreams %v, want %v", got, want)
	}
	d.config.Upstreams = []netip.AddrPort{endpointA}
	if got := d.upstreams(); !slices.Equal(got, d.config.Upstreams) {
		t.Errorf("upstreams %v, and %v were given", got, d.config.Upstreams)
	}
	d.config.Upstreams, d.config.Resolver = nil, config.ResolverTakeover
	if got := d.upstreams(); !slices.Equal(got, d.routing.upstreams) {
		t.Errorf("upstreams in another mode %v", got)
	}
}

func TestTransparentNeedsLoopback(t *testing.T) {
	d := transparentDaemon(t, "nameserver 192.0.2.53\n")
	err := d.inspectResolver()
	if !errors.Is(err, ErrNoLoopbackResolver) || !strings.Contains(err.Error(), "192.0.2.53") {
		t.Errorf("error %v, want one of no resolver on loopback", err)
	}
}

// A file that names no resolver any more is no reason to leave the one that there is.
func TestFollowResolverKeepsTheLast(t *testing.T) {
	d := transparentDaemon(t, "nameserver 127.0.0.1\n")
	if err := d.inspectResolver(); err != nil {
		t.Fatal(err)
	}
	d.network.resolvers = d.resolvers
	want := slices.Clone(d.resolvers)
	for _, file := range []string{"", "# half wri", "nameserver 192.0.2.53\n"} {
		writeResolv(t, d, file)
		d.followResolver()
		if !slices.Equal(d.resolvers, want) || d.problems["transparent"] == "" {
			t.Errorf("%q: resolvers %v, problems %v", file, d.resolvers, d.problems)
		}
	}
	writeResolv(t, d, "nameserver 127.0.0.1\n")
	d.followResolver()
	if len(d.problems) != 0 {
		t.Errorf("problems %v of a file that names the resolver again", d.problems)
	}
}
