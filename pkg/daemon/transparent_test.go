//go:build linux

package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/plan"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
)

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
	if err := os.WriteFile(d.now.config.ResolvConf, []byte(file), 0o600); err != nil {
		t.Fatal(err)
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
	want := slices.Clone(d.now.resolvers)
	for _, file := range []string{"", "# half wri", "nameserver 192.0.2.53\n"} {
		writeResolv(t, d, file)
		d.followResolver()
		if !slices.Equal(d.now.resolvers, want) || d.now.problems[plan.ProblemTransparent] == "" {
			t.Errorf("%q: resolvers %v, problems %v", file, d.now.resolvers, d.now.problems)
		}
	}
	writeResolv(t, d, "nameserver 127.0.0.1\n")
	d.followResolver()
	if len(d.now.problems) != 0 {
		t.Errorf("problems %v of a file that names the resolver again", d.now.problems)
	}
}
