package e2e

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

// another builds the program as another version of it.
func another(t *testing.T, version string) (binary string) {
	t.Helper()
	binary = filepath.Join(t.TempDir(), "k2s-dnsbpf")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w -X main.version="+version, "-o", binary, "./cmd/k2s-dnsbpf")
	build.Dir = filepath.Join("..", "..")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return binary
}

// TestUpgrade: an attach by another version takes the place of the daemon, and back again, and no query is lost.
func TestUpgrade(t *testing.T) {
	newer := another(t, "newer")
	for name, args := range map[string][]string{"takeover": nil, "without BPF": {"--no-bpf"}} {
		t.Run(name, func(t *testing.T) {
			h := raise(t, lab.Options{})
			before := h.snapshot()
			h.attach(endpoints, ranges, args)
			pid := h.healthy().PID
			loads := []*load{
				startLoad(t, h.Host(), hostDNS, lab.Backend, lab.Backend4, 2*time.Millisecond),
				startLoad(t, h.Host(), hostDNS, lab.WWW, lab.WWW4, 5*time.Millisecond),
				startLoad(t, h.Worker(), switchDNS, lab.Backend, lab.Backend4, 2*time.Millisecond),
			}
			loads[0].more(t, 50)
			for _, binary := range []string{newer, h.binary} {
				if r := command(t, h.Host(), binary, "status"); !strings.Contains(r.stdout, "VERSION") {
					t.Errorf("status does not tell of two versions: %v", r)
				}
				must(t, h.Host(), append([]string{binary}, attachArgs(args...)...)...)
				now := h.healthy().PID
				if now == pid {
					t.Errorf("process %d is still the daemon", pid)
				}
				h.ended(pid)
				pid = now
				if r := command(t, h.Host(), binary, "status"); r.code != 0 || strings.Contains(r.stdout, "VERSION") {
					t.Errorf("%v", r)
				}
				for _, l := range loads {
					l.more(t, 50)
				}
				h.works()
			}
			for i, l := range loads {
				sent, lost, failed := l.finish()
				if len(lost) > 0 || failed > 0 {
					t.Errorf("load %d: %d of %d lost, %d failed", i, len(lost), sent, failed)
				}
			}
			h.detach()
			h.unchanged(before)
		})
	}
}

// TestUpgradeFails: where the successor can't attach the old daemon stays, or comes back.
func TestUpgradeFails(t *testing.T) {
	newer := another(t, "newer")
	h := raise(t, lab.Options{})
	before := h.snapshot()
	h.attach()
	h.healthy()
	r := command(t, h.Host(), newer, "attach", "--dns-endpoint", "198.51.100.77", "--wait", "2s")
	if r.code != 1 || !strings.Contains(r.stderr, "self-test") {
		t.Errorf("%v", r)
	}
	eventually(t, "the old one is back", func() error {
		if r := h.run("status"); r.code != 0 {
			return context.DeadlineExceeded
		}
		return nil
	})
	h.works()
	h.detach()
	h.unchanged(before)
}
